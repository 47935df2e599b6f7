"""More rounds on a run that has ended: a reservation of its own, and both ε together.

References: a run of as many rounds in one go (plain: the same bits), and the ledger's own sums.
"""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

import fedpact
from fedpact.api import extend
from fedpact.cli.main import app
from fedpact.errors import DataError, PlanError, PolicyRefused
from fedpact.ledger.family import family, next_name
from fedpact.ledger.receipt import receipt
from fedpact.plan import Plan

PLAIN = {"sites": 3, "algorithm": "scaffold", "privacy": {"mode": "none"}}
PRIVATE = {"rounds": 2, "sites": 2, "privacy": {"accountant": "rdp", "epsilon": 1.0}}


def test_rounds_that_are_added_are_those_of_a_longer_run(tmp_path):
    """A plain run with state at both sides: what goes on is all of it, not the model alone."""
    fedpact.run(Plan.parse({**PLAIN, "rounds": 2}), tmp_path / "a")
    longer = extend(tmp_path / "a", 2)
    whole = fedpact.run(Plan.parse({**PLAIN, "rounds": 4}), tmp_path / "b")
    assert [r.round for r in longer.records] == [0, 1, 2, 3, 4]
    for one, other in zip(longer.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    folder = tmp_path_factory.mktemp("private") / "run"
    first = fedpact.run(Plan.parse(PRIVATE), folder)
    second = extend(folder, 3, epsilon=0.5)
    return folder, first, second


def test_both_reservations_stand_in_the_ledger_and_add_up(private):
    folder, first, second = private
    for site in first.summary["epsilon"]:
        told = receipt(folder / "sites" / site / "ledger.jsonl")
        before, after = told["runs"].values()
        assert (before["epsilon_reserved"], after["epsilon_reserved"]) == (1.0, 0.5)
        # What is shown as spent is the sum of what each has spent, of δ likewise.
        spent = before["epsilon_spent"] + after["epsilon_spent"]
        assert second.summary["epsilon"][site] >= spent * (1 - 1e-12)
        assert second.summary["delta"][site] == before["delta"] + after["delta"]
        assert told["epsilon_reserved"] == 1.5
        said = json.loads((folder / "privacy.json").read_text())["sites"][site]
        assert said["epsilon"] == 1.5
        assert said["delta"] == before["delta"] + after["delta"]
        assert second.summary["epsilon"][site] <= said["epsilon_reserved"] <= 1.5
        assert first.records[-1].epsilon[site] == second.records[2].epsilon[site]
        assert second.records[3].epsilon[site] > first.records[-1].epsilon[site]


def test_what_was_spent_before_is_not_forgotten(private, tmp_path):
    shutil.copytree(private[0], tmp_path / "run")
    (tmp_path / "run" / "earlier.json").unlink()
    with pytest.raises(DataError, match=r"earlier\.json is not there, and the run was extended"):
        extend(tmp_path / "run", rounds=1)


def test_it_is_said_in_words(private):
    folder, _, _ = private
    said = json.loads((folder / "privacy.json").read_text())
    (line,) = [line for line in said["covers"] if "extended" in line]
    assert "rounds 1 to 2" in line
    assert "rounds 3 to 5" in line
    assert "reservation of its own" in line
    assert len(said["reservations"]) == 2


def test_it_can_be_extended_again_by_the_command(private):
    folder, _, second = private
    done = CliRunner().invoke(app, ["extend", str(folder), "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["rounds"] == 6
    for site, spent in told["epsilon"].items():
        assert spent > second.summary["epsilon"][site]
        assert len(receipt(folder / "sites" / site / "ledger.jsonl")["runs"]) == 3


def test_a_site_whose_policy_does_not_allow_it_refuses_and_the_run_is_as_it_was(tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text(
        'algorithms = ["fedavg"]\nreleases = ["gradient"]\n'
        "epsilon_per_run = 1.0\ndelta_per_run = 1e-5\n"
        "epsilon_ever = 1.5\ndelta_ever = 1e-4\nsmallest_sigma = 0.0001\n"
    )
    plan = {**PRIVATE, "policy": str(policy)}
    fedpact.run(Plan.parse(plan), tmp_path / "run")
    files = ("plan.json", "environment.json", "privacy.json", "summary.json", "rounds.jsonl")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in files}
    with pytest.raises(PolicyRefused, match="ever"):
        extend(tmp_path / "run", 1)
    assert {name: (tmp_path / "run" / name).read_bytes() for name in files} == before
    assert not (tmp_path / "run" / "earlier.json").exists()
    assert extend(tmp_path / "run", 1, epsilon=0.5).summary["rounds"] == 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"evaluation": {"share": 0.2}}, r"\[evaluation\]"),
        ({"algorithm": "ali_dpfl", "settings": {"iterations": 4}}, "follows what is left"),
        ({"privacy": {"sizes": "noisy"}}, "released and charged once"),
    ],
)
def test_what_is_reserved_once_is_refused_with_the_reason(change, told):
    with pytest.raises(PlanError, match=told):
        Plan.parse({**PRIVATE, **change}).check_extended()


def test_a_new_run_and_one_that_has_not_ended_are_refused(tmp_path):
    with pytest.raises(PlanError, match="fedpact extend"):
        fedpact.run(Plan.parse({**PLAIN, "rounds": 4, "after": 2}), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(PlanError, match="none would be left"):
        Plan.parse({**PLAIN, "rounds": 2, "after": 2})
    fedpact.run(Plan.parse({**PLAIN, "rounds": 4}), tmp_path / "cut", stop=lambda: True)
    with pytest.raises(PlanError, match="expected one that has ended"):
        extend(tmp_path / "cut", 1)


def test_names_of_reservations_are_those_a_federation_takes():
    assert next_name("fedavg-1") == "fedavg-1_more1"
    assert next_name(next_name("fedavg-1")) == "fedavg-1_more2"
    assert family("a_more2", ["b", "a_more2", "a_more10", "a", "a_more1"]) == (
        "a",
        "a_more1",
        "a_more2",
    )
    assert family("a", ["a_more1", "a", "a_b_more1"]) == ("a",)
