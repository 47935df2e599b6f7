"""FedProxVR's conditions. Dinh, Tran, Nguyen, Bao, Zomaya, Zhou. ICPP 2020.

Each record's loss is L-smooth, each site's loss F_n is λ-weakly convex, its gradient no further
from the global one than σ_n times that one's length; σ̄² = Σ p_n σ_n². A site solves
F_n + (μ/2)‖w - w̄‖² with the step 1/(βL) in τ iterations, down to ‖∇J_n‖ <= θ‖∇F_n(w̄)‖; μ~ = μ - λ.
Lemma 1 holds for β > 3 and

    3(β²L² + μ²)/(θ² μ~ L (β - 3)) <= τ <= (5β² - 4β)/8              SARAH                     (13)
                                      τ <= (5β² - 4β)/(8a) - 2       SVRG, a - 4 >= 4 sqrt(a(τ+1))

The least such a is 4(sqrt(τ+1) + sqrt(τ+2))². Theorem 1: the mean squared gradient after T rounds
is at most Δ(w⁰)/(ΘT), as far as Θ > 0,

    Θ = (1/μ)[1 - θ sqrt(2(1+σ̄²)) - (2L/μ~) sqrt((1+θ²)(1+σ̄²)) - (2Lμ/μ~²)(1+θ²)(1+σ̄²)].

What minimises the training time T(d_com + d_cmp τ): `proxvr_search`.
"""

import math
from dataclasses import dataclass
from typing import Literal

from fedpact import check
from fedpact.errors import InputError

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
