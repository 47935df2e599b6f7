"""ε of a person's records together: beside dp-accounting, integrals, and vectors in the plane."""

import itertools
import math
import random

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import integrate, stats

from fedpact.common.errors import InputError
from fedpact.privacy.accounting import gaussian, group_privacy
from fedpact.privacy.accounting.accountant import SampledGaussian, epsilon
from fedpact.privacy.accounting.group_privacy import epsilon_per_person


def library(q, sigma, steps, delta, k, interval):
    """ε by dp-accounting's mixture of Gaussians, from above; its answer falls with the interval."""
    one = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        sigma,
        list(range(k + 1)),
        list(stats.binom.pmf(range(k + 1), k, q)),
        value_discretization_interval=interval,
    )
    return one.self_compose(steps).get_epsilon_for_delta(delta)


def drawn(draw):
    k = draw.choice([2, 3, 5, 10])
    q, sigma = 10 ** draw.uniform(-3, -0.3), 10 ** draw.uniform(-0.1, 1.2)
    return q, sigma, round(10 ** draw.uniform(0, 3.3)), 10 ** draw.uniform(-8, -3), k


def test_it_agrees_with_another_library_on_the_published_case():
    found = epsilon_per_person({SampledGaussian(0.05, 2.8391): 200}, 1e-5, 5)
    reference = library(0.05, 2.8391, 200, 1e-5, 5, 1e-2)
    assert 0.995 * reference <= found <= 1.001 * reference


def test_no_epsilon_is_too_large_for_the_grid():
    """e^709 is the largest power that floats hold."""
    q, sigma, steps, delta, k = 0.35, 0.87, 45, 1e-8, 10
    found = epsilon_per_person({SampledGaussian(q, sigma): steps}, delta, k)
    assert found > 709
    assert found == pytest.approx(library(q, sigma, steps, delta, k, 0.2), rel=5e-3)


@pytest.mark.slow
def test_50_random_settings_are_upper_bounds_within_1_percent():
    """The library's grid errs to the safe side, and half the interval takes off half of that.

    By how much its answer falls so is then at least what it still is too large by: its own error.
    """
    draw = random.Random(11)
    for _ in range(50):
        q, sigma, steps, delta, k = setting = drawn(draw)
        found = epsilon_per_person({SampledGaussian(q, sigma): steps}, delta, k)
        interval = max(1e-4, found / math.sqrt(steps) / 300)
        coarse, fine = (library(*setting, interval=i) for i in (2 * interval, interval))
        least = fine - (coarse - fine)
        assert 0 < least <= fine, setting
        assert least <= found <= 1.01 * least, setting


def exact_delta(q, sigma, k, e):
    """δ(ε) of one release by integrals over the outcome, the larger one of both orders."""
    weights = stats.binom.pmf(range(k + 1), k, q)

    def density(x, mean):
        return math.exp(-(((x - mean) / sigma) ** 2) / 2) / sigma / math.sqrt(2 * math.pi)

    def with_it(x):
        return sum(b * density(x, i) for i, b in enumerate(weights))

    def excess(p, r):
        def f(x):
            return max(0.0, p(x) - math.exp(e) * r(x))

        ends = (-12 * sigma, k + 12 * sigma)
        points = np.linspace(*ends, 25)
        return sum(integrate.quad(f, a, b)[0] for a, b in itertools.pairwise(points))

    def without(x):
        return density(x, 0)

    return max(excess(with_it, without), excess(without, with_it))


@pytest.mark.parametrize(
    ("q", "sigma", "k", "delta"),
    [(0.1, 1.0, 3, 1e-3), (0.5, 4.0, 2, 1e-2)],
)
def test_one_release_costs_what_its_integrals_say(q, sigma, k, delta):
    found = epsilon_per_person({SampledGaussian(q, sigma): 1}, delta, k)
    assert exact_delta(q, sigma, k, found) <= delta
    assert exact_delta(q, sigma, k, 0.99 * found) > delta


def plane_delta(q, sigma, first, second, e):
    """δ(ε) of one release in the plane where a person's two records add these vectors."""
    x = np.linspace(-14 * sigma, 14 * sigma + 2, 400)
    grid = np.stack(np.meshgrid(x, x), -1)
    moved = [((1 - q) ** 2, np.zeros(2)), (q * (1 - q), first), (q * (1 - q), second)]
    moved.append((q * q, first + second))

    def density(mean):
        return np.exp(-((grid - mean) ** 2).sum(-1) / (2 * sigma**2)) / (2 * np.pi * sigma**2)

    p, r = sum(b * density(v) for b, v in moved), density(np.zeros(2))
    cell = (x[1] - x[0]) ** 2
    both = ((p, r), (r, p))
    return max(float(np.maximum(a - math.exp(e) * b, 0).sum() * cell) for a, b in both)


@pytest.mark.parametrize("angle", [0.7, 3.1])
def test_misaligned_records_are_no_easier_to_distinguish(angle):
    q, sigma, delta = 0.2, 1.0, 1e-2
    found = epsilon_per_person({SampledGaussian(q, sigma): 1}, delta, 2)
    first, second = np.array([1.0, 0.0]), np.array([math.cos(angle), math.sin(angle)])
    assert plane_delta(q, sigma, first, second, found) <= 1.001 * delta
    # Of two that point the same way the bound is no more than it has to be; longer ones break it.
    tight = plane_delta(q, sigma, first, first, 0.98 * found)
    assert tight > delta
    assert plane_delta(q, sigma, 1.5 * first, 1.5 * first, found) > delta


def test_without_sampling_all_records_are_one_gaussian():
    history = {SampledGaussian(1.0, 10.0): 4, SampledGaussian(1.0, 30.0): 1}
    mu = 3 * math.sqrt(4 / 100 + 1 / 900)
    assert epsilon_per_person(history, 1e-5, 3) == pytest.approx(
        gaussian.gaussian_epsilon(mu, 1e-5)
    )


def test_one_record_is_a_record_and_more_cost_more():
    history = {SampledGaussian(0.05, 2.0): 100, SampledGaussian(1.0, 50.0): 1}
    each = [epsilon_per_person(history, 1e-6, k) for k in (1, 2, 3, 7, 40)]
    assert each[0] == epsilon(history, 1e-6)
    assert each == sorted(each)
    assert epsilon_per_person({}, 1e-6, 5) == 0


@pytest.mark.parametrize(
    ("q", "sigma", "steps"),
    [
        (1e-6, 1.0, 10**8),
        (0.1, 1e70, 10),
        (1e-300, 1.0, 9),
        pytest.param(0.9, 1e-3, 5, marks=pytest.mark.slow),
    ],
)
def test_the_bound_holds_if_no_grid_is_fine_enough(q, sigma, steps):
    history, delta, k = {SampledGaussian(q, sigma): steps}, 1e-6, 5
    at_once = {SampledGaussian(-math.expm1(k * math.log1p(-q)), sigma / k): steps}
    found = epsilon_per_person(history, delta, k)
    assert epsilon(history, delta) <= found <= 1.0001 * epsilon(at_once, delta)


@pytest.mark.parametrize("k", [0, -1, 1001])
def test_another_number_of_records_is_refused(k):
    with pytest.raises(InputError, match="records"):
        epsilon_per_person({SampledGaussian(0.1, 1.0): 1}, 1e-5, k)


# Losses with heavy tails: the order that a crude bound likes best gave up to 12 times as much.
HEAVY = [
    (3e-4, 0.7, 10_000, 1e-8),
    (1e-4, 0.5, 1000, 1e-8),
    (1e-4, 0.55, 100, 1e-5),
    (1e-3, 0.5, 10, 1e-5),
]


@pytest.mark.parametrize(
    "case", [*HEAVY[3:], *(pytest.param(one, marks=pytest.mark.slow) for one in HEAVY[:3])]
)
def test_one_record_costs_no_more_by_integral_than_by_grid(case):
    """Two proven bounds of one number, of which one integrates and one composes on a grid."""
    q, sigma, count, delta = case
    history = {SampledGaussian(q, sigma): count}
    found = epsilon(history, delta, "pld")
    grid = group_privacy._epsilon(((q, sigma, count),), delta, 1)
    assert 0.99 * grid < found < 1.05 * grid
    assert found <= epsilon_per_person(history, delta, 2)
