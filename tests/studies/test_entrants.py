from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.common.errors import InputError, PlanError
from fedpact.plan import Plan
from fedpact.simulation.machine import available_cores
from fedpact.studies.compare import (
    comparable,
    compare,
    name_plans,
    read_plans,
    reseed,
    seeds_of,
    serialise_timed,
    shares,
)

TOML = """
rounds = 7
sites = 3
algorithm = "{}"
[settings]
{}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "my study.toml"
    path.write_text(TOML.format("fedfdp", "learning_rate = 0.75\nfairness_weight = 0.25"))
    return path


def test_an_algorithm_passed_as_a_plan_gets_a_remedy():
    refused = CliRunner().invoke(app, ["compare", "fedavg", "fedprox"])
    assert "--algorithms fedavg,fedprox" in str(refused.exception)


def test_a_configuration_is_read_as_run_reads_it(config):
    assert read_plans([config], (), ["rounds=9"]) == {"my-study": Plan.read(config, ["rounds=9"])}
    assert read_plans([]) == {"default": Plan.read(None)}


def test_algorithms_get_those_settings_that_they_know(config):
    plans = read_plans([config], ["fedavg", "fedfdp"])
    assert list(plans) == ["fedavg", "fedfdp"]
    assert plans["fedfdp"] == Plan.read(config)
    assert plans["fedavg"].algorithm == "fedavg"
    assert plans["fedavg"].settings == {"learning_rate": 0.75}
    # Everything else is one and the same.
    same = {"algorithm": "fedfdp", "settings": plans["fedfdp"].settings}
    assert Plan.parse({**plans["fedavg"].model_dump(mode="json"), **same}) == plans["fedfdp"]


def test_an_override_of_a_setting_goes_to_those_that_know_it(config):
    plans = read_plans(
        [config],
        ["fedavg", "fedfdp"],
        ["settings.fairness_weight=0.5", "settings.learning_rate=2.0", "sites=4"],
    )
    assert plans["fedavg"].settings == {"learning_rate": 2.0}
    assert plans["fedfdp"].settings == {"learning_rate": 2.0, "fairness_weight": 0.5}
    assert {plan.sites for plan in plans.values()} == {4}


def test_an_unknown_setting_is_refused(config):
    with pytest.raises(PlanError, match=r"settings\.nonsense is no setting of fedavg or fedfdp"):
        read_plans([config], ["fedavg", "fedfdp"], ["settings.nonsense=1"])
    for bad in ("nowhere", ""):
        with pytest.raises(PlanError, match=f"algorithm is '{bad}': expected one of"):
            read_plans([], ["fedavg", bad])


def test_every_file_runs_with_every_algorithm(config, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text(TOML.format("fedavg", "learning_rate = 1.5"))
    plans = read_plans([config, other], ["fedavg", "fedfdp"])
    assert list(plans) == ["my-study-fedavg", "my-study-fedfdp", "other-fedavg", "other-fedfdp"]
    assert plans["other-fedfdp"].settings == {"learning_rate": 1.5}
    assert list(read_plans([config, config])) == ["my-study", "my-study-2"]


def test_an_own_algorithm_is_entered_by_its_name():
    own = "fedpact.algorithms:fedprox"
    plans = read_plans([], ["fedavg", "fedprox", own])
    assert list(plans) == ["fedavg", "fedprox", "fedprox-2"]
    assert plans["fedprox-2"].algorithm == own
    assert list(name_plans([plans["fedprox-2"]])) == ["fedprox"]


def test_plans_in_a_list_are_named_by_algorithm():
    plans = [Plan(), Plan(rounds=3), Plan(algorithm="fedfdp"), Plan(rounds=4)]
    found = name_plans(plans)
    assert list(found) == ["fedavg", "fedavg-2", "fedfdp", "fedavg-3"]
    assert list(found.values()) == plans


@pytest.mark.parametrize("name", ["", "a/b", "..", ".a", "a b", "é", "a\n"])
def test_names_that_cannot_be_folders_are_refused(name):
    with pytest.raises(InputError, match="an entry is called"):
        name_plans({name: Plan()})


def test_a_single_plan_is_accepted_and_other_input_refused():
    assert name_plans(Plan()) == name_plans([Plan()])
    assert name_plans(plan for plan in [Plan()]) == name_plans([Plan()])
    for path in ("study.toml", Path("study.toml"), ["study.toml"], {"a": Path("study.toml")}):
        with pytest.raises(InputError, match=r"plans holds .*study\.toml'.*Plan\.read\(FILE\)"):
            name_plans(path)  # type: ignore[arg-type]
    for other in ({"a": {"rounds": 1}}, 3, None, [None]):
        with pytest.raises(InputError, match=r"plans holds .*Plan\.parse"):
            name_plans(other)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="nothing to compare"):
        name_plans([])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"data": "mnist"}, "differ in data .one: 'digits' by default, two: 'mnist'."),
        ({"run": {"ledgers": "kept"}}, "two: run.ledgers is 'kept'"),
    ],
)
def test_incomparable_plans_are_refused_before_writing(tmp_path, change, told):
    plans = {"one": Plan(), "two": Plan.parse(change)}
    for refuse in (lambda: comparable(plans), lambda: compare(plans, 1, tmp_path / "c")):
        with pytest.raises(PlanError, match=told):
            refuse()
    assert list(tmp_path.iterdir()) == []


def test_runs_that_are_measured_by_time_do_not_share_a_machine(tmp_path):
    plan = Plan.parse({"budget": {"seconds": 60.0}})
    with pytest.raises(PlanError, match=r"jobs is 2 and fedavg has budget\.seconds = 60"):
        compare([plan], 2, tmp_path / "c", jobs=2)
    assert serialise_timed({"a": Plan(), "b": plan}, 0) == serialise_timed({"b": plan}, 1) == 1
    assert serialise_timed({"a": Plan()}, 3) == 3
    assert list(tmp_path.iterdir()) == []


def test_all_run_with_the_same_seeds():
    plans = {"one": Plan(seed=7), "two": Plan(seed=1)}
    assert seeds_of(plans, 3) == [7, 8, 9]
    assert seeds_of(plans, [5, 2]) == [5, 2]
    for bad in (0, -1, [], [1, 1], [-1], [True], 1.5, None):
        with pytest.raises(InputError, match="seed"):
            seeds_of(plans, bad)


def test_a_seed_changes_nothing_else():
    plan = Plan.parse({"rounds": 9, "run": {"evaluate_every": 3}})
    changed = reseed(plan, 5, workers=4)
    assert (changed.seed, changed.run.workers, changed.run.evaluate_every) == (5, 4, 3)
    assert reseed(changed, plan.seed, workers=1).run.workers == 4
    assert changed.model_copy(update={"seed": 0, "run": plan.run}) == plan


@pytest.mark.parametrize(("jobs", "runs"), [(0, 1), (0, 1000), (1, 9), (2, 9), (1000, 3), (0, 0)])
def test_the_cores_are_shared_out(jobs, runs):
    side_by_side, workers = shares(jobs, runs)
    assert side_by_side >= 1
    assert workers >= 1
    assert side_by_side <= max(1, runs)
    assert jobs == 0 or side_by_side <= jobs
    # Never more threads than cores, unless so many runs were asked for.
    assert side_by_side * workers <= max(available_cores(), side_by_side)
    with pytest.raises(InputError, match="jobs is -1"):
        shares(-1, 3)
