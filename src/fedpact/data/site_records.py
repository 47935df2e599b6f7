"""The records of a deployed site: nothing that leaves it may reveal that a record was faulty.

They are read from the site's file and checked against what the federation declares. Faults of the
file as a whole, such as its columns or its arrays' shapes, raise; those of records never do.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from fedpact.common.errors import DataError
from fedpact.data import targets
from fedpact.data.cells import SUFFIXES, read_columns, read_npz
from fedpact.data.columns import FileColumn, declared_columns
from fedpact.data.dataset import Dataset
from fedpact.data.inputs import of_arrays, table_of
from fedpact.data.load import of_file
from fedpact.data.schema import RecordForm
from fedpact.data.sieve import RecordFilter
from fedpact.data.tables import Table, read_numbers
from fedpact.data.tokens import is_tokens

_logger = logging.getLogger("fedpact")

_SAME: Final[Mapping[str, FileColumn]] = MappingProxyType({})


def load_site(
    path: Path,
    label: str | None,
    classes: Sequence[str],
    shape: tuple[int, ...],
    values: str,
    form: RecordForm,
    person: str | None = None,
    features: tuple[str, ...] = (),
    sources: Mapping[str, FileColumn] = _SAME,
) -> tuple[Dataset, RecordFilter]:
    """Return the records x [n, *shape], y [n] of a site's own file, and which are left out.

    path: a .csv, .parquet or .npz file.

    features: the columns of a table in the order of the numbers of a record, which is the same at
    all sites, in whatever order a file has them; an .npz file has them in this one. A table's other
    columns count for nothing. sources: what columns of a table are called here; see `site_table`.
    person: the column, or in an .npz the array, that names each record's person; None: not used.
    classes, shape, values ("float32" or "int64"), form: as the federation declares them. A record
    that does not fit is left out, whatever is wrong with it, and so may all of them be: n >= 0. It
    is named in the log of this machine, without its values, and nowhere else.
    Raises DataError: the file as a whole is of another form, or not there.
    """
    suffix = path.suffix.lower()
    if suffix in (".csv", ".parquet"):
        if values == "int64" and len(shape) == 2:
            # Tokens, of one length, however long the longest of them is.
            form = form.model_copy(update={"length": shape[-1]})
        table = site_table(path, label, form, person, features, sources, shape)
    else:
        if sources:
            raise DataError(
                f"data file {path} is no table: [columns] of site.toml names {', '.join(sources)}, "
                "and arrays have no columns by name; leave [columns] out, or write the records as "
                ".csv or .parquet"
            )
        if features:
            # A table's numbers, in the order that the federation has.
            form = form.by_place(features)
        elif form.drop or form.features is not None:
            raise DataError(
                f"data file {path} is no table: records.features = {form.features} and "
                f"records.drop = {form.drop} of federation.toml expect columns by name; leave "
                "columns out of the sites' arrays, and agree on a federation.toml without them"
            )
        table = _site_arrays(path, label, classes, form, person)
    _check_form(path, table, shape, form.target.kind)
    sieve = table.filter()
    x = read_numbers(table, form, values, sieve)
    table = targets.token_labels(table, x, form, sieve)
    y = targets.read_labels(table, classes, form, sieve)
    whose = None if person is None else targets.persons_of(table.person, sieve, person)
    good, rows = sieve.good, sieve.good.nonzero()[0]
    sieve.warn(values=False)
    if not good.any():
        _logger.warning("%s holds no record that is used: the site sends noise alone", path)
    found = Dataset(
        str(path),
        torch.from_numpy(x[good]),
        torch.from_numpy(y[good]),
        tuple(classes),
        features=table.features or features,
        rows=torch.from_numpy(rows + sieve.first),
        person=None if whose is None else tuple(whose[i] for i in rows.tolist()),
    )
    return found, sieve


def site_table(
    path: Path,
    label: str | None,
    form: RecordForm,
    person: str | None,
    features: Sequence[str],
    sources: Mapping[str, FileColumn] = _SAME,
    shape: tuple[int, ...] | None = None,
) -> Table:
    """Return the declared columns of a site's .csv or .parquet file, by their declared names.

    sources: of which columns of the file, in which units and words, they are made; without one a
    column is the file's of the same name. label, person: among the declared names. shape: of a
    record, where each is an array or an image in one column.
    Raises DataError: a column is missing, or the order of several is not declared.
    """
    origin = f"data file {path}"
    if label is None or not features:
        table = of_file(path, label, None, person, form, shape)
        in_order = len(table.features) < 2 or is_tokens(table.features)
        if sources or not in_order:
            raise DataError(
                f"{origin} has the columns {', '.join(table.features)}, and federation.toml does "
                "not say in which order they make a record, so sites may differ: add features = "
                '["...", ...], all of them, to the federation.toml of every party, in the order '
                "that the files have had so far"
            )
        return table
    wanted = [*features, label, *([] if person is None else [person])]
    if len(set(wanted)) < len(wanted):
        raise DataError(
            f"{origin}: label = {label!r} of site.toml and person = {person!r} of federation.toml "
            f"beside features = {list(features)}: expected columns that are no features"
        )
    columns, broken = read_columns(path)
    found = declared_columns(origin, columns, wanted, sources)
    return table_of(origin, found, label, None, person, broken, RecordForm(features=[*features]))


def _site_arrays(
    path: Path,
    label: str | None,
    classes: Sequence[str],
    form: RecordForm,
    person: str | None,
) -> Table:
    if path.suffix.lower() != ".npz" or label is not None:
        raise DataError(
            f"records is {str(path)!r} with label = {label!r}: expected a file ending in "
            f"{', '.join(SUFFIXES)}, and a label's column for .csv and .parquet alone"
        )
    if form.labels is None and targets.ambiguous(classes):
        raise DataError(
            f"data file {path}: the classes {', '.join(classes)} are named by other classes' "
            'numbers, so a label in an array may mean two: set labels = "names" or "numbers" in '
            "[records] of federation.toml"
        )
    arrays = read_npz(path)
    if person is not None and person not in arrays:
        raise DataError(
            f"data file {path} holds the arrays {', '.join(sorted(arrays))}: expected {person!r} "
            "too, which federation.toml names as what says whose a record is"
        )
    whose = None if person is None else arrays[person]
    return of_arrays(str(path), arrays["x"], arrays["y"], form, person=whose, least=0)


def _check_form(path: Path, table: Table, shape: tuple[int, ...], kind: str) -> None:
    if isinstance(table.x, np.ndarray):
        found = table.x.shape[1:]
    else:
        tokens = is_tokens(table.features)
        found = (len(table.features), *(shape[-1:] if tokens else ()))
    if found != shape:
        raise DataError(
            f"a record of {path} has shape {found}: federation.toml has {shape}; bring the file "
            "into that form"
        )
    targets.check_places(str(path), kind, table.y, shape)
