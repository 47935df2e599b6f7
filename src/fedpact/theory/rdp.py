"""Rényi differential privacy of the Poisson-sampled Gaussian, and its conversions to (ε, δ).

Mironov, Talwar, Zhang. Rényi differential privacy of the sampled Gaussian mechanism.
arXiv 1908.10530. Adjacency: add or remove one record.

    A_α(q, σ) = E_{x ~ N(0, σ²)} [(1 - q + q exp((2x - 1)/(2σ²)))^α],   RDP(α) = log A_α / (α - 1)

bounds both directions of the divergence (their Theorem 5), and releases add.
An order whose value cannot be computed reliably has RDP inf, so that no minimum ever takes it.
"""

import math
from functools import lru_cache
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from fedpact import check
from fedpact.errors import InputError
from fedpact.theory import special

Array = NDArray[np.float64]
Conversion = Literal["balle", "mironov"]

# What ALI-DPFL and FedFDP minimise over; used with their conversion, Mironov's.
PAPER_ORDERS: Final[tuple[float, ...]] = tuple(float(a) for a in range(2, 65))
# Small orders serve a large ε, large orders a small one.
ORDERS: Final[tuple[float, ...]] = tuple(
    sorted({1 + x / 10 for x in range(1, 100)} | set(PAPER_ORDERS))
) + tuple(float(round(64 * 2 ** (k / 4))) for k in range(1, 33))

# Terms of each fractional series. Once k > α the terms alternate in sign and fall, so what is cut
# off is smaller than the first term left out; that term is added.
_TERMS: Final = 400
_EPS: Final = 2.0**-52
_SLACK: Final = 1e-10  # above the rounding of gammaln at the largest order


def renyi(q: float, sigma: float, orders: tuple[float, ...] = ORDERS) -> Array:
    """Return RDP(α) of one release for every order, [len(orders)]; inf where not computable.

    q: sampling rate in (0, 1]; sigma: noise multiplier > 0; orders: each > 1. Raises InputError.
    """
    return _renyi(check.rate(q=q), check.positive(sigma=sigma), tuple(map(float, orders)))


@lru_cache(maxsize=4096)
def _renyi(q: float, sigma: float, orders: tuple[float, ...]) -> Array:
    if not all(1 < a < math.inf for a in orders):
        raise InputError(f"orders are {orders!r}: expected finite numbers > 1")
    if q == 1:
        values = np.asarray(orders) / (2 * sigma**2)
    else:
        values = np.array([_log_moment(q, sigma, a) / (a - 1) for a in orders])
    values = values * (1 + _SLACK)
    values[~(values >= 0)] = np.inf
    values.flags.writeable = False
    return values


def _log_moment(q: float, sigma: float, order: float) -> float:
    """log A_α; may come out NaN or negative where the arithmetic fails."""
    with np.errstate(all="ignore"):
        if order.is_integer():
            return _log_moment_integer(q, sigma, int(order))
        return _log_moment_fractional(q, sigma, order)


def _log_moment_integer(q: float, sigma: float, order: int) -> float:
    """log A_α = log(1 + Σ_{k>=2} C(α,k) (1-q)^(α-k) q^k (exp((k²-k)/(2σ²)) - 1)).

    The binomial weights sum to 1; taking the 1 out keeps every digit of a tiny A_α - 1.
    """
    k = np.arange(2, order + 1, dtype=np.float64)
    x = k * (k - 1) / (2 * sigma**2)
    log_expm1 = np.where(x > 30, x, np.log(np.expm1(np.minimum(x, 30.0))))
    log_terms = (
        special.log_binomial(float(order), k)
        + (order - k) * math.log1p(-q)
        + k * math.log(q)
        + log_expm1
    )
    return float(np.logaddexp(0.0, special.logsumexp(log_terms)))


def _log_moment_fractional(q: float, sigma: float, order: float) -> float:
    """log A_α by the two series of section 3.3, or the bound convexity gives where they fail.

    log A is convex in α and log A_1 = 0: the chord between the whole orders around α lies above
    it, the chord beyond them below.
    """
    n = math.floor(order)
    at = [0.0 if a == 1 else _log_moment_integer(q, sigma, a) for a in (n, n + 1, n + 2)]
    above = at[0] + (order - n) * (at[1] - at[0])
    below = at[1] - (n + 1 - order) * (at[2] - at[1])
    value = _two_series(q, sigma, order)
    # A value below its lower bound has lost its digits to cancellation.
    return min(value, above) if value >= max(below, 0.0) else above


def _two_series(q: float, sigma: float, order: float) -> float:
    """Σ_k C(α,k) [q^k (1-q)^(α-k) e^{..} Φ(..) + q^(α-k) (1-q)^k e^{..} Φ(..)], rounded up.

    The two sums are the integrals below and above z0, where (1-q) and q exp(..) are equal.
    """
    k = np.arange(_TERMS + 1, dtype=np.float64)
    z0 = sigma**2 * math.log(1 / q - 1) + 0.5
    log_binomial, sign = special.log_binomial(order, k), special.binomial_sign(order, k)
    exponents: list[Array] = []
    sizes: list[Array] = []
    for power, tail in ((k, (z0 - k) / sigma), (order - k, (order - k - z0) / sigma)):
        growth = power * (power - 1) / (2 * sigma**2)
        log_tail = special.log_normal_cdf(tail)
        weight = (order - power) * math.log1p(-q) + power * math.log(q)
        exponents.append(log_binomial + weight + growth + log_tail)
        # Each term is off by about as many units in its last place as its exponent is large.
        sizes.append(16 + np.abs(weight) + np.abs(growth) + np.abs(log_tail) + k * np.log(k + 2))
    top = max(float(exponent.max()) for exponent in exponents)
    total = 0.0
    for exponent, size in zip(exponents, sizes, strict=True):
        terms = np.exp(exponent - top)
        total += float(np.sum(sign[:-1] * terms[:-1]) + terms[-1] + _EPS * np.sum(size * terms))
    return top + math.log(total) if 0 < total < math.inf else math.nan


def to_epsilon(
    rdp: Array, delta: float, conversion: Conversion = "balle", orders: tuple[float, ...] = ORDERS
) -> float:
    """Return the smallest ε over the orders that RDP `rdp` [len(orders)] implies at δ.

    "balle": Canonne, Kamath, Steinke 2020, Proposition 12; Balle et al. 2020, Theorem 21.
    "mironov": Mironov 2017, Proposition 3. inf where no order gives a finite bound.
    """
    epsilons = rdp + offset(delta, conversion, orders)
    finite = epsilons[np.isfinite(epsilons)]
    return max(0.0, float(finite.min())) if finite.size else math.inf


@lru_cache(maxsize=256)
def offset(delta: float, conversion: Conversion, orders: tuple[float, ...]) -> Array:
    """Return what a conversion adds to RDP(α) to give ε, for every order, [len(orders)]."""
    check.fraction(delta=delta)
    a = np.asarray(orders)
    if conversion == "balle":
        added = np.log1p(-1 / a) - (math.log(delta) + np.log(a)) / (a - 1)
    elif conversion == "mironov":
        added = -math.log(delta) / (a - 1)
    else:
        raise InputError(f"conversion is {conversion!r}: expected 'balle' or 'mironov'")
    added.flags.writeable = False
    return added
