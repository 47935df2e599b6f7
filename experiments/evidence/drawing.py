"""docs/images/evidence.svg: accuracy over ε, printed, measured, and the best that is known."""

import hashlib
import json
import statistics
from pathlib import Path
from typing import Final

import matplotlib
from experiments.evidence import ali, best
from experiments.evidence.ali import COLUMNS
from experiments.evidence.cells import Book
from experiments.evidence.page_ali import NAMES, SETTINGS, Setting
from experiments.evidence.stored import HERE
from matplotlib.figure import Figure

FIGURE: Final = HERE.parents[1] / "docs" / "images" / "evidence.svg"

Lines = dict[str, dict[str, list[tuple[float, float]]]]

_STYLES: Final = {
    "printed": ("#57606a", "--"),
    "CNN, η = 0.5 (faithful)": ("#cf6a00", "-"),
    "CNN, η = 8 (explained)": ("#cf6a00", ":"),
    "logistic regression on pixels, η = 8": ("#57606a", ":"),
    "features, noise of one's own": ("#0969da", "-"),
    "features, noise for the sum": ("#1a7f37", "-"),
}


def lines(book: Book) -> Lines:
    """Return by data set and label accuracies in per cent by ε, each the largest that there is."""
    return {
        data: {
            label: [(e, value) for e in _epsilons() if (value := _at(book, data, label, e))]
            for label in _STYLES
        }
        for data in ali.DATA
    }


def _epsilons() -> list[float]:
    return sorted({column.epsilon for column in COLUMNS})


def _at(book: Book, data: str, label: str, epsilon: float) -> float | None:
    here = [column for column in COLUMNS if column.epsilon == epsilon]
    if label == "printed":
        return max(max(ali.printed(data, column)) for column in here)
    settings = {setting.name: setting for setting in SETTINGS}
    if label in settings:
        return _largest(book, data, settings[label], here)
    found = best.accuracies(book, data, epsilon, "own" if label.endswith("own") else "sum")
    return statistics.fmean(found) if found else None


def _largest(book: Book, data: str, setting: Setting, here: list[ali.Column]) -> float | None:
    runs = [pair for column in here for pair in setting.runs(data, column)]
    each = [[100 * value for value in book.values(*pair, "accuracy")] for pair in runs]
    return max((statistics.fmean(values) for values in each if values), default=None)


def digest(found: Lines) -> str:
    """Return what tells whether a figure is of these lines."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def write(found: Lines, place: Path = FIGURE) -> None:
    """Draw the lines into a file that says of which they are."""
    style = {"svg.hashsalt": "evidence", "svg.fonttype": "none", "font.size": 9}
    style |= {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e6e8eb",
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8.4, 4.2), layout="constrained")
        for axes, (data, by_label) in zip(
            figure.subplots(1, len(found)), found.items(), strict=True
        ):
            for label, points in by_label.items():
                colour, dashes = _STYLES[label]
                axes.plot(*zip(*points, strict=True), dashes, color=colour, marker=".", label=label)
            axes.set(title=NAMES[data], xlabel="ε, δ = 1e-5", ylabel="accuracy, %")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        said = {"Date": None, "Creator": None, "Description": f"of {digest(found)}"}
        figure.savefig(place, format="svg", metadata=said, facecolor="white")
