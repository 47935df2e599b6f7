"""Tables of records from a site's own files: CSV, Parquet, and NumPy's .npz.

An error names column and row, never a value: the file may hold a patient.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedpact.errors import DataError

# "none" or "na" may be the name of a class or of a site.
_NO_NAME = {"", "?", "nan"}
_MISSING = _NO_NAME | {"na", "n/a", "null", "none"}
_Column = Sequence[Any]


@dataclass(frozen=True, eq=False)
class Table:
    """Features x [n, d] float32 with their names, labels [n] and site names [n] as strings."""

    features: tuple[str, ...]
    x: np.ndarray
    labels: tuple[str, ...]
    site: tuple[str, ...] | None


def read_table(path: Path, label: str | None, site: str | None) -> Table:
    """Return the table in a .csv file with a header line, or in a .parquet file.

    label, site: their columns; every other column has to be numeric. Raises DataError: no such
    file or column, a value that is missing, not a number or not finite; rows count from 1.
    """
    if not path.is_file():
        raise DataError(f"data file {path} does not exist: check the path")
    columns = _read_csv(path) if path.suffix.lower() == ".csv" else _read_parquet(path)
    for role, column in (("label", label), ("site", site)):
        if column not in columns and not (role == "site" and column is None):
            raise DataError(
                f"data file {path}: {role} column is {column!r}: expected one of its columns "
                f"{', '.join(columns)}; give it as {role}=..."
            )
    features = tuple(column for column in columns if column not in (label, site))
    if not features or label == site:
        raise DataError(
            f"data file {path}: label column {label!r} and site column {site!r} leave "
            f"{len(features)} feature columns of {len(columns)}: expected two different columns "
            "and at least one more"
        )
    x = np.stack([_numbers(path, column, columns[column]) for column in features], axis=1)
    return Table(
        features=features,
        x=x,
        labels=_strings(path, str(label), columns[str(label)]),
        site=None if site is None else _strings(path, site, columns[site]),
    )


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays x, y and, where they are there, x_test, y_test, site of an .npz file."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = dict(stored)
    except FileNotFoundError as error:
        raise DataError(f"data file {path} does not exist: check the path") from error
    except Exception as error:  # a damaged zip fails in a dozen ways
        raise DataError(
            f"data file {path} cannot be read as .npz ({error}): expected what numpy.savez writes, "
            "without arrays of Python objects"
        ) from error
    known = {"x", "y", "x_test", "y_test", "site"}
    if not {"x", "y"} <= set(arrays) <= known or ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(
            f"data file {path} holds the arrays {', '.join(sorted(arrays)) or 'none'}: expected x "
            "and y, optionally x_test with y_test, and site"
        )
    return arrays


def _read_csv(path: Path) -> dict[str, _Column]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            lines = csv.reader(stream, skipinitialspace=True, strict=True)
            header, *rows = [row for row in lines if row] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"data file {path} cannot be read as CSV ({type(error).__name__}): expected UTF-8 "
            "text, values separated by commas, the first line naming the columns"
        ) from error
    header = [name.strip() for name in header]
    if not rows or len(set(header)) < len(header):
        raise DataError(
            f"data file {path} has {len(rows)} records and the columns {', '.join(header)}: "
            "expected a header line that names each column once, and at least one record"
        )
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise DataError(
                f"data file {path}: row {number} (counted from 1 below the header) has "
                f"{len(row)} values: expected {len(header)}, as in the header"
            )
    return dict(zip(header, zip(*rows, strict=True), strict=True))


def _read_parquet(path: Path) -> dict[str, _Column]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"data file {path}: reading Parquet needs pyarrow: install it with "
            "`pip install 'fedpact[parquet]'`, or write the table as CSV"
        ) from error
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"data file {path} cannot be read as Parquet ({type(error).__name__}): write it again"
        ) from error
    if table.num_rows == 0:
        raise DataError(f"data file {path} has no records: expected at least one")
    return {name: _arrow_column(table.column(name)) for name in table.column_names}


def _arrow_column(column: Any) -> _Column:
    # Dates have a NumPy form too, but nanoseconds since 1970 are no feature anyone means.
    numbers = column.to_numpy()
    simple = column.null_count == 0 and numbers.dtype.kind in "biuf"
    return numbers if simple else column.to_pylist()


def _numbers(path: Path, column: str, values: _Column) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):
            numbers = np.array(values, np.float64).astype(np.float32)
        if np.isfinite(numbers).all():
            return numbers
    except (TypeError, ValueError):
        pass
    for row, value in enumerate(values, start=1):
        if not _is_number(value):
            missing = value is None or str(value).strip().lower() in _MISSING
            raise DataError(
                f"data file {path}: column {column}, row {row} (counted from 1) "
                f"{'is missing' if missing else 'is no finite number'}: expected a number in "
                "every feature; fill it with a constant declared beforehand, encode the column as "
                "numbers, or leave the record or the column out"
            )
    raise DataError(f"data file {path}: column {column} is not numeric: encode it as numbers")


def _is_number(value: Any) -> bool:
    try:
        with np.errstate(over="ignore"):
            return bool(np.isfinite(np.float32(np.float64(value))))
    except (TypeError, ValueError):
        return False


def _strings(path: Path, column: str, values: _Column) -> tuple[str, ...]:
    strings = tuple("" if value is None else str(value).strip() for value in values)
    for row, value in enumerate(strings, start=1):
        if value.lower() in _NO_NAME:
            raise DataError(
                f"data file {path}: column {column}, row {row} (counted from 1) is missing: "
                "expected a label or a site in every record; fill it in or leave the record out"
            )
    return strings
