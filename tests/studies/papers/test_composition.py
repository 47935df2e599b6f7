"""The older noise bounds: the paper's numbers, their conditions, and where they are unsound."""

import math
import re

import pytest

from fedpact.common.errors import InputError
from fedpact.privacy.accounting.accountant import Budget, SampledGaussian, epsilon
from fedpact.report.tradeoffs import (
    AC1_SLACK,
    OLD_BOUNDS,
    _advanced_composition,
    exact_noise,
    unconditional_noise,
    violations,
)

BUDGET = Budget(2.0, 1e-4)
Q, STEPS = 1e-3, 100_000


def test_exact_noise_is_sound_where_they_are_not():
    sigma = exact_noise(BUDGET, Q, STEPS, "rdp")
    assert (
        sigma
        > unconditional_noise("MA", BUDGET, Q, STEPS)
        > unconditional_noise("proposed", BUDGET, Q, STEPS)
    )
    assert epsilon({SampledGaussian(Q, sigma / 2): STEPS}, BUDGET.delta, "rdp") <= BUDGET.epsilon


@pytest.mark.parametrize("bound", OLD_BOUNDS)
def test_variance_scales_as_the_formulas_say(bound):
    # σ² is proportional to q²/(1-q); to T except for AC1, whose ε0 and δ0 depend on T.
    base = unconditional_noise(bound, BUDGET, 1e-3, 1000)
    other = unconditional_noise(bound, BUDGET, 2e-3, 1000)
    assert (other / base) ** 2 == pytest.approx(4 * (1 - 1e-3) / (1 - 2e-3))
    if bound != "AC1":
        longer = unconditional_noise(bound, BUDGET, 1e-3, 3000)
        assert (longer / base) ** 2 == pytest.approx(3)


def test_ma_by_hand():
    # 4 q²/(1-q) T [(2/ε²) ln(1/δ) + 1/ε] at ε = 2, δ = e^-10, q = 1/2, T = 8: 2 · 8 · 5.5.
    assert unconditional_noise("MA", Budget(2.0, math.exp(-10)), 0.5, 8) ** 2 == pytest.approx(88)


def test_ac2_by_hand():
    # 8 T ln(e + ε/δ)/ε² with ε/δ = e² - e: ln = 2. pre = 2 at q = 1/2; 2 · 8 · 4 · 2.
    delta = 1 / (math.e**2 - math.e)
    assert unconditional_noise("AC2", Budget(1.0, delta), 0.5, 4) ** 2 == pytest.approx(128)


def test_ac1_composes_back_to_the_budget():
    each = _advanced_composition(BUDGET, 1000)
    composed = math.sqrt(2000 * math.log(1 / AC1_SLACK)) * each.epsilon
    composed += 1000 * each.epsilon * math.expm1(each.epsilon)
    assert composed == pytest.approx(BUDGET.epsilon, rel=1e-9)
    assert 1000 * each.delta + AC1_SLACK == pytest.approx(BUDGET.delta)


@pytest.mark.parametrize(
    ("budget", "q", "steps", "message"),
    [
        (Budget(1.0, 1e-4), 0.05, 100_000, r"q < 1/\(16σ\) fails"),
        (Budget(8.0, 1e-4), 1e-3, 1000, r"σ >= 1 fails"),
        (Budget(0.05, 1e-2), 1e-3, 70_000, r"ε > 2 ln\(1/δ\).*0.05 against 0.0921"),
    ],
)
def test_a_violated_condition_is_named(budget, q, steps, message):
    sigma = unconditional_noise("MA", budget, q, steps)
    assert re.search(message, "; ".join(violations(sigma, budget, q)))


def test_a_bracket_that_is_not_positive_is_an_error():
    with pytest.raises(InputError, match="not positive"):
        unconditional_noise("proposed", Budget(0.05, 1e-2), Q, STEPS)


def test_a_budget_below_the_slack_is_refused():
    with pytest.raises(InputError, match="AC1 spends"):
        unconditional_noise("AC1", Budget(1.0, 1e-5), 0.1, 10)
