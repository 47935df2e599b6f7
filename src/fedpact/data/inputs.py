"""Records passed in from Python, as columns by name or as arrays.

    (x, y)                          arrays, tensors or lists
    a DataFrame or another table    anything with columns by name; with label = "..."
    a data set of Hugging Face      its columns
    a torch Dataset                 whose items are pairs (x, y)

Pillow's images become arrays [channels, height, width] of 0..255. To scale them, declare
`records = {"low": 0, "high": 255, "scale": "range"}`.
"""

import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from numbers import Number
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as Items
from torch.utils.data import IterableDataset, TensorDataset

from fedpact.common.errors import DataError
from fedpact.data.cells import Cells, NumberCells, cells_of, is_blank, list_some
from fedpact.data.schema import RecordForm
from fedpact.data.tables import Table
from fedpact.data.tokens import is_next_token, is_tokens, token_columns

_KINDS: Final = (
    "expected a path, a name, a pair (x, y) of arrays, a DataFrame or another table with label = "
    "..., a data set of Hugging Face, or a torch Dataset of pairs (x, y)"
)
_ANY: Final = RecordForm()
_AT_A_SITE: Final = "; a deployed site's owner names it as label in site.toml"
_INDEX: Final = re.compile(r"(__index_level_\d+__|Unnamed: \d+)?")
"""What pandas calls a column that numbers rows, in Parquet and, unnamed, in a CSV."""
_logger = logging.getLogger("fedpact")


def read_input(
    origin: str,
    data: Any,
    form: RecordForm = _ANY,
    label: str | None = None,
    site: str | None = None,
    person: str | None = None,
    shape: tuple[int, ...] | None = None,
) -> Table:
    """Read an object passed in from Python. origin: the name of its records in errors.

    label, site, person: columns of a table. shape: of a record, if records without labels are
    allowed; then missing columns of a table are ignored. Raises DataError: an object of another
    kind (see the module), or one that does not match the declaration.
    """
    columns = columns_of(data)
    if columns is not None:
        if shape is not None:
            label, site, person = (r if r in columns else None for r in (label, site, person))
        titles = _titles(data).get(str(label))
        if label in columns and titles:
            named = [titles[int(v)] if v in range(len(titles)) else None for v in columns[label]]
            columns[str(label)] = named
        roles = label, site, person
        index = [name for name in _index_of(data) if name not in roles]
        unlabelled = shape is not None
        table = table_of(origin, columns, *roles, None, form, index, unlabelled=unlabelled)
        return replace(with_arrays(table, form), titles=titles)
    if shape is None and (label or site or person):
        raise DataError(
            f"label = {label!r}, site = {site!r}, person = {person!r} with "
            f"{describe_value(data)}: only a table has columns to name; pass a table, such as "
            "pandas.DataFrame(data) of rows, or leave them out"
        )
    x, y, titles = _pair_of(origin, data, shape)
    return of_arrays(origin, x, y, form, titles=titles)


def choose_features(
    columns: Mapping[str, Any], form: RecordForm, roles: Collection[str | None]
) -> list[str]:
    """Return the columns that form a record. roles: those of label, site and person."""
    return form.features or [name for name in columns if name not in {*roles, *form.drop}]


def table_of(
    origin: str,
    columns: Mapping[str, Cells],
    label: str | None,
    site: str | None = None,
    person: str | None = None,
    broken: Mapping[int, str] | None = None,
    form: RecordForm = _ANY,
    index: Collection[str] = (),
    *,
    unlabelled: bool = False,
) -> Table:
    """Return columns as a table. origin: its name in errors. index: columns that number rows.

    unlabelled: whether the label may be missing. form: selects the features. Raises DataError: a
    missing column.
    """
    roles = {"label": label, "site": site, "person": person}
    for role, column in roles.items():
        optional = role != "label" or unlabelled
        if column not in columns and not (optional and column is None):
            raise DataError(
                f"{origin}: {role} column is {column!r}: expected one of its columns "
                f"{list_some(columns)}; name it as {role} in a plan or in Python, or by --{role} "
                "where a command has it" + _AT_A_SITE * (role == "label")
            )
    named = {role: column for role, column in roles.items() if column is not None}
    others = [column for column in roles.values() if not is_next_token(column)]
    rows = token_columns(columns, choose_features(columns, form, others), form.length)
    for key, names in (("features", form.features or ()), ("drop", form.drop)):
        known = {*columns, *rows} - {*others}
        if odd := [c for c in names if c not in known]:
            raise DataError(
                f"{origin}: records.{key} names {', '.join(odd)}: expected some of its columns "
                f"{list_some(columns)}, and not those of label, site or person; correct the names"
            )
    unused = {*index, *_numbering(origin, list(columns), form)}
    chosen = choose_features(columns, form, roles.values())
    features = [c for c in chosen if form.features is not None or c not in unused]
    if not (rows or features) or len({*named.values()}) < len(named):
        raise DataError(
            f"{origin}: label column {label!r}, site column {site!r} and person column "
            f"{person!r} leave {len(features)} feature columns of {len(columns)}: expected "
            "different columns and at least one more"
        )
    x = rows or {name: columns[name] for name in features}
    y, *names = (None if name is None else columns[name] for name in roles.values())
    return Table(origin, x, y, *names, broken=broken, roles=named, labels="names")


def _numbering(origin: str, names: Sequence[str], form: RecordForm) -> list[str]:
    """Return the columns that number rows. Raises DataError: another unnamed column."""
    known = [name for name in names if _INDEX.fullmatch(name)]
    for name in known:
        place = names.index(name)
        chosen = form.features is not None or name in form.drop or name.startswith("__index")
        if place and not chosen:
            raise DataError(
                f"{origin}: column {place + 1} of {len(names)} has no name ({name!r}): expected "
                "one, by which it can be declared; give it one in the file, delete it, or leave it "
                "out by records.drop"
            )
    return known


def with_arrays(table: Table, form: RecordForm, shape: tuple[int, ...] | None = None) -> Table:
    """Return a table with an array in place of its only feature, if that has arrays or images.

    A record without one is left out. shape: records of another shape are left out too; None: they
    are refused. Raises DataError: other features beside it.
    """
    origin, given, y = table.origin, cast(Mapping[str, Cells], table.x), table.y
    column = next((name for name in given if _holds_arrays(given[name])), None)
    if column is None or is_tokens(table.features):
        return table
    if len(given) > 1:
        raise DataError(
            f"{origin}: column {column} has an array or an image in each cell, beside "
            f"{len(given) - 1} other columns of features: expected it alone; name it, as "
            f'features = ["{column}"] under [records]'
        )
    if y is not None and form.target.kind in ("several", "pixels"):
        if shape is not None:
            raise DataError(f"{origin}: labels of several numbers: write the records as .npz")
        y = _together([np.asarray(cell) for cell in y], "label")
    found = [_array(cell) for cell in given[column]]
    why = f"has no array or image in column {column}" + f" of shape {shape}" * (shape is not None)
    missing = {
        row: why
        for row, one in enumerate(found)
        if one is None or one.shape != (shape or one.shape)
    }
    good = [one for row, one in enumerate(found) if one is not None and row not in missing]
    if not good and shape is None:
        raise DataError(f"{origin}: column {column} holds no array or image that can be read")
    blank = good[0] * 0 if good else np.zeros(shape or ())
    x = _together(
        [blank if one is None or row in missing else one for row, one in enumerate(found)], column
    )
    broken = {**(table.broken or {}), **missing}
    return replace(table, x=array_of(origin, column, x), y=y, column=column, broken=broken)


def of_arrays(
    origin: str,
    x: Any,
    y: Any,
    form: RecordForm,
    site: Any = None,
    person: Any = None,
    end: str = "",
    titles: Sequence[str] | None = None,
    least: int = 1,
) -> Table:
    """Return arrays x [n, ...] and, unless y is None, y [n, ...]. end: of their names in errors.

    least: the smallest number of records. Raises DataError: not arrays, or shapes that do not match
    each other or the declaration.
    """
    x, given = array_of(origin, "x" + end, x), y
    if given is not None:
        y = labels_of(origin, "y" + end, given, form.target.kind, x.ndim)
        check_shapes(origin, end, x, y, least=least, kind=form.target.kind)
    site, person = (
        v if v is None or isinstance(v, np.ndarray) else cells_of(v) for v in (site, person)
    )
    return Table(
        origin, x, y, site, person, titles=titles, labels=None if titles is None else "numbers"
    )


def _pair_of(
    what: str, data: Any, shape: tuple[int, ...] | None
) -> tuple[Any, Any, list[str] | None]:
    """Return records x, labels y or None, and the names of the classes that y numbers."""
    if isinstance(data, Items) and not isinstance(data, IterableDataset):
        return _of_items(data, shape)
    if isinstance(data, tuple | list):
        pair = cast(Sequence[Any], data)
        if len(pair) == 2 and (shape is None or _shape(pair[0]) != shape):
            return pair[0], pair[1], None
    if shape is None or _shape(data) == ():
        hint = "; pass its .dataset" if hasattr(data, "dataset") else ""
        raise DataError(f"{what} is {describe_value(data)}: {_KINDS}{hint}")
    return data, None, None


def _holds_arrays(cells: Cells) -> bool:
    """Whether a column has an array or an image in each cell."""
    first = None if isinstance(cells, NumberCells) else next((c for c in cells if c is not None), 0)
    kinds = (Sequence, np.ndarray, Tensor)
    array = isinstance(first, kinds) and not isinstance(first, str | bytes)
    return array or hasattr(first, "getbands") or _is_stored(first)


def _is_stored(cell: Any) -> bool:
    """Whether a cell is an image as stored in Parquet files of Hugging Face."""
    return isinstance(cell, Mapping) and {*cast(Mapping[str, Any], cell)} == {"bytes", "path"}


def describe_value(data: Any) -> str:
    """Describe an unusable object for an error."""
    return f"a {type(data).__module__}.{type(data).__qualname__}"


def _of_items(data: Any, shape: tuple[int, ...] | None) -> tuple[Any, Any, list[str] | None]:
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return data.tensors[0], data.tensors[1], None
    items = [data[i] for i in range(len(cast(Any, data)))]
    if shape is not None and items and not _is_pair(items[0], shape):
        # A TensorDataset without labels has each record in a tuple.
        alone = [i[0] if isinstance(i, tuple) and _shape(i) != shape else i for i in items]
        return _together([np.asarray(_array(one)) for one in alone], "x"), None, None
    if not items or not all(_is_pair(item, None) for item in items):
        raise DataError(
            f"{describe_value(data)}: expected pairs (x, y), at least one: a record "
            "and its label at each place; wrap it in a Dataset that gives them"
        )
    titles = getattr(data, "classes", None)
    x = _together([np.asarray(_array(item[0])) for item in items], "x")
    y = _together([np.asarray(item[1]) for item in items], "y")
    named = isinstance(titles, Sequence) and y.ndim == 1 and y.dtype.kind in "iu"
    return x, y, list(map(str, cast(Sequence[Any], titles))) if named else None


def _is_pair(item: Any, shape: tuple[int, ...] | None) -> bool:
    two = isinstance(item, Sequence) and len(cast(Sequence[Any], item)) == 2
    return two and (shape is None or _shape(item) != shape)


def _shape(thing: Any) -> tuple[int, ...] | None:
    """Return an array's shape; None if it is ragged."""
    try:
        return tuple(np.shape(thing))
    except ValueError:
        return None


def columns_of(data: Any) -> dict[str, list[Any]] | None:
    """Return a table's columns; None if it is not a table."""
    named = getattr(data, "column_names", None)
    if named is None:
        named = data.keys() if isinstance(data, Mapping) else getattr(data, "columns", None)
    if named is None or isinstance(data, type):
        return None
    if isinstance(named, Mapping):
        parts = ", ".join(map(str, named))
        raise DataError(f"{describe_value(data)} has the parts {parts}: give one of them")
    keys = list(named)
    if len({str(key) for key in keys}) < len(keys):
        raise DataError(
            f"{describe_value(data)} has the columns {', '.join(map(str, keys))}: name each once"
        )
    if odd := [
        k
        for k in (keys if isinstance(data, Mapping) else ())
        if isinstance(data[k], str | bytes) or not hasattr(data[k], "__iter__")
    ]:
        raise DataError(
            f"{describe_value(data)} has {', '.join(map(str, odd))}, which are not columns: pass "
            "a table of columns of equal length, or (x, y), as (bunch.data, bunch.target) of "
            "scikit-learn's"
        )
    plain = getattr(data, "with_format", None)
    whole = cast(Any, data if plain is None else plain(None))
    kinds: Any = getattr(data, "features", None)
    # Hugging Face columns return Python floats for any declared type.
    told = kinds if isinstance(kinds, Mapping) else {}
    found = {str(k): cells_of(whole[k], getattr(told.get(k), "dtype", None)) for k in keys}
    if len({len(cells) for cells in found.values()}) > 1:
        lengths = ", ".join(f"{name} {len(cells)}" for name, cells in found.items())
        raise DataError(
            f"{describe_value(data)} has columns of lengths {lengths}: expected equal ones"
        )
    return found


def _index_of(data: Any) -> tuple[str, ...]:
    """Return the columns of an Arrow table that are a pandas index."""
    told: Any = getattr(getattr(data, "schema", None), "pandas_metadata", None)
    names = told.get("index_columns", ()) if isinstance(told, Mapping) else ()
    return tuple(name for name in names if isinstance(name, str))


def _titles(data: Any) -> dict[str, list[str]]:
    """Return column -> names of the classes that a Hugging Face column numbers."""
    kinds = getattr(data, "features", None)
    found = kinds.items() if isinstance(kinds, Mapping) else ()
    named = {str(name): getattr(kind, "names", None) for name, kind in found}
    return {name: list(map(str, names)) for name, names in named.items() if names}


def _array(cell: Any) -> np.ndarray | None:
    """Return a record as an array, an image with its channels first; None if it is neither."""
    if isinstance(cell, Tensor):
        return cell.detach().cpu().numpy()
    if cell is None:
        return None
    try:
        if _is_stored(cell):
            from PIL import Image

            cell = Image.open(BytesIO(cell["bytes"]))
        found = np.asarray(cell)
        # None among numbers is a missing value; as text it would turn all records into text.
        found = found if found.dtype.kind in "biuf" else found.astype(np.float64)
    except ImportError as error:
        raise DataError("images in a file need Pillow: `pip install pillow`") from error
    except Exception:  # whatever is in the cell
        return None
    if not hasattr(cell, "getbands"):
        return found
    # Integers of this width would be tokens.
    found = found.astype(np.float32) if found.dtype.itemsize > 2 else found
    return found[None] if found.ndim == 2 else np.moveaxis(found, -1, 0)


def _together(records: Sequence[np.ndarray], what: str) -> np.ndarray:
    shapes = {record.shape for record in records}
    if len(shapes) != 1:
        tokens = all(record.ndim == 1 and record.dtype.kind in "iu" for record in records)
        hint = "resize images, pad or cut lists"
        if tokens:
            hint = "lists of tokens are padded, in a column called input_ids"
        raise DataError(
            f"{what}: its records have {len(shapes)} shapes, such as "
            f"{', '.join(map(str, sorted(shapes)[:3]))}: expected one; {hint}"
        )
    return np.stack(records)


def array_of(name: str, what: str, values: Any) -> np.ndarray:
    """Return numbers or text as an array. Raises DataError: other values.

    Arrays of objects become text or numbers; None, pandas' <NA> and masked values are missing
    numbers. The array is contiguous, as a model may use `view`.
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
            "an array of numbers, or strings for labels; convert it first, as with x.toarray() of "
            "a sparse matrix"
        )
    return array


def labels_of(name: str, what: str, values: Any, kind: str, axes: int) -> np.ndarray:
    """Return labels as an array, without a superfluous axis of length 1. axes: those of x.

    For classes and numbers that is [n, 1], for pixels [n, 1, h, w] with images.
    """
    y = array_of(name, what, values)
    most = {"class": 2, "number": 2, "pixels": 4 if axes == 4 else 0}.get(kind)
    return y[:, 0] if y.ndim == most and y.shape[1] == 1 else y


def _plain(array: np.ndarray) -> np.ndarray:
    """Convert an array of Python text, numbers or arrays to a numpy type; others are unchanged."""
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
    """Warn of images whose channels seem to be last."""
    if x.ndim == 4 and x.shape[-1] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        _logger.warning(
            "data set %s: a record has shape %s: models take an image as (channels, height, "
            "width); if its channels come last, pass numpy.moveaxis(x, -1, 1)",
            *(name, x.shape[1:]),
        )


_AXES: Final = {"class": 1, "number": 1, "several": 2, "pixels": None}


def check_shapes(
    name: str, end: str, x: np.ndarray, y: np.ndarray, *, least: int = 1, kind: str = "class"
) -> None:
    """Raise DataError unless x is [n, ...], y has a target's shape, and n >= least."""
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
