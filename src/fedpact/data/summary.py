"""What a table's columns hold, beside their declaration, and a first draft of one.

Every figure here is exact and unprotected. It is printed on the machine that has the records;
sharing it is a release. So is a range or a list of categories that is taken from records: a draft
proposes it behind a #, without effect until a person corrects it and removes the #.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedpact.common.errors import DataError
from fedpact.common.format import count_noun, list_some, number, percent, toml, toml_key
from fedpact.data.cells import (
    NOT_UTF_8,
    Cells,
    conversion,
    find_named,
    is_blank,
    is_missing,
    read_columns,
    read_npz,
    text_of,
    to_numbers,
)
from fedpact.data.inputs import check_role
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
        least, middle, most = (
            np.quantile(self.finite, (0.0, 0.5, 1.0)).tolist() if kind == "numbers" else [None] * 3
        )
        few = Counter(self.words.values() if kind in ("text", "dates") else ())
        return ColumnSummary(
            self.name,
            kind,
            *(least, middle, most),
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


_MOST_VALUES: Final = 20
"""Nobody lists all values of a text column that has more of them than this."""
_CODES: Final = 10
"""Whole numbers with at most so many different values may be codes."""
_ROWS_SHOWN: Final = 3
_TAIL: Final = 2.0
"""A range this many times wider than that of 98 % of the values has a long tail."""

_HEAD: Final = """\
# Drafted from {file} by `fedpact inspect`. Lines of the form "# key = value" are proposals and have
# no effect. For each one: correct it to what such a value can be, not to what is in this file; then
# remove the "#". Delete the lines "# found:" before you share this file: they are exact figures of
# these records. docs/how-to/prepare-tables.md explains the keys.
"""


@np.errstate(all="ignore")  # as of numbers near 1e308
def draft(path: Path, roles: Mapping[str, str | None]) -> tuple[str, list[ColumnSummary]]:
    """Return a draft of [records] as TOML, and what each column holds.

    roles: the columns of labels, sites and persons, "label", "site" and "person"; None for none.
    Raises DataError: the file cannot be read, or has no such column.
    """
    head = _HEAD.format(file=path.name)
    named = {role: column for role, column in roles.items() if column is not None}
    if path.suffix.lower() == ".npz":
        if named:
            raise DataError(
                f"data file {path}: --{' --'.join(named)}: an .npz file has no columns to name, "
                "but arrays x, y, site and person; leave that out"
            )
        x = read_npz(path)["x"]
        found, finite = summarise_array(x, RecordForm()), ColumnCells.of("x", x.reshape(-1)).finite
        lines = (
            ["# found: " + _span(finite), *_ranges(finite, "low", "high")] if len(finite) else []
        )
        return "\n".join([head, "[records]", *lines, ""]), found
    table = read_columns(path)
    for role, column in named.items():
        check_role(f"data file {path}", role, column, table.cells)
    columns, broken = {n: ColumnCells.of(n, some) for n, some in table.cells.items()}, table.broken
    label, found = roles.get("label"), [one.summary() for one in columns.values()]
    features = [one for one in found if one.name not in roles.values()]
    dropped = {one.name: why for one in features if (why := _unusable(one, columns[one.name]))}
    lines = [head, *(f"{key} = {toml(of)}" for key, of in {"data": str(path), **named}.items())]
    lines += ['# label = "..."   # the column to predict'] * (label is None)
    task = [] if label is None else _task(columns[label])
    lines += [*task, "", "[records]"]
    if broken:
        rows = _rows(sorted(broken))
        lines.append(f"# found: {count_noun(len(broken), 'line')} that cannot be read ({rows})")
    if NOT_UTF_8 in broken.values():
        command = conversion(path, "read_csv", encoding="cp1252")
        lines.append(f"# found: lines that are not UTF-8 text. To convert the file: {command}")
    if label is not None and not task:
        lines += _classes(columns[label])
    if dropped:
        lines += [f"# not used: {name or '(no name)'}: {why}" for name, why in dropped.items()]
        lines.append(f"drop = {toml([*dropped])}")
    for one in features:
        if one.name not in dropped:
            lines += ["", f"[records.columns.{toml_key(one.name)}]"]
            lines += _column(one, columns[one.name])
    return "\n".join([*lines, ""]), found


def _unusable(one: ColumnSummary, cells: ColumnCells) -> str:
    if one.kind == "nothing":
        return "every cell is empty"
    if one.kind == "dates":
        return "dates or times. Convert them to a number, such as days since a fixed day"
    if one.kind == "numbers":
        if one.low == one.high:
            return "the same value in every row"
        return describe_codes(cells)
    if one.remark:
        return one.remark
    if one.distinct > _MOST_VALUES:
        return "text with many different values, such as names, notes or identifiers"
    return "the same value in every row" if one.distinct == 1 and not one.missing else ""


def _task(cells: ColumnCells) -> list[str]:
    finite = cells.finite
    if len(finite) < len(cells.x) / 2 or len(np.unique(finite)) <= _MOST_VALUES:
        return []
    ends = ", ".join(_around(finite))
    return ["", "[task]", 'kind = "regression"', f"# found: {_span(finite)}", f"# range = [{ends}]"]


def _classes(cells: ColumnCells) -> list[str]:
    found = sorted(cells.texts)
    if not found:
        return ["# label: every cell is empty"]
    if len(found) > _MOST_VALUES:
        return [f"# label: text with {len(found)} different values: is this the right column?"]
    return [
        *_spelt_missing(cells, "classes"),
        "# found: these labels. List all classes that there can be",
        f"# classes = {toml(found)}",
    ]


def _spelt_missing(cells: ColumnCells, names: str) -> list[str]:
    """Return remarks on words that count as missing unless they are among the declared names."""
    return [
        f"# found: {word!r} in {count_noun(count, 'row')}, which counts as missing: if it is a "
        f"value of its own, add it to the {names}"
        for word, count in cells.spelt_missing.most_common()
    ]


def _column(one: ColumnSummary, cells: ColumnCells) -> list[str]:
    missing = f"; {percent(one.missing)} missing" if one.missing else ""
    if one.kind == "text":
        words = sorted(cells.texts)
        lines = [
            f"# found: text with {one.distinct} different values{missing}",
            f"# categories = {toml(words)}   # all that there can be",
            '# scale = "one-hot"   # a number for each; without it 0, 1, 2, ... in this order',
        ]
        lines += (told := _spelt_missing(cells, "categories"))
        if missing and words and not told:
            most = cells.texts.most_common(1)[0][0]
            lines.append(f"# fill = {toml(most)}   # the most frequent; for a missing value")
        return lines
    finite, values = cells.finite, np.unique(cells.finite)
    lines = [f"# found: {_span(finite)}{missing}"]
    if odd := cells.words:
        form = describe_form(Counter(odd.values())) or "these rows are left out"
        told = count_noun(len(odd), "cell")
        lines.append(f"# found: {told} without a number ({_rows([*odd])}): {form}")
    if 2 < len(values) <= _CODES and (values == np.rint(values)).all():
        codes = toml(values.tolist())
        lines.append(f"# if these are codes, in place of a range: categories = {codes}")
    lines += _ranges(finite)
    if missing and np.abs(finite).max() < 1e30:
        median = _plain(float(f"{np.median(finite):.2g}"))
        lines.append(f"# fill = {median}   # replaces a missing value; else the row is left out")
    return lines


def _rows(rows: Sequence[int]) -> str:
    """Return the first of some rows, counted from 1 below the header."""
    named = ", ".join(str(row + 1) for row in rows[:_ROWS_SHOWN])
    return f"row{'s' * (len(rows) > 1)} {named}" + ", ..." * (len(rows) > _ROWS_SHOWN)


def _span(values: np.ndarray) -> str:
    low, median, high = (number(float(np.quantile(values, share))) for share in (0, 0.5, 1))
    return f"numbers, {low if low == high else f'{low} to {high}'}, median {median}"


def _ranges(values: np.ndarray, *keys: str) -> list[str]:
    ends = _around(values)
    if not 0 < float(ends[1]) - float(ends[0]) < math.inf:
        return []
    lines = [f"# {key} = {end}" for key, end in zip(keys, ends, strict=False)]
    if not keys:
        lines = [f"# range = [{', '.join(ends)}]   # what such a value can be"]
        beyond = int(((values < float(ends[0])) | (values > float(ends[1]))).sum())
        what = f"sets {count_noun(beyond, 'value')} beyond it to the nearer end"
        lines += [f"# clamp = true   # {what}"] if beyond else []
    return [*lines, '# scale = "range"   # maps the range to -1..1']


def _around(values: np.ndarray) -> list[str]:
    """Return the ends of a range around most of some values, without long tails."""
    first, last = np.quantile(values, (0.01, 0.99))
    least, most = float(values.min()), float(values.max())
    if len(values) > 100 and most - least > _TAIL * (last - first) > 0:
        least, most = float(first), float(last)
    return [_plain(end) for end in propose_range(least, most)]


def propose_range(low: float, high: float) -> tuple[float, float]:
    """Return round numbers around low <= high, from 0 where that is not far off.

    >>> propose_range(18.0, 94.0), propose_range(35.1, 41.2), propose_range(-3.0, 2.0)
    ((0.0, 100.0), (35.0, 42.0), (-3.0, 2.0))
    """
    span = high - low
    if not 1e-300 < span < math.inf:  # below, its power of ten is 0
        return low, high
    step = 10.0 ** math.floor(math.log10(span))
    first, last = math.floor(low / step) * step, math.ceil(high / step) * step
    if 0 <= first <= last / 2:
        first = 0.0
    return float(f"{first:.12g}"), float(f"{last:.12g}")


def _plain(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
