"""FedProxVR's bound on convergence, its best parameters (`fedpact tune fedproxvr`), and a figure.

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

The training time is Δ(w⁰)/ε · d_com · (1 + γτ)/Θ, γ = d_cmp/d_com. With L = 1 (μ and λ in its
units), S = 1 + σ̄², x = μ - λ, b = β - 3 and θ² = 3(β² + μ²)/(x b τ) from Lemma 1, it goes as

    (1 + γτ) μ / (1 - P),   P = θ sqrt(2S) + (2/x) sqrt((1+θ²)S) + (2μ/x²)(1+θ²)S,   P < 1.

It has one minimum in (log x, log τ), which grids that close in on it find. The best β at given μ, τ
is 3 + sqrt(9 + μ²), or the end of its interval nearest to that.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from rich.console import Console

from fedpact.common import check
from fedpact.common.errors import InputError
from fedpact.common.notebook import TextTable

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
        """Return μ~ = μ - λ, the strong convexity of a site's problem, for μ > λ."""
        return mu - self.weak_convexity


def least_a(tau: float) -> float:
    """Return 4(sqrt(τ+1) + sqrt(τ+2))², the least a of SVRG's condition. τ >= 0."""
    return 4 * (math.sqrt(tau + 1) + math.sqrt(tau + 2)) ** 2


def most_tau(beta: float, solver: Solver = "sarah") -> int | None:
    """Return the most local iterations that Lemma 1 allows at β > 3, None if not even 0.

    >>> [most_tau(beta) for beta in (5, 10, 20)], [most_tau(beta, "svrg") for beta in (5, 10, 20)]
    ([13, 57, 240], [None, 0, 2])
    """
    level = 5 * beta**2 - 4 * beta
    if solver == "sarah":
        return math.floor(level / 8)
    # a >= 16(τ + 1), so (τ + 1)² <= (τ + 1)(τ + 2) <= level/128 bounds the search.
    tau = math.floor(math.sqrt(level / 128))
    while tau >= 0 and not 8 * least_a(tau) * (tau + 2) <= level:
        tau -= 1
    return tau if tau >= 0 else None


def least_beta(tau: float, solver: Solver = "sarah") -> float:
    """Return the least β >= 3 whose upper bound in Lemma 1 is τ >= 0 or more."""
    level = 8 * tau if solver == "sarah" else 8 * least_a(tau) * (tau + 2)
    return max(3.0, (4 + math.sqrt(16 + 20 * level)) / 10)


def local_accuracy(losses: Losses, mu: float, beta: float, tau: float) -> float:
    """Return θ, the least that Lemma 1 proves after τ > 0 iterations; 1 or more is no progress.

    mu: μ > λ. beta: β > 3.
    """
    x, m = losses.excess(mu) / losses.smoothness, mu / losses.smoothness
    return math.sqrt(3 * (beta**2 + m**2) / (x * (beta - 3)) / tau)


def decrease(losses: Losses, mu: float, theta: float) -> float:
    """Return Θ of Theorem 1, 1/L times a number; <= 0 where the theorem says nothing.

    mu: μ > λ. theta: θ >= 0.
    """
    # In units of L, so that no square overflows.
    x, spread = losses.excess(mu) / losses.smoothness, 1 + losses.heterogeneity
    inexact = (1 + theta**2) * spread
    lost = theta * math.sqrt(2 * spread)
    lost += 2 / x * math.sqrt(inexact)
    lost += 2 * (mu / losses.smoothness / x) / x * inexact
    return (1 - lost) / mu


_POINTS: Final = 120
"""Of a grid, on each side."""
_KEPT: Final = 3  # points to each side of the best one that the next grid covers
_MOST_TAU: Final = 2.0**63


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


def minimise(
    losses: Losses,
    gamma: float,
    solver: Solver = "sarah",
    *,
    tight: bool = True,
    whole: bool = True,
) -> Parameters:
    """Return the μ, β, τ of least training time (1 + γτ)/Θ.

    gamma: γ = d_cmp/d_com > 0. tight: τ at Lemma 1's upper bound, the paper's (15), (16) and (23);
    else any β and τ that Lemma 1 allows, which is never worse (docs/notes/errata.md, V4). whole: τ
    an integer, θ that of the integer; else a real number, as in the paper. Raises InputError.

    >>> best = minimise(Losses(1.0, 0.5, 1.0), gamma=0.01)
    >>> best.tau, round(best.mu, 1), round(best.beta, 1), round(best.objective, 1)
    (226, 22.3, 19.4, 231.3)
    """
    check.positive(gamma=gamma)
    if solver not in ("sarah", "svrg"):
        raise InputError(f"solver is {solver!r}: expected sarah or svrg, which Lemma 1 covers")
    first = 33 / 8 if tight and solver == "sarah" else 1.0  # there β is 3
    first = float(math.ceil(first)) if whole else first
    tau, mu, least = _search(losses, gamma, solver, tight, first, _MOST_TAU)
    if not least < math.inf:
        raise InputError(
            f"heterogeneity is {losses.heterogeneity!r}: no μ, β and τ within float64 have Θ > 0; "
            "expected a smaller one"
        )
    if whole:
        near = {max(first, float(math.floor(tau))), float(math.ceil(tau))}
        tau, mu, _ = min(
            (_search(losses, gamma, solver, tight, each, each) for each in near),
            key=lambda found: found[2],
        )
    beta = _best_beta(mu, np.array(least_beta(tau, solver)), tight)
    tau, beta, mu = round(tau) if whole else tau, float(beta), mu * losses.smoothness
    theta = local_accuracy(losses, mu, beta, tau)
    per_round = decrease(losses, mu, theta)
    return Parameters(mu, beta, tau, theta, per_round, (1 + gamma * tau) / per_round)


def _best_beta(mu: Any, least: Any, tight: bool) -> Any:
    """Return the best β of those from `least`, in units of L. tight: β follows from τ."""
    return least if tight else np.maximum(least, 3 + np.sqrt(9 + mu**2))


def _search(
    losses: Losses, gamma: float, solver: Solver, tight: bool, first: float, last: float
) -> tuple[float, float, float]:
    """Return the best τ from `first` to `last`, its μ in units of L, and (1 + γτ) μ/(1 - P).

    That is inf if P >= 1 everywhere.
    """
    weak, spread = losses.weak_convexity / losses.smoothness, 1 + losses.heterogeneity
    # Where P < 1, x exceeds this, as P >= (2/x)(sqrt(S) + S).
    low = math.log(2 * (spread + math.sqrt(spread)))
    sides = [
        np.linspace(low, low + 60, _POINTS),
        np.linspace(math.log(first), math.log(last), _POINTS),
    ]
    best = tau, mu, cost = first, math.nan, math.inf
    while True:
        with np.errstate(all="ignore"):  # β = 3, or beyond float64: P is inf
            taus, xs = np.exp(sides[1]), np.exp(sides[0])[:, None]
            mus = xs + weak
            beta = _best_beta(mus, np.array([least_beta(float(t), solver) for t in taus]), tight)
            theta2 = 3 * (beta**2 + mus**2) / (xs * (beta - 3) * taus)
            inexact = (1 + theta2) * spread
            p = np.sqrt(2 * spread * theta2) + 2 / xs * np.sqrt(inexact) + 2 * mus / xs**2 * inexact
            costs = np.where(p < 1, (1 + gamma * taus) * mus / (1 - p), np.inf)
        place = np.unravel_index(costs.argmin(), costs.shape)
        tau, mu, cost = float(taus[place[1]]), float(mus[place[0], 0]), float(costs[place])
        best = min(best, (tau, mu, cost), key=lambda found: found[2])
        if not cost < math.inf or np.ptp(sides[0]) < 1e-9:
            return best
        sides = [
            np.linspace(side[max(0, at - _KEPT)], side[min(_POINTS - 1, at + _KEPT)], _POINTS)
            for side, at in zip(sides, place, strict=True)
        ]


UNIT = "(1 + γτ)/Θ: training time in units of Δ(w⁰) d_com/ε, ε the accuracy asked for"
MEANING = (
    "(23) is the paper's problem, with τ at Lemma 1's upper bound; the last row takes any β and τ "
    "that Lemma 1 allows, and is never worse (docs/notes/errata.md, V4). The theorem needs its L, "
    "λ and σ̄² at every w, and is loose: take μ, β and τ as a start for a sweep."
)


def find_parameters(
    losses: Losses, gamma: float, solver: Solver, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what --json prints: on top the optimum of the paper's (23) with whole τ.

    settings: for a plan, by Lemma 1 without the paper's equalities, which is never worse.
    """
    free = minimise(losses, gamma, solver, tight=False)
    return {
        "solver": solver,
        "L": losses.smoothness,
        "lam": losses.weak_convexity,
        "sigma2": losses.heterogeneity,
        "gamma": gamma,
        **_numbers(minimise(losses, gamma, solver)),
        "real": _numbers(minimise(losses, gamma, solver, whole=False)),
        "lemma1": _numbers(free),
        "settings": {
            "solver": solver,
            "smoothness": losses.smoothness,
            "step_divisor": free.beta,
            "proximal": free.mu,
            "local_steps": free.tau,
        },
        "unit": UNIT,
        **measured,
    }


def _numbers(best: Parameters) -> dict[str, Any]:
    found = asdict(best)
    return {"Theta": found.pop("decrease"), **found}


def print_document(found: Mapping[str, Any]) -> None:
    """Print for a reader."""
    console = Console(highlight=False, soft_wrap=True)
    for line in found.get("notes", ()):
        console.print(line)
    title = (
        f"{found['solver'].upper()}: L = {found['L']:.4g}, λ = {found['lam']:.4g}, "
        f"σ̄² = {found['sigma2']:.4g}, γ = {found['gamma']:.4g}"
    )
    rows = list[tuple[str, ...]]()
    for row, name in (
        (found, "(23), whole τ"),
        (found["real"], "(23), real τ"),
        (found["lemma1"], "Lemma 1, whole τ"),
    ):
        tau = f"{row['tau']}" if isinstance(row["tau"], int) else f"{row['tau']:.1f}"
        mu, beta, theta, per_round = (f"{row[k]:.4g}" for k in ("mu", "beta", "theta", "Theta"))
        rows.append((name, mu, beta, tau, theta, per_round, f"{row['objective']:.6g}"))
    columns = ("μ", "β", "τ", "θ", "Θ", "objective")
    TextTable(columns, rows, first="problem").print(console, title)
    console.print(f"objective: {UNIT}.")
    console.print(MEANING)
    settings = (
        f"{name} = {value:.6g}" if isinstance(value, float) else f"{name} = {json.dumps(value)}"
        for name, value in found["settings"].items()
    )
    console.print(f"The last row in a plan: settings = {{ {', '.join(settings)} }}", markup=False)
    if "figure" in found:
        console.print(f"figure: {found['figure']}", markup=False)


FACTORS = (1, 2, 5)
GAMMAS = (1e-4, 1.0)
POINTS = 60
PANELS = (
    ("beta", "β*", "linear"),
    ("mu", "μ*", "linear"),
    ("theta", "θ", "linear"),
    ("decrease", "Θ", "linear"),
    ("tau", "τ*", "log"),
)


def draw(losses: Losses, gamma: float, solver: Solver, out: Path) -> None:
    """Draw β*, μ*, θ, Θ and τ* against γ into a file, .png or .svg."""
    from matplotlib.figure import Figure

    from fedpact.report.drawing import save_figure

    gammas = np.geomspace(min(GAMMAS[0], gamma), max(GAMMAS[1], gamma), POINTS).tolist()
    found = dict[float, list[Parameters]]()
    for factor in FACTORS if losses.heterogeneity else FACTORS[:1]:
        of = replace(losses, heterogeneity=factor * losses.heterogeneity)
        found[of.heterogeneity] = [minimise(of, each, solver, whole=False) for each in gammas]
    figure = Figure(figsize=(12, 6), layout="constrained")
    axes: Any = figure.subplots(2, 3, sharex=True)
    flat: list[Any] = list(axes.flat)
    for axis, (name, label, scale) in zip(flat, PANELS, strict=False):
        for spread, points in found.items():
            values = [getattr(best, name) for best in points]
            axis.plot(gammas, values, label=f"σ̄² = {spread:.3g}")
        axis.axvline(gamma, color="0.6", linewidth=1, linestyle=":")
        axis.set(xscale="log", yscale=scale, ylabel=label, xlabel="γ = d_cmp/d_com")
        axis.grid(alpha=0.3, which="both")
        # The last column has no panel below its first.
        axis.tick_params(labelbottom=True)
    handles, labels = flat[0].get_legend_handles_labels()
    flat[-1].axis("off")
    flat[-1].legend(handles, labels, loc="center", frameon=False, title="dotted: the γ asked for")
    figure.suptitle(
        f"FedProxVR, {solver.upper()}: least training time by (23), "
        f"L = {losses.smoothness:.3g}, λ = {losses.weak_convexity:.3g}",
        fontsize="medium",
    )
    save_figure(figure, out)
