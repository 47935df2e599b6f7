"""What a run takes as its data, as a data set: a path, a data set, or records from Python.

What a record becomes follows from that record and what was declared ([records]), as of a file. See
inputs for what may be handed in. {"train": ..., "test": ...} is a data set with a public test set.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fedpact.common.errors import DataError
from fedpact.data import load
from fedpact.data.dataset import Dataset
from fedpact.data.inputs import columns_of, describe_value, read_input
from fedpact.data.load import dataset_of, from_arrays, with_columns
from fedpact.data.schema import LabelForm, PlanRecords, RecordForm
from fedpact.data.tables import check_columns
from fedpact.data.tokens import is_tokens

_logger = logging.getLogger("fedpact")

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
    """Return what was handed in as a data set. test: a public test set in the same form, or a path.

    target: what a label is. records, label, site, person: as a plan declares them.
    Raises DataError: it is nothing of what the module names, or does not fit.
    """
    if isinstance(data, Dataset) and test is None:
        return data
    form = records.shared(target)
    if isinstance(data, str | Path):
        found = load.load_dataset(
            str(data), label, site, person=person, classes=records.classes, form=form
        )
        found = replace(found, name=Path(data).name)
        return found if test is None else _with_test(found, test, label, form)
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
        return found if test is None else _with_test(found, test, label, form)
    if columns_of(test) is not None:
        raise DataError(
            f"test is {describe_value(test)} beside records (x, y): expected a pair, too"
        )
    tables = [main, read_input("test", test, form)]
    return with_columns(dataset_of(name, tables, records.classes, form), form)


def _count_sites(data: Any) -> int:
    """Return how many sites' records a dict or list holds, each a table or a pair (x, y); or 0."""
    if isinstance(data, Mapping):
        parts = [] if _is_split(data) else [*data.values()]
    else:
        parts = data if isinstance(data, list) else []
    apart = (
        hasattr(one, "columns") or (isinstance(one, tuple) and len(one) == 2 and _of_rows(*one))
        for one in parts
    )
    return len(parts) if parts and all(apart) else 0


def _of_rows(x: Any, y: Any) -> bool:
    """Whether x, y are records and their labels, and not one of each."""
    shapes = getattr(x, "shape", ()), getattr(y, "shape", ())
    return len(shapes[0]) > 1 and len(shapes[1]) == 1 and shapes[0][0] == shapes[1][0]


def _with_test(found: Dataset, test: Any, label: str | None, form: RecordForm) -> Dataset:
    """Return a data set with a public test set: a file's path, a table, or a pair beside arrays.

    Raises DataError: it has one, or the other is of another kind.
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
            # Its columns stand as they were trained on, whatever they are called.
            own = own.by_place(found.features)
        beside = load.load_dataset(str(test), column, classes=classes, form=own)
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
    """Return the SHA-256 of all that a data set holds, in hexadecimal digits."""
    found = hashlib.sha256(repr((data.classes, data.features, data.site, data.person)).encode())
    for part in (data.x, data.y, data.x_test, data.y_test, data.held):
        if part is not None:
            found.update(f"{part.dtype} {tuple(part.shape)}".encode())
            found.update(part.contiguous().reshape(-1).numpy().data)
        found.update(b";")
    return found.hexdigest()


def refit(data: Dataset, records: PlanRecords, form: RecordForm | None = None) -> Dataset:
    """Return a data set held against what a plan declares; itself where that is nothing.

    form: the records' own, with what the plan says of labels.
    """
    data = with_columns(data, records)
    if records == PlanRecords(features=records.features, drop=records.drop):
        return data
    if records.classes is not None and tuple(records.classes) != data.classes:
        raise DataError(
            f"data set {data.name} has the classes {', '.join(data.classes)}: records.classes "
            f"declares {', '.join(records.classes)}; leave one out, or make them agree"
        )
    if data.features:
        # What has names is scaled by them, so what goes by a place would be left as it is.
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
    held = None if data.held is None else data.held[found.numbers]
    told, names = data.description, data.features
    return replace(found, description=told, features=names, column=data.column, held=held)


def _is_split(data: Mapping[Any, Any]) -> bool:
    """Whether it has a part to train on, and others beside it."""
    train = data.get("train")
    table = hasattr(train, "column_names") or hasattr(train, "columns")
    return train is not None and (table or set(data) <= {"train", "test", *_BESIDE})


def _test_of(data: Mapping[Any, Any]) -> Any:
    """Return the part that is a public test set, None for none; a warning names what is left out.

    Raises DataError: there is a part for validation alone, which may be meant as one, or not.
    """
    beside = [name for name in _BESIDE if name in data]
    if beside and "test" not in data:
        raise DataError(
            f'data has the parts {", ".join(data)}, and no test: hand in data["train"] alone, or '
            f'with test = data["{beside[0]}"], if that is to be the public test set'
        )
    left = [name for name in data if name not in ("train", "test")]
    if left:
        _logger.warning("data: the parts %s are not used", ", ".join(left))
    return data.get("test")
