"""The bounds: closed forms, exact error rates, and the rule they must not break.

Where a law is known, the chance that a bound exceeds the truth is summed exactly, so nothing here
fails by chance except where a simulation says so.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedpact.studies.audit.one_run import one_run_epsilon, one_run_p_value


def right(epsilon):
    """How often randomised response with this ε tells the truth."""
    return 1 / (1 + math.exp(-epsilon))


def test_one_run_without_delta_is_the_binomial_tail():
    assert one_run_p_value(50, 20, 13, 0.5, 0.0) == pytest.approx(
        stats.binom(20, right(0.5)).sf(12)
    )
    assert one_run_p_value(50, 20, 0, 0.5, 1e-3) == 1.0


def test_one_run_delta_term_by_hand():
    """r = 2, v = 2, ε = 0: P[W >= 2] = 1/4, P[W = 1] = 1/2, P[0 <= W < 2] / 2 = 3/8."""
    assert one_run_p_value(10, 2, 2, 0.0, 1e-3) == pytest.approx(0.25 + 2 * 10 * 1e-3 * 0.5)


def test_one_run_all_right_in_closed_form():
    """right(ε)^m = 0.05."""
    p = 0.05 ** (1 / 1000)
    assert one_run_epsilon(1000, 1000, 1000, 0.0) == pytest.approx(math.log(p / (1 - p)), abs=1e-5)


@given(
    st.integers(1, 60).flatmap(lambda r: st.tuples(st.just(r), st.integers(0, r))),
    st.sampled_from([0.0, 1e-5, 1e-3]),
)
@settings(max_examples=30)
def test_one_run_is_monotone(counts, delta):
    guesses, correct = counts
    found = one_run_epsilon(60, guesses, correct, delta)
    assert found <= one_run_epsilon(60, guesses, correct, 0.0)
    assert found <= one_run_epsilon(60, guesses, min(guesses, correct + 1), delta) + 1e-6
    if found:
        assert one_run_p_value(60, guesses, correct, found, delta) <= 0.05


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("guesses", [10, 100, 1000])
def test_one_run_error_rate_on_randomised_response(epsilon, guesses):
    """The chance that the bound exceeds the known ε, summed exactly over the right guesses."""
    law = stats.binom(guesses, right(epsilon))
    least = next(
        (v for v in range(guesses + 1) if one_run_epsilon(1000, guesses, v, 0.0) > epsilon), None
    )
    if least is not None:
        assert law.sf(least - 1) <= 0.05
        # It is no tighter than it may be, and not much looser: one more step is beyond.
        assert law.sf(least - 2) > 0.05 * (1 - 1e-4)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.01), (1.0, 1e-3)])
def test_one_run_error_rate_with_delta(epsilon, delta):
    """A mechanism that tells a record's bit outright with probability δ, and else answers by ε.

    Each bit's answer is (ε, δ)-private; of m answers all are guessed. Right with probability
    δ + (1 - δ) right(ε), so the error is summed exactly. It uses up δ: without it the bound fails.
    """
    m = 1000
    law = stats.binom(m, delta + (1 - delta) * right(epsilon))
    least = next(
        (v for v in range(m + 1) if one_run_p_value(m, m, v, epsilon, delta) <= 0.05), None
    )
    if least is not None:
        assert law.sf(least - 1) <= 0.05
