"""From counts to lower bounds on ε, each valid with the stated confidence. Pure numbers.

One run    Steinke, Nasr, Jagielski 2023, "Privacy auditing with one (1) training run", Theorem 5.2.
Many runs  counts of one event with and without a record, by Clopper and Pearson 1934.
AUC        the area under a membership attack's curve, with DeLong's variance (1988).

A method that reports the largest of k bounds asks each of them for confidence 1 - (1 - c)/k.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from fedpact import check
from fedpact.errors import InputError

_LARGEST_EPSILON = 100.0


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Return a bound on P[at least `correct` right guesses] under (ε, δ)-DP.

    canaries: m records, each included by a fair coin. guesses: r of them guessed, the number fixed
    beforehand. With W ~ Binomial(r, e^ε / (1 + e^ε)) and v = correct,

        p <= P[W >= v] + 2 m δ max_{1 <= i <= v} P[v - i <= W < v] / i

    δ buys an average of at most 2 m δ further right guesses: i of them are had with probability
    2 m δ / i. Raises InputError unless 0 <= correct <= guesses <= canaries.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise InputError(
            f"canaries is {canaries}, guesses is {guesses}, correct is {correct}: expected "
            "0 <= correct <= guesses <= canaries"
        )
    check.non_negative(epsilon=epsilon)
    check.probability(delta=delta)
    right = 1 / (1 + math.exp(-epsilon))
    p = float(stats.binom.sf(correct - 1, guesses, right))
    if delta > 0 and correct > 0:
        below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, right))
        p += 2 * canaries * delta * float(np.max(below / np.arange(1, correct + 1)))
    return min(1.0, p)


def one_run_epsilon(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95
) -> float:
    """Return the ε that is exceeded, at this confidence, by whatever allowed so many right guesses.

    0.0 where nothing can be said. With all of 1,000 guesses right:

    >>> round(one_run_epsilon(1000, 1000, 1000, 0.0), 2)
    5.81
    """
    level = 1 - check.fraction(confidence=confidence)
    return _largest(lambda e: one_run_p_value(canaries, guesses, correct, e, delta) <= level)


@dataclass(frozen=True)
class Counts:
    """How often an event was seen in so many runs with a record, and in so many without it."""

    seen_with: int
    runs_with: int
    seen_without: int
    runs_without: int


def many_runs_epsilon(counts: Counts, delta: float, confidence: float = 0.95) -> float:
    """Return a lower bound on ε: log((p1 - δ) / p0), p1 from below and p0 from above.

    p1 and p0 are the event's probabilities with and without the record, each bounded by Clopper and
    Pearson at half the error. 0.0 where nothing can be said.

    >>> round(many_runs_epsilon(Counts(1000, 1000, 0, 1000), 0.0), 2)
    5.6
    """
    check.probability(delta=delta)
    half = (1 - check.fraction(confidence=confidence)) / 2
    with_it = lower_probability(counts.seen_with, counts.runs_with, half)
    without = upper_probability(counts.seen_without, counts.runs_without, half)
    return max(0.0, math.log((with_it - delta) / without)) if with_it > delta else 0.0


def lower_probability(seen: int, runs: int, error: float) -> float:
    """Return p with P[as many as `seen` of `runs`] = error: too high with at most that chance."""
    _check_seen(seen, runs)
    return float(stats.beta.ppf(error, seen, runs - seen + 1)) if seen else 0.0


def upper_probability(seen: int, runs: int, error: float) -> float:
    """Return p with P[as few as `seen` of `runs`] = error: too low with at most that chance."""
    _check_seen(seen, runs)
    return float(stats.beta.isf(error, seen + 1, runs - seen)) if seen < runs else 1.0


def _check_seen(seen: int, runs: int) -> None:
    if not 0 <= seen <= check.count(runs=runs):
        raise InputError(f"seen is {seen} of {runs} runs: expected 0 <= seen <= runs")


def _largest(excluded: Callable[[float], bool]) -> float:
    """Return an ε that is excluded, within 1e-6 of the first that is not; 0.0 if none is."""
    low, high = 0.0, _LARGEST_EPSILON
    if not excluded(low):
        return 0.0
    if excluded(high):
        return high
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if excluded(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Auc:
    """P[a member's score is above a non-member's], ties half, with a two-sided interval."""

    value: float
    low: float
    high: float


def auc(members: np.ndarray, others: np.ndarray, confidence: float = 0.95) -> Auc:
    """Return the AUC of scores [n] against scores [k], with DeLong's interval (asymptotic).

    Where the scores separate completely DeLong's variance is 0; the interval then leaves out what
    Clopper and Pearson's would for the smaller sample. Raises InputError: fewer than 2 of a kind.
    """
    if len(members) < 2 or len(others) < 2:
        raise InputError(
            f"{len(members)} members and {len(others)} others: expected at least 2 of each; keep "
            "records back with partition.held_out"
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
