"""The kernel's levels, in one go, by plan and by tape, against vmap(grad) or ordinary autograd.

Random chains of layers in float64 to about 1e-14, and the papers' models in float32.
"""

import copy
import math
from itertools import pairwise

import pytest
import torch
from fedpact.persample.stages import Other
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedpact.errors import ModelError
from fedpact.losses import cross_entropy, squared_error
from fedpact.models import papers
from fedpact.params import FlatModel
from fedpact.persample import products
from fedpact.persample.kernel import PerSampleKernel

SETTINGS = settings(max_examples=80, deadline=None, derandomize=True)
# torch warns of its own copy for padding="same" with an even kernel.
asymmetric = pytest.mark.filterwarnings("ignore:Using padding='same'")


def levels(module, loss):
    """Kernels of copies of the model: by its plan, by the tape, in one go where it can be."""
    planned, taped, dense = (
        PerSampleKernel(FlatModel(copy.deepcopy(module)), loss) for _ in range(3)
    )
    assert planned._level.plan is not None
    planned._level.dense = taped._level.dense = taped._level.plan = None
    return [planned, taped, *([dense] if dense._level.dense else [])]


def check(reference, module, loss, x, y, tolerance=1e-13, rows=None):
    rows = reference.per_sample_loop(module, loss, x, y) if rows is None else rows
    middle = float(rows.norm(dim=1).median()) or 1.0
    w = torch.linspace(-0.5, 2, len(x), dtype=torch.float64)
    for kernel in levels(module, loss):
        had_plan = kernel._level.plan is not None
        for clip, weights in ((math.inf, None), (middle, None), (1e-3 * middle, w)):
            given_weights = None if weights is None else (lambda ell: w.to(ell.dtype))
            found = kernel.clipped_sum(x, y, clip, given_weights)
            assert reference.error(found, reference.clipped(rows, clip, weights)) < tolerance
        losses = loss(module(x), y).detach()
        assert torch.allclose(kernel.losses(x, y), losses, rtol=10 * tolerance)
        assert (kernel._level.plan is not None) == had_plan, "the plan must not have been given up"


@st.composite
def convolutions(draw, channels, out, small):
    if small:
        return nn.Conv2d(channels, out, 1)
    size, stride = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    padding = draw(st.sampled_from([0, 1, "same"] if stride == 1 else [0, 1]))
    return nn.Conv2d(
        channels, out, size, stride, padding if size > 1 else 0,
        groups=draw(st.sampled_from([1, 1, 2])) if channels % 2 == 0 else 1,
        bias=draw(st.booleans()), padding_mode=draw(st.sampled_from(["zeros", "zeros", "reflect"])),
    )  # fmt: skip


@st.composite
def image_layers(draw):
    """Layers [B, C, H, W] -> [B, C', H', W'], ReLU before and behind pooling, overlaps, others."""
    channels, layers, side = draw(st.sampled_from([1, 3, 8])), [], 13
    start = channels
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["conv", "conv", "pool", "curve", "norm", "other", "flat"]))
        if kind == "conv":
            out = draw(st.sampled_from([2, 8, 16]))
            layers.append(draw(convolutions(channels, out, small=side <= 3)))
            channels = out
        elif kind == "pool" and side > 3:
            size, stride = draw(st.sampled_from([(2, 2), (3, 2), (2, 1)]))
            layers.append(nn.MaxPool2d(size, stride, draw(st.integers(0, 1)),
                                       ceil_mode=draw(st.booleans())))  # fmt: skip
        elif kind == "curve":
            layers.append(draw(st.sampled_from([nn.Tanh(), nn.Sigmoid()])))
        elif kind == "norm":
            layers.append(nn.GroupNorm(1, channels))
        elif kind == "other" and side > 3:
            layers.append(draw(st.sampled_from([nn.AvgPool2d(2), nn.Softplus(), nn.Identity()])))
        if draw(st.booleans()):
            # Autograd itself refuses to overwrite what a tanh, for one, has to remember.
            free = bool(layers) and isinstance(layers[-1], nn.Conv2d | nn.MaxPool2d | nn.GroupNorm)
            relu = nn.ReLU(inplace=free and draw(st.booleans()))
            layers.append(relu if draw(st.booleans()) else nn.Sequential(relu))
        side = nn.Sequential(*layers)(torch.zeros(1, start, 13, 13)).shape[-1]
    return start, layers


@asymmetric
@SETTINGS
@given(image_layers(), st.integers(1, 5), st.integers(0, 2**16))
def test_chains_of_image_layers(reference, case, batch, seed):
    channels, layers = case
    torch.manual_seed(seed)
    x = torch.randn(batch, channels, 13, 13).double()
    width = nn.Sequential(*layers)(x[:1].float()).numel()
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 3)).double()
    check(reference, model, cross_entropy, x, torch.arange(batch) % 3)


@st.composite
def row_layers(draw):
    widths = draw(st.lists(st.integers(1, 9), min_size=2, max_size=4))
    layers = []
    for inputs, outputs in pairwise(widths):
        layers.append(nn.Linear(inputs, outputs, bias=draw(st.booleans())))
        if draw(st.booleans()):
            layers.append(nn.LayerNorm(outputs))
        first = [nn.Identity(), nn.ReLU(), nn.ReLU(inplace=True), nn.ELU(inplace=True), nn.Tanh()]
        layers.append(draw(st.sampled_from(first)))
        layers += draw(st.lists(st.sampled_from([nn.ReLU(), nn.Sigmoid(), nn.GELU()]), max_size=1))
    return widths[0], draw(st.lists(st.integers(1, 3), max_size=1)), layers


@SETTINGS
@given(row_layers(), st.integers(1, 5), st.integers(0, 2**16))
def test_chains_of_row_layers(reference, case, batch, seed):
    width, positions, layers = case
    torch.manual_seed(seed)
    model = nn.Sequential(*layers, nn.Flatten()).double()
    x = torch.randn(batch, *positions, width).double()
    check(reference, model, squared_error, x, torch.randn_like(model(x)).detach())


PAPERS = [
    (papers.logistic, (1, 28, 28)),
    (papers.mlp, (1, 28, 28)),
    (papers.cnn, (1, 28, 28)),
    (papers.cnn_padded, (1, 28, 28)),
    (papers.cnn_padded, (3, 32, 32)),
]


@pytest.mark.parametrize(("make", "shape"), PAPERS)
@pytest.mark.parametrize("batch", [1, 13])
def test_the_papers_models_have_plans_and_agree_in_both_precisions(reference, make, shape, batch):
    torch.manual_seed(0)
    x, y = torch.rand(batch, *shape), torch.arange(batch) % 10
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
    for kernel in levels(model, cross_entropy):
        for j in range(4):
            one = slice(j, j + 1)
            found = kernel.clipped_sum(x[one], y[one], 0.01, lambda ell: 1e6 + 0 * ell)
            assert abs(float(found.double().norm()) / 0.01 - 1) <= 1e-5


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_records_that_are_not_finite_spoil_no_other_in_float32(shape, bad):
    # Routines that work on several records at once must not carry a NaN across: the others' norms
    # decide which records are summed, so each sum equals that without the bad ones, to the bit.
    torch.manual_seed(0)
    model = papers.cnn_padded(shape, 10)
    x, y = torch.rand(19, *shape), torch.arange(19) % 10
    others = torch.tensor([j for j in range(19) if j not in (2, 7, 18)])
    for kernel in levels(model, cross_entropy):
        expected = kernel.clipped_sum(x[others], y[others], 0.1)
        spoilt = x.clone()
        spoilt[2], spoilt[7, 0, 3, 4], spoilt[18] = bad, bad, -bad
        if bad == 1e38:  # finite, but its activations are not
            spoilt[7] = bad
        assert torch.equal(kernel.clipped_sum(spoilt, y, 0.1), expected)


def test_batches_of_every_size_in_turn(reference):
    # Poisson batches: nothing of one pass may be left for the next.
    torch.manual_seed(0)
    model = papers.cnn((1, 28, 28), 10)
    x, y = torch.rand(17, 1, 28, 28), torch.arange(17) % 10
    planned, taped = levels(model, cross_entropy)
    for n in (3, 17, 0, 1, 16, 2):
        a, b = (k.clipped_sum(x[:n], y[:n], 0.1) for k in (planned, taped))
        assert torch.allclose(a, b, rtol=0, atol=1e-6 * max(n, 1) * 0.1)
        assert bool(a.any()) == (n > 0)


def test_the_loss_may_be_any_and_ignore_the_outputs(reference):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).double()
    x, y = reference.data(5, 4), reference.data(5, 3, seed=1)
    # Expanded, shared and partial gradients: what is overwritten must be the plan's own.
    for loss in (
        lambda out, y: out.sum(1),
        lambda out, y: (out * y).sum(1),
        lambda out, y: out[:, 0] ** 2 + y[:, 1],
    ):
        kept = y.clone()
        check(reference, model, loss, x, y)
        assert y.equal(kept)
    absent = PerSampleKernel(FlatModel(model), lambda out, y: y.sum(1))
    assert torch.equal(absent.clipped_sum(x, y, 1.0), torch.zeros(15).double())


def test_ignored_and_wrong_targets_are_those_of_cross_entropy(reference):
    model = nn.Sequential(nn.Linear(4, 3)).double()
    x, y = reference.data(5, 4), torch.tensor([0, -100, 2, 1, -100])
    check(reference, model, cross_entropy, x, y)
    for kernel in levels(model, cross_entropy):
        with pytest.raises(IndexError):
            kernel.clipped_sum(x, torch.full((5,), 3), 1.0)


def test_frozen_parameters_are_passed_through(reference):
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 9, 4), nn.Tanh(), nn.Linear(4, 3),
    ).double()  # fmt: skip
    x, y = reference.data(4, 1, 12, 12), torch.tensor([0, 1, 2, 0])
    for frozen in ([0], [3], [6], [0, 3], [8], [0, 8]):
        for i in (0, 3, 6, 8):
            model[i].requires_grad_(i not in frozen)
        check(reference, model, cross_entropy, x, y)
    model.requires_grad_(True)
    model[3].weight.requires_grad_(False)
    model[6].bias.requires_grad_(False)
    check(reference, model, cross_entropy, x, y)


@pytest.mark.parametrize("loss", [squared_error, cross_entropy])
def test_hooks_added_later_are_respected(reference, loss):
    """By the plan, and in one go, which takes the second loss alone."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = reference.data(5, 4)
    y = torch.arange(5) % 2 if loss is cross_entropy else reference.data(5, 2, seed=1)
    kernel = PerSampleKernel(FlatModel(model), loss)
    assert (kernel._level.dense is not None) == (loss is cross_entropy)
    before = kernel.clipped_sum(x, y, math.inf)
    handle = model[0].register_forward_hook(lambda _m, _args, output: output * 3)
    rows = reference.per_sample_loop(model, loss, x, y)
    assert reference.error(kernel.clipped_sum(x, y, math.inf), rows) < 1e-13
    handle.remove()
    assert torch.equal(kernel.clipped_sum(x, y, math.inf), before)
    model[1].forward = lambda h: torch.sigmoid(h)
    rows = reference.per_sample_loop(model, loss, x, y)
    assert reference.error(kernel.clipped_sum(x, y, math.inf), rows) < 1e-13


def test_what_is_no_chain_of_layers_has_no_plan(reference):
    class Twice(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * 2

    layer, tied = nn.Linear(4, 4), nn.Linear(4, 4)
    tied.weight = layer.weight
    hooked = nn.Sequential(nn.Linear(4, 4))
    hooked[0].register_forward_pre_hook(lambda _m, args: (args[0] + 1,))
    for model in (
        Twice(nn.Linear(4, 4)),
        nn.Sequential(layer, nn.Tanh(), layer),
        nn.Sequential(layer, tied),
        nn.Sequential(nn.Linear(4, 4), reference.Shift(4)),
        nn.Sequential(nn.Linear(4, 4), nn.PReLU()),
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
        reference.Apply(lambda m, x: m.a(x), a=nn.Linear(4, 4)),
        hooked,
    ):
        kernel = PerSampleKernel(FlatModel(model.double()), squared_error)
        assert kernel._level.plan is None
        x, y = reference.data(3, 4), reference.data(3, 4, seed=1)
        rows = reference.per_sample_loop(model, squared_error, x, y)
        assert reference.error(kernel.clipped_sum(x, y, math.inf), rows) < 1e-13


def test_a_layer_that_does_not_keep_the_batch_gives_the_plan_up(reference):
    # [B, 2, 4] -> [2B, 4] -> back: no leading batch dimension in between, which the tape refuses.
    model = nn.Sequential(nn.Flatten(0, 1), nn.Linear(4, 3), nn.Unflatten(0, (-1, 2)), nn.Flatten())
    kernel = PerSampleKernel(FlatModel(model.double()), squared_error)
    with pytest.raises(ModelError, match="leading dimension"):
        kernel.clipped_sum(reference.data(3, 2, 4), reference.data(3, 6), 1.0)
    assert kernel._level.plan is None


def test_a_layer_of_ones_own_that_overwrites_its_input(reference):
    class Twice(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    for model in (
        nn.Sequential(nn.Linear(4, 3), Twice(), nn.Tanh(), nn.Linear(3, 2)),
        nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), Twice()),
    ):
        model.double()
        x, y = reference.data(5, 4), reference.data(5, 2, seed=1)
        rows = reference.per_sample_loop(model, squared_error, x, y)
        kernel = PerSampleKernel(FlatModel(model), squared_error)
        assert reference.error(kernel.clipped_sum(x, y, 0.1), reference.clipped(rows, 0.1)) < 1e-13


def test_batchnorm_at_frozen_statistics_and_dropout_off_are_layers_like_others(reference):
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, affine=False), nn.ReLU(), nn.Dropout(0.5),
        nn.Flatten(), nn.Linear(48, 2),
    ).double().eval()  # fmt: skip
    model[1].running_mean.normal_()
    check(reference, model, cross_entropy, reference.data(4, 2, 6, 6), torch.tensor([0, 1, 1, 0]))
    kernel = levels(model, cross_entropy)[0]
    assert sum(isinstance(stage, Other) for stage in kernel._level.plan._stages) == 2


def test_a_plan_in_training_draws_dropout_once_for_forward_and_backward(reference):
    # ℓ = Σ outputs at weights 1: the gradient by the weight is the dropped input, ℓ is its sum.
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(30, 1, bias=False)).double()
    with torch.no_grad():
        model[1].weight.fill_(1)
    kernel = levels(model, lambda out, y: out[:, 0])[0]
    seen: list[torch.Tensor] = []

    def weights(losses):
        seen.append(losses)
        return torch.ones_like(losses)

    total = kernel.clipped_sum(reference.data(8, 30), torch.zeros(8), math.inf, weights)
    assert math.isclose(float(total.sum()), float(seen[0].sum()), rel_tol=1e-12)


def test_both_products_of_matrices_agree(monkeypatch):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(7, 300), torch.randn(260, 300), torch.randn(260)
    exact = x.double() @ weight.double().t() + bias.double()
    g = torch.randn(7, 260)
    back = g.double() @ weight.double()
    for _ in range(2):
        assert (products.linear(x, weight, bias) - exact).abs().max() < 1e-4
        assert (products.linear(g, weight.t()) - back).abs().max() < 1e-4
        monkeypatch.setattr(products, "_onednn", None)
