"""Which records of a file are used, and what their owner is told about the others."""

import logging
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fedpact.common.errors import DataError
from fedpact.common.format import counted, percent, toml, toml_key

_logger = logging.getLogger("fedpact")

_SHOWN: Final = 3
"""So many rows are named for each reason; the others are counted."""
_REASONS: Final = 20
"""So many reasons are given; the others are counted."""
_MANY: Final = 0.05
"""Of more records than this share the reasons are told in a list."""
_LONG: Final = 200
"""So many characters of a value are quoted."""

MISSING: Final = "is missing"
"""Why a record with a blank feature is left out, which a declared `fill` would prevent."""

_Faults = dict[tuple[str, int], tuple[str, Any]]
"""(Column or "", row from 0) -> the first reason, and the value found there."""


@dataclass
class RecordFilter:
    """The records of one file: which are left out, which hold a clamped value, and why.

    origin: the file. count: its records. first: the number of the first, as its owner counts.
    """

    origin: str
    count: int
    first: int = 0
    _faults: _Faults = field(default_factory=_Faults)
    _clamped: _Faults = field(default_factory=_Faults)

    @property
    def good(self) -> np.ndarray:
        """Which records are used, bool [count]."""
        mask = np.ones(self.count, bool)
        mask[[row for _, row in self._faults]] = False
        return mask

    @property
    def left_out(self) -> float:
        """The share of the records that are left out; 1 if there are none."""
        return float((~self.good).mean()) if self.count else 1.0

    def too_many(self, most: float, key: str) -> str:
        """Say that more than the share `most` of `key` are left out; "" if they are not."""
        if self.left_out <= most:
            return ""
        return (
            f"{int((~self.good).sum()):,} of {self.count:,} records of {self.origin} are left out, "
            f"{percent(self.left_out)}, but {key} allows {percent(most)}"
        )

    def leave_out(self, row: int, column: str, why: str, value: Any = None) -> None:
        """Leave a record out. row: from 0. column: or "". why: as MISSING. value: or None."""
        self._faults.setdefault((column, row), (why, value))

    def clamp(self, row: int, column: str, why: str, value: Any) -> None:
        """Note that a value of a record was set to a bound."""
        self._clamped.setdefault((column, row), (why, value))

    def reasons(self) -> list[tuple[str, str, int]]:
        """Return (column or "", why, how many records it leaves out), the most frequent first.

        Of what is wrong with one cell the first counts. A record with two wrong cells is in both.
        """
        return [(column, why, len(rows)) for column, why, rows in _by_reason(self._faults)]

    def describe(self, *, values: bool) -> list[str]:
        """Return what to tell the records' owner, in paragraphs. values: whether to quote them."""
        return [paragraph for _, paragraph in self._paragraphs(values=values)]

    def _paragraphs(self, *, values: bool) -> list[tuple[bool, str]]:
        """Return the paragraphs, each with whether it is about lines that cannot be read."""
        broken = {key: found for key, found in self._faults.items() if not key[0]}
        unread, left = ({row for _, row in faults} for faults in (broken, self._faults))
        out = {key: found for key, found in self._faults.items() if key[1] not in unread}
        clamped = {key: found for key, found in self._clamped.items() if key[1] not in left}
        advice = "correct them, or remove them from the file"
        if blank := sorted(column for column, why, _ in _by_reason(out) if why == MISSING):
            key = f"records.columns.{toml_key(blank[0])}.fill"
            advice += f", or declare the value that replaces a missing one, as {key}"
        found = (
            (broken, "cannot be read and are left out", "correct the file"),
            (out, "are left out", advice),
            (clamped, "hold a value that was clamped", "correct the file if it is a mistake"),
        )
        return [
            (
                faults is broken,
                f"{self.origin}: {len(rows)} of {self.count} records {what} (rows counted from "
                f"{self.first}):{self._tell(faults, values, len(rows))}{remedy}",
            )
            for faults, what, remedy in found
            if (rows := {row for _, row in faults})
        ]

    def warn(self, *, values: bool) -> None:
        """Tell the records' owner, on this machine and nowhere else.

        values: the owner runs this program, and is warned of broken lines; all else is logged.
        """
        for broken, paragraph in self._paragraphs(values=values):
            if broken and values:
                warnings.warn_explicit(paragraph, UserWarning, self.origin, 0)
            else:
                _logger.warning(paragraph)

    def _tell(self, faults: _Faults, values: bool, count: int) -> str:
        told, reasons = list[str](), _by_reason(faults)
        for column, why, rows in reasons[:_REASONS]:
            named = [f"{row + self.first}" + _quoted(rows[row]) * values for row in sorted(rows)]
            few = ", ".join(named[:_SHOWN])
            which = f"row{'s' if len(rows) > 1 else ''} {few}"
            if len(rows) > _SHOWN:
                which = f"{len(rows)} rows ({few}, ...)"
            told.append(f"{which}: {f'column {column}' if column else 'the line'} {why}")
        if len(reasons) > _REASONS:
            told.append(f"and {counted(len(reasons) - _REASONS, 'other reason')}")
        if values and count > _MANY * self.count:
            return "".join(f"\n  {one}" for one in told) + "\n"
        return f" {'; '.join(told)}; "


def _by_reason(faults: _Faults) -> list[tuple[str, str, dict[int, Any]]]:
    """Return (column or "", why, row -> value), the most frequent first."""
    found = defaultdict[tuple[str, str], dict[int, Any]](dict)
    for (column, row), (why, value) in faults.items():
        found[column, why][row] = value
    ordered = sorted(found.items(), key=lambda each: -len(each[1]))
    return [(column, why, rows) for (column, why), rows in ordered]


def _quoted(value: Any) -> str:
    """Return " = " and a value as it was given, of a long one its beginning; "" for none."""
    if value is None:
        return ""
    whole = repr(value.item() if isinstance(value, np.generic) else value)
    long = f"{whole[:_LONG]}... ({len(whole)} characters)"
    return f" = {whole if len(whole) <= _LONG else long}"


def left_out_error(sieve: RecordFilter, instead: str = "") -> DataError:
    """Return the error for a file of which no record is used, with the columns that are to blame.

    instead: that too many are left out. For simulations only: a deployed site does not stop.
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
    for column, why, _ in faults[:_FEW]:
        columns.setdefault(why, []).append(column)
    told, advice = list[str](), list[str]()
    for why, names in columns.items():
        told.append(f"column {', '.join(names)}: {why}" if names[0] else f"a record {why}")
        remedy = _REMEDIES.get(why if names[0] else "", _CORRECT)
        advice.append(remedy.format(name=toml_key(names[-1]), names=toml(names)))
    return DataError(
        f"{instead or f'no record is left of {sieve.origin}'}: {'; '.join(told)}; "
        f"{'; '.join(dict.fromkeys(advice))}"
    )


NO_NUMBER: Final = "is not a number, as labels are here"
"""Of a label, where the task is to learn numbers."""

_FEW: Final = 5
_CORRECT: Final = (
    "correct the records, or what is declared of them: records.classes, records.columns"
)
_REMEDIES: Final = {
    "": 'save the table anew, as what spreadsheets call "CSV UTF-8", each line as long as the '
    "header, with commas between values",
    NO_NUMBER: "learn such labels as classes, without [task], or name the column of numbers as "
    "label",
    "is not a finite number": "`fedpact inspect FILE` drafts what to declare; if it holds text or "
    "dates, leave it out with drop = {names} or name the others in features ([records]); declare "
    "words as records.columns.{name}.categories = [...], all that there are; write a date as a "
    "number, as days since a day that is fixed, and a number with a point, not a comma",
    MISSING: "leave out what holds nothing with drop = {names}, or declare what stands for a "
    "missing value, as records.columns.{name}.fill",
}
"""Why a record is left out -> what to do; "" of what is wrong with it as a whole."""
