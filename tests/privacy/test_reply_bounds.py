"""Bounds on replies: by the module's formula, and no honest release beyond them."""

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats

from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.reply_bounds import LEEWAY, longest_gradient, longest_reply, longest_sums
from fedpact.privacy.terms import FullDataRelease, Terms

CLIP, SIGMA, D = 0.5, 3.0, 16
NOISE = math.sqrt(D) + 9  # the longest normal vector, in deviations


def terms(mechanism):
    """All of 20 declared records in each of 5 batches."""
    budget = Budget(8.0, 1e-5)
    return Terms("a", 20.0, 1.0, CLIP, {"gradient": SIGMA}, 5, budget, "best", mechanism)


def test_gradient_bound_is_clipped_records_and_noise():
    """A site holds up to twice the declared records; a mean of a batch is no longer than C."""
    summed = 2 * CLIP + SIGMA * CLIP / 20 * NOISE
    assert longest_gradient(terms("per_sample"), D) == pytest.approx(summed, rel=1e-12)
    mean = CLIP + SIGMA * CLIP * NOISE
    assert longest_gradient(terms("batch_clipped"), D) == pytest.approx(mean, rel=1e-12)
    grown = replace(terms("per_sample"), clips=(CLIP, 3 * CLIP))
    assert longest_gradient(grown, D) == pytest.approx(3 * summed, rel=1e-12)


@pytest.mark.parametrize(("size", "rate"), [(200.0, 0.01), (1000.0, 0.1), (1000.0, 0.5)])
def test_a_batch_exceeds_its_bound_as_rarely_as_its_noise(size, rate):
    """Exactly, of twice the declared records; a normal number exceeds 9 as rarely."""
    one = replace(terms("per_sample"), size=size, rate=rate)
    clipped = longest_gradient(one, D) - SIGMA * CLIP / (size * rate) * NOISE
    drawn = clipped / CLIP * size * rate
    assert stats.binom.sf(drawn, 2 * size, rate) <= math.exp(-(9**2) / 2)


def test_reply_bound_grows_with_step_length_and_events():
    one, told = terms("per_sample"), torch.full((D,), 4.0)
    far = LEEWAY * 5 * longest_gradient(one, D)
    assert longest_reply(one, 0.2, None, D) == pytest.approx(far, rel=1e-12)
    rounding = LEEWAY * 2.0**-23 * 16.0  # ‖told‖ = 4 sqrt(16)
    expected = 0.2 * far + rounding
    assert longest_reply(one, 0.2, told, D) == pytest.approx(expected, rel=1e-12)


def test_bound_of_sums_is_twice_the_declared_records_and_noise():
    once = FullDataRelease("x", {"hits": 2.0}, SIGMA, 1, Budget(8.0, 1e-5))
    expected = 2.0 * (2 * 20 + SIGMA * NOISE) * (1 + 2.0**-7)
    assert longest_sums(once, {"hits": D}, 20.0) == pytest.approx({"hits": expected}, rel=1e-12)
