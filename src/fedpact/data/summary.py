"""What a table's columns hold beside what is declared of them: for their owner's eyes alone.

Every figure here is of the records themselves, exact, and protected by nothing. It is printed where
they lie; to pass it on is to release it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import numpy as np

from fedpact.common.format import number, percent
from fedpact.data.cells import Cells, NumberCells, find_named, is_blank, text_of, to_numbers
from fedpact.data.schema import Column, RecordForm, ValueRange

_MOST: Final = 0.05
"""Of more values than this share beyond a range it is asked whether the unit is another."""
_NARROW: Final = 0.02
"""And of values that fill no more than this share of it."""
_FAR: Final = 4.0
"""And of a median so many deviations from a declared mean."""
_SHOWN: Final = 5
_DATES: Final = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%Y/%m/%d")


@dataclass(frozen=True)
class ColumnSummary:
    """A column's cells. kind: "numbers", "text", "dates", or "nothing" where all are missing.

    low, median, high: of its finite numbers; None without any. missing: the share of cells that
    say that nothing was recorded. outside: of all cells the share that is not as declared. values:
    the most frequent texts with their counts, and distinct how many texts there are. declared: the
    declaration in words. remark: what to look at, "" for nothing.
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


def summarise_column(name: str, cells: Cells, own: ValueRange | None = None) -> ColumnSummary:
    """Return what a column's cells [n] hold. own: what is declared of it; None: nothing."""
    found = _Cells.of(cells)
    kind = found.kind
    outside, remark = np.zeros(len(cells), bool), ""
    if own is not None:
        outside, remark = _beside(found, own, kind)
    few = Counter(text for text in found.texts if text) if kind in ("text", "dates") else Counter()
    low, median, high = found.spread((0.0, 0.5, 1.0))
    count = max(len(cells), 1)
    return ColumnSummary(
        name,
        kind,
        *(low, median, high),
        float(found.blank.sum() / count),
        float(outside.sum() / count),
        tuple(few.most_common(_SHOWN)),
        len(few),
        "" if own is None else describe_range(own),
        remark,
    )


def summarise_array(x: np.ndarray, form: RecordForm) -> list[ColumnSummary]:
    """Return what an array of records x [n, ...] holds: each column of a row, else all together."""
    if x.ndim == 2 and x.shape[1] <= 50:
        return [
            summarise_column(str(k), _numbers(x[:, k]), form.of(str(k))) for k in range(x.shape[1])
        ]
    return [summarise_column("all values", _numbers(x.reshape(-1)), form)]


def describe_range(own: ValueRange) -> str:
    """Return in words what is declared of a column."""
    if isinstance(own, Column) and own.categories is not None:
        return "one of " + ", ".join(map(str, own.categories))
    if own.low is not None and own.high is not None:
        return f"{number(own.low)} to {number(own.high)}"
    if own.bounded:
        return f"from {number(own.low)}" if own.high is None else f"up to {number(own.high)}"
    if isinstance(own, Column) and own.mean is not None and own.deviation is not None:
        return f"about {number(own.mean)} ± {number(own.deviation)}"
    return "any number"


@dataclass(frozen=True)
class _Cells:
    """Cells as numbers x [n], NaN for none; which are blank, bool [n]; as text, where any is."""

    x: np.ndarray
    blank: np.ndarray
    texts: Sequence[str]
    cells: Cells

    @staticmethod
    def of(cells: Cells) -> "_Cells":
        if isinstance(cells, NumberCells):
            x = cells.floats()
            return _Cells(x, np.isnan(x), [], cells)
        x = to_numbers(cells)
        blank = np.array([is_blank(cell) for cell in cells], bool)
        odd = np.isnan(x) & ~blank
        texts = [text_of(cell) if bad else "" for cell, bad in zip(cells, odd, strict=True)]
        return _Cells(x, blank, texts, cells)

    @property
    def kind(self) -> str:
        here = int((~self.blank).sum())
        if not here:
            return "nothing"
        if 2 * np.isfinite(self.x).sum() >= here:
            return "numbers"
        texts = [text for text in self.texts if text]
        return "dates" if 2 * sum(map(is_date, texts)) >= here else "text"

    def spread(self, shares: tuple[float, ...]) -> list[float | None]:
        """Return the quantiles of the finite numbers."""
        finite = self.x[np.isfinite(self.x)]
        if not finite.size:
            return [None] * len(shares)
        return [float(value) for value in np.quantile(finite, shares)]


def is_date(text: str) -> bool:
    """Whether a text is a date, or a date with a time, as files usually have them."""
    with suppress(ValueError):
        datetime.fromisoformat(text)
        return True
    for form in _DATES:
        with suppress(ValueError):
            datetime.strptime(text, form)
            return True
    return False


def _numbers(values: np.ndarray) -> Cells:
    if values.dtype.kind == "U":
        return values.tolist()
    return NumberCells(values, np.zeros(len(values), bool))


def _beside(found: _Cells, own: ValueRange, kind: str) -> tuple[np.ndarray, str]:
    """Return which cells are not as declared, bool [n], and what to look at."""
    if isinstance(own, Column) and own.categories is not None:
        return _beside_categories(found, own)
    wrong = np.isnan(found.x) & ~found.blank
    if kind in ("text", "dates"):
        return wrong, f"{kind}, declared as numbers"
    low = -np.inf if own.low is None else np.float32(own.low)
    high = np.inf if own.high is None else np.float32(own.high)
    with np.errstate(over="ignore", invalid="ignore"):
        x = found.x.astype(np.float32)
        outside = wrong | (x < low) | (x > high)
    remark = _other_unit(found, own, float(outside.sum() / max((~found.blank).sum(), 1)))
    if not remark and wrong.any():
        remark = f"{int(wrong.sum())} cells are no numbers"
    return outside, remark


def _other_unit(found: _Cells, own: ValueRange, outside: float) -> str:
    """Return the question whether a column is in another unit than declared, "" if it is not."""
    first, median, last = found.spread((0.01, 0.5, 0.99))
    if median is None or first is None or last is None:
        return ""
    told = f"declared {describe_range(own)}: different unit?"
    low = -np.inf if own.low is None else own.low
    high = np.inf if own.high is None else own.high
    if not low <= median <= high:
        return f"median {number(median)}, {told}"
    if outside > _MOST:
        return f"{percent(outside)} beyond, median {number(median)}, {told}"
    if isinstance(own, Column) and own.mean is not None and own.deviation is not None:
        far = abs(median - own.mean) > _FAR * own.deviation
        return f"median {number(median)}, {told}" if far else ""
    if own.low is not None and own.high is not None and last > first:
        narrow = last - first < _NARROW * (own.high - own.low)
        return f"nearly all from {number(first)} to {number(last)}, {told}" if narrow else ""
    return ""


def _beside_categories(found: _Cells, own: Column) -> tuple[np.ndarray, str]:
    names = own.names
    if names is None:
        known = np.isin(found.x.astype(np.float32), np.array(own.categories, np.float32))
    else:
        place = dict.fromkeys(names, True)
        known = np.array([bool(find_named(cell, place, False)) for cell in found.cells], bool)
    unknown = ~known & ~found.blank
    odd = Counter(text_of(found.cells[row]) for row in unknown.nonzero()[0].tolist())
    if not odd:
        return unknown, ""
    few = ", ".join(f"{text!r} ({count})" for text, count in odd.most_common(_SHOWN))
    more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
    counted = "" if own.other is None else f", which count as {own.other!r}"
    return unknown, f"not declared: {few}{more}{counted}: other words?"


def summarise_table(
    columns: Mapping[str, Cells], form: RecordForm, features: Sequence[str]
) -> list[ColumnSummary]:
    """Return what those of the features hold that a table has."""
    here = [name for name in features if name in columns]
    return [summarise_column(name, columns[name], form.of(name)) for name in here]


def count_classes(y: Any, classes: Sequence[str]) -> dict[str, int]:
    """Return how many of the records y [n] have each class; the largest first."""
    counts = np.bincount(np.asarray(y, np.int64).reshape(-1), minlength=len(classes))
    named = zip(classes, counts.tolist(), strict=True)
    return dict(sorted(named, key=lambda each: -each[1]))
