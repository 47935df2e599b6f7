"""Ledgers across runs on the same records, the site's policy over them, and their receipts."""

import json

import pytest

from fedpact.cli import ledger as commands
from fedpact.engines.simulation import simulate
from fedpact.errors import LedgerError, PolicyRefused
from fedpact.plan import Plan
from fedpact.privacy.receipt import receipt

POLICY = """
algorithms = ["fedavg"]
releases = ["gradient"]
epsilon_per_run = 1.0
delta_per_run = 1e-5
epsilon_ever = 2.0
delta_ever = 1e-4
smallest_sigma = 0.5
"""


@pytest.fixture
def twice(tmp_path):
    (tmp_path / "policy.toml").write_text(POLICY)

    def run(name, seed, epsilon=1.0):
        plan = Plan.parse(
            {
                "rounds": 3,
                "sites": 2,
                "seed": seed,
                "privacy": {"epsilon": epsilon},
                "policy": str(tmp_path / "policy.toml"),
                "run": {"ledgers": str(tmp_path / "kept"), "workers": 1, "evaluate_every": 3},
            }
        )
        return simulate(plan, tmp_path / name)

    run("one", 1)
    run("two", 2)
    return run


def test_reservations_add_up_across_runs_until_the_policy_ends_them(twice, tmp_path):
    for path in (tmp_path / "kept").iterdir():
        proof = receipt(path)
        assert len(proof["runs"]) == 2
        assert proof["epsilon_reserved"] == pytest.approx(2.0)
        for run in proof["runs"].values():
            assert 0.9 < run["epsilon_spent"] <= run["epsilon_reserved"] == 1.0
    with pytest.raises(PolicyRefused, match="epsilon_ever = 2"):
        twice("three", 3, epsilon=0.5)


def test_the_commands_say_it_as_json(twice, tmp_path, capsys):
    kept = tmp_path / "kept"
    commands.show_spend(kept, as_json=True)
    shown = json.loads(capsys.readouterr().out)["ledgers"]
    assert {each["site"] for each in shown.values()} == {"site-00", "site-01"}
    commands.verify(kept, as_json=True)
    assert json.loads(capsys.readouterr().out)["intact"] is True
    commands.export(kept, tmp_path / "receipt.json", as_json=True)
    assert json.loads((tmp_path / "receipt.json").read_text()) == shown
    commands.show_spend(kept, as_json=False)
    assert "add/remove one record" in capsys.readouterr().out


def test_an_altered_ledger_is_told(twice, tmp_path):
    path = sorted((tmp_path / "kept").iterdir())[0]
    path.write_bytes(
        path.read_bytes()
        .replace(b'"count": 3', b'"count": 1')
        .replace(b'"round": 2', b'"round": 3')
    )
    with pytest.raises(LedgerError, match="altered"):
        commands.verify(tmp_path / "kept")


def test_what_is_no_ledger_is_told(tmp_path):
    with pytest.raises(LedgerError, match="holds no ledger"):
        commands.verify(tmp_path)
    with pytest.raises(LedgerError, match="is no ledger"):
        commands.verify(tmp_path / "missing")
