"""The smallest noise, or the largest sampling rate, with which a planned history fits a budget.

Every answer is safe: epsilon(answer) <= budget.epsilon has been evaluated. A σ is rounded up to six
digits, as each party computes it and their processors round the last digits differently; a ledger
would take another σ for another reservation when a run is resumed.

>>> budget = Budget(epsilon=2.0, delta=1e-5)
>>> round(smallest_sigma(budget, q=0.015, steps=716), 2)
1.1
"""

import math
from collections import Counter
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from functools import lru_cache, partial
from typing import Final

from fedpact.common import check
from fedpact.common.errors import BudgetExhausted, InputError
from fedpact.privacy.accounting import gaussian
from fedpact.privacy.accounting.accountant import (
    Accountant,
    Budget,
    Conversion,
    History,
    SampledGaussian,
    epsilon,
)
from fedpact.privacy.accounting.apart import separable

# The relative distance from the boundary at which a search ends, on the safe side.
_TOLERANCE: Final = 1e-4
_ROUGHLY: Final = 0.02  # the same for the start of a search
_SIGMA_RANGE: Final = (1e-3, 1e9)
_SMALLEST_RATE: Final = 1e-9
_DIGITS: Final = 6


def smallest_sigma(
    budget: Budget,
    q: float,
    steps: int,
    accountant: Accountant = "best",
    conversion: Conversion = "balle",
    spent: History | None = None,
) -> float:
    """Return the least σ (within 0.02 %) at which `steps` releases at rate q fit the budget.

    spent: events already paid from the budget. Raises BudgetExhausted if no noise is enough, and
    InputError for arguments out of range.
    """
    check.rate(q=q)
    check.count(steps=steps)
    planned = {SampledGaussian(q, 1.0): steps}
    return smallest_scale(budget, planned, accountant, conversion, spent)


def smallest_scale(
    budget: Budget,
    planned: History,
    accountant: Accountant = "best",
    conversion: Conversion = "balle",
    spent: History | None = None,
) -> float:
    """Return the least factor (within 0.02 %) on every planned σ that fits the budget.

    planned: events whose σ have the desired ratios. spent: events already paid from the budget, not
    scaled. Raises BudgetExhausted if no noise is enough, and InputError for an empty plan.
    """
    if not planned or not all(count >= 1 for count in planned.values()):
        raise InputError(f"planned is {dict(planned)}: expected events, each at least once")
    events = tuple(sorted(planned.items()))
    return _smallest_scale(
        budget, events, accountant, conversion, tuple(sorted((spent or {}).items()))
    )


@lru_cache(maxsize=4096)
@separable
def _smallest_scale(
    budget: Budget,
    planned: tuple[tuple[SampledGaussian, int], ...],
    accountant: Accountant,
    conversion: Conversion,
    spent: tuple[tuple[SampledGaussian, int], ...],
) -> float:
    """Return `smallest_scale`, cached: sites on the same terms share one search."""

    def history(log_scale: float) -> History:
        # Price the σ that is returned, rounded up to six digits.
        scale, total = round_up(math.exp(log_scale)), Counter(dict(spent))
        for event, count in planned:
            total[SampledGaussian(event.q, scale * event.sigma)] += count
        return total

    # Search in log σ: ε is nearly linear in it, and a tolerance is relative.
    low, high = (math.log(sigma) for sigma in _SIGMA_RANGE)
    least = _least(history, low, high, budget, accountant, conversion, dict(spent))
    return round_up(math.exp(least))


def largest_rate(
    budget: Budget,
    sigma: float,
    steps: int,
    accountant: Accountant = "best",
    conversion: Conversion = "balle",
    spent: History | None = None,
) -> float:
    """Return the largest q (within 0.02 %) at which `steps` releases with σ fit the budget.

    spent: events already paid from the budget. Raises BudgetExhausted if q = 1e-9 is too large, and
    InputError for arguments out of range.
    """
    check.positive(sigma=sigma)
    check.count(steps=steps)

    def history(minus_log_q: float) -> History:
        # ε decreases in -log q, as the search requires.
        event = SampledGaussian(min(1.0, math.exp(-minus_log_q)), sigma)
        return Counter(spent or {}) + Counter({event: steps})

    high = -math.log(_SMALLEST_RATE)
    least = _least(history, 0.0, high, budget, accountant, conversion, spent or {})
    return min(1.0, math.exp(-least))


def round_up(value: float) -> float:
    """Return the least number of six digits that is not below a value > 0."""
    return _round(value, ROUND_CEILING)


def round_down(value: float) -> float:
    """Return the greatest number of six digits that is not above a value > 0."""
    return _round(value, ROUND_FLOOR)


def _round(value: float, how: str) -> float:
    # The nearest float to a decimal above (below) a float is not below (above) that float.
    return float(Context(prec=_DIGITS, rounding=how).create_decimal_from_float(value))


def _least(
    history: Callable[[float], History],
    low: float,
    high: float,
    budget: Budget,
    accountant: Accountant,
    conversion: Conversion,
    spent: History,
) -> float:
    """Return about the least x in [low, high] at which the history fits the budget.

    The ε of history(x) decreases in x. RDP finds a start. Raises BudgetExhausted: it fits nowhere.
    """

    def exact(x: float, by: Accountant = accountant, to: Conversion = conversion) -> float:
        return epsilon(history(x), budget.delta, by, to)

    limit, kept = budget.epsilon, high
    # Mironov's conversion needs fewer and cheaper orders than Balle's, and its ε is never smaller.
    tried: tuple[Conversion, ...] = ("mironov", conversion) if accountant == "best" else ()
    for to in tried:
        by_rdp = partial(exact, by="rdp", to=to)  # a part of "best"
        if by_rdp(high) <= limit:
            kept = _boundary(by_rdp, low, high, limit, _ROUGHLY, step=1.0)
            break
    if kept == high and not exact(high) <= limit:
        already = epsilon(spent, budget.delta, accountant, conversion)
        raise BudgetExhausted(
            f"budget is (ε = {budget.epsilon:g}, δ = {budget.delta:g}), of which ε = {already:g} "
            "is spent: no noise is large enough and no sampling rate small enough for what is "
            "planned; plan fewer releases or raise the budget"
        )
    return _boundary(exact, low, kept, limit, _TOLERANCE / 2)


def _boundary(
    cost: Callable[[float], float],
    low: float,
    high: float,
    limit: float,
    tolerance: float,
    step: float = 0.1,
) -> float:
    """Return about the least x in [low, high] with cost(x) <= limit, for a decreasing cost.

    cost(high) <= limit. step: the first distance from `high` to try.
    """
    # ε is 0 at any noise where hardly any batch has the record.
    if cost(low) <= limit:
        return low
    above, below = high, max(low, high - step)
    while cost(below) <= limit:
        step *= 2
        above, below = below, max(low, below - step)

    def excess(x: float) -> float:
        # Clip ε of inf or 0, so that the root finder's secants stay finite.
        value = min(max(cost(x), 1e-6 * limit), 1e6 * limit)
        return math.log(value / limit)

    # Brent ends within the tolerance on either side of the root. Step on until an evaluated cost is
    # within the limit.
    x = gaussian.root(excess, below, above, tolerance)
    while not cost(x) <= limit:
        x += tolerance
    return min(x, above)
