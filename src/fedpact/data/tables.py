"""Tables as read, and their conversion to numbers.

Whether and how a record is used follows from it and the declaration (form) alone. So a wrong value,
category or label leaves one record out and is reported to the records' owner; it never stops a
site, as that would reveal it to others.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from fedpact.common.errors import DataError
from fedpact.data.cells import (
    EXACT_BELOW,
    Cells,
    beyond_floats,
    cells_of,
    find_named,
    is_blank,
    to_numbers,
)
from fedpact.data.dataset import BEYOND, MISSING, RecordFilter
from fedpact.data.schema import Column, RecordForm
from fedpact.data.tokens import is_tokens, read_tokens

_logger = logging.getLogger("fedpact")


class Roles(NamedTuple):
    """The columns of a table that are no features; None for none."""

    label: str | None = None
    site: str | None = None
    person: str | None = None


_OF_ARRAYS: Final = Roles("y", "site", "person")


@dataclass(frozen=True, eq=False)
class Table:
    """Records before conversion to numbers.

    sieve: which of them are left out; rows count from 1 in a table, from 0 in an array. x: for a
    table name -> cells [n] of the features in order; for arrays one of them, [n, ...]. y: the
    labels [n, ...]; site, person: the names [n]; None without. roles: the columns or arrays of
    these. column: the column whose cells are the arrays x. titles: the names of the classes that y
    numbers. labels: the meaning of labels if the declaration has none, "names", "numbers", or None:
    see `class_numbers`.
    """

    sieve: RecordFilter
    x: Mapping[str, Cells] | np.ndarray
    y: Any = None
    site: Any = None
    person: Any = None
    roles: Roles = _OF_ARRAYS
    column: str | None = None
    titles: Sequence[str] | None = None
    labels: str | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """The columns of a table that form a record, in order; () for arrays."""
        return () if isinstance(self.x, np.ndarray) else tuple(self.x)

    @property
    def shape(self) -> tuple[int, ...]:
        """A record's shape; the number of columns for a table."""
        return self.x.shape[1:] if isinstance(self.x, np.ndarray) else (len(self.x),)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of a record; () if it is no row of numbers."""
        return self.features or tuple(map(str, range(*self.shape)) if len(self.shape) == 1 else ())

    def mark(self, bad: np.ndarray, why: str, part: Any = ..., *, out: bool = True) -> None:
        """Leave out the records with a bad value, bool like x[part]; or note a clamped one."""
        if not bad.any():
            return
        x, note = self.x, self.sieve.leave_out if out else self.sieve.clamp
        whole = np.zeros((self.sieve.count, *self.shape), bool)
        whole[part] = bad
        names = self.names or ("x",)
        each = np.any(whole.reshape(len(whole), len(names), -1), axis=2)
        for k in np.flatnonzero(np.any(each, axis=0)).tolist():
            cells = (x[:, k] if self.names else None) if isinstance(x, np.ndarray) else x[names[k]]
            note(each[:, k], names[k], why, cells)


def read_numbers(table: Table, form: RecordForm, values: str) -> np.ndarray:
    """Return the features of records, [n, d] for a table and [n, ...] for arrays; see `Table`.

    For tokenised text they are [n, rows, T]; see tokens. values: their type, "float32" or "int64".
    Faults of records are added to the table's filter. Raises DataError: a declared column is
    missing, or has text categories in an array; or a length is declared of other records.
    """
    if not isinstance(table.x, np.ndarray) and is_tokens(table.features):
        return read_tokens(table.x, form.length, form.vocabulary, table.sieve)
    if form.length not in (None, *table.shape[-1:]):
        raise DataError(
            f"data set {table.sieve.origin}: records.length = {form.length}, and a record has "
            f"shape {table.shape}: only lists of tokens in a table are padded or cut to it; bring "
            "arrays to that length before, or leave it out"
        )
    check_columns(table.sieve.origin, form, table.names)
    if isinstance(table.x, np.ndarray):
        x = _of_array(table, table.x, form)
    else:
        x = _of_columns(table.x, form, table.sieve)
    return _convert_numbers(table, x, form, values)


def _of_columns(columns: Mapping[str, Cells], form: RecordForm, sieve: RecordFilter) -> np.ndarray:
    """Return cells as float64 [n, d]; those that are no numbers leave their record out."""
    x = np.empty((sieve.count, len(columns)))
    for k, (name, cells) in enumerate(columns.items()):
        own = form.of(name)
        x[:, k] = to_numbers(cells) if own.names is None else _places(cells, own)
        bad = np.isnan(x[:, k]).nonzero()[0].tolist()
        blank = [row for row in bad if is_blank(cells[row])]
        if own.fill is None:
            sieve.leave_out(blank, name, MISSING, cells)
        else:
            x[blank, k] = own.number(own.fill)
        word = "a finite number" if own.names is None else "one of its declared categories"
        wrong = [row for row in bad if not is_blank(cells[row])] if bad != blank else []
        sieve.leave_out(wrong, name, f"is not {word}", cells)
    return x


def _of_array(table: Table, x: np.ndarray, form: RecordForm) -> np.ndarray:
    if any(own.names for own in form.columns.values()):
        raise DataError(
            f"data set {table.sieve.origin}: records.columns declares categories in text: expected "
            "numbers for what an array holds; write the records as .csv or .parquet, or number them"
        )
    numbers = x
    if x.dtype.kind == "U":
        numbers = to_numbers(x.reshape(-1).tolist()).reshape(x.shape)
    if x.dtype.kind in "Uf" and (blank := np.isnan(numbers)).any():
        if x.dtype.kind == "U":
            blank &= np.vectorize(is_blank, [bool])(x)
        numbers = numbers.copy()
        for part, own in _declared_parts(form, table.names):
            if (fill := own.number(own.fill)) is not None:
                numbers[part][blank[part]] = fill
    return numbers


def check_columns(origin: str, form: RecordForm, features: Sequence[str]) -> None:
    """Raise DataError if declared columns are not features."""
    unknown = sorted(set(form.kept) - set(features))
    if unknown:
        known = ", ".join(features[:20]) or "none, as a record is no row of numbers"
        raise DataError(
            f"data set {origin}: records.columns declares {', '.join(unknown)}: expected some of "
            f"its columns, which are {known}; correct the names"
        )


def _declared_parts(form: RecordForm, features: Sequence[str]) -> Iterator[tuple[Any, Column]]:
    """Yield the parts of records [n, ...] that one declaration is about, each with it."""
    if not form.columns:
        yield ..., form.general
        return
    for k, name in enumerate(features):
        yield (slice(None), slice(k, k + 1)), form.of(name)


def _convert_numbers(table: Table, given: np.ndarray, form: RecordForm, values: str) -> np.ndarray:
    """Return numbers in their declared type, with values out of range clamped or marked."""
    if values == "int64":
        with np.errstate(invalid="ignore"):
            good = (given > -EXACT_BELOW) & (given < EXACT_BELOW)
            good &= given.dtype.kind != "f" or np.rint(given) == given
        table.mark(~good, "is not a whole number below 2^53")
        x = np.where(good, given, 0).astype(np.int64)
    else:
        table.mark(~np.isfinite(given), "is not a finite number")
        wide = given.dtype.itemsize >= 8
        with np.errstate(over="ignore"):
            # Through float64, as in a column with text or missing values: an integer of 60 bits
            # may differ if it is rounded only once.
            x = np.array(np.asarray(given, np.float64) if wide else given, np.float32)
    if form.vocabulary is not None:
        table.mark((x < 0) | (x >= form.vocabulary), f"is not one of {form.vocabulary} words")
    for part, own in _declared_parts(form, table.names):
        _keep_range(table, x, part, own)
    table.mark(~np.isfinite(x), "is not a finite number")
    return x


def _keep_range(table: Table, x: np.ndarray, part: Any, own: Column) -> None:
    """Clamp values out of range in x, or mark them, as declared."""
    some = x[part]
    if own.names is not None:
        return
    if own.categories is not None:
        known = np.isin(some, np.array(own.categories).astype(x.dtype))
        if own.other is None:
            table.mark(~known, "is not one of its declared categories", part)
        else:
            # Values that are not numbers are already left out.
            x[part] = np.where(known | ~np.isfinite(some), some, cast(float, own.number(own.other)))
        return
    low, high = _bounds(own, x.dtype)
    with np.errstate(invalid="ignore"):
        beyond = (some < low) | (some > high)
    table.mark(beyond, BEYOND, part, out=not own.clamp)
    if own.clamp:
        # The other values keep their bits, whether or not some are out of range.
        x[part] = np.where(beyond, np.clip(some, low, high), some)


def _bounds(own: Column, dtype: Any) -> tuple[Any, Any]:
    """The range in the numbers' own type, as 0.1 in float32 is a little more than 0.1."""
    low, high = own.ends
    if dtype == np.float32:
        with np.errstate(over="ignore"):
            return np.float32(low), np.float32(high)
    # Bounds as integers, as float64 would round the compared numbers, which are below 2^53.
    first, last = np.clip(own.ends, -EXACT_BELOW, EXACT_BELOW)
    return np.int64(math.ceil(first)), np.int64(math.floor(last))


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


def of_arrays(
    origin: str,
    x: Any,
    y: Any,
    form: RecordForm,
    site: Any = None,
    person: Any = None,
    end: str = "",
    titles: Sequence[str] | None = None,
    least: int = 1,
) -> Table:
    """Return arrays x [n, ...] and, unless y is None, y [n, ...]. end: of their names in errors.

    least: the smallest number of records. Raises DataError: not arrays, or shapes that do not match
    each other or the declaration.
    """
    x = array_of(origin, "x" + end, x)
    if y is not None:
        y = labels_of(origin, "y" + end, y, form.target.kind, x.ndim)
        _check_shapes(origin, end, x, y, least, form.target.kind)
    site, person = (
        v if v is None or isinstance(v, np.ndarray) else cells_of(v) for v in (site, person)
    )
    sieve = RecordFilter(origin, x.shape[0] if x.ndim else 0)
    labels = None if titles is None else "numbers"
    by_name = form.target.kind == "class" and form.labels != "numbers"
    if titles is not None and y is not None and by_name:
        # Each data set numbers its own classes, and a test set may lack one: names mean the same.
        known = range(len(titles))
        y = np.array([titles[k] if k in known else f"number {k}" for k in y.tolist()])
        labels = "names"
    return Table(sieve, x, y, site, person, titles=titles, labels=labels)


def describe_value(data: Any) -> str:
    """Describe an unusable object for an error."""
    return f"a {type(data).__module__}.{type(data).__qualname__}"


def array_of(name: str, what: str, values: Any) -> np.ndarray:
    """Return numbers or text as an array. Raises DataError: other values.

    Arrays of objects become text or numbers; None, pandas' <NA> and masked values are missing
    numbers. The array is contiguous, as a model may use `view`.
    """
    try:
        if isinstance(values, Tensor):
            values = values.detach().cpu()
            # numpy has no such type.
            values = values.float() if values.dtype == torch.bfloat16 else values
        if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
            covered, values = np.ma.getmaskarray(values), values.data.astype(object)
            values[covered] = None
        array = values.numpy() if isinstance(values, Tensor) else np.asarray(values)
        array = _plain(array) if array.dtype.kind in "OT" else array
        array = np.ascontiguousarray(array) if array.ndim else array
    except (TypeError, ValueError, RuntimeError) as error:  # the last as of a tensor on "meta"
        raise DataError(
            f"data set {name}: {what} is no array ({error}): expected rows of equal length"
        ) from error
    if array.dtype.kind not in "biufU":
        raise DataError(
            f"data set {name}: {what} is {describe_value(values)} of type {array.dtype}: expected "
            "an array of numbers, or strings for labels; convert it first, as with x.toarray() of "
            "a sparse matrix"
        )
    return array


def labels_of(name: str, what: str, values: Any, kind: str, axes: int) -> np.ndarray:
    """Return labels as an array, without an axis of length 1. axes: those of x.

    For classes and numbers that is [n, 1], for pixels [n, 1, h, w] with images.
    """
    y = array_of(name, what, values)
    most = {"class": 2, "number": 2, "pixels": 4 if axes == 4 else 0}.get(kind)
    return y[:, 0] if y.ndim == most and y.shape[1] == 1 else y


def _plain(array: np.ndarray) -> np.ndarray:
    """Convert an array of Python text, numbers or arrays to a numpy type; others are unchanged."""
    cells = array.reshape(-1).tolist()
    known = [value for value in cells if isinstance(value, str) or not is_blank(value)]
    if all(isinstance(value, str) for value in known):
        return np.array([v if isinstance(v, str) else "" for v in cells], str).reshape(array.shape)
    if all(isinstance(value, Number | np.bool_) for value in known):
        found = np.array([math.nan if is_blank(value) else value for value in cells])
        found = found.reshape(array.shape)
        return found.astype(float) if found.dtype.kind == "O" else found
    if array.ndim == 1 and all(isinstance(value, np.ndarray | list) for value in known):
        return np.stack([np.asarray(value) for value in cells])
    return array


def warn_of_channels(name: str, x: np.ndarray) -> None:
    """Warn of images whose channels seem to be last."""
    if x.ndim == 4 and x.shape[-1] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        _logger.warning(
            "data set %s: a record has shape %s: models take an image as (channels, height, "
            "width); if its channels come last, pass numpy.moveaxis(x, -1, 1)",
            *(name, x.shape[1:]),
        )


_AXES: Final = {"class": 1, "number": 1, "several": 2, "pixels": None}


def _check_shapes(name: str, end: str, x: np.ndarray, y: np.ndarray, least: int, kind: str) -> None:
    axes = _AXES[kind]
    if kind != "class" and (y.dtype.kind not in "biuf" or y.ndim != (axes or max(y.ndim, 2))):
        raise DataError(
            f"data set {name}: y{end} has type {y.dtype} and shape {y.shape}: expected numbers, "
            f"{'[n]' if kind == 'number' else '[n, labels]' if axes else '[n, height, width]'}, as "
            "the plan's task says"
        )
    plain = kind != "class" or y.ndim == 1
    if x.ndim < 2 or not plain or len(x) != len(y) or len(y) < least or 0 in x.shape[1:]:
        hint = "a single feature is a column, reshape(-1, 1)"
        if x.ndim < 2 and x.dtype.kind == "U":
            hint = "text becomes records as numbers of words, x [n, length] of integers"
        elif not plain:
            hint = (
                "0 or 1 of each of several labels is task.kind = 'multi_label', a class for each "
                "pixel 'segmentation', for each token 'tokens' (of from_arrays form = "
                'RecordForm(target=LabelForm(kind=...)), "several" or "pixels"), and one column '
                "that is 1 for its class y.argmax(1)"
            )
        raise DataError(
            f"data set {name}: x{end} has shape {x.shape} and y{end} {y.shape}: expected [n, ...] "
            f"and [n] with equal n >= {least} and at least one feature; {hint}"
        )
