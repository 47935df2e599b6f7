"""Records from a file or passed in from Python, as columns by name or as arrays.

    "t.csv", "t.parquet", "t.npz"   files
    (x, y)                          arrays, tensors or lists
    a DataFrame or another table    anything with columns by name; with label = "..."
    a data set of Hugging Face      its columns
    a torch Dataset                 whose items are pairs (x, y)

Pillow's images become arrays [channels, height, width] of 0..255. To scale them, declare
`records = {"low": 0, "high": 255, "scale": "range"}`.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data import Dataset as Items

from fedpact.common.errors import DataError
from fedpact.common.format import count_noun, list_some
from fedpact.data.cells import (
    SUFFIXES,
    Cells,
    Columns,
    cells_of,
    index_of,
    read_columns,
    read_npz,
)
from fedpact.data.dataset import RecordFilter
from fedpact.data.schema import RecordForm
from fedpact.data.tables import Roles, Table, describe_value, of_arrays
from fedpact.data.tokens import is_next_token, is_tokens, token_columns

_KINDS: Final = (
    "expected a path, a name, a pair (x, y) of arrays, a DataFrame or another table with label = "
    "..., a data set of Hugging Face, or a torch Dataset of pairs (x, y)"
)
_AT_A_SITE: Final = "; a deployed site's owner names it as label in site.toml"
_INDEX: Final = re.compile(r"(__index_level_\d+__|Unnamed: \d+)?")
"""What pandas calls a column that numbers rows, in Parquet and, unnamed, in a CSV."""


def read_table(
    data: Any,
    form: RecordForm,
    roles: Roles,
    *,
    origin: str = "data",
    shape: tuple[int, ...] | None = None,
    labelled: bool = True,
    convert: Callable[[str, Mapping[str, Cells]], Mapping[str, Cells]] | None = None,
) -> Table:
    """Read a file, by its path, or an object passed in from Python.

    roles: of a table. origin: the name of an object's records in errors. shape: of a record, if it
    is known; in a table records of another are left out. labelled: whether there must be labels; if
    not, missing columns of a table are ignored. convert: (origin, a table's columns) -> those by
    the declared names. Raises DataError: another kind of object, or one that does not fit `form`.
    """
    path = Path(data) if isinstance(data, str | Path) else None
    if path is not None and path.suffix.lower() == ".npz":
        arrays = read_npz(path, labelled=labelled)
        x, y, site_of, whose = (arrays.get(name) for name in ("x", "y", "site", "person"))
        return of_arrays(str(path), x, y, form, site_of, whose, least=int(shape is None))
    columns = columns_of(data) if path is None else read_columns(path)
    if columns is not None:
        origin = origin if path is None else f"data file {path}"
        if convert is not None:
            columns = replace(columns, cells=convert(origin, columns.cells))
        return table_of(origin, columns, roles, form, shape=shape, labelled=labelled)
    if labelled and any(roles):
        raise DataError(
            f"label = {roles.label!r}, site = {roles.site!r}, person = {roles.person!r} with "
            f"{describe_value(data)}: only a table has columns to name; pass a table, such as "
            "pandas.DataFrame([data[i] for i in range(len(data))]) of rows, or leave them out"
        )
    x, y, titles = _pair_of(origin, data, None if labelled else shape)
    return of_arrays(origin, x, y, form, titles=titles)


def read_declared(
    data: Any,
    form: RecordForm,
    roles: Roles,
    shape: tuple[int, ...],
    features: Sequence[str],
    *,
    labelled: bool = True,
    convert: Callable[[str, Mapping[str, Cells]], Mapping[str, Cells]] | None = None,
) -> tuple[Table, RecordForm]:
    """Return records whose shape is known, by `read_table`, and the form to read their numbers by.

    features: a table's columns in the order of a record's numbers, which arrays have, too; () if
    unknown. See `check_shape` for whether they are of that shape.
    """
    of_table = form.choosing(features) if features else form
    told: Any = {"origin": "records", "shape": shape, "labelled": labelled, "convert": convert}
    table = read_table(data, of_table, roles, **told)
    if is_tokens(table.features):
        return table, of_table.model_copy(update={"length": shape[-1]})
    return table, form.by_place(features) if features and not table.features else of_table


def check_shape(table: Table, shape: tuple[int, ...], features: Sequence[str], where: str) -> None:
    """Raise DataError unless records are of a shape, that of `where`."""
    tokens = is_tokens(table.features)
    found = (*table.shape, *shape[-1:]) if tokens else table.shape
    if found != shape:
        columns = ", ".join(table.features)
        told = f"the columns {columns}" if columns and not tokens else f"shape {found}"
        raise DataError(
            f"{table.sieve.origin}: a record has {told}: expected shape {shape}"
            f"{' of ' * bool(features)}{', '.join(features)}, as in {where}; bring the records "
            "into that form (a table as .csv or .parquet, arrays as .npz)"
        )


def choose_features(
    columns: Mapping[str, Any], form: RecordForm, roles: Collection[str | None]
) -> list[str]:
    """Return the columns that form a record. roles: those of label, site and person."""
    return form.features or [name for name in columns if name not in {*roles, *form.drop}]


def check_role(origin: str, role: str, column: str | None, columns: Collection[str]) -> None:
    """Raise DataError: a table does not have the column of "label", "site" or "person"."""
    if column not in columns:
        raise DataError(
            f"{origin}: {role} column is {column!r}: expected one of its columns "
            f"{list_some(columns)}; name it as {role} in a plan or in Python, or by --{role} "
            "where a command has it" + _AT_A_SITE * (role == "label")
        )


def table_of(
    origin: str,
    found: Columns,
    roles: Roles,
    form: RecordForm,
    *,
    shape: tuple[int, ...] | None = None,
    labelled: bool = True,
) -> Table:
    """Return columns as a table, with arrays if each cell of its only feature is one.

    form: selects the features. Raises DataError: a missing column; for the rest see `read_table`.
    """
    columns = found.cells
    if not labelled:
        roles = Roles(*(column if column in columns else None for column in roles))
    for role, column in zip(("label", "site", "person"), roles, strict=True):
        if column is not None or (role == "label" and labelled):
            check_role(origin, role, column, columns)
    named = [column for column in roles if column is not None]
    others = [column for column in roles if not is_next_token(column)]
    among = choose_features(columns, form, others)
    rows = token_columns(columns, among, form.length)
    for key, names in (("features", form.features or ()), ("drop", form.drop)):
        known = {*columns, *rows} - {*others}
        if odd := [c for c in names if c not in known]:
            raise DataError(
                f"{origin}: records.{key} names {', '.join(odd)}: expected some of its columns "
                f"{list_some(columns)}, and not those of label, site or person, which are no "
                "features anyway; correct the names, or take them out"
            )
    unused = {*found.index, *_numbering(origin, list(columns), form)}
    chosen = choose_features(columns, form, roles)
    features = [c for c in chosen if form.features is not None or c not in unused]
    if not (rows or features) or len({*named}) < len(named):
        raise DataError(
            f"{origin}: label column {roles.label!r}, site column {roles.site!r} and person column "
            f"{roles.person!r} leave {len(features)} feature columns of {len(columns)}: expected "
            "different columns and at least one more"
        )
    x = rows or {name: columns[name] for name in features}
    sieve = RecordFilter(origin, len(next(iter(x.values()))), 1)
    for why in {*found.broken.values()}:
        sieve.leave_out([row for row, of in found.broken.items() if of == why], "", why)
    # A cell is named as it is, where the numbers of an array would be converted together.
    y, *names = (None if name is None else list(columns[name]) for name in roles)
    titles = found.titles.get(str(roles.label))
    if y is not None and titles:
        y = [titles[int(cell)] if cell in range(len(titles)) else None for cell in y]
    table = Table(sieve, x, y, *names, roles=roles, titles=titles, labels="names")
    return _with_arrays(table, form, shape, at_site=labelled)


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


def _with_arrays(
    table: Table, form: RecordForm, shape: tuple[int, ...] | None, *, at_site: bool
) -> Table:
    """Return a table with an array in place of its only feature, if that has arrays or images.

    A record without one, or of another shape than `shape`, is left out; without a shape it is an
    error. at_site: whether a shape is that of a site's records. Raises DataError: other features.
    """
    origin, given, y = table.sieve.origin, cast(Mapping[str, Cells], table.x), table.y
    column = next((name for name in given if _holds_arrays(given[name])), None)
    # Where a site's columns are declared as numbers, no cell decides whether it opens.
    numbers = form.features is not None and shape == (len(given),)
    if column is None and shape not in (None, (1,)) and len(given) == 1:
        # Nor does the first entry of an otherwise empty column of arrays.
        ((name, cells),) = given.items()
        column = name if all(cell is None for cell in cells) else None
    if column is None or numbers or is_tokens(table.features):
        return table
    if len(given) > 1:
        raise DataError(
            f"{origin}: column {column} has an array or an image in each cell, beside "
            f"{len(given) - 1} other columns of features: expected it alone; name it, as "
            f'features = ["{column}"] under [records]'
        )
    if y is not None and form.target.kind in ("several", "pixels"):
        if at_site and shape is not None:
            raise DataError(f"{origin}: labels of several numbers: write the records as .npz")
        y = _together([np.asarray(cell) for cell in y], "label")
    found = [_array(cell) for cell in given[column]]
    why = f"has no array or image in column {column}" + f" of shape {shape}" * (shape is not None)
    missing = [one is None or one.shape != (shape or one.shape) for one in found]
    good = [one for one, out in zip(found, missing, strict=True) if one is not None and not out]
    if not good and shape is None:
        raise DataError(f"{origin}: column {column} holds no array or image that can be read")
    blank = good[0] * 0 if good else np.zeros(shape or ())
    whole = [blank if one is None or out else one for one, out in zip(found, missing, strict=True)]
    x = _together(whole, column) if whole else blank[None][:0]
    sieve = RecordFilter(origin, len(whole))
    sieve.leave_out(missing, "", why)
    return replace(table, sieve=sieve, x=x, y=y, column=column)


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
    first = next((c for c in cells if c is not None), 0)
    kinds = (Sequence, np.ndarray, Tensor)
    array = isinstance(first, kinds) and not isinstance(first, str | bytes)
    return array or hasattr(first, "getbands") or _is_stored(first)


def _is_stored(cell: Any) -> bool:
    return isinstance(cell, Mapping) and {*cast(Mapping[str, Any], cell)} == {"bytes", "path"}


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
    named = data
    while isinstance(named, Subset) and not hasattr(named, "classes"):
        named = named.dataset
    titles = getattr(named, "classes", None)
    x = _together([np.asarray(_array(item[0])) for item in items], "x")
    y = _together([np.asarray(item[1]) for item in items], "y")
    numbered = isinstance(titles, Sequence) and y.ndim == 1 and y.dtype.kind in "iu"
    return x, y, [str(t).strip() for t in cast(Sequence[Any], titles)] if numbered else None


def _is_pair(item: Any, shape: tuple[int, ...] | None) -> bool:
    two = isinstance(item, Sequence) and len(cast(Sequence[Any], item)) == 2
    return two and (shape is None or _shape(item) != shape)


def _shape(thing: Any) -> tuple[int, ...] | None:
    try:
        return tuple(np.shape(thing))
    except ValueError:
        return None


def check_together(data: Any) -> None:
    """Raise DataError if data are several sites' tables, pairs or files, or rows, not one table."""
    named = isinstance(data, Mapping)
    parts: list[Any] = [*data.values()] if named else [*data] if type(data) in (list, tuple) else []
    if type(data) is tuple and not all(isinstance(one, Mapping | tuple) for one in parts):
        return  # records and their labels
    if not (parts and all(map(_is_sites, parts))):
        return
    each = "data.items()" if named else "enumerate(data)"
    raise DataError(
        f"data is a {type(data).__name__} of {count_noun(len(parts), 'part')}: expected the "
        "records of all sites as one table, with a column that says whose each record is. Write "
        f"data = pandas.concat([pandas.DataFrame(one).assign(site=name) for name, one in {each}]) "
        'and site = "site", of files with pandas.read_csv(one); of arrays fedpact.from_arrays(x, '
        "y, site=...), with the site of each record; if each dict is one record, data = "
        "pandas.DataFrame(data)"
    )


def _is_sites(one: Any) -> bool:
    """Whether a part of data is by itself a table, a file, or several records and their labels."""
    if isinstance(one, str | Path):
        return Path(one).suffix.lower() in SUFFIXES
    if isinstance(one, tuple):
        first = [shape[0] for each in one if (shape := _shape(each))]
        return len(one) == len(first) == 2 and first[0] == first[1]
    one = one[0] if isinstance(one, list) and one else one
    known = Mapping, Items, DataLoader
    return isinstance(one, known) or hasattr(one, "columns") or hasattr(one, "column_names")


def columns_of(data: Any) -> Columns | None:
    """Return a table's columns; None if it is not a table."""
    named = getattr(data, "column_names", None)
    if named is None:
        named = data.keys() if isinstance(data, Mapping) else getattr(data, "columns", None)
    if named is None or isinstance(data, type):
        return None
    if isinstance(named, Mapping):
        parts = ", ".join(map(str, named))
        raise DataError(
            f"{describe_value(data)} has the parts {parts}: give one of them, or all as one table"
        )
    keys = list(named)
    if len({str(key) for key in keys}) < len(keys):
        raise DataError(
            f"{describe_value(data)} has the columns {', '.join(map(str, keys))}: name each once"
        )
    cells = data if isinstance(data, Mapping) else {}
    if odd := [
        k for k in cells if isinstance(cells[k], str | bytes) or not hasattr(cells[k], "__iter__")
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
    told: Mapping[Any, Any] = kinds if isinstance(kinds, Mapping) else {}
    found = {str(k): cells_of(whole[k], getattr(told.get(k), "dtype", None)) for k in keys}
    if len({len(cells) for cells in found.values()}) > 1:
        lengths = ", ".join(f"{name} {len(cells)}" for name, cells in found.items())
        raise DataError(
            f"{describe_value(data)} has columns of lengths {lengths}: expected equal ones"
        )
    titles = {
        str(name): [*map(str, kind.names)]
        for name, kind in told.items()
        if getattr(kind, "names", None)
    }
    return Columns(found, index=index_of(data), titles=titles)


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
        if getattr(cell, "mode", "") in ("1", "P"):
            # Whose numbers are truth values, or places in a palette.
            cell = cell.convert("L" if cell.mode == "1" else "RGB")
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
    if len(shapes) == 1:
        return np.stack(records)
    raise DataError(
        f"{what}: its records have {len(shapes)} shapes, such as "
        f"{', '.join(map(str, sorted(shapes)[:3]))}: expected one; resize images, pad or cut "
        "lists; those of tokens are padded in a column called input_ids"
    )
