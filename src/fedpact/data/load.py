"""Loads a run's data: data sets by name, from a file, or from Python objects.

A record's numbers follow from that record and the declaration ([records]) alone. See inputs for
accepted objects. {"train": ..., "test": ...} is a data set with a public test set.

>>> digits = load_dataset("digits")
>>> tuple(digits.x.shape), tuple(digits.x_test.shape), len(digits.classes)
((1442, 1, 8, 8), (355, 1, 8, 8), 10)
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch

from fedpact.common.errors import DataError, nearest
from fedpact.common.user_code import is_handed
from fedpact.data import public, targets
from fedpact.data.cells import SUFFIXES, check_suffix, read_npz
from fedpact.data.columns import FileColumn, declared_columns
from fedpact.data.dataset import Dataset, RecordFilter, left_out_error, with_columns
from fedpact.data.inputs import check_shape, check_together, columns_of, read_declared, read_table
from fedpact.data.schema import LabelForm, PlanRecords, RecordForm
from fedpact.data.tables import (
    Roles,
    Table,
    check_columns,
    describe_value,
    of_arrays,
    read_numbers,
    warn_of_channels,
)
from fedpact.data.tokens import filled_columns, is_next_token, is_tokens

NAMES = (
    *("digits", "mnist", "fashion_mnist", "cifar10"),
    *("heart_disease", "heart_disease_flamby", "adult", "shakespeare"),
)
TABLES = ("adult",)
"""Those that are tables as they were published, which a form says how to read."""

_LOADERS: Final = {
    "digits": public.load_digits,
    "heart_disease": public.load_heart,
    "heart_disease_flamby": public.load_flamby,
    "shakespeare": public.load_shakespeare,
}
_WITH_TEST = "+test"
_ANY: Final = RecordForm()
_logger = logging.getLogger("fedpact")
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

    "NAME+test" appends the public test set to the training records, for papers that split all
    records inside each site. "synthetic(ALPHA,BETA)" and "synthetic_iid" are generated; see
    data.public. label: the column of the labels, required for .csv and .parquet. All other columns
    except `site` and `person` are features. An .npz has arrays x, y and optionally x_test, y_test,
    site, person. classes: the labels' names in order; by default those found, sorted (numbers by
    size). form: the declaration of records, for a file or one of TABLES. Invalid records are left
    out, and a warning names file, row, column and value; see `load_site` for records whose values
    must not be logged.
    Raises DataError: unknown name, missing or damaged file, missing column, no record left.
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
        table = read_table(Path(name), form, Roles(label, site, person))
        return dataset_of(name, [table], classes, form)
    check_suffix(Path(name))
    if name not in NAMES and Path(name).is_dir():
        raise DataError(
            f"data set {name!r} is a folder: name a file ending in {', '.join(SUFFIXES)}; for "
            "images in a folder for each class, pass datasets.load_dataset('imagefolder', "
            f"data_dir={name!r}, split='train') from Python, with label = 'label'"
        )
    made = public.Synthetic.parse(name)
    if suffix != ".npz" and name not in NAMES and not made:
        raise DataError(
            f"data set {name!r} is unknown: expected one of "
            f"{', '.join((*NAMES, *public.FORMS))}, or the path of a file ending in "
            f"{', '.join(SUFFIXES)}{nearest(name, NAMES)}"
        )
    if any(column is not None for column in (label, site, person)):
        raise DataError(
            f"data set {name}: label = {label!r}, site = {site!r}, person = {person!r}: only .csv "
            "and .parquet files have columns to name; name such a file as data, or leave them out "
            "(an .npz file has arrays called site and person)"
        )
    if suffix == ".npz":
        arrays = read_npz(Path(name))
        test = arrays.pop("x_test", None), arrays.pop("y_test", None)
        pair = None if test[0] is None else test
        return from_arrays(**arrays, name=name, classes=classes, test=pair, form=form)
    if classes is not None:
        raise DataError(f"data set {name}: it has its own classes; leave classes out")
    if name == "adult":
        return dataset_of("adult", public.adult_tables(form), public.CLASSES, form)
    if name in _LOADERS:
        return _LOADERS[name]()
    return made.dataset(name) if made else public.load_images(name)


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

    x: 64- and 32-bit integers stay integers (tokens); everything else becomes float32. y: integers
    are class numbers from 0; strings are class names. classes: the classes' names in order; by
    default "0".."largest label", or the strings of y and of the test labels, sorted. site, person:
    each record's; a record without one is left out. test: (x_test, y_test), the public test set.
    form: the declaration of records; invalid ones are left out, with a warning. Raises DataError
    (see Dataset), or if no record is left.

    >>> from_arrays([[0.5], [1.5], [2.5]], ["yes", "no", "no"]).y
    tensor([1, 0, 0])
    """
    tables = [of_arrays(name, x, y, form, site, person)]
    if test is not None:
        tables.append(of_arrays(f"{name} (test)", *test, form, end="_test"))
    return dataset_of(name, tables, classes, form)


def dataset_of(
    name: str,
    tables: Sequence[Table],
    classes: Sequence[str] | None,
    form: RecordForm,
    at_site: str | None = None,
) -> Dataset:
    """Return the valid records of tables, with a warning about the others.

    tables: the training records, and optionally a public test set. classes: the labels' names in
    order; None: those found. at_site: the type, "float32" or "int64", of a deployed site's records,
    all of which may be left out, and no value of which is told; None for a simulation's.
    Raises DataError: no record is left, or invalid labels.
    """

    def check_left() -> None:
        for table in tables:
            if not (at_site or table.sieve.good.any()):
                raise left_out_error(table.sieve)

    values = at_site
    if values is None:
        values = "int64" if form.vocabulary else "float32"
        if isinstance(tables[0].x, np.ndarray):
            warn_of_channels(name, tables[0].x)
            values = "int64" if tables[0].x.dtype in _WHOLE else values
    xs = [read_numbers(table, form, values) for table in tables]
    check_left()
    tables = [
        targets.token_labels(table, x, form, classes) for table, x in zip(tables, xs, strict=True)
    ]
    check_left()
    main, sieve = tables[0], tables[0].sieve
    if classes is None and is_next_token(main.roles.label, form.target.next):
        if not form.vocabulary:
            raise DataError(
                f"data set {name}: each token's label is the next token: expected the number of "
                "tokens as records.vocabulary (records={'vocabulary': 30522} in Python)"
            )
        classes = [str(token) for token in range(form.vocabulary)]
    classes = classes or main.titles or targets.find_classes(name, tables, form)
    names = tuple(map(str, classes))
    if not at_site:
        targets.check_several(name, names, main, form)
    targets.check_ambiguous(name, names, tables, form, at_site is not None)
    ys = [targets.read_labels(table, names, form) for table in tables]
    site = None if main.site is None else targets.read_sites(main)
    person = None
    if main.person is not None:
        person = targets.persons_of(main.person, sieve, str(main.roles.person))
    check_left()
    for table in tables:
        table.sieve.warn(values=not at_site)
    parts = [
        (torch.from_numpy(x[table.sieve.good]), torch.from_numpy(y[table.sieve.good]))
        for table, x, y in zip(tables, xs, ys, strict=True)
    ]
    kept = sieve.good.nonzero()[0]
    found = Dataset(
        name,
        *parts[0],
        names,
        *(parts[1] if len(parts) > 1 else (None, None)),
        site=None if site is None else tuple(site[i] for i in kept.tolist()),
        person=None if person is None else tuple(person[i] for i in kept.tolist()),
        features=main.features,
        rows=torch.from_numpy(kept + sieve.first),
        column=main.column,
        sieve=sieve,
        next=form.target.next,
    )
    object.__setattr__(found, "form", form)
    return found if main.features else with_columns(found, form)


def load_site(
    path: Path,
    label: str | None,
    classes: Sequence[str],
    shape: tuple[int, ...],
    values: str,
    form: RecordForm,
    person: str | None = None,
    features: tuple[str, ...] = (),
    sources: Mapping[str, FileColumn] = {},
) -> tuple[Dataset, RecordFilter]:
    """Return the records x [n, *shape], y [n] of a site's own file, and which are left out.

    Nothing that leaves a site may reveal that a record was faulty: one that does not fit is left
    out, and so may all of them be: n >= 0. Only the log of this machine names it, without values.

    path: a .csv, .parquet or .npz file. features: the columns of a table in the order of a record's
    numbers, the same at all sites and in an .npz file; other columns count for nothing. sources: of
    which columns, in which units and words, declared ones are made; without one, of that of the
    same name. label: among the declared names. person: the column, or in an .npz the array, that
    names each record's person; None: not used. classes, shape, values ("float32" or "int64"), form:
    as the federation declares them.
    Raises DataError: the file as a whole is of another form, or not there.
    """
    is_table, convert = path.suffix.lower() in (".csv", ".parquet"), None
    if not is_table:
        _check_site_arrays(path, label, form, features, sources)
    elif features and label is not None:
        wanted = [*features, label, *([] if person is None else [person])]
        optional = filled_columns(features)
        convert = partial(declared_columns, wanted=wanted, sources=sources, optional=optional)
    if values == "int64" and len(shape) == 2:
        # Tokens, of one length, however long the longest of them is.
        form = form.model_copy(update={"length": shape[-1]})
    roles = Roles(label, person=person)
    table, form = read_declared(path, form, roles, shape, features, convert=convert)
    whose = table.person if person == table.roles.person else None
    if person is not None and whose is None:
        raise DataError(
            f"data file {path} holds no array {person!r}, which federation.toml names as what says "
            "whose a record is: add it to the file"
        )
    in_order = len(table.features) < 2 or is_tokens(table.features)
    if is_table and convert is None and (sources or not in_order):
        raise DataError(
            f"data file {path} has the columns {', '.join(table.features)}, and federation.toml "
            "does not say in which order they make a record, so sites may differ: add features = "
            '["...", ...], all of them, to the federation.toml of every party, in the order '
            "that the files have had so far"
        )
    check_shape(table, shape, features, "federation.toml")
    targets.check_places(str(path), form.target.kind, table.y, shape)
    # Its sites are no site's business.
    table = replace(table, person=whose, site=None)
    found = dataset_of(str(path), [table], classes, form, values)
    if not len(found.y):
        _logger.warning("%s holds no record that is used: the site sends noise alone", path)
    return found if table.features else replace(found, features=features), table.sieve


def _check_site_arrays(
    path: Path,
    label: str | None,
    form: RecordForm,
    features: Sequence[str],
    sources: Mapping[str, FileColumn],
) -> None:
    """Raise DataError unless a site's arrays need no columns by name."""
    if sources:
        raise DataError(
            f"data file {path} is no table: [columns] of site.toml names {', '.join(sources)}, "
            "and arrays have no columns by name; leave [columns] out, or write the records as "
            ".csv or .parquet"
        )
    if not features and (form.drop or form.features is not None):
        raise DataError(
            f"data file {path} is no table: records.features = {form.features} and "
            f"records.drop = {form.drop} of federation.toml expect columns by name; leave "
            "columns out of the sites' arrays, and agree on a federation.toml without them"
        )
    if path.suffix.lower() != ".npz" or label is not None:
        raise DataError(
            f"records is {str(path)!r} with label = {label!r}: expected a file ending in "
            f"{', '.join(SUFFIXES)}, and a label's column for .csv and .parquet alone"
        )


_BESIDE: Final = ("validation", "valid", "val", "dev")


def from_python(
    data: Any,
    records: PlanRecords,
    label: str | None = None,
    site: str | None = None,
    person: str | None = None,
    test: Any = None,
    target: LabelForm | None = None,
) -> Dataset:
    """Return data as a data set. test: a public test set of the same kind, or a path.

    target: the type of labels. records, label, site, person: as declared in a plan. Raises
    DataError: not an accepted object (see inputs), or one that does not match the declaration.
    """
    if isinstance(data, Dataset) and test is None:
        return replace(data)  # held against the plan's form anew, whatever it was made by
    form = records.shared(target)
    parts = cast(Mapping[Any, Any], data) if isinstance(data, Mapping) else {}
    train = parts.get("train")
    table = hasattr(train, "column_names") or hasattr(train, "columns")
    if train is not None and (table or {*parts} <= {"train", "test", *_BESIDE}):
        test = _test_of(parts) if test is None else test
        return from_python(train, records, label, site, person, test, target)
    if isinstance(data, str | Path):
        found = load_dataset(
            str(data), label, site, person=person, classes=records.classes, form=form
        )
        found = replace(found, name=Path(data).name)
    else:
        check_together(data)
        main = read_table(data, form, Roles(label, site, person))
        named = bool(main.features or main.column)
        main.sieve.origin = name = "table" if named else "arrays"
        if test is not None and not named and not isinstance(test, str | Path):
            if columns_of(test) is not None:
                raise DataError(
                    f"test is {describe_value(test)} beside records (x, y): expected a pair, too"
                )
            tables = [main, read_table(test, form, Roles(), origin="test")]
            return dataset_of(name, tables, records.classes, form)
        found = dataset_of(name, [main], records.classes, form)
    return found if test is None else _add_test(found, test, label, form)


def _add_test(found: Dataset, test: Any, label: str | None, form: RecordForm) -> Dataset:
    if found.x_test is not None:
        raise DataError(f"data set {found.name} has a test set of its own: leave test out")
    alone = form.features if found.column is None else [found.column]
    own, is_path = form.choosing(found.features or alone), isinstance(test, str | Path)
    if is_tokens(found.features):
        own = own.model_copy(update={"length": found.x.shape[-1]})
    if is_path and Path(test).suffix.lower() not in (".csv", ".parquet"):
        # Its columns have the order of training, whatever their names.
        label, own = None, own.by_place(found.features)
    if not is_path and (columns_of(test) is None) != (label is None):
        table = "another table" if label else "a pair (x, y)"
        raise DataError(
            f"test is {describe_value(test)} beside data {found.name}: expected {table}"
        )
    table = read_table(test, own if label else form, Roles(label), origin="the test table")
    beside = dataset_of("test", [table], found.classes, own)
    return replace(found, x_test=beside.x, y_test=beside.y)


def digest_of(data: Dataset) -> str:
    """Return the SHA-256 of a data set's content, in hexadecimal digits."""
    found = hashlib.sha256(repr((data.classes, data.features, data.site, data.person)).encode())
    for part in (data.x, data.y, data.x_test, data.y_test, data.held):
        if part is not None:
            found.update(f"{part.dtype} {tuple(part.shape)}".encode())
            found.update(part.contiguous().reshape(-1).numpy().data)
        found.update(b";")
    return found.hexdigest()


def refit(data: Dataset, records: PlanRecords, form: RecordForm | None = None) -> Dataset:
    """Return a data set checked against a plan's declaration; unchanged if it declares nothing new.

    form: that of the records, with the plan's labels.
    """
    data = with_columns(data, records)
    if records == PlanRecords(features=records.features, drop=records.drop):
        return data
    if records.classes is not None and tuple(records.classes) != data.classes:
        raise DataError(
            f"data set {data.name} has the classes {', '.join(data.classes)}: records.classes "
            f"declares {', '.join(records.classes)}; leave one out, or make them agree"
        )
    if form is not None and data.form == form:
        return data
    if data.features:
        # Named columns are scaled by name, so a declaration by position would have no effect.
        check_columns(data.name, records, data.features)
    test = None if data.x_test is None else (data.x_test, data.y_test)
    form = (form or records.shared()).in_arrays(data.features)
    found = from_arrays(
        *(data.x, data.y),
        name=data.name,
        classes=data.classes,
        site=data.site,
        person=data.person,
        test=test,
        form=form,
    )
    sieve = max(filter(None, (data.sieve, found.sieve)), key=lambda one: one.left_out)
    held = None if data.held is None else data.held[found.numbers]
    kept = {"features": data.features, "column": data.column, "next": data.next}
    return replace(found, **kept, held=held, sieve=sieve)


def _test_of(data: Mapping[Any, Any]) -> Any:
    """Return the part that is a public test set, or None; a warning names unused parts."""
    beside = [name for name in _BESIDE if name in data]
    if beside and "test" not in data:
        raise DataError(
            f'data has the parts {", ".join(data)}, and no test: pass data["train"] alone, or '
            f'with test = data["{beside[0]}"], if that is to be the public test set'
        )
    left = [name for name in data if name not in ("train", "test")]
    if left:
        _logger.warning("data: the parts %s are not used", ", ".join(left))
    return data.get("test")
