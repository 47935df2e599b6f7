"""docs/images/evidence*.svg: accuracy over ε, and the papers' figures, of what is stored alone."""

import hashlib
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import matplotlib
from experiments.evidence import ali, best, fedfdp, fedproxvr
from experiments.evidence.ali import COLUMNS
from experiments.evidence.cells import Book
from experiments.evidence.page_ali import NAMES, SETTINGS, Setting
from experiments.evidence.stored import HERE
from matplotlib.figure import Figure

IMAGES: Final = HERE.parents[1] / "docs" / "images"

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """Axes: lines by label, each of the points that are stored; log: of the horizontal axis."""

    title: str
    x: str
    y: str
    lines: dict[str, Points]
    log: bool = False


_STYLES: Final = {
    "printed": ("#57606a", "--"),
    "CNN, η = 0.5 (faithful)": ("#cf6a00", "-"),
    "CNN, η = 8 (tuned)": ("#cf6a00", ":"),
    "logistic regression on pixels, η = 8": ("#57606a", ":"),
    "features, noise of one's own": ("#0969da", "-"),
    "features, noise for the sum": ("#1a7f37", "-"),
}
_COLOURS: Final = ("#0969da", "#cf6a00", "#1a7f37", "#8250df", "#57606a", "#bf3989", "#9a6700")


def pictures(book: Book) -> dict[str, list[Panel]]:
    """Return each file's name and panels."""
    found = {"evidence": list(_over_epsilon(book)), "evidence-ali-1": list(_over_steps(book))}
    found["evidence-ali-4-5"] = list(_step_lists(book))
    found["evidence-fedproxvr-2"] = list(_over_rounds(book))
    found["evidence-fedfdp-3-4"] = list(_sweeps(book))
    return found


def _over_epsilon(book: Book) -> Iterator[Panel]:
    """Accuracy by ε of ALI-DPFL's tables, each the largest that there is."""
    epsilons = sorted({column.epsilon for column in COLUMNS})
    for data in ali.DATA:
        lines = {
            label: [(e, value) for e in epsilons if (value := _at(book, data, label, e))]
            for label in _STYLES
        }
        yield Panel(NAMES[data], "ε, δ = 1e-5", "accuracy, %", lines)


def _at(book: Book, data: str, label: str, epsilon: float) -> float | None:
    here = [column for column in COLUMNS if column.epsilon == epsilon]
    if label == "printed":
        return max(max(ali.printed(data, column)) for column in here)
    settings = {setting.name: setting for setting in SETTINGS}
    if label in settings:
        pairs = [pair for column in here for pair in settings[label].runs(data, column)]
        means = [book.mean(*pair) for pair in pairs]
        return max((100 * mean for mean in means if mean is not None), default=None)
    found = best.accuracies(book, data, epsilon, "own" if label.endswith("own") else "sum")
    return statistics.fmean(found) if found else None


def _over_steps(book: Book) -> Iterator[Panel]:
    """Accuracy by τ, in each row of the tables at its largest ε: ALI-DPFL's Figure 1."""
    for data in ali.DATA:
        lines = dict[str, Points]()
        for column in (COLUMNS[2], COLUMNS[8], COLUMNS[11]):
            name = f"R_s = {column.row}, ε = {column.epsilon:g}"
            printed = ali.printed(data, column)[1:]
            lines[f"{name}, printed"] = list(zip(column.fixed, printed, strict=True))
            runs = Setting("cnn", ali.LARGER).runs(data, column)[1:]
            means = zip(column.fixed, map(book.mean, *zip(*runs, strict=True)), strict=True)
            known = [(tau, 100 * mean) for tau, mean in means if mean is not None]
            lines[f"{name}, η = {ali.LARGER:g}"] = [(float(tau), y) for tau, y in known]
        yield Panel(NAMES[data], "τ", "accuracy, %", lines)


def _step_lists(book: Book) -> Iterator[Panel]:
    """τ by round where R_s < R_c, CNN, faithful, first seed: ALI-DPFL's Figures 4 to 6."""
    for data in ali.DATA:
        lines = dict[str, Points]()
        for column in COLUMNS:
            if column.rounds < column.iterations:
                run = ali.adaptive(data, "cnn", ali.FAITHFUL, column)
                steps = book.stored.seeds(run).get("0", {}).get("steps", [])
                name = f"R_s = {column.row}, R_c = {column.iterations}"
                lines[name] = [(float(n), float(tau)) for n, tau in enumerate(steps, start=1)]
        yield Panel(NAMES[data], "round", "τ", lines)


def _over_rounds(book: Book) -> Iterator[Panel]:
    """Loss and accuracy by round of Table 1's runs and others: FedProxVR's Figure 2."""
    for name, y, scale in (("loss", "loss, test records", 1.0), ("held_out", "accuracy, %", 100.0)):
        lines = dict[str, Points]()
        for row in fedproxvr.CONVEX + fedproxvr.CURVES:
            run, label = fedproxvr.run(row), f"{row.method}, τ = {row.local_steps}, B = {row.batch}"
            looks = sorted({int(k) for o in book.stored.seeds(run).values() for k in o["looks"]})
            seen = [(look, book.mean(run, look, name)) for look in looks[::4]]
            known = [(float(t), scale * mean) for t, mean in seen if mean is not None]
            lines |= {label: known} if known else {}
        yield Panel("Fashion-MNIST, 100 devices", "round", y, lines)


def _sweeps(book: Book) -> Iterator[Panel]:
    """Ψ by λ, accuracy and Ψ by C: FedFDP's Figures 3 and 4."""
    weights = {w: [fedfdp.weighed(d, w) for d in fedfdp.SWEEPS] for w in fedfdp.SWEPT}
    clips = {clip: [fedfdp.clipped(d, clip) for d in fedfdp.SWEEPS] for clip in fedfdp.CLIPS}
    for runs, x, name, y in (
        (weights, "λ, η = 16", "psi", "Ψ"),
        (clips, "C, η = 1", "accuracy", "accuracy, %"),
        (clips, "C, η = 1", "psi", "Ψ"),
    ):
        scale = 100.0 if name == "accuracy" else 1.0
        lines = {
            NAMES[data]: [
                (at, scale * mean)
                for at, each in runs.items()
                if (mean := book.mean(each[place], 600, name)) is not None
            ]
            for place, data in enumerate(fedfdp.SWEEPS)
        }
        yield Panel("", x, y, lines, log=True)


def digest(panels: list[Panel]) -> str:
    """Return what tells whether a figure is of these lines."""
    content = [[panel.title, panel.x, panel.y, panel.lines] for panel in panels]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write(panels: list[Panel], place: Path) -> None:
    """Draw panels side by side into a file that says of which lines it is."""
    style = {"svg.hashsalt": "evidence", "svg.fonttype": "none", "font.size": 9}
    style |= {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e6e8eb",
    }
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8.4, 4.2), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
            for label, points in panel.lines.items():
                plain = _COLOURS[labels.index(label) % len(_COLOURS)], "-"
                colour, dashes = _STYLES.get(label, plain)
                marker = "." if len(points) < 20 else ""
                x, y = zip(*points, strict=True) if points else ([], [])
                axes.plot(x, y, dashes, color=colour, marker=marker, label=label)
            axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
            if panel.log:
                axes.set_xscale("log")
        handles, said = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, said, loc="outside lower center", ncols=3, frameon=False)
        about = {"Date": None, "Creator": None, "Description": f"of {digest(panels)}"}
        figure.savefig(place, format="svg", metadata=about, facecolor="white")
