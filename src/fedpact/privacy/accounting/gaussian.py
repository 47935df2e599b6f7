"""The Gaussian mechanism in closed form, and the special functions it needs.

scipy is loaded with the first of them, as every process of a run loads this file.

Releases with noise multipliers σ_k on all records are as hard to tell apart as N(0, 1) and N(μ, 1)
with μ² = Σ σ_k^-2, and with t = ε/μ - μ/2 (Balle, Wang 2018, Theorem 8)

    δ(ε) = Φ(-t) - e^ε Φ(-t-μ) = φ(t) (R(t) - R(t+μ)),    R(t) = Φ(-t)/φ(t)

The second form loses no digits where both terms are nearly equal.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@cache
def special() -> Any:
    """Return scipy.special, whose functions work elementwise. It takes 14 MB of a process."""
    import scipy.special as loaded  # pyright: ignore[reportMissingTypeStubs]

    return loaded


def log_binomial(n: FloatArray | np.float64, k: FloatArray) -> FloatArray:
    """Return log |C(n, k)| for real n > 0 and whole k >= 0, elementwise."""
    return np.asarray(
        special().gammaln(n + 1) - special().gammaln(k + 1) - special().gammaln(n - k + 1)
    )


def mills_ratio(x: float) -> float:
    """Return Φ(-x)/φ(x), accurate for any x above -35."""
    return math.sqrt(math.pi / 2) * float(special().erfcx(x / math.sqrt(2)))


def normal_cdf(x: float) -> float:
    """Return Φ(x)."""
    return float(special().ndtr(x))


def fair_coins_at_least(heads: int, coins: int) -> float:
    """Return the probability of at least `heads` heads among `coins` fair coins, both >= 0."""
    return float(special().bdtrc(heads - 1, coins, 0.5))


def fast_length(least: int) -> int:
    """Return the least length >= `least` >= 1 at which a real Fourier transform is quick."""
    import scipy.fft as fft  # pyright: ignore[reportMissingTypeStubs]

    return int(cast(Any, fft).next_fast_len(least, real=True))


def root(f: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """Return a root of f between low and high, where f changes its sign, by Brent's method.

    Raises ValueError: f has one sign at both ends, or is NaN somewhere.
    """
    import scipy.optimize as loaded  # pyright: ignore[reportMissingTypeStubs]

    return float(cast(Any, loaded).brentq(f, low, high, xtol=tolerance))


_UNIT: Final = 2.0**-48  # above the rounding of the few operations below, relative


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return ε at δ, too large by 1e-6 max(ε, μ) at most; inf for a μ of inf.

    An upper bound: what every operation may round is added to δ, and ε is rounded up.

    >>> round(gaussian_epsilon(1.0, 1e-5), 3)
    4.377
    """
    if not mu < math.inf:
        return math.inf
    target = math.log(delta)
    if mu == 0 or _log_delta(mu, 0.0) <= target:
        return 0.0
    # δ <= Φ(-t) <= e^(-t²/2)
    low, high = 0.0, mu * (mu / 2 + math.sqrt(-2 * target) + _UNIT)
    if not high < math.inf:
        return math.inf
    while high - low > 1e-12 * high:
        middle = low + (high - low) / 2
        low, high = (low, middle) if _log_delta(mu, middle) <= target else (middle, high)
    # More than t = ε/μ - μ/2 was rounded by.
    return high * (1 + 1e-10)


def _log_delta(mu: float, epsilon: float) -> float:
    """Return the logarithm of δ(ε), not below it but for the rounding of t."""
    t = epsilon / mu - mu / 2
    if t < -5:
        # R(t) would overflow, and no digits are lost: t + μ >= μ/2.
        rest = math.exp(-(t * t) / 2) / math.sqrt(2 * math.pi) * mills_ratio(t + mu)
        return math.log(min(1.0, normal_cdf(-t) - rest + _UNIT))
    ratio = mills_ratio(t)
    # R is convex and R' = tR - 1, so R(t) - R(t+μ) <= μ (1 - tR(t)).
    steep = mu * (1 - t * ratio + _UNIT * (1 + abs(t) * ratio))
    apart = ratio - mills_ratio(t + mu) + _UNIT * ratio
    return (
        math.log(min(steep, apart)) - t * t / 2 - 0.5 * math.log(2 * math.pi) + _UNIT * (1 + t * t)
    )
