"""Cards, tables and progress bars for notebooks and terminals, and the pages' colours.

A figure is drawn in light colours, which its SVG refers to as `var(--NAME)`, so that one drawing
serves both themes. Text has a contrast of at least 4.5 : 1 to its background, lines of 3 : 1.

Nothing is fetched or executed, so untrusted notebooks display it, too.
"""

import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

_THEMES: Final = {
    "page": ("#ffffff", "#12161b"),
    "ink": ("#1f2933", "#e8edf2"),
    "soft": ("#52606d", "#aab5c1"),
    "line": ("#e4e7eb", "#2f3842"),
    "axis": ("#7b8794", "#7a8794"),
    "wash": ("#f7f8fa", "#1a2027"),
    "link": ("#0b5a8f", "#7cc0f5"),
    "bad": ("#a61b1b", "#ff9a94"),
    "bad-wash": ("#fdecea", "#3a1a1a"),
    "warn": ("#855600", "#f0c36a"),
    "warn-wash": ("#fff8e6", "#322813"),
    "warn-line": ("#c3a15a", "#8a6d2c"),
    # After Okabe and Ito: distinguishable with any colour vision, and by lightness in print.
    "blue": ("#0072b2", "#4fa8e8"),
    "red": ("#d04a02", "#ff8552"),
    "green": ("#00875f", "#35c79a"),
    "orange": ("#b27700", "#e8b04a"),
    "pink": ("#b5578f", "#e39bc4"),
    "sky": ("#3a8fbf", "#9ad4f5"),
    "grey": ("#6b7280", "#9aa5b1"),
}
"""Colour -> how it looks on a light page, and on a dark one."""
LIGHT: Final = {name: light for name, (light, _) in _THEMES.items()}
DARK: Final = {name: dark for name, (_, dark) in _THEMES.items()}
_NAMES: Final = {colour: name for name, colour in LIGHT.items()}


def apply_theme(svg: str) -> str:
    """Return SVG that uses the colours of the page around it."""
    colours = rf"({'|'.join(_NAMES)})\b"
    return re.sub(colours, lambda found: f"var(--{_NAMES[found[0]]})", svg)


def css() -> str:
    """Return the CSS rules that define the colours within class "fedpact".

    Light in print and by default; a notebook's theme takes precedence over the system's.
    """
    light, dark = (
        f"{''.join(f'--{name}:{c};' for name, c in colours.items())}color-scheme:{theme};"
        for theme, colours in (("light", LIGHT), ("dark", DARK))
    )
    notebook = '[data-jp-theme-light="{}"] .fedpact'.format
    return "\n".join(
        (
            f".fedpact{{{light}}}",
            f"@media screen and (prefers-color-scheme:dark){{.fedpact{{{dark}}}}}",
            f"@media screen{{{notebook('true')}{{{light}}}{notebook('false')}{{{dark}}}}}",
        )
    )


_BOX = (
    "max-width:58rem;padding:.8rem 1rem;border:1px solid var(--line);border-radius:8px;"
    "background:var(--page);color:var(--ink);font:14px/1.45 system-ui,sans-serif"
)
_FIGURES = "display:flex;flex-wrap:wrap;gap:.5rem 1.6rem;margin:.5rem 0"
_VALUE = "font-size:1.3rem;font-weight:650;color:var(--{})"
_SOFT = "color:var(--soft)"
_WARN = (
    "display:inline-block;padding:0 .5em;border-radius:1em;color:var(--{0});"
    "background:var(--{0}-wash)"
)


@dataclass(frozen=True)
class CardFigure:
    """A headline figure of a card, a page or a terminal. bad: show it as a problem.

    simulator_only: no site would release it.
    """

    label: str
    value: str
    note: str = ""
    bad: bool = False
    simulator_only: bool = False


def card(
    title: str,
    figures: Sequence[CardFigure],
    *,
    warning: str = "",
    bad: bool = False,
    below: str = "",
) -> str:
    """Return a card. warning: a few words, in red if bad. below: a line under the figures."""
    told = ""
    if warning:
        told = f' <span style="{_WARN.format("bad" if bad else "warn")}">{escape(warning)}</span>'
    told_figures = "".join(
        f'<div><div style="{_SOFT}">{escape(figure.label)}</div>'
        f'<div style="{_VALUE.format("bad" if figure.bad else "ink")}">{escape(figure.value)}</div>'
        f'<div style="{_SOFT};font-size:12px">{escape(figure.note)}</div></div>'
        for figure in figures
    )
    return (
        f'<style>{css()}</style><div class="fedpact" style="{_BOX}">'
        f'<b style="font-size:1.05rem">{escape(title)}</b>{told}'
        f'<div style="{_FIGURES}">{told_figures}</div>'
        f'<div style="{_SOFT}">{escape(below)}</div></div>'
    )


@dataclass(frozen=True)
class TextTable:
    """A table of texts for terminal, page and notebook; the first column names the rows."""

    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]
    first: str = ""

    def print(self, console: Console, title: str = "") -> None:
        """Print it with its figures to the right."""
        columns = [self.first, *(Column(heading, justify="right") for heading in self.headings)]
        told = Text(title) if title else None
        print_table(console, columns, self.rows, title=told, title_justify="left")

    def html(self, title: str, note: str, warning: Sequence[str] = ()) -> str:
        """Return it as a card. warning: lines above the table, in red."""
        cell = (
            'style="padding:.2rem .8rem .2rem 0;text-align:{};vertical-align:bottom;'
            'white-space:{};border-bottom:1px solid var(--line)"'
        )
        told = "".join(f'<div style="color:var(--bad)">{escape(line)}</div>' for line in warning)

        def line(cells: Sequence[str], tag: str) -> str:
            # Headings wrap, numbers do not: a narrow output is scrolled past the names of the rows.
            wrap = "normal" if tag == "th" else "nowrap"
            name = cell.format("left;position:sticky;left:0;background:var(--page)", wrap)
            styles = [name, *[cell.format("right", wrap)] * len(self.headings)]
            parts = zip(cells, styles, strict=True)
            return f"<tr>{''.join(f'<{tag} {s}>{escape(c)}</{tag}>' for c, s in parts)}</tr>"

        body = "".join(line(row, "td") for row in self.rows)
        head = line((self.first, *self.headings), "th")
        return (
            f'<style>{css()}</style><div class="fedpact" style="{_BOX};width:fit-content;'
            'box-sizing:border-box;max-width:100%;overflow-x:auto">'
            f'<b style="font-size:1.05rem">{escape(title)}</b>{told}'
            '<table style="border-collapse:collapse;margin:.5rem 0;background:none;color:inherit">'
            f"<thead>{head}</thead><tbody>{body}</tbody></table>"
            f'<div style="{_SOFT}">{escape(note)}</div></div>'
        )


def frame(rows: Sequence[dict[str, Any]]) -> Any:
    """Return rows as a pandas DataFrame."""
    # Imported here, as it takes 0.3 s.
    from pandas import DataFrame

    return DataFrame(rows)


_PAUSE = 0.1


def in_notebook() -> bool:
    """Whether this process runs a notebook."""
    found = sys.modules.get("IPython")
    shell = found.get_ipython() if found is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class Bar:
    """A progress bar, `bar(done, text)`, updated at most ten times a second, and at the end."""

    def __init__(self, total: int) -> None:
        # Only notebooks have it.
        from IPython.display import HTML, display

        self._total, self._drawn, self._html = total, 0.0, HTML
        self._cell: Any = display(HTML(self.html(0, "starting")), display_id=True)

    def __call__(self, done: int, text: str) -> None:
        """Show the progress."""
        now = time.monotonic()
        if done >= self._total or now - self._drawn >= _PAUSE:
            self._drawn = now
            self._cell.update(self._html(self.html(done, text)))

    def html(self, done: int, text: str) -> str:
        """Return the bar's HTML."""
        style = "width:16rem;vertical-align:middle;accent-color:var(--blue)"
        return (
            f"<style>{css()}</style><div class='fedpact' style='background:var(--page);"
            f"color:var(--ink);font:14px system-ui,sans-serif'><progress max={self._total} "
            f"value={done} style='{style}'></progress> {done}/{self._total} {escape(text)}</div>"
        )


def print_table(
    console: Console,
    columns: Sequence[str | Column],
    rows: Iterable[Sequence[str | Text]],
    **options: Any,
) -> None:
    """Print rows of texts, in which nothing is taken for markup. options: of rich's Table.

    If the longest words do not fit, they are printed at full width, so that the terminal wraps
    them: rich would truncate words, and a truncated ε is a wrong ε.
    """
    table = Table(*columns, **options)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    for column in table.columns:
        column.overflow = "fold"
    needed = console.measure(table, options=console.options.update(width=10_000))
    if needed.minimum > console.width:
        table.width = needed.maximum
    console.print(table, crop=False)
