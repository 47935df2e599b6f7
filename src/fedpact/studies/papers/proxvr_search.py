"""FedProxVR's bound on convergence, and a certified search for its best parameters.

Each record's loss is L-smooth, each site's loss F_n is λ-weakly convex, its gradient no further
from the global one than σ_n times that one's length; σ̄² = Σ p_n σ_n². A site solves
F_n + (μ/2)‖w - w̄‖² with the step 1/(βL) in τ iterations, down to ‖∇J_n‖ <= θ‖∇F_n(w̄)‖; μ~ = μ -
λ.
Lemma 1 holds for β > 3 and

    3(β²L² + μ²)/(θ² μ~ L (β - 3)) <= τ <= (5β² - 4β)/8              SARAH                     (13)
                                      τ <= (5β² - 4β)/(8a) - 2       SVRG, a - 4 >= 4 sqrt(a(τ+1))

The least such a is 4(sqrt(τ+1) + sqrt(τ+2))². Theorem 1: the mean squared gradient after T rounds
is at most Δ(w⁰)/(ΘT), as far as Θ > 0,

    Θ = (1/μ)[1 - θ sqrt(2(1+σ̄²)) - (2L/μ~) sqrt((1+θ²)(1+σ̄²)) - (2Lμ/μ~²)(1+θ²)(1+σ̄²)].

What minimises the training time T(d_com + d_cmp τ): `proxvr_search`.

The time is Δ(w⁰)/ε · d_com · (1 + γτ)/Θ, γ = d_cmp/d_com. With L = 1 (μ and λ in its units),
S = 1 + σ̄², x = μ - λ, b = β - 3 and θ² = 3(β² + μ²)/(x b τ) from Lemma 1, the objective is

    (1 + γτ) μ / (1 - P),   P = θ sqrt(2S) + (2/x) sqrt((1+θ²)S) + (2μ/x²)(1+θ²)S,   P < 1.

At a given τ it has one minimum, which bisection finds: μ, β, β² + μ² and so θ² are posynomials of
x and b, hence P is log-convex in (log x, log b), and so is what remains of it after minimising
over log b in an interval; then log μ - log(1 - P) is convex in log x. The best β at given μ, τ is
3 + sqrt(9 + μ²), or the end of its interval nearest to that.

At a given μ, θ falls as τ grows: the least β of Lemma 1, β(τ) = (4 + sqrt(16 + 20c))/10 with
5β² - 4β = c(τ), grows with τ while β(τ)/τ falls, as c/τ² does, so (β² + μ²)/(bτ) falls, at β(τ) and
at the best β >= β(τ). Hence the least μ/(1 - P) over μ, M(τ), falls with τ, and on [t, t'] nothing
is below (1 + γt) M(t'). Branch and bound over τ does the rest, exact at t = t'.

All of it happens in a compact box that holds every optimum: P < 1 needs x > 2(S + sqrt S), P > 0
makes μ less than the objective, and (1 + γτ) times the least value at θ = 0 is below it, too.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from fedpact.common import check
from fedpact.common.errors import InputError

Solver = Literal["sarah", "svrg"]
"""The inner loops that Lemma 1 covers."""


@dataclass(frozen=True)
class Losses:
    """Assumption 1: L > 0, 0 <= λ <= L, σ̄² >= 0. Raises InputError.

    An L-smooth loss is L-weakly convex, so a larger λ says nothing.
    """

    smoothness: float
    weak_convexity: float
    heterogeneity: float

    def __post_init__(self) -> None:
        check.positive(smoothness=self.smoothness)
        check.non_negative(weak_convexity=self.weak_convexity)
        check.non_negative(heterogeneity=self.heterogeneity)
        if not self.weak_convexity <= self.smoothness:
            raise InputError(
                f"weak_convexity is {self.weak_convexity!r} and smoothness {self.smoothness!r}: "
                "expected weak_convexity <= smoothness, which every smooth loss satisfies"
            )

    def excess(self, mu: float) -> float:
        """Return μ~ = μ - λ, the strong convexity of a site's problem. Raises unless it is > 0."""
        if not check.positive(mu=mu) > self.weak_convexity:
            raise InputError(
                f"mu is {mu!r}: expected mu > {self.weak_convexity!r}, the weak convexity, so that "
                "each site's problem is strongly convex"
            )
        return mu - self.weak_convexity


def least_a(tau: float) -> float:
    """Return 4(sqrt(τ+1) + sqrt(τ+2))², the least a of SVRG's condition. τ >= 0."""
    check.non_negative(tau=tau)
    return 4 * (math.sqrt(tau + 1) + math.sqrt(tau + 2)) ** 2


def most_tau(beta: float, solver: Solver = "sarah") -> int | None:
    """Return the most local iterations that Lemma 1 allows at β > 3, None if not even 0.

    >>> [most_tau(beta) for beta in (5, 10, 20)], [most_tau(beta, "svrg") for beta in (5, 10, 20)]
    ([13, 57, 240], [None, 0, 2])
    """
    level = 5 * _beta(beta) ** 2 - 4 * beta
    if solver == "sarah":
        return math.floor(level / 8)
    # a >= 16(τ + 1), so (τ + 1)² <= (τ + 1)(τ + 2) <= level/128 bounds the search.
    tau = math.floor(math.sqrt(level / 128))
    while tau >= 0 and not 8 * least_a(tau) * (tau + 2) <= level:
        tau -= 1
    return tau if tau >= 0 else None


def least_beta(tau: float, solver: Solver = "sarah") -> float:
    """Return the least β >= 3 whose upper bound in Lemma 1 is τ >= 0 or more."""
    check.non_negative(tau=tau)
    level = 8 * tau if solver == "sarah" else 8 * least_a(tau) * (tau + 2)
    return max(3.0, (4 + math.sqrt(16 + 20 * level)) / 10)


def least_tau(losses: Losses, mu: float, beta: float, theta: float) -> float:
    """Return the lower bound of τ in Lemma 1, the same for SARAH and SVRG. Raises InputError.

    mu: μ > λ. beta: β > 3. theta: local accuracy θ, 0 < θ < 1.
    """
    return _product(losses, mu, beta) / check.fraction(theta=theta) ** 2


def interval(
    losses: Losses, mu: float, beta: float, theta: float, solver: Solver = "sarah"
) -> range | None:
    """Return the local iterations that Lemma 1 allows, None where there are none.

    >>> interval(Losses(1.0, 0.5, 1.0), mu=22.4, beta=19.4, theta=0.181)
    range(224, 226)
    >>> interval(Losses(1.0, 0.5, 1.0), mu=22.4, beta=19.4, theta=0.181, solver="svrg") is None
    True
    """
    least = math.ceil(least_tau(losses, mu, beta, theta))
    most = most_tau(beta, solver)
    return range(least, most + 1) if most is not None and least <= most else None


def local_accuracy(losses: Losses, mu: float, beta: float, tau: float) -> float:
    """Return θ, the least that Lemma 1 proves after τ > 0 iterations; 1 or more is no progress."""
    return math.sqrt(_product(losses, mu, beta) / check.positive(tau=tau))


def decrease(losses: Losses, mu: float, theta: float) -> float:
    """Return Θ of Theorem 1, 1/L times a number; <= 0 where the theorem says nothing.

    mu: μ > λ. theta: θ >= 0. Raises InputError.
    """
    # In units of L, so that no square overflows.
    x, spread = losses.excess(mu) / losses.smoothness, 1 + losses.heterogeneity
    inexact = (1 + check.non_negative(theta=theta) ** 2) * spread
    lost = theta * math.sqrt(2 * spread)
    lost += 2 / x * math.sqrt(inexact)
    lost += 2 * (mu / losses.smoothness / x) / x * inexact
    return (1 - lost) / mu


def _beta(beta: float) -> float:
    if not check.finite(beta=beta) > 3:
        raise InputError(f"beta is {beta!r}: expected a number with beta > 3, as Lemma 1 needs")
    return beta


def _product(losses: Losses, mu: float, beta: float) -> float:
    """θ²τ where Lemma 1's lower bound is reached: 3(β²L² + μ²)/(μ~ L (β - 3))."""
    x, m = losses.excess(mu) / losses.smoothness, mu / losses.smoothness
    return 3 * (_beta(beta) ** 2 + m**2) / (x * (beta - 3))


Vector = NDArray[np.float64]

# What float64 may lose in a value of the objective; taken off the certified bound.
_ROUNDING: Final = 1e-9
_HALVINGS: Final = 60
_LEVELS: Final = 60


@dataclass(frozen=True)
class Parameters:
    """What FedProxVR runs with, and what Lemma 1 and Theorem 1 then promise.

    objective: (1 + γτ)/Θ, rounds times their cost in units of Δ(w⁰) d_com/ε. tau is an int where
    the search was over whole numbers.
    """

    mu: float
    beta: float
    tau: float
    theta: float
    decrease: float
    objective: float


@dataclass(frozen=True)
class Optimum(Parameters):
    """The best parameters found, and what is proven: no others have an objective below `lower`.

    mu_range, beta_range, tau_range: a box that holds every optimum. cells: how many intervals of τ
    were bounded.
    """

    lower: float
    mu_range: tuple[float, float]
    beta_range: tuple[float, float]
    tau_range: tuple[float, float]
    cells: int

    @property
    def gap(self) -> float:
        """objective/lower - 1 >= 0: by how much, at most, the best is better."""
        return self.objective / self.lower - 1


@dataclass(frozen=True)
class _Search:
    """The objective in units of L. tight: τ at its upper bound, so that β follows from it."""

    weak: float
    spread: float
    gamma: float
    solver: Solver
    tight: bool

    @property
    def least_x(self) -> float:
        return 2 * (self.spread + math.sqrt(self.spread))

    def betas(self, taus: Vector) -> Vector:
        return np.array([least_beta(float(tau), self.solver) for tau in taus])

    def best_beta(self, mu: Vector, low: Vector, high: Vector) -> Vector:
        return np.clip(3 + np.sqrt(9 + mu**2), low, high)

    def lost(self, x: Vector, tau: Vector, low: Vector, high: Vector) -> tuple[Vector, Vector]:
        """P at the best β of [low, high], and its derivative by log x."""
        mu = x + self.weak
        beta = self.best_beta(mu, low, high)
        squares = beta**2 + mu**2
        theta2 = 3 * squares / (x * (beta - 3) * tau)
        growth = 2 * mu * x / squares - 1  # of log θ²; β does not matter to first order
        inexact = growth * theta2 / (1 + theta2)
        parts = (
            (np.sqrt(2 * self.spread * theta2), growth / 2),
            (2 / x * np.sqrt((1 + theta2) * self.spread), inexact / 2 - 1),
            (2 * mu / x**2 * (1 + theta2) * self.spread, inexact + x / mu - 2),
        )
        return sum(p for p, _ in parts), sum(p * d for p, d in parts)  # type: ignore[return-value]

    def least(self, tau: Vector, low: Vector, high: Vector) -> tuple[Vector, Vector]:
        """The minimum over μ of μ/(1 - P), inf where there is none, and its μ."""
        left = np.full(tau.shape, math.log(self.least_x))
        right = left + 60
        with np.errstate(all="ignore"):  # β = 3, or a θ beyond float64: P is inf, and so is this
            for _ in range(_HALVINGS):
                middle = (left + right) / 2
                x = np.exp(middle)
                lost, slope = self.lost(x, tau, low, high)
                # Where P >= 1, towards the minimum of P.
                rising = np.where(lost < 1, x / (x + self.weak) * (1 - lost) + slope, slope) > 0
                left, right = np.where(rising, left, middle), np.where(rising, middle, right)
            x = np.exp(left)
            lost, _ = self.lost(x, tau, low, high)
            mu = x + self.weak
            return np.where(lost < 1, mu / (1 - lost), np.inf), mu

    def at(self, taus: Vector) -> tuple[Vector, Vector]:
        """M(τ), the least μ/(1 - P) at each τ, whatever γ, and its μ."""
        low = self.betas(taus)
        return self.least(taus, low, low if self.tight else np.full(taus.shape, np.inf))

    def best(self, taus: Vector, least: Vector) -> tuple[float, float]:
        """The least (objective, τ) of some τ with their M(τ)."""
        values = (1 + self.gamma * taus) * least
        return float(values.min()), float(taus[values.argmin()])


def minimise(
    losses: Losses,
    gamma: float,
    solver: Solver = "sarah",
    *,
    tight: bool = True,
    whole: bool = True,
    gap: float = 1e-6,
) -> Optimum:
    """Return the μ, β, τ of least training time (1 + γτ)/Θ, with a certificate.

    gamma: γ = d_cmp/d_com > 0. tight: τ at Lemma 1's upper bound, the paper's (15), (16) and (23);
    else any β and τ that Lemma 1 allows, which is never worse (docs/notes/errata.md, V4). whole: τ
    an integer, θ that of the integer; else a real number, as in the paper. gap: relative, at which
    the search ends. Raises InputError.

    >>> best = minimise(Losses(1.0, 0.5, 1.0), gamma=0.01)
    >>> best.tau, round(best.mu, 1), round(best.beta, 1), round(best.objective, 1)
    (226, 22.3, 19.4, 231.3)
    """
    check.fraction(gap=gap)
    search = _search(losses, gamma, solver, tight)
    best, ends = _box(search, whole)
    best, lower, cells = _branch(search, best, ends, whole, gap)
    tau = int(best[1]) if whole else best[1]
    found = _parameters(losses, search, tau, float(search.at(np.array([best[1]]))[1][0]))
    smooth = losses.smoothness
    largest = found.objective / (1 + gamma * ends[0])
    betas = [float(b) for b in search.betas(np.array(ends))]
    if not tight:
        betas[1] = max(betas[1], 3 + math.sqrt(9 + (largest / smooth) ** 2))
    return Optimum(
        **asdict(found),
        lower=lower * smooth * (1 - _ROUNDING),
        mu_range=(losses.weak_convexity + search.least_x * smooth, largest),
        beta_range=(betas[0], betas[1]),
        tau_range=ends,
        cells=cells,
    )


def path(losses: Losses, gammas: Sequence[float], solver: Solver = "sarah") -> list[Parameters]:
    """Return the optimum of (23) for each γ > 0, on a grid of τ of 0.1 %: for drawing.

    What is best over μ at a given τ does not depend on γ, so one pass serves all. No certificate.
    """
    search = _search(losses, min(gammas), solver, tight=True)
    _, (first, last) = _box(search, whole=False)
    taus = np.geomspace(first, last, math.ceil(math.log(last / first) / 0.001) + 1)
    least, mus = search.at(taus)
    found: list[Parameters] = []
    for gamma in gammas:
        here = replace(search, gamma=check.positive(gamma=gamma))
        best = int(((1 + gamma * taus) * least).argmin())
        found.append(_parameters(losses, here, float(taus[best]), float(mus[best])))
    return found


def _search(losses: Losses, gamma: float, solver: Solver, tight: bool) -> _Search:
    check.positive(gamma=gamma)
    if solver not in ("sarah", "svrg"):
        raise InputError(f"solver is {solver!r}: expected sarah or svrg, which Lemma 1 covers")
    weak = losses.weak_convexity / losses.smoothness
    return _Search(weak, 1 + losses.heterogeneity, gamma, solver, tight)


def _box(search: _Search, whole: bool) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return some (objective, τ), and the least and largest τ that can be better."""
    first = 33 / 8 if search.tight and search.solver == "sarah" else 1.0  # there β is 3
    first = float(math.ceil(first)) if whole else first
    starts: Vector = np.ldexp(first, np.arange(64))
    best = search.best(starts, search.at(starts)[0])
    if not math.isfinite(best[0]):
        raise InputError(
            f"heterogeneity is {search.spread - 1!r}: no μ, β and τ within float64 have Θ > 0; "
            "expected a smaller one"
        )
    everywhere = np.array([np.inf])
    floor, _ = search.least(everywhere, np.array([3.0]), everywhere)
    last = max(first, (best[0] / float(floor[0]) - 1) / search.gamma)
    return best, (first, float(math.floor(last)) if whole else last)


def _branch(
    search: _Search,
    best: tuple[float, float],
    ends: tuple[float, float],
    whole: bool,
    gap: float,
) -> tuple[tuple[float, float], float, int]:
    """Return the best (objective, τ), what bounds every objective from below, and the cells."""
    edges = np.geomspace(*ends, 33)
    if whole:
        edges = np.unique(np.round(edges))
    # The first edge is an interval of its own.
    left, right = np.append(edges[0], edges[:-1]), edges
    at_right, _ = search.at(right)
    best = min(best, search.best(right, at_right))
    lower, cells = math.inf, 0
    for level in range(_LEVELS):
        bounds = (1 + search.gamma * left) * at_right
        done = (bounds >= best[0] * (1 - gap)) | (left == right) | (level == _LEVELS - 1)
        lower = min(lower, float(bounds[done].min(initial=np.inf)))
        cells += left.size
        left, right, at_right = (a[~done] for a in (left, right, at_right))
        if not left.size:
            break
        middle = np.floor(np.sqrt(left * right)) if whole else np.sqrt(left * right)
        at_middle, _ = search.at(middle)
        best = min(best, search.best(middle, at_middle))
        left, right = np.append(left, middle + whole), np.append(middle, right)
        at_right = np.append(at_middle, at_right)
    return best, min(best[0], lower), cells


def _parameters(losses: Losses, search: _Search, tau: float, mu: float) -> Parameters:
    """The parameters at τ and at μ in units of L."""
    low = search.betas(np.array([tau]))
    high = low if search.tight else np.array([np.inf])
    beta = float(search.best_beta(np.array([mu]), low, high)[0])
    mu *= losses.smoothness
    theta = local_accuracy(losses, mu, beta, tau)
    per_round = decrease(losses, mu, theta)
    return Parameters(mu, beta, tau, theta, per_round, (1 + search.gamma * tau) / per_round)
