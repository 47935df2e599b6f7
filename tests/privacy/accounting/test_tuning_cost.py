"""ε of tuning beside what trying exactly costs: small mechanisms enumerated, Gaussians integrated.

All randomness is seeded: nothing here fails by chance.
"""

import itertools
import math

import numpy as np
import pytest

from fedpact.common.errors import InputError
from fedpact.privacy.accounting import rdp
from fedpact.privacy.accounting.accountant import SampledGaussian, epsilon
from fedpact.privacy.accounting.tuning_cost import (
    best_of,
    count_trials,
    describe_law,
    success,
    winner_epsilon,
)

ORDERS = np.asarray(rdp.ORDERS)


def generating(mean):
    """The function x -> E[x^K], of the law as it is told."""
    gamma = success(mean)
    return lambda x: np.log1p(-(1 - gamma) * x) / math.log(gamma)


def winner(one, mean):
    """The law of the best of K draws from `one`, whose outcomes rise.

    P(best <= y) = E[P(one <= y)^K].
    """
    return np.diff(generating(mean)(np.concatenate([[0.0], np.cumsum(one)])))


def renyi(p, q):
    """Exact RDP at every order, the larger of both directions; of laws without an empty outcome."""
    there = (p > 0) | (q > 0)
    p, q = np.log(p[there]), np.log(q[there])
    found = [
        np.logaddexp.reduce(ORDERS[:, None] * (a - b) + b, axis=1) for a, b in ((p, q), (q, p))
    ]
    return np.maximum(*found) / (ORDERS - 1)


def mechanisms():
    """Pairs of laws on three outcomes: ε from 0.02 to about 5, among them rare outcomes."""
    draw = np.random.default_rng(5)
    for scale in (0.02, 0.2, 1.0, 2.5):
        for thin in (0.0, 4.0):
            for _ in range(6):
                q = np.exp(-thin * np.arange(3)) * draw.uniform(0.2, 1, 3)
                p = q * np.exp(draw.uniform(-scale, scale, 3))
                yield p / p.sum(), q / q.sum()


@pytest.mark.parametrize("mean", [2, 5, 40])
def test_the_best_of_random_tries_costs_no_more_than_stated(mean):
    # Every mechanism with every order of its outcomes, enumerated.
    nearest = 0.0
    for p, q in mechanisms():
        stated = best_of(renyi(p, q), mean)
        for order in itertools.permutations(range(3)):
            exact = renyi(*(winner(each[list(order)], mean) for each in (p, q)))
            assert np.all(exact <= stated * (1 + 1e-9) + 1e-12)
            nearest = max(nearest, float(np.max(exact / stated)))
    # No empty promise: somewhere the winner costs most of what is stated.
    assert nearest > 0.6


@pytest.mark.parametrize(("sigma", "mean"), [(1.0, 3), (12.0, 30)])
def test_a_gaussian_whose_larger_outcomes_win(sigma, mean):
    # δ of the winner at the stated ε, integrated: in both directions.
    from scipy.stats import norm  # pyright: ignore[reportMissingTypeStubs]

    delta = 1e-5
    stated = winner_epsilon([{SampledGaussian(1.0, sigma): 1}], delta, mean)
    edges = np.linspace(-9 * sigma, 9 * sigma + 1, 400_001)
    laws = [winner(np.diff(norm.cdf(edges, at, sigma)), mean) for at in (0.0, 1.0)]

    def delta_at(e):
        return max(
            float(np.maximum(a - np.exp(e) * b, 0).sum()) for a, b in itertools.permutations(laws)
        )

    assert delta_at(stated) <= delta
    # And the best costs more than one run does, which is why it is counted.
    assert delta_at(epsilon({SampledGaussian(1.0, sigma): 1}, delta)) > delta


def test_another_accountant_has_the_same():
    import dp_accounting
    from dp_accounting.dp_event import RepeatAndSelectDpEvent
    from dp_accounting.rdp import RdpAccountant

    gaussian = dp_accounting.GaussianDpEvent(2.8391)
    one = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.05, gaussian), 200
    )
    theirs = RdpAccountant(rdp.ORDERS)
    theirs.compose(RepeatAndSelectDpEvent(one, 30, 0.0))
    ours = winner_epsilon([{SampledGaussian(0.05, 2.8391): 200}], 1e-5, 30)
    assert ours == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.parametrize("mean", [2, 3, 10, 1000])
def test_stated_law_has_the_mean_and_is_the_one_bounded(mean):
    k = np.arange(1, 200 * mean)
    gamma = float(describe_law(mean).rpartition("γ = ")[2])
    assert gamma == success(mean)
    chances = (1 - gamma) ** k / k / -math.log(gamma)
    assert chances.sum() == pytest.approx(1, abs=1e-9)
    assert mean * (1 - 1e-9) <= (k * chances).sum() < mean * (1 + 1e-4)


def test_joint_runs_are_composed_and_the_largest_counts():
    cheap, dear = {SampledGaussian(0.05, 4.0): 100}, {SampledGaussian(0.1, 2.0): 30}
    found = count_trials([cheap, dear, dear], 1e-5)
    assert found.runs == 3
    assert found.every == epsilon(
        {SampledGaussian(0.05, 4.0): 100, SampledGaussian(0.1, 2.0): 60}, 1e-5
    )
    assert found.one == epsilon(dear, 1e-5)
    assert found.winner >= winner_epsilon([dear], 1e-5, 3) > found.one
    twice = count_trials([cheap, dear], 1e-5, times=2)
    assert twice.runs == 4
    assert twice.every == epsilon(
        {SampledGaussian(0.05, 4.0): 200, SampledGaussian(0.1, 2.0): 60}, 1e-5
    )


def test_best_of_fixed_number_is_not_covered_by_random_number():
    # Two answers, ε = 0.5 each way: the best of exactly 40 costs far more than the best of about
    # 40. With a fixed number only the composition holds.
    p, q = (
        np.array([0.999, 0.001]),
        np.array([0.999 + 0.001 * (1 - math.exp(-0.5)), 0.001 * math.exp(-0.5)]),
    )
    fixed = [np.array([each[0] ** 40, 1 - each[0] ** 40]) for each in (p, q)]
    flipped = [np.array([1 - each[0] ** 40, each[0] ** 40]) for each in (p[::-1], q[::-1])]
    assert renyi(*flipped)[-1] > best_of(renyi(p, q), 40)[-1]
    for laws in (fixed, flipped):
        assert np.all(renyi(*laws) <= 40 * renyi(p, q) * (1 + 1e-9))


@pytest.mark.parametrize("mean", [1, 1.99, 0, -3, math.nan, math.inf, 2e9, True])
def test_one_run_is_not_tuned(mean):
    with pytest.raises(InputError, match="runs is"):
        winner_epsilon([{SampledGaussian(0.1, 2.0): 1}], 1e-5, mean)


def test_errors_name_the_fault():
    with pytest.raises(InputError, match="histories"):
        winner_epsilon([], 1e-5, 3)
    with pytest.raises(InputError, match="runs is 1"):
        count_trials([{SampledGaussian(0.1, 2.0): 1}], 1e-5)
