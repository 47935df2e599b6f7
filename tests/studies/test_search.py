"""Random search and successive halving: what is drawn, who goes on, and what is counted."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.studies import stand_in

from fedpact.common.errors import InputError, PlanError
from fedpact.common.format import upper
from fedpact.data.load import from_arrays
from fedpact.data.partition import make_partition
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import SampledGaussian
from fedpact.privacy.accounting.tuning_cost import count_trials
from fedpact.report.tuning_cost import TuningCost
from fedpact.studies import pool
from fedpact.studies import search as searching
from fedpact.studies.pool import Job
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
    assert len(draw_points(seven, ranges, None)) == 8
    assert draw_points(seven, [], None) == []
    with pytest.raises(PlanError, match=r"--draws is 9 without --draw: .*leave --draws out"):
        draw_points(seven, [], 9)
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
    entries, at = expand_points(plans, {"one": [{RATE: 0.1}, {RATE: 0.2}]})
    assert [plan.settings["learning_rate"] for plan in entries.values()] == [0.1, 0.2]
    assert [point.values for point in at.values()] == [{RATE: 0.1}, {RATE: 0.2}]
    with pytest.raises(PlanError, match="no setting of fedavg"):
        expand_points(plans, {"one": [{"settings.proximal": 1.0}]})
    with pytest.raises(PlanError, match=r"--draw settings\.proximal: it is no setting of"):
        draw_points(plans, ["settings.proximal=0.1:1"], 3)
    with pytest.raises(PlanError, match="trials set it themselves"):
        draw_points(plans, ["partition.validation=0.1:0.3"], 3)


BEST = {"fedavg": 0.3, "fedprox": 0.15}
"""Each algorithm's best rate; what is farther away is worse."""


@dataclass
class Found:
    """What a comparison in these tests has found."""

    folder: Path
    entries: list[SimpleNamespace]
    chosen: dict[str, dict[str, float]] = field(default_factory=dict)
    counted: Sequence[object] = ()


def test_each_plans_best_continue_and_every_run_is_counted(tmp_path, monkeypatch):
    calls, counted = [], {}

    def fake(plans, seeds, out, *, points=None, joining=False, stop):
        entries, at = expand_points(plans, points) if points else (plans, {})
        calls.append((out.name, {n: plan.document() for n, plan in entries.items()}))
        found = [
            SimpleNamespace(
                name=name,
                base=at[name].base if at else name,
                point=at.get(name),
                private=plan.private,
                missing={},
                spread=lambda of, plan=plan: SimpleNamespace(
                    mean=-abs(plan.settings[RATE[9:]] - BEST[plan.algorithm])
                ),
                runs=[SimpleNamespace(seed=seed, site_privacy={}) for seed in range(seeds)],
            )
            for name, plan in entries.items()
        ]
        return Found(out, found)

    monkeypatch.setattr(searching, "compare", fake)
    monkeypatch.setattr(searching, "count_tuning_cost", lambda runs: counted.update(runs) or [])
    monkeypatch.setattr(searching, "reserved_events", lambda run: {})
    monkeypatch.setattr(searching, "store", lambda found: found)
    plans = {n: Plan.parse({"algorithm": n, "rounds": 4}) for n in BEST}
    # A run without privacy costs nothing, and is searched beside the others.
    plans["plain"] = Plan.parse({"rounds": 4, "privacy": {"mode": "none"}})
    points = [{RATE: rate} for rate in (0.1, 0.2, 0.9, 0.31)]
    found = search(plans, points, 2, tmp_path / "out", halving=2, counted=True)
    asked = [
        (
            name,
            [plan["settings"][RATE[9:]] for plan in of.values()],
            {(plan["rounds"], plan["partition"]["validation"]) for plan in of.values()},
        )
        for name, of in calls
    ]
    assert asked == [
        ("rung-1", [0.1, 0.2, 0.9, 0.31] * 3, {(1, 0.2)}),
        ("rung-2", [0.31, 0.2, 0.1, 0.2, 0.31, 0.2], {(2, 0.2)}),
        ("out", [0.31, 0.1, 0.31], {(4, 0.0)}),
    ]
    assert found.chosen == {"fedavg": {RATE: 0.31}, "fedprox": {RATE: 0.1}, "plain": {RATE: 0.31}}
    assert len(counted) == 14
    assert sum(map(len, counted.values())) == 28


def test_a_setting_is_tried_with_the_plans_that_have_it():
    points = [{"settings.proximal": 0.1, RATE: 1.0}, {"settings.proximal": 0.2, RATE: 1.0}]
    assert searching._keep_known(Plan.parse({"algorithm": "fedprox"}), points) == points
    assert searching._keep_known(Plan.parse({"algorithm": "fedavg"}), points) == [{RATE: 1.0}]


def test_no_trial_knows_held_out_or_test_records(tmp_path, monkeypatch):
    """What is chosen, and every trial, is the same whatever the other records' labels are."""
    monkeypatch.setattr(Job, "here", True)
    plan = Plan.parse({"rounds": 3, "sites": 2, "privacy": {"mode": "none"}})
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    held = make_partition(from_arrays(x, y), plan.partition, 2, plan.seed).held_out
    wrong = y.clone()
    for places in held.values():
        wrong[places] = 1 - y[places]
    chosen, rounds = [], []
    for labels, test in ((y, y), (wrong, 1 - y)):
        out = tmp_path / str(len(chosen))
        points = [{RATE: 0.001}, {RATE: 5.0}]
        found = search({"one": plan}, points, 1, out, data=(x, labels), test=(x, test))
        chosen.append((found.chosen, found.entries[0].runs[0].accuracy))
        files = sorted(out.glob("trials/*/*/rounds.jsonl"))
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        rounds.append([(line.get("accuracy"), line.get("loss")) for line in lines])
    assert rounds[0] == rounds[1]
    assert any(accuracy for accuracy, _ in rounds[0])
    assert chosen[0][0] == chosen[1][0] == {"one": {RATE: 5.0}}
    assert chosen[0][1] > 0.5 > chosen[1][1]
    page = (out / "comparison.html").read_text()
    assert "settings.learning_rate = 5" in page
    assert "validation records" in page


def test_only_trials_that_release_alike_are_counted(monkeypatch):
    """Of unlike events the sum would follow from which run was best, which composition forbids."""
    monkeypatch.setattr(searching, "reserved_events", lambda run: run)
    quiet, loud = {0: {"a": 1}, 1: {"a": 2}}, {0: {"a": 1}, 1: {"a": 3}}
    searching._check_alike([quiet, quiet])
    with pytest.raises(PlanError, match="different events"):
        searching._check_alike([quiet, loud])


def test_a_search_ends_at_a_trial_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "_work", stand_in.refuse)
    plan = Plan.parse({"rounds": 1, "sites": 2})
    with pytest.raises(PlanError, match="has not ended: a paragraph; the same command goes on"):
        search({"one": plan}, [{RATE: 1.0}, {RATE: 2.0}], 1, tmp_path / "out")
    assert not (tmp_path / "out" / "one").exists()


@pytest.mark.parametrize(
    ("given", "points", "how", "told"),
    [
        ({}, [], {"halving": 2}, "--draw without --sweep"),
        ({}, [{RATE: 1.0}], {"sweep": {RATE: [2.0]}}, "--draw without --sweep"),
        ({}, [{RATE: 1.0}], {"halving": 0}, "halving is 0: expected"),
        ({}, [{RATE: 1.0}], {"halving": -3}, "halving is -3: expected"),
        (
            {"evaluation": {"share": 0.2}},
            [{RATE: 1.0}, {RATE: 2.0}],
            {},
            "leave .evaluation. out while choosing",
        ),
        ({"budget": {"patience": 3}}, [{RATE: 1.0}], {}, "leave patience and accuracy out"),
        ({}, [{"rounds": 2}], {"halving": 2}, "both set the rounds"),
        ({"partition": {"held_out": 0.0}}, [{RATE: 1.0}], {"joining": True}, "leave --joining out"),
        ({"privacy": {"mode": "none"}}, [{RATE: 1.0}], {"counted": True}, "leave --counted out"),
    ],
)
def test_what_no_search_can_do_is_refused_before_it(given, points, how, told, tmp_path):
    with pytest.raises(InputError, match=told):
        search({"one": Plan.parse(given)}, points, 1, tmp_path, **how)
    assert not list(tmp_path.iterdir())


def test_nothing_is_said_of_a_winner_alone_after_halving():
    found = count_trials([{SampledGaussian(1.0, 4.0): 5}] * 3, 1e-5)
    cost = TuningCost("three", found, None, 0)
    assert len(cost.lines) == 2
    (line,) = searching._of_all(cost).lines
    assert f"ε = {upper(found.every)}" in line
    assert "nothing less is proven" in line
