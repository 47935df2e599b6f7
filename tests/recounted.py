"""A ledger's events once more, by dp-accounting."""

from collections import Counter
from collections.abc import Iterable
from functools import cache

import dp_accounting
from dp_accounting.pld import PLDAccountant


def epsilon(events: Iterable[tuple[float, float, int]], delta: float) -> float:
    """ε of events (q, σ, count) together; like ones are one composition, and like lists one sum."""
    counts = Counter[tuple[float, float]]()
    for q, sigma, count in events:
        counts[q, sigma] += count
    return _epsilon(tuple(sorted(counts.items())), delta)


@cache
def _epsilon(counts: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for (q, sigma), count in counts:
        gaussian = dp_accounting.GaussianDpEvent(sigma)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, gaussian), count)
    return accountant.get_epsilon(delta)
