"""FedProxVR's conditions and its minimiser: identities, mpmath, brute force on grids."""

import math
import random

import mpmath as mp
import numpy as np
import pytest

from fedpact.common.errors import InputError
from fedpact.studies.papers.fedproxvr import (
    Losses,
    decrease,
    least_a,
    least_beta,
    local_accuracy,
    minimise,
    most_tau,
)

SPEC = Losses(smoothness=1.0, weak_convexity=0.5, heterogeneity=1.0)


def drawn(rng):
    smooth = 10 ** rng.uniform(-2, 2)
    return Losses(smooth, rng.choice([0, rng.random(), 1]) * smooth, 10 ** rng.uniform(-2, 1.5))


def objective(losses, gamma, mu, beta, tau):
    """(20), inf where Θ <= 0."""
    per_round = decrease(losses, mu, local_accuracy(losses, mu, beta, tau))
    return (1 + gamma * tau) / per_round if per_round > 0 else math.inf


# ---------------------------------------------------------------- Lemma 1 and Theorem 1


def test_sarahs_bounds_in_their_printed_form():
    smooth, weak, mu, beta, theta = 2.0, 0.5, 3.0, 9.0, 0.7
    printed = 3 * (beta**2 * smooth**2 + mu**2) / (theta**2 * (mu - weak) * smooth * (beta - 3))
    assert local_accuracy(Losses(smooth, weak, 0.0), mu, beta, printed) == pytest.approx(theta)
    assert [most_tau(beta) for beta in (5, 10, 20)] == [
        (5 * beta**2 - 4 * beta) // 8 for beta in (5, 10, 20)
    ]


def test_svrgs_bound_is_the_largest_tau_that_some_a_allows():
    # By definition: a > 0 with a - 4 >= 4 sqrt(a (τ+1)) and τ <= (5β² - 4β)/(8a) - 2, over a grid
    # of a that holds the least one to 1e-3 and no smaller one.
    for beta in (5.0, 9.5, 10.0, 31.0, 200.0):
        allowed = []
        for tau in range(60):
            grid = np.geomspace(1, 1e6, 20_000)
            fits = grid - 4 >= 4 * np.sqrt(grid * (tau + 1))
            if np.any(fits & (tau <= (5 * beta**2 - 4 * beta) / (8 * grid) - 2)):
                allowed.append(tau)
        assert most_tau(beta, "svrg") == max(allowed, default=None)


@pytest.mark.parametrize("tau", [0, 1, 17, 1000])
def test_the_least_a_meets_its_condition_with_equality(tau):
    a = least_a(tau)
    assert a - 4 == pytest.approx(4 * math.sqrt(a * (tau + 1)))


@pytest.mark.parametrize("solver", ["sarah", "svrg"])
def test_the_least_beta_inverts_the_upper_bound(solver):
    for tau in (5, 6, 40, 313, 2000):
        beta = least_beta(tau, solver)
        assert most_tau(beta * (1 + 1e-12), solver) == tau
        assert most_tau(beta * (1 - 1e-9), solver) == tau - 1


def test_theta_of_theorem_1_in_its_printed_form_and_digits():
    rng = random.Random(3)
    for _ in range(50):
        losses = drawn(rng)
        mu = losses.weak_convexity + losses.smoothness * 10 ** rng.uniform(0, 3)
        theta = rng.uniform(0, 1)
        with mp.workdps(40):
            L, lam, s2, m, t = map(
                mp.mpf, (losses.smoothness, losses.weak_convexity, losses.heterogeneity, mu, theta)
            )
            excess, inexact = m - lam, (1 + t**2) * (1 + s2)
            printed = 1 - t * mp.sqrt(2 * (1 + s2)) - 2 * L / excess * mp.sqrt(inexact)
            printed = (printed - 2 * L * m / excess**2 * inexact) / m
            size = (1 + abs(printed) * m) / m
        assert abs(decrease(losses, mu, theta) - float(printed)) <= 1e-13 * float(size)


def test_theta_has_its_limits():
    # Exact local solutions, no heterogeneity, no weak convexity, and μ → ∞: Θ → 1/μ.
    assert 1e9 * decrease(Losses(1.0, 0.0, 0.0), 1e9, 0.0) == pytest.approx(1, abs=1e-8)
    # θ² (2(1 + σ̄²)) >= 1 leaves nothing at any μ: Remark 2 (1).
    for mu in (2.0, 30.0, 1e6):
        assert decrease(SPEC, mu, 0.5) < 0


# ---------------------------------------------------------------- the optimum


@pytest.mark.parametrize(
    "how",
    [{}, {"solver": "svrg", "tight": False, "whole": False}],
    ids=str,
)
def test_no_sample_is_better_than_the_optimum(how):
    rng = random.Random(4)
    solver = how.get("solver", "sarah")
    for _ in range(3):
        losses, gamma = drawn(rng), 10 ** rng.uniform(-5, 1)
        best = minimise(losses, gamma, **how)
        assert best.objective == objective(losses, gamma, best.mu, best.beta, best.tau)
        assert best.theta == local_accuracy(losses, best.mu, best.beta, best.tau)
        assert best.decrease == decrease(losses, best.mu, best.theta) > 0
        # Lemma 1 holds for it, with equality if τ was to be at its bound.
        least = least_beta(best.tau, solver)
        assert best.beta >= least * (1 - 1e-12)
        if how.get("tight", True):
            assert best.beta == pytest.approx(least, rel=1e-12)
        # Near the optimum and far from it.
        for spread in (1e-3, 0.1, 2.0):
            for _ in range(300):
                tau = best.tau * math.exp(rng.gauss(0, spread))
                tau = max(5, round(tau)) if how.get("whole", True) else max(4.2, tau)
                mu = losses.weak_convexity + (best.mu - losses.weak_convexity) * math.exp(
                    rng.gauss(0, spread)
                )
                beta = least_beta(tau, solver)
                if not how.get("tight", True):
                    beta *= 1 + abs(rng.gauss(0, spread))
                assert objective(losses, gamma, mu, beta, tau) >= best.objective * (1 - 1e-9)


def test_brute_force_over_a_grid_of_the_papers_23():
    # f(μ, β) with θ² = 24(β²L² + μ²)/(μ~L(5β² - 4β)(β - 3)), by numpy, apart from this code.
    for losses, gamma in ((SPEC, 0.01), (SPEC, 1e-4), (Losses(3.0, 0.3, 0.2), 0.5)):
        best = minimise(losses, gamma, whole=False)
        mu, beta = np.meshgrid(np.geomspace(5, 500, 750), np.geomspace(5, 200, 750))
        L, lam, s = losses.smoothness, losses.weak_convexity, 1 + losses.heterogeneity
        level, excess = 5 * beta**2 - 4 * beta, mu - lam
        theta2 = 24 * (beta**2 * L**2 + mu**2) / (excess * L * level * (beta - 3))
        theta = 1 - np.sqrt(theta2 * 2 * s) - 2 * L / excess * np.sqrt((1 + theta2) * s)
        theta = (theta - 2 * L * mu / excess**2 * (1 + theta2) * s) / mu
        with np.errstate(divide="ignore"):
            value = np.where(theta > 0, (1 + gamma * level / 8) / theta, np.inf)
        at = np.unravel_index(value.argmin(), value.shape)
        # The grid's steps are 0.62 % in μ and 0.5 % in β; the minimum is flat.
        assert best.objective * (1 - 1e-9) <= value[at] <= best.objective * (1 + 1e-4)
        assert best.mu == pytest.approx(mu[at], rel=0.01)
        assert best.beta == pytest.approx(beta[at], rel=0.01)


@pytest.mark.parametrize("unit", [7.0, 1e-200])
def test_a_change_of_units_scales_mu_and_the_objective(unit):
    scaled = minimise(Losses(unit, 0.5 * unit, 1.0), 0.01)
    plain = minimise(SPEC, 0.01)
    assert (scaled.tau, scaled.beta) == (plain.tau, pytest.approx(plain.beta))
    assert scaled.mu == pytest.approx(unit * plain.mu, rel=1e-6)
    assert scaled.objective == pytest.approx(unit * plain.objective)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Losses(1.0, 1.1, 1.0),
        lambda: Losses(1.0, 0.5, math.nan),
        lambda: minimise(SPEC, 0.0),
        lambda: minimise(SPEC, math.inf),
        lambda: minimise(SPEC, 0.01, "sgd"),  # type: ignore[arg-type]
        lambda: minimise(Losses(1.0, 0.5, 1e300), 0.01),
    ],
)
def test_invalid_input_is_refused(wrong):
    with pytest.raises(InputError):
        wrong()
