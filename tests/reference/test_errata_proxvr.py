"""docs/notes/errata.md, V1 to V5: FedProxVR (ICPP 2020), against what holds."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq


def sarah_most(beta):
    """The upper bound of (13)."""
    return (5 * beta**2 - 4 * beta) / 8


def least_a(tau):
    """The least a > 0 with a - 4 >= 4 sqrt(a (τ + 1)): a quadratic inequality in sqrt(a)."""
    return 4 * (math.sqrt(tau + 1) + math.sqrt(tau + 2)) ** 2


def svrg_allows(tau, beta):
    """The upper bound of (14) at the best a, which is the least."""
    return tau <= sarah_most(beta) / least_a(tau) - 2


def svrg_most(beta):
    allowed = [tau for tau in range(math.ceil(beta) + 5) if svrg_allows(tau, beta)]
    return max(allowed, default=None)


@pytest.mark.parametrize("tau", [0, 1, 17, 1000])
def test_v1_the_condition_on_a_is_solved(tau):
    a = least_a(tau)
    assert a - 4 == pytest.approx(4 * math.sqrt(a * (tau + 1)))
    assert 0.999 * a - 4 < 4 * math.sqrt(0.999 * a * (tau + 1))


def test_v1_svrg_upper_bound_grows_like_beta():
    betas = (5, 10, 20, 50, 100, 200)
    assert [svrg_most(beta) for beta in betas] == [None, 0, 2, 8, 17, 37]
    assert [math.floor(sarah_most(beta)) for beta in betas] == [13, 57, 240, 1537, 6200, 24900]
    # a >= 16 τ, so τ <= 5β²/(8·16 τ): τ < β sqrt(5/128).
    slopes = [svrg_most(beta) / beta for beta in (100, 1000, 4000)]  # type: ignore[operator]
    assert slopes == sorted(slopes)
    assert slopes[-1] < math.sqrt(5 / 128) < 1.02 * slopes[-1]


def least_tau(beta, theta, mu, smooth, weak):
    """The lower bound of (13) and (14)."""
    excess = mu - weak
    return 3 * (beta**2 * smooth**2 + mu**2) / (theta**2 * excess * smooth * (beta - 3))


def test_v1_no_step_size_satisfies_14_for_small_penalties():
    # Remark 1 (1): for any θ in (0, 1) a large β satisfies (13) and (14). For SVRG the lower bound
    # is at least 3βL/(θ² μ~), and the upper one is below 0.198 β: with θ < 1 and μ~ <= 15 L never.
    smooth, weak = 1.0, 0.5
    for beta in np.geomspace(3.01, 1e6, 400):
        for excess in (0.1, 1.0, 5.0, 15.0):
            needed = least_tau(beta, 1.0, excess + weak, smooth, weak)
            assert needed > beta * math.sqrt(5 / 128)
    # SARAH's part of the remark is right.
    assert least_tau(1e4, 0.5, 1.0, smooth, weak) < sarah_most(1e4)


def test_v2_the_experiments_are_outside_the_bounds():
    assert not svrg_allows(20, 10)  # Tables 1 and 2, SVRG
    assert not svrg_allows(1, 10)
    assert sarah_most(5) < 20  # Table 1, SARAH: at most 13
    assert sarah_most(9) > 20  # Table 2, SARAH, is inside


def test_v3_a_larger_penalty_can_need_fewer_iterations():
    # Remark 1 (4) says that a larger μ needs more. (β²L² + μ²)/(μ - λ) falls up to
    # μ = λ + sqrt(λ² + β²L²).
    smooth, weak, beta, theta = 1.0, 0.5, 10.0, 0.5
    turn = weak + math.sqrt(weak**2 + (beta * smooth) ** 2)
    grid = np.linspace(0.6, 40, 4000)
    least = min(grid, key=lambda mu: least_tau(beta, theta, mu, smooth, weak))
    assert least == pytest.approx(turn, abs=0.02)
    assert least_tau(beta, theta, 0.6, smooth, weak) > 30 * least_tau(
        beta, theta, 5.0, smooth, weak
    )


def test_v4_crossing_bounds_is_not_the_fewest_iterations():
    smooth, weak, mu, theta = 1.0, 0.5, 22.35, 0.1802
    beta = brentq(lambda b: least_tau(b, theta, mu, smooth, weak) - sarah_most(b), 4, 60)  # (15)
    assert (beta, sarah_most(beta)) == (
        pytest.approx(19.4, abs=0.02),
        pytest.approx(225.8, abs=0.1),
    )
    larger = 3 + math.sqrt(9 + (mu / smooth) ** 2)
    fewer = least_tau(larger, theta, mu, smooth, weak)
    assert fewer == pytest.approx(216.1, abs=0.1)
    assert fewer < 225 < 395 < sarah_most(larger)


def time_per_gain(mu, beta, tau, gamma):
    """(20) at L = 1, λ = 0.5, σ̄² = 1, with the least θ that (13) allows; inf where Θ <= 0."""
    theta2, excess = least_tau(beta, 1.0, mu, 1.0, 0.5) / tau, mu - 0.5
    lost = math.sqrt(4 * theta2) + 2 / excess * math.sqrt((1 + theta2) * 2)
    lost += 2 * mu / excess**2 * (1 + theta2) * 2
    return (1 + gamma * tau) * mu / (1 - lost) if lost < 1 else math.inf


@pytest.mark.parametrize(("gamma", "equal", "free"), [(0.01, 231.3, 220.2), (1.0, 15_516, 12_790)])
def test_v4_the_equalities_cost_training_time(gamma, equal, free):
    grid = [(mu, beta) for mu in np.linspace(15, 40, 126) for beta in np.linspace(12, 40, 141)]
    least = min(time_per_gain(mu, beta, sarah_most(beta), gamma) for mu, beta in grid)
    assert least == pytest.approx(equal, rel=1e-3)
    # A whole τ below its upper bound, at the β of the least θ: (13) holds.
    better = min(
        time_per_gain(mu, beta, tau, gamma)
        for tau in range(90, 200)
        for mu in np.linspace(22, 36, 57)
        if tau <= sarah_most(beta := 3 + math.sqrt(9 + mu**2))
    )
    assert better == pytest.approx(free, rel=1e-3)
    assert better < 0.96 * least


def test_v5_different_optima_have_infinite_divergence():
    # F_n = (w -+ 1)²/2, p = 1/2: ∇F_n - ∇F = -+1, ∇F = w.
    for w in (1.0, 1e-3, 1e-9):
        gradients = np.array([w - 1, w + 1])
        ratios = np.abs(gradients - gradients.mean()) / abs(gradients.mean())
        assert ratios == pytest.approx([1 / w] * 2, rel=1e-6)
