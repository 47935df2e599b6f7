"""Estimates of L, λ and σ̄² where they are known: quadratics and logistic regression."""

import math

import numpy as np
import pytest

from fedpact.common.errors import InputError
from fedpact.studies.papers.measure import heterogeneity, spectrum


@pytest.fixture
def draws():
    return np.random.default_rng(8)


def symmetric(eigenvalues, draws):
    turn, _ = np.linalg.qr(draws.standard_normal((len(eigenvalues), len(eigenvalues))))
    return turn * eigenvalues @ turn.T


def test_extremes_are_exact_after_dimension_many_iterations(draws):
    for d in (1, 2, 9, 25):
        eigenvalues = np.sort(draws.standard_normal(d) * 10)
        matrix = symmetric(eigenvalues, draws)
        low, high = spectrum(lambda v, m=matrix: m @ v, d, draws, iterations=d)
        assert low == pytest.approx(eigenvalues[0], abs=1e-8)
        assert high == pytest.approx(eigenvalues[-1], abs=1e-8)


def test_fewer_iterations_stay_inside(draws):
    eigenvalues = np.sort(draws.exponential(size=300)) - 0.3
    matrix = symmetric(eigenvalues, draws)
    last, slack = -math.inf, 1e-9
    for iterations in (2, 5, 15, 40):
        low, high = spectrum(lambda v: matrix @ v, 300, np.random.default_rng(1), iterations)
        assert eigenvalues[0] - slack <= low <= high <= eigenvalues[-1] + slack
        assert high >= last - slack  # the subspaces of one start are nested
        last = high
    assert last == pytest.approx(eigenvalues[-1], rel=1e-3)


def test_an_operator_of_small_rank_ends_early(draws):
    assert spectrum(lambda v: 3.0 * v, 50, draws) == pytest.approx((3.0, 3.0))
    assert spectrum(lambda v: 0.0 * v, 50, draws) == (0, 0)


def test_heterogeneity_by_its_definition(draws):
    gradients, weights = draws.standard_normal((7, 5)) + 1, draws.uniform(1, 4, 7)
    p = weights / weights.sum()
    mean = sum(a * g for a, g in zip(p, gradients, strict=True))
    squares = [np.linalg.norm(g - mean) ** 2 / np.linalg.norm(mean) ** 2 for g in gradients]
    found = heterogeneity(gradients, list(weights))
    assert found == pytest.approx(p @ squares)
    # Neither the scale of the gradients nor that of the weights matters.
    assert heterogeneity(1e3 * gradients, list(7 * weights)) == pytest.approx(found)


def test_alike_sites_have_none_and_opposed_ones_have_no_bound():
    assert heterogeneity(np.ones((4, 3)), [1, 2, 3, 4]) == pytest.approx(0, abs=1e-30)
    assert heterogeneity(np.zeros((4, 3)), [1] * 4) == 0
    assert heterogeneity(np.array([[1.0], [-1.0]]), [1, 1]) == math.inf


def test_a_curvature_that_is_not_finite_is_refused(draws):
    with pytest.raises(InputError, match="--L"):
        spectrum(lambda v: v * math.nan, 3, draws)
