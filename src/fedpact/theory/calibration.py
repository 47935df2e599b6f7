"""The smallest noise, or the largest sampling rate, with which a planned history keeps a budget.

Every answer lies on the safe side: epsilon(answer) <= budget.epsilon has been evaluated.

>>> budget = Budget(epsilon=2.0, delta=1e-5)
>>> round(smallest_sigma(budget, q=0.015, steps=716), 2)
1.1
"""

import math
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NoReturn

from fedpact import check
from fedpact.errors import BudgetExhausted, InputError
from fedpact.theory import special
from fedpact.theory.accounting import (
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
_SIGMA_RANGE: Final = (1e-3, 1e9)
_SMALLEST_RATE: Final = 1e-9


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
    """See smallest_scale. Sites on the same terms share one search."""

    def history(log_scale: float) -> History:
        total = Counter(dict(spent))
        for event, count in planned:
            total[SampledGaussian(event.q, math.exp(log_scale) * event.sigma)] += count
        return total

    low, high = (math.log(sigma) for sigma in _SIGMA_RANGE)
    least = _least(history, low, high, budget, accountant, conversion)
    if least is None:
        _exhausted(budget, accountant, conversion, dict(spent))
    return math.exp(least)


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
        event = SampledGaussian(min(1.0, math.exp(-minus_log_q)), sigma)
        return Counter(spent or {}) + Counter({event: steps})

    high = -math.log(_SMALLEST_RATE)
    least = _least(history, 0.0, high, budget, accountant, conversion)
    if least is None:
        _exhausted(budget, accountant, conversion, spent)
    return min(1.0, math.exp(-least))


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

    history: of an ε that falls in x. A quick accountant searches, `epsilon` has the last word.
    """

    def exact(x: float, by: Accountant) -> float:
        return epsilon(history(x), budget.delta, by, conversion)

    def quick(x: float, by: Accountant) -> float:
        return quick_epsilon(history(x), budget.delta, by, conversion)

    if not exact(high, accountant) <= budget.epsilon:
        return None
    if quick(high, accountant) <= budget.epsilon:
        found = _boundary(quick, low, high, budget.epsilon, accountant)
        for x in (found, found + _TOLERANCE / 2):
            if exact(x, accountant) <= budget.epsilon:
                return x
    return _boundary(exact, low, high, budget.epsilon, accountant)


def _boundary(
    cost: Callable[[float, Accountant], float],
    low: float,
    high: float,
    limit: float,
    accountant: Accountant,
) -> float:
    """Return the least x (about) in [low, high] with cost(x) <= limit, for cost falling in x."""
    if cost(low, accountant) <= limit:
        return low
    if accountant == "best":
        # RDP is cheap, and its answer never below the one that is sought.
        above = _boundary(cost, low, high, limit, "rdp") if cost(high, "rdp") <= limit else high
    else:
        above = high
    below = above
    step = 0.1
    while below > low and cost(below, accountant) <= limit:
        above, below, step = below, max(low, below - step), 2 * step

    def excess(x: float) -> float:
        # Where ε is inf or 0, a bounded stand-in keeps the root finder's secants finite.
        value = min(max(cost(x, accountant), 1e-6 * limit), 1e6 * limit)
        return math.log(value / limit)

    x = above
    if below < above:
        x = special.root(excess, below, above, _TOLERANCE / 2)
    while not cost(x, accountant) <= limit:
        x += _TOLERANCE / 2
    return min(x, above)
