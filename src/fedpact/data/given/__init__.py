"""Records as somebody gave them, in arrays or a table, and those of them that are used."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fedpact.data.form import RecordForm
from fedpact.data.given.parts import describe_value
from fedpact.data.given.targets import targets_of
from fedpact.data.own import is_blank, numbers_of_array
from fedpact.data.sieve import RecordFilter
from fedpact.errors import DataError

_logger = logging.getLogger("fedpact")


@dataclass(frozen=True, eq=False)
class Given:
    """Records as they were given, x [n, ...] and y [n], of which the sieve says who is used.

    features: a table's columns. persons: whose each of them is, where somebody asked.
    """

    x: np.ndarray
    y: np.ndarray
    sieve: RecordFilter
    features: tuple[str, ...] = ()
    persons: Sequence[str] | None = None

    def used(self) -> "Sifted":
        """Return the records that are used."""
        good = self.sieve.good
        x, y = (self.x, self.y) if good.all() else (self.x[good], self.y[good])
        places = good.nonzero()[0]
        numbers = torch.from_numpy(places + self.sieve.first)
        whose = tuple(self.persons[i] for i in places.tolist()) if self.persons else ()
        return Sifted(torch.from_numpy(x), torch.from_numpy(y), numbers, self.features, whose)


@dataclass(frozen=True, eq=False)
class Sifted:
    """Records that are used: x [n, ...], y [n], and their numbers in their file [n].

    features: a table's columns. persons: whose each of them is; () where nobody asked.
    """

    x: Tensor
    y: Tensor
    numbers: Tensor
    features: tuple[str, ...] = ()
    persons: tuple[str, ...] = ()


def filter_arrays(
    name: str,
    pair: tuple[np.ndarray, np.ndarray],
    classes: Sequence[str],
    form: RecordForm,
    values: str,
) -> Given:
    """Hold arrays x, y against a form. values: "float32" or "int64". Raises DataError."""
    if form.target.kind == "several" and pair[1].shape[1:] != (len(classes),):
        raise DataError(
            f"data set {name}: y has shape {pair[1].shape}, and there are {len(classes)} labels, "
            f"{', '.join(map(str, classes))}: expected [n, {len(classes)}], 0 or 1 of each"
        )
    sieve = RecordFilter(name, len(pair[1]), 0)
    x = numbers_of_array(pair[0], form, values, sieve)
    return Given(x, targets_of(pair[1], classes, form, "y", sieve), sieve)


def array_of(name: str, what: str, values: Any) -> np.ndarray:
    """Return numbers or text as an array. Raises DataError: they are something else.

    Objects are what they hold: text, or numbers, of which None, pandas' <NA> and what numpy's mask
    covers are missing ones. Numbers lie in the order of their axes, as code of a model may ask
    (`view`), whatever was moved.
    """
    try:
        if isinstance(values, Tensor):
            values = values.detach().cpu()
            # numpy has no such type.
            values = values.float() if values.dtype == torch.bfloat16 else values
        if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
            covered, values = np.ma.getmaskarray(values), values.data.astype(object)
            values[covered] = None
        array = values.numpy() if isinstance(values, Tensor) else np.asarray(values)
        array = _plain(array) if array.dtype.kind in "OT" else array
        array = np.ascontiguousarray(array) if array.ndim else array
    except (TypeError, ValueError, RuntimeError) as error:  # the last as of a tensor on "meta"
        raise DataError(
            f"data set {name}: {what} is no array ({error}): expected rows of equal length"
        ) from error
    if array.dtype.kind not in "biufU":
        raise DataError(
            f"data set {name}: {what} is {describe_value(values)} of type {array.dtype}: expected "
            f"an array "
            "of numbers, or strings for labels; convert it first, as with x.toarray() of a sparse "
            "matrix"
        )
    return array


def labels_of(name: str, what: str, values: Any, kind: str, axes: int) -> np.ndarray:
    """Return labels as an array, without an axis of length 1 that says nothing.

    Of classes and numbers [n, 1], of pixels [n, 1, h, w] beside images. axes: those of x.
    """
    y = array_of(name, what, values)
    most = {"class": 2, "number": 2, "pixels": 4 if axes == 4 else 0}.get(kind)
    return y[:, 0] if y.ndim == most and y.shape[1] == 1 else y


def _plain(array: np.ndarray) -> np.ndarray:
    """Return an array of Python's text, numbers or arrays as numpy's own; others as they are."""
    cells = array.reshape(-1).tolist()
    known = [value for value in cells if isinstance(value, str) or not is_blank(value)]
    if all(isinstance(value, str) for value in known):
        return np.array([v if isinstance(v, str) else "" for v in cells], str).reshape(array.shape)
    if all(isinstance(value, Number | np.bool_) for value in known):
        found = np.array([math.nan if is_blank(value) else value for value in cells])
        found = found.reshape(array.shape)
        return found.astype(float) if found.dtype.kind == "O" else found
    if array.ndim == 1 and all(isinstance(value, np.ndarray | list) for value in known):
        return np.stack([np.asarray(value) for value in cells])
    return array


def warn_of_channels(name: str, x: np.ndarray) -> None:
    """Say that images have their channels last, as far as their shape tells."""
    if x.ndim == 4 and x.shape[-1] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        _logger.warning(
            "data set %s: a record has shape %s: models take an image as (channels, height, "
            "width); if its channels stand last, hand in numpy.moveaxis(x, -1, 1)",
            *(name, x.shape[1:]),
        )


_AXES: Final = {"class": 1, "number": 1, "several": 2, "pixels": None}


def check_shapes(
    name: str, end: str, x: np.ndarray, y: np.ndarray, *, least: int = 1, kind: str = "class"
) -> None:
    """Raise DataError unless x is [n, ...] and y of a target's form, n >= least of both."""
    axes = _AXES[kind]
    if kind != "class" and (y.dtype.kind not in "biuf" or y.ndim != (axes or max(y.ndim, 2))):
        raise DataError(
            f"data set {name}: y{end} has type {y.dtype} and shape {y.shape}: expected numbers, "
            f"{'[n]' if kind == 'number' else '[n, labels]' if axes else '[n, height, width]'}, as "
            "the plan's task says"
        )
    plain = kind != "class" or y.ndim == 1
    if x.ndim < 2 or not plain or len(x) != len(y) or len(y) < least or 0 in x.shape[1:]:
        hint = "a single feature is a column, reshape(-1, 1)"
        if x.ndim < 2 and x.dtype.kind == "U":
            hint = "text becomes records as numbers of words, x [n, length] of integers"
        elif not plain:
            hint = (
                "0 or 1 of each of several labels is task.kind = 'multi_label', a class for each "
                "pixel 'segmentation', and one column that is 1 for its class y.argmax(1)"
            )
        raise DataError(
            f"data set {name}: x{end} has shape {x.shape} and y{end} {y.shape}: expected [n, ...] "
            f"and [n] with equal n >= {least} and at least one feature; {hint}"
        )
