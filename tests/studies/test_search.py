"""Random search and successive halving: what is drawn, who goes on, and what is counted."""

import math
from types import SimpleNamespace

import pytest

from fedpact.common.errors import PlanError
from fedpact.common.format import upper
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import SampledGaussian
from fedpact.privacy.accounting.tuning_cost import count_trials
from fedpact.report.tuning_cost import TuningCost
from fedpact.studies import search as searching
from fedpact.studies.search import draw_points, read_ranges, rungs, search
from fedpact.studies.sweep import expand_points

RATE = "settings.learning_rate"


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ((27, 9, 3), [(3, 9), (9, 3), (27, 1)]),
        ((4, 16, 2), [(1, 16), (2, 8), (4, 4)]),
        ((30, 5, 2), [(7, 5), (15, 2), (30, 1)]),
        ((30, 5, 1), [(30, 5)]),
        ((1, 5, 2), [(1, 5)]),
    ],
)
def test_rungs_multiply_rounds_and_divide_points(asked, steps):
    assert rungs(*asked) == steps


def test_points_are_drawn_within_their_ranges_by_their_law():
    ranges = [f"{RATE}=0.01:100", "rounds=1:3", "server.momentum=-1.0:1"]
    seven, eight = ({"one": Plan.parse({"seed": seed})} for seed in (7, 8))
    points = draw_points(seven, ranges, 300)
    assert points == draw_points(seven, ranges, 300) != draw_points(eight, ranges, 300)
    assert points[:5] == draw_points(seven, ranges, 5)
    assert draw_points(seven, [], 5) == []
    rates = sorted(math.log10(point[RATE]) for point in points)
    # Even on the logarithm: the median is 0 ± 0.07 times 2.
    assert -2 <= rates[0] < -1.9
    assert abs(rates[150]) < 0.45
    assert 1.9 < rates[-1] <= 2
    assert {point["rounds"] for point in points} == {1, 2, 3}
    assert all(type(point["rounds"]) is int for point in points)
    assert all(-1 <= point["server.momentum"] <= 1 for point in points)


@pytest.mark.parametrize("text", ["x", "x=1", "x=2:1", "x=a:b", "x=1:2:3", "=1:2", "x=nan:1"])
def test_an_invalid_range_is_refused(text):
    with pytest.raises(PlanError, match="expected KEY=LOW:HIGH"):
        read_ranges([text])


def test_a_point_is_of_keys_that_the_plan_has():
    plans = {"one": Plan.parse({"algorithm": "fedavg"})}
    entries, at = expand_points(plans, [{RATE: 0.1}, {RATE: 0.2}])
    assert [plan.settings["learning_rate"] for plan in entries.values()] == [0.1, 0.2]
    assert [point.values for point in at.values()] == [{RATE: 0.1}, {RATE: 0.2}]
    with pytest.raises(PlanError, match="no setting of fedavg"):
        expand_points(plans, [{"settings.proximal": 1.0}])


def test_the_best_continue_and_every_run_is_counted(tmp_path, monkeypatch):
    calls = []

    def fake(plans, seeds, out, *, points):
        calls.append((plans["one"].rounds, out.name, [point[RATE] for point in points]))
        _, at = expand_points(plans, points)
        entries = [
            SimpleNamespace(
                name=name,
                private=True,
                # 0.3 is best, and what is farther away is worse.
                spread=lambda of, rate=point.values[RATE]: SimpleNamespace(mean=-abs(rate - 0.3)),
                runs=[SimpleNamespace(seed=seed, site_privacy={}) for seed in range(seeds)],
            )
            for name, point in at.items()
        ]
        return SimpleNamespace(entries=entries, points=at)

    counted = {}
    monkeypatch.setattr(searching, "compare", fake)
    monkeypatch.setattr(searching, "count_tuning_cost", lambda runs: counted.update(runs) or [])
    monkeypatch.setattr(searching, "replace", lambda found, counted: found)
    plans = {"one": Plan.parse({"algorithm": "fedavg", "rounds": 4})}
    points = [{RATE: rate} for rate in (0.1, 0.2, 0.9, 0.31)]
    search(plans, points, 2, tmp_path, halving=2, counted=True)
    assert calls == [
        (1, "rung-1", [0.1, 0.2, 0.9, 0.31]),
        (2, "rung-2", [0.31, 0.2]),
        (4, "rung-3", [0.31]),
    ]
    assert len(counted) == 7
    assert sum(map(len, counted.values())) == 14


@pytest.mark.parametrize(
    ("points", "how"), [([], {"halving": 2}), ([{RATE: 1.0}], {"sweep": {RATE: [2.0]}})]
)
def test_incompatible_settings_are_refused(points, how, tmp_path):
    with pytest.raises(PlanError, match="--draw without --sweep"):
        search({"one": Plan.parse({})}, points, 1, tmp_path, **how)


def test_halving_counts_only_runs_that_release_alike():
    """Of unlike events the sum would follow from which run was best, which composition forbids."""
    quiet, loud = (
        {0: SimpleNamespace(site_privacy={"a": SimpleNamespace(rate=1.0, steps=n, sigmas={})})}
        for n in (1, 4)
    )
    searching._check_alike([quiet, quiet])
    with pytest.raises(PlanError, match="different events"):
        searching._check_alike([quiet, loud])


def test_nothing_is_said_of_a_winner_alone_after_halving():
    found = count_trials([{SampledGaussian(1.0, 4.0): 5}] * 3, 1e-5)
    cost = TuningCost("three", found, None, 0)
    assert len(cost.lines) == 2
    (line,) = searching._of_all(cost).lines
    assert f"ε = {upper(found.every)}" in line
    assert "nothing less is proven" in line
