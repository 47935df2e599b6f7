"""Ledgers across runs on the same records, the site's policy over them, and their receipts."""

import json
import math
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.policies import write_policy

from fedpact.cli.commands import ledger as commands
from fedpact.common.errors import BudgetExhausted, InputError, LedgerError, PlanError, PolicyRefused
from fedpact.common.format import upper
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import Budget, SampledGaussian
from fedpact.privacy.accounting.group_privacy import epsilon_per_person
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.ledger.receipt import receipt, remaining
from fedpact.simulation.simulate import simulate

POLICY = {"epsilon_per_run": 1.0, "epsilon_ever": 2.0, "delta_ever": 1e-4, "smallest_sigma": 0.5}


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Two runs on the same ledgers; `twice` has a copy."""
    home = tmp_path_factory.mktemp("twice")
    run = runner(home)
    run("one", 1)
    run("two", 2)
    return home


@pytest.fixture
def twice(two_runs, tmp_path):
    shutil.copytree(two_runs, tmp_path, dirs_exist_ok=True)
    return runner(tmp_path)


def runner(home):
    write_policy(home / "policy.toml", **POLICY)

    def run(name, seed, epsilon=1.0, **how):
        plan = Plan.parse(
            {
                "rounds": 3,
                "sites": 2,
                "seed": seed,
                "privacy": {"epsilon": epsilon},
                "policy": str(home / "policy.toml"),
                "run": {"ledgers": str(home / "kept"), "workers": 1, "evaluate_every": 3},
            }
        )
        return simulate(plan, home / name, **how)

    return run


def test_reservations_add_across_runs_up_to_the_policy(twice, tmp_path):
    for path in (tmp_path / "kept").iterdir():
        proof = receipt(path)
        assert len(proof["runs"]) == 2
        assert proof["epsilon_reserved"] == pytest.approx(2.0)
        for run in proof["runs"].values():
            assert 0.9 < run["epsilon_spent"] <= run["epsilon_reserved"] == 1.0
    with pytest.raises(PolicyRefused, match="epsilon_ever = 2"):
        twice("three", 3, epsilon=0.5)


def test_tightened_policy_applies_to_a_continued_run(twice, tmp_path):
    """By itself the run is within it; with the two before it is not."""
    policy = tmp_path / "policy.toml"
    write_policy(policy, **POLICY | {"epsilon_ever": 3.0})
    calls = iter((False, True))
    twice("three", 3, stop=lambda: next(calls))
    write_policy(policy, **POLICY)
    with pytest.raises(PolicyRefused, match=r"epsilon would be 3: .*epsilon_ever = 2"):
        twice("three", 3)
    write_policy(policy, **POLICY | {"epsilon_ever": 3.0})
    assert twice("three", 3).summary["status"] == "finished"


def test_the_commands_say_it_as_json(twice, tmp_path, capsys):
    kept = tmp_path / "kept"
    commands.show(kept, as_json=True)
    shown = json.loads(capsys.readouterr().out)["ledgers"]
    assert {each["site"] for each in shown.values()} == {"site-00", "site-01"}
    commands.verify(kept, None, as_json=True)
    assert json.loads(capsys.readouterr().out)["intact"] is True
    commands.verify(kept, None, as_json=False)
    said = capsys.readouterr().out
    for path, each in shown.items():
        assert f"{path}: intact: {each['entries']} entries of {each['site']!r}, each sealed" in said
        for spend in each["runs"].values():
            assert f"│ {upper(spend['epsilon_spent'])} " in said
        assert f"{path}: all runs together reserve ε {upper(each['epsilon_reserved'])}" in said
    commands.export(kept, tmp_path / "receipt.json", as_json=True)
    exported = json.loads((tmp_path / "receipt.json").read_text())
    for path, told in exported.items():
        # Two runs of other plans: nobody says of which data, or what for; the day is today's.
        assert told["data_set"] == {"name": None, "version": None}
        assert {run.pop("purpose") for run in told["runs"].values()} == {None}
        assert told["date"][:10] == datetime.now(UTC).date().isoformat()
        assert told["first_entry"] <= told["last_entry"] <= told["date"]
        assert "signature" not in told
        assert told | shown[path] == told
        assert told["sentence"].startswith("This is of a simulation, which protects nobody")
        assert (
            f"a factor of at most {upper(math.exp(told['epsilon_reserved']), 3)}"
            in told["sentence"]
        )
    for each in shown.values():
        for run in each["runs"].values():
            events = {SampledGaussian(e["q"], e["sigma"]): e["reserved"] for e in run["events"]}
            of_five = epsilon_per_person(events, run["delta"], 5)
            of_run = run["epsilon_per_person"]
            assert of_run["5"] == of_five > run["epsilon_reserved"]
    commands.show(kept, as_json=False)
    printed = capsys.readouterr().out
    assert "add/remove one record" in printed
    assert f"a patient with five visits has at most ε = {upper(of_five)}" in printed


def test_what_was_reserved_is_rounded_up(tmp_path, capsys):
    budget = Budget(2.00000049, 1.00000049e-5)
    with Ledger(tmp_path / "ledger.jsonl", "ward", hypothetical=False) as ledger:
        ledger.reserve("one", budget, {SampledGaussian(0.1, 5.0): 3})
    commands.show(tmp_path / "ledger.jsonl", as_json=False)
    row = next(line for line in capsys.readouterr().out.splitlines() if "│ ward" in line)
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert float(cells[2]) >= budget.epsilon
    assert float(cells[4]) >= budget.delta


def test_an_altered_ledger_is_reported(twice, tmp_path):
    path = sorted((tmp_path / "kept").iterdir())[0]
    path.write_bytes(
        path.read_bytes()
        .replace(b'"count": 3', b'"count": 1')
        .replace(b'"round": 2', b'"round": 3')
    )
    with pytest.raises(LedgerError, match="altered"):
        commands.verify(tmp_path / "kept", None, as_json=False)


def test_torn_last_line_counts_as_the_whole_reservation(twice, tmp_path, capsys):
    path = sorted((tmp_path / "kept").iterdir())[0]
    before = receipt(path)
    assert not before["unreadable_last_line"]
    path.write_bytes(path.read_bytes()[:-25])
    told = receipt(path)
    assert told["unreadable_last_line"]
    for name, run in told["runs"].items():
        assert (
            run["epsilon_spent"] == run["epsilon_reserved"] >= before["runs"][name]["epsilon_spent"]
        )
    commands.verify(tmp_path / "kept", None, as_json=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("a crash left unreadable") == 1
    commands.show(tmp_path / "kept", as_json=False)
    assert "a crash left unreadable" in capsys.readouterr().out
    # Who opens the ledger decides what it was: at most what was told.
    with Ledger(path, before["site"], hypothetical=True):
        pass
    after = receipt(path)
    assert not after["unreadable_last_line"]
    for name, run in after["runs"].items():
        assert run["epsilon_spent"] <= told["runs"][name]["epsilon_spent"]


def test_a_receipt_of_exact_numbers_is_strict_json(twice, tmp_path, capsys):
    path = sorted((tmp_path / "kept").iterdir())[0]
    with Ledger(path, "site-00", hypothetical=True) as ledger:
        ledger.expose(next(iter(receipt(path)["runs"])), 1)
    commands.export(path, tmp_path / "receipt.json", as_json=False)

    def refuse(word):
        raise AssertionError(word)

    told = json.loads((tmp_path / "receipt.json").read_text(), parse_constant=refuse)
    assert told[str(path)]["epsilon_reserved"] is None
    for joint in (False, True):
        with pytest.raises(BudgetExhausted, match="exact numbers"):
            remaining(path, Budget(1e9, 0.5), joint=joint)


def test_names_of_runs_are_not_cut_short(twice, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    commands.show(tmp_path / "kept", as_json=False)
    shown = capsys.readouterr().out
    run = next(iter(receipt(next((tmp_path / "kept").iterdir()))["runs"]))
    column = "".join(line.split("│")[2].strip() for line in shown.splitlines() if "│" in line)
    assert run in column


def test_a_file_that_is_not_a_ledger_is_reported(tmp_path):
    with pytest.raises(LedgerError, match="has no ledger"):
        commands.verify(tmp_path, None, as_json=False)
    with pytest.raises(LedgerError, match="is no ledger"):
        commands.verify(tmp_path / "missing", None, as_json=False)


def test_simulated_runs_receipt_states_data_and_purpose(tmp_path):
    about = {"purpose": "to try it", "data_version": "1998"}
    simulate(Plan.parse({"rounds": 1, "sites": 2, "about": about}), tmp_path / "run")
    commands.export(tmp_path / "run", tmp_path / "receipt.json", as_json=False)
    for told in json.loads((tmp_path / "receipt.json").read_text()).values():
        assert told["data_set"] == {"name": "digits", "version": "1998"}
        assert [run["purpose"] for run in told["runs"].values()] == ["to try it"]


@pytest.mark.parametrize(
    "about",
    [
        {"published": "31.1.2026"},
        {"published": "2026-02-30"},
        {"purpose": "two\nlines"},
        {"sector": "Piracy"},
        {"reason": "none"},
        {"curators": "one"},
    ],
)
def test_statements_about_a_run_have_a_format(about):
    with pytest.raises(PlanError, match=f"about.{next(iter(about))}|published"):
        Plan.parse({"about": about})


@pytest.fixture
def own(tmp_path):
    """A run that keeps its ledgers in its own folder."""
    plan = {"rounds": 2, "sites": 3, "run": {"workers": 1, "evaluate_every": 2}}
    return simulate(Plan.parse(plan), tmp_path / "own").folder


@pytest.mark.parametrize("asked", [commands.verify, commands.show, commands.export])
def test_a_missing_or_unreadable_ledger_is_reported(own, asked, monkeypatch, tmp_path):
    given = {
        commands.verify: (None, True),
        commands.export: (tmp_path / "r.json", True),
    }
    scandir, hidden = os.scandir, own / "sites" / "site-01"

    def denied(place):
        if Path(place) == hidden:
            raise PermissionError(13, "Permission denied", str(place))
        return scandir(place)

    with monkeypatch.context() as to:
        to.setattr(os, "scandir", denied)
        with pytest.raises(LedgerError, match=r"site-01 cannot be read \(Permission denied\)"):
            asked(own, *given.get(asked, (True,)))
    (hidden / "ledger.jsonl").unlink()
    with pytest.raises(LedgerError, match="no ledger of site-01, which took part"):
        asked(own, *given.get(asked, (True,)))


@pytest.mark.parametrize("name", ["ledger.jsonl", "receipt.txt"])
def test_a_receipt_is_a_json_file_and_no_ledger(own, name):
    site = own / "sites" / "site-00"
    before = (site / "ledger.jsonl").read_bytes()
    with pytest.raises(InputError, match=r"--out is .*expected a name that ends in \.json"):
        commands.export(site, site / name, as_json=True)
    assert (site / "ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize("left", [None, b""])
def test_a_run_that_lacks_a_ledger_does_not_begin_another(own, left):
    ledger = own / "sites" / "site-00" / "ledger.jsonl"
    ledger.unlink() if left is None else ledger.write_bytes(left)
    plan = Plan.parse(json.loads((own / "plan.json").read_bytes()))
    with pytest.raises(LedgerError, match="and the run has started"):
        simulate(plan, own)
    assert (ledger.read_bytes() if ledger.exists() else None) == left
