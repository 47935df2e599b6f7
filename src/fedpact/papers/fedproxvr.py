"""What `fedpact tune fedproxvr` computes and prints."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from fedpact.errors import InputError
from fedpact.papers.proxvr import Losses, Solver
from fedpact.papers.proxvr_search import Optimum, minimise
from fedpact.shown.tables import print_table

UNIT = "(1 + γτ)/Θ: training time in units of Δ(w⁰) d_com/ε, ε the accuracy asked for"
ROWS = {
    "whole": "(23), whole τ",
    "real": "(23), real τ",
    "lemma1": "Lemma 1, whole τ",
}
PROVEN = (
    "(23) is the paper's problem, with τ at Lemma 1's upper bound; the last row takes any β and τ "
    "that Lemma 1 allows. Within its problem nothing has an objective below the certified bound, "
    "found by branch and bound over τ in a box that holds every optimum."
)
WORTH = (
    "The theorem needs its L, λ and σ̄² at every w, and is loose: take μ, β and τ as a start for a "
    "sweep. The last row is never worse than the others (docs/errata.md, V4)."
)


@dataclass(frozen=True)
class Candidate:
    """L, λ, σ̄², γ and the inner loop. Raises InputError: a solver that Lemma 1 does not cover."""

    smoothness: float
    weak_convexity: float
    heterogeneity: float
    gamma: float
    solver: str = "sarah"

    def __post_init__(self) -> None:
        if self.solver not in ("sarah", "svrg"):
            raise InputError(f"--solver is {self.solver!r}: expected sarah or svrg")

    def losses(self, factor: float = 1.0) -> Losses:
        """Return Assumption 1's numbers, σ̄² times a factor."""
        return Losses(self.smoothness, self.weak_convexity, factor * self.heterogeneity)

    @property
    def inner(self) -> Solver:
        """The inner loop, as the theory names it."""
        return cast(Solver, self.solver)

    def optimum(self, *, tight: bool = True, whole: bool = True) -> Optimum:
        """Return the optimum; see `minimise`."""
        return minimise(self.losses(), self.gamma, self.inner, tight=tight, whole=whole)


def candidate_document(setting: Candidate, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return what --json prints: on top the optimum of the paper's (23) with whole τ.

    settings: for a plan, by Lemma 1 without the paper's equalities, which is never worse.
    """
    best = setting.optimum()
    real = setting.optimum(whole=False)
    free = setting.optimum(tight=False)
    return {
        "solver": setting.solver,
        "L": setting.smoothness,
        "lam": setting.weak_convexity,
        "sigma2": setting.heterogeneity,
        "gamma": setting.gamma,
        **_numbers(best),
        "real": _numbers(real),
        "lemma1": _numbers(free),
        "settings": {
            "solver": setting.solver,
            "smoothness": setting.smoothness,
            "step_divisor": free.beta,
            "proximal": free.mu,
            "local_steps": free.tau,
        },
        "unit": UNIT,
        **measured,
    }


def _numbers(best: Optimum) -> dict[str, Any]:
    return {
        "mu": best.mu,
        "beta": best.beta,
        "tau": best.tau,
        "theta": best.theta,
        "Theta": best.decrease,
        "objective": best.objective,
        "certificate": {
            "lower": best.lower,
            "gap": best.gap,
            "mu": best.mu_range,
            "beta": best.beta_range,
            "tau": best.tau_range,
            "intervals": best.cells,
        },
    }


def print_document(found: Mapping[str, Any]) -> None:
    """Print for a reader."""
    console = Console(highlight=False, soft_wrap=True)
    for line in found.get("notes", ()):
        console.print(line)
    title = (
        f"{found['solver'].upper()}: L = {found['L']:.4g}, λ = {found['lam']:.4g}, "
        f"σ̄² = {found['sigma2']:.4g}, γ = {found['gamma']:.4g}"
    )
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("problem", no_wrap=True)
    for column in ("μ", "β", "τ", "θ", "Θ", "objective", "certified >="):
        table.add_column(column, justify="right")
    for key, name in ROWS.items():
        row = found if key == "whole" else found[key]
        tau = f"{row['tau']}" if isinstance(row["tau"], int) else f"{row['tau']:.1f}"
        table.add_row(
            name,
            *(f"{row[k]:.4g}" for k in ("mu", "beta")),
            tau,
            *(f"{row[k]:.4g}" for k in ("theta", "Theta")),
            *(f"{x:.6g}" for x in (row["objective"], row["certificate"]["lower"])),
        )
    print_table(console, table)
    console.print(f"objective: {UNIT}.")
    console.print(PROVEN)
    console.print(WORTH)
    settings = (
        f"{name} = {value:.6g}" if isinstance(value, float) else f"{name} = {json.dumps(value)}"
        for name, value in found["settings"].items()
    )
    console.print(f"The last row in a plan: settings = {{ {', '.join(settings)} }}", markup=False)
    if "figure" in found:
        console.print(f"figure: {found['figure']}", markup=False)
