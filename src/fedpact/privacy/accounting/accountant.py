"""Upper bounds on the ε of a history of releases, and the number of releases a budget allows.

A history counts events, each a Poisson-sampled Gaussian release. Adjacency is add or remove one
record; every ε holds against an attacker who sees all the releases, even if they were chosen
adaptively, as long as the *events* were fixed in advance.

>>> release = SampledGaussian(q=0.015, sigma=1.1)
>>> round(epsilon({release: 317}, delta=1e-5), 2)
1.36
>>> max_steps(release, Budget(epsilon=2.0, delta=1e-5))
716
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Final

import numpy as np

from fedpact.common import check
from fedpact.common.errors import InputError
from fedpact.privacy.accounting import pld, rdp
from fedpact.privacy.accounting.apart import separable
from fedpact.privacy.accounting.rdp import Conversion as Conversion

Accountant = str
"""A name of ACCOUNTANTS."""

MOST_RELEASES: Final = 10**18
"""No bound is computed for histories of more releases."""
ADJACENCY: Final = "add/remove one record"
"""Which data sets are neighbours, for every ε per record."""
ADJACENCY_BY_UNIT: Final = {
    "record": ADJACENCY,
    "person": "add/remove one person with all of that person's records",
}
"""privacy.unit -> which data sets are neighbours."""

_RATES_PER_OCTAVE: Final = 8
_COUNTS_PER_OCTAVE: Final = 16


@dataclass(frozen=True, order=True)
class SampledGaussian:
    """A Gaussian release on a Poisson batch, or several releases on one batch as one (`joint`).

    q: sampling rate in (0, 1]; 1 takes every record. sigma: noise multiplier, the noise's standard
    deviation divided by the L2 sensitivity to one record, > 0. Raises InputError.
    """

    q: float
    sigma: float

    def __post_init__(self) -> None:
        check.rate(q=self.q)
        check.positive(sigma=self.sigma)


History = Mapping[SampledGaussian, int]


@dataclass(frozen=True)
class Budget:
    """An (ε, δ) for one record: epsilon finite and > 0, delta in (0, 1). Raises InputError."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check.positive(epsilon=self.epsilon)
        check.fraction(delta=self.delta)


def add_budgets(parts: Iterable[float]) -> float:
    """Return the decimal sum of budgets, rounded once: three times 1e-05 is 3e-05."""
    return float(sum(Decimal(repr(float(part))) for part in parts))


def joint(q: float, sigmas: Iterable[float]) -> SampledGaussian:
    """Return the event equivalent to several Gaussian releases on the same Poisson batch.

    σ_joint = (Σ σ_k^-2)^(-1/2). Adaptive releases compose to one Gaussian pair, which Poisson
    sampling amplifies once (Zhu, Dong, Wang 2022); amplifying each alone would not be valid.

    >>> round(joint(0.05, [2.0, 5.0]).sigma, 3)
    1.857
    """
    each = [check.positive(sigma=sigma) for sigma in sigmas]
    if not each:
        raise InputError("sigmas is empty: expected the noise multiplier of at least one release")
    # Divide by the least, so that squares neither overflow nor vanish.
    least = min(each)
    return SampledGaussian(q, least / math.sqrt(math.fsum((least / s) ** 2 for s in each)))


def epsilon(
    history: History,
    delta: float,
    accountant: Accountant = "best",
    conversion: Conversion = "balle",
) -> float:
    """Return a proven upper bound on the ε of the whole history at δ; 0.0 for an empty one.

    history: event -> count >= 0. delta: in (0, 1). accountant: "pld", tight; "rdp"; "best", the
    smaller of the two. conversion: from RDP to (ε, δ); "mironov" uses the papers' whole orders
    2..64. Infinite if no bound was found. Raises InputError.
    """
    check.fraction(delta=delta)
    return _epsilon(_terms(history), delta, check_accountant(accountant), conversion)


def find_binding_accountant(
    history: History, delta: float, accountant: Accountant, conversion: Conversion = "balle"
) -> Accountant:
    """Return the accountant whose bound `epsilon` gives: for "best", the first with the least."""
    parts = ACCOUNTANTS[check_accountant(accountant)].parts or (accountant,)
    return min(parts, key=lambda part: epsilon(history, delta, part, conversion))


def _terms(history: History) -> tuple[pld.Term, ...]:
    """Return the history in canonical order without zero counts: a key for the caches."""
    return tuple(
        (float(event.q), float(event.sigma), check.natural(count=count))
        for event, count in sorted(history.items())
        if count != 0
    )


def check_accountant(accountant: str) -> Accountant:
    """Return a name of ACCOUNTANTS. Raises InputError: another one."""
    if accountant not in ACCOUNTANTS:
        names = ", ".join(map(repr, ACCOUNTANTS))
        raise InputError(f"accountant is {accountant!r}: expected one of {names}")
    return accountant


@lru_cache(maxsize=65536)
@separable
def _epsilon(
    terms: tuple[pld.Term, ...], delta: float, accountant: Accountant, conversion: Conversion
) -> float:
    if any(count > MOST_RELEASES for *_, count in terms):
        return math.inf
    # Each bound holds at this δ by itself, so the smallest does: the choice spends nothing of δ.
    parts = ACCOUNTANTS[accountant].parts or (accountant,)
    return min(ACCOUNTANTS[part].epsilon(terms, delta, conversion) for part in parts)


def _pld_epsilon(terms: tuple[pld.Term, ...], delta: float, _: Conversion) -> float:
    return pld.pld_epsilon(terms, delta)


def _rdp_epsilon(terms: tuple[pld.Term, ...], delta: float, conversion: Conversion) -> float:
    if not terms:
        return 0.0
    orders = rdp.PAPER_ORDERS if conversion == "mironov" else rdp.ORDERS
    total = np.zeros(len(orders))
    for q, sigma, count in terms:
        total += count * rdp.renyi(q, sigma, orders)
    return rdp.to_epsilon(total, delta, conversion, orders)


@dataclass(frozen=True)
class Bound:
    """An accountant: what bounds ε of a history, and what it is called. All fields are needed.

    label: in a table. told: on a page, in full. epsilon: of the history's terms, δ and conversion,
    a proven upper bound. converts: whether a conversion of RDP matters to it. parts: of what it is
    the smallest, with epsilon of theirs; () if it is none.
    """

    label: str
    told: str
    epsilon: Callable[[tuple[pld.Term, ...], float, Conversion], float]
    converts: bool
    parts: tuple[str, ...]


def _of_parts(*_: object) -> float:
    raise InputError("an accountant of parts was asked for a bound of its own: expected its parts")


ACCOUNTANTS: Final[dict[Accountant, Bound]] = {
    "best": Bound(
        label="best of PLD and RDP",
        told="best: the smaller of two upper bounds, by privacy loss distributions (PLD) and Rényi "
        "(RDP)",
        epsilon=_of_parts,
        converts=True,
        parts=("rdp", "pld"),
    ),
    "pld": Bound(
        label="PLD, pessimistic",
        told="pld: privacy loss distributions, pessimistic estimate",
        epsilon=_pld_epsilon,
        converts=False,
        parts=(),
    ),
    "rdp": Bound(
        label="RDP",
        told="rdp: Rényi differential privacy",
        epsilon=_rdp_epsilon,
        converts=True,
        parts=(),
    ),
}


def epsilon_on_the_way(
    history: History, planned: History, delta: float, accountant: Accountant = "best"
) -> float:
    """Return a bound on ε of a history on its way to a plan, of which many are asked for.

    It is the ε of a history on the way with every count at most 2^(1/16) times as large, so that a
    run of thousands of rounds needs a few dozen; at the plan's end it is `epsilon(planned)`, and
    "rdp" needs no other history. One that is not part of its plan is priced by itself. Raises
    InputError.

    >>> event = SampledGaussian(0.015, 1.1)
    >>> round(epsilon_on_the_way({event: 317}, {event: 2000}, delta=1e-5), 2)
    1.37
    """
    if accountant == "rdp" or not any(history.values()) or not planned:
        return epsilon(history, delta, accountant)
    # The least share of the plan on a grid that is no shorter: ceil(share n) > count - 1.
    done = max((count - 1) / planned.get(event, math.inf) for event, count in history.items())
    place = math.floor(_COUNTS_PER_OCTAVE * math.log2(done)) + 1 if done > 0 else -math.inf
    share = 2.0 ** (place / _COUNTS_PER_OCTAVE)
    longer = {event: min(n, max(1, math.ceil(share * n))) for event, n in planned.items()}
    if any(count > longer.get(event, 0) for event, count in history.items()):
        longer = history
    return epsilon(longer, delta, accountant)


@separable
def max_steps(
    event: SampledGaussian,
    budget: Budget,
    accountant: Accountant = "best",
    conversion: Conversion = "balle",
    spent: History | None = None,
) -> int:
    """Return the largest T such that T times the event, after what is spent, stay in the budget.

    epsilon(T) <= budget.epsilon < epsilon(T + 1) holds exactly; 0 where not even one fits.
    T beyond 2^53 is cut off there.
    """
    before = dict(spent or {})

    def fits(steps: int) -> bool:
        history = before | {event: before.get(event, 0) + steps}
        return epsilon(history, budget.delta, accountant, conversion) <= budget.epsilon

    near = 0
    if accountant == "best":
        # RDP costs microseconds and is never above the answer: start there.
        near = max_steps(event, budget, "rdp", conversion, before)
    return _last(fits, near, max(1, near // 2))


def _last(fits: Callable[[int], bool], near: int, stride: int) -> int:
    """Return T with fits(T) and not fits(T + 1), by growing strides from a guess, and bisecting."""
    if fits(near):
        low, high = near, near + stride
        while fits(high):
            low, stride = high, 2 * stride
            if low > 2**53:
                return 2**53
            high = low + stride
    else:
        low, high = max(0, near - stride), near
        while low > 0 and not fits(low):
            high, stride = low, 2 * stride
            low = max(0, high - stride)
    # low fits and high does not, at every step.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def round_rate_up(q: float) -> float:
    """Return the next rate at or above q on a geometric grid of 8 an octave, never above 1.

    ε grows with q, so sampling at q and accounting at the grid's rate is safe. Sites of a thousand
    sizes then share a few calibrations.

    >>> round_rate_up(1.0), round_rate_up(0.25)
    (1.0, 0.25)
    """
    check.rate(q=q)
    # The 1e-9 keeps a rate of the grid in its place, however log2 rounds; max(q, ...) below then
    # keeps the answer at or above q.
    power = math.ceil(_RATES_PER_OCTAVE * math.log2(q) - 1e-9)
    return min(1.0, max(q, 2 ** (power / _RATES_PER_OCTAVE)))
