"""ε of a person's records together: up to k at one site, each sampled independently.

A release with all of a person's records is as hard to distinguish from one without them as

    P = Σ_{i=0..k} B(i) N(i, σ²)    and    Q = N(0, σ²),    B = Binomial(k, q),

or the same in the other order (arXiv 2310.15526 has it for one vector; arXiv 2407.07737).

Why no release is easier to distinguish: fix the others' batch. With the records S of the person in
the batch the sum moves by v_S, ‖v_S‖ <= |S|. Under Q the likelihood ratio is Σ_S p_S e^(X_S - V/2),
with X_S = <x, v_S>/σ normal, V its variance and Cov(X_S, X_T) = <v_S, v_T>/σ² <= |S||T|/σ². By
Kahane's inequality (Sur le chaos multiplicatif, 1985: larger covariances only raise E F(Σ p e^(X -
V/2)) for convex F) it is dominated by the one with X_S = |S| z/σ, which is the ratio above.
F(L) = (L - γ)+ and (1 - γL)+ are the two directions. Channels that are chosen one after the other
follow by induction from the last one, with σ_joint; the others' batch by convexity; the run by
composition. More records, a larger q and a smaller σ only raise covariances too.

The pair's loss is put on a grid and composed as in privacy.accounting.pld, which adds at most 0.1 %
to ε if the grid is fine. The pair 1 - (1-q)^k, σ/k of all records at once also bounds ε (Kahane
again), and the smaller bound is used. At q = 1 that pair is exact: one Gaussian.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedpact.common import check
from fedpact.common.errors import InputError
from fedpact.privacy.accounting import pld
from fedpact.privacy.accounting.accountant import MOST_RELEASES, History, epsilon
from fedpact.privacy.accounting.apart import separable
from fedpact.privacy.accounting.pld import (
    FINENESS,
    OUTSIDE,
    LossMasses,
    Term,
    cell_masses,
    compose,
    connect_dots,
    ends,
    round_up_term,
    step_within,
)

FloatArray = NDArray[np.float64]

MOST_RECORDS: Final = 1000
"""The largest k: beyond it the mixture is no longer written out."""

PERSON_RECORDS: Final = (2, 3, 5, 10)
"""The numbers of records per person for which ε is always stated."""

_NODES: Final = 4096  # of what is only looked at to choose a grid
# Of one release's loss: where the digits of a sum of the mixture's parts end.
_PLACED: Final = 2.0**-44
_DIGITS: Final = 60
_STEPS: Final = 60


def epsilon_per_person(history: History, delta: float, records: int) -> float:
    """Return a proven upper bound on the history's ε at δ for a person, all records together.

    history: event -> count >= 0. delta: in (0, 1). records: k in 1, ..., 1000, the most that a
    person has at the site, each sampled independently; for a person at several sites, ε adds up.
    Takes about 0.1 s. Infinite if no bound was found. Raises InputError.

    >>> from fedpact.privacy.accounting.accountant import SampledGaussian
    >>> events = {SampledGaussian(q=0.05, sigma=2.8391): 200}
    >>> [round(epsilon_per_person(events, 1e-5, k), 2) for k in (1, 2, 5, 10)]
    [1.0, 2.16, 6.19, 14.5]
    """
    check.fraction(delta=delta)
    if not 1 <= check.count(records=records) <= MOST_RECORDS:
        raise InputError(
            f"records of a person is {records!r}: expected a whole number from 1 to {MOST_RECORDS}"
        )
    if records == 1:
        return epsilon(history, delta)
    if any(count > MOST_RELEASES for count in history.values()):
        return math.inf
    terms = ((e.q, e.sigma, check.natural(count=n)) for e, n in sorted(history.items()))
    return _epsilon(tuple(term for term in terms if term[2]), delta, records)


@lru_cache(maxsize=4096)
@separable
def _epsilon(terms: tuple[Term, ...], delta: float, records: int) -> float:
    # The fallback, an upper bound too: all records of the person are in one batch or none is.
    at_once = [all_at_once(*term, records) for term in terms]
    if not terms or all(q == 1 for q, *_ in terms):
        return pld.pld_epsilon(at_once, delta)
    if pld.participation_probability(at_once) <= delta:
        return 0.0
    found = math.inf
    with suppress(ArithmeticError, ValueError, MemoryError), np.errstate(all="ignore"):
        found = _by_grid([round_up_term(*term) for term in terms], delta, records)
    return min(found, pld.pld_epsilon(at_once, delta))


def all_at_once(q: float, sigma: float, count: int, records: int) -> Term:
    """Return a term that costs at least as much: a batch with any of the records has all of them.

    The rate is rounded up and σ down.
    """
    rate = q if records == 1 or q == 1 else -math.expm1(records * math.log1p(-q)) * (1 + 2.0**-45)
    return min(1.0, rate), sigma / records * (1 - 2.0**-52), count


def _by_grid(terms: Sequence[Term], delta: float, records: int) -> float:
    """Return ε by a grid; inf if none fits. terms: as of `round_up_term`."""
    counts = [t for *_, t in terms]
    count, outside = sum(counts), OUTSIDE * delta
    # δ less what the window leaves out, and what `_PLACED` may be off by in each release's mass.
    usable = (delta - outside) * (1 - count * _PLACED)
    if not usable > 0:
        return math.inf
    mixtures = [_Mixture(q, s, records, outside / count) for q, s, _ in terms]
    spread = math.sqrt(sum(t * m.spread**2 for t, m in zip(counts, mixtures, strict=True)))
    reach = max(m.range[1] - m.range[0] for m in mixtures)
    step = step_within(spread / math.sqrt(count) / FINENESS, reach, spread)
    pairs = [mixture.pair(step) for mixture in mixtures]
    found = max(
        compose([pair[i] for *pair, _ in pairs], counts, step, spread, outside, usable)
        for i in (0, 1)
    )
    # A loss that stands beside its point of the grid is as much too cheap, in each release.
    misplaced = math.fsum(t * off for t, (*_, off) in zip(counts, pairs, strict=True))
    found += misplaced
    return found if found >= 0 else math.inf


class _Mixture:
    """Σ B(i) N(i, σ²) beside N(0, σ²). share: the mass that may lie beyond either end.

    spread: about the deviation of the loss log(P/Q), the smaller one of both orders. range: the
    losses at the ends of the outcomes that are looked at.
    """

    def __init__(self, q: float, sigma: float, records: int, share: float) -> None:
        self._weights, self._sigma = _binomial(q, records), sigma
        # Φ(-z) <= exp(-z²/2) / 2: beyond this many deviations lies less than `share`.
        reach = math.sqrt(max(1.0, -2 * math.log(share)))
        x: FloatArray = np.linspace(-reach * sigma, records + reach * sigma, _NODES)
        beyond = sum(
            b * np.exp(-0.5 * (np.maximum(0.0, x - i) / sigma) ** 2) / 2
            for i, b in enumerate(self._weights)
            if b
        )
        # The mixture's own upper tail is far shorter than that of its last part where q is small.
        last = max(1, int(np.argmax(beyond <= share)))
        nodes: FloatArray = np.linspace(float(x[0]), float(x[last]), _NODES)
        self._nodes = nodes
        none = self._weights[0]
        loss = np.logaddexp(math.log(none) if none else -np.inf, self._excess(self._nodes)[0])
        under_q = np.exp(-0.5 * (self._nodes / sigma) ** 2)
        deviations = list[float]()
        for density in (under_q, under_q * np.exp(loss)):
            density = density / density.sum()
            mean = float(density @ loss)
            deviations.append(math.sqrt(float(density @ (loss - mean) ** 2)))
        # The loss rises in x, so its ends are those of the outcomes.
        self.spread, self.range = min(deviations), (float(loss[0]), float(loss[-1]))

    def _excess(self, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return h = log Σ_{i>=1} B(i) e^((2ix - i²)/(2σ²)) and its slope, at outcomes x.

        P/Q = B(0) + e^h. The slope lies between 1/σ² and k/σ².
        """
        total: FloatArray = np.full(x.shape, -np.inf)
        slope: FloatArray = np.zeros(x.shape)
        for i, b in enumerate(self._weights):
            if not i or not b:
                continue
            part = math.log(b) + i * (2 * x - i) / (2 * self._sigma**2)
            # Parts that are far apart would overflow as numbers; their logarithms add.
            summed = np.logaddexp(total, part)
            slope = slope * np.exp(total - summed) + i * np.exp(part - summed)
            total = summed
        return total, slope / self._sigma**2

    def pair(self, step: float) -> tuple[LossMasses, LossMasses, float]:
        """Return the losses of one release, where the records are removed and where they are added.

        And by how much a loss may lie beside its point of the grid.
        """
        first, last = ends(*self.range, step)
        grid = np.arange(first, last + 1, dtype=np.float64) * step
        at, off = self._outcomes(grid)
        without = cell_masses(at / self._sigma)
        with_it = self._weights[0] * without
        for i, b in enumerate(self._weights[1:], 1):
            if b:
                with_it += b * cell_masses((at - i) / self._sigma)
        removed = connect_dots(with_it, without, grid, first)
        added = connect_dots(without[:, ::-1], with_it[:, ::-1], -grid[::-1], -last)
        return removed, added, off

    def _outcomes(self, grid: FloatArray) -> tuple[FloatArray, float]:
        """Return the outcomes with these losses, and by how much a loss is missed.

        By Newton's method on the convex h, which begins above its root from the second step on.
        """
        none = self._weights[0]
        excess = np.maximum(
            np.where(grid < -1, np.exp(grid) - none, np.expm1(grid) + (1 - none)), 0
        )
        aim = np.log(excess)
        # No outcome has a loss of log B(0) or less: such a point has all mass above it.
        x = np.full(grid.shape, -np.inf)
        open_ = np.isfinite(aim)
        guess = np.interp(aim[open_], self._excess(self._nodes)[0], self._nodes)
        for _ in range(_STEPS):
            h, slope = self._excess(guess)
            moved = (h - aim[open_]) / slope
            guess = guess - moved
            if not float(np.max(np.abs(moved), initial=0.0)) > 1e-13 * (1 + abs(self._nodes[-1])):
                break
        x[open_] = guess
        h, _ = self._excess(guess)
        # What Newton has left, as a part of P/Q: so far the loss may lie beside its point.
        missed = np.abs(np.exp(h - grid[open_]) - np.exp(aim[open_] - grid[open_]))
        return x, float(np.max(missed, initial=0.0)) + _PLACED * (1 + float(np.abs(grid).max()))


@lru_cache(maxsize=1024)
def _binomial(q: float, records: int) -> tuple[float, ...]:
    """Return the chances of i = 0, ..., k successes of k, each rounded once."""
    with localcontext() as context:
        context.prec = _DIGITS
        # q as the float is, not as it is written: the mixture is that of the rate that is sampled.
        p = Decimal(q)
        return tuple(
            float(math.comb(records, i) * p**i * (1 - p) ** (records - i))
            if q < 1
            else float(i == records)
            for i in range(records + 1)
        )
