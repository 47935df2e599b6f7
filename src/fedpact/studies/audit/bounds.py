"""From right guesses to lower bounds on ε, each valid with the stated confidence. Pure numbers.

Steinke, Nasr, Jagielski 2023, "Privacy auditing with one (1) training run", Theorem 5.2. Who
reports the largest of k bounds uses confidence 1 - (1 - c)/k for each.
"""

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from scipy import optimize, stats
from scipy.special import betainc, ndtr

from fedpact.common import check
from fedpact.common.errors import InputError
from fedpact.privacy.accounting import gaussian

_LARGEST_EPSILON = 100.0
_LEAST_LEVEL = 1e-9


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Return a bound on P[at least `correct` right guesses] under (ε, δ)-DP.

    canaries: m records, each included by a fair coin. guesses: r of them guessed, the number fixed
    beforehand. With W ~ Binomial(r, e^ε / (1 + e^ε)) and v = correct,

        p <= P[W >= v] + 2 m δ max_{1 <= i <= v} P[v - i <= W < v] / i

    δ adds at most 2 m δ right guesses on average, so i of them with probability at most 2 m δ / i.
    Raises InputError unless 0 <= correct <= guesses <= canaries.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise InputError(
            f"canaries is {canaries}, guesses is {guesses}, correct is {correct}: expected "
            "0 <= correct <= guesses <= canaries"
        )
    check.non_negative(epsilon=epsilon)
    check.probability(delta=delta)
    right = 1 / (1 + math.exp(-epsilon))
    # P[W >= v] by the incomplete beta function, ten times as fast as scipy.stats.
    p = float(betainc(correct, guesses - correct + 1, right)) if correct else 1.0
    if delta > 0 and correct > 0:
        below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, right))
        p += 2 * canaries * delta * float(np.max(below / np.arange(1, correct + 1)))
    return min(1.0, p)


def one_run_epsilon(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95
) -> float:
    """Return a lower bound on ε, at this confidence, from the number of right guesses.

    0.0 if there is no bound. With 1,000 of 1,000 guesses right:

    >>> round(one_run_epsilon(1000, 1000, 1000, 0.0), 2)
    5.81
    """
    level = 1 - check.fraction(confidence=confidence)

    def excluded(epsilon: float) -> bool:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) <= level

    return _last(excluded, 0.0, _LARGEST_EPSILON)


def refutes(
    lost: Callable[[float], float], canaries: int, guesses: int, correct: int, level: float
) -> bool:
    """Return whether this number of right guesses refutes a trade-off curve at this error level.

    lost: x = P[E] under one of two neighbours -> the smallest P[E] under the other that the curve
    allows; increasing. Mahloujifar, Melis, Chaudhuri 2024, arXiv 2410.22235: with m canaries,
    r guesses, v right ones and τ = level, were P[at least v right] = τ, then r_v = τ v/m, h_v =
    τ (r - v)/m, and downwards

        h_i = max(h_{i+1}, lost(r_{i+1})),    r_i = r_{i+1} + i/(r - i) (h_i - h_{i+1})

    are lower bounds for right and wrong guesses, whose sum is at most r/m.
    """
    one_run_p_value(canaries, guesses, correct, 0.0, 0.0)  # checks the counts
    right, wrong = level * correct / canaries, level * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        more = max(wrong, lost(right))
        right += i / (guesses - i) * (more - wrong)
        wrong = more
    return right + wrong > guesses / canaries


def curve_p_value(
    lost: Callable[[float], float], canaries: int, guesses: int, correct: int
) -> float:
    """Return the smallest level, within 1 %, at which `refutes` is true; 1.0 without any."""

    def refuted(digits: float) -> bool:
        return refutes(lost, canaries, guesses, correct, math.exp(-digits))

    return math.exp(-_last(refuted, 0.0, -math.log(_LEAST_LEVEL), within=0.01))


def make_loss_bound(curve: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """Return `lost` of `refutes` for a mechanism that is (ε, δ)-private for all these pairs."""
    pairs = [(e, d) for e, d in curve if e < math.inf]

    def lost(x: float) -> float:
        lower = [math.exp(-e) * (x - d) for e, d in pairs]
        # For the event's complement.
        upper = [1 - d - math.exp(min(e, 700.0)) * (1 - x) for e, d in pairs]
        return max([0.0, *lower, *upper])

    return lost


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the μ for which N(0, 1) and N(μ, 1) are exactly (ε, δ)-indistinguishable."""
    if epsilon == math.inf:
        return math.inf

    def excess(mu: float) -> float:
        return gaussian.gaussian_epsilon(mu, delta) - epsilon

    high = 1.0
    while excess(high) < 0:
        high *= 2
    return cast(float, optimize.brentq(excess, 0.0, high, xtol=1e-6 * high))


def expect_right(mu: float, share: float) -> float:
    """Return the share of right guesses among the `share` of canaries with the clearest scores.

    Scores are N(μ/2, 1) with a canary and N(-μ/2, 1) without it, independent.
    """

    def exceed(t: float) -> tuple[float, float]:
        return float(ndtr(mu / 2 - t)), float(ndtr(-t - mu / 2))

    # Canaries with |score| > t are guessed, by the sign.
    t = optimize.brentq(lambda t: sum(exceed(t)) - share, 0.0, mu / 2 + 10)
    right, wrong = exceed(cast(float, t))
    return right / (right + wrong)


def _last(holds: Callable[[float], bool], low: float, high: float, within: float = 1e-6) -> float:
    """Return the largest point, up to `within`, at which `holds` is true; `low` if it never is.

    Unlike scipy's root finders it returns a point at which it holds, the safe side of a bound.
    """
    if not holds(low):
        return low
    if holds(high):
        return high
    while high - low > within:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
