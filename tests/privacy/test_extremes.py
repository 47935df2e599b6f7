"""Numbers at the ends of float32: no record adds more than C, however it is measured.

Lengths are taken in float64 of what the kernel returns for a batch of one.
"""

import copy
import math

import pytest
import torch
from scipy.special import bdtrc, pdtrc
from torch import nn

from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.privacy.batches import BatchClippedKernel, most_records

ROOM = 1 + 1e-5


LEVELS = ("dense", "graph", "records")


TRACED = {}
"""Kernels by way and form of the module: a trace takes longer than all else, and has no weights."""


def kernel_of(reference, level, module):
    """In one go, by the graph, or record by record."""
    model = FlatModel(copy.deepcopy(module))
    if level in ("graph", "records"):
        form = level, repr(module), model.vector.dtype
        if form not in TRACED:
            TRACED[form] = reference.forced(level, module, cross_entropy)
        TRACED[form].model.load(model.vector)
        return TRACED[form]
    return reference.forced(level, module, cross_entropy)


def linear(*weights, bias=False):
    """A sequence of linear layers without activations, of these weights."""
    layers = []
    for weight in weights:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias)
        layer.weight.data.copy_(weight)
        layers.append(layer)
    return nn.Sequential(*layers)


def first_row(size, value):
    weight = torch.zeros(3, size)
    weight[0] = value
    return weight


@pytest.fixture(params=["at hand", "on a card"])
def anywhere(request):
    """On a CPU, and by what is done otherwise on a card."""
    if request.param == "on a card":
        request.getfixturevalue("card")


@pytest.mark.parametrize("level", LEVELS)
def test_squares_that_float32_loses(reference, level, anywhere):
    """A gradient of outputs near 1e-23 beside records near 1e18."""
    size, logit, clip = 5e18, 52, 1e-6
    module = linear(first_row(8, logit / (8 * size)))
    kernel = kernel_of(reference, level, module)
    x = torch.full((1, 8), size)
    free = kernel.clipped_sum(x, torch.tensor([0]), math.inf, None).double().norm()
    found = kernel.clipped_sum(x, torch.tensor([0]), clip, None).double().norm()
    assert float(free) > clip
    assert float(found) <= clip * ROOM


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("clip", [1e-1, 1e-4])
def test_norms_beyond_what_float32_can_divide_by(reference, clip, level, anywhere):
    """C over such a norm is a number with few digits, or none; the record is left out."""
    for seed in range(2):
        torch.manual_seed(seed)
        module = linear(torch.randn(5, 4), 4e18 * torch.randn(3, 5))
        x = 6e18 * torch.randn(1, 4)
        found = kernel_of(reference, level, module).clipped_sum(x, torch.tensor([0]), clip)
        assert float(found.double().norm()) <= clip * ROOM


@pytest.mark.parametrize("clip", [0.1, 1e-3])
@pytest.mark.parametrize("width", [784, 3000])
def test_a_mean_of_long_records_is_clipped_to_c(width, clip):
    """Records that are longer than counts as finite add nothing."""
    kernel = BatchClippedKernel(FlatModel(linear(torch.zeros(3, width))), cross_entropy)
    found = kernel.clipped_mean(torch.full((2, width), 2.0**56), torch.tensor([0, 1]), clip)
    assert 0.999 * clip < float(found.double().norm()) <= clip
    assert not kernel.clipped_mean(torch.full((2, width), 3e38), torch.tensor([0, 1]), clip).any()


@pytest.mark.parametrize("level", LEVELS)
def test_long_records(reference, level, anywhere):
    module = linear(0.01 * torch.randn(3, 20_000), bias=True)
    x = torch.rand(2, 20_000)
    kernel = kernel_of(reference, level, module)
    for j in range(2):
        y = torch.tensor([j])
        found = kernel.clipped_sum(x[j : j + 1], y, 1e-3, lambda ell: 1e6 + 0 * ell)
        assert abs(float(found.double().norm()) / 1e-3 - 1) <= 1e-5


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bias", [-10.0, -30.0])
def test_small_values_of_a_sigmoid_keep_their_digits(reference, bias, level):
    module = nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3))
    module[0].bias.data.fill_(bias)
    module[2].weight.data.mul_(1e4)
    x, y = torch.randn(7, 4), torch.arange(7) % 3
    rows = reference.per_sample(module, cross_entropy, x, y)
    found = kernel_of(reference, level, module).clipped_sum(x, y, math.inf).double()
    # The first layer's, which are a millionth of the others.
    first = slice(0, 20)
    assert reference.error(found[first], rows[:, first]) < 1e-5


@pytest.mark.parametrize("level", LEVELS)
def test_layers_may_end_in_an_activation(reference, level, anywhere):
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Sigmoid()).double()
    x, y = torch.randn(7, 4).double(), torch.arange(7) % 3
    rows = reference.per_sample(module, cross_entropy, x, y)
    kernel = kernel_of(reference, level, module)
    assert reference.error(kernel.clipped_sum(x, y, 0.1), reference.clipped(rows, 0.1)) < 1e-12
    kernel.verify(x, y)


@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_that_is_not_finite_with_a_finite_norm(reference, level):
    """log of a probability that float32 takes for 0, at a gradient of 1e18."""
    module = linear(first_row(2, -1e21))
    x, y = torch.tensor([[1e18, 1e18], [1.0, 2.0]]), torch.tensor([0, 1])
    kernel = kernel_of(reference, level, module)
    alone = kernel.clipped_sum(x[1:], y[1:], 0.5)
    assert torch.equal(kernel.clipped_sum(x, y, 0.5), alone)


@pytest.mark.parametrize("expected", [0.01, 1.0, 100.0, 1e4, 1e6])
def test_larger_batches_have_probability_below_1e_31(expected):
    """The rounding bounds assume at most `most_records`; tails by scipy, exact."""
    most = most_records(expected)
    assert pdtrc(most, expected) <= 1e-31
    assert bdtrc(most, max(most, math.ceil(4 * expected)) + 1, 0.25) <= 1e-31 or expected < 100
