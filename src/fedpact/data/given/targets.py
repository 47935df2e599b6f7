"""What a record's label becomes, by the form's target: a class, a number, several, or pixels.

As with all else of a record, it follows from that label and what was declared, and a label that
does not fit leaves its record out.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedpact.data.cells import Cells
from fedpact.data.form import LabelForm, RecordForm
from fedpact.data.own import class_numbers, is_blank, number_of
from fedpact.data.sieve import NO_NUMBER, RecordFilter


def targets_of(
    labels: Cells | np.ndarray,
    classes: Sequence[str],
    form: RecordForm,
    column: str,
    sieve: RecordFilter,
    how: str | None = None,
) -> np.ndarray:
    """Return labels as they are trained on, [n, ...]; the sieve has those that do not fit.

    A class: its place, int64 [n]; how it is named: see own.class_numbers, by default as the form
    says. A number: float32 [n], -1..1. Several: 0 or 1 for each of the classes, float32 [n, K].
    Pixels: places of classes, int64 [n, ...].
    """
    kind = form.target.kind
    if kind == "class":
        return class_numbers(labels, classes, form.labels or how, column, sieve)
    if kind == "number":
        return _numbers(labels, form.target, column, sieve)
    if kind == "several" and not isinstance(labels, np.ndarray):
        labels = _several(labels, len(classes))
    found = np.asarray(labels)
    flat = found.reshape(len(found), math.prod(found.shape[1:]))
    most = 1 if kind == "several" else len(classes) - 1
    with np.errstate(invalid="ignore"):
        good = (flat >= 0) & (flat <= most) & (flat == np.rint(flat))
    for row in np.flatnonzero(~good.all(1)).tolist():
        place = int((~good[row]).argmax())
        why = f"is no whole number from 0 to {most} at place {place}"
        sieve.leave_out(row, column, why, flat[row, place])
    kept = np.where(good.reshape(found.shape), found, 0)
    return kept.astype(np.float32 if kind == "several" else np.int64)


def unscale(values: Any, target: LabelForm) -> Any:
    """Return numbers of -1..1 in the units of the label."""
    return target.low + (values + 1) * (target.high - target.low) / 2


def _several(cells: Cells, count: int) -> np.ndarray:
    """Return cells that hold so many numbers each as float64 [n, count], NaN where one does not."""
    found = np.full((len(cells), count), np.nan)
    for row, cell in enumerate(cells):
        # One by one, so that none changes what another is read as.
        try:
            one = np.asarray(cell, np.float64).reshape(-1)
        except (TypeError, ValueError, OverflowError):
            continue
        if len(one) == count:
            found[row] = one
    return found


def _numbers(
    labels: Cells | np.ndarray, target: LabelForm, column: str, sieve: RecordFilter
) -> np.ndarray:
    found = np.zeros(len(labels))
    for row, label in enumerate(labels):
        number = number_of(label)
        if not np.isfinite(number):
            why = "is missing" if is_blank(label) else NO_NUMBER
            sieve.leave_out(row, column, why, label)
            number = target.low
        elif not target.low <= number <= target.high:
            sieve.clamp(row, column, "is beyond the declared range of labels", label)
        found[row] = min(max(number, target.low), target.high)
    scaled = (2 * found - target.low - target.high) / (target.high - target.low)
    return scaled.astype(np.float32)
