"""Every algorithm's settings as they are in effect: recorded, marked where they were left to their
defaults, compared, and enough for a run of the embedded configuration."""

import json

import pytest

from fedpact import algorithms
from fedpact.algorithms.wrappers.base import Method
from fedpact.plan import Plan
from fedpact.report.compared_runs import differences
from fedpact.simulation.simulate import simulate
from fedpact.studies.compare import read_plans

NAMES = algorithms.names()
# Three by three.
PAIRS = [NAMES[i : i + 3] for i in range(0, len(NAMES), 3)]
each = pytest.mark.parametrize("name", NAMES)


def settings_of(name, **given):
    return algorithms.load(name).Settings(**given)


@each
def test_plan_records_all_settings_and_marks_defaults(name):
    plan = Plan.read(None, [f"algorithm={name}", "seed=0"])
    document = json.loads(json.dumps(plan.document()))
    own = settings_of(name)
    expected = set(type(own).model_fields) - (
        {"local_steps"} if plan.method.facts.controlled else set()
    )
    assert set(document["settings"]) == expected
    marked = {key for key in document["defaults"] if key.startswith("settings.")}
    typed = {"learning_rate"} if name == "fedavg" else set()
    assert marked == {f"settings.{key}" for key in expected - typed}
    if not typed:
        assert document["settings"]["learning_rate"] == own.step_size > 0
    if "local_steps" in expected:
        steps = Method(name).steps()
        assert document["settings"]["local_steps"] == steps == plan.steps // plan.rounds
    # Given by name or by value, and seed = 0 is what the default would have been.
    assert {"seed", "algorithm", "rounds"}.isdisjoint(document["defaults"])
    assert "run.workers" in document["defaults"]


@each
def test_a_stored_plan_is_read_back_unchanged(name, tmp_path):
    plan = Plan.read(None, [f"algorithm={name}"])
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.document()))
    again = Plan.read(path)
    assert again == plan
    assert again.document() == plan.document()
    # What follows from other keys follows them here too, and a value that is written counts.
    longer = Plan.read(path, ["rounds=7"])
    assert longer == Plan.read(None, [f"algorithm={name}", "rounds=7"])
    # As a file says it that has every key, those without a value too.
    whole = Plan.parse(plan.model_dump(mode="json"))
    assert whole == plan == Plan.parse(whole.document())
    empty = {key: None for key, value in settings_of(name) if value is None}
    left = Plan.parse({**plan.model_dump(mode="json"), "settings": {**plan.settings, **empty}})
    assert left == Plan.parse(left.document())
    edited = plan.document()
    edited["settings"]["learning_rate"] = 0.125
    assert Plan.parse(edited).algorithm_settings.learning_rate == 0.125


@each
def test_it_runs_on_the_default_configuration_by_name(name, tmp_path):
    plan = Plan.read(None, [f"algorithm={name}", "rounds=1", "sites=2"])
    assert plan.private == (not Method(name).facts.plain_only)
    result = simulate(plan, tmp_path / "run")
    assert result.summary["rounds"] == 1
    read = result.summary["records_read"]
    counts = [
        len(records)
        for records in json.loads((tmp_path / "run" / "partition.json").read_text())[
            "train"
        ].values()
    ]
    opening = plan.method.facts.opening.rate if plan.method.facts.opening else 0.0
    steps = result.summary["iterations"]
    assert read == pytest.approx((steps * 0.5 + opening) * sum(counts))


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_shared_settings_are_compared_as_in_effect(names):
    plans = read_plans([], names)
    documents = {name: plan.document() for name, plan in plans.items()}
    unequal = {d.key for d in differences(documents) if d.unequal}
    first, *others = (document["settings"] for document in documents.values())
    for key in set(first).intersection(*others):
        differs = any(other[key] != first[key] for other in others)
        assert (f"settings.{key}" in unequal) == differs, key
    taus = {
        "chosen" if plan.method.facts.controlled else plan.method.steps() for plan in plans.values()
    }
    # Where neither has such a setting, nobody left it: the methods are so.
    could = any("local_steps" in document["settings"] for document in documents.values())
    assert ("settings.local_steps" in unequal) == (could and len(taus) > 1)


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_settings_given_to_all_are_not_unequal(names):
    given = ["settings.learning_rate=0.25"]
    if any("local_steps" in type(settings_of(name)).model_fields for name in names):
        given.append("settings.local_steps=3")
    documents = {name: plan.document() for name, plan in read_plans([], names, given).items()}
    found = {d.key for d in differences(documents) if d.unequal}
    assert found.isdisjoint({"settings.learning_rate", "settings.local_steps"})
    assert {document["settings"]["learning_rate"] for document in documents.values()} == {0.25}
