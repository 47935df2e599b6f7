"""Code of a user's own on the command line: an algorithm, and a model for `predict`."""

import json
import sys

import pytest

import fedpact
from fedpact import algorithms
from fedpact.common.errors import InputError, PlanError
from fedpact.plan import Plan
from fedpact.simulation.simulate import simulate

HALF = '''"""FedAvg with part of a step at the server."""

import torch

from fedpact.algorithms import Neutral, fedavg
from fedpact.algorithms.common.steps import weighted_mean
from fedpact.common.messages import State

NEUTRAL = Neutral("fedavg", {"server_rate": 1.0})


class Settings(fedavg.Settings):
    server_rate: float = 0.5


def update(state, replies, settings):
    mean = weighted_mean(replies).vectors["w"]
    return State({"w": torch.lerp(state.vectors["w"], mean, settings.server_rate)})
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write an algorithm into a package of the user's; `package(text)` returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    place = tmp_path / "brought"
    place.mkdir()
    (place / "__init__.py").touch()
    written = []

    def write(text):
        name = f"half{len(written)}_{tmp_path.name}"
        written.append(name)
        (place / f"{name}.py").write_text(text)
        return f"brought:{name}"

    yield write
    for name in ("brought", *(f"brought.{one}" for one in written)):
        sys.modules.pop(name, None)


def test_a_brought_algorithm_is_checked(package, typed):
    done = typed("algorithms", "check", package(HALF), "--json")
    told = json.loads(done.out)
    assert (done.code, told["violations"]) == (0, 0)
    assert told["neutral"]["parent"] == "fedavg"
    assert told["neutral"]["apart"] == told["neutral"]["allowed"] == 0.0


def test_what_an_algorithm_lacks_is_told(package):
    bare = package(HALF.replace("NEUTRAL =", "OTHER ="))
    with pytest.raises(PlanError, match="it lacks NEUTRAL; NEUTRAL = None says"):
        algorithms.load(bare)
    for wrong in (bare.replace(":", "."), bare.replace(":", "/") + ".py"):
        with pytest.raises(PlanError, match=f"if it is your own, write '{bare}'"):
            algorithms.load(wrong)
    with pytest.raises(InputError, match=r"if it is your own, write 'brought:net'"):
        fedpact.run("brought.net", "digits", rounds=1, sites=2)


def test_violated_properties_are_named(package, typed):
    wrong = HALF.replace('{"server_rate": 1.0}', '{"server_rate": 0.9}')
    done = typed("algorithms", "check", package(wrong), "--json")
    told = json.loads(done.out)
    assert (done.code, told["violations"]) == (1, 1)
    (bad,) = (one for one in told["checks"] if one["violation"])
    assert "from its parent's, allowed 0" in bad["violation"]


def test_an_algorithm_that_raises_is_told_with_what_it_raised(package, typed):
    wrong = HALF.replace('(replies).vectors["w"]', '(replies).vectors["g"]')
    done = typed("algorithms", "check", package(wrong))
    assert done.code == 1
    assert "KeyError: 'g'" in done.out
    assert "checks failed" in done.out


def test_a_brought_algorithm_trains(package, tmp_path):
    name = package(HALF)
    tables = {
        "rounds": 2,
        "sites": 2,
        "compression": {"kind": "none"},
        "settings": {"server_rate": 1.0},
    }
    ours = simulate(Plan.parse({**tables, "algorithm": name}), tmp_path / "ours")
    del tables["settings"]
    theirs = simulate(Plan.parse({**tables, "algorithm": "fedavg"}), tmp_path / "theirs")
    for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert one.equal(other)


def test_a_file_without_settings_is_not_an_algorithm(package, typed):
    assert typed("algorithms", package("x = 1\n")).code != 0


SCRIPT = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


class Other(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))


if __name__ == "__main__":
    raise SystemExit("not to be run again")
"""


def test_predict_takes_a_class_of_a_script(tmp_path, monkeypatch, typed):
    (tmp_path / f"script_{tmp_path.name}.py").write_text(SCRIPT)
    (tmp_path / "new.csv").write_text("a,b,label\n0.1,0.2,yes\n0.3,-0.4,no\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    space = {"__name__": "__console__"}
    exec(compile(SCRIPT, f"script_{tmp_path.name}.py", "exec"), space)
    rows = {"features": ["a", "b"], "classes": ["no", "yes"]}
    settings = {"rounds": 1, "sites": 1, "privacy": {"mode": "none"}, "label": "label"}
    fedpact.run(space["Net"], "new.csv", records=rows, **settings, out="out")
    words, script = ["predict", "out", "new.csv", "--model"], f"script_{tmp_path.name}.py"
    assert typed(*words, f"{script}:Other").code != 0
    done = typed(*words, f"{script}:Net")
    assert done.code == 0
    assert done.out.startswith("row,label,no,yes\n")
