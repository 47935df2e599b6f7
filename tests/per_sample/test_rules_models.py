"""Whole models of the less common uses of a parameter: exact, and under attack.

Exact is beside each record's own gradient by autograd, in float64. What is attacked is that of a
record whose positions cancel: S(D + r) - S(D) is no longer than C (1 + slack).
"""

from functools import cache

import pytest
import torch
from tests.per_sample.attacked import Means, allowed, moved
from tests.per_sample.small import off_by
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from fedpact.common.params import FlatModel
from fedpact.per_sample import norms
from fedpact.per_sample.gradients import Made, Outer, is_few
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.per_sample.layout import Placement
from fedpact.per_sample.rules import of_arguments


class Heads(nn.Module):
    """A matrix for each head."""

    def __init__(self):
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(2, 4, 5))

    def forward(self, x):
        return torch.einsum("bthd,hde->bthe", x.unflatten(2, (2, 4)), self.matrices).flatten(2)


class LoRA(nn.Module):
    """A frozen weight and a product of two small ones."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width), requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, width))
        self.up = nn.Parameter(torch.randn(width, 2))

    def forward(self, x):
        return nn.functional.linear(x, self.weight + 0.5 * (self.up @ self.down))


class Normed(nn.Module):
    """A weight of length 1, masked, and used twice: as it is and transposed."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.register_buffer("mask", torch.ones(width, width).tril())

    def forward(self, x):
        weight = self.weight * self.mask / self.weight.norm()
        return torch.tanh(x @ weight) @ weight.t()


class Learnt(nn.Module):
    """Numbers that are looked up, turned and moved before they meet a record."""

    def __init__(self):
        super().__init__()
        self.steps, self.near = nn.Embedding(9, 6), nn.Parameter(torch.randn(17, 2))
        self.scale, self.turned = nn.Parameter(torch.ones(6)), nn.Parameter(torch.randn(6, 9, 1))
        places = torch.arange(9)
        self.register_buffer("apart", places[:, None] - places + 8)

    def forward(self, x):
        x = x[:, :9] + self.steps(torch.arange(9).view(1, -1)) + self.turned.permute(2, 1, 0)
        bias = self.near[self.apart.view(-1)].view(9, 9, 2).permute(2, 0, 1).unsqueeze(0)
        heads = x.unflatten(2, (2, 3)).transpose(1, 2)
        seen = nn.functional.scaled_dot_product_attention(heads, heads, heads, bias, scale=0.3)
        x = seen.transpose(1, 2).flatten(2).transpose(1, 2)
        return (x * self.scale.unsqueeze(-1)).transpose(1, 2)


LAYERS = {
    "transposed": (lambda: Means(nn.ConvTranspose2d(4, 6, 3, 2), 6, (2, 3)), (4, 5, 5)),
    "transposed groups": (
        lambda: Means(nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, groups=2), 6, 2),
        (4, 9),
    ),
    "depthwise": (lambda: Means(nn.Conv2d(8, 16, 1, groups=8), 16, (2, 3)), (8, 7, 7)),
    "volumes": (lambda: Means(nn.Conv3d(4, 6, 1), 6, (2, 3, 4)), (4, 3, 3, 3)),
    "heads": (lambda: Means(Heads(), 10), (30, 8)),
    "lora": (lambda: Means(LoRA(6), 6), (30, 6)),
    "weight norm": (lambda: Means(weight_norm(nn.Linear(6, 6)), 6), (30, 6)),
    "normed": (lambda: Means(Normed(6), 6), (30, 6)),
    "learnt": (lambda: Means(Learnt(), 6), (30, 6)),
}


@cache
def attacked(name):
    torch.manual_seed(0)
    return PerSampleKernel(FlatModel(LAYERS[name][0]()), off_by)


def exact(module, x, y):
    kernel = PerSampleKernel(FlatModel(module.double()), off_by)
    assert kernel.way(x, y) == "graph"
    rows = kernel.alone(x, y)
    for clip in (torch.inf, float(rows.norm(dim=1).median())):
        c = (clip / rows.norm(dim=1)).clamp(max=1)
        expected = c @ rows
        found = kernel.clipped_sum(x, y, clip, layout=Placement(length=8))
        assert (found - expected).norm() <= 1e-9 * expected.norm()


@pytest.mark.parametrize("name", LAYERS)
def test_uses_of_a_parameter_are_exact(name):
    build, shape = LAYERS[name]
    exact(build(), torch.randn(5, *shape, dtype=torch.float64), torch.arange(5) % 3)


@pytest.mark.parametrize("name", LAYERS)
def test_cancelling_positions_in_one_use_erase_no_record(name):
    _, shape = LAYERS[name]
    x = torch.randn(20, *shape, generator=torch.Generator().manual_seed(0)) + 1
    y, of_r = torch.full((20,), 2), torch.tensor([2])
    by_channel = name in ("heads", "lora", "normed", "learnt") or name == "weight norm"
    kernel = attacked(name)

    def summed(x, y):
        return kernel.clipped_sum(x, y, 1.0)

    for big in (1e4, 1e12):
        # Zeros, but for a number and its opposite at the ends of one channel.
        r = torch.zeros(1, *shape)
        channel = r[0, :, 0] if by_channel else r[0, 0]
        ends = (0,) * channel.dim(), (-1,) * channel.dim()
        channel[ends[0]], channel[ends[1]] = big, -big
        assert moved(summed, x, y, r, of_r) <= allowed(20, 1.0)


@pytest.mark.parametrize("case", ["t", "transpose", "permute", "add", "mul", "mm"])
def test_an_outer_product_reaches_a_weights_factors(case):
    g, u = (torch.randn(4, 7, n, dtype=torch.float64) for n in (5, 6))
    aten = torch.ops.aten
    op, shapes, more = {
        "t": (aten.t.default, [(6, 5)], ()),
        "transpose": (aten.transpose.int, [(6, 5)], (0, -1)),
        "permute": (aten.permute.default, [(6, 5)], ([1, 0],)),
        "add": (aten.add.Tensor, [(5, 6), (5, 6)], ()),
        "mul": (aten.mul.Tensor, [(5, 6)], (0.5,)),
        "mm": (aten.mm.default, [(5, 2), (2, 6)], ()),
    }[case]
    args = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    share = Outer(g, u)
    found = of_arguments(share, str(op), [*args, *more])
    for j, row in enumerate(share.rows(slice(0, 4))):
        expected = torch.autograd.grad(op(*args, *more), args, row.view(5, 6))
        for i, gradient in enumerate(expected):
            one = found[i].rows(slice(j, j + 1)).detach().view(gradient.shape)
            assert (one - gradient).norm() <= 1e-12 * gradient.norm()


def test_other_functions_of_a_weight_use_autograd():
    share, w = Outer(torch.randn(4, 7, 5), torch.randn(4, 7, 6)), torch.randn(5, 6)
    assert of_arguments(share, "aten.tanh.default", [w]) is None
    assert of_arguments(share, "aten.mul.Tensor", [w, torch.randn(5, 6)]) is None
    assert of_arguments(share, "aten.add.Tensor", [w, torch.randn(6)]) is None
    assert of_arguments(Made(torch.randn(4, 30)), "aten.t.default", [w.t()]) is None


class Decaying(nn.Module):
    """Functions of weights: used at every step, in one another, and where no gradient passes."""

    def __init__(self):
        super().__init__()
        self.weight, self.rate = nn.Parameter(torch.randn(3, 4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        decay, matrix = torch.exp(-self.rate.exp()), self.weight[1].tanh()
        state = x[:, 0]
        for t in range(1, x.shape[1]):
            state = state * decay + x[:, t] @ matrix
        return state @ (matrix * decay) + state * self.rate.detach().sigmoid()


@pytest.mark.parametrize("keep", [norms.KEEP_BYTES, 1])
def test_functions_of_weights_are_pulled_back_at_once(keep, monkeypatch):
    """A call of autograd takes longer than what a small model does in it."""
    kernel = PerSampleKernel(FlatModel(Decaying().double()), off_by)
    x, y = torch.randn(8, 5, 4, dtype=torch.float64), torch.arange(8) % 4
    each = kernel.alone(x, y)
    kernel.clipped_sum(x, y, 1.0)
    calls, grad = [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: calls.append(k) or grad(*a, **k))
    monkeypatch.setattr(norms, "KEEP_BYTES", keep)
    found = kernel.clipped_sum(x, y, 1.0)
    expected = (each * (1 / each.norm(dim=1)).clamp(max=1)[:, None]).sum(0)
    assert (found - expected).norm() <= 1e-12 * expected.norm()
    assert sum("is_grads_batched" in one for one in calls) == 1 or keep == 1


class Sentence(nn.Module):
    """Sequences of a record, one after another, by a recurrence with dropout between layers."""

    def __init__(self):
        super().__init__()
        self.steps = nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True, dropout=0.5)

    def forward(self, x):
        return self.steps(x.reshape(-1, 3, 3))[0].reshape(len(x), -1, 8)


class Marked(nn.Module):
    """Numbers by the range that they are in, and by their distances from learnt points."""

    def __init__(self):
        super().__init__()
        self.marks, self.points = nn.Embedding(4, 3), nn.Parameter(torch.randn(5, 3))
        self.register_buffer("ends", torch.tensor([-1.0, 0.0, 1.0]))

    def forward(self, x):
        places = torch.bucketize(x, self.ends) + torch.searchsorted(self.ends, x)
        found = torch.cdist(self.marks(places // 2).sum(2) + x, self.points)
        wave = torch.stft(
            x.flatten(1), 4, window=torch.hann_window(4, dtype=x.dtype), return_complex=True
        )
        scaled = torch.einsum("...d,de", torch.multiply(found, (-found).exp()), self.points)
        return torch.cat([scaled, wave.abs().mean((1, 2))[:, None, None].expand(-1, 6, 3)], 2)


@pytest.mark.parametrize(("layer", "width"), [(Sentence, 8), (Marked, 6)])
def test_what_is_folded_marked_or_compared_is_exact_and_bounded(layer, width):
    x, y = 2 * torch.randn(4, 6, 3, dtype=torch.float64), torch.arange(4) % 3
    exact(Means(layer(), width).eval(), x, y)
    kernel = PerSampleKernel(FlatModel(Means(layer(), width)), off_by)
    r, clip = torch.tensor([3e38, -1e-30, 40.0]).expand(1, 6, 3), 0.3
    assert moved(
        lambda *of: kernel.clipped_sum(*of, clip),
        x.float(),
        y,
        r,
        torch.zeros(1, dtype=torch.int64),
    ) <= allowed(5, clip)


@pytest.mark.parametrize("kept", [1, 2**60])
def test_gram_matrices_are_not_used_beyond_what_is_proven(kept, monkeypatch):
    monkeypatch.setattr(norms, "KEEP_BYTES", kept)
    for read, good in ((200_000, True), (300_000, False)):
        assert is_few(torch.empty(1, 2, 19), 2, 19 * read, read) == good


@pytest.mark.parametrize("positions", [20, 600])
def test_wide_gradients_that_are_not_kept_are_exact(positions, monkeypatch):
    """With Gram matrices where they are good enough for so many positions."""
    monkeypatch.setattr(norms, "KEEP_BYTES", 1)
    g, u = (torch.randn(3, positions, width) for width in (700, 600))
    u[1] = u[1, :1]
    share = Outer(g, u)
    assert is_few(g, positions, share.size, 600, least=0) == (positions == 20)
    part = share.by_gram()
    rows = torch.bmm(g.double().mT, u.double()).flatten(1)
    assert torch.allclose(part.squares, rows.square().sum(1), rtol=1e-9)
    total, c = torch.zeros(700, 600), torch.tensor([0.5, 2.0, 0.0])
    part.add(c, None, total)
    assert torch.allclose(total.flatten(), (rows.t() @ c.double()).float(), rtol=1e-5, atol=1e-4)
