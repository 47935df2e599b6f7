"""A column's cells: what each is read as follows from it and the column's declared type alone.

So no cell, one that is missing among them, changes what another is read as. A float of 16 or 32
bits stays one in NumPy's, as it says how large a whole number it can hold.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from torch import Tensor

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
