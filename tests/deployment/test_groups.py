"""Rates by group of a declared column: in a simulation, and the same in its deployment."""

import json

import numpy as np
import pytest
from tests.deployment.grid import NAMES
from tests.evaluation.people import COLUMNS, people

from fedpact.common.errors import PlanError
from fedpact.deployment.federation import Federation
from fedpact.plan import Plan
from fedpact.simulation.setup import SimulationSetup
from fedpact.simulation.simulate import simulate


@pytest.fixture
def table(tmp_path):
    return people(tmp_path / "people.csv")


def test_simulation_and_deployment_form_the_same_groups(table, federate, tmp_path):
    run = federate({"seeds": "test"}, rounds=2, **table)
    run()
    federation = Federation.read(run.directory / "server" / "federation.toml")
    assert (federation.groups.names, federation.groups.column) == (("Female", "Male"), 1)
    simulated = simulate(Plan.read(run.directory / "server" / "plan.json"), tmp_path / "run")
    assert run.records[-1].evaluation == simulated.records[-1].evaluation
    figures = simulated.summary["evaluation"]["figures"]
    found = {(figure["name"], figure["about"]): figure for figure in figures}
    # By hand, from the simulator's exact table [group, class, hit or miss].
    exact = simulated.records[-1].held_out
    hits = np.sum([exact[site]["hits"] for site in NAMES], axis=0).reshape(2, 2, 2)
    rates = hits[:, :, 0] / hits.sum(2)
    gap = found["equalised-odds gap", "groups"]
    assert gap["exact"] == pytest.approx(float(np.abs(rates[0] - rates[1]).max()))
    assert gap["low"] <= gap["value"] <= gap["high"]
    male = found["accuracy", "group Male"]
    assert male["exact"] == pytest.approx(hits[1, :, 0].sum() / hits[1].sum())
    privacy = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert privacy["evaluation"]["groups"] == ["Female", "Male"]


@pytest.mark.parametrize(("groups", "columns"), [("race", COLUMNS), ("age", COLUMNS), ("sex", {})])
def test_groups_that_are_not_declared_are_refused(table, groups, columns):
    table["records"]["columns"] = columns | ({} if columns else {"age": COLUMNS["age"]})
    plan = Plan.parse({**table, "evaluation": {**table["evaluation"], "groups": groups}})
    with pytest.raises((PlanError, ValueError), match=r"evaluation\.groups|no record is left"):
        SimulationSetup.of(plan)
