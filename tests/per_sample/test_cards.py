"""What is done otherwise on a card, tried on a CPU whose numbers are said to be out of reach.

The same sums as at hand, to rounding; nothing that is not finite gets into them; and no operation
looks at a number, for which a card would have to be waited for. What a card itself does with it is
for tests/gpu.
"""

import copy
import math

import pytest
import torch
from tests.per_sample.attacked import made, records
from torch import nn

from fedpact.common.losses import cross_entropy, squared_error
from fedpact.common.params import FlatModel
from fedpact.per_sample import norms
from fedpact.per_sample.kernel import PerSampleKernel

# "records" takes each by itself, and what is done with it there is the same for all layers.
NAMES = ("positions", "pooled", "attention", "words", "records")


def case(name, dtype=torch.float64):
    return made(name, dtype), *records(name, 9, 1, dtype)


@pytest.mark.parametrize("look", [
    lambda v: float(v.sum()), lambda v: bool(v.any()), lambda v: v[v > 0], lambda v: v.nonzero(),
    lambda v: v.equal(v), lambda v: v.numpy(), lambda v: v.tolist(), lambda v: v.unique(),
    lambda v: v.cpu(), lambda v: v.masked_select(v > 0), lambda v: math.isfinite(v.sum()),
])  # fmt: skip
def test_reading_a_number_is_detected(look, nobody_looks, reference):
    with nobody_looks, pytest.raises(reference.Looked):
        look(torch.arange(3.0))


def kernel_of(module, x, y):
    """What is made once, as a trace is, may look at numbers."""
    found = PerSampleKernel(FlatModel(copy.deepcopy(module)), cross_entropy)
    found.way(x, y)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_sums_on_a_device_are_equal_and_read_no_number(reference, name, card, nobody_looks):
    module, x, y = case(name)
    rows = reference.per_sample_loop(module, cross_entropy, x, y)
    one = kernel_of(module, x, y)
    for clip, weights in ((math.inf, None), (0.5, lambda ell: ell - 0.5)):
        with nobody_looks:
            found = one.clipped_sum(x, y, clip, weights)
        losses = [cross_entropy(module(x[j : j + 1]), y[j : j + 1]) for j in range(len(x))]
        w = None if weights is None else weights(torch.cat(losses).detach())
        assert reference.error(found, reference.clipped(rows, clip, w)) < 1e-12


@pytest.mark.parametrize("name", ["pooled", "attention"])
def test_records_that_are_not_finite_add_nothing(reference, name, card, nobody_looks):
    """In float32, in which 1e30 is finite, and what the layers make of it may be or not."""
    module, given, y = case(name, dtype=torch.float32)
    one, exact = kernel_of(module, given, y), copy.deepcopy(module).double()
    for bad in (math.nan, math.inf, 1e30):
        x = given.clone()
        x[[1, 8]] = bad
        x[4].view(-1)[3] = -bad
        # As float64 sees them: not a number, or longer than counts as finite, or as good as others.
        rows = reference.per_sample_loop(exact, cross_entropy, x.double(), y)
        rows = rows[rows.norm(dim=1) <= norms.LONGEST]
        assert len(rows) == 6 or bad == 1e30
        with nobody_looks:
            found = one.clipped_sum(x, y, 0.5)
        assert found.isfinite().all()
        # Normalisation makes 1e30 an ordinary number, and in float32 another one.
        if bad != 1e30 or name != "attention":
            assert reference.error(found, reference.clipped(rows, 0.5)) < 1e-5


def test_weights_that_are_not_finite_leave_nothing(reference, card, nobody_looks):
    module = nn.Sequential(nn.Embedding(7, 5, 0), nn.Flatten(), nn.Linear(30, 3))
    x, y = torch.randint(7, (9, 6)), torch.arange(9) % 3
    module[0].weight.data[1] = math.nan
    spoilt = (x == 1).any(1)
    rows = reference.per_sample(module, cross_entropy, x[~spoilt], y[~spoilt])
    assert 0 < len(rows) < len(x)
    one = kernel_of(module, x, y)
    with nobody_looks:
        found = one.clipped_sum(x, y, 0.5)
    assert reference.error(found, reference.clipped(rows, 0.5)) < 1e-5


@pytest.mark.parametrize("name", ["attention", "records"])
def test_differences(reference, name, card, nobody_looks):
    module, x, y = case(name)
    w = FlatModel(module).vector.clone()
    anchor = w + 0.1 * torch.randn(len(w), dtype=w.dtype)
    rows = []
    for point in (w, anchor):
        nn.utils.vector_to_parameters(point, module.parameters())
        rows.append(reference.per_sample_loop(module, cross_entropy, x, y))
    each, one = reference.clipped(rows[0] - rows[1], 0.05), kernel_of(module, x, y)
    with nobody_looks:
        found = one.clipped_difference(x, y, w, anchor, 0.05)
    assert reference.error(found, each) < 1e-12
    x[4] = math.nan
    with nobody_looks:
        found = one.clipped_difference(x, y, w, anchor, 0.05)
    assert reference.error(found, each[torch.arange(9) != 4]) < 1e-12


@pytest.mark.parametrize("way", ["graph", "records"])
def test_dropout_with_records_that_are_not_finite(reference, way, card):
    """A record's own numbers follow from what it holds, so these steps read the records."""
    layers = nn.Linear(4, 4), reference.Shift(4), nn.Dropout(0.5), nn.Linear(4, 2)
    one = reference.forced(way, nn.Sequential(*layers).double(), squared_error)
    x, y = reference.data(6, 4), reference.data(6, 2, seed=1)
    x[2] = math.inf
    found = one.clipped_sum(x, y, 0.5)
    assert found.isfinite().all()
    assert 0 < float(found.norm()) <= 5 * 0.5


class Singular(nn.Module):
    """A layer whose gradient is not finite at 0, nor at what is not finite."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (self.w * x).abs().sqrt()


def test_layers_that_are_singular_at_a_record(reference, card, nobody_looks):
    """Records may be as they should and their gradients not, and the other way round."""
    module = nn.Sequential(Singular(), nn.Linear(4, 3))
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    others = torch.tensor([0, 1, 3, 4, 5])
    rows = reference.per_sample(module, cross_entropy, x[others], y[others])
    one = kernel_of(module, x, y)
    for bad in (0.0, math.nan, math.inf, 1e30):
        x[2, 0] = bad
        with nobody_looks:
            found = one.clipped_sum(x, y, 0.5)
        if bad == 1e30:  # whose root is a number like others
            assert found.isfinite().all()
        else:
            assert reference.error(found, reference.clipped(rows, 0.5)) < 1e-5
