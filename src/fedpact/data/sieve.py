"""Which records of a person's own are used, and what that person is told of the others."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

_logger = logging.getLogger("fedpact")

_PLACES: Final = 20
"""So many places are told of in full; of all others that are left out, which records they are."""
_CLAMPED: Final = 3
"""So many where a value was clamped, as whoever declared `clamp` asked for; the others counted."""


@dataclass
class Sieve:
    """The records of one file: which are left out, which hold a clamped value, and why.

    origin: the file. count: its records. first: the number of the first, as its owner counts.
    """

    origin: str
    count: int
    first: int
    _out: dict[int, tuple[str, Any]] = field(default_factory=dict[int, tuple[str, Any]])
    _clamped: dict[int, tuple[str, Any]] = field(default_factory=dict[int, tuple[str, Any]])

    @property
    def good(self) -> np.ndarray:
        """Which records are used, bool [count]."""
        mask = np.ones(self.count, bool)
        mask[list(self._out)] = False
        return mask

    def leave_out(self, row: int, column: str, why: str, value: Any = None) -> None:
        """Leave a record out. row: from 0. column: or "". why: as "is missing". value: or None."""
        self._out.setdefault(row, (self._place(row, column, why), _plain(value)))

    def clamp(self, row: int, column: str, why: str, value: Any) -> None:
        """Note that a value of a record was set to a bound."""
        self._clamped.setdefault(row, (self._place(row, column, why), _plain(value)))

    def told(self, *, values: bool) -> list[str]:
        """Return what to tell the records' owner, in paragraphs. values: whether to quote them."""
        clamped = {row: what for row, what in self._clamped.items() if row not in self._out}
        found = (
            (self._out, "are left out of everything", "correct them, or leave them out yourself"),
            (clamped, "hold a value that was clamped", "correct it if it is a mistake"),
        )
        return [
            f"{self.origin}: {len(rows)} of {self.count} records {what}: "
            f"{self._places(rows, values, rows is clamped)}; {advice}"
            for rows, what, advice in found
            if rows
        ]

    def warn(self, *, values: bool) -> None:
        """Tell the records' owner, in the log of this machine and nowhere else."""
        for paragraph in self.told(values=values):
            _logger.warning(paragraph)

    def _place(self, row: int, column: str, why: str) -> str:
        place = f"column {column}, " if column else ""
        return f"{place}row {row + self.first} (counted from {self.first}) {why}"

    def _places(self, rows: dict[int, tuple[str, Any]], values: bool, few: bool) -> str:
        ordered, most = sorted(rows), _CLAMPED if few else _PLACES
        shown = [
            told + (f": {value!r}" if values and value is not None else "")
            for told, value in (rows[row] for row in ordered[:most])
        ]
        if len(ordered) > most:
            others = [r + self.first for r in ordered[most:]]
            shown.append(f"and {len(others)} others" if few else f"and rows {_runs(others)}")
        return "; ".join(shown)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _runs(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: 3, 5-9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
