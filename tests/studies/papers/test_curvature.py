"""Estimates of L, λ and σ̄² where they are known: quadratics and logistic regression."""

import math

import numpy as np
import pytest

from fedpact.common.errors import InputError
from fedpact.studies.papers.measure import (
    Spectrum,
    heterogeneity,
    smoothness,
    spectrum,
    weak_convexity,
)
from fedpact.studies.papers.proxvr_search import Losses


@pytest.fixture
def draws() -> np.random.Generator:
    return np.random.default_rng(8)


def symmetric(eigenvalues: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    turn, _ = np.linalg.qr(draws.standard_normal((len(eigenvalues), len(eigenvalues))))
    return turn * eigenvalues @ turn.T


def test_extremes_are_exact_after_dimension_many_iterations(draws):
    for d in (1, 2, 9, 25):
        eigenvalues = np.sort(draws.standard_normal(d) * 10)
        matrix = symmetric(eigenvalues, draws)
        found = spectrum(lambda v, m=matrix: m @ v, d, draws, iterations=d)
        assert found.low == pytest.approx(eigenvalues[0], abs=1e-8)
        assert found.high == pytest.approx(eigenvalues[-1], abs=1e-8)


def test_fewer_iterations_stay_inside_and_within_the_residual(draws):
    eigenvalues = np.sort(draws.exponential(size=300)) - 0.3
    matrix = symmetric(eigenvalues, draws)
    last = -math.inf
    for iterations in (2, 5, 15, 40):
        found = spectrum(lambda v: matrix @ v, 300, np.random.default_rng(1), iterations)
        slack = 1e-9
        assert eigenvalues[0] - slack <= found.low <= found.high <= eigenvalues[-1] + slack
        for end in (found.low, found.high):
            assert np.abs(eigenvalues - end).min() <= found.residual + slack
        assert found.high >= last - slack  # the subspaces of one start are nested
        last = found.high
    assert found.high == pytest.approx(eigenvalues[-1], rel=1e-3)


def test_an_operator_of_small_rank_ends_early(draws):
    found = spectrum(lambda v: 3.0 * v, 50, draws)
    assert (found.low, found.high) == (pytest.approx(3.0), pytest.approx(3.0))
    assert found.residual < 1e-10
    zero = spectrum(lambda v: 0.0 * v, 50, draws)
    assert (zero.low, zero.high, zero.residual) == (0, 0, 0)


def test_smoothness_and_weak_convexity_of_indefinite_quadratics(draws):
    # Records ½ wᵀA_i w; site n's loss has the mean matrix of its records.
    ends = [(-0.5, 2.0), (0.1, 3.0), (-4.0, 1.0), (0.0, 0.5)]
    records = [symmetric(np.linspace(low, high, 12), draws) for low, high in ends]
    sites = [(records[0] + records[1]) / 2, (records[2] + records[3]) / 2]
    single = [spectrum(lambda v, m=m: m @ v, 12, draws) for m in records]
    whole = [spectrum(lambda v, m=m: m @ v, 12, draws) for m in sites]
    smooth, weak = smoothness(single, draws), weak_convexity(whole, draws)
    assert smooth.parts == pytest.approx([2.0, 3.0, 4.0, 0.5])
    assert smooth.value == pytest.approx(4.0)
    assert weak.value == pytest.approx(max(0, *(-np.linalg.eigvalsh(m)[0] for m in sites)))
    assert weak.value <= smooth.value
    Losses(smooth.value, weak.value, 0.0)


def test_a_convex_problem_has_no_weak_convexity(draws):
    estimate = weak_convexity([Spectrum(0.2, 3.0, 0.0), Spectrum(0.0, 1.0, 0.0)], draws)
    assert (estimate.value, estimate.low, estimate.high) == (0, 0, 0)


def test_heterogeneity_by_its_definition(draws):
    gradients, weights = draws.standard_normal((7, 5)) + 1, draws.uniform(1, 4, 7)
    p = weights / weights.sum()
    mean = sum(a * g for a, g in zip(p, gradients, strict=True))
    squares = [np.linalg.norm(g - mean) ** 2 / np.linalg.norm(mean) ** 2 for g in gradients]
    found = heterogeneity(gradients, list(weights), draws)
    assert found.parts == pytest.approx(squares)
    assert found.value == pytest.approx(p @ squares)
    assert found.low <= found.high
    # Neither the scale of the gradients nor that of the weights matters.
    again = heterogeneity(1e3 * gradients, list(7 * weights), draws)
    assert again.value == pytest.approx(found.value)


def test_alike_sites_have_none_and_opposed_ones_have_no_bound(draws):
    alike = heterogeneity(np.ones((4, 3)), [1, 2, 3, 4], draws)
    assert (alike.value, alike.low, alike.high) == pytest.approx((0, 0, 0), abs=1e-30)
    assert heterogeneity(np.zeros((4, 3)), [1] * 4, draws).value == 0
    assert heterogeneity(np.array([[1.0], [-1.0]]), [1, 1], draws).value == math.inf


def test_the_interval_covers_the_law_the_sites_are_drawn_from():
    # Sites' gradients e + N(0, I_d s²): σ̄² → d s² as N grows. 300 federations of 40 sites; a 90 %
    # interval that is a little biased must cover in more than 70 %: error below 1e-9 at 85 %.
    draws, d, s = np.random.default_rng(9), 4, 0.3
    covered = 0
    for _ in range(300):
        gradients = s * draws.standard_normal((40, d))
        gradients[:, 0] += 1
        found = heterogeneity(gradients, [1.0] * 40, draws)
        covered += found.low <= d * s**2 <= found.high
    assert 0.7 * 300 < covered < 300


def test_one_part_has_no_spread(draws):
    estimate = smoothness([Spectrum(-1.0, 5.0, 0.1)], draws)
    assert (estimate.value, estimate.low, estimate.high) == (5, 5, 5)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rng: spectrum(lambda v: v * math.nan, 3, rng),
        lambda rng: spectrum(lambda v: v[:2], 3, rng),
        lambda rng: spectrum(lambda v: v, 0, rng),
        lambda rng: spectrum(lambda v: v, 3, rng, iterations=0),
        lambda rng: smoothness([], rng),
        lambda rng: heterogeneity(np.zeros((0, 3)), [], rng),
        lambda rng: heterogeneity(np.full((2, 3), math.nan), [1, 1], rng),
        lambda rng: heterogeneity(np.zeros((2, 3)), [1], rng),
        lambda rng: heterogeneity(np.zeros((2, 3)), [1, 0], rng),
    ],
)
def test_invalid_input_is_refused(wrong, draws):
    with pytest.raises(InputError):
        wrong(draws)
