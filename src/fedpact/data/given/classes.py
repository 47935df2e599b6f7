"""The names of classes that nobody declared: those that the labels of a simulation have.

What looks like labels of another task is refused: it would train, and be of no use.
"""

import logging
from collections.abc import Sequence
from typing import Final

import numpy as np

from fedpact.data.form import RecordForm
from fedpact.data.own import is_blank, is_missing, without_decimal_zeros
from fedpact.errors import DataError

_FEW: Final = 20
"""So many classes may be those of ever so few records."""

REGRESSION: Final = "is this task.kind = 'regression', with task.range = [low, high]"

_logger = logging.getLogger("fedpact")


def class_names(name: str, labels: Sequence[np.ndarray], form: RecordForm) -> tuple[str, ...]:
    """Return the names of the classes of arrays y [n, ...], training and test.

    Raises DataError: they are no numbers of classes.
    """
    if form.target.kind == "number":
        return ("value",)
    if form.target.kind == "several":
        return tuple(map(str, range(labels[0].shape[1])))
    if labels[0].dtype.kind == "U":
        return sort_names(name, [str(v) for part in labels for v in part.reshape(-1).tolist()])
    found = np.unique(np.concatenate([part[np.isfinite(part)] for part in labels]))
    largest, records = int(max(found, default=0)), sum(part.size for part in labels)
    ask = "are they masks of class numbers" if form.target.kind == "pixels" else REGRESSION
    _check_classes(name, found.tolist(), records, ask)
    if found.size and found[0] < 0:
        raise DataError(
            f"data set {name}: a label is {found[0]:g}: expected class numbers from 0; number the "
            "classes 0, 1, 2, ..., or store labels as names, and leave out records without one"
        )
    if largest >= max(records, 2):
        raise DataError(
            f"a label is {largest}: expected class numbers from 0, and fewer classes than the "
            f"{records} records; number the classes 0, 1, 2, ... or store labels as names"
        )
    never = [k for k in range(largest) if k not in {*found.tolist()}]
    if never:
        _tell_never(name, never, largest, pixels=form.target.kind == "pixels")
    return tuple(map(str, range(max(largest, 0) + 1)))


def sort_names(name: str, labels: Sequence[str]) -> tuple[str, ...]:
    """Return the names of classes sorted, by size if they are numbers. Raises DataError."""
    given = [label.strip() for label in labels]
    names = sorted({label for label in given if not is_missing(label)})
    # Of classes that are numbers none is called "NA", as one of names may be; and 1.0 is 1.
    whole = sorted({without_decimal_zeros(label) for label in names if not is_blank(label)})
    try:
        numbers = [float(name) for name in whole]
    except ValueError:
        _check_many(name, names, len(given), "is it the column of the labels")
        _check_spelled(name, names)
        return tuple(names)
    _check_classes(name, numbers, len(given), REGRESSION)
    return tuple(name for _, name in sorted(zip(numbers, whole, strict=True)))


def _check_spelled(name: str, names: Sequence[str]) -> None:
    """Warn of classes that differ in capitals alone."""
    alike = dict[str, list[str]]()
    for one in names:
        alike.setdefault(one.casefold(), []).append(one)
    for several in [each for each in alike.values() if len(each) > 1]:
        _logger.warning(
            "data set %s: labels %s are %d classes: write them alike if they mean one, or name the "
            "classes as records.classes",
            *(name, ", ".join(map(repr, several)), len(several)),
        )


def check_several(
    name: str, classes: Sequence[str], labels: Sequence[str], form: RecordForm
) -> None:
    """Raise DataError where there is one class alone. labels: all that are found, as text."""
    if form.target.kind not in ("class", "pixels") or len(classes) != 1:
        return
    found = sorted({label for label in labels if not is_missing(label)})
    told = ", ".join(map(repr, found[:5])) + (", ..." if len(found) > 5 else "")
    raise DataError(
        f"data set {name}: there is one class, {classes[0]!r}, and the labels found are {told}: "
        "expected two classes or more, as of one there is nothing to learn; name all of them as "
        "records.classes (classes = [...] in Python), or hand in records of the others"
    )


def _check_classes(name: str, found: Sequence[float], records: int, ask: str) -> None:
    """Raise DataError: numbers that are measured rather than classes."""
    odd = [value for value in found if value != round(value)] if _finite(found) else []
    if odd:
        raise DataError(
            f"data set {name}: its labels are numbers such as {odd[0]:g}, {len(found)} different "
            f"ones of {records} records, and no classes are declared: {ask}? If they are classes, "
            "name them as records.classes"
        )
    _check_many(name, found, records, ask)


def _check_many(name: str, found: Sequence[object], records: int, ask: str) -> None:
    if len(found) > max(_FEW, records / 2):
        raise DataError(
            f"data set {name}: {records} records have {len(found)} different labels, and no "
            f"classes are declared: {ask}? If they are classes, name them as records.classes"
        )


def _finite(found: Sequence[float]) -> bool:
    return bool(np.isfinite(found).all())


def _tell_never(name: str, never: list[int], largest: int, *, pixels: bool) -> None:
    """Warn of numbers of classes that no record has. Raises DataError: among pixels."""
    told = ", ".join(map(str, never[:5])) + (", ..." if len(never) > 5 else "")
    if pixels:
        raise DataError(
            f"data set {name}: its masks have the numbers up to {largest}, and {told} never occur: "
            "expected a class number from 0 at each pixel. No number is passed over in a loss: "
            f"give pixels that are to be ignored (often 255) a class of their own; or, if all of 0 "
            f"to {largest} are classes, name them as records.classes"
        )
    _logger.warning(
        "data set %s: no label is %s, and %d is the largest: it is trained with %d classes; number "
        "the classes from 0, or name them as records.classes",
        *(name, told, largest, largest + 1),
    )
