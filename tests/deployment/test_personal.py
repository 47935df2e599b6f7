"""Tuning inside a deployed site: what it reads, what it writes, and that nothing else changes."""

import json
import stat

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.deployment.test_site import task_of as site_task
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.common.errors import DataError, PlanError
from fedpact.deployment.site import Site
from fedpact.deployment.site_evaluation import personalise_site


def files(directory):
    return {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def written(make, tmp_path_factory):
    """Three sites of 64 records each: little to tune on, and enough to tell a gain from chance."""
    where = tmp_path_factory.mktemp("personal")
    x = np.random.default_rng(0).normal(size=(240, 5)).astype(np.float32)
    np.savez(where / "t.npz", x=x, y=(x[:, 0] > 0).astype(int))
    return make(where / "d", data=str(where / "t.npz"))


@pytest.fixture(autouse=True)
def one_weight(monkeypatch):
    """Tried are others too, which takes most of the time: see evaluation/test_tuning.py."""
    monkeypatch.setattr("fedpact.evaluation.personal.WEIGHTS", (0.01,))


def task_of(site, number=1):
    d = site.plan.method.init(torch.zeros(12)).vectors["w"].numel()
    return site_task(site, number, vectors={"w": torch.zeros(d)})


@pytest.fixture
def finished(deployment, site_dir):
    """A deployment whose run has ended: the site has answered, the server has its final model."""
    with Site(site_dir) as site:
        site.handle(task_of(site))
        module = site.federation.workshop(site.plan, site_dir).module()
    final = deployment / "server" / "run" / "model.safetensors"
    final.parent.mkdir()
    # A model that is wrong wherever it can be: a large bias towards one class.
    tensors = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    next(value for name, value in tensors.items() if "bias" in name)[0] = 10.0
    save_file(tensors, final)
    return final


def test_it_writes_one_file_which_says_that_it_is_not_private(
    deployment, site_dir, finished, tmp_path
):
    before = files(deployment)
    figures, file = personalise_site(site_dir)
    after = files(deployment)
    path = site_dir / "personal.safetensors"
    # Ledger, memory, last reply and all that the server has are as they were.
    assert after.keys() - before.keys() == {path}
    assert all(after[name] == block for name, block in before.items())
    assert file == str(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with safe_open(path, "pt") as opened:
        assert "NOT PRIVATE" in opened.metadata()["privacy"]
    assert {n: v.shape for n, v in load_file(path).items()} == {
        n: v.shape for n, v in load_file(finished).items()
    }
    assert figures.tuned > figures.federated
    # The tuned model as the released one: nothing is left to gain, and no model is written.
    best = tmp_path / "best.safetensors"
    best.write_bytes(path.read_bytes())
    again, file = personalise_site(site_dir, best)
    assert file is None
    assert "do not tune" in again.advice
    assert not path.exists()


def test_no_answer_of_the_site_changes_by_it(site_dir, finished):
    """What leaves a site follows from task, records and ledger; no byte of the model is in it."""
    with Site(site_dir) as site:
        task = task_of(site)
        once = site.handle(task)
    personalise_site(site_dir)
    tuned = load_file(site_dir / "personal.safetensors")
    with Site(site_dir) as site:
        assert site.handle(task) == once
        later = site.handle(task_of(site, number=2))
    for value in tuned.values():
        for number in value.flatten()[:50]:
            if float(number):
                assert number.numpy().tobytes() not in later


def test_until_the_run_has_ended_it_refuses(site_dir):
    with pytest.raises(PlanError, match=r"at the end of the run.*--model"):
        personalise_site(site_dir)
    assert not (site_dir / "personal.safetensors").exists()


def test_a_model_that_is_not_the_plans_is_refused(site_dir, finished, tmp_path):
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(2, 2)}, other)
    with pytest.raises(DataError, match=r"has weight \[2, 2\].*final model of this run"):
        personalise_site(site_dir, other)
    other.write_bytes(b"no model")
    with pytest.raises(DataError, match="cannot be read"):
        personalise_site(site_dir, other)


def test_the_command_informs_its_owner(site_dir, finished):
    told = CliRunner().invoke(app, ["personalise", str(site_dir)]).output
    assert "NOT PRIVATE" in told
    assert "personal.safetensors" in told
    told = CliRunner().invoke(app, ["personalise", str(site_dir), "--json"]).output
    document = json.loads(told)
    assert document["tune"] is True
    assert document["joining"] in ("pays", "does not pay", "cannot be told")
