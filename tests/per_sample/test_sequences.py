"""Sequences of layers, in one go and by the graph, against ordinary autograd.

In float64 to about 1e-14, and the papers' models in float32.
"""

import copy
import math

import pytest
import torch
from torch import nn

from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.models import zoo
from fedpact.per_sample import convolution, dense, norms, products, rules
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.per_sample.layout import Placement

WAYS = ("dense", "graph")


def check(reference, module, loss, x, y, tolerance=1e-13, rows=None, ways=WAYS):
    rows = reference.per_sample_loop(module, loss, x, y) if rows is None else rows
    reference.check(module, loss, x, y, tolerance, rows, ways=ways)


PAPERS = [
    (zoo.logistic, (1, 16, 16)),
    (zoo.mlp, (1, 16, 16)),
    (zoo.cnn, (1, 16, 16)),
    (zoo.cnn_padded, (3, 16, 16)),
]


@pytest.mark.parametrize(("make", "shape"), PAPERS)
def test_papers_models_agree_in_both_precisions(reference, make, shape):
    x, y = torch.rand(3, *shape), torch.arange(3)
    x[:, :, :9] = 0  # ties in pooling
    model = make(shape, 10)
    # Of float32 the inputs and weights, so that both precisions are asked the same.
    rows = reference.per_sample(model, cross_entropy, x, y)
    check(reference, copy.deepcopy(model).double(), cross_entropy, x.double(), y, 2e-14, rows)
    check(reference, model, cross_entropy, x, y, 5e-6, rows)


@pytest.mark.parametrize(("make", "shape"), PAPERS[2:])
def test_float32_norms_are_good_enough_to_clip_by(reference, make, shape):
    # The promise ‖c_j g_j‖ <= C (1 + 1e-5), at weights that make every record reach the clip.
    torch.manual_seed(1)
    model = make(shape, 10)
    x, y = torch.rand(4, *shape), torch.arange(4)
    layout = Placement(length=8)
    for kernel in reference.kernels(model, cross_entropy).values():
        for one in (slice(j, j + 1) for j in range(4)):
            found = kernel.clipped_sum(
                x[one], y[one], 0.01, lambda ell: 1e6 + 0 * ell, layout=layout
            )
            assert abs(float(found.double().norm()) / 0.01 - 1) <= 1e-5


@pytest.mark.parametrize(("channels", "bad"), [(1, math.nan), (3, 1e38)])
def test_records_that_are_not_finite_spoil_no_other_in_float32(reference, channels, bad):
    # Routines that work on several records at once must not carry a NaN across.
    shape = channels, 12, 12
    model = zoo.cnn_padded(shape, 10)
    x, y = torch.rand(19, *shape), torch.arange(19) % 10
    others = torch.tensor([j for j in range(19) if j not in (2, 7, 18)])
    layout = reference.standing(19)
    for kernel in reference.kernels(model, cross_entropy).values():
        expected = kernel.clipped_sum(x[others], y[others], 0.1, layout=layout.of(others))
        spoilt = x.clone()
        spoilt[2], spoilt[7, 0, 3, 4], spoilt[18] = bad, bad, -bad
        if bad == 1e38:  # finite, but its activations are not
            spoilt[7] = bad
        found = kernel.clipped_sum(spoilt, y, 0.1, layout=layout)
        assert (found - expected).norm() <= 1e-6 * 0.1


def test_batches_of_every_size_in_turn(reference):
    # Poisson batches: nothing of one pass may be left for the next.
    model = zoo.cnn((1, 16, 16), 10)
    x, y = torch.rand(17, 1, 16, 16), torch.arange(17) % 10
    kernels = reference.kernels(model, cross_entropy, "graph", "records").values()
    layout = Placement(length=8)
    for n in (3, 17, 0, 1, 16, 2):
        a, b = (k.clipped_sum(x[:n], y[:n], 0.1, layout=layout) for k in kernels)
        assert torch.allclose(a, b, rtol=0, atol=1e-6 * max(n, 1) * 0.1)
        assert bool(a.any()) == (n > 0)


@pytest.mark.parametrize("pool", [nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 2, ceil_mode=True)])
def test_pooled_convolutions_are_summed_sparsely(reference, monkeypatch, pool):
    """By the places of the windows' maxima, of images that lie by pixel; ties count once."""
    used = []

    class Seen(convolution.Pooled2d):
        def __init__(self, geometry, weight, x, g, pooled):
            used.append((x, pooled[0]))
            super().__init__(geometry, weight, x, g, pooled)

    monkeypatch.setattr(rules, "Pooled2d", Seen)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 5), nn.ReLU(inplace=True),
        pool, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * 4, 3),
    ).double()  # fmt: skip
    x, y = reference.data(5, 3, 12, 12).relu(), torch.arange(5) % 3
    check(reference, model, cross_entropy, x, y)
    (layer, maxima), *_ = used
    assert layer.shape[1] == 16
    assert maxima.shape[2:] == pool(torch.zeros(1, 1, 6, 6)).shape[2:]
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t, _ in used)


@pytest.mark.parametrize("settings", [{"stride": 2}, {"dilation": 2}, {"groups": 2}], ids=str)
def test_other_convolutions_before_a_pool_are_exact_too(reference, settings):
    """They are not summed by the places of maxima, which would name other patches."""
    layers = nn.Conv2d(64, 4, 3, **settings), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    model = nn.Sequential(*layers, nn.LazyLinear(3)).double()
    x, y = reference.data(4, 64, 9, 9), torch.arange(4) % 3
    model(x)
    check(reference, model, cross_entropy, x, y, ways=("graph",))


def test_the_loss_may_be_any(reference):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).double()
    x, y = reference.data(5, 4), reference.data(5, 3, seed=1)
    # Expanded, shared and partial gradients: none of them may be written over.
    for loss in (
        lambda out, y: out.sum(1),
        lambda out, y: (out * y).sum(1),
        lambda out, y: out[:, 0] ** 2 + y[:, 1],
    ):
        kept = y.clone()
        reference.check(model, loss, x, y)
        assert y.equal(kept)


@pytest.mark.parametrize("wrong", [3, -100, 2**40])
def test_record_with_an_unknown_class_is_left_out_in_every_way(reference, wrong):
    """With the bits that the sum has without it, whichever way the model takes."""
    x, y = reference.data(6, 4), torch.tensor([0, 1, 2, wrong, 1, 0])
    good = y != wrong
    model = nn.Sequential(nn.Linear(4, 3)).double()
    for way, kernel in reference.kernels(model, cross_entropy).items():
        w = kernel.model.vector.clone()
        layout = reference.standing(6)
        whole, rest = (x, y, layout), (x[good], y[good], layout.of(good))
        for take in (
            lambda x, y, layout, k=kernel: k.clipped_sum(x, y, 1.0, layout=layout),
            lambda x, y, layout, k=kernel, w=w: k.clipped_difference(
                x, y, w, w + 0.1, 1.0, layout=layout
            ),
        ):
            assert torch.allclose(take(*whole), take(*rest), rtol=0, atol=1e-14), way
        assert kernel.clipped_sum(x, y, 1.0).any(), way
        assert kernel.losses(x, y).isfinite().equal(good), way
        assert not kernel.clipped_sum(x[~good], y[~good], 1.0).any(), way


def test_frozen_parameters_are_passed_through(reference):
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 9, 4), nn.Tanh(), nn.Linear(4, 3),
    ).double()  # fmt: skip
    x, y = reference.data(4, 1, 12, 12), torch.tensor([0, 1, 2, 0])
    for frozen in ([0, 3], [6], [0, 8]):
        for i in (0, 3, 6, 8):
            model[i].requires_grad_(i not in frozen)
        check(reference, model, cross_entropy, x, y)
    model.requires_grad_(True)
    model[3].weight.requires_grad_(False)
    model[6].bias.requires_grad_(False)
    check(reference, model, cross_entropy, x, y)


def test_hooks_added_later_are_respected(reference):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y, loss = reference.data(5, 4), torch.arange(5) % 2, cross_entropy
    kernel = PerSampleKernel(FlatModel(model), loss)
    assert kernel.way(x, y) == "dense"
    before = kernel.clipped_sum(x, y, math.inf)
    handle = model[0].register_forward_hook(lambda _m, _args, output: output * 3)
    rows = reference.per_sample_loop(model, loss, x, y)
    assert reference.error(kernel.clipped_sum(x, y, math.inf), rows) < 1e-13
    assert kernel.way(x, y) == "graph"
    handle.remove()
    assert torch.equal(kernel.clipped_sum(x, y, math.inf), before)
    model[1].forward = lambda h: torch.sigmoid(h)
    rows = reference.per_sample_loop(model, loss, x, y)
    assert reference.error(kernel.clipped_sum(x, y, math.inf), rows) < 1e-13


def test_models_that_are_not_dense_sequences(reference):
    class Twice(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * 2

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    layer, tied, replaced = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    tied.weight = layer.weight
    replaced.forward = lambda x: x.sin()
    hooked = nn.Sequential(nn.Linear(4, 4))
    hooked[0].register_forward_pre_hook(lambda _m, args: (args[0] + 1,))
    for model in (
        Twice(nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), Doubled(4, 2)),
        nn.Sequential(nn.Linear(4, 4), replaced),
        nn.Sequential(layer, nn.Tanh(), layer),
        nn.Sequential(layer, tied),
        nn.Sequential(nn.Linear(4, 4), reference.Shift(4)),
        nn.Sequential(nn.Linear(4, 4), nn.PReLU()),
        nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)),
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
        reference.Apply(lambda m, x: m.a(x), a=nn.Linear(4, 4)),
        hooked,
        nn.Conv2d(1, 1, 1),
    ):
        assert PerSampleKernel(FlatModel(model.double()), cross_entropy)._passes.dense is None


@pytest.mark.parametrize("width", [3, 1024, 1025, 2600])
def test_norms_of_wide_records_are_good_to_1e_6_and_independent(width):
    x = torch.randn(9, width, generator=torch.Generator().manual_seed(0))
    x[3] *= 1e15
    found = dense._lengths(x)
    assert found == pytest.approx(x.double().square().sum(1).numpy(), rel=1e-6, abs=0)
    assert found.tolist() == [dense._lengths(one[None])[0] for one in x]


@pytest.mark.parametrize(("count", "width"), [(0, 5), (1, 5), (5, 0), (700, 2600), (5000, 100)])
def test_exact_sums_are_those_of_float64(count, width):
    """By parts of CHUNK_BYTES; numbers of 1e6 that cancel would cost float32 all digits."""
    draws = torch.Generator().manual_seed(0)
    own, read = (torch.randn(n, count, generator=draws) for n in (10, width))
    own[0] = 1e6 * torch.tensor([1.0, -1.0]).repeat(count)[:count]
    found = dense._product(own, read, exact=True)
    expected = own.double() @ read.double().t()
    assert found.dtype == torch.float64
    limit = 1e-13 * own.double().abs() @ read.double().abs().t()
    assert ((found - expected).abs() <= limit).all()
    assert norms.CHUNK_BYTES < 8 * 5000 * 100


def test_both_products_of_matrices_agree(monkeypatch):
    x, weight, bias = torch.randn(7, 300), torch.randn(260, 300), torch.randn(260)
    exact = x.double() @ weight.double().t() + bias.double()
    g = torch.randn(7, 260)
    back = g.double() @ weight.double()
    for _ in range(2):
        assert (products.linear(x, weight, bias) - exact).abs().max() < 1e-4
        assert (products.linear(g, weight.t()) - back).abs().max() < 1e-4
        monkeypatch.setattr(products, "_onednn", lambda: None)
