"""The number of local iterations under two budgets. ALI-DPFL, Ling et al., arXiv 2308.10457.

    s       = ξ + 2 sqrt(d) σC/B                    (Lemma 3; 1 is enough where the paper has 2)
    h(τ)    = (s/β)((1 + ηβ)^τ - 1) - ηsτ           (11) corrected: docs/errata.md, A1
            = ηs Σ_{j<τ} ((1 + ηβ)^j - 1)           the same, without a difference
    κ       = φλ²
    T(τ)    = min(iterations left, τ · rounds left)
    G(τ)    = 1/(φ T(τ) (η - ρ h(τ)/(τκ))) + sqrt(3)/3                                       (12)
    τ*      = argmin G = argmax T(τ) (η - ρ h(τ)/(τκ))

ρ, β, ξ are the loss's Lipschitz constant, its smoothness and the sites' gradient divergence, η the
step, κ the one control parameter: the larger, the more local work. κ → ∞ spends both budgets
evenly, a small κ gives τ = 1, and 1 <= τ* <= ceil(R_c/R_s), what is left of both. G ranks values
of τ. It bounds nothing: its proof drops the noise of one step and has two inequalities the wrong
way round (docs/errata.md, A2, A6).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedpact import check

Vector = NDArray[np.float64]
Allowed = Callable[[int], float]
"""T(τ): the iterations that rounds of τ local iterations still allow in all."""

MAX_LOCAL_STEPS: Final = 100
"""No round has more local iterations than this; Algorithm 2 of the paper."""


@dataclass(frozen=True)
class Drift:
    """What makes local models drift apart: η > 0, ρ >= 0, β >= 0, s >= 0. Raises InputError.

    >>> Drift(learning_rate=0.5, lipschitz=1.0, smoothness=0.1, spread=1.0).h(3).round(5).tolist()
    [0.0, 0.025, 0.07625]
    """

    learning_rate: float
    lipschitz: float
    smoothness: float
    spread: float

    def __post_init__(self) -> None:
        check.positive(learning_rate=self.learning_rate)
        check.non_negative(lipschitz=self.lipschitz)
        check.non_negative(smoothness=self.smoothness)
        check.non_negative(spread=self.spread)

    def h(self, most: int) -> Vector:
        """Return h(1), ..., h(most), each >= 0 and h(1) = 0; inf where it exceeds float64."""
        check.count(most=most)
        if self.spread == 0:
            return np.zeros(most)
        growth = math.log1p(self.learning_rate * self.smoothness)
        with np.errstate(over="ignore"):
            terms = np.expm1(growth * np.arange(most))
            return self.learning_rate * self.spread * np.cumsum(terms)

    def cost(self, most: int) -> Vector:
        """Return ρ h(τ)/τ for τ = 1, ..., most: the bracket is η less this over κ."""
        if self.lipschitz == 0:
            return np.zeros(most)
        with np.errstate(over="ignore"):
            return self.lipschitz * self.h(most) / np.arange(1, most + 1)


def gradient_spread(divergence: float, dimension: int, noise: float) -> float:
    """Return s = ξ + 2 sqrt(d) σC/B. Raises InputError.

    divergence: ξ >= 0. noise: σC/B >= 0, that of one local gradient in each of d coordinates.
    """
    check.count(dimension=dimension)
    return check.non_negative(divergence=divergence) + (
        2 * math.sqrt(dimension) * check.non_negative(noise=noise)
    )


def longest(previous: int) -> int:
    """Return τ_m = min(2 τ_prev, 100), the most local iterations of the next round."""
    return min(2 * check.count(previous=previous), MAX_LOCAL_STEPS)


def allowed_iterations(iterations_left: float, rounds_left: float | Allowed) -> Allowed:
    """Return T(τ) = min(iterations_left, τ · rounds_left).

    iterations_left: R_c >= 0, by the privacy budgets. rounds_left: R_s >= 0, by the communication
    budget; a function of τ where a round's cost depends on it, as with seconds. Raises InputError.
    """
    check.non_negative(iterations_left=iterations_left)
    if not callable(rounds_left):
        check.non_negative(rounds_left=rounds_left)

    def iterations(tau: int) -> float:
        rounds = rounds_left(tau) if callable(rounds_left) else rounds_left
        return min(iterations_left, tau * check.non_negative(rounds_left=rounds))

    return iterations


def even_split(iterations: Allowed, most: int) -> int:
    """Return the least τ <= most with the largest T(τ): ceil(R_c/R_s), or `most` if that is less.

    What is done without estimates: both budgets end together. 1 where nothing is left.

    >>> even_split(allowed_iterations(1585, 317), most=100)
    5
    >>> even_split(allowed_iterations(1585, 317), most=longest(2))
    4
    """
    return int(np.argmax(_totals(iterations, most))) + 1


def best_tau(drift: Drift, kappa: float, iterations: Allowed, most: int) -> int:
    """Return τ*, the argmax of T(τ)(η - ρ h(τ)/(τκ)) over 1..most with a positive bracket.

    kappa: κ > 0. iterations: T(τ) >= 0, see `allowed_iterations`. Of equals the least τ; 1 where
    nothing is left. Raises InputError.

    >>> drift = Drift(learning_rate=0.5, lipschitz=1.0, smoothness=0.1, spread=1.0)
    >>> [best_tau(drift, kappa, allowed_iterations(1585, 317), 100) for kappa in (0.03, 0.12,
    ... 100.0)]
    [1, 3, 5]
    """
    totals, brackets = _totals(iterations, most), _brackets(drift, kappa, most)
    return int(np.argmax(np.where(brackets > 0, totals * np.maximum(brackets, 0), 0))) + 1


def objective(drift: Drift, kappa: float, iterations: Allowed, tau: int, phi: float = 1.0) -> float:
    """Return G(τ), inf where the bracket is not positive or nothing is left. It bounds nothing.

    phi: φ = ω(1 - βη/2) > 0, which does not move the argmin at a given κ.
    """
    bracket = float(_brackets(drift, kappa, tau)[-1])
    total = check.positive(phi=phi) * float(_totals(iterations, tau)[-1]) * bracket
    return 1 / total + math.sqrt(3) / 3 if bracket > 0 and total > 0 else math.inf


def tau_by_kappa(drift: Drift, iterations: Allowed, most: int) -> list[tuple[int, float]]:
    """Return every τ that is τ* for some κ, the largest first, with the least κ that gives it.

    T(τ)(η - ρ h(τ)/(τκ)) is a line in 1/κ for each τ, and τ* the highest of them: exact, no grid.

    >>> drift = Drift(learning_rate=0.5, lipschitz=1.0, smoothness=0.1, spread=1.0)
    >>> [(tau, round(k, 3)) for tau, k in tau_by_kappa(drift, allowed_iterations(1585, 317), 100)]
    [(5, 0.216), (4, 0.158), (3, 0.103), (2, 0.05), (1, 0.0)]
    """
    totals = _totals(iterations, most)
    with np.errstate(over="ignore"):
        falls = np.where(totals > 0, drift.cost(most), 0) * totals
    # Heights at 1/κ = 0, and slopes downwards; an infinite slope is never chosen at a finite κ.
    usable = np.flatnonzero(np.isfinite(falls))
    heights, slopes = drift.learning_rate * totals[usable], falls[usable]
    at = int(np.lexsort((slopes, -heights))[0])
    found: list[tuple[int, float]] = []
    while True:
        flatter = np.flatnonzero(slopes < slopes[at])
        if not flatter.size:
            return [*found, (int(usable[at]) + 1, 0.0)]
        crossings = (heights[at] - heights[flatter]) / (slopes[at] - slopes[flatter])
        # Where several cross at once, the flattest is the highest afterwards.
        following = int(flatter[np.lexsort((slopes[flatter], crossings))[0]])
        first = float(crossings.min())
        if first > 0:
            found.append((int(usable[at]) + 1, 1 / first))
        at = following


def _totals(iterations: Allowed, most: int) -> Vector:
    check.count(most=most)
    return np.array([check.non_negative(iterations=iterations(t)) for t in range(1, most + 1)])


def _brackets(drift: Drift, kappa: float, most: int) -> Vector:
    check.positive(kappa=kappa)
    with np.errstate(over="ignore"):
        return drift.learning_rate - drift.cost(most) / kappa
