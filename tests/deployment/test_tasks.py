"""Numbers and several labels in a deployment: what its simulation learns, from the sites' files."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedpact
from fedpact.data.load import load_site
from fedpact.deployment.site_records import SiteFiles, own_records
from fedpact.plan import Plan
from fedpact.simulation.simulate import simulate

pytestmark = pytest.mark.usefixtures("clock")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 3)).astype(np.float32)
PRESSURE = 100 + 20 * X[:, 0]
NUMBER = {"kind": "regression", "range": [50.0, 150.0]}
WORDS = np.stack([RNG.integers(1, 9, (90, 6)), np.arange(6) < RNG.integers(2, 7, (90, 1))], 1)
TAGS = np.where(WORDS[:, 1] > 0, WORDS[:, 0] % 2, -100)


def _asked(tmp_path, task, x=X, model=None, **arrays):
    test = {"x_test": x[:20], "y_test": arrays["y"][:20]}
    np.savez(tmp_path / "own.npz", x=x, **arrays, **test)
    named = {} if model is None else {"model": f"{__name__}:{model}"}
    if task["kind"] == "next_token":
        named["records"] = {"vocabulary": 9}
    asked = {"data": str(tmp_path / "own.npz"), "rounds": 1, "sites": 2, "sampling_rate": 0.5}
    return {**asked, "task": task, **named}


@pytest.mark.parametrize(
    ("task", "y", "x", "model"),
    [
        (NUMBER, PRESSURE, X, None),
        ({"kind": "tokens"}, TAGS, WORDS, "Tagger"),
        pytest.param({"kind": "next_token"}, WORDS[:, 0], WORDS, "Speaker", marks=pytest.mark.slow),
    ],
    ids=["number", "tokens", "next"],
)
def test_a_deployment_has_the_simulations_bits(federate, tmp_path, task, y, x, model):
    asked = _asked(tmp_path, task, x, model, y=y)
    run = federate({"seeds": "test"}, **asked)
    run()
    simulated = simulate(run.plan(**asked), tmp_path / "s")
    folder = run.directory / "server" / "run"
    deployed = load_file(folder / "model.safetensors")
    for name, weight in load_file(tmp_path / "s" / "model.safetensors").items():
        assert torch.equal(weight, deployed[name])
    lines = (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    last = json.loads(lines[-1], parse_constant=pytest.fail)
    assert last["loss"] == pytest.approx(simulated.records[-1].loss, rel=1e-5)
    assert (last["accuracy"] is None) == (task is NUMBER)
    served = fedpact.load(run.directory / "server")
    assert (
        served.predict(x).labels.tolist() == fedpact.load(tmp_path / "s").predict(x).labels.tolist()
    )


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


class Tagger(torch.nn.Module):
    """Tags every token of a text; its inputs have names."""

    def __init__(self, tags=2):
        super().__init__()
        self.words, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, tags)

    def forward(self, input_ids, attention_mask):
        return {"logits": self.head(self.words(input_ids) * attention_mask[..., None])}


class Speaker(Tagger):
    """Names the next token of each."""

    def __init__(self):
        super().__init__(9)
