"""FedProxVR's parameters: the output of `fedpact tune fedproxvr`, and its figure."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fedpact.common.files import check_file
from fedpact.common.notebook import TextTable
from fedpact.studies.papers.proxvr_search import Losses, Parameters, Solver, minimise

UNIT = "(1 + γτ)/Θ: training time in units of Δ(w⁰) d_com/ε, ε the accuracy asked for"
ROWS = {
    "whole": "(23), whole τ",
    "real": "(23), real τ",
    "lemma1": "Lemma 1, whole τ",
}
PROBLEMS = (
    "(23) is the paper's problem, with τ at Lemma 1's upper bound; the last row takes any β and τ "
    "that Lemma 1 allows."
)
WORTH = (
    "The theorem needs its L, λ and σ̄² at every w, and is loose: take μ, β and τ as a start for a "
    "sweep. The last row is never worse than the others (docs/notes/errata.md, V4)."
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
    return {
        "mu": best.mu,
        "beta": best.beta,
        "tau": best.tau,
        "theta": best.theta,
        "Theta": best.decrease,
        "objective": best.objective,
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
    rows = list[tuple[str, ...]]()
    for key, name in ROWS.items():
        row = found if key == "whole" else found[key]
        tau = f"{row['tau']}" if isinstance(row["tau"], int) else f"{row['tau']:.1f}"
        mu, beta, theta, per_round = (f"{row[k]:.4g}" for k in ("mu", "beta", "theta", "Theta"))
        rows.append((name, mu, beta, tau, theta, per_round, f"{row['objective']:.6g}"))
    columns = ("μ", "β", "τ", "θ", "Θ", "objective")
    TextTable(columns, rows, first="problem").print(console, title)
    console.print(f"objective: {UNIT}.")
    console.print(PROBLEMS)
    console.print(WORTH)
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
    """Draw β*, μ*, θ, Θ and τ* against γ into a file, .png or .svg. Raises InputError."""
    check_file("--out", out, ".png", ".svg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

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
        axis.tick_params(labelbottom=True)
        if scale == "log":
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(ScalarFormatter())
            axis.yaxis.set_minor_formatter(NullFormatter())
    handles, labels = flat[0].get_legend_handles_labels()
    flat[-1].axis("off")
    flat[-1].legend(handles, labels, loc="center", frameon=False, title="dotted: the γ asked for")
    figure.suptitle(
        f"FedProxVR, {solver.upper()}: least training time by (23), "
        f"L = {losses.smoothness:.3g}, λ = {losses.weak_convexity:.3g}",
        fontsize="medium",
    )
    save_figure(figure, out)
