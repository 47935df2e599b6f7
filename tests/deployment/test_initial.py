"""A deployment that begins with given weights: every party has them, and nobody is sent them."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from tests.deployment.grid import Run
from tests.deployment.test_site import change

import fedpact
from fedpact.algorithms.wrappers.compression import START
from fedpact.common.errors import ModelError, PlanError, PolicyRefused
from fedpact.common.messages import from_bytes
from fedpact.common.run_folder import Folder
from fedpact.deployment.files import write_extension
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
    plan = {"rounds": 1, "sites": 3, "sampling_rate": 1.0, "initial": start}
    plan["privacy"] = {"accountant": "rdp"}
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


def test_an_extension_that_cannot_be_writes_nothing(deployment, tmp_path):
    server = Folder(deployment / "server")
    plan = server.read_json("plan.json")
    plan["privacy"]["per_site"] = {"site-00": {"epsilon": 0.5}}
    server.write_json("plan.json", plan)
    (server.path / "run").mkdir()
    for status, told in (
        ("diverged", "is diverged: expected a finished run"),
        ("finished", r"epsilon is 0\.25 with privacy\.per_site: .*leave epsilon out"),
    ):
        server.write_json("run/summary.json", {"status": status})
        with pytest.raises(PlanError, match=told):
            write_extension(server.path, 2, 0.25, tmp_path / "more")
    with pytest.raises(PlanError, match=r"site-00 has no server\.key: name the"):
        write_extension(deployment / "sites" / "site-00", 2, 0.25, tmp_path / "more")
    assert not (tmp_path / "more").exists()


def test_a_deployment_is_extended_in_its_directories(federate, tmp_path):
    run = federate(None, rounds=1)
    run()
    server, more = run.directory / "server", tmp_path / "more"
    write_extension(server, 2, 0.5, more)
    first = load_file(server / "run" / "model.safetensors")
    (server / "run").rename(server / "run-1")
    for party in (server, *(node.directory for node in run.nodes)):
        shutil.copytree(more, party, dirs_exist_ok=True)
    for node in run.nodes:
        node.site.close()
        with pytest.raises(PolicyRefused, match="epsilon_ever"):
            Site(node.directory)
        for old, new in (
            ("epsilon_ever = 2.0", "epsilon_ever = 2.5"),
            ("delta_ever = 1e", "delta_ever = 9e"),
        ):
            change(node.directory / "policy.toml", old, new)
    again = Run(run.directory)
    try:
        records = again()
        assert [record.round for record in records] == [0, 1, 2]
        assert all(record.refused == {} for record in records)
        started = again.nodes[0].site.federation.workshop(again.nodes[0].site.plan, server).module()
        assert all(torch.equal(first[name], value) for name, value in started.state_dict().items())
        for node in again.nodes:
            assert node.site.ledger.total() == pytest.approx((2.5, 2e-5), rel=1e-9)
    finally:
        for node in again.nodes:
            node.site.close()
