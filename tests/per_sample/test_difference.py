"""Clipped sums of gradient differences: exact far apart and near, and never longer than the bound.

The reference is autograd in float64 at both points, subtracted and clipped record by record.
"""

import copy
import math
from dataclasses import replace

import pytest
import torch
from tests.per_sample.attacked import made, records
from torch import nn

from fedpact.common.errors import InputError
from fedpact.common.losses import cross_entropy, squared_error
from fedpact.common.params import FlatModel
from fedpact.per_sample import norms
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel
from fedpact.per_sample.layout import Placement

# "records" takes each by itself, and what is done with it there is the same for all layers.
NAMES = (
    "rows", "positions", "gram", "pooled", "few", "groups", "attention", "shared", "words", "films",
    "lstm", "records",
)  # fmt: skip


def usual(*names):
    """Every kind of layer; those that are not named are marked slow."""
    return [pytest.param(n, marks=() if n in names else pytest.mark.slow) for n in NAMES]


def case(name, seed=0):
    module, (x, y) = made(name, torch.float64, seed), records(name, 7, seed + 1, torch.float64)
    w = nn.utils.parameters_to_vector(module.parameters()).detach()
    return module, x, y, w, torch.randn_like(w)


def rows_at(reference, module, x, y, w):
    module = copy.deepcopy(module).double()
    nn.utils.vector_to_parameters(w.double(), module.parameters())
    return reference.per_sample_loop(module, cross_entropy, x, y)


@pytest.mark.parametrize("name", usual(*NAMES[4:7], *NAMES[8:]))
def test_every_kind_of_layer_agrees_with_the_reference(reference, name, monkeypatch):
    module, x, y, w, direction = case(name)
    at_w, cases = rows_at(reference, module, x, y, w), []
    for distance in (1.0, 1e-3):
        anchor = w + distance * direction
        cases.append((distance, anchor, at_w - rows_at(reference, module, x, y, anchor)))
    # Where gradients are kept, and where they are not, but made twice.
    for keep, chunk in ((norms.KEEP_BYTES, norms.CHUNK_BYTES), (0, 2000)):
        monkeypatch.setattr(norms, "KEEP_BYTES", keep)
        monkeypatch.setattr(norms, "CHUNK_BYTES", chunk)
        # How many records are taken at a time follows from it where each is by itself.
        kernel = PerSampleKernel(FlatModel(copy.deepcopy(module)), cross_entropy)
        for distance, anchor, rows in cases:
            for bound in (math.inf, float(rows.norm(dim=1).median())):
                of = x, y, w, anchor, bound
                found = kernel.clipped_difference(*of, layout=Placement(length=8))
                assert reference.error(found, reference.clipped(rows, bound)) < 1e-14 / distance
            assert torch.equal(kernel.model.vector, w)
    if kernel.way(x, y) == "graph":  # a plain sum mixes the records as the model does
        plain = PlainKernel(FlatModel(copy.deepcopy(module)), cross_entropy)
        for distance, anchor, rows in cases:
            assert reference.error(plain.difference(x, y, w, anchor), rows) < 1e-14 / distance


@pytest.mark.parametrize("name", usual("attention", "lstm", "records"))
def test_near_the_anchor_no_record_adds_more_than_the_bound(name):
    # ‖d_j‖ is about `distance` times ‖g_j‖: ‖g‖² + ‖g'‖² - 2⟨g, g'⟩ in float32 would err by
    # 1e-7 / distance², a factor of 100,000 at the end. The bound is far below every difference.
    module, x, y, w, direction = case(name, seed=1)
    x, w, direction = (t.float() if t.is_floating_point() else t for t in (x, w, direction))
    kernel = PerSampleKernel(FlatModel(module.float()), cross_entropy)
    one = slice(6, 7)
    for distance in (1e-1, 1e-3, 1e-6, 0.0):
        anchor = w + distance * direction
        free = float(kernel.clipped_difference(x[one], y[one], w, anchor, math.inf).norm())
        bound = 0.01 * free or 1.0
        found = kernel.clipped_difference(x[one], y[one], w, anchor, bound)
        assert float(found.double().norm()) <= bound * (1 + 1e-5)
        if free:
            assert float(found.double().norm()) >= bound * (1 - 1e-5)


def test_the_points_may_be_the_models_own_vector():
    module, x, y, w, direction = case("rows")
    for kind in (PerSampleKernel, PlainKernel):
        model = FlatModel(copy.deepcopy(module))
        kernel = kind(model, cross_entropy)
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
    positions = reference.Apply(
        lambda m, x: x + m.layer(m.table.expand(x.shape[0], 4, 6)).squeeze(-1),
        table=nn.Parameter(torch.randn(4, 6)), layer=nn.Linear(6, 1),
    )  # fmt: skip
    module = nn.Sequential(nn.Linear(4, 4), positions).double()
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
    module, x, y, w, direction = case("rows")
    anchor = w + direction
    kernel = reference.forced(way, module, cross_entropy)
    others = torch.tensor([0, 1, 3, 4, 5, 6])
    expected = kernel.clipped_difference(x[others], y[others], w, anchor, 0.5)
    x[2] = math.nan
    assert torch.equal(kernel.clipped_difference(x, y, w, anchor, 0.5), expected)
    broken = torch.full_like(w, math.inf)
    points = (w, broken) if at_anchor else (broken, w)
    assert torch.equal(kernel.clipped_difference(x, y, *points, 0.5), torch.zeros_like(w))


def test_an_empty_batch_gives_zeros_at_w():
    module, x, y, w, direction = case("rows")
    model = FlatModel(module)
    model.load(direction)
    private, plain = PerSampleKernel(model, cross_entropy), PlainKernel(model, cross_entropy)
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

    def gradients(x, y, traced=False):
        one = real[0](x, y, traced=traced)
        off = traced and not alike
        return replace(one, losses=one.losses + torch.arange(len(x))) if off else one

    monkeypatch.setattr(passes, "gradients", gradients)
    monkeypatch.setattr(
        passes, "differences", lambda x, *rest: (found.append(len(x)), real[1](x, *rest))[1]
    )
    kernel.clipped_difference(x, y, w, w + 1, 1.0, layout=Placement(length=8))
    assert found == ([8] if alike else [1] * 8)
