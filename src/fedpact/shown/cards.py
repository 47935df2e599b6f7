"""A card in HTML for a notebook's cell: a title, a word of warning, figures, and a line below.

Nothing in it is fetched or run, so a notebook that is not trusted shows it, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from typing import Any

from fedpact.errors import InputError
from fedpact.shown.colours import css

_BOX = (
    "max-width:58rem;padding:.8rem 1rem;border:1px solid var(--line);border-radius:8px;"
    "background:var(--page);color:var(--ink);font:14px/1.45 system-ui,sans-serif"
)
_FIGURES = "display:flex;flex-wrap:wrap;gap:.5rem 1.6rem;margin:.5rem 0"
_VALUE = "font-size:1.3rem;font-weight:650;color:var(--ink)"
_SOFT = "color:var(--soft)"
_WARN = (
    "display:inline-block;padding:0 .5em;border-radius:1em;color:var(--{0});"
    "background:var(--{0}-wash)"
)


@dataclass(frozen=True)
class CardFigure:
    """A figure of a card. bad: something is wrong with it."""

    label: str
    value: str
    note: str = ""
    bad: bool = False


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
    return (
        f'<style>{css()}</style><div class="fedpact" style="{_BOX}">'
        f'<b style="font-size:1.05rem">{escape(title)}</b>{told}'
        f'<div style="{_FIGURES}">{"".join(map(_figure, figures))}</div>'
        f'<div style="{_SOFT}">{escape(below)}</div></div>'
    )


def _figure(figure: CardFigure) -> str:
    value = _VALUE.replace("--ink", "--bad") if figure.bad else _VALUE
    return (
        f'<div><div style="{_SOFT}">{escape(figure.label)}</div>'
        f'<div style="{value}">{escape(figure.value)}</div>'
        f'<div style="{_SOFT};font-size:12px">{escape(figure.note)}</div></div>'
    )


def listing(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str, note: str
) -> str:
    """Return a table in the place of a card's figures; the first column names the rows."""
    cell = 'style="padding:.2rem 1rem .2rem 0;text-align:{};border-bottom:1px solid var(--line)"'
    side = [cell.format("left"), *[cell.format("right")] * (len(headings) - 1)]

    def line(cells: Sequence[str], tag: str) -> str:
        parts = zip(cells, side, strict=True)
        return f"<tr>{''.join(f'<{tag} {s}>{escape(c)}</{tag}>' for c, s in parts)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return (
        f'<style>{css()}</style><div class="fedpact" style="{_BOX};overflow-x:auto">'
        f'<b style="font-size:1.05rem">{escape(title)}</b>'
        '<table style="border-collapse:collapse;margin:.5rem 0;background:none;color:inherit">'
        f"<thead>{line(headings, 'th')}</thead><tbody>{body}</tbody></table>"
        f'<div style="{_SOFT}">{escape(note)}</div></div>'
    )


def frame(rows: Sequence[dict[str, Any]], instead: str) -> Any:
    """Return rows as a pandas DataFrame. instead: what has the same without pandas.

    Raises InputError: pandas is not installed.
    """
    try:
        made = import_module("pandas").DataFrame
    except ImportError as error:
        raise InputError(
            f"a table needs pandas: `pip install 'fedpact[frames]'`, or read {instead} as it is"
        ) from error
    return made(rows)
