"""`fedpact tradeoffs`: noise, utility and rate against ε, by older bounds and exact accounting."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from fedpact import check
from fedpact.errors import InputError
from fedpact.files import check_file
from fedpact.papers.composition import OLD_BOUNDS
from fedpact.papers.tradeoffs import Point, Problem, exact_point, old_point, with_proof
from fedpact.records.rounds import strict
from fedpact.shown.tables import print_table
from fedpact.text import upper
from fedpact.theory.accounting import Accountant

STEP_COUNTS = (70_000, 700_000)
EPSILONS = (0.3, 0.5, 1.0, 2.0, 4.0)
EXACT_ACCOUNTANTS: tuple[Accountant, ...] = ("rdp", "pld")
STYLES = {"rdp": "s-.k", "pld": "o-k"}
LABELS = {"rdp": "RDP, proven", "pld": "PLD, proven"}
GUARANTEE = (
    "RDP and PLD: proven (ε, δ)-differential privacy for each client, add/remove one record, over "
    "all T releases. proposed, MA, AC1, AC2: comparison only, no guarantee, even where their own "
    "conditions hold; UNSOUND where what is proven for their σ is more than the ε they claim"
)
PAPER = (
    "preset paper: the older bounds with T/10 in the noise and base-10 logarithms (AC2 natural), "
    "as the printed numbers come out; AC1 gives 0.24 where the paper prints 0.22"
)


@dataclass(frozen=True)
class TradeoffQuestion:
    """What is asked: the problem (q, δ), numbers of rounds T, ε; paper: by the printed numbers."""

    problem: Problem
    steps: Sequence[int]
    epsilons: Sequence[float]
    paper: bool = False


def build_question(
    preset: str | None,
    q: float | None,
    delta: float | None,
    steps: Sequence[int],
    epsilons: Sequence[float],
) -> TradeoffQuestion:
    """Return the question, with the paper's numbers where none are given. Raises InputError."""
    if preset not in (None, "paper"):
        raise InputError(f"--preset is {preset!r}: expected paper, or no preset")
    if preset and (q is not None or delta is not None or steps):
        raise InputError(
            "--preset paper has the printed q, δ and T: leave --q, --delta and --steps out, or "
            "the preset"
        )
    usual = Problem()
    problem = Problem(q=usual.q if q is None else q, delta=usual.delta if delta is None else delta)
    for number in steps:
        check.count(steps=number)
    for epsilon in epsilons:
        check.positive(epsilon=epsilon)
    chosen = sorted(set(steps or STEP_COUNTS)), sorted(set(epsilons or EPSILONS))
    return TradeoffQuestion(problem, *chosen, paper=preset == "paper")


def tradeoffs(question: TradeoffQuestion, out: Path | None, as_json: bool) -> None:
    """Carry out `fedpact tradeoffs`. Raises InputError: another suffix, or a file out of reach."""
    if out is not None:
        check_file("--out", out, ".png", ".svg")
    problem, paper = question.problem, question.paper
    console, points, budgets = Console(stderr=True), list[Point](), len(question.epsilons)
    asked = [(steps, epsilon) for steps in question.steps for epsilon in question.epsilons]
    for done, (steps, epsilon) in enumerate(asked):
        if done % budgets == 0:
            told = f"T = {steps:,}: calibrating σ by exact accounting, {done} of {len(asked)} done"
            console.print(told, highlight=False)
        some = (
            *(old_point(problem, bound, epsilon, steps, paper) for bound in OLD_BOUNDS),
            *(exact_point(problem, by, epsilon, steps) for by in EXACT_ACCOUNTANTS),
        )
        points += [with_proof(problem, point) for point in some]
    if out is not None:
        _draw(question, points, out)
    if as_json:
        print(json.dumps(strict(_document(question, points)), indent=2, allow_nan=False))
    else:
        _show(question, points)


def _document(question: TradeoffQuestion, points: list[Point]) -> dict[str, Any]:
    return {
        "problem": dataclasses.asdict(question.problem),
        "preset": "paper" if question.paper else None,
        "guarantee": GUARANTEE,
        "units": {"sigma": "noise over C a coordinate", "rate": "nats a client and round"},
        "points": [{**dataclasses.asdict(point), "unsound": point.unsound} for point in points],
    }


def _show(question: TradeoffQuestion, points: list[Point]) -> None:
    console, problem = Console(), question.problem
    for steps in question.steps:
        title = f"T = {steps:,}, δ = {problem.delta:g}, q = {problem.q:g}; rate in nats a round"
        table = Table(title=title)
        for column in ("ε", "bound", "σ", "ε, proven", "", "utility", "rate", "own conditions"):
            table.add_column(column, justify="left" if column == "bound" else "right")
        for epsilon in question.epsilons:
            here = [p for p in points if (p.steps, p.epsilon) == (steps, epsilon)]
            for point in here:
                table.add_row(*_cells(point), end_section=point is here[-1])
        print_table(console, table)
    console.print(GUARANTEE + ".")
    if question.paper:
        console.print(PAPER + ".")


def _cells(point: Point) -> list[str]:
    numbers = ("none", "", "", "", "")
    if point.sigma is not None and point.proven is not None:
        mark = "[bold red]UNSOUND[/]" if point.unsound else ""
        numbers = (f"{point.sigma:.4g}", upper(point.proven), mark)
        numbers += (f"{point.utility:.4g}", f"{point.rate:,.0f}")
    state = "proven" if point.curve in EXACT_ACCOUNTANTS else "violated" if point.notes else "hold"
    return [f"{point.epsilon:g}", LABELS.get(point.curve, point.curve), *numbers, state]


def _draw(question: TradeoffQuestion, points: list[Point], out: Path) -> None:
    """Draw σ², utility and rate against ε for every T: the paper's Figure 1, with exact curves.

    Thin and dotted where a bound is unsound, or its own conditions fail. Raises InputError.
    """
    problem = question.problem
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (1 + 4.5 * len(question.steps), 10)
    figure, axes = pyplot.subplots(
        3, len(question.steps), figsize=size, sharex=True, squeeze=False, layout="constrained"
    )
    for column, steps in enumerate(question.steps):
        exact = {
            by: [p for p in points if (p.curve, p.steps) == (by, steps)] for by in EXACT_ACCOUNTANTS
        }
        _column(axes[:, column], question, steps, exact)
    axes[0][0].legend(fontsize="small")
    figure.suptitle(
        f"record-level (ε, δ = {problem.delta:g}), add/remove one record; q = {problem.q:g}, "
        f"d = {problem.dimension:,}, K = {problem.clients}\n"
        "dotted: unsound, or outside the bound's own conditions; only RDP and PLD are guarantees",
        fontsize="medium",
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(out, dpi=150)
    except OSError as error:
        raise InputError(f"--out is {str(out)!r}: cannot be written ({error.strerror})") from error
    finally:
        pyplot.close(figure)


def _column(
    axes: Any, question: TradeoffQuestion, steps: int, exact: Mapping[str, list[Point]]
) -> None:
    """Fill the three panels of one T."""
    low, high = min(question.epsilons), max(question.epsilons)
    grid = [float(e) for e in np.geomspace(low, high, 40 if high > low else 1)]
    curves = {
        bound: [
            _marked(old_point(question.problem, bound, e, steps, question.paper), exact)
            for e in grid
        ]
        for bound in OLD_BOUNDS
    }
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
    axes[2].set_xticks(question.epsilons, [f"{e:g}" for e in question.epsilons])
    axes[2].minorticks_off()


def _marked(point: Point, exact: Mapping[str, list[Point]]) -> Point:
    """Return the point, noted where its σ is below the least with a proof, between known ones."""
    known = [p for p in exact[EXACT_ACCOUNTANTS[-1]] if p.sigma]
    epsilons, sigmas = ([math.log(getattr(p, key)) for p in known] for key in ("epsilon", "sigma"))
    least = float(np.interp(math.log(point.epsilon), epsilons, sigmas))
    if point.sigma is not None and math.log(point.sigma) < least - 0.01:
        return dataclasses.replace(point, notes=(*point.notes, "unsound"))
    return point


def _line(
    axis: Any, points: list[Point], value: Callable[[Point], float | None], name: str, colour: str
) -> None:
    """Draw a bound's curve: dotted over all of it, solid where its conditions hold."""
    xs = [p.epsilon for p in points]
    every = [np.nan if (v := value(p)) is None else v for p in points]
    holds = [np.nan if p.notes else y for p, y in zip(points, every, strict=True)]
    axis.plot(xs, every, linestyle=":", linewidth=1, color=colour)
    axis.plot(xs, holds, linewidth=1.5, color=colour, label=name)
