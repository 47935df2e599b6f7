"""Columns of cells: reads them from files, and converts them to numbers and names.

How a cell is read follows from that cell alone: no other record changes it, not even one with a
missing cell. So a CSV is split record by record, and a column of whole numbers never becomes one of
floats. Numbers of an array or of Parquet stay NumPy's, as their type says how large a whole number
they can hold.

A fault of the file as a whole, such as its columns, is an error. A fault of a record leaves that
record out. An error never quotes a value.
"""

import csv
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from zipfile import is_zipfile

import numpy as np
from torch import Tensor

from fedpact.common.errors import DataError
from fedpact.common.format import list_some

Cells = Sequence[Any]
"""A column's cells. Numbers of Parquet, if none is missing, are an array, which is read as one."""

_NARROW: Final = {
    "float16": np.float16,
    "halffloat": np.float16,
    "float32": np.float32,
    "float": np.float32,
}
"""What tables from Python call the types of floats that Python's own floats do not tell."""


def arrow_cells(column: Any) -> Cells:
    """Return the cells of an Arrow Array or ChunkedArray; None for unreadable ones."""
    import pyarrow
    from pyarrow import types

    if not isinstance(column, pyarrow.ChunkedArray):
        column = pyarrow.chunked_array([column])
    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if not (types.is_integer(kind) or types.is_floating(kind)):
        return [_arrow_cell(one) for one in column]
    column = column.cast(kind)
    values = column.fill_null(pyarrow.scalar(0).cast(kind)).to_numpy()
    if not column.null_count:
        return values
    missing = column.is_null().to_numpy().tolist()
    return [None if m else value for value, m in zip(values, missing, strict=True)]


def cells_of(column: Any, declared: Any = None) -> Cells:
    """Return the cells of a Python column: a list, array, tensor or data frame column.

    declared: the name of its type, if the column has none.
    """
    if type(column).__module__.partition(".")[0] == "pyarrow":
        return arrow_cells(column)
    if isinstance(column, Tensor) and column.ndim == 1:
        column = column.detach().cpu().numpy()
    cells = [v.item() if isinstance(v, Tensor) and not v.ndim else v for v in column]
    if declared is None:
        declared = getattr(column, "dtype", None)
        # A categorical column has the type of its categories.
        declared = getattr(getattr(declared, "categories", None), "dtype", declared)
    narrow = _NARROW.get(str(declared).lower().removesuffix("[pyarrow]"))
    return [narrow(v) if isinstance(v, float) else v for v in cells] if narrow else cells


def _arrow_cell(one: Any) -> Any:
    """Return a cell's value; None if Python cannot represent it, such as text of invalid bytes."""
    try:
        return one.as_py()
    except Exception:  # ArrowException, ValueError, OverflowError: whatever is in the cell
        return None


# "none" or "na" may be the name of a class or of a site.
_NO_NAME: Final = {"", "?", "nan", "-nan", "nat", "<na>", "#n/a"}
_MISSING: Final = _NO_NAME | {"na", "n/a", "null", "none"}
_TRUTH: Final = {"true": 1.0, "false": 0.0}
_SPELLED: Final = {
    **dict.fromkeys(("true", "1"), ("True", "true", "TRUE", "1")),
    **dict.fromkeys(("false", "0"), ("False", "false", "FALSE", "0")),
}
"""How a truth value may be written: in words in a CSV, as Python's in a frame, or as 0 and 1."""
EXACT_BELOW: Final = 2**53
"""Whole numbers from here on are others beside text or a missing value, as floats."""


def text_of(value: Any) -> str:
    """Return a name as text: integers without a point, True, False, bytes as UTF-8.

    A Decimal is written without the trailing zeros that another value of its column causes.
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


def without_decimal_zeros(text: str, names: Iterable[str] = ()) -> str:
    """Return "1" for "1.0", as pandas writes integers in a column with an empty cell.

    Not if names have points: 250 and 250.0 may be two codes.
    """
    number = re.fullmatch(r"(-?[0-9]+)\.0+", text)
    return number[1] if number and not any("." in name for name in names) else text


def find_named(value: Any, place: Mapping[str, Any], unknown: Any) -> Any:
    """Return the entry of `place` for a cell's name; a boolean has several spellings.

    unknown: returned if the cell is none of the names.
    """
    text = text_of(value)
    names = (text, without_decimal_zeros(text, place), *_SPELLED.get(text.lower(), ()))
    return next((place[name] for name in names if name in place), unknown)


def beyond_floats(value: Any) -> bool:
    """Whether a number would be rounded, and so be another name, in a column of floats."""
    if isinstance(value, int | np.integer):
        return not -EXACT_BELOW < value < EXACT_BELOW
    return isinstance(value, float | np.floating) and EXACT_BELOW <= abs(float(value)) < math.inf


def is_blank(value: Any) -> bool:
    """Whether a cell is a spelling of "not recorded"."""
    return text_of(value).lower() in _MISSING


def is_missing(name: str) -> bool:
    """Whether a label or a site's name is missing."""
    return name.lower() in _NO_NAME


_CONTROLS: Final = "".join(map(chr, (*range(33), *range(127, 161))))


def strip_invisible(name: str) -> str:
    """Return a name without invisible characters, which copied names may have."""
    if name.isascii() and name.isprintable():
        return name
    text = unicodedata.normalize("NFC", name)
    return "".join(c for c in text if unicodedata.category(c) != "Cf").strip(_CONTROLS)


_ON_TERMINALS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def check_printable(whose: str, role: str, names: Iterable[str]) -> None:
    """Raise DataError for a name with control characters, which may act on a terminal."""
    if strange := sorted(name for name in names if _ON_TERMINALS.search(name)):
        raise DataError(
            f"{whose} has a {role} {strange[0]!a}: expected a name without control characters, "
            "which a terminal obeys; rename it"
        )


_NUMBERS: Final = {
    *(float, int, bool, type(None)),
    *(np.dtype(code).type for code in np.typecodes["AllInteger"] + "efd"),
}
"""Types that numpy converts to float64 as float does; not times, which are no features."""


def to_numbers(cells: Cells) -> np.ndarray:
    """Return cells as float64 [n]: 1 and 0 for true and false, also as words; NaN otherwise."""
    numeric = isinstance(cells, np.ndarray) and cells.dtype.kind in "iuf"
    if numeric or {*map(type, cells)} <= _NUMBERS:
        with suppress(OverflowError):  # of a whole number beyond any float
            return np.array(cells, np.float64)
    from pandas import to_numeric

    found, texts = np.full(len(cells), math.nan), dict[int, str]()
    for row, value in enumerate(cells):
        if isinstance(value, str | bytes):
            texts[row] = value.strip() if isinstance(value, str) else text_of(value)
        elif not isinstance(value, np.datetime64 | np.timedelta64 | complex | np.complexfloating):
            # Nanoseconds since 1970 are no feature.
            with suppress(TypeError, ValueError, OverflowError):
                found[row] = float(value)
    if texts:
        # With a NaN all are read as floats, even if the others are integers.
        column = np.array([*texts.values(), math.nan], object)
        read = np.array(to_numeric(column, errors="coerce"), np.float64)[:-1]
        for k in np.flatnonzero(np.isnan(read)).tolist():
            read[k] = _TRUTH.get(str(column[k]).lower(), math.nan)
        found[list(texts)] = read
    return found


SUFFIXES: Final = (".csv", ".parquet", ".npz")


@dataclass(frozen=True, eq=False)
class Columns:
    """A table's cells [n] by column. broken: row from 0 -> its fault as a whole.

    index: columns that number rows. titles: column -> the names of the classes that it numbers.
    """

    cells: Mapping[str, Cells]
    broken: Mapping[int, str] = field(default_factory=dict[int, str])
    index: Sequence[str] = ()
    titles: Mapping[str, list[str]] = field(default_factory=dict[str, list[str]])


def read_columns(path: Path) -> Columns:
    """Return the columns of a .csv or .parquet file. Raises DataError: it cannot be read."""
    check_suffix(path)
    _check_readable(path)
    return _read_csv(path) if path.suffix.lower() == ".csv" else _read_parquet(path)


_READERS: Final = {
    **dict.fromkeys((".xlsx", ".xls", ".xlsm", ".ods"), "read_excel"),
    **dict.fromkeys((".tsv", ".tab", ".txt"), "read_table"),
    ".dta": "read_stata",
    ".sav": "read_spss",
    **dict.fromkeys((".sas7bdat", ".xpt"), "read_sas"),
    ".json": "read_json",
    ".feather": "read_feather",
}
"""Endings of files that are not read here -> pandas' function for them."""


def check_suffix(path: Path) -> None:
    """Raise DataError for the suffix of a table format that pandas can convert."""
    if reader := _READERS.get(path.suffix.lower()):
        raise DataError(
            f"data file {path}: expected a name ending in {', '.join(SUFFIXES)}; convert it: "
            + conversion(path, reader)
        )


def conversion(path: Path, reader: str, **options: Any) -> str:
    """Return a command that converts a table to a supported format."""
    given = "".join(f", {key}={value!r}" for key, value in options.items())
    target = str(path.with_suffix(".utf8.csv" if path.suffix == ".csv" else ".csv"))
    return (
        f'python -c "import pandas; pandas.{reader}({str(path)!r}{given})'
        f'.to_csv({target!r}, index=False)"'
    )


def _check_readable(path: Path) -> None:
    try:
        path.open("rb").close()
    except FileNotFoundError as error:
        where = "" if path.is_absolute() else f" in {Path.cwd()}, where the command was given"
        raise DataError(f"data file {path} does not exist{where}: check the path") from error
    except OSError as error:
        raise DataError(
            f"data file {path} cannot be read ({error.strerror}): check who may read it"
        ) from error


def read_npz(path: Path, *, labelled: bool = True) -> dict[str, np.ndarray]:
    """Return the arrays x, y and optionally x_test, y_test, site, person.

    labelled: whether y is required. Raises DataError: no such file, or other arrays.
    """
    _check_readable(path)
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = dict(stored)
    except Exception as error:  # a damaged zip fails in a dozen ways
        # For a file that is not a zip, numpy's error suggests loading it unsafely.
        why = error if is_zipfile(path) else "it is no zip file, as those are"
        raise DataError(
            f"data file {path} cannot be read as .npz ({why}): expected what numpy.savez writes, "
            "without arrays of Python objects"
        ) from error
    known = {"x", "y", "x_test", "y_test", "site", "person"}
    needed = {"x", "y"} if labelled else {"x"}
    if not needed <= set(arrays) <= known or ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(
            f"data file {path} holds the arrays {', '.join(sorted(arrays)) or 'none'}: expected "
            f"{' and '.join(sorted(needed))}, optionally x_test with y_test, site, and person"
        )
    return arrays


def _read_csv(path: Path) -> Columns:
    content = path.read_bytes()
    lines = [line for line in content.removeprefix(b"\xef\xbb\xbf").splitlines() if line.strip()]
    header = _cells(lines[0]) if lines else []
    check_printable(f"data file {path}", "column", () if isinstance(header, str) else header)
    if isinstance(header, str) or not header or len(set(header)) < len(header) or len(header) == 1:
        _check_header(path, content, header)
    rows, broken = list[list[str]](), dict[int, str]()
    for number, cells in enumerate(_split(lines[1:], len(header))):
        if isinstance(cells, str):
            broken[number] = cells
        rows.append([""] * len(header) if isinstance(cells, str) else cells)
    columns = zip(*rows, strict=True) if rows else ([] for _ in header)
    return Columns(dict(zip(header, columns, strict=True)), broken)


def _check_header(path: Path, content: bytes, header: list[str] | str) -> None:
    """Raise DataError for an unusable header, the first line's columns or its fault.

    A single column is allowed. The error has a command that converts the file.
    """
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "cp1252"
    encoding = encoding if header == NOT_UTF_8 else "utf-8"
    lines = content.decode(encoding, "replace").splitlines()
    separator = max(",;\t|", key=next(filter(str.strip, lines), "").count)
    if encoding == "utf-8" and separator == "," and len(header) == 1:
        return
    told, options = list[str](), dict[str, Any]()
    if separator != ",":
        told.append(f"separates columns by {separator!r}, not by commas")
        # If semicolons separate columns, commas are decimal points.
        options |= {"sep": separator} | ({"decimal": ","} if separator == ";" else {})
    if isinstance(header, str):
        told.append(header)
        options |= {"encoding": encoding} if header == NOT_UTF_8 else {}
    if not told and header:
        told.append(f"has the columns {list_some(header)}")
    raise DataError(
        f"data file {path}: {'its first line ' + ' and '.join(told) if told else 'it is empty'}: "
        "expected a header line that names each column once, in UTF-8 text, with commas between "
        f"them and points in numbers{'; write each name on one line' * (header == _OPEN)}"
        f"{'; delete lines above it, and columns without a name' * ([*header].count('') > 1)}"
        + (f"; convert it: {conversion(path, 'read_csv', **options)}" if options else "")
    )


_OPEN: Final = "has a quotation mark that nothing closes"
NOT_UTF_8: Final = "is not UTF-8 text"
"""The fault of a line in another encoding."""


def _split(lines: Sequence[bytes], width: int) -> Iterator[list[str] | str]:
    """Yield each record's `width` values, or its fault.

    A line that is a record stays one, whatever quotation marks precede it. Other lines form one
    record if a quoted value contains line breaks (RFC 4180): the first line opens it and could not
    close one, the last closes it. So no line can belong to two such records.
    """
    found = [_cells(line) for line in lines]
    start = 0
    while start < len(lines):
        cells, end = found[start], start + 1
        if cells == _OPEN and isinstance(_cells(b'"' + lines[start]), str):
            while end < len(lines) and not _whole(found[end], width):
                end += 1
                if lines[end - 1].count(b'"') % 2:
                    break
            joined = _cells(b"\n".join(lines[start:end]))
            if _whole(joined, width):
                yield joined
                start = end
                continue
        if not isinstance(cells, str) and len(cells) != width:
            cells = f"has {len(cells)} values: expected {width}, as in the header"
        yield cells
        start += 1


def _whole(cells: list[str] | str, width: int) -> bool:
    return not isinstance(cells, str) and len(cells) == width


def _cells(line: bytes) -> list[str] | str:
    """Return a line's values, stripped, or its fault."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        return NOT_UTF_8
    if '"' not in text:
        return [value.strip() for value in text.split(",")]
    try:
        lines = [f"{line}\n" for line in text.split("\n")]
        return [v.strip() for v in next(csv.reader(lines, skipinitialspace=True, strict=True))]
    except csv.Error as error:
        return _OPEN if "unexpected end" in str(error) else "cannot be read as CSV"


def _read_parquet(path: Path) -> Columns:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"data file {path}: reading Parquet needs pyarrow: install it with "
            "`pip install 'fedpact[parquet]'`, or write the table as CSV"
        ) from error
    try:
        table = pyarrow.parquet.ParquetFile(path).read()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"data file {path} cannot be read as Parquet ({type(error).__name__}): write it again"
        ) from error
    if twice := [name for name, n in Counter(table.column_names).items() if n > 1]:
        raise DataError(
            f"data file {path} has {list_some(twice)} as several columns: give each column a name "
            "of its own"
        )
    check_printable(f"data file {path}", "column", table.column_names)
    cells = {name: arrow_cells(table.column(name)) for name in table.column_names}
    return Columns(cells, index=index_of(table))


def index_of(data: Any) -> tuple[str, ...]:
    """Return the columns of an Arrow table that are a pandas index; () for other tables."""
    told: Any = getattr(getattr(data, "schema", None), "pandas_metadata", None)
    names = told.get("index_columns", ()) if isinstance(told, Mapping) else ()
    return tuple(name for name in names if isinstance(name, str))
