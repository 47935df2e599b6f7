"""Adaptive clipping: what is released at C_t, where C_t settles, and what its counts cost."""

import math

import pytest
import torch

from fedpact.algorithms.private.adaptive_clip import Settings
from fedpact.algorithms.wrappers.base import Method
from fedpact.common.errors import PlanError
from fedpact.common.messages import State, Task
from fedpact.plan import Plan
from fedpact.privacy.batches import clip_for
from fedpact.privacy.oracle import Uniform
from fedpact.studies.conformance import HandFederation

RATE = 0.1


def quiet(**settings):
    """A federation without noise, each batch of all records."""
    method = Method("adaptive_clip", Settings(**{"learning_rate": RATE, **settings}))
    return method, HandFederation(private=True, sigma=0.0, rate=1.0)


def norms(bed, site):
    bed.model.load(bed.w)
    held = bed.records[site]
    return bed.kernel.alone(held.x, held.y)


@pytest.mark.parametrize("clip", [0.2, 1.0, 3.0])
def test_a_step_is_clipped_to_the_sites_own_clip(clip):
    """Σ min(1, C_t/‖g_j‖) g_j / n, C_t = f C with f from the site's memory."""
    method, bed = quiet()
    rows = norms(bed, "a")
    length = rows.norm(dim=1)
    assert length.min() < bed.clip < length.max()
    c = (clip * clip_for(bed.clip, len(rows)) / length).clamp_max(1)
    task = Task("run", 1, "adaptive_clip", {"w": bed.w}, {})
    oracle = bed.oracle("a", task, method.facts.channels)
    local = method.local(task, oracle, State(numbers={"clip": clip}))
    expected = bed.w - RATE * (c[:, None] * rows).sum(0) / len(rows)
    torch.testing.assert_close(local.vectors["w"], expected, rtol=0, atol=1e-9)
    share = float((length <= clip * bed.clip).double().mean())
    expected = clip * math.exp(-0.2 * (share - 0.5))
    assert local.memory.numbers["clip"] == pytest.approx(expected, rel=1e-12)


def test_the_clip_settles_at_the_quantile():
    method, bed = quiet(quantile=0.75, quantile_rate=0.1, learning_rate=1e-12)
    length = norms(bed, "a").norm(dim=1)
    memory = State()
    for number in range(1, 101):
        task = Task("run", number, "adaptive_clip", {"w": bed.w}, {})
        memory = method.local(task, bed.oracle("a", task, method.facts.channels), memory).memory
    share = float((length <= memory.numbers["clip"] * bed.clip).double().mean())
    # A step of the logarithm is at most 0.1 * 0.75, within which few records change sides.
    near = [
        float((length <= memory.numbers["clip"] * bed.clip * math.exp(s)).double().mean())
        for s in (-0.1, 0.1)
    ]
    assert near[0] - 1e-9 <= 0.75 <= near[1] + 1e-9, share


def test_the_counts_cost_is_in_the_ledgers_event():
    """1/σ² adds up over what a batch releases: σ_joint = σ / sqrt(1 + 1/10²)."""
    privacy = {"sigma": 2.0, "epsilon": 8.0}
    of = {
        name: Plan.parse({"algorithm": name, "privacy": privacy}).terms({"a": 500.0})["a"]
        for name in ("fedavg", "adaptive_clip")
    }
    assert of["fedavg"].event.sigma == 2.0
    assert of["adaptive_clip"].event.sigma == pytest.approx(2.0 / math.sqrt(1.01), rel=1e-12)


@pytest.mark.parametrize("by", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_is_a_positive_number(by):
    with pytest.raises(Exception, match="weight"):
        Uniform(by)


@pytest.mark.parametrize("algorithm", ["adaptive_clip", "adap_dpfl"])
def test_a_clip_that_changes_is_refused_where_it_means_nothing(algorithm):
    for table, why in (
        ({"privacy": {"mode": "automatic"}}, "scaled to the clip"),
        ({"control": {"kind": "ali", "iterations": 9}}, "assume a constant clip"),
    ):
        with pytest.raises(PlanError, match=why):
            Plan.parse({"algorithm": algorithm, **table})


@pytest.mark.parametrize(
    ("algorithm", "settings"), [("adaptive_clip", {"quantile_rate": 0.0}), ("adap_dpfl", {})]
)
def test_the_grid_follows_a_sites_own_clip(algorithm, settings):
    """Noise in the reply is η f σ C / B a step, f the site's: its integers' grid is as fine."""
    plan = {"algorithm": algorithm, "settings": settings, "compression": {"kind": "grid"}}
    method = Plan.parse(plan).method
    task = Task("run", 1, algorithm, {"w": torch.zeros(3)}, {})
    whole = method._weights_of(task, State())["w"][0]
    for clip in (0.5, 0.02):
        found = method._weights_of(task, State(numbers={"clip": clip, "first": 1.0}))
        assert found["w"][0] == pytest.approx(clip * whole, rel=1e-6)
