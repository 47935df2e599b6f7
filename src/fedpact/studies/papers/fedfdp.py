"""FedFDP's theory: its bound on convergence, and the λ that it recommends.

L-smooth, μ-strongly convex losses, per-sample gradients bounded by G, Q0 <= Δ_i^j <= Q1 with
Δ_i^j = ℓ_ij - F, Γ = F* - Σ p_i F_i*, B̂ the smallest batch, Δ1 = E‖w_1 - w*‖², T rounds:

    P(λ)  = L F(λ)/(2μ²T)                                   (18) and (19), without their slips
    F(λ)  = (a1 λ³ + a2 λ² + a3 λ + a4)/(a5 λ + 1)
    a1    = G² Q1³          a2 = 6G² Q1²        a3 = 9G² Q1 + 2LΓ Q1 + 2μ² Q0 Δ1
    a4    = 4G² + 2LΓ + N + μ²Δ1                a5 = 2 Q0                N = 2σ²C²d/B̂²

The best λ. F'(λ)(a5 λ + 1)² = g(λ) = 2a1 a5 λ³ + (3a1 + a2 a5)λ² + 2a2 λ + a3 - a4 a5. Where the
bound has a meaning, a5 λ + 1 > 0, g' = 2(a5 λ + 1)(3a1 λ + a2) >= 0 for Q1 >= 0: λ* > 0 exactly if
g(0) < 0, and is then the one root of g. For Q0 <= 0 <= Q1, which always holds, as F is a mean of
the ℓ_ij, g(0) = (9G² + 2LΓ) Q1 - 2Q0 (4G² + 2LΓ + N) >= 0, so λ* = 0: the theorem recommends no
fairness. Moreover, the bound fails if clipping or weights move the optimum (docs/notes/errata.md,
F8, F10).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from fedpact.common import check
from fedpact.common.errors import InputError
from fedpact.common.notebook import TextTable


@dataclass(frozen=True)
class Slopes:
    """What the theorem assumes: G, Γ, Δ1 and the noise >= 0, 0 < μ <= L, Q0 <= Q1, Q1 >= 0.

    noise: N = 2σ²C²d/B̂² (`noise_term`). Raises InputError.
    """

    gradient_bound: float
    smoothness: float
    convexity: float
    gap: float
    noise: float
    least_difference: float
    most_difference: float
    start: float

    def __post_init__(self) -> None:
        check.positive(smoothness=self.smoothness)
        check.positive(convexity=self.convexity)
        check.finite(least_difference=self.least_difference)
        for name in ("gradient_bound", "gap", "noise", "most_difference", "start"):
            check.non_negative(**{name: getattr(self, name)})
        if not self.convexity <= self.smoothness:
            raise InputError(
                f"convexity is {self.convexity!r} and smoothness {self.smoothness!r}: expected "
                "convexity <= smoothness, as for every smooth loss"
            )
        if not self.least_difference <= self.most_difference:
            raise InputError(
                f"least_difference is {self.least_difference!r} and most_difference "
                f"{self.most_difference!r}: expected the least (Q0) <= the most (Q1)"
            )

    @property
    def a(self) -> tuple[float, float, float, float, float]:
        """a1, ..., a5."""
        g2, q0, q1 = self.gradient_bound**2, self.least_difference, self.most_difference
        gap, start = 2 * self.smoothness * self.gap, self.convexity**2 * self.start
        return (
            g2 * q1**3,
            6 * g2 * q1**2,
            (9 * g2 + gap) * q1 + 2 * q0 * start,
            4 * g2 + gap + self.noise + start,
            2 * q0,
        )

    @property
    def slope(self) -> float:
        """g(0) = a3 - a4 a5, the sign of F'(0); free of μ and Δ1, and without a difference."""
        g2, gap = self.gradient_bound**2, 2 * self.smoothness * self.gap
        upwards = (9 * g2 + gap) * self.most_difference
        return upwards - 2 * self.least_difference * (4 * g2 + gap + self.noise)


def noise_term(sigma: float, clip: float, dimension: int, batch: float) -> float:
    """Return N = 2σ²C²d/B̂², for σ >= 0, C > 0 and B̂ > 0. Raises InputError."""
    relative = check.non_negative(sigma=sigma) * check.positive(clip=clip)
    return 2 * (relative / check.positive(batch=batch)) ** 2 * check.count(dimension=dimension)


def bound(bounds: Slopes, lam: float, steps: int) -> float:
    """Return P(λ) = L F(λ)/(2μ²T), λ >= 0, the paper's bound on E F(w_T) - F*; see the module.

    Raises InputError if a5 λ + 1 <= 0, where P is no bound.
    """
    check.non_negative(lam=lam)
    a1, a2, a3, a4, a5 = bounds.a
    if not a5 * lam + 1 > 0:
        raise InputError(
            f"lam is {lam!r}: expected lam < {-1 / a5!r}, beyond which 1 + 2 Q0 lam is not positive"
        )
    scale = bounds.smoothness / (2 * bounds.convexity**2 * check.count(steps=steps))
    return scale * (((a1 * lam + a2) * lam + a3) * lam + a4) / (a5 * lam + 1)


def best_weight(bounds: Slopes) -> float:
    """Return λ*, the argmin of F over λ >= 0: 0 unless a3 < a4 a5, then the root of the cubic g.

    inf if F decreases forever, which needs Q0 > 0 and G Q1 = 0. Raises InputError.

    >>> best_weight(Slopes(1.0, 1.0, 1.0, 0.0, 1000.0, least_difference=5.0, most_difference=6.0,
    ...     start=0.0))
    1.11...
    """
    if not bounds.slope < 0:
        return 0.0
    a1, a2, _, _, a5 = bounds.a
    roots = np.roots([2 * a1 * a5, 3 * a1 + a2 * a5, 2 * a2, bounds.slope])
    # All other coefficients are >= 0, so one root is positive and both others lie left of 0.
    return max(roots.real.tolist(), default=math.inf)


SHARES = (0.03, 0.1, 0.3, 1.0)
WHY_ZERO = (
    "The theorem's λ* is 0. Its bound falls with λ only if a3 < a4 a5, and a5 = 2 Q0 where Q0 "
    "bounds ℓ - F from below. F is a mean of the losses, so Q0 <= 0 <= Q1, a3 - a4 a5 >= 0, and "
    "the bound only grows: it recommends no fairness, whatever the other numbers "
    "(docs/notes/errata.md, F10)."
)
WHY_POSITIVE = (
    "λ* > 0 because Q0 > 0 was given: no record's loss may be below the mean loss, which no data "
    "satisfy (docs/notes/errata.md, F10)."
)
ALTERNATIVES = (
    "Choose λ by a sweep of validation accuracy and Ψ: each fairness_weight a configuration of its "
    "own, side by side with `fedpact compare`. Or from released numbers: λ = c/F with c in (0, 1] "
    'and F the loss that the sites release, which settings = { weight_rule = "relative", '
    "fairness_weight = c } follows round by round. Weights 1 + λ(ℓ - F) are clamped at 0, so with "
    "c <= 1 no record is left out, and as ℓ and F fall together the weights keep their spread."
)


def answer_question(bounds: Slopes, steps: int) -> dict[str, Any]:
    """Return what --json prints."""
    best, q0 = best_weight(bounds), bounds.least_difference
    # Q0 = -F if nothing else is known, since losses are >= 0.
    sweep = [share / -q0 for share in SHARES] if q0 < 0 else []
    tried = sorted({0.0, best, *sweep} - {math.inf})
    return {
        "lam": best,
        "why": WHY_POSITIVE if best > 0 else WHY_ZERO,
        "instead": ALTERNATIVES,
        "sweep": sweep,
        "slope_at_0": bounds.slope,
        "bound": [
            {"lam": lam, "P": bound(bounds, lam, steps)}
            for lam in tried
            if 1 + bounds.a[4] * lam > 0
        ],
    }


def print_answer(found: Mapping[str, Any]) -> None:
    """Print for a reader."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"λ* = {found['lam']:.4g}    a3 - a4 a5 = {found['slope_at_0']:.4g}")
    console.print(found["why"] + "\n")
    console.print(found["instead"], markup=False)
    title = "the theorem's bound, as far as it has a meaning: 1 + 2 Q0 λ > 0"
    rows = [(f"{row['lam']:.3g}", f"{row['P']:.4g}") for row in found["bound"]]
    TextTable(("P(λ)",), rows, first="λ").print(console, title)
    if found["sweep"]:
        console.print("sweep: λ = 0, " + ", ".join(f"{lam:.3g}" for lam in found["sweep"]))
