"""The lemma of docs/notes/noise-for-the-sum.md by exact probabilities: sums of rounded shares."""

import itertools
import math

import numpy as np
import pytest
from scipy.special import log_ndtr, ndtr

from fedpact.common.errors import InputError
from fedpact.privacy.accounting import gaussian, shared_noise
from fedpact.privacy.accounting.accountant import SampledGaussian

REACH = 60
N = np.arange(-REACH, REACH + 1)
NODES, WEIGHTS = np.polynomial.legendre.leggauss(200)


def share(a, units):
    """The probabilities of floor(a + ν z + 1/2) at N."""
    edges = ndtr((np.arange(-REACH, REACH + 2) - 0.5 - a) / units)
    return np.diff(edges)


def summed(places, units):
    """The probabilities at N of the sum of shares with these a_i; their tails are beyond."""
    found = np.ones(1)
    for a, nu in zip(places, units, strict=True):
        found = np.convolve(found, share(a, nu))
    middle = len(found) // 2
    return found[middle - REACH : middle + REACH + 1]


def reference(places, units, value):
    """Q at a value: the density of a + ν Z + U_1 + ... + U_h there, by Fourier's integral."""
    a, variance = sum(places), sum(nu**2 for nu in units)
    half = 4.5 / math.sqrt(variance)
    t = half * (NODES + 1)
    wave = np.cos(t * (a - value)) * np.exp(-variance * t * t / 2)
    return float(WEIGHTS @ (wave * np.sinc(t / (2 * math.pi)) ** len(places))) * half / math.pi


@pytest.mark.parametrize("honest", [1, 2, 3, 7])
@pytest.mark.parametrize("units", [0.5, 0.8, 1.0, 1.5, 2.0])
def test_a_sum_of_shares_has_the_law_that_is_accounted_for(honest, units):
    """Quadrature and cut tails are off by less than 1e-13; the bound is 0.37 h at ν = 1/2."""
    generator = np.random.default_rng(honest)
    for _ in range(3):
        places = generator.uniform(-0.5, 0.5, honest)
        deviations = units * generator.uniform(1, 1.3, honest)
        exact = summed(places, deviations)
        for value in (-3, -1, 0, 1, 2):
            off = abs(exact[value + REACH] - reference(places, deviations, value))
            assert off <= shared_noise.distribution_error(units, honest) + 1e-13


@pytest.mark.parametrize("units", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("honest", [1, 3, 7])
def test_the_distance_covers_the_series_of_the_proof(honest, units):
    """α is at least the series' terms at |t| >= (2m - 1)π, of which there are two of each m."""
    odd = np.arange(1, 99, 2)
    alpha = 4 / math.pi * float((np.exp(-((odd * math.pi * units) ** 2) / 2) / odd).sum())
    least = (1 + alpha) ** honest - 1 + alpha
    assert least <= shared_noise.distribution_error(units, honest) <= 1.02 * least


@pytest.mark.parametrize("units", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("honest", [1, 3, 7])
def test_the_exact_hockey_stick_is_below_the_gaussians(honest, units):
    """A record that moves a sum by Δ units, wherever it stands on the grid."""
    deviations, moved = [units] * honest, 2.0 * units * math.sqrt(honest) / 2
    scale = units * math.sqrt(honest)
    for start in (0.0, 0.3, 0.5):
        places = [start] + [0.25] * (honest - 1)
        p, q = summed(places, deviations), summed([start + moved, *places[1:]], deviations)
        for epsilon in (0.0, 0.25, 0.5, 1.0, 2.0):
            m = moved / scale
            gaussian = ndtr(m / 2 - epsilon / m) - math.exp(epsilon) * ndtr(-m / 2 - epsilon / m)
            for one, other in ((p, q), (q, p)):
                exact = float(np.maximum(one - math.exp(epsilon) * other, 0).sum())
                slack = (
                    (1 + math.exp(epsilon))
                    * len(N)
                    * shared_noise.distribution_error(units, honest)
                    / 2
                )
                assert exact <= gaussian + slack + 1e-12


@pytest.mark.parametrize("units", [0.5, 4.0])
@pytest.mark.parametrize("honest", [1, 9, 100])
def test_added_delta_counts_all_values_of_a_sum(honest, units):
    """Rounding moves a share by 1/2 at most, so beyond them a sum has less than 1e-300."""
    error = shared_noise.distribution_error(units, honest)
    values = shared_noise.added_delta(1.0, units, honest, 1.0) / (1 + math.e) / error * 2
    beyond = (values - honest) / 2 / (units * math.sqrt(honest))
    assert log_ndtr(-beyond) < -700


def test_delta_allowance_covers_every_admitted_run():
    shared_noise.check_added_delta(8.0, 100, 1e9)
    assert (
        shared_noise.added_delta(1.0, shared_noise.SHARE_DEVIATION, 9, 1e10)
        <= shared_noise.ADDED_DELTA
    )
    # An ε that is stated beside the promise, as of a person, is covered, or it is no bound.
    assert (
        shared_noise.added_delta(10.0, shared_noise.SHARE_DEVIATION, 100, 1e9)
        <= shared_noise.ADDED_DELTA
    )
    assert shared_noise.added_delta(1.0, 1.0, 9, 1e10) > 1
    for bad in ((300.0, 9, 1e9), (1e6, 9, 1.0), (8.0, 9, 1e18)):
        with pytest.raises(InputError, match="expected at most 1e-15"):
            shared_noise.check_added_delta(*bad)
    with pytest.raises(InputError, match=r"units is 0\.4"):
        shared_noise.distribution_error(0.4, 3)
    for bad in (math.nan, -1.0, 0.0):
        with pytest.raises(InputError):
            shared_noise.added_delta(bad, 4.0, 3, 10.0)


@pytest.mark.parametrize("mu", [0.5, 2.0, 2.3, 3.0, 4.0, 10.0])
def test_delta_includes_the_distance_of_the_distributions(mu):
    """By the definition, at the largest distance that is let in: (1 + e^E) D = ADDED_DELTA."""

    def hockey_stick(epsilon):
        return ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)

    def price(left):
        return gaussian.gaussian_epsilon(mu, left)

    added = shared_noise.ADDED_DELTA
    for delta, budget in itertools.product((1e-14, 1e-9, 1e-6, 1e-2), (2.0, 8.0, 11.0)):
        found = shared_noise.cover(price, delta, budget, 1e9)
        distance = added / (1 + math.exp(max(budget, shared_noise.COVERED)))
        if found < 1e9:
            paid = hockey_stick(found) + (1 + math.exp(found)) * distance
            assert paid <= delta * (1 + 1e-9), (delta, budget)
            assert found <= price(delta - added) + 0.01, (delta, budget)
        else:
            # There is no room: the distance takes a part of δ that is felt.
            taken = (1 + math.exp(price(delta - added) + 0.02)) * distance
            assert taken > delta / 200, (delta, budget)


def test_no_finite_price_leaves_what_a_share_costs_alone():
    for price in (math.inf, 1e6, math.nan):
        assert shared_noise.cover(lambda _, price=price: price, 1e-5, 8.0, 99.0) == 99.0


@pytest.mark.parametrize("honest", [1, 2, 7, 99])
def test_a_share_alone_has_its_own_noise(honest):
    event = SampledGaussian(0.05, 2.8391)
    own = shared_noise.own_share_event(event, honest)
    assert own.q == event.q
    assert own.sigma**2 * honest == pytest.approx(event.sigma**2, rel=1e-14)
    assert own.sigma * math.sqrt(honest) < event.sigma
    both = {event: 3, SampledGaussian(0.05, 1.0): 2}
    assert sum(shared_noise.all_alone(both, honest).values()) == 5
