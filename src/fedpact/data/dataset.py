"""Dataset: the records of one data set, checked once, frozen; and which of a file's are left out.

Its errors give names, shapes, rows and columns, never a value of a record.
"""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fedpact.common.errors import DataError
from fedpact.common.format import count_noun, percent, toml, toml_key
from fedpact.data.cells import check_printable
from fedpact.data.schema import RecordForm

_logger = logging.getLogger("fedpact")


_SHOWN: Final = 3
"""So many rows are named for each reason; the others are counted."""
_REASONS: Final = 20
"""So many reasons are given; the others are counted."""
_MANY: Final = 0.05
"""Of more records than this share the reasons are told in a list."""
_LONG: Final = 200
"""So many characters of a value are quoted."""

BEYOND: Final = "is beyond its declared range"
BEYOND_LABELS: Final = "is beyond the declared range of labels"
"""Why a value is set to a bound; one of a feature may leave its record out instead."""
MISSING: Final = "is missing"
"""Why a record with a blank feature is left out, which a declared `fill` would prevent."""

_Faults = dict[str, dict[str, dict[int, Any]]]
"""Column or "" -> reason -> row from 0 -> the value found there, of the first rows only."""
_Reason = tuple[str, str, dict[int, Any]]


@dataclass
class RecordFilter:
    """The records of one file: which are left out, which hold a clamped value, and why.

    origin: the file. count: its records. first: the number of the first, as its owner counts.
    sites: the name of each record's site [count], "" for none; empty if no column names it.
    """

    origin: str
    count: int
    first: int = 0
    sites: Sequence[str] = ()
    _faults: _Faults = field(default_factory=_Faults)
    _clamped: _Faults = field(default_factory=_Faults)

    @property
    def good(self) -> np.ndarray:
        """Which records are used, bool [count]."""
        mask = np.ones(self.count, bool)
        mask[[row for *_, rows in _by_reason(self._faults) for row in rows]] = False
        return mask

    @property
    def left_out(self) -> float:
        """The share of the records that are left out; 1 if there are none."""
        return float((~self.good).mean()) if self.count else 1.0

    def too_many(self, most: float, key: str, *, by_site: bool = False) -> str:
        """Say that more than the share `most` of `key` are left out, of all records or, `by_site`,
        of one site's; "" if they are not.
        """
        bad = ~self.good
        groups = {f"of {self.origin}": (int(bad.sum()), self.count)}
        if by_site:
            out = Counter(compress(self.sites, bad))
            of = Counter(filter(None, self.sites))
            groups |= {f"of site {name}": (out[name], count) for name, count in of.items()}
        for whose, (left, count) in groups.items():
            if (share := left / count if count else 1.0) > most:
                return (
                    f"{left:,} of {count:,} records {whose} are left out, "
                    f"{percent(share)}, but {key} allows {percent(most)}"
                )
        return ""

    def mostly_clamped(self, most: float) -> str:
        """Say of which columns more than half of the used records' values were set to a bound, or
        more than `most` if that is more; "" if there is none. A text that is cut is no such value.
        """
        good, used = self.good, int(self.good.sum())
        beyond = [
            (column, int(good[[*rows]].sum()))
            for column, why, rows in _by_reason(self._clamped)
            if why in (BEYOND, BEYOND_LABELS)
        ]
        return "; ".join(
            f"column {column}: {count:,} of {used:,} values are beyond the declared range, and "
            "would be set to its nearer end"
            for column, count in beyond
            if count > max(0.5, most) * used
        )

    def leave_out(
        self, bad: Any, column: str, why: str, cells: Sequence[Any] | np.ndarray | None = None
    ) -> None:
        """Leave records out. bad: a mask [count], or rows from 0. column: or "". why: as MISSING.

        cells: the column's, to be quoted. Of what is wrong with one cell the first counts; of a
        line that cannot be read no cell is known, so none is at fault.
        """
        known = [rows for key in {"", column} for rows in self._faults.get(key, {}).values()]
        _note(self._faults, bad, column, why, cells, known)

    def clamp(
        self, bad: Any, column: str, why: str, cells: Sequence[Any] | np.ndarray | None = None
    ) -> None:
        """Note that a value of records was set to a bound; see `leave_out`."""
        _note(self._clamped, bad, column, why, cells, ())

    def reasons(self) -> list[tuple[str, str, int]]:
        """Return (column or "", why, how many records it leaves out), the most frequent first.

        Of what is wrong with one cell the first counts. A record with two wrong cells is in both.
        """
        return [(column, why, len(rows)) for column, why, rows in _by_reason(self._faults)]

    def document(self) -> dict[str, Any] | None:
        """Return how many records are left out, of how many, and why; None if none is."""
        out = int((~self.good).sum())
        why = [[column, why, count] for column, why, count in self.reasons()]
        return {"records": out, "of": self.count, "why": why} if out else None

    def warn(self, *, values: bool) -> None:
        """Tell the records' owner, on this machine alone; values: quoted."""
        for paragraph in self.paragraphs(values=values):
            _logger.warning(paragraph)

    def paragraphs(self, *, values: bool) -> list[str]:
        """Return what to tell the records' owner. values: whether to quote them."""
        reasons = _by_reason(self._faults)
        left = {row for *_, rows in reasons for row in rows}
        broken, out = ([r for r in reasons if bool(r[0]) == cell] for cell in (False, True))
        clamped = [
            (column, why, used)
            for column, why, rows in _by_reason(self._clamped)
            if (used := {row: rows[row] for row in rows if row not in left})
        ]
        advice = "correct them, or remove them from the file"
        if blank := sorted(column for column, why, _ in out if why == MISSING):
            key = f"records.columns.{toml_key(blank[0])}.fill"
            advice += f", or declare the value that replaces a missing one, as {key}"
        found = (
            (broken, "cannot be read and are left out", "correct the file"),
            (out, "are left out", advice),
            (clamped, "hold a value that was clamped", "correct the file if it is a mistake"),
        )
        return [
            f"{self.origin}: {len(rows)} of {self.count} records {what} (rows counted from "
            f"{self.first}):{self._tell(told, values, len(rows))}{remedy}"
            for told, what, remedy in found
            if (rows := {row for *_, rows in told for row in rows})
        ]

    def _tell(self, reasons: list[_Reason], values: bool, count: int) -> str:
        told = list[str]()
        for column, why, rows in reasons[:_REASONS]:
            few = [f"{r + self.first}" + _quote(rows[r]) * values for r in sorted(rows)[:_SHOWN]]
            which = f"row{'s' * (len(rows) > 1)} {', '.join(few)}"
            if len(rows) > _SHOWN:
                which = f"{len(rows)} rows ({', '.join(few)}, ...)"
            told.append(f"{which}: {f'column {column}' if column else 'the line'} {why}")
        if len(reasons) > _REASONS:
            told.append(f"and {count_noun(len(reasons) - _REASONS, 'other reason')}")
        if values and count > _MANY * self.count:
            return "".join(f"\n  {one}" for one in told) + "\n"
        return f" {'; '.join(told)}; "


def _note(
    faults: _Faults,
    bad: Any,
    column: str,
    why: str,
    cells: Sequence[Any] | np.ndarray | None,
    known: Collection[Collection[int]],
) -> None:
    bad = np.asarray(bad)
    rows = (bad.nonzero()[0] if bad.dtype == bool else bad).tolist()
    if rows := [row for row in rows if not any(row in before for before in known)]:
        found = faults.setdefault(column, {}).setdefault(why, {})
        found |= dict.fromkeys(rows)
        found |= {row: cells[row] for row in rows[:_SHOWN] if cells is not None}


def _by_reason(faults: _Faults) -> list[_Reason]:
    found = [(column, why, rows) for column, of in faults.items() for why, rows in of.items()]
    return sorted(found, key=lambda each: -len(each[2]))


def _quote(value: Any) -> str:
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

NO_PLACE_LABELLED: Final = "labels no token or pixel"
"""Of labels that are all losses.UNLABELLED."""

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
    NO_PLACE_LABELLED: "label at least one token or pixel of a record, -100 stands for none; if "
    "records.length cuts them away, declare a greater one",
    MISSING: "leave out what holds nothing with drop = {names}, or declare what stands for a "
    "missing value, as records.columns.{name}.fill",
}
"""Why a record is left out -> what to do; "" of what is wrong with it as a whole."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Records with labels, and optionally a public test set.

    x [n, ...]: training records, float32, or int64 for tokens. y: classes, int64 [n] from 0 to
    len(classes) - 1; or numbers from -1 to 1, float32 [n]; or 0 or 1 for each label, float32
    [n, classes]; or classes of pixels or tokens, int64 [n, ...], with losses.UNLABELLED for none.
    classes: the labels' names. x_test, y_test: the public test set in the same form, or None.
    site, person: for each training record the name of its site and of its person, or None.
    features: the names of a table's columns; empty for arrays. column: the name of a table's only
    feature if its cells are arrays. rows: each record's number in its file, if not its place in x.
    held: which training records are the data set's own test part at their sites, bool [n], or None;
    partition.held_out = "own" keeps them for evaluation, and nothing else uses them.
    sieve: which of its file's training records are left out, and why; None if unknown.
    next: whether a token's label is the next token's, as schema.LabelForm has it.
    form: the declaration that the records were checked against; None after a replacement.

    Labels are not checked here, but where records are read (data.load). Raises DataError: a class
    named twice, x_test of another shape than x, a number that is not finite, or a name with control
    characters.
    """

    name: str
    x: Tensor
    y: Tensor
    classes: tuple[str, ...]
    x_test: Tensor | None = None
    y_test: Tensor | None = None
    site: tuple[str, ...] | None = None
    features: tuple[str, ...] = ()
    rows: Tensor | None = None
    held: Tensor | None = None
    person: tuple[str, ...] | None = None
    column: str | None = None
    sieve: RecordFilter | None = None
    next: bool = False
    form: RecordForm | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.classes or len(set(self.classes)) < len(self.classes):
            raise DataError(
                f"data set {self.name}: it has {len(self.classes)} class names, "
                f"{len(set(self.classes))} of them different: expected at least one, and no name "
                "twice; name every class once"
            )
        # The classes of texts are characters, which may be control characters.
        classes = self.classes if self.x.is_floating_point() else ()
        columns = (*self.features, self.column or "")
        for role, names in ("column", columns), ("class", classes), ("site", {*(self.site or ())}):
            check_printable(f"data set {self.name}", role, names)
        if self.x_test is not None and self.x_test.shape[1:] != self.x.shape[1:]:
            raise DataError(
                f"data set {self.name}: a record of x has shape {tuple(self.x.shape[1:])}, one "
                f"of x_test {tuple(self.x_test.shape[1:])}: expected equal shapes"
            )
        for name, x in (("x", self.x), ("x_test", self.x_test)):
            if x is None or not (x.is_floating_point() and len(x)):
                continue
            # The extremes show every NaN and infinity, in a seventh of the time of a mask.
            if not torch.stack(x.aminmax()).isfinite().all():
                row = int((~x.isfinite()).flatten(1).any(1).nonzero()[0])
                raise DataError(
                    f"data set {self.name}: row {row} of {name} (counted from 0) has a number that "
                    "is NaN or infinite: expected finite ones; fedpact.from_arrays leaves out "
                    "records with others"
                )

    @property
    def kind(self) -> str:
        """The kind of its labels, as in schema.LabelForm."""
        if self.y.is_floating_point():
            return "number" if self.y.ndim == 1 else "several"
        return "class" if self.y.ndim == 1 else "pixels"

    @property
    def numbers(self) -> Tensor:
        """Each training record's number in its file, int64 [n]."""
        return torch.arange(len(self.y)) if self.rows is None else self.rows

    def only(self, good: Tensor, of_test: Tensor | None) -> "Dataset":
        """Return the data set with the records of a mask, bool [n], and of a mask of its test set.

        Raises DataError: no training record is left.
        """
        kept = self
        if not good.any():
            raise DataError(
                f"data set {self.name}: no record is left, as the model or the features take none "
                "of them: the warning before this says why"
            )
        if not good.all():
            sites = self.site and tuple(compress(self.site, good.tolist()))
            x, y, rows = self.x[good], self.y[good], self.numbers[good]
            persons = self.person and tuple(compress(self.person, good.tolist()))
            held = None if self.held is None else self.held[good]
            kept = replace(kept, x=x, y=y, rows=rows, site=sites, held=held, person=persons)
        if of_test is None or of_test.all() or self.x_test is None or self.y_test is None:
            return kept
        return replace(kept, x_test=self.x_test[of_test], y_test=self.y_test[of_test])


def with_columns(data: Dataset, form: RecordForm) -> Dataset:
    """Return a data set with the columns that a declaration names; dropped ones may be missing.

    Raises DataError: missing columns, or columns without names.
    """
    if form.features is None and not form.drop:
        return data
    if not data.features:
        alone = data.column is not None and data.column not in form.drop
        if alone and form.features in (None, [data.column]):
            return data
        raise DataError(
            f"data set {data.name} is no table: records.features = {form.features} and "
            f"records.drop = {form.drop} expect columns by name; leave columns out of its arrays"
        )
    wanted = form.features or [name for name in data.features if name not in form.drop]
    if not set(wanted) <= set(data.features) or not wanted:
        raise DataError(
            f"data set {data.name} has the columns {', '.join(data.features)}: "
            f"records.features = {form.features} and records.drop = {form.drop} leave "
            f"{', '.join(wanted) or 'none'}; name columns that it has"
        )
    if tuple(wanted) == data.features:
        return data
    places = [data.features.index(name) for name in wanted]
    x_test = None if data.x_test is None else data.x_test[:, places]
    return replace(data, x=data.x[:, places], x_test=x_test, features=tuple(wanted))
