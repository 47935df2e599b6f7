"""Summaries of a table's columns, compared with their declaration: for the owner alone.

Every figure here is exact and unprotected. It is printed on the machine that has the records;
sharing it is a release.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from fedpact.common.format import list_some, number, percent
from fedpact.data.cells import Cells, find_named, is_blank, is_missing, text_of, to_numbers
from fedpact.data.schema import Column, RecordForm

_MOST: Final = 0.05
"""Of more values than this share beyond a range it is asked whether the unit is another."""
_NARROW: Final = 0.02
"""And of values that fill no more than this share of it."""
_FAR: Final = 4.0
"""And of a median so many deviations from a declared mean."""
_SHOWN: Final = 5
_FEW: Final = 10
"""Numbers of a column with fewer cells, and written forms with fewer values, are not judged."""
_DATE: Final = re.compile(
    r"(\d{1,4}[-./]\d{1,2}[-./]\d{1,4}|\d{1,2}[-./ ]?[^\W\d_]{3,9}\.?[-./, ]*\d{2,4}"
    r"|[^\W\d_]{3,9}\.? \d{1,2},? \d{4}|\d{1,2}:\d\d(:\d\d)?)"
    r"([T ,]+\d{1,2}:\d\d\S*( ?[AaPp][Mm])?)?"
)
_WRITTEN: Final = (
    (r"[+-]?\d{1,3}([,' \u00a0]\d{3})+(\.\d+)?", "numbers with thousands separators. Remove them"),
    (
        r"[+-]?\d+([. ]\d{3})*,\d+",
        'numbers with decimal commas. Write points, in pandas by table["X"].str.replace(",", ".")',
    ),
    (r"[<>≤≥]=?\s*[\d.,]+", 'bounds such as "<5". Write a number, such as the bound itself'),
    (
        r"[€$£¥]\s*[+-]?[\d.,]+|[+-]?\d[\d.,]*\s*(?!(st|nd|rd|th)$)[^\W\d_°%€$£¥][^\W\d_/]{0,7}"
        r"(/[^\W_]+)?|[+-]?\d[\d.,]*\s*[°%€$£¥]\w?",
        "numbers with a unit or a currency. Write the number alone",
    ),
)
"""Forms of numbers that are not read as such, with what to do."""
_IDENTIFIER: Final = re.compile(r"(^|[\W_])(id|no|nr|num|number|key|uid|mrn|index)($|[\W_])", re.I)


@dataclass(frozen=True)
class ColumnSummary:
    """The summary of a column. kind: "numbers", "text", "dates", or "nothing" if all are missing.

    low, median, high: of the finite numbers, or None. missing: the share of missing cells. outside:
    of cells that do not match the declaration. values: the most frequent texts with their counts;
    distinct: how many texts. declared: the declaration in words. remark: a point to look at, or "".
    """

    name: str
    kind: str
    low: float | None
    median: float | None
    high: float | None
    missing: float
    outside: float
    values: tuple[tuple[str, int], ...]
    distinct: int
    declared: str
    remark: str


@dataclass(frozen=True)
class ColumnCells:
    """A column's cells as numbers x [n], NaN for others; a mask of blank ones; and the others.

    words: row -> text of a cell that is neither a finite number nor blank.
    """

    name: str
    cells: Cells | np.ndarray
    x: np.ndarray
    blank: np.ndarray
    words: Mapping[int, str]

    @staticmethod
    def of(name: str, cells: Cells | np.ndarray) -> "ColumnCells":
        """Read the cells [n] of a column."""
        if isinstance(cells, np.ndarray) and cells.dtype.kind not in "biuf":
            cells = list(cells)
        if isinstance(cells, np.ndarray):
            x, blank = cells.astype(np.float64), np.isnan(cells)
        else:
            x, blank = to_numbers(cells), np.array([is_blank(cell) for cell in cells], bool)
        odd = np.flatnonzero(~np.isfinite(x) & ~blank).tolist()
        return ColumnCells(name, cells, x, blank, {row: text_of(cells[row]) for row in odd})

    @property
    def kind(self) -> str:
        """What most cells hold; see `ColumnSummary`."""
        here = int((~self.blank).sum())
        if not here:
            return "nothing"
        if 2 * len(self.finite) >= here:
            return "numbers"
        dates = sum(_DATE.fullmatch(word) is not None for word in self.words.values())
        return "dates" if 2 * dates >= here else "text"

    @property
    def finite(self) -> np.ndarray:
        """The finite numbers, in their order."""
        return self.x[np.isfinite(self.x)]

    @cached_property
    def texts(self) -> Counter[str]:
        """How often each text occurs, numbers included."""
        return Counter(text_of(cell) for cell in self.cells if not is_blank(cell))

    @cached_property
    def spelt_missing(self) -> Counter[str]:
        """How often each word occurs that counts as missing and may be a name, such as "none"."""
        words = (text_of(cell) for cell in self.cells if is_blank(cell))
        return Counter(word for word in words if not is_missing(word))

    def summary(self, own: Column | None = None) -> ColumnSummary:
        """Summarise the column. own: its declaration, or None."""
        kind, count = self.kind, max(len(self.x), 1)
        outside, remark = np.zeros(0, bool), describe_form(self.texts) if kind == "text" else ""
        if own is not None:
            outside, remark = _beside(self, own, kind)
        told = (
            np.quantile(self.finite, (0.0, 0.5, 1.0)).tolist() if kind == "numbers" else [None] * 3
        )
        few = Counter(self.words.values() if kind in ("text", "dates") else ())
        return ColumnSummary(
            self.name,
            kind,
            *told,
            float(self.blank.sum() / count),
            float(outside.sum() / count),
            tuple(few.most_common(_SHOWN)),
            len(few),
            "" if own is None else describe_range(own),
            remark,
        )


def summarise_array(x: np.ndarray, form: RecordForm) -> list[ColumnSummary]:
    """Summarise records x [n, ...]: by column if they are rows, otherwise all values together."""
    if x.ndim == 2 and x.shape[1] <= 50:
        columns = [ColumnCells.of(str(k), x[:, k]) for k in range(x.shape[1])]
        return [one.summary(form.of(one.name)) for one in columns]
    return [ColumnCells.of("all values", x.reshape(-1)).summary(form.general)]


def describe_range(own: Column) -> str:
    """Describe a column's declaration."""
    if own.categories is not None:
        return "one of " + ", ".join(map(str, own.categories))
    if own.mean is not None and own.deviation is not None and not own.bounded:
        return f"about {number(own.mean)} ± {number(own.deviation)}"
    low, high = own.ends
    return f"{number(low)} to {number(high)}" if own.bounded else "any number"


def describe_form(texts: Counter[str]) -> str:
    """Describe the number format of most texts, with a remedy; "" for none."""
    counts = [
        sum(count for text, count in texts.items() if re.fullmatch(form, text))
        for form, _ in _WRITTEN
    ]
    best = int(np.argmax(counts))
    few = best == len(_WRITTEN) - 1 and len(texts) <= _FEW  # categories such as "1a", "2b"
    return _WRITTEN[best][1] if 2 * counts[best] > texts.total() and not few else ""


def describe_codes(found: ColumnCells) -> str:
    """Describe integers that are codes or identifiers instead of measurements; "" for others."""
    x = found.finite
    if len(x) < _FEW or not (x == np.rint(x)).all():
        return ""
    month, day = x // 100 % 100, x % 100
    as_date = (x > 19e6) & (x < 21.1e6) & (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
    if as_date.mean() > 0.9:
        return "dates such as 20240131. Convert them, for example to days since a fixed day"
    if any(isinstance(cell, str) and re.fullmatch(r"0\d+", cell.strip()) for cell in found.cells):
        return "codes with leading zeros, such as postal codes"
    if len(np.unique(x)) < len(x) or len(x) < 2 * _FEW:
        return ""
    dense = x.max() - x.min() < 100 * len(x)
    return (
        "whole numbers that differ in every row, such as a case number or a time"
        if dense or x.min() >= 1e8 or _IDENTIFIER.search(found.name)
        else ""
    )


def _beside(found: ColumnCells, own: Column, kind: str) -> tuple[np.ndarray, str]:
    """Return the mask of cells that do not match the declaration, bool [n], and a remark."""
    if own.categories is not None:
        return _beside_categories(found, own)
    wrong = ~np.isfinite(found.x) & ~found.blank
    how = describe_form(Counter(found.words.values()))
    how = ": Write days since a fixed day" if kind == "dates" else f": {how}" if how else ""
    if kind in ("text", "dates"):
        return wrong, f"{kind}, declared as numbers{how}"
    with np.errstate(over="ignore", invalid="ignore"):
        x, (low, high) = found.x.astype(np.float32), map(np.float32, own.ends)
        beyond = ~wrong & ((x < low) | (x > high))
    remark = _other_unit(found, own, float(beyond.sum() / max((~found.blank).sum(), 1)))
    if how or (wrong.any() and not remark):
        remark = f"{int(wrong.sum())} cells are no numbers{how}"
    return wrong | beyond, remark


def _other_unit(found: ColumnCells, own: Column, beyond: float) -> str:
    """Ask whether a column is in another unit than declared; "" if it does not look so."""
    if not found.finite.size:
        return ""
    first, median, last = np.quantile(found.finite, (0.01, 0.5, 0.99)).tolist()
    low, high = own.ends
    what = ""
    if beyond > _MOST and low <= median <= high:
        what = f"{percent(beyond)} beyond, median {number(median)}"
    elif not low <= median <= high or (
        own.mean is not None
        and own.deviation is not None
        and abs(median - own.mean) > _FAR * own.deviation
    ):
        what = f"median {number(median)}"
    elif 0 < last - first < _NARROW * (high - low) < math.inf:
        what = f"nearly all from {number(first)} to {number(last)}"
    return what and f"{what}, declared {describe_range(own)}: different unit?"


def _beside_categories(found: ColumnCells, own: Column) -> tuple[np.ndarray, str]:
    if own.names is None:
        known = np.isin(found.x.astype(np.float32), np.array(own.categories, np.float32))
    else:
        place = dict.fromkeys(own.names, True)
        known = np.array([find_named(cell, place, False) for cell in found.cells], bool)
    unknown = ~known & ~found.blank
    odd = Counter(text_of(found.cells[row]) for row in unknown.nonzero()[0].tolist())
    if not odd:
        return unknown, ""
    few = list_some((f"{text!r} ({count})" for text, count in odd.most_common()), _SHOWN)
    counted = "" if own.other is None else f", which count as {own.other!r}"
    return unknown, f"not declared: {few}{counted}: other words?"


def count_classes(y: Any, classes: Sequence[str]) -> dict[str, int]:
    """Return class -> number of records in y [n], the largest first."""
    counts = np.bincount(np.asarray(y, np.int64).reshape(-1), minlength=len(classes))
    named = zip(classes, counts.tolist(), strict=True)
    return dict(sorted(named, key=lambda each: -each[1]))
