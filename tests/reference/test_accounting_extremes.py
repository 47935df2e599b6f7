"""Millions of releases at tiny rates, against plain integrals and limits; extremes."""

import itertools
import math
import warnings

import mpmath as mp
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import ndtr
from tests.recounted import gaussian_delta

from fedpact.privacy.accounting import gaussian, pld
from fedpact.privacy.accounting.accountant import (
    Budget,
    SampledGaussian,
    epsilon,
    max_steps,
)
from fedpact.privacy.accounting.calibration import smallest_sigma


def quadrature(terms, c, spread):
    """Return δ as a function of ε, the larger of both directions.

    By the transform of the composed loss (Alghamdi et al., arXiv 2208.09595), with the rules of
    Gauss and Legendre in z and equal steps in u. Beyond z = 9 lie 1e-11 of 1e8 releases. c: any
    order; spread: of the composed loss.
    """
    x, w = np.polynomial.legendre.leggauss(24)
    cuts = np.linspace(-9, 9, 145)
    half = (cuts[1] - cuts[0]) / 2
    z = (cuts[:-1, None] + half * (1 + x)).ravel()
    w = np.tile(half * w, 144) * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    step = 2 * math.pi / (30 * spread)
    s = c + 1j * step * np.arange(math.ceil(9 / spread / step))
    weights = np.full(len(s), step / math.pi)
    weights[0] /= 2
    both = []
    for sign in (1, -1):
        total = np.zeros(len(s), dtype=complex)
        for q, sigma, count in terms:
            loss = np.log1p(q * np.expm1(z / sigma - 0.5 / sigma**2))
            power = s + 1 if sign == 1 else -s
            change = np.array([w @ np.expm1(p * loss) for p in power])
            a, b = change.real, change.imag
            total += count * (0.5 * np.log1p(2 * a + a**2 + b**2) + 1j * np.arctan2(b, 1 + a))
        both.append(total)

    def delta(e):
        return max(float((weights * np.exp(k - s * e) / (s * (s + 1))).real.sum()) for k in both)

    return delta


@pytest.mark.parametrize(
    ("terms", "delta"),
    [
        ([(1e-6, 1.0, 10**7)], 1e-5),
        ([(1e-6, 1.0, 10**7), (2e-6, 2.0, 10**6), (1e-5, 3.0, 300)], 1e-6),
    ],
    ids=str,
)
def test_tiny_rates_are_one_percent_above_the_integral_at_most(terms, delta):
    spread = math.sqrt(sum(t * q * q * math.expm1(s**-2) for q, s, t in terms))
    exact = quadrature(terms, 3 / spread, spread)
    found = epsilon({SampledGaussian(q, s): t for q, s, t in terms}, delta)
    assert exact(found) <= delta
    assert exact(found / 1.01) > delta


def delta_of_few(terms, e):
    """δ(ε) of one or two releases: the closed form of one, integrated over the other's outcomes."""

    def one(q, sigma, e, removed):
        # The losses above e, in P and Q; all where e is below what a loss can be.
        e = np.asarray(e if removed else -e, dtype=float)
        grown = (np.exp(e) - (1 - q)) / q
        x = sigma * np.log(np.maximum(grown, 1e-300)) + 0.5 / sigma
        with_it = (1 - q) * ndtr(-x) + q * ndtr(1 / sigma - x), ndtr(-x)
        without = ndtr(x), (1 - q) * ndtr(x) + q * ndtr(x - 1 / sigma)
        p, r = with_it if removed else without
        found = p - np.exp(e if removed else -e) * r
        return np.where(grown > 0, found, -np.expm1(e) if removed else 0.0)

    nodes, weights = np.polynomial.legendre.leggauss(64)
    cuts = np.linspace(-9, 9, 73)
    half = (cuts[1] - cuts[0]) / 2
    z = (cuts[:-1, None] + half * (1 + nodes)).ravel()
    density = np.tile(half * weights, 72) * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    found = []
    for removed in (True, False):
        if len(terms) == 1:
            found.append(float(one(*terms[0], e, removed)))
            continue
        (q, sigma), other = terms
        total = 0.0
        for share, shift in ((1 - q, 0.0), (q, 1 / sigma)) if removed else ((1.0, 0.0),):
            at = z + shift
            loss = np.log1p(q * np.expm1(at / sigma - 0.5 / sigma**2)) * (1 if removed else -1)
            total += share * float(density @ one(*other, e - loss, removed))
        found.append(total)
    return max(found)


@pytest.mark.parametrize("seed", [0, 1, 3, 4])
def test_few_releases_at_tiny_rates_cost_what_they_do(seed):
    rng, delta = np.random.default_rng(seed), 10.0 ** -(5 + seed % 3)
    terms = [(float(10 ** rng.uniform(-4.5, -3)), float(rng.uniform(0.6, 3))) for _ in range(2)]
    terms = [*terms] if seed % 2 else terms[:1]
    found = pld.pld_epsilon([(q, s, 1) for q, s in terms], delta)
    assert delta_of_few(terms, found) <= delta * (1 + 1e-9)
    assert found <= 1e-12 or delta_of_few(terms, found * 0.98) > delta


@pytest.mark.parametrize(("q", "count"), [(1e-7, 10**8), (1e-6, 10**7), (1e-5, 10**8)])
def test_tiny_rates_approach_their_central_limit(q, count):
    # Bu, Dong, Long, Su 2020; here the limit is reached but for 0.2 %.
    mu = q * math.sqrt(count * math.expm1(1.0))
    limit = brentq(lambda e: gaussian_delta(mu, e) - 1e-5, 0, 10 * mu + mu**2)
    found = epsilon({SampledGaussian(q, 1.0): count}, 1e-5)
    assert limit * 0.998 <= found <= limit * 1.01


def test_full_batches_are_one_gaussian_at_any_budget():
    # sqrt(1e5)/σ = μ; δ(1e-3) = 1e-15 by 40 digits.
    with mp.workdps(40):
        e = mp.mpf("1e-3")

        def log_delta(mu):
            return mp.log(mp.ncdf(mu / 2 - e / mu) - mp.exp(e) * mp.ncdf(-mu / 2 - e / mu))

        mu = mp.findroot(lambda m: log_delta(m) + 15 * mp.log(10), (1.5e-4, 1.6e-4))
    exact = math.sqrt(1e5) / float(mu)
    sigma = smallest_sigma(Budget(1e-3, 1e-15), 1.0, 10**5)
    assert exact <= sigma <= exact * 1.001
    assert exact == pytest.approx(2.05e6, rel=1e-3)
    assert max_steps(SampledGaussian(1.0, sigma), Budget(1e-3, 1e-15)) == pytest.approx(
        1e5, rel=1e-3
    )


def test_one_gaussian_by_forty_digits():
    draw = np.random.default_rng(4)
    with mp.workdps(40):
        for _ in range(200):
            mu, delta = float(10 ** draw.uniform(-10, 3)), float(10 ** draw.uniform(-30, -0.01))
            found = gaussian.gaussian_epsilon(mu, delta)

            def exact(e, m=mu):
                return mp.ncdf(m / mp.mpf(2) - e / m) - mp.exp(e) * mp.ncdf(-m / mp.mpf(2) - e / m)

            assert exact(mp.mpf(found)) <= delta, (mu, delta)
            if found:
                assert exact(mp.mpf(found - 1e-6 * max(found, mu))) > delta, (mu, delta)


@pytest.mark.parametrize("sigma", [5e-324, 1e-160, 1e-3, 1e10, 1e160, 1.7e308])
def test_numbers_out_of_all_range_give_a_bound_and_no_traceback(sigma):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for q, count, delta in itertools.product((5e-324, 0.5, 1.0), (1, 10**400), (5e-324, 1e-5)):
            for accountant in ("pld", "rdp"):
                found = epsilon({SampledGaussian(q, sigma): count}, delta, accountant)
                assert found >= 0


def test_the_limits_of_noise_are_right():
    def cost(q, sigma, count=3, delta=1e-5):
        return epsilon({SampledGaussian(q, sigma): count}, delta)

    # So much noise tells nothing; none tells all, but of a record that is hardly ever sampled.
    assert cost(1.0, 1e200) == cost(0.5, 1e160) == 0
    assert cost(1.0, 1e-200) == cost(0.5, 1e-200) == math.inf
    assert cost(1e-6, 1e-200) == 0
    # With δ = 0.3 above the chance 1 - (1-q)³ = 0.271 that the record is in any batch.
    assert cost(0.1, 1e-200, delta=0.3) == 0
