"""The rule for full batches: its noise by the recursion itself, its σ by the accountant."""

import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpact.privacy.accounting.accountant import Budget, SampledGaussian, epsilon
from fedpact.privacy.accounting.calibration import smallest_sigma
from fedpact.privacy.accounting.planner import full_batch, signal_to_noise, useful_rounds

BUDGET = Budget(2.0, 1e-5)
SIGMA = partial(smallest_sigma, BUDGET, 1.0)


def deviation(found, records, sites, honest, clip):
    """Of a weight after the run, from the covariance of (w, m), step by step."""
    each = (found.sigma * clip / math.sqrt(honest) * math.sqrt(sites) / records) ** 2
    ww = wm = mm = 0.0
    beta, eta = found.momentum, found.learning_rate
    for _ in range(found.rounds):
        # m <- β m + ξ, then w <- w - η m.
        wm, mm = beta * wm, beta**2 * mm + each
        ww, wm = ww - 2 * eta * wm + eta**2 * mm, wm - eta * mm
    return math.sqrt(ww)


@settings(deadline=None, max_examples=100)
@given(
    records=st.floats(100, 1e6),
    sites=st.integers(2, 50),
    rounds=st.integers(1, 60),
    clip=st.floats(0.01, 10),
    data=st.data(),
)
def test_the_noise_of_a_weight_is_what_was_asked_for(records, sites, rounds, clip, data):
    honest = data.draw(st.integers(1, sites))
    length = data.draw(st.floats(0.5, 4))
    found = full_batch(SIGMA, records, sites / honest, rounds, clip=clip, length=length)
    assert found.rounds <= rounds
    assert math.isclose(deviation(found, records, sites, honest, clip), found.noise, rel_tol=1e-9)


@pytest.mark.parametrize("rounds", [1, 7, 100])
def test_the_budget_is_kept_and_used(rounds):
    found = full_batch(SIGMA, 60_000, 10, rounds)
    spent = epsilon({SampledGaussian(1.0, found.sigma): found.rounds}, BUDGET.delta)
    assert 0.999 * BUDGET.epsilon < spent <= BUDGET.epsilon


def test_full_batch_signal_to_noise_is_that_of_one_release():
    found = [full_batch(SIGMA, 60_000, 10, rounds) for rounds in (1, 10, 100)]
    ratios = [signal_to_noise(1.0, one.sigma, one.rounds, 60_000, 10, 7_850) for one in found]
    assert max(ratios) / min(ratios) < 1.001


def test_little_signal_has_few_rounds_and_much_has_all():
    """By the ratio itself, of one release: where it is below 1 noise is the longer vector."""
    found = {}
    for records in (300, 60_000):
        one = full_batch(SIGMA, records, 10, 1000, weights=7_850)
        ratio = signal_to_noise(1.0, one.sigma, one.rounds, records, 10, 7_850)
        assert one.rounds == useful_rounds(ratio)
        found[records] = one.rounds
    assert found == {300: 3, 60_000: 100}
    assert full_batch(SIGMA, 60_000, 10, 7, weights=7_850).rounds == 7
