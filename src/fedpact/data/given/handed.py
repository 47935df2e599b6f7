"""Records that are handed in from Python: what somebody has of them becomes a data set.

    (x, y)                          arrays, tensors or lists
    a DataFrame, a table            whatever gives columns by name; with label = "..."
    a data set of Hugging Face      its columns; {"train": ..., "test": ...} with a public test set
    a torch Dataset                 whose items are pairs (x, y)

What a record becomes follows from that record and what was declared ([records]), as of a file.
Pillow's images become arrays [channels, height, width] of 0..255, which nothing scales but
`records = {"low": 0, "high": 255, "scale": "unit"}`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset as Items
from torch.utils.data import IterableDataset, TensorDataset

from fedpact.data.dataset import Dataset
from fedpact.data.datasets import from_arrays, from_frame, with_columns
from fedpact.data.form import LabelForm, PlanRecords, RecordForm
from fedpact.errors import DataError

_KINDS: Final = (
    "expected a path, a name, a pair (x, y) of arrays, a DataFrame or another table with label = "
    "..., a data set of Hugging Face, or a torch Dataset of pairs (x, y)"
)


def dataset_of(
    data: Any,
    records: PlanRecords,
    label: str | None = None,
    site: str | None = None,
    person: str | None = None,
    test: Any = None,
    target: LabelForm | None = None,
) -> Dataset:
    """Return what was handed in as a data set. test: a public test set in the same form.

    target: what a label is. records, label, site, person: as a plan declares them.
    Raises DataError: it is nothing of what the module names, or does not fit.
    """
    if isinstance(data, Dataset) and test is None:
        return data
    if isinstance(data, Mapping) and hasattr(data.get("train"), "column_names"):
        parts = cast(Mapping[str, Any], data)
        test = parts.get("test") if test is None else test
        return dataset_of(parts["train"], records, label, site, person, test, target)
    columns, form = columns_of(data), records.shared(target)
    if columns is None:
        if label or site or person:
            raise DataError(
                f"label = {label!r}, site = {site!r}, person = {person!r} with {_called(data)}: "
                "only a table has columns to name; leave them out"
            )
        return _of_pairs(data, test, records, form)
    found = _of_table(columns, _titles(data, label), label, site, person, records.classes, form)
    if test is None:
        return found
    others = columns_of(test)
    if others is None:
        raise DataError(f"test is {_called(test)} beside {_called(data)}: expected another table")
    named = list(found.features) or form.features
    own = form.model_copy(update={"features": named, "drop": []})
    classes = list(found.classes)
    beside = _of_table(others, _titles(test, label), label, None, None, classes, own)
    return replace(found, x_test=beside.x, y_test=beside.y)


def digest_of(data: Dataset) -> str:
    """Return the SHA-256 of all that a data set holds, in hexadecimal digits."""
    found = hashlib.sha256(repr((data.classes, data.features, data.site, data.person)).encode())
    for part in (data.x, data.y, data.x_test, data.y_test, data.held):
        if part is not None:
            found.update(f"{part.dtype} {tuple(part.shape)}".encode())
            found.update(part.contiguous().numpy().tobytes())
        found.update(b";")
    return found.hexdigest()


def refitted(data: Dataset, records: PlanRecords, form: RecordForm | None = None) -> Dataset:
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
    return replace(found, description=data.description, features=data.features, held=held)


def _of_table(
    columns: dict[str, list[Any]],
    titles: list[str] | None,
    label: str | None,
    site: str | None,
    person: str | None,
    classes: list[str] | None,
    form: RecordForm,
) -> Dataset:
    """Return a table as a data set; where its one feature is an array a cell, as arrays.

    titles: the names of the classes that the label's column numbers, None: it holds names.
    """
    if label is not None and titles:
        columns[label] = _by_name(titles, columns[label])
        classes = classes or titles
    wanted = form.features or [
        name for name in columns if name not in {label, site, person, *form.drop}
    ]
    if label in columns and len(wanted) == 1 and _holds_arrays(columns.get(wanted[0])):
        return from_arrays(
            _together([_array(cell) for cell in columns[wanted[0]]], wanted[0]),
            _labels(columns[label], form),
            name="table",
            classes=classes,
            site=None if site is None else columns[site],
            person=None if person is None else columns[person],
            form=form.model_copy(update={"labels": "names"}),
        )
    return from_frame(
        _Columns(columns), label, site, person=person, name="table", classes=classes, form=form
    )


def _labels(cells: Sequence[Any], form: RecordForm) -> Any:
    if form.target.kind in ("several", "pixels"):
        return _together([np.asarray(cell) for cell in cells], "label")
    return cells if form.target.kind == "number" else [str(value) for value in cells]


def _of_pairs(data: Any, test: Any, records: PlanRecords, form: RecordForm) -> Dataset:
    x, y, titles = _pair(data)
    beside = None if test is None else _pair(test)[:2]
    if titles and form.labels is None:
        form = form.model_copy(update={"labels": "numbers"})
    return from_arrays(x, y, classes=records.classes or titles, test=beside, form=form)


def _pair(data: Any) -> tuple[Any, Any, list[str] | None]:
    """Return x [n, ...], y [n, ...], and the classes' names where a torch Dataset has them."""
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return *data.tensors, None
    if isinstance(data, Items) and not isinstance(data, IterableDataset):
        items = [data[i] for i in range(len(cast(Any, data)))]
        if not items or not all(isinstance(i, Sequence) and len(i) == 2 for i in items):
            raise DataError(
                f"{_called(data)}: expected pairs (x, y), at least one: a record "
                "and its label at each place; wrap it in a Dataset that gives them"
            )
        titles = getattr(data, "classes", None)
        x = _together([_array(item[0]) for item in items], "x")
        y = _together([np.asarray(item[1]) for item in items], "y")
        whole = isinstance(titles, Sequence) and y.ndim == 1 and y.dtype.kind in "iu"
        return x, y, list(map(str, titles)) if whole and isinstance(titles, Sequence) else None
    if isinstance(data, tuple | list) and len(cast(Sequence[Any], data)) == 2:
        return *cast(Sequence[Any], data), None
    raise DataError(f"data is {_called(data)}: {_KINDS}")


def columns_of(data: Any) -> dict[str, list[Any]] | None:
    """Return a table's columns, None where it is none."""
    named = getattr(data, "column_names", None)
    if named is None:
        named = data.keys() if isinstance(data, Mapping) else getattr(data, "columns", None)
    if named is None or isinstance(data, type):
        return None
    keys = list(named)
    if len({str(key) for key in keys}) < len(keys):
        raise DataError(
            f"{_called(data)} has the columns {', '.join(map(str, keys))}: name each once"
        )
    plain = getattr(data, "with_format", None)
    whole = cast(Any, data if plain is None else plain(None))
    found = {str(key): whole[key] for key in keys}
    return {n: list(c.to_pylist() if hasattr(c, "to_pylist") else c) for n, c in found.items()}


class _Columns:
    """Columns by name, as `from_frame` takes them."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self.columns = columns

    def __getitem__(self, name: str) -> Sequence[Any]:
        return self.columns[name]


def named_labels(data: Any, label: str | None, columns: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Return a table's labels, by name where its column numbers classes that have names."""
    titles, found = _titles(data, label), list(columns[str(label)])
    return _by_name(titles, found) if titles else found


def _by_name(titles: Sequence[str], numbers: Sequence[Any]) -> list[str | None]:
    return [titles[int(v)] if v in range(len(titles)) else None for v in numbers]


def _titles(data: Any, label: str | None) -> list[str] | None:
    """Return the names of the classes that a column of Hugging Face's numbers."""
    kinds = getattr(data, "features", None)
    found = getattr(kinds.get(label), "names", None) if isinstance(kinds, Mapping) else None
    return list(map(str, found)) if found else None


def _holds_arrays(cells: Sequence[Any] | None) -> bool:
    return bool(cells) and (
        hasattr(cells[0], "getbands")
        or (isinstance(cells[0], Sequence | np.ndarray | Tensor) and not isinstance(cells[0], str))
    )


def _array(cell: Any) -> np.ndarray:
    """Return a record as an array; an image of Pillow's with its channels first."""
    if isinstance(cell, Tensor):
        return cell.detach().cpu().numpy()
    found = np.asarray(cell)
    if not hasattr(cell, "getbands"):
        return found
    return found[None] if found.ndim == 2 else np.moveaxis(found, -1, 0)


def _together(records: Sequence[np.ndarray], what: str) -> np.ndarray:
    shapes = {record.shape for record in records}
    if len(shapes) != 1:
        raise DataError(
            f"{what}: its records have {len(shapes)} shapes, such as "
            f"{', '.join(map(str, sorted(shapes)[:3]))}: expected one; bring them into one form"
        )
    return np.stack(records)


def _called(data: Any) -> str:
    return f"a {type(data).__module__}.{type(data).__qualname__}"
