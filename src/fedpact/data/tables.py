"""Tables as read, and their conversion to numbers.

Each record is checked against the declaration (form), and left out if it does not fit. Whether and
how it is used follows from that record and the declaration alone. So a wrong value, category or
label leaves one record out and is reported to the records' owner; it never stops a site, as that
would reveal it to others.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fedpact.common.errors import DataError
from fedpact.data.cells import Cells, beyond_floats, find_named, is_blank, to_numbers
from fedpact.data.schema import Column, RecordForm, ValueRange
from fedpact.data.sieve import MISSING, RecordFilter
from fedpact.data.tokens import is_tokens, read_tokens

_LARGEST: Final = 2**53  # whole numbers from here on are rounded by floats


@dataclass(frozen=True, eq=False)
class Table:
    """Records before conversion to numbers.

    origin: their name in errors. x: for a table name -> cells [n] of the features in order; for
    arrays one of them, [n, ...]. y: the labels [n, ...]; site, person: the names [n]; None without.
    broken: row from 0 -> its fault as a whole. roles: the names of the columns "label", "site" and
    "person". column: the column whose cells are the arrays x. titles: the names of the classes that
    y numbers. labels: the meaning of labels if the declaration has none, "names", "numbers", or
    None: see `class_numbers`.
    """

    origin: str
    x: Mapping[str, Cells] | np.ndarray
    y: Any = None
    site: Any = None
    person: Any = None
    broken: Mapping[int, str] | None = None
    roles: Mapping[str, str] = field(default_factory=lambda: {"label": "y"})
    column: str | None = None
    titles: Sequence[str] | None = None
    labels: str | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """The columns of a table that form a record, in order; () for arrays."""
        return () if isinstance(self.x, np.ndarray) else tuple(self.x)

    @property
    def count(self) -> int:
        """The number of records."""
        return len(self.x if isinstance(self.x, np.ndarray) else next(iter(self.x.values())))

    def filter(self) -> RecordFilter:
        """Return a filter of these records. Rows count from 1 in a table, from 0 in an array."""
        sieve = RecordFilter(self.origin, self.count, int(not isinstance(self.x, np.ndarray)))
        for row, why in (self.broken or {}).items():
            sieve.leave_out(row, "", why)
        return sieve


@dataclass(frozen=True)
class _Source:
    """Numbers as given, x [n, ...], with names for the positions in a record.

    value: (row, position in a flattened record) -> the value in the file.
    """

    x: np.ndarray
    sieve: RecordFilter
    name: Callable[[int], str]
    value: Callable[[int, int], Any]

    def mark(self, bad: np.ndarray, why: str, part: Any = ..., *, out: bool = True) -> None:
        """Leave out the records with a bad value, bool like x[part]; or note a clamped one."""
        if not bad.any():
            return
        whole = np.zeros(self.x.shape, bool)
        whole[part] = bad
        flat = whole.reshape(len(whole), -1)
        for row in np.flatnonzero(flat.any(1)).tolist():
            place = int(flat[row].argmax())
            note = self.sieve.leave_out if out else self.sieve.clamp
            note(row, self.name(place), why, self.value(row, place))


def read_numbers(table: Table, form: RecordForm, values: str, sieve: RecordFilter) -> np.ndarray:
    """Return the features of records, [n, d] for a table and [n, ...] for arrays; see `Table`.

    For tokenised text they are [n, rows, T]; see tokens. values: their type, "float32" or "int64".
    Faults of records are added to the sieve. Raises DataError: a declared column is missing, or has
    text categories in an array.
    """
    if isinstance(table.x, np.ndarray):
        return _numbers_of_array(table.x, form, values, sieve)
    features = table.features
    if is_tokens(features):
        return read_tokens(table.x, form.length, form.vocabulary, sieve)
    check_columns(sieve.origin, form, features)
    columns = list(table.x.values())
    x = np.empty((table.count, len(features)))
    for k, (name, cells) in enumerate(table.x.items()):
        own = form.of(name)
        words = isinstance(own, Column) and own.names is not None
        x[:, k] = _places(cells, own) if isinstance(own, Column) and words else to_numbers(cells)
        why = "is not one of its declared categories" if words else "is not a finite number"
        for row in np.isnan(x[:, k]).nonzero()[0].tolist():
            blank, fill = is_blank(cells[row]), own.number(own.fill)
            if blank and fill is not None:
                x[row, k] = fill
            else:
                sieve.leave_out(row, name, MISSING if blank else why, cells[row])
    source = _Source(x, sieve, features.__getitem__, lambda row, k: columns[k][row])
    return _convert_numbers(source, form, values, features)


def _numbers_of_array(
    x: np.ndarray, form: RecordForm, values: str, sieve: RecordFilter
) -> np.ndarray:
    features = [str(k) for k in range(x.shape[1])] if x.ndim == 2 else []
    check_columns(sieve.origin, form, features)
    if any(column.names for column in form.columns.values()):
        raise DataError(
            f"data set {sieve.origin}: records.columns declares categories in text: expected "
            "numbers for what an array holds; write the records as .csv or .parquet, or number them"
        )
    shape, numbers = x.shape[1:], x
    if x.dtype.kind == "U":
        numbers = to_numbers(x.reshape(-1).tolist()).reshape(x.shape)
    if x.dtype.kind in "Uf" and (blank := np.isnan(numbers)).any():
        if x.dtype.kind == "U":
            blank &= np.vectorize(is_blank, [bool])(x)
        numbers = numbers.copy()
        for part, own in _declared(form, features):
            if (fill := own.number(own.fill)) is not None:
                numbers[part][blank[part]] = fill

    def name(place: int) -> str:
        index = tuple(map(int, np.unravel_index(place, shape)))
        return str(index[0]) if len(index) == 1 else str(index)

    def value(row: int, place: int) -> Any:
        return x[row].reshape(-1)[place].item()

    return _convert_numbers(_Source(numbers, sieve, name, value), form, values, features)


def check_columns(origin: str, form: RecordForm, features: Sequence[str]) -> None:
    """Raise DataError if declared columns are not features."""
    unknown = sorted(set(form.kept) - set(features))
    if unknown:
        known = ", ".join(features[:20]) or "none, as a record is no row of numbers"
        raise DataError(
            f"data set {origin}: records.columns declares {', '.join(unknown)}: expected some of "
            f"its columns, which are {known}; correct the names"
        )


def _declared(form: RecordForm, features: Sequence[str]) -> Iterator[tuple[Any, ValueRange]]:
    """Yield the parts of records [n, ...] that one declaration is about, each with it."""
    if not form.columns:
        yield ..., form
        return
    for k, name in enumerate(features):
        yield (slice(None), slice(k, k + 1)), form.of(name)


def _convert_numbers(
    source: _Source, form: RecordForm, values: str, features: Sequence[str]
) -> np.ndarray:
    """Return numbers in their declared type, with values out of range clamped or marked."""
    if values == "int64":
        x = _whole(source)
    else:
        source.mark(~np.isfinite(source.x), "is not a finite number")
        wide = source.x.dtype.itemsize >= 8
        with np.errstate(over="ignore"):
            # Through float64, as in a column with text or missing values: an integer of 60 bits
            # may differ if it is rounded only once.
            x = np.array(np.asarray(source.x, np.float64) if wide else source.x, np.float32)
    if form.vocabulary is not None:
        source.mark((x < 0) | (x >= form.vocabulary), f"is not one of {form.vocabulary} words")
    for part, own in _declared(form, features):
        _keep_range(source, x, part, own)
    source.mark(~np.isfinite(x), "is not a finite number")
    return x


def _whole(source: _Source) -> np.ndarray:
    """Return int64, with 0 for values that are not integers."""
    x = source.x
    with np.errstate(invalid="ignore"):
        good = (x > -_LARGEST) & (x < _LARGEST) & (x.dtype.kind != "f" or np.rint(x) == x)
    source.mark(~good, "is not a whole number below 2^53")
    return np.where(good, x, 0).astype(np.int64)


def _keep_range(source: _Source, x: np.ndarray, part: Any, own: ValueRange) -> None:
    """Clamp values out of range in x, or mark them, as declared."""
    some = x[part]
    if isinstance(own, Column) and own.categories is not None:
        if own.names is None:
            known = np.isin(some, np.array(own.categories).astype(x.dtype))
            other = own.number(own.other)
            if other is None:
                source.mark(~known, "is not one of its declared categories", part)
            else:
                # Values that are not numbers are already left out.
                x[part] = np.where(known | ~np.isfinite(some), some, other)
        return
    if not own.bounded:
        return
    low, high = _bounds(own, x.dtype)
    with np.errstate(invalid="ignore"):
        beyond = (some < low) | (some > high)
    if beyond.any():
        source.mark(beyond, "is beyond its declared range", part, out=not own.clamp)
        if own.clamp:
            # The other values keep their bits, whether or not some are out of range.
            x[part] = np.where(beyond, np.clip(some, low, high), some)


def _bounds(own: ValueRange, dtype: Any) -> tuple[Any, Any]:
    """The range in the numbers' own type, as 0.1 in float32 is a little more than 0.1."""
    low = -np.inf if own.low is None else own.low
    high = np.inf if own.high is None else own.high
    if dtype == np.float32:
        with np.errstate(over="ignore"):
            return np.float32(low), np.float32(high)
    # Bounds as integers, as float64 would round the compared numbers.
    limits = np.iinfo(np.int64)
    first = limits.min if math.isinf(low) else max(math.ceil(low), limits.min)
    last = limits.max if math.isinf(high) else min(math.floor(high), limits.max)
    return np.int64(min(first, limits.max)), np.int64(max(last, limits.min))


def _places(cells: Cells, own: Column) -> np.ndarray:
    """Return the indices of cells among declared words, float64 [n]; NaN for unknown ones."""
    place = {name: float(k) for k, name in enumerate(own.names or [])}
    other = own.number(own.other)
    unknown = np.nan if other is None else other
    found = [
        unknown
        if beyond_floats(cell)
        else find_named(cell, place, np.nan if is_blank(cell) else unknown)
        for cell in cells
    ]
    return np.array(found, np.float64)
