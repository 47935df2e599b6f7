"""What a record may be given to neither ends the process nor goes on for ever."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from tests.persample.attacked import moved
from torch import nn

from fedpact.errors import ModelError
from fedpact.losses import cross_entropy
from fedpact.params import FlatModel
from fedpact.persample.bounds import slack
from fedpact.persample.kernel import PerSampleKernel


def _given_extremes(*names):
    command = [sys.executable, "-W", "ignore", "-m", "tests.persample.extremes", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout.splitlines()[-1], done.stderr[-2000:]


def test_no_operation_that_is_known_to_look_ends_its_process_at_extreme_numbers():
    code, last, errors = _given_extremes()
    assert (code, last) == (0, "done"), errors


@pytest.mark.parametrize("name", ["lcm", "nn.functional.ctc_loss"])
def test_the_check_sees_an_operation_that_does_not_look(name):
    code, last, _ = _given_extremes(name)
    assert code < 0
    assert last.startswith(name)


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
    "lengths of weights": lambda m, x: F.linear(
        x[:, :4], torch._weight_norm(x[0, :4].expand(3, 4), x[:1, :1], 0)
    ),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_operations_that_do_not_look_are_refused(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = nn.Parameter(torch.randn(6, 3)), nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(UNSAFE[name](self, x)[: len(x), :3])

    kernel = PerSampleKernel(FlatModel(Model()), cross_entropy)
    with pytest.raises(ModelError, match=r"to look at what|does not look|do not fit"):
        kernel.clipped_sum(torch.ones(4, 9), torch.arange(4) % 3, 1.0)


class Transformer(nn.Module):
    """Looks at an image where the image says."""

    def __init__(self, mode, beyond):
        super().__init__()
        self.how = {"mode": mode, "padding_mode": beyond, "align_corners": False}
        self.where, self.layer = nn.Linear(36, 6), nn.Linear(36, 3)

    def forward(self, x):
        grid = F.affine_grid(self.where(x.flatten(1)).view(-1, 2, 3), x.shape, align_corners=False)
        return self.layer(F.grid_sample(x, grid, **self.how).flatten(1))


@pytest.mark.parametrize("beyond", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_points_that_are_none_are_looked_up_nowhere(mode, beyond):
    torch.manual_seed(0)
    kernel = PerSampleKernel(FlatModel(Transformer(mode, beyond)), cross_entropy)
    x, y = torch.randn(9, 1, 6, 6), torch.arange(9) % 3
    kernel.verify(x, y)

    def summed(x, y):
        return kernel.clipped_sum(x, y, 0.05)

    for value in (torch.nan, torch.inf, -torch.inf, 3e38):
        r = x[:1].clone()
        r[0, 0, 2, 3] = value
        # The weights may send the largest number to infinity, and to a number as well.
        most = 0.05 * (1 + slack(10)) if value == 3e38 else 0
        assert moved(summed, x, y, r, y[:1], 4) <= most
