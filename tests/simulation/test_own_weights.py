"""Weights that come with a user's own model: no ε is stated before it is said what chose them.

Reference: what a warm start from a file asks for (tests/models/test_initial.py).
"""

import copy
import functools
import json
import os
import random
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.spread import spread
from torch import nn

import fedpact
from fedpact.common.errors import ModelError, PlanError
from fedpact.plan import Plan

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3)).astype(np.float32)
RECORDS = X, (X[:, 0] > 0).astype(np.int64)
SETTINGS = {"sites": 2, "rounds": 1, "partition": {"held_out": 0.2}}
SAID = {"trained_on": "public scans of 2019"}
NET = nn.Linear(3, 2)
TABLE = torch.arange(6.0).reshape(2, 3)
OWN = torch.eye(3) + 2  # no constant that is known by its content

pytestmark = pytest.mark.usefixtures("no_page")


@functools.cache
def kept():
    return nn.Linear(3, 2)


def loaded():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    module[0].load_state_dict({"weight": OWN, "bias": torch.zeros(3)})
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


@pytest.mark.parametrize(
    ("which", "mode"), spread(BRINGING, ("per_sample", "batch_clipped"), one_in=2)
)
def test_undeclared_weights_have_no_epsilon(which, mode, tmp_path):
    algorithm = {"algorithm": "ldp_fedsgd" if mode == "batch_clipped" else "fedavg"}
    with pytest.raises(PlanError, match=r"no ε can be stated; hand in its class or a factory"):
        fedpact.run(BRINGING[which], RECORDS, **SETTINGS, **algorithm, privacy={"mode": mode},
                    out=tmp_path / "run")  # fmt: skip
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("which", ["a module", "of a place in a file"])
def test_the_description_of_weights_is_in_the_statement(which, tmp_path):
    result = fedpact.run(BRINGING[which], RECORDS, **SETTINGS, initial=SAID, out=tmp_path / "run")
    stated = json.loads((result.folder / "privacy.json").read_text())
    assert "trained on: public scans of 2019" in stated["initial"]
    uncovered = [line for line in stated["does_not_cover"] if "public scans of 2019" in line]
    assert len(uncovered) == 1
    assert "no part of this run's ε" in uncovered[0]
    # What goes on from there says it, too.
    told = Plan(model="logistic", initial=str(result.folder)).initial.trained_on
    assert told.endswith("before that, on: public scans of 2019")


def test_a_model_is_extended_only_on_its_own_data(tmp_path):
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
    assert any("trusted not to have derived" in line for line in stated["does_not_cover"])
    with pytest.raises(PlanError, match=r"model 'logistic' draws its weights from the seed"):
        Plan(model="logistic", initial=SAID)


class Drawn(nn.Module):
    """A projection that `draw` makes, in a buffer of no state_dict, before a layer."""

    def __init__(self, draw):
        super().__init__()
        self.last = nn.Linear(3, 2)
        self.register_buffer("table", draw(), persistent=False)

    def forward(self, x):
        return self.last(x @ self.table)


class OfTheClass(Zeros):
    """Numbers of a class, not of its modules."""

    TABLE = TABLE

    def forward(self, x):
        return super().forward(x + self.TABLE[0])


class OfAList(Zeros):
    """A trained module that is no layer, as torch does not look into lists."""

    def __init__(self):
        super().__init__()
        self.others = ({"base": [NET]},)

    def forward(self, x):
        return super().forward(x) + self.others[0]["base"][0](x).detach()


class OfAnArray(Zeros):
    """Numbers of numpy's."""

    def __init__(self):
        super().__init__()
        self.shift = np.array([0.5, 2.0, 7.0])

    def forward(self, x):
        return super().forward(x + torch.from_numpy(self.shift).float())


@pytest.mark.parametrize("model", [OfTheClass, OfAList, OfAnArray])
def test_numbers_are_found_wherever_a_module_has_them(model, tmp_path):
    with pytest.raises(PlanError, match=r"begins with the same (TABLE|others|shift).* no ε can"):
        fedpact.run(model, RECORDS, **SETTINGS, out=tmp_path / "run")


def test_a_run_makes_no_claim_about_added_weights(tmp_path):
    first = fedpact.run(Drawn(lambda: OWN), RECORDS, **SETTINGS,
                        initial={"trained_on": "nothing"}, out=tmp_path / "first")  # fmt: skip
    start, brings = str(first.folder), lambda: Drawn(lambda: OWN)
    for model in (brings, brings()):
        with pytest.raises(PlanError, match=r"brings table beside .*initial\.weights.*no ε can"):
            fedpact.run(model, RECORDS, **SETTINGS, initial=start, out=tmp_path / "second")
    # What is in the file, or one number all over, or spoken for, is none.
    for model in (loaded, lambda: Drawn(lambda: torch.ones(3, 3))):
        run = fedpact.run(
            model, RECORDS, **SETTINGS, initial=SAID, out=tmp_path / model().__class__.__name__
        )
        fedpact.run(model, RECORDS, **SETTINGS, initial=str(run.folder), out=tmp_path / "next")
        shutil.rmtree(tmp_path / "next")
    said = {"weights": start, "trained_on": "a private run; nothing: a table of ones"}
    fedpact.run(brings, RECORDS, **SETTINGS, initial=said, out=tmp_path / "said")


@pytest.mark.parametrize("mode", ["per_sample", "none"])
def test_each_party_has_its_own_module(mode, tmp_path):
    """Else all write to one: before, such a run went on at chance, and left the user's changed."""
    net = nn.Linear(3, 2)
    before = copy.deepcopy(net.state_dict())
    settings = {**SETTINGS, "privacy": {"mode": mode}, "initial": {"trained_on": "nothing"}}
    for factory in (lambda: net, lambda: nn.Sequential(nn.Linear(3, 3), net)):
        with pytest.raises(ModelError, match=r"that was there before.*copy\.deepcopy\(module\)"):
            fedpact.run(factory, RECORDS, **settings, out=tmp_path / "run")
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    fedpact.run(lambda: copy.deepcopy(net), RECORDS, **settings, out=tmp_path / "run")
    # A layer that is not trained may be shared.
    frozen = nn.Linear(3, 3).requires_grad_(False)
    shared = lambda: nn.Sequential(frozen, nn.Linear(3, 2))  # noqa: E731
    fedpact.run(shared, RECORDS, **settings, out=tmp_path / "shared")


OTHER_GENERATORS = {
    "numpy's": lambda: torch.from_numpy(np.random.randn(3, 3)).float(),
    "random's": lambda: torch.tensor([[random.random()] * 3] * 3),
    "the system's": lambda: torch.tensor(list(os.urandom(9))).reshape(3, 3) / 256,
}


@pytest.mark.parametrize("draw", OTHER_GENERATORS.values(), ids=OTHER_GENERATORS)
@pytest.mark.parametrize("mode", ["per_sample", "none"])
def test_numbers_that_no_seed_decides_are_refused(draw, mode, tmp_path):
    """Chance of another verdict: that two draws of these generators are alike, below 1e-20."""
    with pytest.raises(ModelError, match=r"another table at each call.* from torch's generator"):
        fedpact.run(lambda: Drawn(draw), RECORDS, **SETTINGS, privacy={"mode": mode},
                    out=tmp_path / "run")  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_lazy_layers_are_of_the_seed(tmp_path):
    def lazy():
        return nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2))

    settings = {**SETTINGS, "privacy": {"mode": "none"}}
    one, two = (fedpact.run(lazy, RECORDS, **settings, out=tmp_path / n) for n in "ab")
    first, second = one.model.state_dict(), two.model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


class Turned(Zeros):
    """Weights of the same names and shapes, and another answer."""

    def forward(self, x):
        return -super().forward(x)


def test_another_model_with_the_same_weights_is_not_the_runs(tmp_path):
    class Own(Zeros):
        pass

    plain = {**SETTINGS, "privacy": {"mode": "none"}}
    runs = {
        kind: fedpact.run(model, RECORDS, **plain, out=tmp_path / kind).folder
        for kind, model in {"place": Zeros, "handed": Own, "module": Zeros()}.items()
    }
    for folder in runs.values():
        for other in (Turned, Turned(), lambda: Turned(), "logistic"):
            with pytest.raises(ModelError, match=r"but the run's is .*: pass the same"):
                fedpact.load(folder, model=other)
    # Whatever weights a module of the class has, and whoever imports what was a script.
    for folder, same in {
        runs["place"]: (Zeros, Zeros(), f"{__name__}:Zeros"),
        runs["handed"]: (Own, Own()),
        runs["module"]: (Zeros, Zeros()),
    }.items():
        expected = load_file(folder / "model.safetensors")
        for model in same:
            found = fedpact.load(folder, model=model).model.state_dict()
            assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_scripts_model_is_known_where_it_is_imported(tmp_path, monkeypatch):
    plain = {**SETTINGS, "privacy": {"mode": "none"}}
    with monkeypatch.context() as patch:
        patch.setattr("fedpact.common.user_code._find", lambda place: None)
        folder = fedpact.run(Zeros, RECORDS, **plain, out=tmp_path / "run").folder
    assert json.loads((folder / "plan.json").read_text())["model"].startswith("Zeros@")
    assert len(fedpact.load(folder, model=Zeros).predict(X).labels) == len(X)
