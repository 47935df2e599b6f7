"""experiments/league: its page says what is stored, and chance is what the page says it is."""

import math
import re

import numpy as np
import pytest
from experiments.league import page, runs
from experiments.league.runs import DATA, EPSILONS, HERE, Cell, Results, entrants

from fedpact import algorithms
from fedpact.algorithms.wrappers.base import Method


def test_the_page_is_what_the_stored_results_make(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "HERE", tmp_path)
    page.write()
    stored = (HERE / "README.md").read_text(encoding="utf-8")
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == stored, "run --page"


def test_a_page_without_results_has_whole_sentences(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "HERE", tmp_path)
    monkeypatch.setattr(page, "Results", lambda name: Results(name, tmp_path))
    page.write()
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "spend less. FedAvg" in text
    assert not re.search(r"[:,] ?\.", text)


def test_every_private_algorithm_is_an_entrant():
    private = {name for name in algorithms.names() if not Method(name).facts.plain_only}
    assert private <= set(entrants())
    for data in DATA:
        for name in entrants():
            cell = Cell(data, name, 2.0)
            if data != "heart" and name in ("feddyn", "fedprox", "nbafl"):
                continue  # η times the default μ is beyond 2 in some ways, which the page says
            plan = cell.plan(1, 5, *cell.ways()[0])
            assert (plan.private, plan.privacy.epsilon, plan.rounds) == (True, 2.0, 5)


@pytest.mark.parametrize(
    ("data", "name"), [("adult", "feddyn"), ("cifar10", "fedprox"), ("cifar10", "nbafl")]
)
def test_an_entrant_that_refuses_large_steps_takes_small_ones(data, name, tmp_path, monkeypatch):
    sent = {"bytes_up": 1, "bytes_down": 1, "rounds": 1}
    monkeypatch.setattr(runs, "_carried_out", lambda plan: ({"mean": 0.5}, sent))
    found = Results(data, tmp_path)
    found.chosen(Cell(data, name, 1.0))
    assert 0 < sum("refused" in one for one in found.found.values()) < page.TRIED


def test_stored_figures_spent_no_more_than_their_budget():
    for data in DATA:
        found = Results(data)
        for epsilon in EPSILONS:
            for name in entrants():
                try:
                    runs = found.runs(Cell(data, name, epsilon))
                except LookupError:
                    continue
                for run in runs:
                    assert run["spent"]
                    assert max(run["spent"]) <= epsilon
                    assert run["made"]


def test_among_equals_chance_is_exceeded_on_one_page_in_twenty():
    """Four leagues of 27 of one law, together: 5 % or fewer have a lead beyond chance."""
    generator = np.random.default_rng(0)
    beyond = 0
    for _ in range(40):
        p = {}
        for e in EPSILONS:
            means = {str(i): list(generator.normal(80, 1, 3)) for i in range(27)}
            means["fedavg"] = means.pop("0")
            p |= {("x", e, name): lead.p for name, lead in page.ahead(means).items()}
        beyond += min(page.holm(p).values()) < page.ERROR
    # Rarer than 2 ± 1.4 in 40: the leads of one league share FedAvg's own noise.
    assert 1 <= beyond <= 6


def test_a_clear_winner_is_found():
    generator = np.random.default_rng(1)
    means = {str(i): list(generator.normal(80, 1, 3)) for i in range(10)}
    means |= {"fedavg": [80.0, 80.5, 79.5], "good": [86.0, 86.5, 85.5], "wild": [88.5, 85.0, 81.5]}
    found = page.ahead(means)
    assert found["good"].points == pytest.approx(6.0)
    corrected = page.holm({("x", 1.0, name): lead.p for name, lead in found.items()})
    assert [name for (_, _, name), p in corrected.items() if p < page.ERROR] == ["good"]
    assert page.ahead({"fedavg": [1.0, 2.0]}) == {}


def test_a_lead_says_how_unlike_its_own_deviation_is():
    """By hand: differences -1, 0, 1 deviate by 1/√3; residuals ±1/3, ±2/3 sum to 4/3 of 4."""
    means = {"fedavg": [80.0] * 3, "even": [81.0] * 3, "wild": [79.0, 80.0, 81.0]}
    found = page.ahead(means)
    assert found["wild"].unlike == pytest.approx(math.sqrt(1 / 3) / math.sqrt(4 / 3 / 4 * 2 / 3))
    assert found["even"].unlike == 0


def test_holm_is_its_step_down_rule():
    """Of 0.01, 0.02, 0.03, 0.9: 4 x 0.01, 3 x 0.02, 2 x 0.03, 0.9, each at least the one before."""
    p = {("x", float(i), "a"): p for i, p in enumerate((0.02, 0.9, 0.01, 0.03))}
    assert [*page.holm(p).values()] == pytest.approx([0.04, 0.06, 0.06, 0.9])
    assert page.holm({}) == {}


def test_the_cost_of_the_rule_is_that_of_composed_gaussians():
    """Six Gaussians of σ are one of σ / √6: so is what trying six settings costs."""
    from fedpact.privacy.accounting.accountant import Budget, SampledGaussian, epsilon
    from fedpact.privacy.accounting.calibration import smallest_scale

    sigma = smallest_scale(Budget(2.0, 1e-5), {SampledGaussian(1.0, 1.0): 1})
    one = epsilon({SampledGaussian(1.0, sigma / math.sqrt(6)): 1}, 1e-5)
    assert page.cost(2.0, 1e-5, 6) == pytest.approx(one, rel=1e-2)
