"""The smallest noise, or the largest sampling rate, with which a planned history keeps a budget.

Every answer lies on the safe side: epsilon(answer) <= budget.epsilon has been evaluated. A σ has
six digits, rounded up: parties look for it each by itself, and their processors round differently
in the last places of a float, which a ledger would take for another promise when a run goes on.

>>> budget = Budget(epsilon=2.0, delta=1e-5)
>>> round(smallest_sigma(budget, q=0.015, steps=716), 2)
1.1
"""

import math
from collections import Counter
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from functools import lru_cache
from typing import Final, NoReturn

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
    quick_epsilon,
)

# Of the answer, relative: the search ends this close to the boundary, on the safe side.
_TOLERANCE: Final = 1e-4
_ROUGHLY: Final = 0.02  # of where a search begins
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
    """Return the least σ (within 0.02 %) at which `steps` releases at rate q keep the budget.

    spent: what the budget already bears. Raises BudgetExhausted where no noise would do, and
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
    """Return the least factor (within 0.02 %) on every planned σ that keeps the budget.

    planned: events whose σ stand to each other as they are to; their own scale does not matter to
    what is released. spent: what the budget already bears, not scaled. Raises BudgetExhausted where
    no noise would do, and InputError for an empty plan.
    """
    if not planned or not all(count >= 1 for count in planned.values()):
        raise InputError(f"planned is {dict(planned)}: expected events, each at least once")
    events = tuple(sorted(planned.items()))
    return _smallest_scale(
        budget, events, accountant, conversion, tuple(sorted((spent or {}).items()))
    )


@lru_cache(maxsize=4096)
def _smallest_scale(
    budget: Budget,
    planned: tuple[tuple[SampledGaussian, int], ...],
    accountant: Accountant,
    conversion: Conversion,
    spent: tuple[tuple[SampledGaussian, int], ...],
) -> float:
    """Return `smallest_scale`, cached: sites on the same terms share one search."""

    def history(log_scale: float) -> History:
        # The σ that is priced is the one that is returned: rounded up to its six digits first.
        scale, total = round_up(math.exp(log_scale)), Counter(dict(spent))
        for event, count in planned:
            total[SampledGaussian(event.q, scale * event.sigma)] += count
        return total

    # Searched in log σ, in which ε is nearly straight, and a tolerance is a relative one.
    low, high = (math.log(sigma) for sigma in _SIGMA_RANGE)
    least = _least(history, low, high, budget, accountant, conversion)
    if least is None:
        _exhausted(budget, accountant, conversion, dict(spent))
    return round_up(math.exp(least))


def largest_rate(
    budget: Budget,
    sigma: float,
    steps: int,
    accountant: Accountant = "best",
    conversion: Conversion = "balle",
    spent: History | None = None,
) -> float:
    """Return the largest q (within 0.02 %) at which `steps` releases with σ keep the budget.

    spent: what the budget already bears. Raises BudgetExhausted where not even q = 1e-9 does, and
    InputError for arguments out of range.
    """
    check.positive(sigma=sigma)
    check.count(steps=steps)

    def history(minus_log_q: float) -> History:
        # ε falls in -log q, as the search wants it.
        event = SampledGaussian(min(1.0, math.exp(-minus_log_q)), sigma)
        return Counter(spent or {}) + Counter({event: steps})

    high = -math.log(_SMALLEST_RATE)
    least = _least(history, 0.0, high, budget, accountant, conversion)
    if least is None:
        _exhausted(budget, accountant, conversion, spent)
    return min(1.0, math.exp(-least))


def round_up(value: float) -> float:
    """Return the least number of six digits that is not below a value > 0."""
    return _rounded(value, ROUND_CEILING)


def round_down(value: float) -> float:
    """Return the greatest number of six digits that is not above a value > 0."""
    return _rounded(value, ROUND_FLOOR)


def _rounded(value: float, how: str) -> float:
    # A decimal beyond a float is nearest to that float or to one still further.
    return float(Context(prec=_DIGITS, rounding=how).create_decimal_from_float(value))


def _exhausted(
    budget: Budget, accountant: Accountant, conversion: Conversion, spent: History | None
) -> NoReturn:
    bears = epsilon(spent or {}, budget.delta, accountant, conversion)
    raise BudgetExhausted(
        f"budget is (ε = {budget.epsilon:g}, δ = {budget.delta:g}), of which ε = {bears:g} is "
        "spent: no noise is large enough and no sampling rate small enough for what is planned; "
        "plan fewer releases or raise the budget"
    )


def _least(
    history: Callable[[float], History],
    low: float,
    high: float,
    budget: Budget,
    accountant: Accountant,
    conversion: Conversion,
) -> float | None:
    """Return the least x (about) in [low, high] at which a history keeps the budget, or None.

    history: of an ε that falls in x. RDP brings the start near, a quick accountant searches,
    `epsilon` has the last word.
    """

    def exact(x: float) -> float:
        return epsilon(history(x), budget.delta, accountant, conversion)

    def quick(x: float) -> float:
        return quick_epsilon(history(x), budget.delta, accountant, conversion)

    limit, kept = budget.epsilon, high
    if accountant == "best":
        kept = _start(history, low, high, budget, conversion)
    if kept == high and not exact(high) <= limit:
        return None
    if kept < high or quick(high) <= limit:
        found = _boundary(quick, low, kept, limit, _TOLERANCE / 2)
        # The quick accountant may lie on either side of the exact one by less than the tolerance:
        # its answer, or the next point on the safe side, counts once the exact one has agreed.
        for x in (found, found + _TOLERANCE / 2):
            if exact(x) <= limit:
                return x
    return _boundary(exact, low, kept, limit, _TOLERANCE / 2)


def _start(
    history: Callable[[float], History],
    low: float,
    high: float,
    budget: Budget,
    conversion: Conversion,
) -> float:
    """Return an x at which a history keeps the budget by RDP, a part of "best"; else `high`.

    Mironov's conversion takes fewer and cheaper orders than Balle's, and its ε is never below.
    """
    tried: tuple[Conversion, ...] = ("mironov", conversion)
    for each in tried:

        def rough(x: float, by: Conversion = each) -> float:
            return epsilon(history(x), budget.delta, "rdp", by)

        if rough(high) <= budget.epsilon:
            return _boundary(rough, low, high, budget.epsilon, _ROUGHLY, step=1.0)
    return high


def _boundary(
    cost: Callable[[float], float],
    low: float,
    high: float,
    limit: float,
    tolerance: float,
    step: float = 0.1,
) -> float:
    """Return the least x (about) in [low, high] with cost(x) <= limit, for cost falling in x.

    cost(high) <= limit. step: how far below `high` to look first.
    """
    # With next to no noise releases are priced in another way, at times below some noise.
    if cost(low) <= limit:
        return low
    above, below = high, max(low, high - step)
    while cost(below) <= limit:
        step *= 2
        above, below = below, max(low, below - step)

    def excess(x: float) -> float:
        # Where ε is inf or 0, a bounded stand-in keeps the root finder's secants finite.
        value = min(max(cost(x), 1e-6 * limit), 1e6 * limit)
        return math.log(value / limit)

    # Brent ends within the tolerance on either side of the root; the steps after it end on the
    # side where the budget is kept, as a cost that was evaluated says.
    x = gaussian.root(excess, below, above, tolerance)
    while not cost(x) <= limit:
        x += tolerance
    return min(x, above)
