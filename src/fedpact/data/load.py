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
from fedpact.common.format import counted
from fedpact.common.user_code import is_handed
from fedpact.data.cells import SUFFIXES, cells_of, check_suffix, index_of, read_columns, read_npz
from fedpact.data.dataset import Dataset
from fedpact.data.inputs import of_arrays, of_columns, warn_of_channels
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
from fedpact.data.tables import Table, read_numbers, read_sites
from fedpact.data.targets import check_several, find_classes, persons_of, read_labels, token_labels
from fedpact.data.tokens import is_next_token

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
            f"data set {name} was passed in from Python and is not stored in the plan: pass the "
            "same records again, from Python: fedpact.run(fedpact.Plan.read(Path('plan.json')), "
            "'FOLDER', data=...), with FOLDER the run's to go on with it"
        )
    suffix = Path(name).suffix.lower()
    if suffix in (".csv", ".parquet"):
        return dataset_of(name, [of_file(Path(name), label, site, person, form)], classes, form)
    check_suffix(Path(name))
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
        return dataset_of("adult", adult_tables(form), CLASSES, form)
    return made.dataset(name) if made else load_images(name)


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
    tables = [of_arrays(name, x, y, form, site, person)]
    if test is not None:
        tables.append(of_arrays(f"{name} (test)", *test, form, end="_test"))
    return dataset_of(name, tables, classes, form)


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
    table = of_columns(name, columns, form, label, site, person)
    return dataset_of(name, [table], classes, form)


def of_file(
    path: Path,
    label: str | None,
    site: str | None = None,
    person: str | None = None,
    form: RecordForm = _ANY,
    shape: tuple[int, ...] | None = None,
) -> Table:
    """Return the table in a .csv file with a header line, or in a .parquet file.

    label, site, person: their columns. form: which others are features. shape: of records that are
    arrays or images, as `of_columns` takes it. Raises DataError: no such file or column, or a file
    that cannot be read.
    """
    columns, broken = read_columns(path)
    roles = label, site, person
    return of_columns(
        f"data file {path}", columns, form, *roles, broken, index_of(path), shape=shape
    )


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


def dataset_of(
    name: str, tables: Sequence[Table], classes: Sequence[str] | None, form: RecordForm
) -> Dataset:
    """Return the records of tables that fit, with a warning about the others.

    tables: what is trained on, and maybe a public test set. classes: the labels' names in order;
    None: those that are found. Raises DataError: none is left, or the labels are no such.
    """
    values = "int64" if form.vocabulary else "float32"
    if isinstance(tables[0].x, np.ndarray):
        warn_of_channels(name, tables[0].x)
        values = "int64" if tables[0].x.dtype in _WHOLE else values
    sieves = [table.filter() for table in tables]
    xs = [read_numbers(t, form, values, sieve) for t, sieve in zip(tables, sieves, strict=True)]
    _check_left(sieves)
    tables = [
        token_labels(t, x, form, sieve) for t, x, sieve in zip(tables, xs, sieves, strict=True)
    ]
    if classes is None and is_next_token(tables[0].roles.get("label")):
        if not form.vocabulary:
            raise DataError(
                f"data set {name}: each token's label is the next token: expected the number of "
                "tokens as records.vocabulary (records={'vocabulary': 30522} in Python)"
            )
        classes = [str(token) for token in range(form.vocabulary)]
    classes = classes or tables[0].titles
    names = (
        find_classes(name, tables, sieves, form) if classes is None else tuple(map(str, classes))
    )
    check_several(name, names, tables[0], form)
    ys = [read_labels(t, names, form, s) for t, s in zip(tables, sieves, strict=True)]
    main, sieve = tables[0], sieves[0]
    roles = {role: main.roles.get(role, role) for role in ("site", "person")}
    site = None if main.site is None else read_sites(main.site, sieve, roles["site"])
    person = None if main.person is None else persons_of(main.person, sieve, roles["person"])
    _check_left(sieves)
    for one in sieves:
        one.warn(values=True)
    parts = [
        (torch.from_numpy(x[one.good]), torch.from_numpy(y[one.good]))
        for x, y, one in zip(xs, ys, sieves, strict=True)
    ]
    kept = sieve.good.nonzero()[0]
    features = main.features
    what = ", ".join(features) if features else counted(len(kept), "record")
    told = f"{name}: {what}"
    return Dataset(
        name,
        *parts[0],
        names,
        *(parts[1] if len(parts) > 1 else (None, None)),
        site=None if site is None else tuple(site[i] for i in kept.tolist()),
        person=None if person is None else tuple(person[i] for i in kept.tolist()),
        features=features,
        rows=torch.from_numpy(kept + sieve.first),
        column=main.column,
        description=f"{told} as given",
    )


def _check_left(sieves: Sequence[RecordFilter]) -> None:
    for sieve in sieves:
        if not sieve.good.any():
            raise nothing_left(sieve)
