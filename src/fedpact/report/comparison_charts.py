"""The charts of a comparison: one colour for each entry, means over seeds and bands.

Each function returns a Chart, or None if there is nothing to draw.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from matplotlib.ticker import NullLocator

from fedpact.common.format import choose_byte_unit
from fedpact.common.notebook import LIGHT
from fedpact.report.compared_runs import Comparison, Entry, PairedDifference, Spread
from fedpact.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    Chart,
    log_axis,
    percent_axis,
    rounds_axis,
    sheet,
    shorten,
    thin,
)
from fedpact.report.run_summary import RunSummary

# Okabe and Ito's colours, those of single runs first; dashes distinguish further entries.
_COLOURS = (BLUE, RED, GREEN, ORANGE, LIGHT["pink"], LIGHT["sky"], GREY)
_DASHES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")

Against = Literal["rounds", "bytes", "simulated seconds", "ε"]
ChartMeasure = Literal["accuracy", "loss"]


@dataclass(frozen=True)
class Line:
    """A measure against its cost x, ascending; low <= mean <= high over the runs."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def on_the_way(comparison: Comparison) -> list[list[Chart]]:
    """Return rows of charts of the accuracy or loss against rounds, bytes, simulated seconds and ε.

    For a sweep, each is a row with a chart for each point, all on one scale.
    """
    measure: ChartMeasure = "accuracy" if comparison.judged == "accuracy" else "loss"
    groups, rows = comparison.groups, list[list[Chart]]()
    for against in get_args(Against):
        row = list[Chart]()
        for at, entries in groups.items():
            if drawing := curves(comparison, entries, measure, against):
                said = any(drawing.caption == one.caption for one in row)
                title = ", ".join(filter(None, [drawing.title, at]))
                caption = "" if said else drawing.caption
                row.append(drawing.named(title, caption, drawing.simulator_only))
        every = [axes for drawing in row for axes in drawing.axes]
        limits = [axes.get_ylim() for axes in every]
        for axes in every:
            axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        if row:
            rows.append(row)
    return rows if len(groups) > 1 else [[drawing for row in rows for drawing in row]]


def curves(
    comparison: Comparison, entries: Sequence[Entry], measure: ChartMeasure, against: Against
) -> Chart | None:
    """Draw a measure of these entries' global models against its cost."""
    found = [(entry, curve(entry, measure, against)) for entry in entries]
    drawn = [(entry, line) for entry, line in found if line is not None]
    if not drawn:
        return None
    title = f"{measure.capitalize()} against {against}"
    unit, name = 1.0, {"rounds": "round", "ε": "largest ε spent by a site"}.get(against, against)
    if against == "bytes":
        unit, symbol = choose_byte_unit(max(float(line.x[-1]) for _, line in drawn))
        name = f"sent so far ({symbol})"
    bases = list(dict.fromkeys(entry.base for entry in comparison.entries))
    with sheet() as chart:
        axes = chart.pair(name, "mean loss" if measure == "loss" else measure)
        for entry, line in drawn:
            base = entry.base if len(entries) < len(comparison.entries) else entry.name
            place = bases.index(base) if base in bases else entries.index(entry)
            look, x = _look(place), line.x / unit
            if len(entry.runs) > 1:
                axes.fill_between(x, line.low, line.high, color=look["color"], alpha=0.13, lw=0)
            axes.plot(x, line.mean, label=shorten(base), markevery=max(1, len(x) // 6), **look)
        if measure == "accuracy":
            percent_axis(axes)
        else:
            low = min(line.low.min() for _, line in drawn)
            high = max(line.high.max() for _, line in drawn)
            if low > 0 and high > 10 * low:
                log_axis(axes)
        if against == "rounds":
            rounds_axis(axes)
        axes.margins(x=0.02)
    caption = _caption(comparison, entries, [entry for entry, _ in drawn], against)
    return chart.named(title, caption, comparison.pooled)


@dataclass(frozen=True)
class Series:
    """A measure over a swept key. points: the value as text -> the value and the measure."""

    label: str
    points: dict[str, tuple[Any, Spread]]


def series(comparison: Comparison, key: str, measure: str) -> list[Series]:
    """Return a key figure over a swept key, for each combination of everything else.

    Entries without a value in some run are left out.
    """
    found = dict[str, Series]()
    for entry in comparison.entries:
        values, spread = entry.point.values, entry.spread(comparison.key_figures[measure])
        if key not in values or spread is None or not math.isfinite(spread.mean):
            continue
        others = [f"{k} = {v}" for k, v in values.items() if k != key]
        label, value = ", ".join([entry.base, *others]), values[key]
        found.setdefault(label, Series(label, {})).points[str(value)] = (value, spread)
    return list(found.values())


def sweeps(comparison: Comparison) -> dict[str, list[Chart]]:
    """Draw accuracy and the worst site's accuracy, or mean loss, over every swept key."""
    found = {
        key: [_over(comparison, key, measure) for measure in comparison.key_figures]
        for key in comparison.swept
    }
    return {key: drawn for key, figures in found.items() if (drawn := [d for d in figures if d])}


def _over(comparison: Comparison, key: str, measure: str) -> Chart | None:
    lines = series(comparison, key, measure)
    if not lines:
        return None
    title = f"{measure.capitalize()} over {key}"
    at, log = _places([value for line in lines for value, _ in line.points.values()], key)
    with sheet() as chart:
        axes = chart.pair(key, "mean loss" if measure == "mean loss" else "accuracy")
        for i, line in enumerate(lines):
            texts = sorted(line.points, key=at.__getitem__)
            spreads = [line.points[text][1] for text in texts]
            axes.errorbar(
                [at[text] for text in texts],
                [spread.mean for spread in spreads],
                yerr=[spread.deviation or 0.0 for spread in spreads],
                capsize=3,
                label=shorten(line.label),
                **_look(i),
            )
        if log:
            axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        labels = [shorten(text.removesuffix(".0")) for text in at]
        axes.set_xticks(list(at.values()), labels)
        if measure != "mean loss":
            percent_axis(axes)
    caption = "Means over seeds of the last model; error bars are one sample standard deviation. "
    if key == "privacy.epsilon":
        caption += f"ε is what each site allows. {_guarantee(comparison)}"
    return chart.named(title, caption.strip(), measure == "worst site" or comparison.pooled)


def _places(values: list[Any], key: str) -> tuple[dict[str, float], bool]:
    """Return the positions of a swept key's values by their text, and if the axis is in logs."""
    numbers = [x for x in values if isinstance(x, int | float) and not isinstance(x, bool)]
    if len(numbers) < len(values):
        texts = dict.fromkeys(map(str, values))
        return {text: float(i) for i, text in enumerate(texts)}, False
    low, high = min(numbers), max(numbers)
    log = low > 0 and (high >= 10 * low or key.endswith(("epsilon", "delta")))
    return {str(x): float(x) for x in sorted(numbers)}, log


def _look(i: int) -> dict[str, Any]:
    """Return the style of the i-th entry: colour, dashes and marker."""
    marks = zip((_COLOURS, _DASHES, _MARKERS), ("color", "linestyle", "marker"), strict=True)
    return {"ms": 4, **{name: kinds[i % len(kinds)] for kinds, name in marks}}


def name_pair(comparison: Comparison, one: PairedDifference) -> str:
    """Return a description such as "fedprox minus fedavg at ε = 1"."""
    first, second, at = one.entry.base, one.reference.base, str(one.entry.point)
    if first == second:
        whose = f"{first}: " if len({entry.base for entry in comparison.entries}) > 1 else ""
        return f"{whose}{at} minus {one.reference.point}"
    return f"{first} minus {second}" + (f" at {at}" if at else "")


def curve(entry: Entry, measure: ChartMeasure, against: Against) -> Line | None:
    """Return the mean over an entry's runs, for the range of x that all of them reach.

    Runs are interpolated linearly between evaluations, without rounds that are not finite. None: no
    run has a point, or they have no common range.
    """
    lines = [line for run in entry.runs if len((line := _line(run, measure, against))[0])]
    if not lines:
        return None
    low, high = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    grid = np.unique(np.concatenate([x for x, _ in lines]))
    grid = np.array(thin([float(x) for x in grid if low <= x <= high]))
    if not grid.size:
        return None
    values = np.stack([np.interp(grid, x, y) for x, y in lines])
    return Line(grid, values.mean(0), values.min(0), values.max(0))


def _line(
    run: RunSummary, measure: ChartMeasure, against: Against
) -> tuple[np.ndarray, np.ndarray]:
    points = list[tuple[float, float]]()
    for record, sent, clock in run.course:
        y = getattr(record, measure)
        x = {
            "rounds": record.round,
            "bytes": sent,
            "ε": max(record.epsilon.values(), default=None),
            # Without a clock it stays at 0.
            "simulated seconds": clock or None,
        }[against]
        if x is not None and y is not None and math.isfinite(x) and math.isfinite(y):
            points.append((x, y))
    x, y = np.array(points, dtype=float).reshape(-1, 2).T
    # If nothing was spent between two evaluations, the later one counts.
    last = np.append(np.diff(x) > 0, True)[: len(x)]
    return x[last], y[last]


def _caption(
    comparison: Comparison, entries: Sequence[Entry], drawn: Sequence[Entry], against: Against
) -> str:
    caption = {
        "rounds": "A round is one exchange with every participating site. ",
        "bytes": "Messages as encoded, both ways, all sites together. ",
        "ε": f"{_guarantee(comparison)} ",
        "simulated seconds": "By the plans' [clock]: a round takes as long as its slowest site. ",
    }[against]
    if any(len(entry.runs) > 1 for entry in drawn):
        caption += "Lines are means over seeds; bands span the lowest to the highest run."
    missing = [entry.name for entry in entries if entry not in drawn]
    if missing:
        reason = "not private or without a run" if against == "ε" else "without a run"
        caption += f" Not drawn, {reason}: {', '.join(missing)}."
    return caption.strip()


def _guarantee(comparison: Comparison) -> str:
    kinds = dict.fromkeys(
        f"adjacency: {run.privacy['adjacency']}; accountant: {run.privacy['accountant']}"
        for run in comparison.runs
        if run.private
    )
    return f"Upper bounds on ε at the sites' δ; {' / '.join(kinds)}."
