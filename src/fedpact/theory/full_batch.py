"""Rounds, σ and step for a linear model on full batches, from public numbers alone.

With q = 1 and one step a round, of length η on the mean gradient and with momentum β, a weight ends
with noise of deviation (N records at K sites, each with noise of deviation σ C / sqrt(h))

    a = η (σ C / N) sqrt(K / h) sqrt(Σ_t g_t²),    g_t = (1 + β + ... + β^(t-1))

over t = 1 .. T (where sites have noise of their own, σ² is the mean of theirs), and clipped signals
can have moved it by η C Σ_t g_t. On rows of unit length a is the noise of what the model answers,
in the logarithm of odds, whatever the data. At a given (ε, δ) σ grows with sqrt(T), so that a moves
with the length of the way alone, not with T: more rounds make smaller steps on the same way. So
does the signal to noise of a run, and yet rounds matter: where noise goes as far as all records
together, each further round trains on the noise of those before; where it does not, short steps end
where long ones overshoot. Two numbers say how much, which experiments/recommend/fit.py fits on the
digits (1,442 images): a, and rounds for their signal.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fedpact import check
from fedpact.errors import InputError

NOISE: Final = 1.0
"""a, where the way is as long as noise allows."""
MOST_ROUNDS: Final = 100
"""Beyond, steps are short enough, and messages cost."""

LEAST_ROUNDS: Final = 3
_ROUNDS_OF_SIGNAL: Final = 4.0
_MOMENTUM: Final = 0.8
# Rounds below which momentum has no time to build up.
_MOMENTUM_FROM: Final = 20


@dataclass(frozen=True)
class FullBatch:
    """One way to spend a budget with q = 1 and τ = 1.

    learning_rate: η > 0, of the mean gradient. noise: a, see the module. useful: how many rounds
    would pay.
    """

    rounds: int
    sigma: float
    momentum: float
    learning_rate: float
    noise: float
    useful: int


def useful_rounds(snr: float) -> int:
    """Return how many rounds pay at q = 1 with this signal to noise of the whole run, > 0.

    Four times that, from 3 to 100; see the module and `signal_to_noise`.
    """
    wanted = _ROUNDS_OF_SIGNAL * check.positive(snr=snr)
    return round(min(max(wanted, LEAST_ROUNDS), MOST_ROUNDS))


def full_batch(
    sigma: Callable[[int], float],
    records: float,
    sites: int,
    rounds: int,
    *,
    weights: int = 1,
    honest: int = 1,
    clip: float = 0.2,
    length: float = 1.0,
) -> FullBatch:
    """Return the rounds, at most `rounds`, with σ, β and η that suit them.

    sigma: rounds -> the smallest σ with which a site's budget allows so many at q = 1; of sites
    with unlike budgets the root of the mean of their squares. records: N > 0, of all sites
    together. weights: d >= 1, of the model, over which noise is spread. honest: h, how many sites'
    noise protects a sum; 1 where each site's own does. clip: C > 0. length: of a record's row, > 0;
    where it is not 1, NOISE is what an answer has of it. Raises InputError for values out of range,
    and what `sigma` raises.
    """
    for name, value in (("records", records), ("clip", clip), ("length", length)):
        check.positive(**{name: value})
    for name, value in (
        *(("sites", sites), ("rounds", rounds)),
        *(("honest", honest), ("weights", weights)),
    ):
        check.count(**{name: value})
    if honest > sites:
        raise InputError(f"honest is {honest}: expected at most the {sites} sites")
    snr = signal_to_noise(1.0, sigma(1), 1, records, sites / honest, weights)
    useful = useful_rounds(snr)
    chosen = min(rounds, useful)
    # With fewer rounds than pay a step of the whole way would overshoot.
    noise = NOISE / length * math.sqrt(chosen / useful)
    momentum = _MOMENTUM if chosen >= _MOMENTUM_FROM else 0.0
    share = (noisy := sigma(chosen)) * clip / records * math.sqrt(sites / honest)
    rate = noise / (share * math.sqrt(sum(g * g for g in _gains(momentum, chosen))))
    return FullBatch(chosen, noisy, momentum, rate, noise, useful)


def _gains(momentum: float, rounds: int) -> list[float]:
    """g_1 .. g_T: what a step has moved after t rounds, over its own length."""
    found, gain = list[float](), 0.0
    for _ in range(rounds):
        gain = 1 + momentum * gain
        found.append(gain)
    return found


def signal_to_noise(
    rate: float, sigma: float, steps: int, records: float, shares: float, weights: int
) -> float:
    """Return how far clipped signals can go at most, over how far noise goes: of a whole run.

        sqrt(T) q N / (σ sqrt(K / h) sqrt(d))

    rate: q in (0, 1]. sigma: σ > 0 over C. steps: T >= 1. shares: K / h >= 1. weights: d >= 1. It
    is the ratio of the lengths of two vectors [d]; below 1 the noise is the longer one even if all
    records pull one way.
    """
    check.rate(rate=rate)
    for name, value in (("sigma", sigma), ("records", records), ("shares", shares)):
        check.positive(**{name: value})
    for name, value in (("steps", steps), ("weights", weights)):
        check.count(**{name: value})
    return math.sqrt(steps / (shares * weights)) * rate * records / sigma
