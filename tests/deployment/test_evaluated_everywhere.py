"""[evaluation] with whatever else a deployment has: its simulation's numbers, owners' figures."""

import json
import struct

import numpy as np
import pytest
import torch
from tests.deployment.grid import NAMES
from tests.deployment.test_columns import RELEASED, table
from tests.evaluation.people import people

from fedpact.common.messages import EVALUATION, Reply, Task, from_bytes
from fedpact.deployment.site import Site
from fedpact.deployment.snapshot import inspect_deployment
from fedpact.plan import Plan
from fedpact.report.evaluations import why_none
from fedpact.report.page import write_page
from fedpact.report.run_summary import read_run
from fedpact.simulation.simulate import simulate

HELD = {"share": 0.3, "every": 1, "epsilon": 4.0}
KINDS = {
    "groups": {},
    "masked": {"secure_aggregation": {"threshold": 2}},
    "shared": {
        "secure_aggregation": {"threshold": 3},
        "privacy": {"trust": "sum", "honest": 2, "epsilon": 2.0},
        "settings": {"local_steps": 1},
    },
    "heads": {"local": {"head": 10}},
    "own models": {"algorithm": "mr_mtl", "settings": {"proximal": 0.5}},
    "scales under masks": {
        "label": "out",
        "records": {"columns": RELEASED},
        "secure_aggregation": {"threshold": 2},
    },
}


@pytest.mark.parametrize(  # under masks are the scales, too
    "kind",
    [
        "groups",
        "shared",
        "heads",
        pytest.param("own models", marks=pytest.mark.slow),
        "scales under masks",
    ],
)
def test_it_releases_the_simulations_noisy_values_only(federate, tmp_path, kind):
    asked = {"rounds": 2, "evaluation": HELD, **KINDS[kind]}
    if kind == "groups":
        asked |= people(tmp_path / "people.csv")
    if kind == "scales under masks":
        asked["data"] = table(tmp_path / "t.csv", n=240)
    run = federate({"seeds": "test"}, **asked)
    records = run()
    assert run.summary["status"] == "finished"
    plan = Plan.parse({**run.nodes[0].site.plan.model_dump(mode="json"), **asked})
    simulated = simulate(plan, tmp_path / "s").records
    assert [r.evaluation for r in records] == [r.evaluation for r in simulated]
    last = simulated[-1]
    assert [*last.evaluation] == list(NAMES)
    server = run.directory / "server" / "run"
    everything = [block for node in run.nodes for block in (*node.heard, *node.said)]
    everything += [path.read_bytes() for path in server.rglob("*") if path.is_file()]
    for node in run.nodes:
        name = node.directory.name
        exact = inspect_deployment(node.directory)["own_figures"]["rounds"]["2"]
        assert {**exact, **last.held_out[name]} == exact
        hits = np.array(exact["hits"]).reshape(-1, 2)
        # What scores of the simulation, found in another way, are of: the model that a site uses.
        # Outputs 2e-7 apart, as one record's of "shared" are, have one loss: it may count there.
        right = last.scores[name].accuracy * hits.sum()
        assert hits[:, 0].sum() == pytest.approx(right, abs=1 if kind == "shared" else 1e-6)
        for form in (struct.pack(f"<{hits.size}d", *hits.ravel()), repr(exact["loss"]).encode()):
            assert not any(form in block for block in everything)
    page = write_page(read_run(server)).read_text()
    assert "As sites released it, after round 2" in page
    told = json.loads((server / "privacy.json").read_text())
    said = " ".join(told["covers"])
    assert ("the server sees each site's noisy counts" in said) == ("secure_aggregation" in asked)
    own = kind in ("heads", "own models")
    assert ("Each site evaluates its own model" in said) == own


@pytest.mark.parametrize("kind", [pytest.param("masked", marks=pytest.mark.slow), "heads"])
def test_owners_see_their_figures_where_nothing_is_released(federate, kind):
    run = federate({}, rounds=2, evaluation={"share": 0.3, "releases": []}, **KINDS[kind])
    run()
    for node in run.nodes:
        figures = inspect_deployment(node.directory)["own_figures"]["rounds"]["2"]
        assert sum(figures["hits"]) > 20
        assert not any(name.endswith("/evaluation") for name in node.site.ledger.runs)
    found = read_run(run.directory / "server" / "run")
    assert found.released is None
    told = json.loads((found.path / "privacy.json").read_text())
    assert told["evaluation"] is None
    assert any("nothing about them is released" in line for line in told["covers"])
    (run.directory / "server" / "test.npz").unlink(missing_ok=True)
    assert "fedpact deploy status" in why_none(found)


def test_masked_site_answers_evaluations_in_the_clear(make, tmp_path):
    plan = {"rounds": 2, "evaluation": HELD, **KINDS["masked"]}
    directory = make(tmp_path / "m", {"seeds": "test"}, **plan) / "sites" / "site-00"
    with Site(directory) as site:
        w = {"w": torch.zeros(650)}
        trained = Task(site.run, 1, site.plan.algorithm, w, {})
        assert from_bytes(site.handle(trained)).code == "policy"
        asked = Task(site.run, 1, EVALUATION, w, {})
        # Inside of a step it would be summed under masks that are training's.
        assert site._to_be_masked(asked).code == "policy"
        assert site.ledger.length == 1  # opened
        assert isinstance(from_bytes(site.handle(asked)), Reply)
        assert not site.ledger.spent(site.run)
