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
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from fedpact.common.errors import DataError, nearest
from fedpact.common.format import counted
from fedpact.common.user_code import is_handed
from fedpact.data import inputs, public, targets
from fedpact.data.cells import SUFFIXES, check_suffix, index_of, read_columns, read_npz
from fedpact.data.dataset import Dataset
from fedpact.data.inputs import columns_of, describe_value, of_arrays, read_input
from fedpact.data.schema import LabelForm, PlanRecords, RecordForm
from fedpact.data.sieve import RecordFilter, left_out_error
from fedpact.data.tables import Table, check_columns, read_numbers
from fedpact.data.tokens import is_next_token, is_tokens

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

    "NAME+test" appends the public test set to the training records and leaves no test set, for
    papers that split all records inside each site. "synthetic(ALPHA,BETA)" and "synthetic_iid" are
    generated; see data.public. label: the column of the labels, required for .csv and .parquet. All
    other columns except `site` (site names) and `person` (persons) are numeric features. An .npz
    has arrays x, y and optionally x_test, y_test, site, person. classes: the labels' names in
    order; by default the labels found in the file, sorted (numbers by size). Sites that load their
    own files must name the classes, so that a label means the same everywhere. form: the
    declaration of records, for a file or one of TABLES. Invalid records are left out, and a warning
    names file, row, column and value; see `load_site` for records whose values must not be logged.
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
        return dataset_of(name, [of_file(Path(name), label, site, person, form)], classes, form)
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
        pair = (arrays["x_test"], arrays["y_test"]) if "x_test" in arrays else None
        x, y, sites = arrays["x"], arrays["y"], arrays.get("site")
        whose = arrays.get("person")
        found = from_arrays(
            x, y, name=name, classes=classes, site=sites, person=whose, test=pair, form=form
        )
        return with_columns(found, form)
    if classes is not None and (name in NAMES or made):
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
    site: each record's site. person: each record's person; a record without one is left out.
    test: (x_test, y_test), the public test set. form: the declaration of records; invalid ones are
    left out, with a warning. Raises DataError (see Dataset), or if no record is left.

    >>> from_arrays([[0.5], [1.5], [2.5]], ["yes", "no", "no"]).y
    tensor([1, 0, 0])
    """
    tables = [of_arrays(name, x, y, form, site, person)]
    if test is not None:
        tables.append(of_arrays(f"{name} (test)", *test, form, end="_test"))
    return dataset_of(name, tables, classes, form)


def of_file(
    path: Path,
    label: str | None,
    site: str | None = None,
    person: str | None = None,
    form: RecordForm = _ANY,
    shape: tuple[int, ...] | None = None,
) -> Table:
    """Return the table in a .csv file with a header line, or in a .parquet file.

    label, site, person: their columns. form: selects the features. shape: of records that are
    arrays or images, as for `with_arrays`. Raises DataError: missing file or column, or unreadable
    file.
    """
    columns, broken = read_columns(path)
    roles = label, site, person
    table = inputs.table_of(f"data file {path}", columns, *roles, broken, form, index_of(path))
    return inputs.with_arrays(table, form, shape)


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
    places = [data.features.index(name) for name in wanted]
    x_test = None if data.x_test is None else data.x_test[:, places]
    return replace(data, x=data.x[:, places], x_test=x_test, features=tuple(wanted))


def dataset_of(
    name: str, tables: Sequence[Table], classes: Sequence[str] | None, form: RecordForm
) -> Dataset:
    """Return the valid records of tables, with a warning about the others.

    tables: the training records, and optionally a public test set. classes: the labels' names in
    order; None: those that are found. Raises DataError: no record is left, or invalid labels.
    """
    values = "int64" if form.vocabulary else "float32"
    if isinstance(tables[0].x, np.ndarray):
        inputs.warn_of_channels(name, tables[0].x)
        values = "int64" if tables[0].x.dtype in _WHOLE else values
    sieves = [table.filter() for table in tables]
    xs = [read_numbers(t, form, values, sieve) for t, sieve in zip(tables, sieves, strict=True)]
    _check_left(sieves)
    each = zip(tables, xs, sieves, strict=True)
    tables = [targets.token_labels(table, x, form, sieve) for table, x, sieve in each]
    main, sieve = tables[0], sieves[0]
    if classes is None and is_next_token(main.roles.get("label")):
        if not form.vocabulary:
            raise DataError(
                f"data set {name}: each token's label is the next token: expected the number of "
                "tokens as records.vocabulary (records={'vocabulary': 30522} in Python)"
            )
        classes = [str(token) for token in range(form.vocabulary)]
    classes = classes or main.titles or targets.find_classes(name, tables, sieves, form)
    names = tuple(map(str, classes))
    targets.check_several(name, names, main, form)
    ys = [targets.read_labels(t, names, form, s) for t, s in zip(tables, sieves, strict=True)]
    site = None if main.site is None else targets.read_sites(main, sieve)
    person = None
    if main.person is not None:
        person = targets.persons_of(main.person, sieve, main.roles.get("person", "person"))
    _check_left(sieves)
    for one in sieves:
        one.warn(values=True)
    parts = [
        (torch.from_numpy(x[one.good]), torch.from_numpy(y[one.good]))
        for x, y, one in zip(xs, ys, sieves, strict=True)
    ]
    kept = sieve.good.nonzero()[0]
    told = ", ".join(main.features) or counted(len(kept), "record")
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
        description=f"{name}: {told} as given",
        sieve=sieve,
    )
    object.__setattr__(found, "form", form)
    return found


def _check_left(sieves: Sequence[RecordFilter]) -> None:
    for sieve in sieves:
        if not sieve.good.any():
            raise left_out_error(sieve)


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
    if isinstance(data, str | Path):
        found = load_dataset(
            str(data), label, site, person=person, classes=records.classes, form=form
        )
        found = replace(found, name=Path(data).name)
        return found if test is None else _add_test(found, test, label, form)
    if count := _count_sites(data):
        raise DataError(
            f"data is a {type(data).__name__} of {count} tables or pairs: expected the records of "
            "all sites as one table; put them into one, with a column that says whose each record "
            'is, and name it: site = "hospital"'
        )
    if isinstance(data, Mapping) and _is_split(data):
        test = _test_of(data) if test is None else test
        return from_python(data["train"], records, label, site, person, test, target)
    main = read_input("data", data, form, label, site, person)
    name = "table" if main.labels == "names" else "arrays"
    main = replace(main, origin=name)
    if test is None or main.features or main.column or isinstance(test, str | Path):
        found = dataset_of(name, [main], records.classes, form)
        found = with_columns(found, form) if not main.features else found
        return found if test is None else _add_test(found, test, label, form)
    if columns_of(test) is not None:
        raise DataError(
            f"test is {describe_value(test)} beside records (x, y): expected a pair, too"
        )
    tables = [main, read_input("test", test, form)]
    return with_columns(dataset_of(name, tables, records.classes, form), form)


def _count_sites(data: Any) -> int:
    """Return the number of sites in a dict or list of tables or pairs (x, y); 0 for others."""
    parts = data if isinstance(data, list) else []
    if isinstance(data, Mapping) and not _is_split(data):
        parts = [*data.values()]

    def apart(one: Any) -> bool:
        """Whether it is a table, or several records and their labels, not a single one."""
        if not (isinstance(one, tuple) and len(one) == 2):
            return hasattr(one, "columns")
        x, y = (getattr(each, "shape", ()) for each in one)
        return len(x) > 1 and len(y) == 1 and x[0] == y[0]

    return len(parts) if parts and all(map(apart, parts)) else 0


def _add_test(found: Dataset, test: Any, label: str | None, form: RecordForm) -> Dataset:
    """Return a data set with a public test set: a file's path, a table, or a pair for arrays.

    Raises DataError: it already has one, or the test set is of another kind.
    """
    if found.x_test is not None:
        raise DataError(f"data set {found.name} has a test set of its own: leave test out")
    named = list(found.features) or (form.features if found.column is None else [found.column])
    told = {"features": named, "drop": [], "columns": form.kept}
    if is_tokens(found.features):
        told["length"] = found.x.shape[-1]
    own, classes = form.model_copy(update=told), list(found.classes)
    if isinstance(test, str | Path):
        column = label if Path(test).suffix.lower() in (".csv", ".parquet") else None
        if column is None:
            # Its columns have the order of training, whatever their names.
            own = own.by_place(found.features)
        beside = load_dataset(str(test), column, classes=classes, form=own)
    else:
        if (columns_of(test) is None) != (label is None):
            table = "another table" if label else "a pair (x, y)"
            raise DataError(
                f"test is {describe_value(test)} beside data {found.name}: expected {table}"
            )
        table = read_input("the test table", test, own if label else form, label)
        beside = dataset_of("test", [table], classes, own)
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
    kept = {key: getattr(data, key) for key in ("description", "features", "column")}
    held = None if data.held is None else data.held[found.numbers]
    return replace(found, **kept, held=held, sieve=sieve)


def _is_split(data: Mapping[Any, Any]) -> bool:
    """Whether a mapping has a training part and others."""
    train = data.get("train")
    table = hasattr(train, "column_names") or hasattr(train, "columns")
    return train is not None and (table or set(data) <= {"train", "test", *_BESIDE})


def _test_of(data: Mapping[Any, Any]) -> Any:
    """Return the part that is a public test set, or None; a warning names unused parts.

    Raises DataError: only a validation part, which may or may not be meant as the test set.
    """
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
