"""Shared parts of the figures: style, legends, and the conversion to inline SVG."""

import io
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from fedpact.common.errors import InputError
from fedpact.common.notebook import LIGHT, apply_theme, css

BLUE, ORANGE, GREEN, RED, GREY = (LIGHT[n] for n in ("blue", "orange", "green", "red", "grey"))
INK = LIGHT["ink"]

MANY = 20
"""With more sites than this a chart shows quantiles instead of single sites."""

Item = TypeVar("Item")

WIDTH: Final = 3.6
"""Inches. At a phone's width type is still 11 pixels; on a screen three figures fit in a row."""

_POINTS = 400
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a site may be called $x$
    "font.size": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "axes.edgecolor": LIGHT["axis"],
    "axes.labelcolor": LIGHT["soft"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": LIGHT["axis"],
    "ytick.color": LIGHT["axis"],
    "xtick.labelcolor": LIGHT["soft"],
    "ytick.labelcolor": LIGHT["soft"],
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
}


@dataclass(frozen=True)
class LegendKey:
    """An entry of a legend. svg: a small picture of the line or the area."""

    label: str
    svg: str


class Chart(Figure):
    """A figure that a notebook shows with legend and caption, in the notebook's theme.

    simulator_only: no site releases it.
    """

    title, caption, simulator_only = "", "", False

    def named(self, title: str, caption: str, simulator_only: bool = False) -> Self:
        """Return the chart itself, with these."""
        self.title, self.caption, self.simulator_only = title, caption, simulator_only
        return self

    def pair(self, xlabel: str, ylabel: str) -> Axes:
        """Return the chart's single pair of axes."""
        axes = self.subplots()
        axes.set(xlabel=xlabel, ylabel=ylabel)
        return axes

    @property
    def keys(self) -> list[LegendKey]:
        """The entries of the legend; may be empty."""
        return draw_keys([self])

    @property
    def named_artists(self) -> list[tuple[Any, str]]:
        """What is drawn with a label, and the labels."""
        both = (axes.get_legend_handles_labels() for axes in self.axes)
        return [pair for handles, labels in both for pair in zip(handles, labels, strict=True)]

    @property
    def svg(self) -> str:
        """The figure as an <svg> element, without its legend, for a page with others."""
        return _draw_svg(self, self.title, f'role="img" aria-label="{escape(self.title)}"')

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        """Save as matplotlib does, with the legend, which pages show separately."""
        handles, labels = zip(*self.named_artists, strict=True) if self.named_artists else ((), ())
        with matplotlib.rc_context(_STYLE):
            legend = self.legend(handles, labels, loc="outside upper center", ncols=2)
            try:
                super().savefig(*args, **kwargs)
            finally:
                legend.remove()

    def _repr_html_(self) -> str:
        keys = " ".join(f"{key.svg} {escape(key.label)} " for key in self.keys)
        return (
            f"<style>{css()}</style><figure class='fedpact' style='margin:0;padding:.8rem;"
            "max-width:28rem;background:var(--page);color:var(--ink)'>"
            f"<b>{escape(self.title)}</b><div>{keys}</div>{self.svg}"
            f"<figcaption style='color:var(--soft)'>{escape(self.caption)}</figcaption></figure>"
        )


@contextmanager
def sheet(height: float = 2.5) -> Iterator[Chart]:
    """Yield a chart to draw on, in the figures' style; height: in inches.

    It does not use pyplot, so it needs no display and changes nothing global.
    """
    with matplotlib.rc_context(_STYLE):
        yield Chart(figsize=(WIDTH, height), layout="constrained")


def draw_keys(charts: Iterable[Chart]) -> list[LegendKey]:
    """Return the entries of one legend of these charts, each once."""
    named = {label: (drawn, chart) for chart in charts for drawn, label in chart.named_artists}
    found, form = list[LegendKey](), {"frameon": False, "borderpad": 0, "handletextpad": 0}
    for label, (drawn, chart) in named.items():
        picture = Figure(figsize=(0.31, 0.14))
        picture.legend([drawn], [""], loc="center", **form)
        svg = _draw_svg(picture, f"{chart.title}, {label}", 'aria-hidden="true"')
        found.append(LegendKey(label, svg))
    return found


def _draw_svg(figure: Figure, salt: str, attributes: str) -> str:
    """Return a figure as an <svg> element. salt: distinguishes its ids from those of others."""
    buffer = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    style = {**_STYLE, "svg.hashsalt": salt}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        # The browser has the glyphs that matplotlib's font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        Figure.savefig(figure, buffer, format="svg", metadata=metadata, transparent=True)
    text = buffer.getvalue()
    # Groups have the same ids in every figure, and nothing refers to them.
    text = re.sub(r'<g id="[^"]*">', "<g>", text[text.index("<svg") :])
    # The browser's font has similar widths.
    text = text.replace("DejaVu Sans", "system-ui")
    return apply_theme(text).replace("<svg", f"<svg {attributes}", 1)


def save_figure(figure: Figure, out: Path) -> None:
    """Write a figure to the file of an option --out. Raises InputError: it cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
    except OSError as error:
        raise InputError(f"--out is {str(out)!r}: cannot be written ({error.strerror})") from error


def rounds_axis(axes: Axes) -> None:
    """Mark whole rounds only."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.margins(x=0.02)


def percent_axis(axes: Axes, which: str = "y") -> None:
    """Write an axis' fractions in per cent."""
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %"))


def log_axis(axes: Axes) -> None:
    """Make the y axis logarithmic, with plain numbers; within two decades also at 3, 30, ..."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 100 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))


def marker(points: int) -> str:
    """Return a marker for lines with few points."""
    return "o" if points <= 15 else ""


def thin(items: Sequence[Item]) -> list[Item]:
    """Return at most 400 evenly spaced items, including the first and the last.

    >>> thin(range(3)), len(thin(range(5000))), thin(range(5000))[-1]
    ([0, 1, 2], 400, 4999)
    """
    if len(items) <= _POINTS:
        return list(items)
    return [items[i] for i in np.linspace(0, len(items) - 1, _POINTS).round().astype(int)]


def shorten(name: str, length: int = 24) -> str:
    """Return a name cut to a length in its middle, as names often differ at their ends.

    >>> shorten("department-of-cardiology-7", 12)
    'depart…ogy-7'
    """
    half = (length - 1) // 2
    return name if len(name) <= length else f"{name[: length - 1 - half]}…{name[-half:]}"
