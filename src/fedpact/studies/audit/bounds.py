"""From counts to lower bounds on ε, each valid with the stated confidence. Pure numbers.

One run    Steinke, Nasr, Jagielski 2023, "Privacy auditing with one (1) training run", Theorem 5.2.
Many runs  counts of one event with and without a record, by Clopper and Pearson 1934.
AUC        the area under a membership attack's curve, with DeLong's variance (1988).

A method that reports the largest of k bounds uses confidence 1 - (1 - c)/k for each.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.special import betainc, betainccinv, betaincinv, ndtr

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

    def weaker(mu: float) -> bool:
        return gaussian.gaussian_epsilon(mu, delta) < epsilon

    high = 1.0
    while weaker(high):
        high *= 2
    return _last(weaker, 0.0, high, within=1e-6 * high)


def many_runs_power(claimed: float, delta: float, runs: int, confidence: float) -> float:
    """Return the bound that the best attack would show on a mechanism exactly as claimed.

    For `runs` runs of each kind whose scores are two Gaussians that are exactly (claimed, δ)-
    indistinguishable, by the expected counts at the best threshold.
    """
    mu = gaussian_mu(claimed, delta)
    shown = 0.0
    for at in np.linspace(-3, min(mu, 40.0) + 3, 121):
        p1, p0 = float(ndtr(mu - at)), float(ndtr(-at))
        counts = Counts(round(p1 * runs), runs, round(p0 * runs), runs)
        shown = max(shown, many_runs_epsilon(counts, delta, confidence))
    return shown


def expect_right(mu: float, share: float) -> float:
    """Return the share of right guesses among the `share` of canaries with the clearest scores.

    Scores are N(μ/2, 1) with a canary and N(-μ/2, 1) without it, independent.
    """

    def exceed(t: float) -> tuple[float, float]:
        return float(ndtr(mu / 2 - t)), float(ndtr(-t - mu / 2))

    # Canaries with |score| > t are guessed, by the sign.
    right, wrong = exceed(_last(lambda t: sum(exceed(t)) > share, 0.0, mu / 2 + 10, within=1e-12))
    return right / (right + wrong)


@dataclass(frozen=True)
class Counts:
    """The numbers of runs with and without a record, and of those with an event."""

    seen_with: int
    runs_with: int
    seen_without: int
    runs_without: int


def many_runs_epsilon(counts: Counts, delta: float, confidence: float = 0.95) -> float:
    """Return a lower bound on ε: log((p1 - δ) / p0), p1 from below and p0 from above.

    p1 and p0 are the event's probabilities with and without the record, each bounded by Clopper and
    Pearson at half the error. 0.0 if there is no bound.

    >>> round(many_runs_epsilon(Counts(1000, 1000, 0, 1000), 0.0), 2)
    5.6
    """
    check.probability(delta=delta)
    half = (1 - check.fraction(confidence=confidence)) / 2
    with_it = lower_probability(counts.seen_with, counts.runs_with, half)
    without = upper_probability(counts.seen_without, counts.runs_without, half)
    return max(0.0, math.log((with_it - delta) / without)) if with_it > delta else 0.0


def lower_probability(seen: int, runs: int, error: float) -> float:
    """Return a lower bound on a probability, wrong with probability at most `error`."""
    _check_seen(seen, runs)
    return float(betaincinv(seen, runs - seen + 1, error)) if seen else 0.0


def upper_probability(seen: int, runs: int, error: float) -> float:
    """Return an upper bound on a probability, wrong with probability at most `error`."""
    _check_seen(seen, runs)
    return float(betainccinv(seen + 1, runs - seen, error)) if seen < runs else 1.0


def _check_seen(seen: int, runs: int) -> None:
    if not 0 <= seen <= check.count(runs=runs):
        raise InputError(f"seen is {seen} of {runs} runs: expected 0 <= seen <= runs")


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


@dataclass(frozen=True)
class Auc:
    """P[a member's score is above a non-member's], ties half, with a two-sided interval."""

    value: float
    low: float
    high: float


def auc(members: np.ndarray, others: np.ndarray, confidence: float = 0.95) -> Auc:
    """Return the AUC of scores [n] against scores [k], with DeLong's interval (asymptotic).

    If the scores separate completely, DeLong's variance is 0; then Clopper and Pearson's bound for
    the smaller sample is used. Raises InputError: fewer than 2 of a kind.
    """
    if len(members) < 2 or len(others) < 2:
        raise InputError(
            f"{len(members)} members and {len(others)} others: expected at least 2 of each; hold "
            "records out with partition.held_out"
        )
    error = 1 - check.fraction(confidence=confidence)
    placed = _share_below(members, np.sort(others))
    outplaced = 1 - _share_below(others, np.sort(members))
    value = float(placed.mean())
    spread = math.sqrt(placed.var(ddof=1) / len(placed) + outplaced.var(ddof=1) / len(outplaced))
    reach = float(stats.norm.isf(error / 2)) * spread
    if value in (0.0, 1.0):
        reach = upper_probability(0, min(len(members), len(others)), error)
    return Auc(value, max(0.0, value - reach), min(1.0, value + reach))


def auc_power(ceiling: float, members: int, others: int, confidence: float) -> float:
    """Return the expected lower end of the interval of an attack at the ceiling.

    By the standard error of Hanley and McNeil (1982).
    """
    a = ceiling
    apart = a / (2 - a) - a**2, 2 * a**2 / (1 + a) - a**2
    spread = a * (1 - a) + (members - 1) * apart[0] + (others - 1) * apart[1]
    reach = stats.norm.isf((1 - confidence) / 2) * math.sqrt(spread / (members * others))
    return max(0.0, a - float(reach))


def _share_below(scores: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    below = np.searchsorted(ordered, scores, "left") + np.searchsorted(ordered, scores, "right")
    return below / (2 * len(ordered))


def auc_ceiling(epsilon: float, delta: float) -> float:
    """Return the largest AUC that any attack on one record can have under (ε, δ)-DP.

    The area under TPR <= min(1, e^ε FPR + δ, 1 - e^-ε (1 - δ - FPR)).

    >>> auc_ceiling(0.0, 0.0)
    0.5
    """
    check.non_negative(epsilon=epsilon)
    check.probability(delta=delta)
    # The two lines meet at FPR = (1 - δ)/(1 + e^ε); the second reaches 1 at FPR = 1 - δ.
    odds = math.exp(epsilon)
    corner = (1 - delta) / (1 + odds)
    height = 1 - corner
    return corner * (delta + height) / 2 + (1 - delta - corner) * (height + 1) / 2 + delta
