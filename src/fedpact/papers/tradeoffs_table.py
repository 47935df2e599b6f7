"""`fedpact tradeoffs`: noise, utility and rate against ε, by older bounds and exact accounting."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from fedpact.errors import InputError
from fedpact.papers.composition import OLD_BOUNDS
from fedpact.papers.tradeoffs import Point, Problem, exact_point, old_point
from fedpact.theory.accounting import Accountant

STEPS = (70_000, 700_000)
EPSILONS = (0.3, 0.5, 1.0, 2.0, 4.0)
EXACT: tuple[Accountant, ...] = ("rdp", "pld")
STYLES = {"rdp": "s-.k", "pld": "o-k"}
LABELS = {"rdp": "RDP, proven", "pld": "PLD, proven"}
GUARANTEE = (
    "RDP and PLD: proven (ε, δ)-differential privacy for each client, add/remove one record, over "
    "all T releases. proposed, MA, AC1, AC2: comparison only, no guarantee, even where their own "
    "conditions hold"
)
PAPER = (
    "preset paper: the older bounds with T/10 in the noise and base-10 logarithms (AC2 natural), "
    "as the printed numbers come out; AC1 gives 0.24 where the paper prints 0.22"
)


def tradeoffs(preset: str | None, out: Path | None, as_json: bool) -> None:
    """Carry out `fedpact tradeoffs`. Raises InputError: no such preset, or another suffix."""
    if preset not in (None, "paper"):
        raise InputError(f"--preset is {preset!r}: expected paper, or no preset")
    if out is not None and out.suffix not in (".png", ".svg"):
        raise InputError(f"--out is {str(out)!r}: expected a name that ends in .png or .svg")
    problem, paper = Problem(), preset == "paper"
    with Console(stderr=True).status("calibrating σ by exact accounting"):
        points = [
            point
            for steps in STEPS
            for epsilon in EPSILONS
            for point in (
                *(old_point(problem, bound, epsilon, steps, paper) for bound in OLD_BOUNDS),
                *(exact_point(problem, by, epsilon, steps) for by in EXACT),
            )
        ]
    if out is not None:
        _draw(problem, points, paper, out)
    if as_json:
        print(json.dumps(_document(problem, points, preset), indent=2))
    else:
        _show(problem, points, paper)


def _document(problem: Problem, points: list[Point], preset: str | None) -> dict[str, Any]:
    return {
        "problem": dataclasses.asdict(problem),
        "preset": preset,
        "guarantee": GUARANTEE,
        "units": {"sigma": "noise over C a coordinate", "rate": "nats a client and round"},
        "points": [dataclasses.asdict(point) for point in points],
    }


def _show(problem: Problem, points: list[Point], paper: bool) -> None:
    console = Console()
    for steps in STEPS:
        title = f"T = {steps:,}, δ = {problem.delta:g}, q = {problem.q:g}; rate in nats a round"
        table = Table(title=title)
        for column in ("ε", "bound", "σ", "utility", "rate", "own conditions"):
            table.add_column(column, justify="left" if column == "bound" else "right")
        for epsilon in EPSILONS:
            here = [p for p in points if (p.steps, p.epsilon) == (steps, epsilon)]
            for point in here:
                table.add_row(*_cells(point), end_section=point is here[-1])
        console.print(table)
    console.print(GUARANTEE + ".")
    if paper:
        console.print(PAPER + ".")


def _cells(point: Point) -> list[str]:
    numbers = ("none", "", "")
    if point.sigma is not None:
        numbers = (f"{point.sigma:.4g}", f"{point.utility:.4g}", f"{point.rate:,.0f}")
    state = "proven" if point.curve in EXACT else "violated" if point.notes else "hold"
    return [f"{point.epsilon:g}", LABELS.get(point.curve, point.curve), *numbers, state]


def _draw(problem: Problem, points: list[Point], paper: bool, out: Path) -> None:
    """Draw σ², utility and rate against ε for both T: the paper's Figure 1, with exact curves.

    Thin and dotted where a bound's own conditions fail. Raises InputError.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 2, figsize=(10, 10), sharex=True, layout="constrained")
    for column, steps in enumerate(STEPS):
        exact = {by: [p for p in points if (p.curve, p.steps) == (by, steps)] for by in EXACT}
        _column(axes[:, column], problem, steps, exact, paper)
    axes[0][0].legend(fontsize="small")
    figure.suptitle(
        f"record-level (ε, δ = {problem.delta:g}), add/remove one record; q = {problem.q:g}, "
        f"d = {problem.dimension:,}, K = {problem.clients}\n"
        "dotted: outside the bound's own conditions; only RDP and PLD are guarantees",
        fontsize="medium",
    )
    try:
        figure.savefig(out, dpi=150)
    except OSError as error:
        raise InputError(f"--out is {str(out)!r}: cannot be written ({error.strerror})") from error
    finally:
        pyplot.close(figure)


def _column(
    axes: Any, problem: Problem, steps: int, exact: Mapping[str, list[Point]], paper: bool
) -> None:
    """Fill the three panels of one T."""
    grid = [float(e) for e in np.geomspace(min(EPSILONS), max(EPSILONS), 40)]
    curves = {b: [old_point(problem, b, e, steps, paper) for e in grid] for b in OLD_BOUNDS}
    quantities: list[tuple[str, Callable[[Point], float | None]]] = [
        ("noise σ²", lambda p: None if p.sigma is None else p.sigma**2),
        ("utility bound U(T)", lambda p: p.utility),
        ("rate bound, nats a round", lambda p: p.rate),
    ]
    for axis, (title, value) in zip(axes, quantities, strict=True):
        for number, (bound, points) in enumerate(curves.items()):
            _line(axis, points, value, bound, f"C{number}")
        for by, points in exact.items():
            xs, ys = [p.epsilon for p in points], [value(p) for p in points]
            axis.plot(xs, ys, STYLES[by], ms=4, lw=2, label=LABELS[by])
        axis.set(xscale="log", yscale="log", ylabel=title)
        axis.grid(alpha=0.3)
    axes[0].set_title(f"T = {steps:,}")
    axes[2].set_yscale("linear")
    axes[2].set_xlabel("ε")
    axes[2].set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
    axes[2].minorticks_off()


def _line(
    axis: Any, points: list[Point], value: Callable[[Point], float | None], name: str, colour: str
) -> None:
    """Draw a bound's curve: dotted over all of it, solid where its conditions hold."""
    xs = [p.epsilon for p in points]
    every = [np.nan if (v := value(p)) is None else v for p in points]
    holds = [np.nan if p.notes else y for p, y in zip(points, every, strict=True)]
    axis.plot(xs, every, linestyle=":", linewidth=1, color=colour)
    axis.plot(xs, holds, linewidth=1.5, color=colour, label=name)
