"""Secure aggregation in a simulation: the same run to float32's rounding, and the same budgets."""

import json
import sys

import pytest
import torch

from fedpact.common.errors import PlanError
from fedpact.plan import Plan
from fedpact.privacy.ledger.receipt import receipt
from fedpact.report.page import write_report
from fedpact.simulation.simulate import simulate

BASE = {
    "compression": {"kind": "none"},
    "rounds": 3,
    "sites": 3,
    "privacy": {"accountant": "rdp"},
    "run": {"workers": 1},
}
SECURE = {"secure_aggregation": {"threshold": 2}}
# float32's rounding of a model of numbers below 1, in three rounds of folds over three sites.
CLOSE = 1e-5


def w(result):
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


@pytest.mark.parametrize(
    "tables",
    [
        {"algorithm": "ldp_fedsgd", "batch_size": 30.0},
        {"algorithm": "scaffold", "fairness": {"weight": 0.1}},
        {"algorithm": "fedavg", "privacy": {"mode": "none"}},
        pytest.param(
            {"algorithm": "fedfdp", "server": {"optimiser": "momentum"}}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda tables: "-".join(map(str, tables)),
)
def test_the_run_is_the_one_without_it(tables, tmp_path):
    secure = simulate(Plan.parse({**BASE, **tables, **SECURE}), tmp_path / "secure")
    plain = simulate(Plan.parse({**BASE, **tables}), tmp_path / "plain")
    assert float((w(secure) - w(plain)).abs().max()) <= CLOSE
    assert not torch.equal(w(secure), w(plain))
    assert float(w(plain).abs().max()) < 1
    # The budgets do not know of it.
    assert secure.summary["epsilon"] == plain.summary["epsilon"]
    for site in secure.summary["epsilon"]:
        one, other = (
            receipt(result.folder / "sites" / site / "ledger.jsonl")["runs"]
            for result in (secure, plain)
        )
        assert [run["events"] for run in one.values()] == [run["events"] for run in other.values()]
    # Up go 8 bytes a number in place of 4.
    assert secure.summary["bytes_up"] > 1.5 * plain.summary["bytes_up"]


def test_a_stopped_run_resumes_to_the_same_bits(tmp_path):
    """The masks differ and cancel exactly, so nothing of them is left in the model."""
    plan = Plan.parse({**BASE, **SECURE})
    whole = simulate(plan, tmp_path / "whole")
    done = []
    simulate(plan, tmp_path / "parts", on_round=done.append, stop=lambda: len(done) >= 2)
    parts = simulate(plan, tmp_path / "parts")
    assert len(done) == 2
    assert torch.equal(w(whole), w(parts))


def test_report_says_epsilon_ignores_secure_aggregation(tmp_path):
    result = simulate(Plan.parse({**BASE, **SECURE}), tmp_path / "run")
    told = json.loads((result.folder / "privacy.json").read_bytes())
    assert told["secure_aggregation"] == {
        "threshold": 2,
        "sites": 3,
        "neighbours": 2,
        "against": 0,
        "bits": 64,
    }
    page = write_report(result.folder).read_text(encoding="utf-8")
    assert "Secure aggregation, threshold 2 of 3 sites" in page
    assert "stated (ε, δ) does not rely on it" in page


@pytest.mark.parametrize("threshold", [1, 4])
def test_a_threshold_that_the_sites_cannot_have_is_refused(threshold, tmp_path):
    plan = Plan.parse({**BASE, "secure_aggregation": {"threshold": threshold}})
    with pytest.raises(PlanError, match=f"threshold = {threshold} with 3 sites"):
        simulate(plan, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_half_of_the_sites_is_too_few():
    """2t > n: two disjoint halves of four could open both secrets of one site."""
    settings = Plan.parse({**BASE, **SECURE}).secure_aggregation
    settings.check_sites(3)
    with pytest.raises(PlanError, match="threshold = 2 with 4 sites"):
        settings.check_sites(4)


def test_it_needs_no_flower(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)
    simulate(Plan.parse({**BASE, "rounds": 1, **SECURE}), tmp_path / "run")
