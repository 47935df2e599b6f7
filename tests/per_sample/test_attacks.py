"""Attacks on a clipped sum: one record that was made to move it by more than its share.

Each succeeded on an earlier kernel. What is asserted is always ‖S(D + r) - S(D)‖ <= C (1 + slack).
"""

import os
import subprocess
import sys
from functools import cache

import pytest
import torch
from tests.per_sample.attacked import Attention, Means, allowed, moved
from torch import nn

from fedpact.common.errors import ModelError
from fedpact.common.losses import cross_entropy, squared_error
from fedpact.common.params import FlatModel
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.per_sample import gradients
from fedpact.per_sample import layout as layouts
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.per_sample.layout import Placement
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.oracle import PrivateOracle, Records
from fedpact.privacy.terms import Terms

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


@cache
def layer(name):
    return made(LAYERS[name][0]())


def agreeing(count, shape):
    """Records that agree on one position or channel."""
    x = torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))
    x[:, 0] += 3
    return x


@pytest.mark.parametrize("name", LAYERS)
def test_cancelling_positions_erase_no_record(name):
    _, shape, places = LAYERS[name]
    for big, clip in ((1e4, 1.0), (1e7, 1e-3), (1e13, 1.0), (1e16, 1e-3), (1e18, 1.0)):
        r = cancelling(shape, big, places)
        assert shifted(layer(name), agreeing(100, shape), r, clip) <= 1


@pytest.mark.parametrize("big", [1e6, 1e12, 1e17])
def test_cancelling_positions_erase_no_difference(big):
    kernel = made(Means(nn.Linear(16, 16, bias=False), 16))
    x = torch.randn(100, 40, 16) + 1
    y = torch.full((100,), 2)
    w = kernel.model.vector.clone()
    anchor = w + 0.01 * torch.randn(len(w))
    r = cancelling((40, 16), big, ((0, 0), (39, 0)))

    def summed(x, y):
        return kernel.clipped_difference(x, y, w, anchor, 0.05)

    assert moved(summed, x, y, r, CLASS) <= allowed(100, 0.05)


def test_joint_product_not_covered_by_the_norm_is_found(monkeypatch):
    # The mend taken out: norms by Gram matrices, the sum by one float32 product of all positions.
    def joint(share):
        g, u = share.g.double(), share.u.double()
        squares = ((u @ u.mT) * (g @ g.mT)).sum((1, 2)).clamp_min(0)

        def add(c, good, view):
            g, u = share.g, share.u
            scaled = (g * c.to(g.dtype)[:, None, None]).flatten(0, 1)
            view.add_(scaled.t() @ u.flatten(0, 1))

        return gradients.Part(squares, add)

    monkeypatch.setattr(gradients.Outer, "special", joint)
    _, shape, places = LAYERS["linear"]
    found = [
        shifted(layer("linear"), agreeing(100, shape), cancelling(shape, big, places), 1.0)
        for big in (1e13, 1e16)
    ]
    assert max(found) > 2


def test_oracle_release_moves_by_at_most_the_accounted_clip():
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
def test_a_scale_by_the_largest_value_mixes_no_records(loud):
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


@pytest.mark.parametrize("count", [127, 512, 1024, 10_000])
@pytest.mark.parametrize("dense", [True, False])
def test_sums_of_many_equal_records_round_within_the_slack(count, dense):
    kernel = made(nn.Sequential(nn.Linear(4, 3)))
    if not dense:
        kernel._passes.dense = None
    v = 3 * torch.randn(1, 4)
    x = v.expand(count, 4).contiguous()
    for clip in (1.0, 0.01):
        assert shifted(kernel, x, v, clip) <= 1
        assert shifted(kernel, x, -v, clip) <= 1


def given(layer=None):
    """A kernel whose gradient is x for the target -1, at weights of 0."""
    kernel = made(layer or nn.Sequential(nn.Linear(2, 1, bias=False)), squared_error)
    kernel.model.load(torch.zeros_like(kernel.model.vector))
    return kernel


@pytest.mark.parametrize("exact", [True, False])
def test_sums_of_many_records_are_float64(exact, monkeypatch):
    # 4095.5 in one coordinate, then many steps of -3/4 of the last digit there. Behind one record
    # more the sum is beyond 4096, whose last digit is twice as large: each step is lost. With the
    # mend taken out, the attack succeeds. A pass has one step alone, so products do not matter.
    x = torch.zeros(4096 + 64 * 64, 2)
    x[:4095, 0], x[4095, 0], x[4096::64, 0] = 1.0, 0.5, -0.75 * 2.0**-12
    y = torch.full((len(x), 1), -1.0)
    most = allowed(len(x), 1.0)
    if not exact:
        monkeypatch.setattr(layouts, "IN_FLOAT32", 10**9)
        monkeypatch.setattr(layouts, "PARTIAL_SUMS", 10**9)
    kernel, layout = given(), Placement(length=64)
    found = moved(lambda x, y: kernel.clipped_sum(x, y, 1.0, layout=layout), x, y, x[:1], y[:1], 0)
    assert (found <= most) == exact


def test_records_that_are_left_out_leave_the_others_sum_as_exact():
    # A little more than half of each pass is good, and a little less in one record more.
    x = torch.linspace(1, 2, 1024)[:, None].repeat(10, 1)
    x[torch.arange(len(x)) % 2 == 1] = torch.nan
    x[1::1024] = 1.5
    kernel = made(nn.Sequential(nn.Linear(1, 2)))
    kernel._passes.dense = None
    y = torch.zeros(len(x), dtype=torch.long)
    for r in (torch.full((1, 1), torch.nan), torch.ones(1, 1)):
        found = moved(lambda x, y: kernel.clipped_sum(x, y, 1e-3), x, y, r, y[:1])
        assert found <= allowed(len(x), 1e-3)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("card")
def test_values_that_are_not_finite_spoil_no_sum_on_a_gpu(name):
    _, shape, places = LAYERS[name]
    x = agreeing(20, shape)
    for loud in (3e38, 9e18, torch.inf, torch.nan):
        for r in (torch.full((1, *shape), loud), cancelling(shape, loud, places)):
            assert shifted(layer(name), x, r, 1.0, place=3) <= 1


def null_space(kernel, count, scale):
    """Records that the first layer multiplies to nothing but what it rounds."""
    w = next(v for v in kernel.model.own.values() if v.dim() == 2).double()
    v = torch.randn(count, w.shape[1]).double()
    return (scale * (v - v @ torch.linalg.pinv(w) @ w)).float()


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("shape", [(784, 64), (32, 3), (6, 4)])
def test_one_record_more_changes_no_last_bit_of_the_others(shape, dense):
    # Gradients of records that are nothing but rounding follow every bit of the arithmetic.
    kernel = made(nn.Sequential(nn.Linear(*shape), nn.Tanh(), nn.Linear(shape[1], 3)))
    if not dense:
        kernel._passes.dense = None
    x = null_space(kernel, 130, 1e9)
    long = torch.full((1, shape[0]), 2e12)
    y = torch.full((131,), 2)
    for count, places in ((1, [0, 0, 0]), (16, [16, 16, 16]), (130, [0, 130, 0])):
        before = kernel.clipped_sum(x[:count], y[:count], 1.0).double()
        for r, place in zip((x[:1], 1e-30 * x[:1], long), places, strict=True):
            along = torch.cat([x[:place], r, x[place:count]])
            after = kernel.clipped_sum(along, y[: count + 1], 1.0).double()
            assert float((after - before).norm()) <= allowed(count, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_no_last_bit_changes_on_a_lesser_processor(capability):
    limits = {"ATEN_CPU_CAPABILITY": capability}
    limits |= dict.fromkeys(["ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"], "AVX2")
    program = (
        "import sys, pytest, torch\n"
        f"assert torch.backends.cpu.get_cpu_capability() == {capability.upper()!r}\n"
        f"sys.exit(pytest.main(['-q', '-k', 'no_last_bit_of', {__file__!r}]))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | limits, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "6 passed" in done.stdout
