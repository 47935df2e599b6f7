"""Rényi differential privacy of the Poisson-sampled Gaussian, and its conversions to (ε, δ).

Mironov, Talwar, Zhang. Rényi differential privacy of the sampled Gaussian mechanism.
arXiv 1908.10530. Adjacency: add or remove one record.

    A_α(q, σ) = E_{x ~ N(0, σ²)} [(1 - q + q exp((2x - 1)/(2σ²)))^α],   RDP(α) = log A_α / (α - 1)

bounds both directions of the divergence (their Theorem 5), and releases add.
An order whose value cannot be computed has RDP inf, so that no minimum ever takes it.
"""

import math
from functools import lru_cache
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from fedpact.common import check
from fedpact.common.errors import InputError
from fedpact.privacy.accounting import gaussian

FloatArray = NDArray[np.float64]
Conversion = Literal["balle", "mironov"]

# What ALI-DPFL and FedFDP minimise over; used with their conversion, Mironov's.
PAPER_ORDERS: Final[tuple[float, ...]] = tuple(float(a) for a in range(2, 65))
# Small orders serve a large ε, large orders a small one.
ORDERS: Final[tuple[float, ...]] = (
    *(1 + x / 10 for x in range(1, 100)),
    *(float(a) for a in range(11, 65)),
    *(float(round(64 * 2 ** (k / 4))) for k in range(1, 17)),
    *(float(2**k) for k in range(11, 15)),
)

# Terms of each fractional series. Once k > α the terms alternate in sign and fall, about like
# k^(-1-α), so what is cut off is smaller than the first term left out; that term is added.
_TERMS: Final = 256
_TERMS_OF_SMALL_ORDERS: Final = 1024  # α < 3
_EPS: Final = 2.0**-52
# Where σ² or σ^-2 would leave float64.
_LEAST_SIGMA: Final = 1e-100
_LARGEST_SIGMA: Final = 1e100
_SLACK: Final = 1e-10  # above the rounding of gammaln at the largest order


def renyi(q: float, sigma: float, orders: tuple[float, ...] = ORDERS) -> FloatArray:
    """Return RDP(α) of one release for every order, [len(orders)]; inf where not computable.

    q: sampling rate in (0, 1]; sigma: noise multiplier > 0; orders: each > 1. Raises InputError.
    """
    return _renyi(check.rate(q=q), check.positive(sigma=sigma), tuple(map(float, orders)))


@lru_cache(maxsize=4096)
def _renyi(q: float, sigma: float, orders: tuple[float, ...]) -> FloatArray:
    a = _check(orders)
    with np.errstate(all="ignore"):
        # ε falls with σ: a larger one is priced as the largest whose square is a number.
        sigma = min(sigma, _LARGEST_SIGMA)
        values = np.full(len(a), np.inf)
        if sigma < _LEAST_SIGMA:
            return values
        values = a / (2 * sigma**2) if q == 1 else _log_moments(q, sigma, a) / (a - 1)
        values = values * (1 + _SLACK)
    values[~(values >= 0)] = np.inf
    values.flags.writeable = False
    return values


def _check(orders: tuple[float, ...]) -> FloatArray:
    if not all(1 < a < math.inf for a in orders):
        raise InputError(f"orders are {orders!r}: expected finite numbers > 1")
    return np.asarray(orders)


def _log_moments(q: float, sigma: float, orders: FloatArray) -> FloatArray:
    """log A_α for every order; NaN or negative where the arithmetic fails."""
    first = np.floor(orders)
    between = orders != first
    # [3, orders]: those between two whole orders need the next two as well.
    around = first + np.arange(3)[:, None] * between
    whole, places = np.unique(around, return_inverse=True)
    at = _whole_moments(q, sigma, tuple(whole))[places.reshape(around.shape)]
    values = at[0]
    if between.any():
        values[between] = _fractional(q, sigma, orders[between], at[:, between])
    return values


def _whole_moments(q: float, sigma: float, orders: tuple[float, ...]) -> FloatArray:
    """log A_α = log(1 + Σ_{k>=2} C(α,k) (1-q)^(α-k) q^k (exp((k²-k)/(2σ²)) - 1)), whole α.

    The binomial weights sum to 1; taking the 1 out keeps every digit of a tiny A_α - 1.
    orders: ascending.
    """
    k = np.arange(2, orders[-1] + 1)
    x = k * (k - 1) / (2 * sigma**2)
    with_power = k * math.log(q) + x + np.log(-np.expm1(-x))
    found = np.zeros(len(orders))
    for i, (a, log_binomial) in enumerate(zip(orders, _binomials(orders), strict=True)):
        if count := len(log_binomial):
            terms = log_binomial + (a - k[:count]) * math.log1p(-q) + with_power[:count]
            top = terms.max()
            found[i] = np.logaddexp(0.0, top + np.log(np.exp(terms - top).sum()))
    return found


@lru_cache(maxsize=16)
def _binomials(orders: tuple[float, ...]) -> list[FloatArray]:
    """log C(α,k) for k = 2, ..., α of each order."""
    return [gaussian.log_binomial(np.float64(a), np.arange(2, a + 1)) for a in orders]


def _fractional(q: float, sigma: float, orders: FloatArray, at: FloatArray) -> FloatArray:
    """log A_α for fractional α by two series, or the bound convexity gives where they fail.

    at: log A at the whole orders floor(α), floor(α) + 1 and floor(α) + 2, [3, orders]. log A is
    convex in α and log A_1 = 0: the chord between the whole orders around α lies above it, the
    chord beyond them below.
    """
    first = np.floor(orders)
    above = at[0] + (orders - first) * (at[1] - at[0])
    below = at[1] - (first + 1 - orders) * (at[2] - at[1])
    values = np.empty_like(orders)
    for part, terms in ((orders < 3, _TERMS_OF_SMALL_ORDERS), (orders >= 3, _TERMS)):
        if part.any():
            values[part] = _two_series(q, sigma, orders[part], terms)
    # A value below its lower bound has lost its digits to cancellation.
    return np.where(values >= np.maximum(below, 0.0), np.minimum(values, above), above)


def _two_series(q: float, sigma: float, orders: FloatArray, count: int) -> FloatArray:
    """Σ_k C(α,k) [q^k (1-q)^(α-k) e^{..} Φ(..) + q^(α-k) (1-q)^k e^{..} Φ(..)], rounded up.

    Section 3.3; the two sums are the integrals below and above z0, where 1-q and q exp(..) meet.
    """
    a = orders[:, None]
    k, log_binomial, sign = _series(tuple(orders), count)
    z0 = sigma**2 * math.log(1 / q - 1) + 0.5
    # [2, orders, terms]: the first series has the powers q^k, the second q^(α-k).
    power = np.stack([np.broadcast_to(k, log_binomial.shape), a - k])
    log_ndtr = gaussian.special().log_ndtr
    tails = log_ndtr((z0 - k) / sigma), log_ndtr((power[1] - z0) / sigma)
    log_tail = np.stack(np.broadcast_arrays(*tails))
    weight = (a - power) * math.log1p(-q) + power * math.log(q)
    growth = power * (power - 1) / (2 * sigma**2)
    exponent = log_binomial + weight + growth + log_tail
    top = exponent.max(axis=(0, 2))
    terms = np.exp(exponent - top[:, None])
    total = np.sum(sign[:, :-1] * terms[..., :-1], axis=(0, 2)) + np.sum(terms[..., -1], axis=0)
    # Each term is off by about as many units in its last place as its exponent is large.
    size = 16 + np.abs(weight) + np.abs(growth) + np.abs(log_tail) + k * np.log(k + 2)
    return top + np.log(total + _EPS * np.sum(size * terms, axis=(0, 2)))


@lru_cache(maxsize=16)
def _series(orders: tuple[float, ...], count: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    k = np.arange(count + 1, dtype=np.float64)
    a = np.asarray(orders)[:, None]
    return k, gaussian.log_binomial(a, k), gaussian.special().gammasgn(a - k + 1)


def to_epsilon(
    rdp: FloatArray,
    delta: float,
    conversion: Conversion = "balle",
    orders: tuple[float, ...] = ORDERS,
) -> float:
    """Return the smallest ε over the orders that the RDP `rdp` [len(orders)] implies at δ.

    "balle": Canonne, Kamath, Steinke 2020, Proposition 12; Balle et al. 2020, Theorem 21.
    "mironov": Mironov 2017, Proposition 3. inf where no order gives a finite bound.
    """
    epsilons = rdp + offset(delta, conversion, orders)
    finite = epsilons[np.isfinite(epsilons)]
    return max(0.0, float(finite.min())) if finite.size else math.inf


@lru_cache(maxsize=256)
def offset(delta: float, conversion: Conversion, orders: tuple[float, ...] = ORDERS) -> FloatArray:
    """Return what a conversion adds to RDP(α) to give ε, for every order, [len(orders)]."""
    check.fraction(delta=delta)
    a = _check(orders)
    if conversion == "balle":
        # log((α - 1)/α), without the digits that 1 - 1/α would lose at large orders.
        added = np.log1p(-1 / a) - (math.log(delta) + np.log(a)) / (a - 1)
    elif conversion == "mironov":
        added = -math.log(delta) / (a - 1)
    else:
        raise InputError(f"conversion is {conversion!r}: expected 'balle' or 'mironov'")
    added.flags.writeable = False
    return added
