"""Which records of a person's own are used, and what that person is told of the others."""

import logging
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fedpact.common.errors import DataError
from fedpact.common.format import toml, toml_key

_logger = logging.getLogger("fedpact")

_PLACES: Final = 20
"""So many places are told of in full; of all others that are left out, which records they are."""
_RUNS: Final = 100
"""So many rows, or runs of rows, of those others: what nobody reads to its end hides the rest."""
_CLAMPED: Final = 3
"""So many where a value was clamped, as whoever declared `clamp` asked for; the others counted."""
_LONG: Final = 200
"""So many characters of a value are quoted."""

MISSING: Final = "is missing"
"""Why a blank feature of a table is left out, for which something declared can stand."""


@dataclass
class RecordFilter:
    """The records of one file: which are left out, which hold a clamped value, and why.

    origin: the file. count: its records. first: the number of the first, as its owner counts.
    """

    origin: str
    count: int
    first: int
    _out: dict[int, tuple[str, Any]] = field(default_factory=dict[int, tuple[str, Any]])
    _clamped: dict[int, tuple[str, Any]] = field(default_factory=dict[int, tuple[str, Any]])
    _faults: dict[tuple[str, str], set[int]] = field(
        default_factory=lambda: defaultdict[tuple[str, str], set[int]](set)
    )

    @property
    def good(self) -> np.ndarray:
        """Which records are used, bool [count]."""
        mask = np.ones(self.count, bool)
        mask[list(self._out)] = False
        return mask

    def leave_out(self, row: int, column: str, why: str, value: Any = None) -> None:
        """Leave a record out. row: from 0. column: or "". why: as MISSING. value: or None."""
        self._faults[column, why].add(row)
        self._out.setdefault(row, (self._place(row, column, why), _plain(value)))

    def reasons(self) -> list[tuple[str, str, int]]:
        """Return (column or "", why, how many records it leaves out), the most frequent first.

        Of what is wrong with one cell the first counts. A record with two wrong cells is in both.
        """
        counted, seen = list[tuple[str, str, int]](), defaultdict[str, set[int]](set)
        for (column, why), rows in self._faults.items():
            counted.append((column, why, len(rows - seen[column])))
            seen[column] |= rows
        return sorted((each for each in counted if each[2]), key=lambda each: -each[2])

    def clamp(self, row: int, column: str, why: str, value: Any) -> None:
        """Note that a value of a record was set to a bound."""
        self._clamped.setdefault(row, (self._place(row, column, why), _plain(value)))

    def describe(self, *, values: bool) -> list[str]:
        """Return what to tell the records' owner, in paragraphs. values: whether to quote them."""
        return [paragraph for _, paragraph in self._paragraphs(values=values)]

    def _paragraphs(self, *, values: bool) -> list[tuple[bool, str]]:
        """The paragraphs, each with whether it is of what no record could be read from."""
        lines = set[int]().union(*(rows for (c, _), rows in self._faults.items() if not c))
        broken = {row: what for row, what in self._out.items() if row in lines}
        out = {row: what for row, what in self._out.items() if row not in lines}
        clamped = {row: what for row, what in self._clamped.items() if row not in self._out}
        mend = "correct them, or leave them out yourself"
        blank = sorted(c for c, why in self._faults if c and why == MISSING)
        if blank:
            key = f"records.columns.{toml_key(blank[0])}.fill"
            mend += f", or declare what stands for a value that is missing, as {key}"
        found = (
            (broken, "cannot be read and are left out of everything", "correct the file"),
            (out, "are left out of everything", mend),
            (clamped, "hold a value that was clamped", "correct it if it is a mistake"),
        )
        return [
            (
                rows is broken,
                f"{self.origin}: {len(rows)} of {self.count} records {what}: "
                f"{self._places(rows, values, rows is clamped)}; {advice}",
            )
            for rows, what, advice in found
            if rows
        ]

    def warn(self, *, values: bool) -> None:
        """Tell the records' owner, on this machine and nowhere else.

        values: the owner runs this program, who is warned of broken lines; all else is in the log.
        """
        for broken, paragraph in self._paragraphs(values=values):
            if broken and values:
                warnings.warn_explicit(paragraph, UserWarning, self.origin, 0)
            else:
                _logger.warning(paragraph)

    def _place(self, row: int, column: str, why: str) -> str:
        place = f"column {column}, " if column else ""
        return f"{place}row {row + self.first} (counted from {self.first}) {why}"

    def _places(self, rows: dict[int, tuple[str, Any]], values: bool, few: bool) -> str:
        ordered, most = sorted(rows), _CLAMPED if few else _PLACES
        shown = [
            told + (f": {_quoted(value)}" if values and value is not None else "")
            for told, value in (rows[row] for row in ordered[:most])
        ]
        if len(ordered) > most:
            others = [r + self.first for r in ordered[most:]]
            shown.append(f"and {len(others)} others" if few else f"and rows {_runs(others)}")
        return "; ".join(shown)


def _quoted(value: Any) -> str:
    """A value as it was given, of a long one the beginning."""
    whole = repr(value)
    return whole if len(whole) <= _LONG else f"{whole[:_LONG]}... ({len(whole)} characters)"


def nothing_left(sieve: RecordFilter) -> DataError:
    """Return what to tell the owner of records of which none is used: which columns are to blame.

    For simulations alone: a deployed site tells nobody.
    """
    if not sieve.count:
        return DataError(
            f"{sieve.origin} has 0 records: expected at least one below the header of a table, or "
            "in each array; was it written to its end?"
        )
    faults, count = sieve.reasons(), Counter[str]()
    for column, _, rows in faults:
        count[column] += rows
    # Columns of which no cell fits, where there are any, are to blame.
    faults = [each for each in faults if count[each[0]] == sieve.count] or faults
    columns = dict[str, list[str]]()
    for column, why, _ in faults[:_REASONS]:
        columns.setdefault(why, []).append(column)
    told, advice = list[str](), list[str]()
    for why, names in columns.items():
        told.append(f"column {', '.join(names)}: {why}" if names[0] else f"a record {why}")
        remedy = _REMEDIES.get(why if names[0] else "", _CORRECT)
        advice.append(remedy.format(name=toml_key(names[-1]), names=toml(names)))
    return DataError(
        f"no record is left of {sieve.origin}: {'; '.join(told)}; "
        f"{'; '.join(dict.fromkeys(advice))}"
    )


NO_NUMBER: Final = "is no number, which labels are"
"""Of a label, where the task is to learn numbers."""

_REASONS: Final = 5
_CORRECT: Final = (
    "correct the records, or what is declared of them: records.classes, records.columns"
)
_REMEDIES: Final = {
    "": 'save the table anew, as what spreadsheets call "CSV UTF-8", each line as long as the '
    "header, with commas between values",
    NO_NUMBER: "learn such labels as classes, without [task], or name the column of numbers as "
    "label",
    "is no finite number": "if it holds text or dates, leave it out with drop = {names} or name "
    "the others in features ([records]); declare words as records.columns.{name}.categories = "
    "[...], all that there are; write a date as a number, as days since a day that is fixed, and a "
    "number with a point, not a comma",
    MISSING: "leave out what holds nothing with drop = {names}, or declare what stands for a "
    "missing value, as records.columns.{name}.fill",
}
"""Why a record is left out -> what to do; "" of what is wrong with it as a whole."""


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _runs(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: 3, 5-9; of very many the first, and how many others."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    others = sum(b - a + 1 for a, b in runs[_RUNS:])
    told = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs[:_RUNS])
    return f"{told} and {others} others" if others else told
