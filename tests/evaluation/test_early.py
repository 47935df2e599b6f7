"""A run that ends by what was released: where it ends, and that only what was charged is spent."""

import json

import pytest

import fedpact
from fedpact.common.errors import PlanError
from fedpact.common.messages import RoundRecord
from fedpact.evaluation.intervals import Early, outcome, released_accuracy
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import epsilon
from fedpact.privacy.ledger.receipt import receipt
from fedpact.simulation.setup import SimulationSetup
from fedpact.simulation.simulate import simulate

PLAIN = {"rounds": 6, "sites": 2, "privacy": {"mode": "none"}}
PRIVATE = {
    "rounds": 4,
    "sites": 2,
    "evaluation": {"share": 0.2, "every": 1},
    "privacy": {"epsilon": 20.0, "accountant": "rdp"},
    "settings": {"local_steps": 1},
}

# In round 2 a step is a million times as long as in round 1.
FASTER = {"optimiser": "momentum", "momentum": 0.0, "learning_rate": 1e4, "schedule": [1.0, 1e6]}


def ended(early, *accuracies):
    early.see([RoundRecord(round=1 + k, accuracy=a) for k, a in enumerate(accuracies)])
    return early.status


def test_when_it_ends():
    assert ended(Early(accuracy=0.8), 0.9, 0.7) == ""
    assert ended(Early(accuracy=0.8), 0.7, 0.8) == "accuracy"
    # Two that are no better than the best before; one that was not measured does not count.
    assert ended(Early(patience=2), 0.5, 0.6, 0.6, None) == ""
    assert ended(Early(patience=2), 0.5, 0.6, 0.55, None, 0.6) == "patience"
    assert ended(Early(patience=2), 0.5, 0.6, 0.55, 0.61) == ""
    assert ended(Early(), 1.0, 0.0) == ""


def test_plain_run_stops_at_target_and_stays_stopped(tmp_path):
    whole = fedpact.run(Plan.parse({**PLAIN, "run": {"evaluate_every": 1}}), tmp_path / "a")
    reached = [record.accuracy for record in whole.records]
    target = sorted(reached[1:])[2]
    first = next(k for k in range(1, 7) if reached[k] >= target)
    plan = Plan.parse({**PLAIN, "budget": {"accuracy": target}})
    result = fedpact.run(plan, tmp_path / "b")
    assert (result.summary["status"], result.summary["rounds"]) == ("accuracy", first)
    assert [r.accuracy for r in result.records] == reached[: first + 1]
    again = fedpact.run(plan, tmp_path / "b")
    assert again.summary["rounds"] == first


def test_private_run_stops_by_released_values_at_charged_cost(tmp_path):
    """Of the released accuracies, noise and all, a target of nearly none is met in round 1."""
    plan = Plan.parse({**PRIVATE, "budget": {"accuracy": 1e-6}})
    result = fedpact.run(plan, tmp_path / "run")
    form = SimulationSetup.of(plan).form
    assert released_accuracy(result.records[1], form) >= 1e-6
    check_reservation(result, "accuracy")
    for site in result.summary["epsilon"]:
        told = receipt(tmp_path / "run" / "sites" / site / "ledger.jsonl")
        (training,) = [run for run in told["runs"].values() if not run["beside"]]
        assert [(e["spent"], e["reserved"]) for e in training["events"]] == [(1, 4)]
        assert training["epsilon_spent"] < training["epsilon_reserved"]


def check_reservation(run, status):
    """Fail unless a run that ended after a round states what it had reserved."""
    assert (run.summary["status"], run.summary["rounds"]) == (status, 1)
    assert {*run.summary["epsilon"].values()} == {20.0}
    held = json.loads((run.folder / "privacy.json").read_text())["evaluation"]
    spent = {*run.summary["evaluation"]["epsilon_spent"].values()}
    assert spent == {held["epsilon_reserved"]}


@pytest.mark.parametrize(
    ("status", "changes"),
    [
        ("diverged", {"settings": {"learning_rate": 1e30}, "server": FASTER}),
        ("stopped", {}),
    ],
)
def test_a_run_ended_by_releases_costs_its_reservation(tmp_path, status, changes):
    """Its number of events may follow from them, so what was charged so far is no bound."""
    ends = iter([False, status == "stopped"])
    plan = Plan.parse({**PRIVATE, "rounds": 3, **changes})
    run = simulate(plan, tmp_path / "run", stop=lambda: next(ends, False))
    check_reservation(run, status)


def test_an_answer_that_did_not_arrive_counts_as_charged():
    form = SimulationSetup.of(Plan.parse(PRIVATE)).form
    sums = {channel: [1.0] * count for channel, count in form.lengths.items()}
    missed = RoundRecord(round=2, evaluation={"b": sums}, unevaluated={"a": "rejected: far off"})
    found = outcome([RoundRecord(round=1, evaluation={"a": sums, "b": sums}), missed], form)
    each = {n: epsilon({form.once.event: n}, form.once.budget.delta, "rdp") for n in (2, 4)}
    assert found["epsilon_spent"] == {"a": each[4], "b": each[2]}


def test_shared_noise_reservation_holds_without_other_sites(tmp_path):
    privacy = {"epsilon": 2.0, "accountant": "rdp", "trust": "sum", "honest": 2}
    secure = {"threshold": 3}
    raw = {"rounds": 4, "sites": 3, "data": "digits", "budget": {"accuracy": 1e-6}}
    plan = Plan.parse({**raw, "privacy": privacy, "secure_aggregation": secure})
    summary = fedpact.run(plan, tmp_path / "run").summary
    said = json.loads((tmp_path / "run" / "privacy.json").read_text())["sites"]
    assert (summary["status"], summary["rounds"]) == ("accuracy", 1)
    assert summary["epsilon_alone"] == {n: each["epsilon_alone"] for n, each in said.items()}


def test_a_private_run_is_not_stopped_by_exact_numbers():
    private = {"privacy": {"epsilon": 2.0}, "rounds": 2, "sites": 2, "data": "synthetic_iid"}
    limits = {"budget": {"patience": 1}, "partition": {"held_out": 0.2}}
    with pytest.raises(PlanError, match="no accuracy is released"):
        SimulationSetup.of(Plan.parse({**private, **limits}))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"every": 0}, "set evaluation.every = 1"),
        ({"every": 4}, "set evaluation.every = 1"),
        ({"every": 1, "releases": ["roc"]}, 'add "hits"'),
    ],
)
@pytest.mark.parametrize("budget", [{"accuracy": 0.5}, {"patience": 1}])
def test_a_stopping_rule_that_cannot_apply_is_refused(change, told, budget):
    changed = {**PRIVATE, "evaluation": {"share": 0.2, **change}}
    Plan.parse(changed)
    with pytest.raises(PlanError, match=told):
        Plan.parse({**changed, "budget": budget})
    # A plain run has its own accuracy.
    plain = {"mode": "none"}
    Plan.parse({**PRIVATE, "evaluation": {"share": 0.2}, "budget": budget, "privacy": plain})


def test_without_an_accuracy_of_any_kind_it_is_said_what_to_set():
    budget = {"budget": {"accuracy": 0.5}, "data": "synthetic_iid", "sites": 2}
    plan = {**PRIVATE, **budget, "evaluation": {"share": 0.2, "releases": []}}
    with pytest.raises(PlanError, match=r'set evaluation\.releases = \["hits"\]'):
        SimulationSetup.of(Plan.parse(plan))
    plan = {**PLAIN, **budget, "partition": {"held_out": 0.0}}
    with pytest.raises(PlanError, match=r"set partition\.held_out"):
        SimulationSetup.of(Plan.parse(plan))
