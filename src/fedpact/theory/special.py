"""The few functions of SciPy the accountants need, behind typed signatures."""

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import scipy.fft as _fft  # pyright: ignore[reportMissingTypeStubs]
import scipy.optimize as _optimize  # pyright: ignore[reportMissingTypeStubs]
import scipy.special as _scipy  # pyright: ignore[reportMissingTypeStubs]
from numpy.typing import NDArray

Array = NDArray[np.float64]
_special = cast(Any, _scipy)


def log_binomial(n: Array | np.float64, k: Array) -> Array:
    """Return log |C(n, k)| for real n > 0 and whole k >= 0, elementwise."""
    return np.asarray(
        _special.gammaln(n + 1) - _special.gammaln(k + 1) - _special.gammaln(n - k + 1)
    )


def binomial_sign(n: Array | np.float64, k: Array) -> Array:
    """Return the sign of C(n, k) for fractional n > 0 and whole k >= 0, elementwise."""
    return np.asarray(_special.gammasgn(n - k + 1))


def log_normal_cdf(x: Array) -> Array:
    """Return log Φ(x), elementwise, accurate far into the lower tail."""
    return np.asarray(_special.log_ndtr(x))


def mills_ratio(x: float) -> float:
    """Return Φ(-x)/φ(x), accurate for any x above -35."""
    return math.sqrt(math.pi / 2) * float(_special.erfcx(x / math.sqrt(2)))


def normal_cdf(x: float) -> float:
    """Return Φ(x)."""
    return float(_special.ndtr(x))


def normal_cdfs(x: Array) -> Array:
    """Return Φ(x), elementwise."""
    return np.asarray(_special.ndtr(x))


def log_sum_exp(x: Array) -> float:
    """Return log Σ e^x over all entries."""
    return float(_special.logsumexp(x))


def fast_length(least: int) -> int:
    """Return a length >= `least` at which a real Fourier transform is quick."""
    return int(cast(Any, _fft).next_fast_len(least, real=True))


def root(f: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """Return a root of f between low and high, where f changes its sign, by Brent's method."""
    return float(cast(Any, _optimize).brentq(f, low, high, xtol=tolerance))
