"""Records that a finished run's model is asked about, read as the run's own were."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fedpact.data.cells import Cells
from fedpact.data.dataset import Dataset
from fedpact.data.datasets import with_columns
from fedpact.data.form import RecordForm
from fedpact.data.given import array_of, labels_of
from fedpact.data.given.parts import (
    Parts,
    arrays_in,
    choose_columns,
    holds_arrays,
    labels_in,
    parts_of,
)
from fedpact.data.given.targets import targets_of
from fedpact.data.own import ambiguous, numbers_of_array, numbers_of_table
from fedpact.data.sieve import RecordFilter
from fedpact.data.tables import Table, read_columns, read_npz
from fedpact.errors import DataError
from fedpact.features.extract import MadeBy
from fedpact.features.stage import FeatureStage
from fedpact.files import parse_errors
from fedpact.folder import Folder
from fedpact.plan import Plan

FORM: Final = "records.json"
_LABEL: Final = "\0label"


@dataclass(frozen=True)
class RecordedForm:
    """The public form of a record as it is given: shape, "float32" or "int64", the labels' names.

    features: a table's columns in their order, () where nobody knows them or there are none.
    made_by: what makes the features that the model is given; None before `by`.
    """

    shape: tuple[int, ...]
    values: str
    classes: tuple[str, ...]
    features: tuple[str, ...] = ()
    made_by: MadeBy | None = None

    @property
    def example(self) -> Tensor:
        """A record of zeros."""
        return torch.zeros(self.shape, dtype=getattr(torch, self.values))

    def by(self, stage: FeatureStage) -> "RecordedForm":
        """Return it with what makes the records' features."""
        return replace(self, made_by=stage.made_by(self.example))

    def write(self, folder: Folder) -> None:
        """Write it into a run's folder."""
        folder.write_json(FORM, asdict(self))

    @staticmethod
    def read(folder: Path) -> "RecordedForm":
        """Read it from a run's folder. Raises DataError: it has none."""
        if not (folder / FORM).exists():
            raise DataError(
                f"{folder} has no {FORM}, which says what a record is: the run has not ended; "
                f"`fedpact resume {quote(str(folder))}` ends it, and writes that"
            )
        raw = Folder(folder).read_json(FORM)
        with parse_errors(folder / FORM, "put it back, or run the plan again in another folder"):
            shape, classes, features = (tuple(raw[key]) for key in ("shape", "classes", "features"))
            of = raw["made_by"]
            made_by = None if of is None else MadeBy(of["source"], tuple(of["answer"]))
            return RecordedForm(shape, raw["values"], classes, features, made_by)


@dataclass(frozen=True, eq=False)
class PredictionInputs:
    """Records x [n, *shape], and their labels as they were given, None for none.

    sieve: who of them is used. features: the columns of a table. form, classes: what labels may be.
    """

    x: Tensor
    sieve: RecordFilter
    features: tuple[str, ...]
    labels: Sequence[Any] | np.ndarray | None
    form: RecordForm
    classes: tuple[str, ...]

    def given(self, labels: Any) -> "PredictionInputs":
        """Return it with other labels: the classes' names or numbers, or arrays, as of arrays.

        A number whose text names another class is that one where the records are a table's.
        """
        named = self.form.labels == "names" and ambiguous(self.classes)
        array = labels_of("labels", "y", labels, self.form.target.kind, self.x.ndim)
        form = self.form.model_copy(update={"labels": "names" if named else None})
        return replace(self, labels=array, form=form)

    def targets(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the labels as they are trained on, and which of them fit, [n].

        column: what their errors are told of. Raises DataError: there are none, or not one each.
        """
        if self.labels is None:
            raise DataError(
                f"{self.sieve.origin}: there are no labels; give them in the column that the run's "
                "had, in the array y of an .npz file, or as evaluate(records, labels)"
            )
        if len(self.labels) != len(self.x):
            raise DataError(
                f"there are {len(self.labels)} labels for {len(self.x)} records: give one each"
            )
        sieve = RecordFilter("labels", len(self.x), self.sieve.first)
        y = targets_of(self.labels, self.classes, self.form, column, sieve)
        sieve.warn(values=True)
        return y, sieve.good


def read_prediction_inputs(records: Any, plan: Plan, own: RecordedForm) -> PredictionInputs:
    """Read records as those of a plan's run were. own: their form in that run.

    records: whatever a run takes (see data.given.handed), with labels or without; a .csv, .parquet
    or .npz file; an array [n, *shape]. Raises DataError: they are of another form.
    """
    if isinstance(records, Dataset):
        return _of_dataset(records, plan, own)
    if not isinstance(records, str | Path):
        return _of_parts("records", parts_of(records, own.shape), {}, plan, own)
    path = Path(records)
    if path.suffix.lower() == ".npz":
        arrays = read_npz(path, labelled=False)
        return _of_parts(str(path), Parts(x=arrays["x"], y=arrays.get("y")), {}, plan, own)
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise DataError(
            f"records is {str(records)!r}: expected the path of a .csv, .parquet or .npz file, or "
            "records from Python, as a table, arrays, or a data set of fedpact.from_arrays"
        )
    columns, broken = read_columns(path)
    parts = Parts(columns={name: list(cells) for name, cells in columns.items()})
    return _of_parts(str(path), parts, broken, plan, own)


def _of_parts(
    origin: str, parts: Parts, broken: Mapping[int, str], plan: Plan, own: RecordedForm
) -> PredictionInputs:
    form, columns = plan.form, parts.columns
    if columns is None:
        y = parts.y
        if y is not None:
            y = labels_of(origin, "y", y, form.target.kind, 1 + len(own.shape))
        if parts.titles_of("") and form.labels is None:
            form = form.model_copy(update={"labels": "numbers"})
        if own.features:
            # Beside a table's run they are the columns' numbers, in the order of the run's.
            form = form.by_place(own.features)
        return _of_array(origin, parts.x, y, form, own)
    labels = parts.named(str(plan.label)) if plan.label in columns else None
    names = form.model_copy(update={"labels": form.labels or "names"})
    if not own.features:
        chosen = choose_columns(columns, form, (plan.label, plan.site, plan.person))
        if len(chosen) == 1 and holds_arrays(columns.get(chosen[0])):
            y = None if labels is None else labels_in(labels, form)
            names = form.model_copy(update={"labels": "names"})
            return _of_array(origin, arrays_in(columns[chosen[0]], chosen[0]), y, names, own)
    table = _table(origin, columns, broken, plan, own)
    sieve = RecordFilter(origin, table.count, 1)
    x = torch.from_numpy(numbers_of_table(table, plan.records.shared(), own.values, sieve))
    return PredictionInputs(x, sieve, table.features, labels, names, own.classes)


def _of_array(
    origin: str, given: Any, y: Any, form: RecordForm, own: RecordedForm
) -> PredictionInputs:
    array = array_of(origin, "x", given)
    if array.shape[1:] != own.shape:
        shape = ", ".join(map(str, own.shape))
        raise DataError(
            f"{origin}: x has shape {array.shape}: expected [n, {shape}], as the run's records "
            "have; bring them into that form"
        )
    sieve = RecordFilter(origin, len(array), 0)
    x = torch.from_numpy(numbers_of_array(array, form, own.values, sieve))
    return PredictionInputs(x, sieve, own.features, y, form, own.classes)


def _of_dataset(data: Dataset, plan: Plan, own: RecordedForm) -> PredictionInputs:
    data = with_columns(data, plan.records)
    if own.features and data.features:
        # A file that it was read from may have another order.
        data = with_columns(data, RecordForm(features=[*own.features]))
    if data.classes != own.classes:
        raise DataError(
            f"data set {data.name} has the classes {', '.join(data.classes)}: the run's are "
            f"{', '.join(own.classes)}; make it with classes = the run's"
        )
    form = plan.form.in_arrays(data.features)
    return _of_array(data.name, data.x, data.y.numpy(), form, own)


def _table(
    origin: str,
    columns: Mapping[str, Cells],
    broken: Mapping[int, str],
    plan: Plan,
    own: RecordedForm,
) -> Table:
    if len(own.shape) != 1:
        raise DataError(
            f"{origin} is a table of the columns {', '.join(map(str, columns))}: expected the "
            f"run's records of shape {own.shape}: hand in an .npz file with them as its array x"
        )
    names = own.features
    if not names:
        roles = {plan.label, plan.site, plan.person}
        names = tuple(name for name in columns if name not in roles)
    missing = [name for name in names if name not in columns]
    if missing or (len(names),) != own.shape:
        raise DataError(
            f"{origin} has the columns {', '.join(map(str, columns))}: expected the run's "
            f"{own.shape[0]} features {', '.join(own.features) or 'as columns of numbers'}"
            + (f"; it lacks {', '.join(missing)}" if missing else "")
        )
    rows = len(columns[names[0]])
    used: dict[str, Cells] = {name: columns[name] for name in names}
    return Table({**used, _LABEL: [""] * rows}, _LABEL, None, broken)
