"""Records as somebody gave them, in arrays or a table, and those of them that are used."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fedpact.data.form import RecordForm
from fedpact.data.given.targets import targets_of
from fedpact.data.own import numbers_of_array
from fedpact.data.sieve import Sieve
from fedpact.errors import DataError


@dataclass(frozen=True, eq=False)
class Given:
    """Records as they were given, x [n, ...] and y [n], of which the sieve says who is used.

    features: a table's columns.
    """

    x: np.ndarray
    y: np.ndarray
    sieve: Sieve
    features: tuple[str, ...] = ()
    persons: np.ndarray | None = None

    def used(self) -> "Sifted":
        """Return the records that are used."""
        good = self.sieve.good
        x, y = (self.x, self.y) if good.all() else (self.x[good], self.y[good])
        numbers = torch.from_numpy(good.nonzero()[0] + self.sieve.first)
        whose = () if self.persons is None else tuple(map(str, self.persons[good].tolist()))
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


def sifted_arrays(
    name: str,
    pair: tuple[np.ndarray, np.ndarray],
    classes: Sequence[str],
    form: RecordForm,
    values: str,
) -> Given:
    """Hold arrays x, y against a form. values: "float32" or "int64". Raises DataError."""
    sieve = Sieve(name, len(pair[1]), 0)
    x = numbers_of_array(pair[0], form, values, sieve)
    return Given(x, targets_of(pair[1], classes, form, "y", sieve), sieve)


def array_of(name: str, what: str, values: Any) -> np.ndarray:
    """Return numbers or text as an array. Raises DataError: they are something else."""
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except ValueError as error:
        raise DataError(
            f"data set {name}: {what} is no array ({error}): expected rows of equal length"
        ) from error
    if array.dtype.kind not in "biufU":
        raise DataError(
            f"data set {name}: {what} has type {array.dtype}: expected numbers, or strings for "
            "labels; convert it first"
        )
    return array


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
        raise DataError(
            f"data set {name}: x{end} has shape {x.shape} and y{end} {y.shape}: expected [n, ...] "
            f"and [n] with equal n >= {least} and at least one feature; a single feature is a "
            "column, reshape(-1, 1)"
        )
