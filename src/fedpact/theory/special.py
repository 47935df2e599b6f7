"""The few functions of SciPy the accountants need, behind typed signatures.

Only its special functions are loaded with this file, which every process of a run loads.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import scipy.special as _scipy  # pyright: ignore[reportMissingTypeStubs]
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
_special = cast(Any, _scipy)


def log_binomial(n: FloatArray | np.float64, k: FloatArray) -> FloatArray:
    """Return log |C(n, k)| for real n > 0 and whole k >= 0, elementwise."""
    return np.asarray(
        _special.gammaln(n + 1) - _special.gammaln(k + 1) - _special.gammaln(n - k + 1)
    )


def binomial_sign(n: FloatArray | np.float64, k: FloatArray) -> FloatArray:
    """Return the sign of C(n, k) for fractional n > 0 and whole k >= 0, elementwise."""
    return np.asarray(_special.gammasgn(n - k + 1))


def log_normal_cdf(x: FloatArray) -> FloatArray:
    """Return log Φ(x), elementwise, accurate far into the lower tail."""
    return np.asarray(_special.log_ndtr(x))


def mills_ratio(x: float) -> float:
    """Return Φ(-x)/φ(x), accurate for any x above -35."""
    return math.sqrt(math.pi / 2) * float(_special.erfcx(x / math.sqrt(2)))


def normal_cdf(x: float) -> float:
    """Return Φ(x)."""
    return float(_special.ndtr(x))


def normal_cdfs(x: FloatArray) -> FloatArray:
    """Return Φ(x), elementwise."""
    return np.asarray(_special.ndtr(x))


def fair_coins_at_least(heads: int, coins: int) -> float:
    """Return the probability of at least `heads` heads among `coins` fair coins, both >= 0."""
    return float(_special.bdtrc(heads - 1, coins, 0.5))


def log_sum_exp(x: FloatArray) -> float:
    """Return log Σ e^x over all entries."""
    return float(_special.logsumexp(x))


def fast_length(least: int) -> int:
    """Return the least 2^i 3^j 5^k >= `least` >= 1, at which a real Fourier transform is quick."""
    powers = range(least.bit_length())
    odd = (3**j * 5**k for j in powers for k in powers)
    return min(part << (-(-least // part) - 1).bit_length() for part in odd)


def root(f: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """Return a root of f between low and high, where f changes its sign, by Brent's method."""
    import scipy.optimize as optimize  # pyright: ignore[reportMissingTypeStubs]

    return float(cast(Any, optimize).brentq(f, low, high, xtol=tolerance))
