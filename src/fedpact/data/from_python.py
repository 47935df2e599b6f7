"""Records that are handed in from Python: what somebody has of them becomes a data set.

    (x, y)                          arrays, tensors or lists
    a DataFrame, a table            whatever gives columns by name; with label = "..."
    a data set of Hugging Face      its columns; {"train": ..., "test": ...} with a public test set
    a torch Dataset                 whose items are pairs (x, y)

What a record becomes follows from that record and what was declared ([records]), as of a file.
Pillow's images become arrays [channels, height, width] of 0..255, which nothing scales but
`records = {"low": 0, "high": 255, "scale": "range"}`.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fedpact.common.errors import DataError
from fedpact.data import load
from fedpact.data.dataset import Dataset
from fedpact.data.inputs import (
    Parts,
    arrays_in,
    choose_columns,
    describe_value,
    holds_arrays,
    labels_in,
    parts_of,
)
from fedpact.data.load import from_arrays, from_frame, with_columns
from fedpact.data.schema import LabelForm, PlanRecords, RecordForm
from fedpact.data.tables import check_columns
from fedpact.data.tokens import is_tokens, token_rows

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
    if isinstance(data, Mapping) and _is_split(data):
        test = _test_of(data) if test is None else test
        return from_python(data["train"], records, label, site, person, test, target)
    parts = parts_of(data)
    if parts.columns is None:
        if label or site or person:
            raise DataError(
                f"label = {label!r}, site = {site!r}, person = {person!r} with "
                f"{describe_value(data)}: "
                "only a table has columns to name; leave them out"
            )
        if isinstance(test, str | Path):
            return _with_test(_of_pairs(parts, None, records, form), test, None, form)
        return _of_pairs(parts, test, records, form)
    found = _of_table(parts, label, site, person, records.classes, form)
    return found if test is None else _with_test(found, test, label, form)


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
        others = parts_of(test, what="test")
        if (others.columns is None) != (label is None):
            table = "another table" if label else "a pair (x, y)"
            raise DataError(
                f"test is {describe_value(test)} beside data {found.name}: expected {table}"
            )
        if others.columns is None:
            beside = from_arrays(others.x, others.y, name="test", classes=classes, form=form)
        else:
            beside = _of_table(others, label, None, None, classes, own, "the test table")
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


def _of_table(
    parts: Parts,
    label: str | None,
    site: str | None,
    person: str | None,
    classes: list[str] | None,
    form: RecordForm,
    name: str = "table",
) -> Dataset:
    """Return a table as a data set; where its one feature is an array a cell, as arrays."""
    columns, roles = dict(parts.columns or {}), (label, site, person)
    if label in columns:
        columns[str(label)] = parts.named(str(label))
        classes = classes or parts.titles_of(label)
    if form.features is None:
        index = [name for name in parts.index if name not in (*roles, *form.drop)]
        form = form.model_copy(update={"drop": [*form.drop, *index]})
    names = choose_columns(columns, form, roles)
    arrays = len(names) == 1 and not token_rows(columns, names)
    if label in columns and arrays and holds_arrays(columns.get(names[0])):
        found = from_arrays(
            arrays_in(columns[names[0]], names[0]),
            labels_in(columns[str(label)], form),
            name=name,
            classes=classes,
            site=None if site is None else columns[site],
            person=None if person is None else columns[person],
            form=form.model_copy(update={"labels": "names"}),
        )
        return replace(found, column=names[0])
    return from_frame(
        _Columns(columns), label, site, person=person, name=name, classes=classes, form=form
    )


def _of_pairs(parts: Parts, test: Any, records: PlanRecords, form: RecordForm) -> Dataset:
    beside = None if test is None else parts_of(test, what="test")
    if beside is not None and beside.columns is not None:
        raise DataError(
            f"test is {describe_value(test)} beside records (x, y): expected a pair, too"
        )
    titles = parts.titles_of("")
    if titles and form.labels is None:
        form = form.model_copy(update={"labels": "numbers"})
    pair = None if beside is None else (beside.x, beside.y)
    found = from_arrays(parts.x, parts.y, classes=records.classes or titles, test=pair, form=form)
    return with_columns(found, records)


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


class _Columns:
    """Columns by name, as `from_frame` takes them."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self.columns = columns

    def __getitem__(self, name: str) -> Sequence[Any]:
        return self.columns[name]
