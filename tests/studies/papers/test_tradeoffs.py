"""LDP FedSGD's trade-offs: identities, and where the paper's (12) fails; see cli/test_account."""

import math

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm

from fedpact.report.tradeoffs import (
    Problem,
    bits_on_the_wire,
    entropy_bound,
    find_point,
    rate_bound,
    utility_bound,
)

PROBLEM = Problem()


def gaussian_entropy(dimension, deviation):
    return dimension / 2 * math.log(2 * math.pi * math.e * deviation**2)


@pytest.fixture(autouse=True)
def _unproven(monkeypatch):
    """What is proven for a point's σ takes most of the time, and is tested with the command."""
    monkeypatch.setattr("fedpact.report.tradeoffs.epsilon_of", lambda *_: 0.0)


def test_points_outside_a_bounds_conditions_say_so():
    assert find_point(PROBLEM, "MA", 2.0, 700_000).notes == ()
    assert any("σ >= 1" in note for note in find_point(PROBLEM, "proposed", 4.0, 70_000).notes)
    none = find_point(Problem(delta=1e-2), "proposed", 0.05, 70_000)
    assert none.sigma is None
    assert "not positive" in none.notes[0]


def test_an_exact_point_follows_from_its_sigma():
    point = find_point(PROBLEM, "rdp", 2.0, 70_000)
    variance = point.sigma**2 / PROBLEM.clients
    assert point.utility == utility_bound(PROBLEM, variance, 70_000)
    assert point.rate == rate_bound(10_000, point.sigma, 1.0)


def test_utility_is_capped_and_falls_with_noise():
    # λ²T/(μG²) = 2800 at T = 7e4; half of it where dσ² <= 1.
    assert utility_bound(PROBLEM, 0.0, 70_000) == pytest.approx(1400)
    assert utility_bound(PROBLEM, 1e-4, 70_000) == pytest.approx(1400)
    assert utility_bound(PROBLEM, 3e-4, 70_000) == pytest.approx(700)


def test_the_ceiling_of_the_noise_bounds_limits_utility():
    # σ² < 1/(16q)² = 3906 at each of 100 clients.
    for steps, limit in ((70_000, 0.0072), (700_000, 0.0717)):
        assert utility_bound(PROBLEM, 3906.25 / 100, steps) == pytest.approx(limit, abs=5e-5)


@pytest.mark.parametrize("sigma", [0.01, 1.0, 30.0])
def test_valid_rate_bound_is_gaussian_entropy_at_variance(sigma):
    total = math.sqrt(4 * (sigma**2 + 1 / 500))
    assert rate_bound(500, sigma, 2.0) == pytest.approx(gaussian_entropy(500, total))
    # Never below the noise's own entropy, which the paper's (12) violates at its own numbers.
    assert rate_bound(10_000, sigma, 1.0) >= gaussian_entropy(10_000, sigma)


def test_entropy_bound_is_attained_by_gaussians_only():
    # X of deviations (a, b), noise v: the sum's entropy in closed form. Equality where a = b.
    for a, b in ((1.0, 1.0), (2.0, 0.1), (0.0, 3.0)):
        exact = multivariate_normal(cov=np.diag([a * a + 0.5, b * b + 0.5])).entropy()
        bound = entropy_bound(2, a * a + b * b, 0.5)
        assert bound == pytest.approx(exact) if a == b else bound > exact


def test_fine_step_bits_are_the_rounded_numbers_entropy():
    # A Gaussian in steps of a hundredth of its deviation, its cells' probabilities added up.
    edges = np.arange(-700.5, 701.5) / 100
    cells = np.diff(norm.cdf(edges))
    entropy = -np.sum(cells * np.log2(cells))
    assert bits_on_the_wire(entropy_bound(1, 1.0, 0.0), 1, 0.01) == pytest.approx(entropy, abs=1e-4)


def test_bits_on_the_wire():
    # A uniform density on [0, 1) has entropy 0 nats; in steps of 2^-8 it takes 8 bits a number.
    assert bits_on_the_wire(0.0, 3, 2**-8) == pytest.approx(24)
