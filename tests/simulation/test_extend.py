"""A run that goes on from the model of one that has ended: a new one, on the same ledgers."""

import json

import pytest
import torch
from tests.policies import GENEROUS, write_policy
from typer.testing import CliRunner

import fedpact
from fedpact.cli.main import app
from fedpact.common.errors import InputError, LedgerError, PlanError, PolicyRefused
from fedpact.common.run_folder import Folder
from fedpact.plan import Plan
from fedpact.privacy.ledger.receipt import receipt
from fedpact.simulation.run import extend_plan

PRIVATE = {"rounds": 2, "sites": 2, "privacy": {"accountant": "rdp", "epsilon": 1.0}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run, one of three rounds that extends it, and one by the command that extends this."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    first = fedpact.run(Plan.parse(PRIVATE), folder)
    second = fedpact.extend(folder, 3, epsilon=0.5)
    words = ["extend", str(second.folder), "--rounds", "1", "--out", str(folder.parent / "third")]
    third = CliRunner().invoke(app, words)
    assert third.exit_code == 0, third.output
    assert third.stderr.startswith("privacy: ")
    assert "this one costs (ε, δ) = (2, 3e-05) a site" in third.stderr
    return first, second, third.stdout


def test_an_extension_begins_with_the_runs_model(runs):
    first, second, _ = runs
    assert second.folder == first.folder.with_name("run-more")
    assert [record.round for record in second.records] == [0, 1, 2, 3]
    begins = Plan.read(second.folder / "plan.json").initial.tensors()
    assert begins.keys() == first.model.state_dict().keys()
    assert all(torch.equal(begins[name], w) for name, w in first.model.state_dict().items())
    assert second.records[0].accuracy == first.records[-1].accuracy


def test_all_runs_of_a_ledger_count_together(runs):
    first, second, third = runs
    assert not (second.folder / "sites" / "site-00" / "ledger.jsonl").exists()
    for site in first.summary["epsilon"]:
        told = receipt(first.folder / "sites" / site / "ledger.jsonl")
        assert [run["epsilon_reserved"] for run in told["runs"].values()] == [1.0, 0.5, 0.5]
        assert told["epsilon_reserved"] == 2.0
    assert second.summary["ledgers"]["runs"] == 2
    assert second.summary["ledgers"]["epsilon_reserved"] == 1.5
    assert second.summary["ledgers"]["delta_reserved"] == sum(
        max(run.summary["delta"].values()) for run in (first, second)
    )
    assert "3 runs in" in third
    assert "together ε ≤ 2 " in third
    # Its own ε is of itself; what the model had cost before stands beside it.
    said = json.loads((second.folder / "privacy.json").read_text())
    assert any(
        "spent ε <= " in line and "private run run" in line for line in said["does_not_cover"]
    )


def test_an_extension_draws_no_noise_again():
    """By the seed alone it would add the first run's noise a second time."""
    plan = Plan.parse(PRIVATE)
    start = plan.initial.model_copy(update={"weights": "a", "sha256": "ab"})
    again = plan.model_copy(update={"initial": start})
    assert plan.seeds("a", 1) == (0, "a", 1)
    assert again.seeds("a", 1) == (0, "a", 1, "ab")


def test_a_lost_ledger_stops_an_extension(tmp_path):
    fedpact.run(Plan.parse({**PRIVATE, "rounds": 1}), tmp_path / "run")
    (tmp_path / "run" / "sites" / "site-01" / "ledger.jsonl").unlink()
    told = r"is missing, and the run has started: .* if run\.ledgers is a relative path, give"
    with pytest.raises(LedgerError, match=told):
        fedpact.extend(tmp_path / "run", 1)
    assert not (tmp_path / "run-more").exists()


def test_a_refusing_site_lets_none_reserve(tmp_path):
    policy = write_policy(tmp_path / "policy.toml", **GENEROUS | {"epsilon_ever": 1.5})
    fedpact.run(Plan.parse({**PRIVATE, "policy": policy}), tmp_path / "run")
    with pytest.raises(PolicyRefused, match="ever"):
        fedpact.extend(tmp_path / "run", 1)
    for site in ("site-00", "site-01"):
        assert receipt(tmp_path / "run" / "sites" / site / "ledger.jsonl")["epsilon_reserved"] == 1
    more = fedpact.extend(tmp_path / "run", 1, epsilon=0.5, out=tmp_path / "more")
    assert more.summary["ledgers"]["epsilon_reserved"] == 1.5


def test_only_an_ended_run_is_extended(tmp_path):
    plan = Plan.parse({**PRIVATE, "privacy": {"mode": "none"}})
    fedpact.run(plan, tmp_path / "cut", stop=lambda: True)
    with pytest.raises(PlanError, match=r"is stopped.*expected a finished run"):
        fedpact.extend(tmp_path / "cut", 1)
    fedpact.run(plan, tmp_path / "deployed")
    (tmp_path / "deployed" / "partition.json").unlink()  # as a server's run has none
    with pytest.raises(PlanError, match="`fedpact deploy extend SERVER --rounds 1 --out NEW`"):
        fedpact.extend(tmp_path / "deployed", 1)
    told = CliRunner().invoke(app, ["resume", str(tmp_path / "deployed")])
    assert "nothing to resume" in told.output
    assert "fedpact extend" not in told.output
    party = tmp_path / "party"
    party.mkdir()
    (party / "federation.toml").touch()
    told = CliRunner().invoke(app, ["extend", str(party), "--rounds", "1"])
    assert "`fedpact deploy extend" in str(told.exception)


@pytest.mark.parametrize("rounds", [True, 0, 1.0, "1", None])
def test_rounds_are_a_count(rounds, tmp_path):
    with pytest.raises(InputError, match=r"rounds is .*: expected an integer"):
        extend_plan(Folder(tmp_path), rounds, None)
