"""Clipped sums of gradient differences: exact far apart and near, and never longer than the bound.

The reference is vmap(grad) in float64 at both points, subtracted and clipped record by record.
"""

import copy
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from fedpact.common.errors import InputError
from fedpact.common.losses import cross_entropy, squared_error
from fedpact.common.params import FlatModel
from fedpact.per_sample import norms
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel
from fedpact.per_sample.layout import Placement


def mlp(reference):
    return nn.Sequential(
        nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3)
    )


def cnn(reference):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, groups=2), nn.GroupNorm(2, 6), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


def positions(reference):
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 60), nn.Flatten())


def deep(reference):
    # At the second layer few positions and a wide weight: norms from Gram matrices.
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.Tanh(), nn.Conv2d(32, 32, 3), nn.Flatten())


def words(reference):
    return nn.Sequential(nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 5), nn.Flatten())


def own(reference):
    return nn.Sequential(nn.Linear(6, 5), reference.Shift(5), nn.Tanh(), nn.Linear(5, 3))


def twice(reference):
    def run(m, x):
        return m.head(torch.tanh(m.body(torch.tanh(m.body(x)))))

    return reference.Apply(run, body=nn.Linear(6, 6), head=nn.Linear(6, 3))


def films(reference):
    middle = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.ConvTranspose2d(2, 1, 2))
    return nn.Sequential(nn.Flatten(0, 1), middle, nn.Unflatten(0, (-1, 2)), nn.Flatten())


MODELS = {
    films: (2, 1, 5, 5), mlp: (6,), cnn: (1, 8, 8), deep: (1, 6, 6), positions: (4, 6),
    words: (4,), own: (6,), twice: (6,),
}  # fmt: skip


def ways(make):
    """What is done with a record by itself is the same for all layers: few models take that way."""
    return ("graph", "records") if make in (films, words, own) else ("graph",)


def case(reference, make, seed=0):
    torch.manual_seed(seed)
    module, shape = make(reference).double(), MODELS[make]
    x = torch.randint(0, 7, (7, *shape)) if make is words else torch.randn(7, *shape).double()
    y = torch.randn_like(module(x).detach())
    w = nn.utils.parameters_to_vector(module.parameters()).detach()
    return module, x, y, w, torch.randn_like(w)


def rows_at(reference, module, x, y, w):
    module = copy.deepcopy(module).double()
    nn.utils.vector_to_parameters(w.double(), module.parameters())
    return reference.per_sample(module, squared_error, x, y)


@pytest.mark.parametrize("make", MODELS)
def test_every_kind_of_layer_agrees_with_the_reference(reference, make, monkeypatch):
    module, x, y, w, direction = case(reference, make)
    kernels = reference.kernels(module, squared_error, *ways(make))
    check_differences(reference, module, kernels.values(), x, y, w, direction)
    # Gradients are not kept, but made twice.
    monkeypatch.setattr(norms, "KEEP_BYTES", 0)
    monkeypatch.setattr(norms, "CHUNK_BYTES", 2000)
    # How many records are taken at a time follows from it where each is by itself.
    if "records" in kernels:
        kernels |= reference.kernels(module, squared_error, "records")
    check_differences(reference, module, kernels.values(), x, y, w, direction)


def check_differences(reference, module, kernels, x, y, w, direction):
    for distance in (1.0, 1e-3):
        anchor = w + distance * direction
        rows = rows_at(reference, module, x, y, w) - rows_at(reference, module, x, y, anchor)
        middle = float(rows.norm(dim=1).median())
        for kernel in kernels:
            for bound in (math.inf, middle):
                found = kernel.clipped_difference(x, y, w, anchor, bound)
                assert reference.error(found, reference.clipped(rows, bound)) < 1e-14 / distance
            assert torch.equal(kernel.model.vector, w)
        plain = PlainKernel(FlatModel(copy.deepcopy(module)), squared_error)
        found = plain.difference(x, y, w, anchor)
        assert reference.error(found, rows) < 1e-14 / distance


@pytest.fixture(scope="module", params=MODELS)
def near(request, reference):
    """A model, and its kernels in float32: traced once, and loaded with the weights of a case."""
    module = case(reference, request.param)[0].float()
    return request.param, reference.kernels(module, squared_error, *ways(request.param)).values()


def test_near_the_anchor_no_record_adds_more_than_the_bound(reference, near):
    # ‖d_j‖ is about `distance` times ‖g_j‖: ‖g‖² + ‖g'‖² - 2⟨g, g'⟩ in float32 would err by
    # 1e-7 / distance², a factor of 100,000 at the end. The bound is far below every difference.
    make, kernels = near
    _, x, y, w, direction = case(reference, make, seed=1)
    x, y = (t.float() if t.is_floating_point() else t for t in (x, y))
    w = w.float()
    each = slice(0, 1), slice(6, 7)
    for kernel in kernels:
        for distance, one in product((1e-1, 1e-3, 1e-6, 0.0), each):
            anchor = w + distance * direction.float()
            free = float(kernel.clipped_difference(x[one], y[one], w, anchor, math.inf).norm())
            bound = 0.01 * free or 1.0
            found = kernel.clipped_difference(x[one], y[one], w, anchor, bound)
            assert float(found.double().norm()) <= bound * (1 + 1e-5)
            if free:
                assert float(found.double().norm()) >= bound * (1 - 1e-5)


def test_float32_difference_is_exact_to_rounding_near_the_anchor(reference, near):
    # Gradients of size 1 are known to about 1e-7 each in float32, so a difference of 1e-3 of them
    # is good to about 1e-4; the test leaves another factor of 10 for the depth of the model.
    make, kernels = near
    module, x, y, w, direction = case(reference, make, seed=2)
    w32 = w.float()
    anchor = w32 + 1e-3 * direction.float()
    rows = rows_at(reference, module, x, y, w32) - rows_at(reference, module, x, y, anchor)
    x32, y32 = (t.float() if t.is_floating_point() else t for t in (x, y))
    bound = float(rows.norm(dim=1).median())
    for kernel in kernels:
        found = kernel.clipped_difference(x32, y32, w32, anchor, bound)
        assert reference.error(found, reference.clipped(rows, bound)) < 1e-3


def test_the_points_may_be_the_models_own_vector(reference):
    module, x, y, w, direction = case(reference, mlp)
    for kind in (PerSampleKernel, PlainKernel):
        model = FlatModel(copy.deepcopy(module))
        kernel = kind(model, squared_error)
        arguments = (1e9,) if kind is PerSampleKernel else ()
        difference = getattr(
            kernel, "clipped_difference" if kind is PerSampleKernel else "difference"
        )
        there = difference(x, y, w, w + direction, *arguments)
        back = difference(x, y, w + direction, w, *arguments)
        assert torch.allclose(there, -back, rtol=1e-12)
        model.load(w)
        assert torch.equal(difference(x, y, model.vector, w + direction, *arguments), there)
        assert torch.equal(model.vector, w)
        assert torch.equal(difference(x, y, w + direction, model.vector, *arguments), back)
        assert torch.equal(difference(x, y, w, w, *arguments), torch.zeros_like(w))


def test_an_input_that_is_a_view_of_the_weights(reference):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = nn.Parameter(torch.randn(4, 6)), nn.Linear(6, 1)

        def forward(self, x):
            return x + self.layer(self.table.expand(x.shape[0], 4, 6)).squeeze(-1)

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), Positions()).double()
    x, y = reference.data(5, 4), reference.data(5, 4, seed=1)
    for frozen in (False, True):
        module[1].table.requires_grad_(not frozen)
        model = FlatModel(module)
        w, anchor = model.vector.clone(), torch.randn_like(model.vector)
        kernel = PerSampleKernel(model, squared_error)
        found = kernel.clipped_difference(x, y, w, anchor, math.inf)
        expected = PlainKernel(model, squared_error).difference(x, y, w, anchor)
        assert kernel.way(x, y) == "graph"
        assert (found - expected).norm() <= 1e-13 * expected.norm()


@pytest.mark.parametrize("way", ["graph", "records"])
@pytest.mark.parametrize("at_anchor", [True, False])
def test_record_not_finite_at_either_point_adds_nothing(reference, at_anchor, way):
    module, x, y, w, direction = case(reference, mlp)
    anchor = w + direction
    kernel = reference.forced(way, module, squared_error)
    others = torch.tensor([0, 1, 3, 4, 5, 6])
    expected = kernel.clipped_difference(x[others], y[others], w, anchor, 0.5)
    x[2] = math.nan
    assert torch.equal(kernel.clipped_difference(x, y, w, anchor, 0.5), expected)
    broken = torch.full_like(w, math.inf)
    points = (w, broken) if at_anchor else (broken, w)
    assert torch.equal(kernel.clipped_difference(x, y, *points, 0.5), torch.zeros_like(w))


def test_an_empty_batch_gives_zeros_at_w(reference):
    module, x, y, w, direction = case(reference, mlp)
    model = FlatModel(module)
    model.load(direction)
    private, plain = PerSampleKernel(model, squared_error), PlainKernel(model, squared_error)
    for found in (
        private.clipped_difference(x[:0], y[:0], w, direction, 1.0),
        plain.difference(x[:0], y[:0], w, direction),
    ):
        assert torch.equal(found, torch.zeros_like(w))
        assert torch.equal(model.vector, w)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, -math.inf])
def test_a_bound_that_bounds_nothing_is_refused(bound):
    kernel = PerSampleKernel(FlatModel(nn.Linear(2, 3)), cross_entropy)
    v = torch.zeros(9)
    with pytest.raises(InputError, match="bound"):
        kernel.clipped_difference(torch.zeros(2, 2), torch.zeros(2).long(), v, v, bound)


@pytest.mark.parametrize("alike", [True, False])
def test_traced_differences_of_dense_models_are_tried(monkeypatch, alike):
    """Where a slot shows in what is traced, each record has a pass of its own."""
    kernel = PerSampleKernel(FlatModel(nn.Linear(3, 2)), cross_entropy)
    x, y, w = torch.randn(8, 3), torch.arange(8) % 2, kernel.model.vector.clone()
    passes, found = kernel._passes, []
    real = passes.gradients, passes.differences

    def gradients(x, y):
        one = real[0](x, y)
        return one if alike else replace(one, losses=one.losses + torch.arange(len(x)))

    monkeypatch.setattr(passes, "gradients", gradients)
    monkeypatch.setattr(
        passes, "differences", lambda x, *rest: (found.append(len(x)), real[1](x, *rest))[1]
    )
    kernel.clipped_difference(x, y, w, w + 1, 1.0, layout=Placement(length=8))
    assert found == ([8] if alike else [1] * 8)
