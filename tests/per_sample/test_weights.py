"""Weights of any size: a record moves a weighted sum by C at most, whatever its numbers are."""

import pytest
import torch
from tests.per_sample.attacked import allowed
from tests.spread import spread
from torch import nn

from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.per_sample.clipping import LARGEST_CLIP, SHORTEST, UNIFORM, Fair
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.per_sample.layout import Placement


def moved(kernel, x, y, r, of_r, clip, weights, before=None, **how):
    """‖S(D + r) - S(D)‖ over what is allowed, infinite where that is no number; before: S(D)."""
    if before is None:
        before = kernel.clipped_sum(x, y, clip, weights, **how).double()
    after = kernel.clipped_sum(
        torch.cat([x, r]), torch.cat([y, of_r]), clip, weights, **how
    ).double()
    assert before.isfinite().all()
    found = float((after - before).norm()) / allowed(len(x), clip)
    return found if after.isfinite().all() else torch.inf


def of_parts(outputs, parts):
    """ℓ = a + b f(x) for y = (a, b): a loss of any size beside a gradient of any."""
    return parts[:, 0] + parts[:, 1] * outputs[:, 0]


def of_powers(outputs, parts):
    """The same in float64, of a^8 and b^5."""
    parts = parts.double()
    return parts[:, 0] ** 8 + parts[:, 1] ** 5 * outputs[:, 0]


class Double(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers).double()

    def forward(self, x):
        return self.layers(x.double())


@pytest.mark.parametrize(
    ("dense", "size", "clip"),
    spread((True, False), (0.0, 1e-45, 1e-39, 1e-20, 1.0), (SHORTEST, 1.0, 2.0**60), one_in=3),
)
def test_tiny_inputs_with_huge_weights(clip, size, dense):
    """c ‖g‖ ‖u‖ <= C, and c ‖g‖ was no number of float32 where ‖u‖ is tiny."""
    first, last = nn.Linear(4, 8, bias=False), nn.Linear(8, 3, bias=False)
    x, y = torch.rand(20, 4) + 0.5, torch.arange(20) % 3
    with torch.no_grad():
        first.weight.fill_(min(3e38, 0.005 / max(size, 1e-45)) if size < 1 else 0.01)
        last.weight[0], last.weight[1], last.weight[2] = 1e38, -1e38, 0.0
    kernel = PerSampleKernel(FlatModel(nn.Sequential(first, nn.Tanh(), last)), cross_entropy)
    if not dense:
        kernel._passes.dense = None
    # What is no number in the other slots is none of r's.
    r, layout = torch.full((1, 4), size), Placement(length=32)
    for weights in (Fair(0.1, -1e8), Fair(0.1, 0.0), Fair(1e30, 0.0)):
        before = kernel.clipped_sum(x, y, clip, weights, layout=layout).double()
        for label in torch.arange(3)[:, None]:
            assert moved(kernel, x, y, r, label, clip, weights, before, layout=layout) <= 1


@pytest.mark.parametrize("clip", [SHORTEST, 2.0**-19])
@pytest.mark.parametrize(("offset", "slope"), [(1e30, 1e-20), (1e38, 1e-23), (1e38, 1e-30)])
def test_a_weight_that_overflows_in_units_of_the_clip(slope, offset, clip):
    kernel = PerSampleKernel(FlatModel(nn.Linear(4, 1, bias=False)), of_parts)
    x, y = torch.randn(20, 4), torch.ones(20, 2)
    for size in (1e-22, 1e-3, 1.0):
        r, of_r = torch.full((1, 4), size), torch.tensor([[offset, slope]])
        assert moved(kernel, x, y, r, of_r, clip, Fair(1.0, 1.0)) <= 1


@pytest.mark.parametrize("slope", [1.0, 1e-34])
@pytest.mark.parametrize("wide", [False, True], ids=["one position", "several"])
def test_gradients_whose_squares_float64_does_not_hold(wide, slope):
    """A norm of 0 was found for them, and so the whole weight was their coefficient: 1e304."""
    model = Double(nn.Linear(4, 1, bias=False))
    shape = (3, 4) if wide else (4,)
    if wide:
        model.layers.append(nn.Flatten()).append(nn.Linear(3, 1, bias=False).double())
    kernel = PerSampleKernel(FlatModel(model), of_powers)
    x, y = torch.randn(20, *shape), torch.tensor([[0.0, 1.0]]).expand(20, 2)
    for size in (1e-3, 1.0, 1e30):
        r, of_r = torch.full((1, *shape), size), torch.tensor([[1e38, slope]])
        for clip in (SHORTEST, 1.0):
            assert moved(kernel, x, y, r, of_r, clip, Fair(1.0, 1.0)) <= 1


@pytest.mark.parametrize("way", ["dense", "graph"])
def test_automatic_clipping_is_the_papers(way):
    """AUTO-S: Σ C g_j / (‖g_j‖ + γ), each part below C, also of tiny and huge gradients."""
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    kernel = PerSampleKernel(FlatModel(module), cross_entropy)
    if way == "graph":
        kernel._passes.dense = None
    x, y = torch.randn(20, 4).double() * torch.logspace(-3, 3, 20)[:, None], torch.arange(20) % 3
    assert kernel.way(x, y) == way
    rows = kernel.alone(x, y)
    length = rows.norm(dim=1)
    assert torch.allclose(kernel.norms(x, y), length, rtol=1e-9, atol=0)
    for weighting, v in ((UNIFORM, 1.0), (Fair(0.5, 1.0), Fair(0.5, 1.0)(kernel.losses(x, y)))):
        c = torch.minimum(v * 0.3 / (length + 0.01), 0.3 / length)
        found = kernel.clipped_sum(x, y, 0.3, weighting, gamma=0.01)
        torch.testing.assert_close(found, (c[:, None] * rows).sum(0), rtol=1e-9, atol=1e-12)
    for r in (x[:1] * 0, x[:1] * 1e30, x[:1] * torch.inf, x[:1] * torch.nan):
        assert moved(kernel, x, y, r, y[:1], 0.3, UNIFORM, gamma=0.01) <= 1


@pytest.mark.parametrize(
    ("clip", "size", "weight", "slope"),
    [(LARGEST_CLIP, 1e-15, 1e30, 1e15), (SHORTEST, 2.0**61, 0, 1)],
)
def test_coefficients_that_float32_does_not_hold(clip, size, weight, slope):
    """c ‖g‖ was infinite; and c was rounded to the least number there is, from below it."""
    kernel = PerSampleKernel(FlatModel(nn.Linear(4, 1, bias=False)), of_parts)
    x, y = torch.randn(20, 4), torch.ones(20, 2)
    r, of_r = torch.full((1, 4), size), torch.tensor([[weight, slope]])
    weights = Fair(1.0, 1.0) if weight else None
    assert moved(kernel, x, y, r, of_r, clip, weights) <= 1
