"""A person's own records: each is held against what was declared, and left out if it does not fit.

Whether a record is used, and as what, follows from that record and the declaration (form) alone. So
a wrong value, word, category or label takes one record out and says so to the records' owner; it
never stops a site, as that would tell others of it.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import numpy as np

from fedpact.common.errors import DataError
from fedpact.data.cells import Cells, NumberCells, Table
from fedpact.data.schema import Column, RecordForm, ValueRange
from fedpact.data.sieve import MISSING, RecordFilter
from fedpact.data.tokens import is_tokens, read_tokens

# "none" or "na" may be the name of a class or of a site.
_NO_NAME: Final = {"", "?", "nan", "-nan", "nat", "<na>", "#n/a"}
_MISSING: Final = _NO_NAME | {"na", "n/a", "null", "none"}

_SPELLED: Final = {
    "true": ("True", "true", "TRUE", "1"),
    "false": ("False", "false", "FALSE", "0"),
}
"""How a truth value may be written: a CSV has it in words, a frame as Python's, others as 0, 1."""
_NAMES_OF: Final = {**_SPELLED, "1": _SPELLED["true"], "0": _SPELLED["false"]}

_Value = Callable[[int, int], Any]
"""(row, place in a flattened record) -> what stands in the file."""

# Whole numbers from here on are others beside text or a missing value, as floats.
_LARGEST: Final = 2**53


@dataclass(frozen=True)
class _Source:
    """Numbers as they were given, x [n, ...], with what a place in a record is called."""

    x: np.ndarray
    sieve: RecordFilter
    name: Callable[[int], str]
    value: _Value

    def mark(self, bad: np.ndarray, why: str, *, out: bool = True) -> None:
        """Leave out the records with a bad value, bool like x; or note that it was clamped."""
        if not bad.any():
            return
        flat = bad.reshape(len(bad), -1)
        for row in np.flatnonzero(flat.any(1)).tolist():
            place = int(flat[row].argmax())
            note = self.sieve.leave_out if out else self.sieve.clamp
            note(row, self.name(place), why, self.value(row, place))


def numbers_of_table(
    table: Table, form: RecordForm, values: str, sieve: RecordFilter
) -> np.ndarray:
    """Return the features [n, d] of a table, float32 or int64, after its sieve has all faults.

    Of tokenised text they are [n, rows, T]; see tokens.
    values: "float32" or "int64". Raises DataError: a column is declared that the table has not.
    """
    for row, why in table.broken.items():
        sieve.leave_out(row, "", why)
    features = table.features
    check_columns(sieve.origin, form, features)
    if is_tokens(features):
        return read_tokens(table.columns, features, form.length, form.vocabulary, sieve)
    columns = [table.columns[name] for name in features]
    x = np.empty((table.count, len(features)))
    for k, (name, cells) in enumerate(zip(features, columns, strict=True)):
        own = form.of(name)
        names = own.names if isinstance(own, Column) else None
        x[:, k] = _places(cells, own) if isinstance(own, Column) and names else _numbers(cells)
        fill = own.number(own.fill)
        if fill is not None:
            missing = np.isnan(x[:, k]) & np.array([is_blank(value) for value in cells], bool)
            x[missing, k] = fill
        _mark_cells(np.isnan(x[:, k]), name, cells, names is not None, sieve)
    source = _Source(x, sieve, features.__getitem__, lambda row, k: columns[k][row])
    return _convert_numbers(source, form, values, features)


def numbers_of_array(
    x: np.ndarray, form: RecordForm, values: str, sieve: RecordFilter
) -> np.ndarray:
    """Return x [n, ...] as float32 or int64, after its sieve has all faults.

    x: numbers or text. Raises DataError: columns are declared for other records than [n, d], one
    that there is not, or one with categories in text.
    """
    features = [str(k) for k in range(x.shape[1])] if x.ndim == 2 else []
    check_columns(sieve.origin, form, features)
    if any(column.names for column in form.columns.values()):
        raise DataError(
            f"data set {sieve.origin}: records.columns declares categories in text: expected "
            "numbers for what an array holds; write the records as .csv or .parquet, or number them"
        )
    numbers, blank = x, None
    if x.dtype.kind == "U":
        x = readable(x)
        numbers = np.array([number_of(v) for v in x.reshape(-1).tolist()], float).reshape(x.shape)
        blank = np.array([is_blank(v) for v in x.reshape(-1).tolist()], bool).reshape(x.shape)
    elif x.dtype.kind == "f":
        blank = np.isnan(x)
    if blank is not None and blank.any():
        numbers = _fill_missing(numbers, blank, form, features)
    shape = x.shape[1:]

    def name(place: int) -> str:
        index = tuple(map(int, np.unravel_index(place, shape)))
        return str(index[0]) if len(index) == 1 else str(index)

    def value(row: int, place: int) -> Any:
        return x[row].reshape(-1)[place].item()

    return _convert_numbers(_Source(numbers, sieve, name, value), form, values, features)


def class_numbers(
    labels: Cells | np.ndarray,
    classes: Sequence[str],
    how: str | None,
    column: str,
    sieve: RecordFilter,
) -> np.ndarray:
    """Return each record's class as its place in classes, int64 [n]; the sieve has the faults.

    how: "numbers", "names", or None: numbers are places; text is a name, or else a place.
    """
    place = {name: k for k, name in enumerate(classes)}
    # 1 is true wherever a truth value stood beside it, or may have, and not the second class.
    truth = {name.lower() for name in classes} == {"true", "false"}
    found = np.zeros(len(labels), np.int64)
    given = readable(labels).tolist() if isinstance(labels, np.ndarray) else labels
    for row, label in enumerate(given):
        text, k = text_of(label), -1
        if how == "names" or (how is None and (truth or isinstance(label, str | bytes | bool))):
            k = find_named(label, place, place.get(str(label), -1))
        if k < 0 and how != "names":
            *_, number = _SPELLED.get(text.lower(), (without_decimal_zeros(text, place),))
            k = _place_of(number, len(classes))
        if _beyond_float64(label):
            sieve.leave_out(row, column, "is a number from 2^53 on: write such names as text")
            k = 0
        elif k < 0 and is_blank(text):
            sieve.leave_out(row, column, "is no class", label)
        elif k < 0:
            sieve.unknown(row, column, f"is none of the {len(classes)} classes", label)
        found[row] = max(k, 0)
    return found


def text_of(value: Any) -> str:
    """Return a label or the name of a site as text: whole numbers without a point, True, False.

    Bytes are read as UTF-8. A Decimal is without the zeros that it has where another of its column
    has more digits.
    """
    if value is None:
        return ""
    if isinstance(value, Decimal) and value.is_finite():
        value = value.normalize()
        return format(value if value else abs(value), "f")
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace").strip()
    if isinstance(value, float | np.floating) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def _beyond_float64(value: Any) -> bool:
    """Whether a number is another, and so another name, beside a missing one: see _LARGEST."""
    if isinstance(value, int | np.integer):
        return not -_LARGEST < value < _LARGEST
    return isinstance(value, float | np.floating) and _LARGEST <= abs(float(value)) < math.inf


def number_of(value: Any) -> float:
    """Return a cell as a number: 1 and 0 for true and false, in words too; NaN for none."""
    # Python reads 1_000 and digits of any script, which no file of measurements means by them.
    if not (isinstance(value, str) and ("_" in value or not value.strip().isascii())):
        with suppress(TypeError, ValueError, OverflowError):
            return float(value)
    *_, number = _SPELLED.get(text_of(value).lower(), (math.nan,))
    return float(number)


def is_blank(value: Any) -> bool:
    """Whether a cell says that nothing was recorded."""
    return text_of(value).lower() in _MISSING


def is_missing(name: str) -> bool:
    """Whether a label or the name of a site is none."""
    return name.lower() in _NO_NAME


def ambiguous(classes: Sequence[str]) -> bool:
    """Whether a class's name is the number of another: as 1 for the first, which is number 0."""
    return any(_place_of(name, len(classes)) not in (-1, k) for k, name in enumerate(classes))


def _place_of(text: str, classes: int) -> int:
    whole = re.fullmatch(r"[0-9]{1,18}", text)
    return int(text) if whole and int(text) < classes else -1


def check_columns(origin: str, form: RecordForm, features: Sequence[str]) -> None:
    """Raise DataError: columns are declared that are none of a record's."""
    unknown = sorted(set(form.kept) - set(features))
    if unknown:
        known = ", ".join(features[:20]) or "none, as a record is no row of numbers"
        raise DataError(
            f"data set {origin}: records.columns declares {', '.join(unknown)}: expected some of "
            f"its columns, which are {known}; correct the names"
        )


def _fill_missing(
    x: np.ndarray, blank: np.ndarray, form: RecordForm, features: Sequence[str]
) -> np.ndarray:
    """Return x [n, ...] with what was declared in place of what is missing, bool like x."""
    x = x.copy()
    parts = [(slice(None), k) for k in range(len(features))] if form.columns else [...]
    for part, name in zip(parts, features if form.columns else ("",), strict=True):
        own = form.of(name)
        fill = own.number(own.fill)
        if fill is not None:
            x[part] = np.where(blank[part], fill, x[part])
    return x


def _convert_numbers(
    source: _Source, form: RecordForm, values: str, features: Sequence[str]
) -> np.ndarray:
    """Return the numbers in their declared type, with what is beyond a range clamped or marked."""
    if values == "int64":
        x = _whole(source)
    else:
        _mark_infinite(source, source.x)
        wide = source.x.dtype.itemsize >= 8
        with np.errstate(over="ignore"):
            # By way of float64, as beside text or a missing value: a whole number of 60 bits can
            # be another when it is rounded once.
            x = np.array(np.asarray(source.x, np.float64) if wide else source.x, np.float32)
    if form.vocabulary is not None:
        source.mark((x < 0) | (x >= form.vocabulary), f"is none of {form.vocabulary} words")
    if not form.columns:
        _keep_range(source, x, ..., form)
    else:
        for k, name in enumerate(features):
            _keep_range(source, x, (slice(None), slice(k, k + 1)), form.of(name))
    if values != "int64":
        _mark_infinite(source, x)
    return x


def _mark_infinite(source: _Source, x: np.ndarray) -> None:
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        source.mark(~np.isfinite(x), "is no finite number")


def _whole(source: _Source) -> np.ndarray:
    """Return int64, 0 for what is no whole number."""
    x = source.x
    if x.dtype.kind != "f":
        good = (x > -_LARGEST) & (x < _LARGEST)
        source.mark(~good, "is no whole number below 2^53")
        return np.where(good, x, 0).astype(np.int64)
    with np.errstate(invalid="ignore"):
        good = np.isfinite(x) & (np.rint(x) == x) & (np.abs(x) < _LARGEST)
    if not good.all():
        source.mark(~good, "is no whole number below 2^53")
    return np.where(good, x, 0).astype(np.int64)


def _keep_range(source: _Source, x: np.ndarray, part: Any, own: ValueRange) -> None:
    """Clamp what is beyond the range where that is declared, and else mark it; x is written to."""
    some = x[part]
    if isinstance(own, Column) and own.categories is not None:
        if own.names is None:
            known = np.isin(some, np.array(own.categories).astype(x.dtype))
            other = own.number(own.other)
            if other is None:
                _mark_part(source, part, ~known, "is none of its declared categories")
            else:
                # What is no number is left out for that.
                x[part] = np.where(known | ~np.isfinite(some), some, other)
        return
    if not own.bounded:
        return
    low, high = _bounds(own, x.dtype)
    with np.errstate(invalid="ignore"):
        beyond = (some < low) | (some > high)
    if beyond.any():
        _mark_part(source, part, beyond, "is beyond its declared range", out=not own.clamp)
        if own.clamp:
            # The others keep their bits, whoever else is beyond.
            x[part] = np.where(beyond, np.clip(some, low, high), some)


def _bounds(own: ValueRange, dtype: Any) -> tuple[Any, Any]:
    """The range in the numbers' own type, as 0.1 in float32 is a little more than 0.1."""
    low = -np.inf if own.low is None else own.low
    high = np.inf if own.high is None else own.high
    if dtype == np.float32:
        with np.errstate(over="ignore"):
            return np.float32(low), np.float32(high)
    limits = np.iinfo(np.int64)

    def whole(bound: float, rounded: Callable[[float], int], default: int) -> np.int64:
        # Integers, as float64 would round the numbers that it is compared with.
        within = default if math.isinf(bound) else rounded(bound)
        return np.int64(min(max(within, int(limits.min)), int(limits.max)))

    return whole(low, math.ceil, limits.min), whole(high, math.floor, limits.max)


def readable(text: np.ndarray) -> np.ndarray:
    """Return text without cells that no string can hold, which are blank then, and so missing."""
    if text.dtype.kind != "U" or not text.dtype.itemsize:
        return text
    unit = np.dtype(np.uint32).newbyteorder(text.dtype.byteorder)
    units = np.ascontiguousarray(text).view(unit).reshape(*text.shape, text.dtype.itemsize // 4)
    return np.where((units > 0x10FFFF).any(-1), "", text)


def _mark_part(source: _Source, part: Any, bad: np.ndarray, why: str, *, out: bool = True) -> None:
    whole = np.zeros(source.x.shape, bool)
    whole[part] = bad
    source.mark(whole, why, out=out)


def _mark_cells(
    bad: np.ndarray, column: str, cells: Cells, names: bool, sieve: RecordFilter
) -> None:
    for row in bad.nonzero()[0].tolist():
        value = cells[row]
        if is_blank(value):
            why = MISSING
        else:
            why = "is none of its declared categories" if names else "is no finite number"
        sieve.leave_out(row, column, why, value)


def _numbers(cells: Cells) -> np.ndarray:
    """Return cells as float64 [n], NaN for what is no number."""
    if isinstance(cells, NumberCells):
        return cells.floats()
    # One by one: numpy would read all of them in another way where one of them is of another type.
    return np.array([number_of(value) for value in cells], np.float64)


def find_named(value: Any, place: Mapping[str, Any], unknown: Any) -> Any:
    """Return what stands in `place` under the name that a cell is; a truth value has several.

    unknown: in its place where the cell is none of the names.
    """
    text = text_of(value)
    names = (text, without_decimal_zeros(text, place), *_NAMES_OF.get(text.lower(), ()))
    return next((place[name] for name in names if name in place), unknown)


def without_decimal_zeros(text: str, names: Iterable[str] = ()) -> str:
    """Return "1" of "1.0", as pandas writes whole numbers beside an empty cell.

    Not where names have points: of codes 250 and 250.0 are two.
    """
    number = re.fullmatch(r"(-?[0-9]+)\.0+", text)
    return number[1] if number and not any("." in name for name in names) else text


def _places(cells: Cells, own: Column) -> np.ndarray:
    place = {name: float(k) for k, name in enumerate(own.names or [])}
    other = own.number(own.other)
    unknown = np.nan if other is None else other

    def of(value: Any) -> float:
        if _beyond_float64(value):
            return unknown
        return find_named(value, place, np.nan if is_blank(value) else unknown)

    return np.array([of(value) for value in cells], np.float64)
