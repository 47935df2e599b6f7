"""What a record may be given to neither ends the process nor goes on for ever."""

import math
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.per_sample.attacked import moved
from tests.per_sample.small import off_by
from torch import nn

from fedpact.common.errors import ModelError
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.per_sample.clipping import slack
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.per_sample.layout import Placement
from fedpact.per_sample.tracing.replacements import DONE_AS


@pytest.mark.slow
def test_data_dependent_operations_survive_extreme_numbers():
    """All but lcm, which does not look; in one process, as torch's samples take long to load."""
    # By its path: of a module run by its name torch's samples look up the source in vain, 30 s.
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("extremes.py"), "lcm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[-1]) == (0, "done"), (lines[-1], done.stderr[-2000:])
    assert f"ended by signal {signal.SIGFPE:d}" in lines
    assert lines[lines.index(f"ended by signal {signal.SIGFPE:d}") - 1].startswith("lcm")


@torch.library.custom_op("fedpact_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> int:
    return int(x.sum())


@counted.register_fake
def _(x):
    return torch.library.get_ctx().new_dynamic_size()


UNSAFE = {
    "offsets": lambda m, x: F.embedding_bag(
        torch.arange(5), m.table, offsets=x[0, :3].long(), mode="sum"
    ),
    "lengths": lambda m, x: torch.segment_reduce(x[0], "sum", lengths=x[0, :3].long(), unsafe=True)[
        None
    ],
    "degree": lambda m, x: torch.special.laguerre_polynomial_l(x * 0 + 0.5, x)[:, :3],
    "least common multiples": lambda m, x: torch.lcm(x.long(), x.long()).to(x.dtype)[:, :3],
    "how often": lambda m, x: torch.repeat_interleave(x, x[0, 0].long(), dim=1)[:, :3],
    "how many": lambda m, x: x[:, :3] + torch.arange(x[0, 0].long().item()).sum(),
    "another record's place": lambda m, x: torch.as_strided_copy(x, (1, 3), (3, 1), 0),
    "terms of a series": lambda m, x: torch.special.zeta(x[:, :3].abs() + 1, x[:, :3]),
    "terms of a derivative": lambda m, x: torch.polygamma(1, x[:, :3]),
    "sizes": lambda m, x: x[:, :3] + torch.zeros(10 * x[x > 0].shape[0]).sum(),
    "what lay there": lambda m, x: x[:, :3] + torch.empty(2).resize_(3),
    "an operation of one's own": lambda m, x: x[:, :3] + torch.ops.fedpact_tests.counted(x),
}


MESSAGES = "to look at what|does not look|as many numbers|lay in memory|is no operation|resize"


@pytest.mark.parametrize("name", UNSAFE)
def test_operations_that_do_not_look_are_refused(reference, name):
    def run(m, x):
        return m.layer(UNSAFE[name](m, x)[: x.shape[0], :3])

    table = nn.Parameter(torch.randn(6, 3))
    model = reference.Apply(run, table=table, layer=nn.Linear(3, 3))
    kernel = PerSampleKernel(FlatModel(model), off_by)
    with pytest.raises(ModelError, match=MESSAGES):
        kernel.clipped_sum(torch.ones(4, 9), torch.arange(4) % 3, 1.0)


class Transformer(nn.Module):
    """Looks at an image where the image says."""

    def __init__(self):
        super().__init__()
        self.where, self.layer = nn.Linear(36, 6), nn.Linear(36, 3)

    def forward(self, x):
        grid = F.affine_grid(self.where(x.flatten(1)).view(-1, 2, 3), x.shape, align_corners=False)
        return self.layer(F.grid_sample(x, grid, align_corners=False).flatten(1))


def test_invalid_points_are_not_looked_up():
    kernel = PerSampleKernel(FlatModel(Transformer()), cross_entropy)
    x, y = torch.randn(9, 1, 6, 6), torch.arange(9) % 3
    kernel.verify(x, y)

    def summed(x, y):
        return kernel.clipped_sum(x, y, 0.05, layout=Placement(length=16))

    for value in (torch.nan, torch.inf, -torch.inf, 3e38):
        r = x[:1].clone()
        # Of the largest number so many that the points are as large as numbers are.
        r[0, 0, 2, : 1 if value == 3e38 else 3] = value
        # The weights may send the largest number to infinity, and to a number as well.
        most = 0.05 * (1 + slack(10)) if value == 3e38 else 0
        # Behind the others, which keep their slots: so their sum has the same bits.
        assert moved(summed, x, y, r, y[:1]) <= most


# torch's numbers of modes (bilinear, nearest, and of images bicubic) and of what lies beyond.
@pytest.mark.parametrize("beyond", [0, 1, 2])
@pytest.mark.parametrize(("dims", "mode"), [(2, 0), (2, 1), (2, 2), (3, 0), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_largest_points_are_dropped_and_others_match_torch(dims, mode, beyond, dtype):
    x = torch.randn(2, 3, *[5] * dims, dtype=dtype)
    settings = mode, beyond, False
    sampled = DONE_AS[torch.ops.aten.grid_sampler.default]
    for scale in (1.0, 30.0, 1e20):
        grid = scale * torch.randn(2, *[4] * dims, dims, dtype=dtype)
        assert torch.equal(sampled(x, grid, *settings), torch.grid_sampler(x, grid, *settings))
    most = torch.finfo(dtype).max
    # At an eighth torch's coordinates are numbers still, beyond all whole ones.
    for value in (most / 8, most, -most, torch.nan, torch.inf):
        grid = torch.full((2, *[4] * dims, dims), value, dtype=dtype)
        assert sampled(x, grid, *settings).isnan().all()


def test_unwritten_memory_holds_no_earlier_values():
    """Of a record that no mask is for, numbers of whatever was computed before would stand."""

    class Signs(nn.Module):
        def __init__(self, make):
            super().__init__()
            self.make, self.layer = make, nn.Linear(9, 3)

        def forward(self, x):
            out = self.make(x)
            out.masked_fill_(x >= 0, 0.5)
            out.masked_fill_(x < 0, -0.5)
            return self.layer(out)

    for make in (
        torch.empty_like,
        lambda x: x.new_empty(len(x), 9),
        lambda x: torch.empty(x.shape),
    ):
        kernel = PerSampleKernel(FlatModel(Signs(make)), off_by)
        x, y = torch.randn(8, 9), torch.zeros(8).long()
        x[1:] = torch.nan
        alone = kernel.clipped_sum(x[:1], y[:1], 1.0)
        for _ in range(2):
            x[0] = -x[0]
            assert kernel.losses(x, y)[1:].isnan().all()
        assert torch.equal(kernel.clipped_sum(x, y, 1.0), alone)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8])
def test_division_of_whole_numbers_is_torchs(dtype):
    by = DONE_AS[torch.ops.aten.div.Tensor_mode]
    a = torch.tensor([6, 7, 100], dtype=dtype)
    others = torch.tensor([4, 1, 7], dtype=dtype)
    for b in (others, others.double(), 2, 3.0, -1.0, *((-1,) if dtype.is_signed else (255,))):
        for mode in ("trunc", "floor", None):
            found, expected = by(a, b, rounding_mode=mode), torch.div(a, b, rounding_mode=mode)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
    if dtype.is_signed:
        least = torch.full((2,), torch.iinfo(dtype).min, dtype=dtype)
        assert torch.equal(by(least, -1, rounding_mode="trunc"), least)
        assert torch.equal(by(least, -torch.ones_like(least), rounding_mode="trunc"), least)


def test_frozen_statistics_with_in_place_operations(reference):
    def residual(m, x):
        h = m.norm(m.first(x))
        h += x
        return m.last(h)

    layers = {"first": nn.Linear(9, 9), "norm": nn.BatchNorm1d(9), "last": nn.Linear(9, 3)}
    model = FlatModel(reference.Apply(residual, **layers).eval())
    kernel = PerSampleKernel(model, cross_entropy)
    x, y = torch.randn(8, 9), torch.arange(8) % 3
    kernel.verify(x, y)
    total = kernel.clipped_sum(x, y, math.inf)
    assert torch.allclose(total, kernel.alone(x, y).sum(0), atol=1e-5)


def test_sums_of_dense_models_do_not_follow_numpys_own_settings():
    """A caller who lets numpy raise at tiny numbers would see that a record has them."""
    kernel = PerSampleKernel(FlatModel(nn.Sequential(nn.Linear(5, 3))), cross_entropy)
    x, y = torch.randn(8, 5), torch.arange(8) % 3
    with torch.no_grad():
        kernel.model.vector[-3:] = torch.tensor([0.0, -85.0, -90.0])
    x[0], y[0] = 0.0, 0
    expected = kernel.clipped_sum(x, y, 1e-6)
    with np.errstate(all="raise"):
        assert torch.equal(kernel.clipped_sum(x, y, 1e-6), expected)
