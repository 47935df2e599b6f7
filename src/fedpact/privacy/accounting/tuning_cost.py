"""ε of tuning: the cost of many runs to an observer of all, and to an observer of the best only.

Papernot, Steinke. Hyperparameter tuning with Rényi differential privacy. arXiv 2110.03620. K runs,
each with fresh randomness and a setting drawn, with replacement, from a list fixed beforehand; the
one with the best score is shown. One run is (α, ε(α))-RDP for all orders α. Then the winner is
(λ, ε')-RDP:

    K logarithmic, P(K = k) = (1-γ)^k / (k log(1/γ)), k >= 1 (their Theorem 2 with η = 0), any α
        ε' = ε(λ) + (1 - 1/α) ε(α) + log(1/γ)/α + log E[K] / (λ - 1)

A setting that is drawn, and shown with the run, costs at each order at most as much as the most
expensive one.

This holds only if K was drawn in this way, K, the settings and all other runs stay secret, and the
score follows from the run's releases or from public numbers. A fixed number of runs has no such
bound: the best of m runs of pure ε can cost m ε. It follows from the m runs, so it costs no more
than all of them together, which is the bound against an observer of every run.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedpact.common import check
from fedpact.common.errors import InputError
from fedpact.common.format import upper
from fedpact.privacy.accounting import gaussian, rdp
from fedpact.privacy.accounting.accountant import History, SampledGaussian, epsilon

FloatArray = NDArray[np.float64]

_ORDERS: Final = np.asarray(rdp.ORDERS)
_ROUNDED: Final = 1 + 1e-12  # above the rounding of the few operations here
_MOST: Final = 1e9  # runs


@dataclass(frozen=True)
class Trials:
    """The cost of trying settings at one δ: upper bounds on ε, inf if none is found.

    runs: m, each once. one: of the most expensive run alone. every: of all m together, for an
    observer of all, and of the best of a fixed number m. winner: of the best alone, if the number
    of runs was drawn with mean m; None for successive halving, for which no such bound is proven.
    """

    runs: int
    delta: float
    one: float
    every: float
    winner: float | None


def count_trials(histories: Sequence[History], delta: float, times: int = 1) -> Trials:
    """Return the cost of runs with these histories, each `times` times.

    histories: event -> count, for each setting. delta: in (0, 1). Raises InputError: fewer than two
    runs, or invalid arguments.
    """
    runs = len(histories) * check.count(times=times)
    together = Counter[SampledGaussian]()
    for history in histories:
        for event, count in history.items():
            together[event] += check.natural(count=count) * times
    winner = winner_epsilon(histories, delta, runs)
    one = max(epsilon(history, delta) for history in histories)
    return Trials(runs, delta, one, epsilon(together, delta), winner)


def as_document(found: Trials) -> dict[str, Any]:
    """Return it as plain data, with `describe_trials`; None stands for an ε of which no bound was
    found."""

    def known(cost: float | None) -> float | None:
        return cost if cost is not None and math.isfinite(cost) else None

    return {
        "runs": found.runs,
        "delta": found.delta,
        "epsilon_of_one": known(found.one),
        "epsilon_of_every": known(found.every),
        "epsilon_of_winner": known(found.winner),
        "law": describe_law(found.runs),
        "holds_for": describe_trials(found),
    }


def describe_trials(found: Trials) -> list[str]:
    """Describe the cost of trying settings, and against whom each ε holds."""
    runs, delta = found.runs, f"at δ = {upper(found.delta)}"
    if found.winner is None:
        return [
            "Against anyone who sees any of the runs, as the server and the other sites do: ε = "
            f"{upper(found.every)} {delta} for {runs} runs together, composed. Which settings went "
            "on was chosen on the way, and all trials of an entry release the same events, so the "
            "sum is the same whatever was chosen. Against someone who sees the winner alone "
            "nothing less is proven."
        ]
    return [
        f"Whoever sees every run, as the server and the other sites do: ε = {upper(found.every)} "
        f"{delta} for {runs} runs together, composed, if their settings were fixed before the "
        f"first. The same holds for whoever sees only the best of exactly {runs}: for a number of "
        "runs that was fixed, or that is known, nothing less is proven.",
        f"Whoever sees the winner alone, where the number of runs K was drawn, with mean {runs}: "
        f"ε = {upper(found.winner)} {delta} with {describe_law(runs)}. It holds if K was drawn "
        "from that very law by somebody who keeps it secret, as the ledgers and receipts that tell "
        "it are kept; if each run had a setting drawn anew from a list fixed beforehand, and fresh "
        "randomness; if the winner was chosen by what runs released or by public records; and not "
        "against the server or another site.",
    ]


def winner_epsilon(histories: Iterable[History], delta: float, mean: float) -> float:
    """Return an upper bound on ε at δ of the best of about `mean` runs; inf if none is found.

    histories: event -> count, for each run that may be drawn; the most expensive counts at each
    order. delta: in (0, 1). mean: E[K], from 2 to 1e9. Raises InputError.

    >>> run = {SampledGaussian(0.05, 2.8391): 200}
    >>> [round(winner_epsilon([run], 1e-5, mean), 2) for mean in (3, 10, 30)]
    [1.65, 1.93, 2.12]
    """
    check.fraction(delta=delta)
    each = [_of_run(history) for history in histories]
    if not each:
        raise InputError("histories is empty: expected the releases of at least one run")
    return rdp.to_epsilon(best_of(np.maximum.reduce(each), mean), delta)


def best_of(one: FloatArray, mean: float) -> FloatArray:
    """Return RDP of the best of K runs at each of rdp.ORDERS, from that of one run, `one`.

    mean: E[K], from 2 to 1e9. Raises InputError.
    """
    if not 2 <= check.finite(runs=mean) <= _MOST:
        raise InputError(
            f"runs is {mean!r}: expected from 2 to {_MOST:g} of them; one run is not tuned"
        )
    with np.errstate(all="ignore"):
        gamma = success(mean)
        # Theorem 2 holds for every order α as well as λ, so the minimum over α is taken for all λ.
        others = float(np.nanmin((1 - 1 / _ORDERS) * one - math.log(gamma) / _ORDERS))
        found = (one + others + math.log(_mean(gamma)) / (_ORDERS - 1)) * _ROUNDED
    found[~(found >= 0)] = np.inf
    return found


def _of_run(history: History) -> FloatArray:
    total = np.zeros(len(_ORDERS))
    # RDP adds up at each order.
    for event, count in history.items():
        if check.natural(count=count):
            total = total + count * rdp.renyi(event.q, event.sigma)
    return total


def success(mean: float) -> float:
    """Return γ of the distribution with about this mean, from 2 to 1e9.

    It is rounded down to six digits, so that K can be drawn from exactly this distribution.
    """

    def excess(log_gamma: float) -> float:
        return math.log(_mean(math.exp(log_gamma))) - math.log(mean)

    # log γ is between this and 0: E[K] decreases in γ and exceeds the mean there.
    low = -2.0 * (1 + math.log(mean) + math.log1p(math.log(mean)))
    exact = math.exp(gaussian.root(excess, low, -1e-9, 1e-14))
    # Round down: a smaller γ makes K larger, and the bound too.
    return float(Context(prec=6, rounding=ROUND_FLOOR).create_decimal(exact))


def _mean(gamma: float) -> float:
    """Return E[K], which decreases in γ."""
    return (1 / gamma - 1) / -math.log(gamma)


def describe_law(mean: float) -> str:
    """Describe P(K = k) with about this E[K], for the person who draws K."""
    return f"P(K = k) = (1-γ)^k / (k log(1/γ)), k >= 1, γ = {success(mean):.6g}"
