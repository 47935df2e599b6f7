"""Noise for a sum: what rounded Gaussian shares of several sites are worth together.

Each site adds a share of noise to its part of a sum, on a grid, and only the sum is opened:

    e_i = floor(a_i + ν z_i + 1/2),   z_i ~ N(0, I_d),   a_i in units of the grid

With h shares that nobody else knows, Σ e_i is as good as a Gaussian of deviation ν sqrt(h): for
α = 1.28 exp(-π² ν²/2) and every integer n

    |P(Σ e_i = n) - Q(n)| <= (1 + α)^h - 1 + α,   Q the law of floor(a + ν sqrt(h) Z + Σ U + 1/2)

with Z normal and h - 1 numbers U, uniform on [-1/2, 1/2]: post-processing of a Gaussian mechanism,
wherever the a_i lie and however coarse the grid. docs/notes/noise-for-the-sum.md has the proof.
What the two laws differ by is added to δ: `added_delta`, which SHARE_DEVIATION keeps below
ADDED_DELTA.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Final

from fedpact.common.check import count as at_least_one
from fedpact.common.check import positive
from fedpact.common.errors import InputError
from fedpact.privacy.accounting.accountant import History, SampledGaussian

SHARE_DEVIATION: Final = 4.0
"""ν, a share's deviation in units of the grid: rounding adds 1/(12 ν²) = 0.5 % to its variance."""

FINE_UNITS: Final = 16.0
"""ν where what is released is rounded once more: this rounding adds 0.03 %."""

ADDED_DELTA: Final = 1e-15
"""What is taken off a budget's δ for the difference of the laws."""

COVERED: Final = 10.0
"""The least ε up to which ADDED_DELTA is checked to be enough."""

_ROOM: Final = 0.01
"""ε grows by less than this when δ for a larger ε is set aside, else `cover` gives up."""

_TAIL: Final = 40.0
"""Beyond so many deviations a normal law has less than 1e-340."""


def distribution_error(units: float, shares: int) -> float:
    """Return how far the probability of a value may be off: (1 + α)^h - 1 + α.

    units: ν >= 1/2 of each share. shares: h >= 1. Raises InputError.
    """
    if not units >= 0.5:
        raise InputError(f"units is {units!r}: expected a number >= 0.5, in units of the grid")
    alpha = 1.28 * math.exp(-0.5 * (math.pi * units) ** 2)
    return math.expm1(at_least_one(shares=shares) * math.log1p(alpha)) + alpha


def rounded_entropy(units: float) -> float:
    """Return the bits in a normal number of deviation `units` > 0 that is rounded to an integer.

    log2(units sqrt(2πe)) as soon as that is one or more.

    >>> round(rounded_entropy(4.0), 4), round(math.log2(4.0 * math.sqrt(2 * math.pi * math.e)), 4)
    (4.0508, 4.0471)
    """
    scale, most = positive(units=units) * math.sqrt(2), math.ceil(_TAIL * units)
    ends = [math.erf((n - 0.5) / scale) for n in range(-most, most + 2)]
    masses = [(after - before) / 2 for before, after in itertools.pairwise(ends)]
    return -math.fsum(p * math.log2(p) for p in masses if p > 0)


def added_delta(epsilon: float, units: float, shares: int, coordinates: float) -> float:
    """Return by how much δ grows at this ε where sums of so many coordinates are opened in all.

    coordinates: d times the number of sums. It is (1 + e^ε) times the laws' distance in total
    variation, over all values but those in the tails. Raises InputError.
    """
    # As many integers as the sum takes between the tails, each off by no more than the error.
    values = 2 * _TAIL * units * math.sqrt(shares) + 2 * shares + 2
    # Half the sum of differences is the distance in total variation; coordinates add up.
    total = positive(coordinates=coordinates) * values * distribution_error(units, shares) / 2
    # Beyond ε = 700 no sum is short enough, and floats end.
    return (1 + math.exp(min(700.0, positive(epsilon=epsilon)))) * total


def delta_of_events(delta: float, shares: int) -> float:
    """Return the δ that is left for events: less ADDED_DELTA if they have shares, not 0."""
    return delta - (ADDED_DELTA if shares else 0.0)


def check_added_delta(epsilon: float, shares: int, coordinates: float) -> None:
    """Raise InputError where the shares' laws cost more than ADDED_DELTA; see `cover`."""
    epsilon = max(epsilon, COVERED)
    cost = added_delta(epsilon, SHARE_DEVIATION, shares, coordinates)
    if not cost <= ADDED_DELTA:
        raise InputError(
            f'trust = "sum" over {coordinates:g} coordinates of {shares} shares at ε = '
            f"{epsilon:g} costs δ = {cost:.3g}: expected at most {ADDED_DELTA:g}; lower ε, or "
            "train fewer rounds"
        )


def cover(price: Callable[[float], float], delta: float, budget: float, alone: float) -> float:
    """Return an ε of the shares' sum at δ, as of several records.

    price: δ -> the ε of the Gaussian that the shares make together. budget: ε >= 0 of the run's
    promise. alone: ε at δ that needs no other share, which is returned where δ has no room.

    With E = max(budget, COVERED), `check_added_delta` has found (1 + e^E) D <= ADDED_DELTA for the
    laws' distance D. For t >= E it follows that (1 + e^t) D <= e^(t - E) ADDED_DELTA =: s, as
    (1 + e^t) <= e^(t - E) (1 + e^E). So where ε = price(δ - s) <= t, the sum is (ε, δ)-private: the
    Gaussian is (ε, δ - s)-private, and the laws add (1 + e^ε) D <= s.
    """
    checked = max(budget, COVERED)
    # Up to E the δ that was set aside is enough, by what `check_added_delta` has found.
    cost = price(delta - ADDED_DELTA)
    if cost <= checked:
        return cost
    most = cost + _ROOM
    aside = ADDED_DELTA * math.exp(min(700.0, most - checked))
    if aside < delta:
        cost = price(delta - aside)
        if cost <= most:
            return min(cost, alone)
    return alone


def own_share_event(event: SampledGaussian, shares: int) -> SampledGaussian:
    """Return what is left of an event if only one of its shares is noise. shares: h, all."""
    # Rounded down: less noise costs more.
    return SampledGaussian(event.q, event.sigma / math.sqrt(shares) * (1 - 2.0**-50))


def all_alone(events: History, shares: int) -> History:
    """Return `own_share_event` of each event, with its number."""
    found = Counter[SampledGaussian]()
    for event, number in events.items():
        # Two events may become one, to the last digit: then their numbers add.
        found[own_share_event(event, shares)] += number
    return found
