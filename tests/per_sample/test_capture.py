"""Captured passes, tried on a CPU with a recorder that has a CUDA graph's semantics."""

import logging
import math

import pytest
import torch
from tests.per_sample.small import Attention, Recurrent, cnn
from tests.per_sample.taped import recorded

from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.per_sample import passes
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.per_sample.layout import Placement


@pytest.fixture
def tapes(monkeypatch, card):
    """What was recorded, one after another."""
    made = []

    def record(run):
        made.append(recorded(run))
        return made[-1]

    monkeypatch.setattr(passes, "recorder_for", lambda _: record)
    return made


MODELS = {
    "cnn": (cnn, (1, 12, 12)),
    "recurrent": (Recurrent, (7, 5)),
    "attention": (Attention, (7, 8)),
}


def case(name, count=50):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    x = torch.randn(count, *shape)
    return make(), x, torch.arange(count) % 3


@pytest.mark.parametrize(
    "name", ["cnn", "recurrent", pytest.param("attention", marks=pytest.mark.slow)]
)
def test_replayed_sums_are_the_eager_ones(reference, name, tapes):
    """Other records, weights and clips than those that were captured; several passes of a batch."""
    module, x, y = case(name)
    captured = PerSampleKernel(FlatModel(module), cross_entropy)
    layout = Placement(length=16)
    for step in range(2):
        some = slice(10 * step, 10 * step + 20 + 4 * step)
        w = torch.rand(some.stop - some.start)
        rows = reference.per_sample_loop(module, cross_entropy, x[some], y[some])
        for clip, weights in ((2.0**-30, None), (math.inf, None), (0.1, "w")):
            asked = None if weights is None else reference.dealt(w)
            found = captured.clipped_sum(x[some], y[some], clip, asked, layout=layout)
            expected = reference.clipped(rows, clip, None if weights is None else w.double())
            assert reference.error(found, expected) < 1e-5
        # As a step leaves them: other numbers in the same place.
        captured.model.vector.add_(torch.randn(captured.model.size), alpha=0.05)
    # One to measure, and one to add: the weights, clips and records were others.
    assert len(tapes) == 2


def test_one_capture_for_each_model_and_length(tapes):
    module, x, y = case("cnn", 20)
    one = PerSampleKernel(FlatModel(module), cross_entropy)
    for _ in range(2):
        for length in (8, 16):
            one.clipped_sum(x, y, 0.5, layout=Placement(length=length))
            # Scattered slots are the same passes.
            places = torch.randperm(32)[:20]
            one.clipped_sum(x, y, 0.5, layout=Placement(places=places, slots=32, length=length))
    assert len(tapes) == 4
    other = PerSampleKernel(FlatModel(case("cnn")[0]), cross_entropy)
    other.clipped_sum(x, y, 0.5, layout=Placement(length=8))
    assert len(tapes) == 6
    # A layer that is switched to evaluation does other operations.
    module.eval()
    one.clipped_sum(x, y, 0.5, layout=Placement(length=8))
    assert len(tapes) == 8


def test_replayed_differences_follow_both_points(reference, tapes):
    module, x, y = case("cnn", 12)
    model = FlatModel(module)
    one = PerSampleKernel(model, cross_entropy)
    for _ in range(2):
        w, anchor = (0.1 * torch.randn(model.size) for _ in range(2))
        found = one.clipped_difference(x, y, w, anchor, 0.05, layout=Placement(length=16))
        assert torch.equal(model.vector, w)
        rows = []
        for point in (w, anchor):
            model.load(point)
            rows.append(reference.per_sample_loop(module, cross_entropy, x, y))
        assert reference.error(found, reference.clipped(rows[0] - rows[1], 0.05)) < 1e-4
    assert len(tapes) == 2


def test_a_float64_sum_is_captured_too(reference, tapes):
    module, x, y = case("cnn", 20)
    one = PerSampleKernel(FlatModel(module), cross_entropy)
    rows = reference.per_sample_loop(module, cross_entropy, x, y)
    for most in (None, 20, None, 20):
        found = one.clipped_sum(x, y, 0.5, most=most, layout=Placement(length=16))
        assert reference.error(found, reference.clipped(rows, 0.5)) < 1e-5
    assert len(tapes) == 3


def test_records_that_are_not_finite_leave_nothing_in_replays(reference, tapes):
    module, x, y = case("cnn", 16)
    one = PerSampleKernel(FlatModel(module), cross_entropy)
    rows = reference.per_sample_loop(module, cross_entropy, x, y)
    for bad in (None, math.nan, None, math.inf):
        given, good = x.clone(), torch.ones(16, dtype=torch.bool)
        if bad is not None:
            given[3], good[3] = bad, False
        found = one.clipped_sum(given, y, 0.5, layout=Placement(length=16))
        assert reference.error(found, reference.clipped(rows[good], 0.5)) < 1e-5


def test_a_model_that_cannot_be_captured_runs_and_logs_it_once(
    reference, monkeypatch, card, caplog
):
    def refused(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(passes, "recorder_for", lambda _: refused)
    module, x, y = case("cnn", 20)
    one = PerSampleKernel(FlatModel(module), cross_entropy)
    rows = reference.per_sample_loop(module, cross_entropy, x, y)
    with caplog.at_level(logging.WARNING, "fedpact"):
        for _ in range(2):
            found = one.clipped_sum(x, y, 0.5, layout=Placement(length=8))
            assert reference.error(found, reference.clipped(rows, 0.5)) < 1e-5
    (said,) = caplog.messages
    assert "cannot be captured: RuntimeError: operation not permitted" in said


def test_an_addition_that_cannot_be_captured_runs(reference, monkeypatch, tapes, caplog):
    record = passes.recorder_for(None)

    def once(run):
        if tapes:
            raise RuntimeError("out of memory")
        return record(run)

    monkeypatch.setattr(passes, "recorder_for", lambda _: once)
    module, x, y = case("cnn", 20)
    one = PerSampleKernel(FlatModel(module), cross_entropy)
    rows = reference.per_sample_loop(module, cross_entropy, x, y)
    for _ in range(2):
        found = one.clipped_sum(x, y, 0.5, layout=Placement(length=8))
        assert reference.error(found, reference.clipped(rows, 0.5)) < 1e-5
    assert len(caplog.messages) == 1
