from functools import cache

import pytest

from fedpact.privacy.accounting.accountant import Budget, SampledGaussian, epsilon
from fedpact.privacy.accounting.planner import best, candidates, choice

BUDGET = Budget(2.0, 1e-5)


CANDIDATES = cache(candidates)


@cache
def found(rounds, passes):
    return best(BUDGET, rounds, passes)


def test_the_specifications_figures():
    """snr of the spec's examples at (2, 1e-5), PLD: 0.445 at q = 0.1, T = 100; 0.496 at q = 0.25,
    T = 317; each to the spec's rounding of σ."""
    assert choice(BUDGET, 0.1, 100, 1).snr == pytest.approx(0.445, abs=2e-3)
    assert choice(BUDGET, 0.25, 317, 1).snr == pytest.approx(0.496, abs=2e-3)
    # The limit at q = 1 is the Gaussian-DP parameter of (2, 1e-5), whatever T is.
    assert choice(BUDGET, 1.0, 50, 1).snr == pytest.approx(0.502, abs=2e-3)


def test_every_candidate_keeps_all_three_budgets():
    for each in CANDIDATES(BUDGET, 100, 10.0):
        assert each.passes <= 10.0 * (1 + 1e-12)
        assert each.rounds == 100
        event = SampledGaussian(each.rate, each.sigma)
        assert epsilon({event: each.steps}, 1e-5, "rdp") <= 2.0


def test_the_best_is_not_beaten_and_beats_a_small_batch():
    ours = found(100, 10.0)
    assert ours.snr >= 0.99 * max(c.snr for c in CANDIDATES(BUDGET, 100, 10.0))
    # The paper's rate at the same number of passes needs more iterations and gets less.
    paper = choice(BUDGET, 0.015, 100, round(10 / (0.015 * 100)))
    assert paper.passes == pytest.approx(10, rel=0.06)
    assert ours.snr > 1.15 * paper.snr
