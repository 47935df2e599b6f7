"""Data sets by name, from a file, or from two arrays.

>>> digits = load("digits")
>>> tuple(digits.x.shape), tuple(digits.x_test.shape), len(digits.classes)
((1442, 1, 8, 8), (355, 1, 8, 8), 10)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpact.data.dataset import Dataset
from fedpact.data.heart import load_heart
from fedpact.data.images import load_digits, load_images
from fedpact.data.synthetic import FORMS, Synthetic
from fedpact.data.tables import Table, read_npz, read_table
from fedpact.errors import DataError

NAMES = ("digits", "mnist", "fashion_mnist", "cifar10", "heart_disease")
_SUFFIXES = (".csv", ".parquet", ".npz")
_WITH_TEST = "+test"


def load(
    name: str,
    label: str | None = None,
    site: str | None = None,
    *,
    classes: Sequence[str] | None = None,
) -> Dataset:
    """Return a data set by its name (NAMES), or from a .csv, .parquet or .npz file by its path.

    "NAME+test" puts the public test set's records behind the others, and leaves no test set: for
    papers that split all records inside each site.
    "synthetic(ALPHA,BETA)" and "synthetic_iid" are made, not read; see data.synthetic.
    label: the column of the labels, required for .csv and .parquet, where every other column but
    `site`, the column of site names, is a numeric feature, taken as it is.
    An .npz holds arrays x, y and optionally x_test, y_test, site.
    classes: the labels' names in order; without it they are the labels found in the file, sorted
    (numbers by size). Sites that load their own files have to name the classes, so that a label
    means the same everywhere.
    Raises DataError: unknown name, missing or damaged file, a missing value, a column not there.
    """
    if name.endswith(_WITH_TEST):
        return _with_test(load(name.removesuffix(_WITH_TEST), label, site, classes=classes))
    suffix = Path(name).suffix.lower()
    if suffix in (".csv", ".parquet"):
        return _from_table(name, read_table(Path(name), label, site), classes)
    if label is not None or site is not None:
        raise DataError(
            f"data set {name}: label = {label!r}, site = {site!r}: only .csv and .parquet files "
            "have columns to name; leave both out"
        )
    if suffix == ".npz":
        arrays = read_npz(Path(name))
        pair = (arrays["x_test"], arrays["y_test"]) if "x_test" in arrays else None
        x, y, sites = arrays["x"], arrays["y"], arrays.get("site")
        return from_arrays(x, y, name=name, classes=classes, site=sites, test=pair)
    made = Synthetic.parse(name)
    if classes is not None and (name in NAMES or made):
        raise DataError(f"data set {name}: it has its own classes; leave classes out")
    if name == "digits":
        return load_digits()
    if name == "heart_disease":
        return load_heart()
    if name in NAMES:
        return load_images(name)
    if made:
        return made.dataset(name)
    raise DataError(
        f"data set {name!r} is unknown: expected one of {', '.join((*NAMES, *FORMS))}, or the path "
        f"of a file ending in {', '.join(_SUFFIXES)}"
    )


def _with_test(data: Dataset) -> Dataset:
    if data.x_test is None or data.y_test is None or data.site is not None:
        raise DataError(
            f"data set {data.name}: {_WITH_TEST} needs a public test set, and records without sites"
            f" of their own; it has {'sites' if data.site else 'no test set'}: leave it out"
        )
    return Dataset(
        name=data.name + _WITH_TEST,
        x=torch.cat([data.x, data.x_test]),
        y=torch.cat([data.y, data.y_test]),
        classes=data.classes,
        description=f"{data.description}; the public test set's records among the others",
    )


def from_arrays(
    x: Any,
    y: Any,
    *,
    name: str = "arrays",
    classes: Sequence[str] | None = None,
    site: Sequence[Any] | np.ndarray | None = None,
    test: tuple[Any, Any] | None = None,
) -> Dataset:
    """Return a data set from arrays or tensors x [n, ...] and y [n].

    x: 64- and 32-bit integers stay integers (tokens); everything else becomes float32.
    y: integers are class numbers from 0; strings are class names.
    classes: the classes' names in order; default: "0".."largest label" for integers, and the
    strings of y and of the test labels, sorted.
    site: for each record its site's name. test: (x_test, y_test), the public test set.
    Raises DataError (see Dataset).

    >>> from_arrays([[0.5], [1.5], [2.5]], ["yes", "no", "no"]).y
    tensor([1, 0, 0])
    """
    labels = [_array(name, "y", y)] + ([] if test is None else [_array(name, "y_test", test[1])])
    names = tuple(map(str, classes)) if classes is not None else _class_names(labels)
    numbers = [_class_numbers(name, part, names) for part in labels]
    return Dataset(
        name=name,
        x=_features(name, "x", x),
        y=numbers[0],
        classes=names,
        x_test=None if test is None else _features(name, "x_test", test[0]),
        y_test=None if test is None else numbers[1],
        site=None if site is None else tuple(map(str, np.asarray(site).tolist())),
        description=f"{name}, {len(numbers[0])} records as given",
    )


def _from_table(name: str, table: Table, classes: Sequence[str] | None) -> Dataset:
    names = tuple(map(str, classes)) if classes is not None else _sorted_names(table.labels)
    features = ", ".join(table.features)
    return Dataset(
        name=name,
        x=torch.from_numpy(table.x),
        y=_class_numbers(name, np.asarray(table.labels), names),
        classes=names,
        site=table.site,
        description=f"{name}: {features} as given",
    )


def _array(name: str, what: str, values: Any) -> np.ndarray:
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


def _features(name: str, what: str, values: Any) -> Tensor:
    array = _array(name, what, values)
    if array.dtype.kind == "U":
        raise DataError(
            f"data set {name}: {what} holds strings: expected numbers; encode the strings first"
        )
    tokens = array.dtype in (np.int64, np.int32)
    # float64 beyond float32's range becomes inf, which Dataset refuses with the place.
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.array(array, np.int64 if tokens else np.float32))


def _class_names(labels: list[np.ndarray]) -> tuple[str, ...]:
    if labels[0].dtype.kind == "U":
        return _sorted_names([str(v) for part in labels for v in part.reshape(-1)])
    largest = max((int(part.max()) for part in labels if part.size), default=0)
    records = sum(part.size for part in labels)
    if largest >= max(records, 2):
        raise DataError(
            f"a label is {largest}: expected class numbers from 0, and fewer classes than the "
            f"{records} records; number the classes 0, 1, 2, ... or store labels as names"
        )
    return tuple(map(str, range(max(largest, 0) + 1)))


def _sorted_names(labels: Sequence[str]) -> tuple[str, ...]:
    names = sorted(set(labels))
    try:
        numbers = [float(name) for name in names]
    except ValueError:
        return tuple(names)
    return tuple(name for _, name in sorted(zip(numbers, names, strict=True)))


def _class_numbers(name: str, labels: np.ndarray, classes: tuple[str, ...]) -> Tensor:
    if labels.dtype.kind in "biu":
        return torch.from_numpy(labels.astype(np.int64))
    if labels.dtype.kind == "f":
        raise DataError(
            f"data set {name}: labels have type {labels.dtype}: expected integers 0..classes - 1, "
            "or strings; convert them first"
        )
    number = {label: k for k, label in enumerate(classes)}
    numbers = np.array([number.get(str(label), -1) for label in labels.reshape(-1)], np.int64)
    if (bad := numbers < 0).any():
        raise DataError(
            f"data set {name}: {int(bad.sum())} labels are not among the {len(classes)} classes, "
            f"the first in row {int(bad.argmax())} (counted from 0): correct them, or name all "
            "classes"
        )
    return torch.from_numpy(numbers.reshape(labels.shape))
