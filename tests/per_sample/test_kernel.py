"""The clipped sum against torch.func in float64, its bounds, and what a batch may hold."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.per_sample.small import cnn
from tests.spread import spread
from torch import nn

from fedpact.common.errors import InputError, ModelError
from fedpact.common.losses import cross_entropy, squared_error
from fedpact.common.params import FlatModel
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel
from fedpact.per_sample.layout import Placement

WAYS = ("dense", "graph", "records")


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def batch(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (count,), generator=generator)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    count=st.integers(0, 9),
    seed=st.integers(0, 99),
    exponent=st.floats(-9, 9) | st.just(math.inf),
    raw=st.lists(st.floats(-1e12, 1e12), min_size=9, max_size=9),
)
def test_any_weights_and_clip(reference, count, seed, exponent, raw):
    module, clip = mlp(seed), 10**exponent
    x, y = batch(count, seed)
    w = torch.tensor(raw[:count], dtype=torch.float64)
    kernel = PerSampleKernel(FlatModel(copy.deepcopy(module)), cross_entropy)
    found = kernel.clipped_sum(x, y, clip, reference.dealt(w))
    if count == 0:
        assert torch.equal(found, torch.zeros_like(found))
    else:
        rows = reference.per_sample_loop(module, cross_entropy, x, y)
        assert reference.error(found, reference.clipped(rows, clip, w)) < 1e-12


def test_weights_follow_the_losses_and_are_not_differentiated(reference):
    module, (x, y) = mlp(), batch(7)
    rows = reference.per_sample(module, cross_entropy, x, y)
    losses = F.cross_entropy(module(x), y, reduction="none").detach()
    model = FlatModel(module)
    private, plain = PerSampleKernel(model, cross_entropy), PlainKernel(model, cross_entropy)
    expected = reference.clipped(rows, math.inf, 1 + 0.5 * (losses - 1.2))
    for found in (
        private.clipped_sum(x, y, math.inf, lambda ell: 1 + 0.5 * (ell - 1.2)),
        plain.weighted_sum(x, y, lambda ell: 1 + 0.5 * (ell - 1.2)),
    ):
        assert reference.error(found, expected) < 1e-12
    for kernel in (private, plain):
        assert torch.allclose(kernel.losses(x, y), losses, rtol=1e-12)
        assert not kernel.losses(x, y).requires_grad


def test_an_empty_batch_gives_zeros_without_touching_the_model():
    class Untouchable(nn.Linear):
        def forward(self, x):
            raise RuntimeError("touched")

    for kind in (PerSampleKernel, PlainKernel):
        kernel = kind(FlatModel(Untouchable(3, 2)), cross_entropy)
        x, y = torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)
        found = (
            kernel.clipped_sum(x, y, 1.0)
            if isinstance(kernel, PerSampleKernel)
            else kernel.weighted_sum(x, y)
        )
        assert torch.equal(found, torch.zeros(8))
        assert kernel.losses(x, y).shape == (0,)


@pytest.mark.parametrize("convolution", [True, False])
def test_record_not_finite_adds_nothing_and_disturbs_no_other(reference, convolution):
    if convolution:
        module = cnn().double()
        given = torch.rand(6, 1, 12, 12, dtype=torch.float64), torch.arange(6) % 3
    else:
        module, given = mlp(), batch(6)
    others = torch.tensor([0, 1, 3, 5])
    layout = reference.standing(6)
    ways = WAYS[:2] if convolution else WAYS
    for kernel in reference.kernels(module, cross_entropy, *ways).values():
        expected = kernel.clipped_sum(
            given[0][others], given[1][others], 0.5, layout=layout.of(others)
        )
        sums = []
        for bad in (math.nan, math.inf, 1e300):
            x, y = given[0].clone(), given[1]
            x[2], x[4] = bad, -bad
            sums.append(kernel.clipped_sum(x, y, 0.5, layout=layout))
            assert torch.allclose(sums[-1], expected, rtol=0, atol=1e-14)
            assert not kernel.clipped_sum(x[2:3], y[2:3], 0.5).any()
        # What a bad record holds changes no bit of the others'.
        assert all(torch.equal(one, sums[0]) for one in sums)


def test_a_weight_that_is_not_finite_counts_as_zero(reference):
    module, (x, y) = mlp(), batch(4)
    rows = reference.per_sample(module, cross_entropy, x, y)
    for kernel in reference.kernels(module, cross_entropy, *WAYS).values():
        for bad in (math.nan, math.inf, -math.inf):
            w = torch.tensor([1.0, bad, 0.5, 2.0], dtype=torch.float64)
            expected = reference.clipped(rows, 0.3, w.nan_to_num(0, 0, 0))
            found = kernel.clipped_sum(x, y, 0.3, reference.dealt(w))
            assert reference.error(found, expected) < 1e-12


def test_a_gradient_that_is_not_finite_behind_a_finite_loss(reference):
    # sqrt has a finite value and an infinite derivative at 0.
    def root(outputs, y):
        return (outputs - y[:, None]).abs().sum(1).sqrt()

    module = nn.Linear(2, 1, bias=False).double()
    x, y = torch.randn(4, 2).double(), torch.randn(4).double()
    y[1] = module(x)[1, 0].detach()
    good = torch.tensor([0, 2, 3])
    rows = reference.per_sample(module, root, x[good], y[good])
    for kernel in reference.kernels(module, root, *WAYS).values():
        found = kernel.clipped_sum(x, y, 0.3)
        assert reference.error(found, reference.clipped(rows, 0.3)) < 1e-12


def test_a_loss_that_is_not_finite_with_a_finite_gradient(reference):
    def shifted(outputs, y):
        return outputs.sum(1) + y

    module, x = nn.Linear(2, 1).double(), torch.randn(4, 2).double()
    y = torch.tensor([0.0, torch.inf, torch.nan, 1.0]).double()
    rows = reference.per_sample(module, shifted, x[[0, 3]], y[[0, 3]])
    for kernel in reference.kernels(module, shifted, *WAYS).values():
        found = kernel.clipped_sum(x, y, 0.3)
        assert reference.error(found, reference.clipped(rows, 0.3)) < 1e-12


def test_a_record_without_gradient_keeps_its_weight_of_nothing():
    kernel = PerSampleKernel(FlatModel(nn.Linear(2, 2, bias=False)), squared_error)
    assert torch.equal(
        kernel.clipped_sum(torch.zeros(3, 2), torch.zeros(3, 2), 1.0), torch.zeros(4)
    )


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan, -math.inf])
def test_a_clip_that_bounds_nothing_is_refused(clip):
    kernel = PerSampleKernel(FlatModel(mlp()), cross_entropy)
    with pytest.raises(InputError, match="clip"):
        kernel.clipped_sum(*batch(2), clip)


@pytest.mark.parametrize("way", ["graph", "records"])
def test_a_loss_or_weights_that_are_not_one_a_record_are_refused(reference, way):
    reducing = reference.forced(way, mlp(), lambda out, y: F.cross_entropy(out, y))
    for ask in (lambda *xy: reducing.clipped_sum(*xy, 1.0), reducing.losses):
        with pytest.raises(ModelError, match="one a record"):
            ask(*batch(3))
    kernel = reference.forced(way, mlp(), cross_entropy)
    with pytest.raises(ModelError, match="one each"):
        kernel.clipped_sum(*batch(3), 1.0, lambda losses: losses.sum())


def test_half_precision_is_refused():
    with pytest.raises(ModelError, match="bfloat16"):
        PerSampleKernel(FlatModel(mlp().bfloat16()), cross_entropy)


@pytest.mark.parametrize("channels", [0, 3])
def test_the_plain_kernel_is_the_private_one_without_a_clip(reference, channels):
    """Of numbers and of images, which it takes in another layout."""
    module, (x, y) = mlp(), batch(8)
    if channels:
        x, layers = torch.randn(8, channels, 8, 8).double(), list(cnn())
        layers[0], layers[7:] = nn.Conv2d(channels, 16, 5), [nn.Linear(32, 3)]
        layers[3] = nn.Conv2d(16, 32, 3, padding=1)
        module = nn.Sequential(*layers).double()
    model = FlatModel(module)
    plain, private = PlainKernel(model, cross_entropy), PerSampleKernel(model, cross_entropy)
    w = torch.linspace(-1, 3, 8).double()
    rows = reference.per_sample(module.requires_grad_(True), cross_entropy, x, y)
    # Taking turns: neither kernel may rest on flags that the other sets.
    for _ in range(2):
        for weights, given_weights in ((None, None), (lambda _: w, w)):
            expected = reference.clipped(rows, math.inf, given_weights)
            assert reference.error(plain.weighted_sum(x, y, weights), expected) < 1e-12
            given = None if weights is None else reference.dealt(w)
            found = private.clipped_sum(x, y, math.inf, given)
            assert reference.error(found, expected) < 1e-12
        loss, mean = plain.mean_over(x, y, model.vector.clone())
        assert reference.error(mean, reference.clipped(rows, math.inf, None) / 8) < 1e-12
        assert loss == pytest.approx(float(private.losses(x, y).mean()), rel=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_sums_and_losses_follow_the_weights_of_the_model(reference, way):
    x, y = batch(5)
    kernel = reference.forced(way, mlp(), cross_entropy)
    kernel.clipped_sum(x, y, 1.0)
    kernel.model.load(torch.randn_like(kernel.model.vector))
    module = kernel.model.module
    rows = reference.per_sample(module, cross_entropy, x, y)
    assert reference.error(kernel.clipped_sum(x, y, 0.1), reference.clipped(rows, 0.1)) < 1e-12
    losses = cross_entropy(module(x), y).detach()
    assert torch.allclose(kernel.losses(x, y), losses, rtol=1e-12, atol=0)


@pytest.mark.parametrize("way", WAYS)
def test_no_state_of_the_caller_matters_or_is_changed(reference, way):
    x, y = batch(5)
    kernel = reference.forced(way, mlp(), cross_entropy)
    module = kernel.model.module
    rows = reference.per_sample(module, cross_entropy, x, y)
    x.requires_grad_(True)
    with torch.no_grad():
        found = kernel.clipped_sum(x, y, 0.1)
    assert reference.error(found, reference.clipped(rows, 0.1)) < 1e-12
    assert x.grad is None
    assert not found.requires_grad
    assert not any(m._forward_hooks for m in module.modules())
    assert all(p.requires_grad and p.grad is None for p in module.parameters())


@pytest.mark.parametrize(
    ("state", "verified", "way"),
    spread((partial(torch.autocast, "cpu"), torch.inference_mode), (False, True), WAYS, one_in=3),
)
def test_torch_settings_of_the_caller_change_no_bit(reference, way, verified, state):
    """Norms of half precision would let a record add more than the clip.

    Nor later: how a model is given records is found out once, at the first sum or by `verify`.
    """

    def found(kernel):
        x, y = (v.float() if v.is_floating_point() else v.clone() for v in batch(5))
        w = kernel.model.vector.clone()
        if verified:
            kernel.verify(x, y)
        return [
            kernel.clipped_sum(x, y, 0.1),
            kernel.clipped_difference(x, y, w, w + 1, 0.1),
            kernel.losses(x, y),
        ]

    expected = found(reference.forced(way, mlp().float(), cross_entropy))
    assert expected[0].any()
    asked = reference.forced(way, mlp().float(), cross_entropy)
    with state():
        assert all(map(torch.equal, found(asked), expected))
        assert torch.is_autocast_enabled("cpu") != torch.is_inference_mode_enabled()
    assert all(map(torch.equal, found(asked), expected))


@pytest.mark.parametrize("way", WAYS)
def test_kernels_in_threads_do_not_disturb_each_other(reference, way):
    """Nor does one that is traced while another sums."""
    x, y = batch(16)

    def sums(seed, count):
        kernel = reference.forced(way, models[seed], cross_entropy)
        layout = Placement(length=16)
        return [kernel.clipped_sum(x, y, 0.1, layout=layout) for _ in range(count)]

    models = [mlp(seed) for seed in range(4)]
    expected = [sums(seed, 1)[0] for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(sums, range(4), [5] * 4))
    for seed in range(4):
        assert len(found[seed]) == 5
        assert all(torch.equal(v, expected[seed]) for v in found[seed])
