"""Classes, persons and targets of records from arrays or tables.

Labels that look like those of another task are refused: training on them would be useless.

A person with two names is protected less. So are two persons with one name: their records are
clipped together, and k more records change those of m others by up to 2 k / (m + k) of the bound on
a person. So records whose name may belong to several persons are left out.

A label is converted by itself, by the declaration. A record with an invalid label is left out.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, Final, cast

import numpy as np
from torch import Tensor

from fedpact.common.errors import DataError
from fedpact.common.format import list_some
from fedpact.common.losses import UNLABELLED
from fedpact.data import cells
from fedpact.data.cells import Cells, is_blank, text_of
from fedpact.data.dataset import BEYOND_LABELS, NO_NUMBER, NO_PLACE_LABELLED, RecordFilter
from fedpact.data.schema import LabelForm, RecordForm
from fedpact.data.tables import Table
from fedpact.data.tokens import is_next_token, is_tokens, next_labels, read_token_labels

_FEW: Final = 20
"""Up to so many classes are plausible for any number of records."""

REGRESSION: Final = "is this task.kind = 'regression', with task.range = [low, high]"

_logger = logging.getLogger("fedpact")


def find_classes(name: str, tables: Sequence[Table], form: RecordForm) -> tuple[str, ...]:
    """Return the class names of the used training and test records.

    Raises DataError: the labels are not class numbers, or names beside numbers.
    """
    kind, labels = form.target.kind, [table.y for table in tables]
    named = tables[0].labels == "names"
    if kind == "number":
        return (str(tables[0].roles.label) if named else "value",)
    several = 0
    if kind == "several" and isinstance(labels[0], np.ndarray):
        several = labels[0].shape[1] if labels[0].ndim == 2 else 0
    elif kind == "several":
        lists = (one for one in labels[0] if isinstance(one, list | tuple | np.ndarray | Tensor))
        lengths = Counter(len(one) for one in lists if np.ndim(one))
        several = max(lengths, key=lambda length: lengths[length], default=0)
    if kind == "several" and not several:
        raise DataError(
            f"data set {name}: task.kind is 'multi_label', but each record has a single label: "
            "expected 0 or 1 for each of K labels, as an array [n, K] in memory, y of an "
            ".npz file or a column of lists"
        )
    if kind == "several":
        return tuple(map(str, range(several)))
    texts = [y for y in labels if not named and y.dtype.kind == "U"]
    first = texts[0].flat if texts else ()
    whole = [cells.without_decimal_zeros(str(text)).isdecimal() for text in first]
    if texts and len(texts) < len(labels) and not all(whole):
        raise DataError(
            f"data set {name}: the training labels are of type {labels[0].dtype}, and the test "
            f"labels of {labels[1].dtype}: expected names of classes in both, or numbers in both; "
            "or name the classes as records.classes, whose places numbers then are"
        )
    if named or texts:
        pairs = [
            (text_of(label), good or not named)
            for table, y in zip(tables, labels, strict=True)
            for label, good in zip(y if named else y.flat, table.sieve.good.tolist(), strict=True)
        ]
        return sort_names(name, [label for label, good in pairs if good])
    marked = [y[np.isfinite(y)] for y in labels]
    found = np.unique(np.concatenate([y[y != UNLABELLED] for y in marked]))
    largest, records = int(max(found, default=0)), sum(y.size for y in labels)
    ask = "are they masks of class numbers" if kind == "pixels" else REGRESSION
    _check_classes(name, found.tolist(), records, ask)
    if found.size and not 0 <= found[0] <= largest < max(records, 2):
        raise DataError(
            f"data set {name}: a label is {found[0] if found[0] < 0 else largest:.15g}: expected "
            f"class numbers from 0, and fewer classes than the {records} records; number the "
            "classes 0, 1, 2, ..., or store labels as names, and leave out records without one"
        )
    if never := [*map(str, np.setdiff1d(np.arange(largest), found))]:
        told = f"the labels are numbers up to {largest}, and {list_some(never, 5)} never occur"
        if is_tokens(tables[0].features):
            raise DataError(
                f"data set {name}: of its tokens {told}: expected all classes of the model by "
                f"name, as classes = [str(k) for k in range({largest + 1})], or of a language "
                "model as many as its vocabulary has; -100 is where a token has no label. A causal "
                'language model learns by task.kind = "next_token", and needs records.vocabulary '
                "alone"
            )
        if kind == "pixels":
            raise DataError(
                f"data set {name}: of its masks {told}: expected a class number from 0 at each "
                f"pixel. Write {UNLABELLED} where one is to be ignored (often 255); or, if all of "
                f"0 to {largest} are classes, name them as records.classes"
            )
        _logger.warning(
            f"data set {name}: {told}: it is trained with {largest + 1} classes; number them "
            "from 0, or name them as records.classes"
        )
    return tuple(map(str, range(max(largest, 0) + 1)))


def sort_names(name: str, labels: Sequence[str]) -> tuple[str, ...]:
    """Return the names of classes sorted, by size if they are numbers. Raises DataError."""
    given = [label.strip() for label in labels]
    names = sorted({label for label in given if not cells.is_missing(label)})
    # Of classes that are numbers none is called "NA", as one of names may be; and 1.0 is 1.
    whole = sorted({cells.without_decimal_zeros(label) for label in names if not is_blank(label)})
    try:
        numbers = [float(name) for name in whole]
    except ValueError:
        _check_classes(name, names, len(given), "is it the column of the labels")
        if odd := [label for label in names if is_blank(label)]:
            _logger.warning(
                "data set %s: the labels %s count as classes: if they stand for none, name the "
                "others as records.classes, and their records are left out",
                *(name, ", ".join(map(repr, odd))),
            )
        return tuple(names)
    if UNLABELLED in numbers:
        raise DataError(
            f"data set {name}: a label is {UNLABELLED}, which means none in torch: leave such "
            "records out, or name the classes without it as records.classes, and they are left out"
        )
    _check_classes(name, numbers, len(given), REGRESSION)
    return tuple(name for _, name in sorted(zip(numbers, whole, strict=True)))


def check_several(name: str, classes: Sequence[str], table: Table, form: RecordForm) -> None:
    """Raise DataError if there is only one class."""
    if form.target.kind not in ("class", "pixels") or len(classes) != 1:
        return
    labels = table.y.flat if isinstance(table.y, np.ndarray) else table.y
    found = sorted({text for label in labels if not cells.is_missing(text := text_of(label))})
    told = list_some(map(repr, found), 5)
    if left := table.sieve.document():
        column, why, count = left["why"][0]
        told += f" ({left['records']} of {left['of']} records are left out: of {count} "
        told += f"{f'column {column}' if column else 'the line'} {why})"
    raise DataError(
        f"data set {name}: there is one class, {classes[0]!r}, and the labels found are {told}: "
        "expected two classes or more, as of one there is nothing to learn; name all of them as "
        "records.classes (classes = [...] in Python), or add records of the others"
    )


def _check_classes(name: str, found: Sequence[Any], records: int, ask: str) -> None:
    """Raise DataError if labels, numbers or names, look like another task's."""
    numbers = bool(found) and not isinstance(found[0], str) and np.isfinite(found).all()
    odd = [value for value in found if value != round(value)] if numbers else []
    if odd or len(found) > max(_FEW, records / 2):
        such = f", such as {odd[0]:g}" if odd else ""
        raise DataError(
            f"data set {name}: {records} records have {len(found)} different labels{such}, and no "
            f"classes are declared: {ask}? If they are classes, name them as records.classes"
        )


_NOBODY: Final = frozenset(
    {"", "na", "nan", "nat", "null", "none", "nil", "1ind", "1qnan", "inf", "infinity"}
    | {"unknown", "missing", "undefined", "anonymous"}
)
"""Letters and digits of names that name nobody, such as "-", "#N/A" and "n. a."."""

# What spreadsheets and data frames make of long numbers: 3.2E+17, in some countries with a comma.
_EXPONENT: Final = re.compile(r"[+-]?(?=[.,]?[0-9])[0-9]*[.,]?[0-9]*e[+-]?[0-9]+", re.IGNORECASE)
_SEVERAL: Final = ", which may stand for several persons; give such names as text"
_POINT: Final = re.compile(r"[+-]?[0-9]+[.,][0-9]*")


def persons_of(given: Cells | np.ndarray, sieve: RecordFilter, column: str = "person") -> list[str]:
    """Return the person of each record [n]; records with an ambiguous one are left out.

    These have none, or a number that was rounded, so that others may have the same one. 7.0 equals
    7, and letters are compared after Unicode normalisation. Raises DataError: another length.
    """
    if isinstance(given, np.ndarray):
        # Numbers keep their type, which determines above which number they round.
        given = list(given) if given.dtype.kind in "fiu" else cast(list[Any], given.tolist())
    names = _names_of(given, sieve, "person")
    whys = [
        _round(name, value)
        # A spreadsheet's formula may have failed.
        or "names no person" * (name[:1] == "#" and name.endswith(("!", "?", "N/A")))
        or "names no person" * ("".join(c for c in name.casefold() if c.isalnum()) in _NOBODY)
        for name, value in zip(names, given, strict=True)
    ]
    for why in {*whys} - {""}:
        sieve.leave_out(np.array(whys) == why, column, why, given)
    # Not an array of text, in which every name would be as long as the longest.
    return [cells.without_decimal_zeros(name) for name in names]


def read_sites(table: Table) -> list[str]:
    """Return the name of each record's site, [n], as `persons_of` reads names; "" is left out.

    Raises DataError: another length.
    """
    sieve = table.sieve
    names = [*map(cells.without_decimal_zeros, _names_of(table.site, sieve, "site"))]
    # str(None) occurs in numpy arrays of text; a class may have that name.
    sieve.sites = ["" if cells.is_missing(name) or name == "None" else name for name in names]
    why = "names no site (a record without one is left out)"
    sieve.leave_out([not name for name in sieve.sites], str(table.roles.site), why)
    return names


def _names_of(given: Any, sieve: RecordFilter, role: str) -> list[str]:
    if len(given) != sieve.count:
        raise DataError(
            f"data set {sieve.origin}: {role} has {len(given)} entries for {sieve.count} records: "
            f"give one {role} name a record"
        )
    return [cells.strip_invisible(text_of(value)) for value in given]


def _round(name: str, value: Any) -> str:
    if isinstance(value, float | np.floating | np.integer):
        # numpy and pandas turn a column of whole numbers into floats if one of them is missing. A
        # number that this would round names no person in a complete column either.
        value = float(value) if isinstance(value, np.integer) else value
        exact = _exact(type(value))
        told = f"is a number that floats round, from {exact:.0f} on{_SEVERAL}"
        return "" if abs(value) < exact else told
    if not isinstance(value, str | bytes):
        return ""
    # A code such as 12E3 is not one; numbers are written as 1.2e3 or 12E+3.
    if _EXPONENT.fullmatch(name) and re.search(r"[.,]|e[+-]", name, re.IGNORECASE):
        return f"is a number in exponents, as a spreadsheet rounds long ones{_SEVERAL}"
    exact = _exact(float)
    too_far = _POINT.fullmatch(name) and abs(float(name.replace(",", "."))) >= exact
    return f"is a number with a point beyond {exact:.0f}{_SEVERAL}" if too_far else ""


@cache
def _exact(kind: type[Any]) -> float:
    """Return the smallest number above which two integers may be the same float of a type."""
    return 2.0 ** (np.finfo(kind).nmant + 1)


def class_numbers(
    labels: Cells | np.ndarray,
    classes: Sequence[str],
    how: str | None,
    column: str,
    sieve: RecordFilter,
) -> np.ndarray:
    """Return each record's index in classes, int64 [n]; faults are added to the sieve.

    how: "numbers", "names", or None: numbers are indices; text is a name, or else an index.
    """
    place = {name: k for k, name in enumerate(classes)}
    # 1 is true wherever a truth value stood beside it, or may have, and not the second class.
    truth = {name.lower() for name in classes} == {"true", "false"}
    at = labels if isinstance(labels, np.ndarray) and how != "names" else np.empty(0)
    whole = at.dtype.kind in "iu" and at.ndim == 1 and not truth
    if whole and ((at >= 0) & (at < len(classes))).all():
        # Most are: one by one they take most of what it takes to read arrays.
        return at.astype(np.int64)
    given = labels.tolist() if isinstance(labels, np.ndarray) else labels
    found = np.full(len(labels), -1)
    for row, label in enumerate(given):
        if how == "names" or (how is None and (truth or isinstance(label, str | bytes | bool))):
            found[row] = cells.find_named(label, place, -1)
        if found[row] < 0 and how != "names":
            number = int(label) if isinstance(label, bool | np.bool_) else text_of(label)
            number = {"true": 1, "false": 0}.get(str(number).lower(), number)
            text = cells.without_decimal_zeros(str(number))
            k = int(text) if re.fullmatch(r"[0-9]{1,18}", text) else -1
            found[row] = k if k < len(classes) else -1
    rounded = np.array([cells.beyond_floats(label) for label in given], bool)
    sieve.leave_out(rounded, column, "is a number from 2^53 on: write such names as text", given)
    unknown = (found < 0) & ~rounded
    blank = unknown & np.array([is_blank(label) for label in given], bool)
    sieve.leave_out(blank, column, "is not a class", given)
    why = f"is not one of the {len(classes)} classes"
    sieve.leave_out(unknown & ~blank, column, why, given)
    return found.clip(0)


def ambiguous(classes: Sequence[str]) -> bool:
    """Whether a class's name is a number other than its index, such as "1" for index 0."""
    for k, name in enumerate(classes):
        with suppress(ValueError):
            # Larger ones are only text: as numbers they are left out.
            if (number := float(name)) != k and abs(number) < cells.EXACT_BELOW:
                return True
    return False


def check_ambiguous(
    name: str, classes: Sequence[str], tables: Sequence[Table], form: RecordForm, at_site: bool
) -> None:
    """Raise DataError if labels of arrays may mean two classes, a name or a place.

    At a site, whatever they are: one that is text makes text of all.
    """
    asked = form.target.kind == "class" and form.labels is None and ambiguous(classes)
    if asked and any(t.labels is None and (at_site or t.y.dtype.kind in "iuf") for t in tables):
        raise DataError(
            f"data {'file' if at_site else 'set'} {name}: the classes {', '.join(classes)} are "
            "named by numbers other than their places, so a label in an array may mean two: set "
            f'labels = "names" or "numbers" in [records] of '
            f"{'federation.toml' if at_site else 'the plan'}"
        )


def read_labels(table: Table, classes: Sequence[str], form: RecordForm) -> np.ndarray:
    """Return labels for training, [n, ...]; records with an invalid one are left out.

    A class: its index, int64 [n]. A number: float32 [n], -1..1. Several: 0 or 1 for each class,
    float32 [n, K]. Pixels: indices, int64 [n, ...]. Raises DataError: a table cannot hold such.
    """
    labels, column, sieve = table.y, str(table.roles.label), table.sieve
    kind = form.target.kind
    if kind == "class":
        return class_numbers(labels, classes, form.labels or table.labels, column, sieve)
    if kind == "number":
        return _numbers(labels, form.target, column, sieve)
    if not isinstance(labels, np.ndarray):
        if kind == "pixels":
            raise DataError(
                f"{sieve.origin}: labels of kind 'pixels' in a column: expected arrays x and y; "
                "write the records as .npz, or pass arrays"
            )
        labels = _several(labels, len(classes))
    elif kind == "several" and labels.shape[1:] != (len(classes),):
        raise DataError(
            f"{sieve.origin}: y has shape {labels.shape}, and there are {len(classes)} labels, "
            f"{', '.join(map(str, classes))}: expected [n, {len(classes)}], 0 or 1 of each"
        )
    flat = labels.reshape(len(labels), math.prod(labels.shape[1:]))
    most = 1 if kind == "several" else len(classes) - 1
    with np.errstate(invalid="ignore"):
        good = (flat >= 0) & (flat <= most) & (flat == np.rint(flat))
        good |= (flat == UNLABELLED) & (kind == "pixels")
    sieve.leave_out(~good.all(1), column, f"is not a whole number from 0 to {most} at each place")
    if kind == "pixels":  # whose loss would be 0 and count
        sieve.leave_out((flat == UNLABELLED).all(1), column, NO_PLACE_LABELLED)
    kept = np.where(good.reshape(labels.shape), labels, 0)
    return kept.astype(np.float32 if kind == "several" else np.int64)


def token_labels(
    table: Table, x: np.ndarray, form: RecordForm, classes: Sequence[str] | None
) -> Table:
    """Return a table with labels of tokens [n, T]; unchanged if a record has one label.

    x: its records [n, rows, T]. classes: those that are declared; a span's ends, two labels, have
    as many as there are places. Raises DataError: a next token is asked for, of other records.
    """
    if form.target.kind != "pixels" or table.y is None:
        return table
    y, label = table.y, table.roles.label
    if is_tokens(table.features):
        lists = cast(Mapping[str, Sequence[Any]], table.x)
        span = classes is not None and len(classes) == x.shape[-1]
        y = read_token_labels(y, x, lists, label or "label", table.sieve, span=span)
        table = replace(table, y=y, labels=None)
    if not is_next_token(label, form.target.next):
        return table
    if x.dtype.kind != "i" or not isinstance(y, np.ndarray) or y.shape != (len(x), x.shape[-1]):
        raise DataError(
            f"{table.sieve.origin}: the next token is to be learned, of records of "
            f"{x.dtype} {x.shape[1:]}: expected tokens, whole numbers [T] or [rows, T], with a "
            "label for each"
        )
    ids = x[:, 0] if x.ndim == 3 else x
    other = ((y != UNLABELLED) & (y != ids)).any(1)
    table.sieve.leave_out(other, label or "y", "differs from the record's tokens")
    return replace(table, y=next_labels(y, x))


def check_places(name: str, kind: str, y: Any, shape: tuple[int, ...]) -> None:
    """Raise DataError unless y [n, ...] has a label for each position of a record [*shape].

    Those of pixels have the image's height and width, of tokens the text's length. y: other values
    than arrays are read one by one.
    """
    places = shape[1:] or shape
    if kind == "pixels" and isinstance(y, np.ndarray) and y.shape[1:] != places:
        raise DataError(
            f"{name}: a label has shape {y.shape[1:]} beside a record of {shape}: a deployment "
            f"takes a label for each place of a record, {places}; bring masks to their images' size"
        )


def unscale(values: Any, target: LabelForm) -> Any:
    """Return numbers of -1..1 in the units of the label."""
    return target.low + (values + 1) * (target.high - target.low) / 2


def _several(labels: Cells, count: int) -> np.ndarray:
    """Return cells with `count` numbers each as float64 [n, count], NaN for invalid cells."""
    found = np.full((len(labels), count), np.nan)
    for row, label in enumerate(labels):
        # One by one, so that no value affects how another is read.
        with suppress(TypeError, ValueError, OverflowError):
            one = np.asarray(label, np.float64).reshape(-1)
            found[row] = one if len(one) == count else np.nan
    return found


def _numbers(
    labels: Cells | np.ndarray, target: LabelForm, column: str, sieve: RecordFilter
) -> np.ndarray:
    found = cells.to_numbers(list(labels) if isinstance(labels, np.ndarray) else labels)
    bad = ~np.isfinite(found)
    blank = bad & np.array([is_blank(label) for label in labels], bool)
    sieve.leave_out(blank, column, "has no value", labels)
    sieve.leave_out(bad & ~blank, column, NO_NUMBER, labels)
    found[bad] = target.low
    sieve.clamp((found < target.low) | (found > target.high), column, BEYOND_LABELS, labels)
    found = found.clip(target.low, target.high)
    scaled = (2 * found - target.low - target.high) / (target.high - target.low)
    return scaled.astype(np.float32)
