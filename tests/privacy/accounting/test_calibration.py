"""Calibrations: always on the safe side, and close to the boundary."""

import math
import random

import numpy as np
import pytest

from fedpact.common.errors import BudgetExhausted, InputError
from fedpact.privacy.accounting import calibration
from fedpact.privacy.accounting.accountant import Budget, SampledGaussian, epsilon, round_rate_up
from fedpact.privacy.accounting.calibration import largest_rate, smallest_sigma

BUDGET = Budget(2.0, 1e-5)
SPENT = {SampledGaussian(0.05, 2.0): 50}


@pytest.mark.parametrize(
    ("q", "steps", "accountant", "spent"),
    [(0.1, 100, "pld", None), (0.25, 40, "best", SPENT), (1.0, 10, "rdp", SPENT)],
)
def test_smallest_sigma_keeps_the_budget_and_less_noise_does_not(q, steps, accountant, spent):
    sigma = smallest_sigma(BUDGET, q, steps, accountant, spent=spent)

    def cost(s):
        return epsilon({**(spent or {}), SampledGaussian(q, s): steps}, 1e-5, accountant)

    assert cost(sigma) <= BUDGET.epsilon < cost(sigma * (1 - 1e-3))
    # As the specification has it.
    assert accountant != "pld" or sigma == pytest.approx(2.25, abs=5e-3)


@pytest.mark.parametrize(("accountant", "sigma", "steps"), [("best", 1.1, 300), ("rdp", 9.0, 317)])
def test_largest_rate_keeps_the_budget_and_a_larger_one_does_not(accountant, sigma, steps):
    q = largest_rate(BUDGET, sigma, steps, accountant, spent=SPENT)

    def cost(rate):
        return epsilon({**SPENT, SampledGaussian(rate, sigma): steps}, 1e-5, accountant)

    assert cost(q) <= BUDGET.epsilon < cost(q * (1 + 1e-3))


def test_the_event_that_is_planned_may_be_the_one_that_is_spent():
    sigma = smallest_sigma(BUDGET, 0.25, 317, "rdp")
    again = smallest_sigma(BUDGET, 0.25, 200, "rdp", spent={SampledGaussian(0.25, sigma): 117})
    assert again == pytest.approx(sigma, rel=5e-4)
    assert largest_rate(BUDGET, 50.0, 30) == 1.0
    # As the specification has it.
    assert smallest_sigma(BUDGET, 0.25, 317) == pytest.approx(8.97, abs=5e-3)


def test_1000_sites_need_one_search_per_rate():
    rates = [round_rate_up(32 / n) for n in np.linspace(37, 52, 1000)]
    sigma = {q: smallest_sigma(BUDGET, q, 317) for q in rates}
    assert len(sigma) <= 5
    assert sorted(sigma) == sorted(sigma, key=sigma.__getitem__)


def test_a_delta_below_all_rounding_is_searched_as_well():
    budget = Budget(2.0, 1e-13)
    sigma = smallest_sigma(budget, 0.3, 40, "pld")
    cost = [epsilon({SampledGaussian(0.3, s): 40}, 1e-13, "pld") for s in (sigma, 0.999 * sigma)]
    assert cost[0] <= 2.0 < cost[1]


def test_processors_that_round_otherwise_find_the_same_noise(monkeypatch):
    """What differs between them, some 1e-15 in a sum, is 1e-12 here, another at each question."""
    asked = [(0.015, 300, "best"), (0.3, 40, "pld"), (0.3, 40, "rdp"), (1.0, 50, "best")]
    found = [smallest_sigma(BUDGET, *one) for one in asked]
    assert found == [float(f"{sigma:.6g}") for sigma in found]
    draws, exact = random.Random(0), calibration.epsilon
    monkeypatch.setattr(
        calibration, "epsilon", lambda *a: exact(*a) * (1 + draws.uniform(-1e-12, 1e-12))
    )
    calibration._smallest_scale.cache_clear()
    assert [smallest_sigma(BUDGET, *one) for one in asked] == found
    calibration._smallest_scale.cache_clear()


def test_the_limit_of_full_batches_is_the_analytic_gaussian():
    # μ = sqrt(T)/σ = 0.5016 gives (2, 1e-5): "the limit at q = 1 is 0.502".
    sigma = smallest_sigma(BUDGET, 1.0, 317)
    assert math.sqrt(317) / sigma == pytest.approx(0.502, abs=5e-4)


def test_a_spent_budget_admits_no_noise():
    spent = {SampledGaussian(1.0, 1.0): 1}
    with pytest.raises(BudgetExhausted, match="spent"):
        smallest_sigma(BUDGET, 0.1, 10, "rdp", spent=spent)
    with pytest.raises(BudgetExhausted, match="spent"):
        largest_rate(BUDGET, 1.0, 10, "rdp", spent=spent)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: smallest_sigma(BUDGET, math.nan, 10),
        lambda: smallest_sigma(BUDGET, 0.1, 0),
        lambda: largest_rate(BUDGET, math.nan, 10),
        lambda: largest_rate(BUDGET, 0.0, 10),
        lambda: smallest_sigma(BUDGET, 0.1, 10, "exact"),
    ],
)
def test_invalid_input_is_refused(wrong):
    with pytest.raises(InputError):
        wrong()
