"""Numbers and several labels in a deployment: what its simulation learns, from the sites' files."""

import json

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra fedpact[deploy] is not installed")

import torch
from safetensors.torch import load_file

import fedpact
from fedpact.common.errors import DataError, PlanError
from fedpact.data.site_records import load_site
from fedpact.deployment.site_records import SiteFiles, own_records
from fedpact.plan import Plan
from fedpact.simulation.simulate import simulate

pytestmark = pytest.mark.usefixtures("clock")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 3)).astype(np.float32)
PRESSURE = 100 + 20 * X[:, 0]
NUMBER = {"kind": "regression", "range": [50.0, 150.0]}
SEVERAL = (X[:, :2] > 0).astype(int)


def _asked(tmp_path, task, **arrays):
    test = {"x_test": X[:20], "y_test": arrays["y"][:20]}
    np.savez(tmp_path / "own.npz", x=X, **arrays, **test)
    return {"data": str(tmp_path / "own.npz"), "rounds": 2, "task": task}


@pytest.mark.parametrize(
    ("task", "y"),
    [(NUMBER, PRESSURE), ({"kind": "multi_label"}, SEVERAL)],
    ids=["number", "several"],
)
def test_a_deployment_has_the_simulations_bits(federate, tmp_path, task, y):
    asked = _asked(tmp_path, task, y=y)
    run = federate({"seeds": "test"}, **asked)
    run()
    plan = Plan.parse({**run.nodes[0].site.plan.model_dump(mode="json"), **asked})
    simulated = simulate(plan, tmp_path / "s")
    folder = run.directory / "server" / "run"
    deployed = load_file(folder / "model.safetensors")
    for name, weight in load_file(tmp_path / "s" / "model.safetensors").items():
        assert torch.equal(weight, deployed[name])
    lines = (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    last = json.loads(lines[-1], parse_constant=pytest.fail)
    assert last["loss"] == pytest.approx(simulated.records[-1].loss, rel=1e-5)
    assert (last["accuracy"] is None) == (task is NUMBER)
    served = fedpact.load(run.directory / "server")
    assert served.predict(X).labels.tolist() == simulated.predict(X).labels.tolist()


def test_a_sites_file_has_numbers_in_their_own_units(make, tmp_path):
    """As its owner replaces it: in the range that plan.json declares, clamped, or left out."""
    directory = make(tmp_path / "d", {"seeds": "test"}, **_asked(tmp_path, NUMBER, y=PRESSURE))
    site = directory / "sites" / "site-00"
    with np.load(site / "records.npz") as stored:
        assert stored["y"].min() >= 50
        assert stored["y"].max() > 110
        x = stored["x"][:4]
    np.savez(site / "records.npz", x=x, y=np.array([100.0, 1e9, np.nan, 50.0]))
    own = own_records(SiteFiles.read(site))
    assert own.records.y.tolist() == [0.0, 1.0, -1.0]
    table = site / "records.csv"
    table.write_text("a,b,c,bp\n1,2,3,100\n1,2,3,\n1,2,3,many\n1,2,3,-7\n")
    declared = {"form": plan_of(site).form, "features": ("a", "b", "c")}
    own = load_site(table, "bp", ("bp",), (3,), "float32", **declared)[0]
    assert own.y.tolist() == [0.0, -1.0]


def plan_of(site):
    return Plan.parse(json.loads((site / "plan.json").read_text(encoding="utf-8")))


def test_what_a_federation_does_not_declare_is_refused(make, tmp_path):
    several = _asked(tmp_path, {"kind": "multi_label"}, y=SEVERAL)
    site = make(tmp_path / "m", **several) / "sites" / "site-00"
    np.savez(site / "records.npz", x=X, y=SEVERAL[:, :1])
    with pytest.raises(DataError, match=r"there are 2 labels, 0, 1: expected \[n, 2\]"):
        own_records(SiteFiles.read(site))
    images = RNG.normal(size=(60, 1, 4, 4)).astype(np.float32)
    np.savez(tmp_path / "own.npz", x=images, y=(images[:, 0] > 0).astype(int))
    masks = {"data": str(tmp_path / "own.npz"), "task": {"kind": "segmentation"}}
    with pytest.raises(PlanError, match="declares no size of a mask"):
        make(tmp_path / "p", **masks, model=f"{__name__}:segmenter")


def segmenter(shape, classes):
    return torch.nn.Sequential(torch.nn.Conv2d(shape[0], classes, 3, padding=1))
