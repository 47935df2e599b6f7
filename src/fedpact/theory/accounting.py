"""What a history of releases costs: upper bounds on ε, and how many releases a budget allows.

A history counts events, each a Poisson-sampled Gaussian release. Adjacency is add or remove one
record; every ε holds against whoever sees all the releases, chosen adaptively, as long as the
*events* were fixed in advance.

>>> release = SampledGaussian(q=0.015, sigma=1.1)
>>> round(epsilon({release: 317}, delta=1e-5), 2)
1.36
>>> max_steps(release, Budget(epsilon=2.0, delta=1e-5))
716
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Final, Literal

import numpy as np

from fedpact import check
from fedpact.errors import InputError
from fedpact.theory import pld, rdp, running
from fedpact.theory.rdp import Conversion

__all__ = [
    "Accountant",
    "Budget",
    "Conversion",
    "History",
    "RunningEpsilon",
    "SampledGaussian",
    "epsilon",
    "joint",
    "max_steps",
    "quick_epsilon",
    "round_rate_up",
]

Accountant = Literal["best", "pld", "rdp"]

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


def joint(q: float, sigmas: Iterable[float]) -> SampledGaussian:
    """Return the one event that several Gaussian releases on the same Poisson batch form.

    σ_joint = (Σ σ_k^-2)^(-1/2). Adaptive releases compose to one Gaussian pair, which Poisson
    sampling amplifies once (Zhu, Dong, Wang 2022); amplifying each alone would not be valid.

    >>> round(joint(0.05, [2.0, 5.0]).sigma, 3)
    1.857
    """
    each = [check.positive(sigma=sigma) for sigma in sigmas]
    if not each:
        raise InputError("sigmas is empty: expected the noise multiplier of at least one release")
    # Scaled by the least, so that the squares neither overflow nor vanish.
    least = min(each)
    return SampledGaussian(q, least / math.sqrt(math.fsum((least / s) ** 2 for s in each)))


def epsilon(
    history: History,
    delta: float,
    accountant: Accountant = "best",
    conversion: Conversion = "balle",
) -> float:
    """Return a proven upper bound on the ε of the whole history at δ; 0.0 for an empty one.

    history: event -> how often, >= 0. delta: in (0, 1). accountant: "pld", tight; "rdp"; "best",
    the smaller of the two. conversion: RDP to (ε, δ); "mironov" keeps to the papers' whole orders
    2..64. inf says that no bound was found. Raises InputError.
    """
    check.fraction(delta=delta)
    return _epsilon(_terms(history), delta, _known(accountant), conversion)


def _terms(history: History) -> tuple[pld.Term, ...]:
    """The history in one canonical order, without what never happened: a key for the caches."""
    return tuple(
        (float(event.q), float(event.sigma), check.natural(count=count))
        for event, count in sorted(history.items())
        if count != 0
    )


def _known(accountant: Accountant) -> Accountant:
    if accountant not in ("best", "pld", "rdp"):
        raise InputError(f"accountant is {accountant!r}: expected 'best', 'pld' or 'rdp'")
    return accountant


@lru_cache(maxsize=65536)
def _epsilon(
    terms: tuple[pld.Term, ...], delta: float, accountant: Accountant, conversion: Conversion
) -> float:
    by_rdp = _rdp_epsilon(terms, delta, conversion) if accountant != "pld" else math.inf
    by_pld = pld.epsilon(terms, delta) if accountant != "rdp" else math.inf
    return min(by_rdp, by_pld)


def _rdp_epsilon(terms: tuple[pld.Term, ...], delta: float, conversion: Conversion) -> float:
    if not terms:
        return 0.0
    orders = rdp.PAPER_ORDERS if conversion == "mironov" else rdp.ORDERS
    total = np.zeros(len(orders))
    for q, sigma, count in terms:
        total += count * rdp.renyi(q, sigma, orders)
    return rdp.to_epsilon(total, delta, conversion, orders)


def quick_epsilon(
    history: History,
    delta: float,
    accountant: Accountant = "best",
    conversion: Conversion = "balle",
) -> float:
    """Return nearly what `epsilon` returns, an upper bound too, in a tenth of the time.

    For searches, whose answer `epsilon` then checks: theory.running stands in for dp-accounting.
    inf also where δ is too small for it. Arguments and errors as of `epsilon`.
    """
    check.fraction(delta=delta)
    terms = _terms(history)
    by_rdp = _rdp_epsilon(terms, delta, conversion) if _known(accountant) != "pld" else math.inf
    if accountant == "rdp" or not terms:
        return by_rdp if terms else 0.0
    if all(q == 1 for q, _, _ in terms):
        # One Gaussian, in closed form: no search is needed for it.
        return min(by_rdp, pld.epsilon(terms, delta))
    return min(by_rdp, *running.epsilons([terms], delta, pld.FINENESS))


class RunningEpsilon:
    """An upper bound on ε of a history on its way to a plan: microseconds a call, and never falls.

    planned: what the history may grow to; there the bound is `epsilon(planned)`. On the way, by
    "pld" and "best", it is the ε of a history with every count at most 2^(1/16) times as large,
    which theory.running finds less than 1.5 % above PLD (δ >= 1e-9); by "rdp" it is `epsilon`.
    A history that is not part of its plan is priced by itself. Raises InputError.

    >>> after = RunningEpsilon({SampledGaussian(0.015, 1.1): 2000}, delta=1e-5)
    >>> round(after({SampledGaussian(0.015, 1.1): 317}), 2)
    1.38
    """

    def __init__(self, planned: History, delta: float, accountant: Accountant = "best") -> None:
        self._delta, self._accountant = check.fraction(delta=delta), _known(accountant)
        self._counts: dict[SampledGaussian, list[int]] = {}
        if accountant != "rdp":
            counts, self._bounds = _on_the_way(_terms(planned), delta, accountant)
            self._counts = {SampledGaussian(q, s): column for (q, s), column in counts.items()}

    def __call__(self, history: History) -> float:
        """Return the bound for this history; 0.0 for an empty one."""
        place = -1
        for event, count in history.items():
            if check.natural(count=count):
                column = self._counts.get(event, ())
                place = max(place, bisect_left(column, count))
                if place >= len(column):
                    return _epsilon(_terms(history), self._delta, self._accountant, "balle")
        return self._bounds[place] if place >= 0 else 0.0


@lru_cache(maxsize=4096)
def _on_the_way(
    planned: tuple[pld.Term, ...], delta: float, accountant: Accountant
) -> tuple[dict[tuple[float, float], list[int]], list[float]]:
    """Return histories on the way to a plan, as each event's rising counts, and a bound on each."""
    octaves = max((math.log2(count) for *_, count in planned), default=0.0)
    shares = 2 ** (-np.arange(1, 1 + _COUNTS_PER_OCTAVE * octaves) / _COUNTS_PER_OCTAVE)
    smaller = {tuple((q, s, math.ceil(share * t)) for q, s, t in planned) for share in shares}
    path = sorted(smaller - {planned})
    bounds = running.epsilons(path, delta)
    if accountant == "best":
        by_rdp = (_rdp_epsilon(terms, delta, "balle") for terms in path)
        bounds = [min(each) for each in zip(bounds, by_rdp, strict=True)]
    bounds.append(_epsilon(planned, delta, accountant, "balle"))
    # What bounds a longer history bounds the shorter ones.
    bounds = list(accumulate(reversed(bounds), min))[::-1]
    path.append(planned)
    counts = {(q, s): [terms[i][2] for terms in path] for i, (q, s, _) in enumerate(planned)}
    return counts, bounds


def max_steps(
    event: SampledGaussian,
    budget: Budget,
    accountant: Accountant = "best",
    conversion: Conversion = "balle",
    spent: History | None = None,
) -> int:
    """Return the largest T such that T times the event, after what is spent, stay in the budget.

    epsilon(T) <= budget.epsilon < epsilon(T + 1) holds exactly; 0 where not even one fits.
    The PLD answers for up to 10 million releases, and T beyond 2^53 is cut off there.
    """
    before = dict(spent or {})

    def fits(cost: Callable[..., float], steps: int) -> bool:
        history = before | {event: before.get(event, 0) + steps}
        return cost(history, budget.delta, accountant, conversion) <= budget.epsilon

    near = 0
    if accountant == "best":
        # RDP costs microseconds and is never above the answer: start there.
        near = max_steps(event, budget, "rdp", conversion, before)
    if accountant != "rdp":
        near = _last(partial(fits, quick_epsilon), near, max(1, near // 2))
    return _last(partial(fits, epsilon), near)


def _last(fits: Callable[[int], bool], near: int, stride: int = 1) -> int:
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
    power = math.ceil(_RATES_PER_OCTAVE * math.log2(q) - 1e-9)
    return min(1.0, max(q, 2 ** (power / _RATES_PER_OCTAVE)))
