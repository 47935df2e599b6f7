"""Tables as files: lines to cells, and cells to numbers.

So no cell, one that is missing among them, changes what another is read as. A float of 16 or 32
bits stays one in NumPy's, as it says how large a whole number it can hold.

What concerns a file as a whole (its columns, that it can be read) is an error. What concerns one
record stays with that record: a CSV is read line by line, so that no line, whatever quotes or bytes
it holds, changes what is read of another. An error never quotes a value.
"""

import csv
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from zipfile import is_zipfile

import numpy as np
from torch import Tensor

from fedpact.common.errors import DataError
from fedpact.data.dataset import CONTROL
from fedpact.data.schema import RecordForm
from fedpact.data.tokens import token_rows

Cells = Sequence[Any]

_ARROW: Final = {
    *("bool", "float", "double", "halffloat", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
}
"""What has a number's form in NumPy, and no other: nanoseconds since 1970 are no feature."""

_NARROW: Final = {
    "float16": np.float16,
    "halffloat": np.float16,
    "float32": np.float32,
    "float": np.float32,
}
"""What tables from Python call the types of floats that Python's own floats do not tell."""


@dataclass(frozen=True, eq=False)
class NumberCells(Sequence[Any]):
    """Cells of one type of numbers: values [n], and which of them are missing, bool [n].

    A cell is a number of Python's, or a float of 16 or 32 bits; None where it is missing.
    """

    values: np.ndarray
    missing: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return NumberCells(self.values[place], self.missing[place])
        if self.missing[place]:
            return None
        value = self.values[place]
        return value if self._narrow else value.item()

    def __iter__(self) -> Iterator[Any]:
        cells = list(self.values) if self._narrow else self.values.tolist()
        if not self.missing.any():
            return iter(cells)
        return (None if m else v for v, m in zip(cells, self.missing.tolist(), strict=True))

    def floats(self) -> np.ndarray:
        """Return them as float64 [n], NaN for what is missing."""
        found = self.values.astype(np.float64)
        found[self.missing] = np.nan
        return found

    @property
    def _narrow(self) -> bool:
        return self.values.dtype.kind == "f" and self.values.dtype.itemsize < 8


def arrow_cells(column: Any) -> Cells:
    """Return a column of Arrow's, an Array or a ChunkedArray; None for what cannot be read."""
    import pyarrow

    if not isinstance(column, pyarrow.ChunkedArray):
        column = pyarrow.chunked_array([column])
    kept = getattr(column.type, "value_type", None)
    if pyarrow.types.is_dictionary(column.type) and str(kept) in _ARROW:
        column = column.cast(kept)
    if str(column.type) not in _ARROW:
        return [_arrow_cell(one) for one in column]
    missing = column.is_null().to_numpy()
    if column.null_count:
        column = column.fill_null(pyarrow.scalar(0).cast(column.type))
    return NumberCells(column.to_numpy(), missing)


def cells_of(column: Any, declared: Any = None) -> list[Any]:
    """Return a column that was handed in from Python: a list, an array, a tensor, a frame's.

    declared: the name of its type, where the column does not say.
    """
    if type(column).__module__.partition(".")[0] == "pyarrow":
        return list(arrow_cells(column))
    if isinstance(column, Tensor) and column.ndim == 1:
        column = column.detach().cpu().numpy()
    cells = [v.item() if isinstance(v, Tensor) and not v.ndim else v for v in column]
    if declared is None:
        declared = getattr(column, "dtype", None)
        # A column of categories says which type these are of.
        declared = getattr(getattr(declared, "categories", None), "dtype", declared)
    narrow = _NARROW.get(str(declared).lower().removesuffix("[pyarrow]"))
    return [narrow(v) if isinstance(v, float) else v for v in cells] if narrow else cells


def _arrow_cell(one: Any) -> Any:
    """Return a cell's value; None where it has none that Python can hold, as text of odd bytes."""
    try:
        return one.as_py()
    except Exception:  # ArrowException, ValueError, OverflowError: whatever is in the cell
        return None


SUFFIXES: Final = (".csv", ".parquet", ".npz")

_INDEX: Final = re.compile(r"(__index_level_\d+__|Unnamed: \d+)?")
"""What pandas calls a column that numbers rows, in Parquet and, unnamed, in a CSV."""
_ANY: Final = RecordForm()
_NAMED: Final = 40  # columns, in an error


@dataclass(frozen=True, eq=False)
class Table:
    """A file's columns, name -> cells [n], and the roles of some.

    broken: row from 0 -> what is wrong with it as a whole; its cells are empty. chosen: the columns
    of features that were asked for, in order; None: all but those in `unused`.
    """

    columns: Mapping[str, Cells]
    label: str
    site: str | None
    broken: Mapping[int, str]
    person: str | None = None
    chosen: tuple[str, ...] | None = None
    unused: frozenset[str] = frozenset()

    @property
    def features(self) -> tuple[str, ...]:
        """The columns that a record's features stand in, in order."""
        if self.chosen is not None:
            return self.chosen
        none = {self.label, self.site, self.person, *self.unused}
        return tuple(name for name in self.columns if name not in none)

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.columns[self.label])


def read_table(
    path: Path,
    label: str | None,
    site: str | None,
    person: str | None = None,
    form: RecordForm = _ANY,
) -> Table:
    """Return the table in a .csv file with a header line, or in a .parquet file.

    label, site, person: their columns. form: which others are features. A CSV's record is one line;
    a value with a line break in it is not read. Raises DataError: no such file or column, or a file
    that cannot be read.
    """
    columns, broken = read_columns(path)
    index = _index_of(path) if path.suffix.lower() == ".parquet" else ()
    return table_of(f"data file {path}", columns, label, site, broken, person, form, index)


def _numbering(origin: str, names: Sequence[str], form: RecordForm) -> list[str]:
    """Return the columns that number rows. Raises DataError: another one that has no name."""
    known = [name for name in names if _INDEX.fullmatch(name)]
    for name in known:
        place = names.index(name)
        chosen = form.features is not None or name in form.drop or name.startswith("__index")
        if place and not chosen:
            raise DataError(
                f"{origin}: column {place + 1} of {len(names)} has no name ({name!r}): expected "
                "one, by which it can be declared; give it one in the file, delete it, or leave it "
                "out by records.drop"
            )
    return known


def read_columns(path: Path) -> tuple[dict[str, Cells], dict[int, str]]:
    """Return a file's columns, and of its broken rows, from 0, what is wrong. Raises DataError."""
    if not path.is_file():
        raise _missing(path)
    return _read_csv(path) if path.suffix.lower() == ".csv" else _read_parquet(path)


_AT_A_SITE: Final = "; a deployed site's owner names it as label in site.toml"


def table_of(
    origin: str,
    columns: Mapping[str, Cells],
    label: str | None,
    site: str | None,
    broken: Mapping[int, str] = MappingProxyType({}),
    person: str | None = None,
    form: RecordForm = _ANY,
    index: Collection[str] = (),
) -> Table:
    """Return columns as a table. origin: what they are called. index: those that number its rows.

    form: which columns are features. Raises DataError: no such column.
    """
    roles = {"label": label, "site": site, "person": person}
    for role, column in roles.items():
        if column not in columns and not (role != "label" and column is None):
            raise DataError(
                f"{origin}: {role} column is {column!r}: expected one of its columns "
                f"{list_some(columns)}; name it as {role} in a plan or in Python, or by --{role} "
                "where a command has it" + _AT_A_SITE * (role == "label")
            )
    used = form.features or {*columns} - {*roles.values(), *form.drop}
    rows = token_rows(columns, used)
    for key, names in (("features", form.features or ()), ("drop", form.drop)):
        known = {*columns, *rows} - {*roles.values()}
        if odd := [c for c in names if c not in known]:
            raise DataError(
                f"{origin}: records.{key} names {', '.join(odd)}: expected some of its columns "
                f"{list_some(columns)}, and not those of label, site or person; correct the names"
            )
    wanted = rows or (None if form.features is None else tuple(form.features))
    unused = {*form.drop, *index, *_numbering(origin, list(columns), form)}
    table = Table(columns, str(label), site, broken, person, wanted, frozenset(unused))
    given = [column for column in roles.values() if column is not None]
    if not table.features or len(set(given)) < len(given):
        raise DataError(
            f"{origin}: label column {label!r}, site column {site!r} and person column "
            f"{person!r} leave {len(table.features)} feature columns of {len(columns)}: expected "
            "different columns and at least one more"
        )
    return table


def list_some(columns: Iterable[str]) -> str:
    """Return names of columns, of many the first."""
    names = list(columns)
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _missing(path: Path) -> DataError:
    where = "" if path.is_absolute() else f" in {Path.cwd()}, where the command was given"
    return DataError(f"data file {path} does not exist{where}: check the path")


def read_npz(path: Path, *, labelled: bool = True) -> dict[str, np.ndarray]:
    """Return the arrays x, y and, where they are there, x_test, y_test, site, person.

    labelled: whether y has to be there. Raises DataError: no such file, or other arrays.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = dict(stored)
    except FileNotFoundError as error:
        raise _missing(path) from error
    except Exception as error:  # a damaged zip fails in a dozen ways
        # Of what is no zip numpy says that it can be loaded unsafely.
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


def _read_csv(path: Path) -> tuple[dict[str, Cells], dict[int, str]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"data file {path} cannot be read ({error.strerror}): check who may read it"
        ) from error
    lines = [line for line in content.removeprefix(b"\xef\xbb\xbf").splitlines() if line.strip()]
    header = _cells(lines[0]) if lines else []
    if not isinstance(header, str):
        _check_names(path, header)
    if isinstance(header, str) or not header or len(set(header)) < len(header):
        told = header if isinstance(header, str) else f"has the columns {', '.join(header)}"
        what = f"its first line {told}" if header else "is empty"
        raise DataError(
            f"data file {path}: {what}: expected a header line that names each "
            "column once, in UTF-8 text, with commas between them"
        )
    if len(header) == 1 and (marks := [mark for mark in ";\t|" if mark in header[0]]):
        raise DataError(
            f"data file {path}: its first line has no comma, and {marks[0]!r} in it: expected "
            "commas between columns (and points in numbers, as in 21.4); write the file anew so"
        )
    rows, broken = list[list[str]](), dict[int, str]()
    for number, line in enumerate(lines[1:]):
        cells = _cells(line)
        if not isinstance(cells, str) and len(cells) != len(header):
            cells = f"has {len(cells)} values: expected {len(header)}, as in the header"
        if isinstance(cells, str):
            broken[number] = cells
            cells = [""] * len(header)
        rows.append(cells)
    columns = zip(*rows, strict=True) if rows else ([] for _ in header)
    return dict(zip(header, columns, strict=True)), broken


def _cells(line: bytes) -> list[str] | str:
    """Return a line's values, without blanks around them, or what is wrong with it."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        return "is not UTF-8 text"
    if '"' not in text:
        return [value.strip() for value in text.split(",")]
    try:
        return [v.strip() for v in next(csv.reader([text], skipinitialspace=True, strict=True))]
    except csv.Error:
        return "cannot be read as CSV"


def _read_parquet(path: Path) -> tuple[dict[str, Cells], dict[int, str]]:
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
    _check_names(path, table.column_names)
    return {name: arrow_cells(table.column(name)) for name in table.column_names}, {}


def _check_names(path: Path, names: Iterable[str]) -> None:
    """Raise DataError for a column's name that a terminal would take for a command."""
    if strange := [name for name in names if CONTROL.search(name)]:
        raise DataError(
            f"data file {path} has a column {strange[0]!a}: expected a name without control "
            "characters, which a terminal obeys; rename it in the file"
        )


def _index_of(path: Path) -> tuple[str, ...]:
    """Return the columns that pandas wrote as its index, as the file itself says."""
    import pyarrow.parquet

    told: dict[str, Any] = pyarrow.parquet.read_schema(path).pandas_metadata or {}
    return tuple(name for name in told.get("index_columns", ()) if isinstance(name, str))
