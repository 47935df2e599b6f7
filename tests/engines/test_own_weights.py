"""Weights that come with a user's own model: no ε is stated before it is said what chose them.

Reference: what a warm start from a file asks for (tests/models/test_initial.py).
"""

import copy
import functools
import json

import numpy as np
import pytest
import torch
from torch import nn

import fedpact
from fedpact.errors import PlanError
from fedpact.plan import Plan

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3)).astype(np.float32)
RECORDS = X, (X[:, 0] > 0).astype(np.int64)
SETTINGS = {"sites": 2, "rounds": 1, "partition": {"held_out": 0.2}}
SAID = {"trained_on": "public scans of 2019"}
NET = nn.Linear(3, 2)
TABLE = torch.arange(6.0).reshape(2, 3)


@pytest.fixture(autouse=True)
def no_page(monkeypatch):
    """A run without its report."""
    monkeypatch.setattr("fedpact.api.write_report", lambda folder: None)


@functools.cache
def kept():
    return nn.Linear(3, 2)


def loaded():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    module[0].load_state_dict({"weight": torch.eye(3), "bias": torch.zeros(3)})
    return module


def seeded():
    torch.manual_seed(7)
    return nn.Linear(3, 2)


class Biased(nn.Module):
    """With numbers in a buffer, or an attribute, that are in no state_dict."""

    def __init__(self, how):
        super().__init__()
        self.last = nn.Linear(3, 2)
        if how == "buffer":
            self.register_buffer("table", TABLE.clone(), persistent=False)
        else:
            self.table = TABLE.clone()

    def forward(self, x):
        return self.last(x * self.table[0])


class Zeros(nn.Module):
    """Weights that are zeros and ones, and others that are drawn."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)
        nn.init.zeros_(self.last.weight)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


BRINGING = {
    "a module": NET,
    "one that it closes over": lambda: NET,
    "a copy of one": lambda: copy.deepcopy(NET),
    "the same one every time": kept,
    "of a file that is loaded": loaded,
    "of a place in a file": f"{__name__}:loaded",
    "of a seed of its own": seeded,
    "a buffer": lambda: Biased("buffer"),
    "an attribute": lambda: Biased("attribute"),
}


@pytest.mark.parametrize("model", BRINGING.values(), ids=BRINGING)
@pytest.mark.parametrize("mode", ["per_sample", "batch_clipped"])
def test_weights_that_nobody_speaks_for_have_no_epsilon(model, mode, tmp_path):
    algorithm = {"algorithm": "ldp_fedsgd" if mode == "batch_clipped" else "fedavg"}
    with pytest.raises(PlanError, match=r"no ε can be stated; hand in its class or a factory"):
        fedpact.run(model, RECORDS, **SETTINGS, **algorithm, privacy={"mode": mode},
                    out=tmp_path / "run")  # fmt: skip
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("which", ["a module", "of a place in a file"])
def test_what_was_said_of_them_is_in_the_statement(which, tmp_path):
    result = fedpact.run(BRINGING[which], RECORDS, **SETTINGS, initial=SAID, out=tmp_path / "run")
    stated = json.loads((result.folder / "privacy.json").read_text())
    assert "trained on: public scans of 2019" in stated["initial"]
    uncovered = [line for line in stated["does_not_cover"] if "public scans of 2019" in line]
    assert len(uncovered) == 1
    assert "no part of this run's ε" in uncovered[0]
    # What goes on from there says it, too.
    told = Plan(model="logistic", initial=str(result.folder)).initial.trained_on
    assert told.endswith("before that, on: public scans of 2019")


def test_a_runs_model_goes_on_only_with_what_it_was_trained_on(tmp_path):
    first = fedpact.run(Zeros, RECORDS, **SETTINGS, out=tmp_path / "first")
    with pytest.raises(PlanError, match="Zeros"):
        Plan(model=first.model)
    # Whoever states no ε need not say it.
    assert Plan(model=first.model, privacy={"mode": "none"}).private is False
    # A run of its class is read with a module of it, as its weights are the run's.
    again = fedpact.load(first.folder, model=Zeros())
    found, expected = again.model.state_dict(), first.model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_from_the_seed_need_no_word(tmp_path):
    result = fedpact.run(Zeros, RECORDS, **SETTINGS, out=tmp_path / "run")
    stated = json.loads((result.folder / "privacy.json").read_text())
    assert stated["initial"] == ""
    assert any("trusted to have chosen no number" in line for line in stated["does_not_cover"])
    with pytest.raises(PlanError, match=r"model 'logistic' draws its weights from the seed"):
        Plan(model="logistic", initial=SAID)
