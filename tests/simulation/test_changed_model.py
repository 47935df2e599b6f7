"""A run's model is known again by its answers: code that has changed since is told from it."""

import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedpact
from fedpact.common.errors import ModelError, PlanError

X = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
RECORDS = X, (X[:, 0] > 0).astype(np.int64)
SETTINGS = {"sites": 2, "rounds": 1, "partition": {"held_out": 0.2}, "privacy": {"mode": "none"}}
BETWEEN = nn.Tanh

pytestmark = pytest.mark.usefixtures("no_page")


def net():
    """Of a file that can be imported, and changed."""
    return nn.Sequential(nn.Linear(3, 4), BETWEEN(), nn.Linear(4, 2))


@pytest.fixture
def change(monkeypatch):
    return lambda: monkeypatch.setattr(sys.modules[__name__], "BETWEEN", nn.ReLU)


@pytest.mark.parametrize("average", [False, True])
def test_a_model_whose_file_has_changed_is_not_used(tmp_path, change, average):
    server = {"server": {"average": "tail"}} if average else {}
    result = fedpact.run(net, RECORDS, **SETTINGS, **server, out=tmp_path / "run")
    found = fedpact.load(result.folder, average=average).predict(X)
    with torch.no_grad():
        expected = fedpact.load(result.folder, average=average).model(torch.from_numpy(X))
    np.testing.assert_allclose(found.probabilities, expected.softmax(-1), rtol=1e-5)
    change()
    with pytest.raises(ModelError, match=r"answers otherwise than when .* restore its file"):
        fedpact.load(result.folder, average=average)


class Sized(nn.Module):
    """With the length of its list of hidden layers, as torch.compile's modules may have none."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 2)

    def __len__(self):
        return 0

    def forward(self, x):
        return self.first(x)


def test_a_model_of_length_0_is_known_by_its_own_answers(tmp_path):
    result = fedpact.run(Sized, RECORDS, **SETTINGS, out=tmp_path / "run")
    path = result.folder / "model.safetensors"
    save_file({name: 2 * value for name, value in load_file(path).items()}, path)
    with pytest.raises(ModelError, match="answers otherwise than when"):
        fedpact.load(result.folder, Sized)


def test_no_run_goes_on_with_a_model_that_has_changed(tmp_path, change):
    stopped = fedpact.run(net, RECORDS, **SETTINGS, out=tmp_path / "run", stop=lambda: True)
    plan = fedpact.Plan.read(stopped.folder / "plan.json")
    change()
    with pytest.raises(PlanError, match=r"started with another model: the code of .*:net"):
        fedpact.run(plan, stopped.folder, data=RECORDS)


def test_another_model_of_the_same_weights_is_refused(tmp_path):
    trained = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    result = fedpact.run(trained, RECORDS, **SETTINGS, out=tmp_path / "run")
    same = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    assert len(fedpact.load(result.folder, same).predict(X)) == len(X)
    other = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ModelError, match="pass the same model as then"):
        fedpact.load(result.folder, other)
