"""Weights of least noise: the solution of the stated problem, by other means."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpact.privacy.accounting.planner import least_noise, multiplier

SITES = st.lists(st.tuples(st.floats(0.1, 1e3), st.floats(0.0, 1e4)), min_size=1, max_size=8)


def solved(sizes, variances, penalty):
    """Minimise Σ ω² v + κ Σ (ω - p)² with Σ ω = 1: its conditions as one linear system."""
    k = len(sizes)
    p = np.array(sizes) / sum(sizes)
    system = np.zeros((k + 1, k + 1))
    system[:k, :k] = np.diag(np.array(variances) + penalty)
    system[:k, k], system[k, :k] = -1.0, 1.0
    solution = np.linalg.solve(system, np.append(penalty * p, 1.0))
    return solution[:k], solution[k]


@given(sites=SITES, penalty=st.floats(1e-3, 1e4))
@settings(deadline=None, max_examples=60)
def test_the_weights_solve_the_problem(sites, penalty):
    sizes, variances = zip(*sites, strict=True)
    weights = least_noise(sizes, variances, penalty)
    expected, nu = solved(sizes, variances, penalty)
    np.testing.assert_allclose(weights, expected, rtol=1e-6, atol=1e-9)
    assert multiplier(sizes, variances, penalty) == pytest.approx(nu, rel=1e-6, abs=1e-6)
    assert math.fsum(weights) == pytest.approx(1, rel=1e-12)
    assert min(weights) > 0


def test_the_two_ends():
    sizes, variances = [10.0, 30.0, 60.0], [4.0, 1.0, 0.5]
    np.testing.assert_allclose(least_noise(sizes, variances, 1e9), [0.1, 0.3, 0.6], rtol=1e-7)
    # 1/v, normalised.
    np.testing.assert_allclose(
        least_noise(sizes, variances, 1e-9), np.array([0.25, 1, 2]) / 3.25, rtol=1e-7
    )
    assert least_noise(sizes, [0.0] * 3, 1e-6) == pytest.approx([0.1, 0.3, 0.6], rel=1e-15)


def test_less_noise_costs_bias_and_more_bias_buys_less_noise():
    sizes, variances = [10.0, 30.0, 60.0], [4.0, 1.0, 0.5]
    p, points = np.array(sizes) / 100, []
    for penalty in (1e-3, 1e-1, 1.0, 10.0, 1e3):
        w = np.array(least_noise(sizes, variances, penalty))
        points.append((float(w**2 @ variances), float(((w - p) ** 2).sum())))
    noises, biases = zip(*points, strict=True)
    assert list(noises) == sorted(noises)
    assert list(biases) == sorted(biases, reverse=True)
    assert noises[-1] < float(p**2 @ variances)
