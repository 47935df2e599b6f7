"""What the figures share: colours, type, and the way from a matplotlib figure to inline SVG."""

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

# Okabe and Ito's colours: told apart with any colour vision, and in print by their lightness.
BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#6b7280"
INK = "#1f2933"

MANY = 20
"""Above so many sites a chart shows quantiles in place of single sites."""

Item = TypeVar("Item")

WHOLE, HALF = 6.6, 4.6
"""Widths of a figure in inches: alone in its row, or beside another."""

_POINTS = 400
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a site may be called $x$
    "font.size": 9,
    "axes.edgecolor": "#9aa5b1",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e4e7eb",
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": "#52606d",
    "ytick.color": "#52606d",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


@dataclass(frozen=True)
class Drawing:
    """A finished figure. svg: nothing in it is fetched. simulator_only: no site releases it."""

    title: str
    svg: str
    caption: str
    simulator_only: bool = False


class Sheet:
    """A figure to draw on: `with Sheet(height) as sheet`, then `sheet.svg(title)`.

    Independent of pyplot, so nothing global is touched and no display is needed.
    """

    def __init__(self, height: float, width: float = WHOLE) -> None:
        self._style = matplotlib.rc_context(_STYLE)
        self._size = (width, height)

    def __enter__(self) -> "Sheet":
        self._style.__enter__()
        self.figure = Figure(figsize=self._size, layout="constrained")
        return self

    def __exit__(self, *error: object) -> None:
        self._style.__exit__(None, None, None)

    def axes(self, xlabel: str, ylabel: str) -> Axes:
        """Return the sheet's single pair of axes."""
        axes = self.figure.subplots()
        axes.set(xlabel=xlabel, ylabel=ylabel)
        return axes

    def svg(self, title: str) -> str:
        """Return the figure as an <svg> element that may stand beside others in one page."""
        buffer = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with matplotlib.rc_context({"svg.hashsalt": title}), warnings.catch_warnings():
            # The reader's browser has the glyphs that matplotlib's own font lacks.
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            self.figure.savefig(buffer, format="svg", metadata=metadata)
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        # Groups are numbered alike in every figure, and nothing refers to them.
        text = re.sub(r'<g id="[^"]*">', "<g>", text)
        return text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def rounds_axis(axes: Axes) -> None:
    """Mark whole rounds only."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.margins(x=0.02)


def percent_axis(axes: Axes, which: str = "y") -> None:
    """Write an axis' fractions in per cent."""
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %"))


def legend_above(axes: Axes, columns: int = 3) -> None:
    """Put the legend above the plot."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2)


def marker(points: int) -> str:
    """Return a marker for lines of few points, where a line alone would hide them."""
    return "o" if points <= 15 else ""


def thin(items: Sequence[Item]) -> list[Item]:
    """Return at most as many items as a line needs, evenly spaced, the first and last among them.

    >>> thin(range(3)), len(thin(range(5000))), thin(range(5000))[-1]
    ([0, 1, 2], 400, 4999)
    """
    if len(items) <= _POINTS:
        return list(items)
    return [items[i] for i in np.linspace(0, len(items) - 1, _POINTS).round().astype(int)]


def shorten(name: str, length: int = 24) -> str:
    """Return a name that fits beside a bar.

    >>> shorten("a" * 30)
    'aaaaaaaaaaaaaaaaaaaaaaa…'
    """
    return name if len(name) <= length else name[: length - 1] + "…"
