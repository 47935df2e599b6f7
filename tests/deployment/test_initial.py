"""A deployment that begins with given weights: every party has them, and nobody is sent them."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

import fedpact
from fedpact.algorithms.wrappers.compression import START
from fedpact.common.errors import ModelError
from fedpact.common.messages import from_bytes
from fedpact.deployment.site import Site
from fedpact.plan import Plan

FIRST = {"rounds": 1, "sites": 3, "privacy": {"mode": "none"}}


def test_parties_share_the_initial_model_with_the_simulation(federate, tmp_path):
    first = fedpact.run(Plan.parse(FIRST), tmp_path / "first").folder
    start = {"weights": str(first), "trained_on": "public digits"}
    run = federate({"seeds": "test"}, rounds=1, initial=start)
    run()
    # The first question tells the digest of the start alone: the site made the same of its file.
    asked = from_bytes(run.nodes[0].heard[0])
    assert list(asked.vectors) == [START]
    plan = {"rounds": 1, "sites": 3, "privacy": {"accountant": "rdp"}, "initial": start}
    plan["settings"] = {"local_steps": 2}
    simulated = fedpact.run(Plan.parse(plan), tmp_path / "same").folder
    there = load_file(run.directory / "server" / "run" / "model.safetensors")
    here = load_file(simulated / "model.safetensors")
    assert all(torch.equal(there[name], here[name]) for name in here)
    site = tmp_path / "copy"
    shutil.copytree(run.nodes[0].directory, site)
    (site / "ledger.jsonl").unlink()
    (file,) = site.glob("initial-*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="the plan names"):
        Site(site)
