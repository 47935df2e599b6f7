"""ε of plain Gaussian releases: all of them together are one Gaussian, exactly.

Releases with noise multipliers σ_k on all records are as hard to tell apart as N(0, 1) and N(μ, 1)
with μ² = Σ σ_k^-2, and with t = ε/μ - μ/2 (Balle, Wang 2018, Theorem 8)

    δ(ε) = Φ(-t) - e^ε Φ(-t-μ) = φ(t) (R(t) - R(t+μ)),    R(t) = Φ(-t)/φ(t)

The second form loses no digits where both terms are nearly equal.
"""

import math
from typing import Final

from fedpact.theory import special

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
        rest = math.exp(-(t * t) / 2) / math.sqrt(2 * math.pi) * special.mills_ratio(t + mu)
        return math.log(min(1.0, special.normal_cdf(-t) - rest + _UNIT))
    ratio = special.mills_ratio(t)
    # R is convex and R' = tR - 1, so R(t) - R(t+μ) <= μ (1 - tR(t)).
    steep = mu * (1 - t * ratio + _UNIT * (1 + abs(t) * ratio))
    apart = ratio - special.mills_ratio(t + mu) + _UNIT * ratio
    return (
        math.log(min(steep, apart)) - t * t / 2 - 0.5 * math.log(2 * math.pi) + _UNIT * (1 + t * t)
    )
