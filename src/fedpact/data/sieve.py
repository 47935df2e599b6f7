"""Which records of a person's own are used, and what that person is told of the others."""

import logging
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
    _unknown: dict[int, str] = field(default_factory=dict[int, str])
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

    def unknown(self, row: int, column: str, why: str, label: Any) -> None:
        """Leave a record out whose label is no class: of many each label is told of once."""
        if row not in self._out:
            self._unknown[row] = f"{label!r}, which {why} (column {column})"
            self.leave_out(row, column, why, label)

    def reasons(self) -> list[tuple[str, str, int]]:
        """Return (column or "", why, how many records it leaves out), the most frequent first.

        Of what is wrong with one cell the first counts. A record with two wrong cells is in both.
        """
        counted, seen = list[tuple[str, str, int]](), defaultdict[str, set[int]](set)
        for (column, why), rows in self._faults.items():
            counted.append((column, why, len(rows - seen[column])))
            seen[column] |= rows
        return sorted((each for each in counted if each[2]), key=lambda each: -each[2])

    def wholly(self) -> dict[str, list[str]]:
        """Return what is wrong in columns where no record fits -> those columns."""
        broken = set[int]().union(*(r for (column, _), r in self._faults.items() if not column))
        by_column, found = dict[str, dict[str, set[int]]](), dict[str, list[str]]()
        for (column, why), rows in self._faults.items():
            by_column.setdefault(column, {})[why] = rows - broken
        for column, faults in by_column.items():
            bad = set[int]().union(*faults.values())
            if column and bad and len(bad | broken) == self.count:
                most = max(faults, key=lambda why: len(faults[why]))
                found.setdefault(most, []).append(column)
        return found

    def broken(self) -> list[str]:
        """Return what is wrong with whole records, the most frequent first; [] if others are left.

        As lines that cannot be read.
        """
        found = {why: rows for (column, why), rows in self._faults.items() if not column}
        if len(set[int]().union(*found.values())) < self.count:
            return []
        return sorted(found, key=lambda why: -len(found[why]))

    def clamp(self, row: int, column: str, why: str, value: Any) -> None:
        """Note that a value of a record was set to a bound."""
        self._clamped.setdefault(row, (self._place(row, column, why), _plain(value)))

    def describe(self, *, values: bool) -> list[str]:
        """Return what to tell the records' owner, in paragraphs. values: whether to quote them."""
        clamped = {row: what for row, what in self._clamped.items() if row not in self._out}
        many = self._unknown if values and len(self._unknown) > _PLACES else {}
        told = Counter(many.values()).most_common()
        labels = "; ".join(f"{count} have the label {label}" for label, count in told[:_PLACES])
        labels += f"; and {len(told) - _PLACES} other labels" if len(told) > _PLACES else ""
        out = {row: what for row, what in self._out.items() if row not in many}
        unknown = f"{self.origin}: {len(many)} of {self.count} records are left out of everything: "
        mend = "correct them, or leave them out yourself"
        blank = sorted(c for c, why in self._faults if c and why == MISSING)
        if blank:
            key = f"records.columns.{toml_key(blank[0])}.fill"
            mend += f", or declare what stands for a value that is missing, as {key}"
        found = (
            (out, "are left out of everything", mend),
            (clamped, "hold a value that was clamped", "correct it if it is a mistake"),
        )
        return ([f"{unknown}{labels}; correct them, or records.classes"] if many else []) + [
            f"{self.origin}: {len(rows)} of {self.count} records {what}: "
            f"{self._places(rows, values, rows is clamped)}; {advice}"
            for rows, what, advice in found
            if rows
        ]

    def warn(self, *, values: bool) -> None:
        """Tell the records' owner, in the log of this machine and nowhere else."""
        for paragraph in self.describe(values=values):
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


def nothing_left(sieve: RecordFilter, features: Sequence[str]) -> DataError:
    """Return what to tell the owner of records of which none is used: which columns are to blame.

    features: the columns of a table. For simulations alone: a deployed site tells nobody.
    """
    if not sieve.count:
        return DataError(
            f"{sieve.origin} has 0 records: expected at least one below the header of a table, or "
            "in each array; was it written to its end?"
        )
    if broken := sieve.broken():
        return DataError(
            f"no record is left of {sieve.origin}: every one {' or '.join(broken[:3])}; expected "
            "text in UTF-8 with commas between values, each line as long as the header: save the "
            'table anew, as what spreadsheets call "CSV UTF-8"'
        )
    wholly = sieve.wholly() if features else {}
    if not wholly:
        told = sieve.describe(values=False)[0]
        return DataError(
            "no record is left: expected at least one; declare a column of words by its categories "
            "(records.columns) and what stands for a missing value (fill), or leave out columns "
            f"that hold neither (records.drop): {told}"
        )
    told, advice = list[str](), list[str]()
    for why, names in wholly.items():
        what, hint = _WHOLLY.get(why, (why, "correct what is declared, or the records"))
        hint = "name the classes as records.classes" if "classes" in why else hint
        many = len(names) > 1
        what = what.replace("hold ", "hold " if many else "holds ")
        told.append(f"column{'s' * many} {', '.join(names)} {what}")
        advice.append(hint.format(name=toml_key(names[-1]), names=toml(names)))
    return DataError(
        f"no record is left of {sieve.origin}: {'; '.join(told)}, in every record; "
        f"{'; '.join(dict.fromkeys(advice))}"
    )


NO_NUMBER: Final = "is no number, which labels are"
"""Of a label, where the task is to learn numbers."""

_WHOLLY: Final = {
    NO_NUMBER: (
        "hold labels that are no numbers",
        "learn them as classes, without [task], or name the column of numbers as label",
    ),
    "is no finite number": (
        "hold text or dates",
        "leave them out with drop = {names} or name the others in features ([records]); declare "
        "words as records.columns.{name}.categories = [...], all that there are; write a date as a "
        "number, as days since a day that is fixed, and a number with a point, not a comma",
    ),
    MISSING: (
        "hold nothing",
        "leave them out with drop = {names}, or declare what stands for a missing value, as "
        "records.columns.{name}.fill",
    ),
}
"""Why a value is no number of a record -> what columns of such hold, and what to do."""


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
