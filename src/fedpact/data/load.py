"""Data sets by name, from a file, or from two arrays.

>>> digits = load_dataset("digits")
>>> tuple(digits.x.shape), tuple(digits.x_test.shape), len(digits.classes)
((1442, 1, 8, 8), (355, 1, 8, 8), 10)
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from fedpact.common.errors import DataError, nearest
from fedpact.common.user_code import is_handed
from fedpact.data.cells import SUFFIXES, Table, cells_of, read_npz, read_table, table_of
from fedpact.data.dataset import Dataset
from fedpact.data.inputs import (
    Given,
    array_of,
    check_shapes,
    filter_arrays,
    labels_of,
    warn_of_channels,
)
from fedpact.data.public import (
    CLASSES,
    FORMS,
    Synthetic,
    adult_tables,
    load_digits,
    load_flamby,
    load_heart,
    load_images,
    load_shakespeare,
)
from fedpact.data.schema import RecordForm
from fedpact.data.sieve import RecordFilter, nothing_left
from fedpact.data.tables import class_numbers, is_missing, numbers_of_table, text_of
from fedpact.data.targets import check_several, class_names, persons_of, sort_names, targets_of

NAMES = (
    *("digits", "mnist", "fashion_mnist", "cifar10"),
    *("heart_disease", "heart_disease_flamby", "adult", "shakespeare"),
)
TABLES = ("adult",)
"""Those that are tables as they were published, which a form says how to read."""

_WITH_TEST = "+test"
_ANY: Final = RecordForm()
_WHOLE: Final = (np.dtype(np.int64), np.dtype(np.int32))


def load_dataset(
    name: str,
    label: str | None = None,
    site: str | None = None,
    *,
    person: str | None = None,
    classes: Sequence[str] | None = None,
    form: RecordForm = _ANY,
) -> Dataset:
    """Return a data set by its name (NAMES), or from a .csv, .parquet or .npz file by its path.

    "NAME+test" puts the public test set's records behind the others, and leaves no test set: for
    papers that split all records inside each site.
    "synthetic(ALPHA,BETA)" and "synthetic_iid" are made, not read; see data.public.
    label: the column of the labels, required for .csv and .parquet, where every other column but
    `site`, the column of site names, and `person`, that of whose a record is, is a numeric
    feature, taken as it is.
    An .npz holds arrays x, y and optionally x_test, y_test, site, person.
    classes: the labels' names in order; without it they are the labels found in the file, sorted
    (numbers by size). Sites that load their own files have to name the classes, so that a label
    means the same everywhere.
    form: what a record may hold, of a file or of one of TABLES. One that does not fit is left out,
    and a warning tells file, row, column and value; see `load_site` for records that must not be
    told of.
    Raises DataError: unknown name, missing or damaged file, a column not there, no record left.
    """
    if name.endswith(_WITH_TEST):
        return _with_test(load_dataset(name.removesuffix(_WITH_TEST), label, site, classes=classes))
    if is_handed(name):
        raise DataError(
            f"data set {name} was handed in from Python and is no part of the plan: hand in the "
            "same records again, from Python: fedpact.run(fedpact.Plan.read(Path('plan.json')), "
            "'FOLDER', data=...), with FOLDER the run's to go on with it"
        )
    suffix = Path(name).suffix.lower()
    if suffix in (".csv", ".parquet"):
        return _from_table(name, read_table(Path(name), label, site, person, form), classes, form)
    made = Synthetic.parse(name)
    if suffix != ".npz" and name not in NAMES and not made:
        raise DataError(
            f"data set {name!r} is unknown: expected one of {', '.join((*NAMES, *FORMS))}, or the "
            f"path of a file ending in {', '.join(SUFFIXES)}{nearest(name, NAMES)}"
        )
    if any(column is not None for column in (label, site, person)):
        raise DataError(
            f"data set {name}: label = {label!r}, site = {site!r}, person = {person!r}: only .csv "
            "and .parquet files have columns to name; name such a file as data, or leave them out "
            "(an .npz file has arrays called site and person)"
        )
    if suffix == ".npz":
        arrays = read_npz(Path(name))
        pair = (arrays["x_test"], arrays["y_test"]) if "x_test" in arrays else None
        x, y, sites = arrays["x"], arrays["y"], arrays.get("site")
        whose = arrays.get("person")
        found = from_arrays(
            x, y, name=name, classes=classes, site=sites, person=whose, test=pair, form=form
        )
        return with_columns(found, form)
    if classes is not None and (name in NAMES or made):
        raise DataError(f"data set {name}: it has its own classes; leave classes out")
    if name == "digits":
        return load_digits()
    if name == "heart_disease":
        return load_heart()
    if name == "heart_disease_flamby":
        return load_flamby()
    if name == "shakespeare":
        return load_shakespeare()
    if name == "adult":
        return _adult(form)
    return made.dataset(name) if made else load_images(name)


def _adult(form: RecordForm) -> Dataset:
    parts = list[Given]()
    for end, table in zip(("", " (test)"), adult_tables(form), strict=True):
        sieve = RecordFilter(f"adult{end}", table.count, 1)
        x = numbers_of_table(table, form, "float32", sieve)
        y = class_numbers(table.columns[table.label], CLASSES, "names", table.label, sieve)
        parts.append(Given(x, y, sieve, table.features))
    return _dataset("adult", parts, CLASSES, None)


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
    person: Sequence[Any] | np.ndarray | None = None,
    test: tuple[Any, Any] | None = None,
    form: RecordForm = _ANY,
) -> Dataset:
    """Return a data set from arrays or tensors x [n, ...] and y [n].

    x: 64- and 32-bit integers stay integers (tokens); everything else becomes float32.
    y: integers are class numbers from 0; strings are class names.
    classes: the classes' names in order; default: "0".."largest label" for integers, and the
    strings of y and of the test labels, sorted.
    site: for each record its site's name. person: for each record whose it is; one that names
    nobody is left out. test: (x_test, y_test), the public test set.
    form: what a record may hold; one that does not fit is left out, with a warning.
    Raises DataError (see Dataset), or where no record is left.

    >>> from_arrays([[0.5], [1.5], [2.5]], ["yes", "no", "no"]).y
    tensor([1, 0, 0])
    """
    pairs = [(x, y)] if test is None else [(x, y), test]
    ends = ("", "_test")[: len(pairs)]
    given = list[tuple[np.ndarray, np.ndarray]]()
    for end, (a, b) in zip(ends, pairs, strict=True):
        xs = array_of(name, "x" + end, a)
        given.append((xs, labels_of(name, "y" + end, b, form.target.kind, xs.ndim)))
    for end, (xs, ys) in zip(ends, given, strict=True):
        check_shapes(name, end, xs, ys, kind=form.target.kind)
    warn_of_channels(name, given[0][0])
    labels = [ys for _, ys in given]
    names = class_names(name, labels, form) if classes is None else tuple(map(str, classes))
    check_several(name, names, [str(v) for v in labels[0].flat], form)
    values = "int64" if form.vocabulary or given[0][0].dtype in _WHOLE else "float32"
    parts = [
        filter_arrays(f"{name}{' (test)' if end else ''}", pair, names, form, values)
        for end, pair in zip(ends, given, strict=True)
    ]
    sites: Sequence[Any] | None = None
    if site is not None:
        sites = site.tolist() if isinstance(site, np.ndarray) else cells_of(site)
    if person is not None and not isinstance(person, np.ndarray):
        person = cells_of(person)
    whose = None if person is None else persons_of(person, parts[0].sieve)
    return _dataset(name, parts, names, sites, whose)


def from_frame(
    frame: Any,
    label: str | None,
    site: str | None = None,
    *,
    person: str | None = None,
    name: str = "frame",
    classes: Sequence[str] | None = None,
    form: RecordForm = _ANY,
) -> Dataset:
    """Return a data set from a DataFrame, or whatever has `columns` and gives each as frame[name].

    label, site, person, classes, form: as `load_dataset` takes them for a file. Raises DataError.
    """
    columns = {str(column): cells_of(frame[column]) for column in frame.columns}
    table = table_of(name, columns, label, site, person=person, form=form)
    return _from_table(name, table, classes, form)


def with_columns(data: Dataset, form: RecordForm) -> Dataset:
    """Return a data set of the columns that a form names; those that it drops may be gone.

    Raises DataError: it has no such columns, or none by name.
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
    places = [data.features.index(name) for name in wanted]
    x_test = None if data.x_test is None else data.x_test[:, places]
    return replace(data, x=data.x[:, places], x_test=x_test, features=tuple(wanted))


def _from_table(
    name: str, table: Table, classes: Sequence[str] | None, form: RecordForm
) -> Dataset:
    sieve = RecordFilter(name, table.count, 1)
    x = numbers_of_table(table, form, "int64" if form.vocabulary else "float32", sieve)
    labels = [text_of(label) for label in table.columns[table.label]]
    if form.target.kind not in ("class", "number"):
        raise DataError(
            f"data set {name}: labels of kind {form.target.kind!r} in a column: expected arrays "
            "(x, y), as .npz or in Python"
        )
    if form.target.kind == "number":
        classes = (table.label,)
    elif classes is None:
        used = sieve.good.tolist()
        classes = sort_names(name, [v for v, good in zip(labels, used, strict=True) if good])
    names = tuple(map(str, classes))
    if form.target.kind == "class" and len(names) == 1:
        # Records of another may be among those that are left out, as for a value out of range.
        sieve.warn(values=True)
    check_several(name, names, labels, form)
    y = targets_of(labels, names, form, table.label, sieve, how="names")
    sites = None
    if table.site is not None:
        sites = [text_of(value) for value in table.columns[table.site]]
        for row in range(table.count):
            if is_missing(sites[row]):
                sieve.leave_out(row, table.site, "is no site")
    whose = None
    if table.person is not None:
        whose = persons_of(table.columns[table.person], sieve, table.person)
    return _dataset(name, [Given(x, y, sieve, table.features)], names, sites, whose)


def _dataset(
    name: str,
    parts: Sequence[Given],
    classes: tuple[str, ...],
    sites: Sequence[Any] | None,
    persons: Sequence[str] | None = None,
) -> Dataset:
    """The records that are left, with a warning about the others. parts: training, and test."""
    for part in parts:
        if not part.sieve.good.any():
            raise nothing_left(part.sieve, part.features)
        part.sieve.warn(values=True)
    own, count = parts[0].sieve.good, parts[0].sieve.count
    if sites is not None and len(sites) != count:
        raise DataError(
            f"data set {name}: site has {len(sites)} entries for {count} records: give one site "
            "name a record"
        )
    main, *test = (part.used() for part in parts)
    kept = own.nonzero()[0].tolist()
    features = main.features
    what = f"{', '.join(features)} as given" if features else f"{len(main.y)} records as given"
    return Dataset(
        name=name,
        x=main.x,
        y=main.y,
        classes=classes,
        x_test=test[0].x if test else None,
        y_test=test[0].y if test else None,
        site=None if sites is None else tuple(str(sites[i]) for i in kept),
        features=features,
        rows=main.numbers,
        person=None if persons is None else tuple(persons[i] for i in kept),
        description=f"{name}: {what}" if features else f"{name}, {what}",
    )
