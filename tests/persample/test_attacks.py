"""Attacks on a clipped sum: one record that was made to move it by more than its share.

Each succeeded on an earlier kernel. What is asserted is always ‖S(D + r) - S(D)‖ <= C (1 + slack).
"""

import pytest
import torch
from tests.persample.attacked import Attention, Means, allowed, moved
from torch import nn

from fedpact.errors import ModelError
from fedpact.losses import cross_entropy
from fedpact.params import FlatModel
from fedpact.persample import gradients
from fedpact.persample.kernel import PerSampleKernel
from fedpact.privacy.noise import SeededDraws
from fedpact.privacy.oracle import PrivateOracle, Records
from fedpact.privacy.terms import Terms
from fedpact.theory.accounting import Budget

CLASS = torch.tensor([2])


def made(module, loss=cross_entropy):
    torch.manual_seed(0)
    for parameter in module.parameters():
        # As every layer begins, whatever was built before it.
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return PerSampleKernel(FlatModel(module), loss)


def shifted(kernel, x, r, clip, place=None):
    """By how many C the record moves the sum over records that all agree on a direction."""
    y = torch.full((len(x),), 2)

    def summed(x, y):
        return kernel.clipped_sum(x, y, clip)

    return moved(summed, x, y, r, CLASS, place) / allowed(len(x), clip)


def cancelling(shape, big, places):
    """A record of zeros, but for `big` and its opposite."""
    r = torch.zeros(1, *shape)
    for sign, place in zip((1, -1), places, strict=True):
        r[(0, *place)] = sign * big
    return r


# What the record's positions cancel in: model, form, two places of one channel.
LAYERS = {
    "linear": (lambda: Means(nn.Linear(16, 16, bias=False), 16), (60, 16), ((0, 0), (59, 0))),
    "gram": (lambda: Means(nn.Linear(64, 64, bias=False), 64), (8, 64), ((0, 0), (7, 0))),
    "gram of two": (lambda: Means(nn.Linear(64, 64, bias=False), 64), (2, 64), ((0, 0), (1, 0))),
    "conv1d": (lambda: Means(nn.Conv1d(8, 16, 1, bias=False), 16, 2), (8, 90), ((0, 0), (0, 89))),
    "conv1d wide": (lambda: Means(nn.Conv1d(12, 8, 7), 8, 2), (12, 90), ((0, 9), (0, 80))),
    "conv2d": (
        lambda: Means(nn.Conv2d(16, 16, 1, bias=False), 16, (2, 3)),
        (16, 7, 7),
        ((0, 0, 0), (0, 6, 6)),
    ),
    "attention": (lambda: Attention(8, 6), (6, 8), ((0, 0), (5, 0))),
}


@pytest.mark.parametrize("big", [1e4, 1e7, 1e10, 1e13, 1e16, 1e18])
@pytest.mark.parametrize("name", LAYERS)
def test_positions_that_cancel_swallow_nobody(name, big):
    module, shape, places = LAYERS[name]
    kernel = made(module())
    x = torch.randn(100, *shape, generator=torch.Generator().manual_seed(0))
    x[:, 0] += 3
    for clip in (1.0, 1e-3):
        assert shifted(kernel, x, cancelling(shape, big, places), clip) <= 1


@pytest.mark.parametrize("big", [1e6, 1e12, 1e17])
def test_positions_that_cancel_swallow_no_difference(big):
    kernel = made(Means(nn.Linear(16, 16, bias=False), 16))
    x = torch.randn(100, 40, 16) + 1
    y = torch.full((100,), 2)
    w = kernel.model.vector.clone()
    anchor = w + 0.01 * torch.randn(len(w))
    r = cancelling((40, 16), big, ((0, 0), (39, 0)))

    def summed(x, y):
        return kernel.clipped_difference(x, y, w, anchor, 0.05)

    assert moved(summed, x, y, r, CLASS) <= allowed(100, 0.05)


def test_a_joint_product_of_what_the_norm_was_not_taken_from_would_be_found(monkeypatch):
    # The mend taken out: norms by Gram matrices, the sum by one float32 product of all positions.
    def joint(share):
        g, u = share.g.double(), share.u.double()
        squares = ((u @ u.mT) * (g @ g.mT)).sum((1, 2)).clamp_min(0)

        def add(c, view):
            scaled = (share.g * c.to(share.g.dtype)[:, None, None]).flatten(0, 1)
            view.add_(scaled.t() @ share.u.flatten(0, 1))

        return gradients.Part(squares, add)

    monkeypatch.setattr(gradients.Outer, "special", joint)
    module, shape, places = LAYERS["linear"]
    x = torch.randn(100, *shape, generator=torch.Generator().manual_seed(0))
    x[:, 0] += 3
    worst = max(
        shifted(made(module()), x, cancelling(shape, big, places), 1.0) for big in (1e13, 1e16)
    )
    assert worst > 2


def test_a_release_of_the_oracle_moves_by_no_more_than_what_is_accounted_for():
    kernel = made(Means(nn.Linear(16, 16, bias=False), 16))
    x, y = torch.randn(60, 40, 16), torch.full((60,), 2)
    x[:, :, 0] += 3
    r = cancelling((40, 16), 1e17, ((0, 0), (39, 0)))
    terms = Terms("s", 60.0, 1.0, 0.5, {"gradient": 1e-3}, 1, Budget(1e9, 1e-5), "best")
    w = kernel.model.vector.clone()

    def summed(x, y):
        # Every record is drawn, and the noise is the same.
        draws = SeededDraws(5, "s", 1)
        oracle = PrivateOracle(Records(x, y), kernel, terms, draws, lambda *_: None)
        return next(oracle.batches(1, "gradient")).gradient(w) * terms.batch_size

    assert moved(summed, x, y, r, CLASS) <= terms.clip * (1 + 1e-6)


@pytest.mark.parametrize("loud", [255.0, 1e4, 1e30])
def test_a_scale_by_the_largest_value_mixes_nobody(loud):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3))

        def forward(self, x):
            if x.max() > 1:
                x = x / 255
            return self.inner(x)

    kernel, x = made(Scaled()), torch.rand(50, 20)
    with pytest.raises(ModelError):
        shifted(kernel, x, torch.full((1, 20), loud), 1.0)


def alike(count, width, seed):
    """So many of one record: their sum rounds the same way at every step."""
    v = 3 * torch.randn(1, width, generator=torch.Generator().manual_seed(seed))
    return v.expand(count, width).contiguous()


@pytest.mark.parametrize("count", [127, 511, 512, 1024, 10_000, 300_000])
@pytest.mark.parametrize("dense", [True, False])
def test_sums_of_many_records_that_are_alike_round_within_the_slack(count, dense):
    kernel = made(nn.Sequential(nn.Linear(4, 3)))
    if not dense:
        kernel._passes.dense = None
    for seed in range(3 if count < 10**5 else 1):
        x = alike(count, 4, seed)
        for clip in (1.0, 0.01):
            assert shifted(kernel, x, x[:1], clip) <= 1
            assert shifted(kernel, x, -x[:1], clip) <= 1


def test_sums_in_float32_alone_would_be_found(monkeypatch):
    # The mend taken out: one product of float32 over all records, however many.
    monkeypatch.setattr(gradients, "TOGETHER", 10**9)
    for name in ("fedpact.persample.kernel", "fedpact.persample.dense"):
        monkeypatch.setattr(f"{name}.IN_FLOAT32", 10**9)
        monkeypatch.setattr(f"{name}.TOGETHER", 10**9)
    kernel = made(nn.Sequential(nn.Linear(4, 3)))
    x, clip = alike(300_000, 4, 0), 0.01
    y = torch.full((len(x),), 2)
    found = moved(lambda x, y: kernel.clipped_sum(x, y, clip), x, y, x[:1], CLASS)
    # What slack allows where the sums are of float64.
    assert found > clip * (1 + 2**-14 + 2.5 * 2**-24 * len(x))
