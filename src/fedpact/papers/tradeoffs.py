"""LDP FedSGD's trade-offs: noise, utility and transmission rate of clients with their own budgets.

d coordinates, clip C, gradients bounded by G, loss μ-smooth and λ-strongly convex, step
η_t = G/(Cλt), T rounds; client k has N_k records, rate q_k and noise of variance C²σ_k² a
coordinate on its clipped batch mean. Rates are in nats a client and round.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from fedpact import check
from fedpact.errors import InputError
from fedpact.papers.composition import (
    OldBound,
    exact_noise,
    unconditional_noise,
    violations,
)
from fedpact.theory.accounting import Accountant, Budget, SampledGaussian
from fedpact.theory.accounting import epsilon as epsilon_of


@dataclass(frozen=True)
class Problem:
    """The numbers of the paper's example. Raises InputError, also for C > G."""

    dimension: int = 10_000
    clients: int = 100
    gradient_bound: float = 5.0
    clip: float = 1.0
    smoothness: float = 1.0
    convexity: float = 1.0
    q: float = 1e-3
    delta: float = 1e-4

    def __post_init__(self) -> None:
        check.count(dimension=self.dimension)
        check.count(clients=self.clients)
        check.positive(smoothness=self.smoothness)
        check.positive(convexity=self.convexity)
        check.rate(q=self.q)
        check.fraction(delta=self.delta)
        check.positive(clip=self.clip)
        check.positive(gradient_bound=self.gradient_bound)
        if not self.clip <= self.gradient_bound:
            raise InputError(
                f"clip is {self.clip!r} and gradient_bound is {self.gradient_bound!r}: the utility "
                "bound needs C <= G; expected a smaller clip"
            )


def utility_bound(problem: Problem, variance: float, steps: int) -> float:
    """Return U(T) = λ²T/(μG²) · min(1/2, 1/(1 + dσ²)), a lower bound on 1/(E loss - optimum).

    variance: σ² of the aggregate, a coordinate, in units of C² (`aggregate_variance` at C = 1).
    """
    check.non_negative(variance=variance)
    check.count(steps=steps)
    scale = problem.convexity**2 * steps / (problem.smoothness * problem.gradient_bound**2)
    return scale * min(0.5, 1 / (1 + problem.dimension * variance))


def aggregate_variance(
    sizes: Sequence[float], rates: Sequence[float], sigmas: Sequence[float], clip: float = 1.0
) -> float:
    """Return C² Σ(N_k q_k σ_k)²/(Σ N_k q_k)², the aggregate's noise variance a coordinate.

    Clipped batch means, weighted by their expected batch sizes. Raises InputError.
    """
    shares = [check.positive(size=n) * check.rate(q=q) for n, q in zip(sizes, rates, strict=True)]
    if not shares:
        raise InputError("sizes is empty: expected at least one client")
    noises = (check.non_negative(sigma=s) for s in sigmas)
    total = math.fsum((a * s) ** 2 for a, s in zip(shares, noises, strict=True))
    return check.positive(clip=clip) ** 2 * total / math.fsum(shares) ** 2


def aggregate_variance_of_sums(
    weights: Sequence[float],
    sizes: Sequence[float],
    rates: Sequence[float],
    sigmas: Sequence[float],
    clip: float = 1.0,
) -> float:
    """Return C² Σ(ω_k σ_k/(q_k N_k))², the aggregate's noise variance a coordinate.

    Sums of per-sample clipped gradients over q_k N_k, aggregated with weights ω_k, σ_k relative to
    C. Raises InputError.
    """
    each = (
        check.non_negative(weight=w)
        * check.non_negative(sigma=s)
        / (check.rate(q=q) * check.positive(size=n))
        for w, n, q, s in zip(weights, sizes, rates, sigmas, strict=True)
    )
    return check.positive(clip=clip) ** 2 * math.fsum(x * x for x in each)


def entropy_bound(dimension: int, moment: float, variance: float) -> float:
    """Return (d/2) ln(2πe (m/d + v)), the most entropy X + N(0, v I_d) can have, in nats.

    m = `moment` >= E‖X‖², v = `variance` >= 0, not both 0. Of all laws with that second moment the
    Gaussian has the most differential entropy (Cover and Thomas, Theorem 8.6.5, and Jensen).
    """
    check.count(dimension=dimension)
    each = check.non_negative(moment=moment) / dimension + check.non_negative(variance=variance)
    return dimension / 2 * math.log(2 * math.pi * math.e * check.positive(moment_or_variance=each))


def rate_bound(dimension: int, sigma: float, clip: float) -> float:
    """Return (d/2) ln(2πe C² (σ² + 1/d)), the most entropy one release can have, in nats.

    `entropy_bound` of a vector of at most C with noise of σC. Differential entropy: with a
    quantisation step s see `bits_on_the_wire`.
    """
    moment = check.positive(clip=clip) ** 2
    return entropy_bound(dimension, moment, moment * check.non_negative(sigma=sigma) ** 2)


def mean_of_clipped_moment(size: float, rate: float, clip: float) -> float:
    """Return C² (1 + (1 - q)/(qN)), the most E‖X‖² of X, a Poisson batch's clipped sum over qN.

    size: N, the number of records; ‖X‖ <= C B/(qN) with B records drawn, B ~ Binomial(N, q).
    """
    expected = check.positive(size=size) * check.rate(rate=rate)
    return check.positive(clip=clip) ** 2 * (1 + (1 - rate) / expected)


def paper_rate(dimension: int, sigma: float, clip: float) -> float:
    """Return the paper's (12), d ln(2πe C² σ/sqrt(d)), for comparison. Not a bound.

    It rests on h(X + Y) <= h(X) + h(Y), which differential entropy does not satisfy, and can lie
    below the entropy of the noise alone.
    """
    check.count(dimension=dimension)
    inner = check.positive(clip=clip) ** 2 * check.positive(sigma=sigma) / math.sqrt(dimension)
    return dimension * math.log(2 * math.pi * math.e * inner)


def bits_on_the_wire(rate: float, dimension: int, step: float) -> float:
    """Return (R - d ln s)/ln 2, the bits of a release of rate R (nats) quantised with step s."""
    check.finite(rate=rate)
    return (rate - dimension * math.log(check.positive(step=step))) / math.log(2)


@dataclass(frozen=True)
class Point:
    """One curve at one ε. notes: which of the bound's own conditions fail, or why it has no σ.

    proven: the ε that exact accounting proves for this σ; None where there is no σ.
    """

    curve: str
    epsilon: float
    steps: int
    sigma: float | None
    utility: float | None
    rate: float | None
    notes: tuple[str, ...] = ()
    proven: float | None = None

    @property
    def unsound(self) -> bool:
        """Whether the σ does not keep the ε that the curve claims for it.

        Exact accounting is within 2 % of the truth, so what it proves beyond that is not proof's.
        """
        return self.proven is not None and self.proven > 1.02 * self.epsilon


# How the paper's printed example comes out of its formulas: T/10 in the noise, T in the utility,
# base-10 logarithms except in AC2. AC1's convention is unknown: this one gives 0.24 for its 0.22.
_PAPER_DIVISOR: Final = 10


def old_point(
    problem: Problem, bound: OldBound, epsilon: float, steps: int, paper: bool = False
) -> Point:
    """Return one older bound's σ, with what follows from it; paper: by the printed conventions.

    A σ outside the bound's own conditions comes with notes that name them; where the formula
    gives none, sigma is None.
    """
    budget = Budget(epsilon, problem.delta)
    inside = max(1, steps // _PAPER_DIVISOR) if paper else steps
    log = math.log10 if paper else math.log
    try:
        sigma = unconditional_noise(bound, budget, problem.q, inside, log)
    except InputError as error:
        return Point(bound, epsilon, steps, None, None, None, (str(error),))
    notes = violations(sigma, budget, problem.q)
    return _point(problem, bound, epsilon, steps, sigma, notes)


def with_proof(problem: Problem, point: Point) -> Point:
    """Return the point with the ε that its σ keeps, by privacy loss distributions."""
    if point.sigma is None:
        return point
    # Sensitivity 2C, as `exact_noise` has it.
    event = SampledGaussian(problem.q, point.sigma / 2)
    return replace(point, proven=epsilon_of({event: point.steps}, problem.delta, "pld"))


def exact_point(problem: Problem, accountant: Accountant, epsilon: float, steps: int) -> Point:
    """Return the smallest σ with a proof at (ε, δ), with what follows from it."""
    sigma = exact_noise(Budget(epsilon, problem.delta), problem.q, steps, accountant)
    return _point(problem, accountant, epsilon, steps, sigma, ())


def _point(
    problem: Problem, curve: str, epsilon: float, steps: int, sigma: float, notes: Sequence[str]
) -> Point:
    """All clients alike: the aggregate's variance is σ²/K, and each sends at the same rate."""
    utility = utility_bound(problem, sigma**2 / problem.clients, steps)
    rate = rate_bound(problem.dimension, sigma, problem.clip)
    return Point(curve, epsilon, steps, sigma, utility, rate, tuple(notes))
