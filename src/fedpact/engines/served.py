"""A run's model in use: records go the way to it that they went in training.

They are read as the plan declares, scaled and turned into features by the same stage, and scaled by
what the sites released where they did. What is not fit to be used is answered with nothing.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedpact.data.given import array_of
from fedpact.data.given.handed import columns_of, named_labels
from fedpact.data.given.targets import targets_of, unscaled
from fedpact.data.own import numbers_of_array, numbers_of_table
from fedpact.data.sieve import Sieve
from fedpact.data.tables import Cells, Table, read_columns, read_npz
from fedpact.engines.workshop import Workshop
from fedpact.errors import DataError, InputError
from fedpact.folder import Folder, folder_of_run
from fedpact.losses import Loss
from fedpact.messages import SiteScore
from fedpact.metrics import evaluate
from fedpact.own.named import name_of
from fedpact.plan import Plan
from fedpact.privacy.columns import scaled_by

FORM: Final = "records.json"
_LABEL: Final = "\0label"
_BATCH: Final = 1024


@dataclass(frozen=True)
class GivenForm:
    """The public form of a record as it is given: shape, "float32" or "int64", the labels' names.

    features: a table's columns in their order, () where nobody knows them or there are none.
    """

    shape: tuple[int, ...]
    values: str
    classes: tuple[str, ...]
    features: tuple[str, ...] = ()

    def write(self, folder: Folder) -> None:
        """Write it into a run's folder."""
        folder.write_json(FORM, asdict(self))

    @staticmethod
    def read(folder: Path) -> "GivenForm":
        """Read it from a run's folder. Raises DataError: it has none."""
        if not (folder / FORM).exists():
            raise DataError(
                f"{folder} has no {FORM}, which says what a record is: the run has not ended, or "
                f"an earlier version made it; `fedpact resume {folder}` ends it, and writes that"
            )
        raw = Folder(folder).read_json(FORM)
        shape, classes, features = (tuple(raw[key]) for key in ("shape", "classes", "features"))
        return GivenForm(shape, raw["values"], classes, features)


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model says of records, one a row, in their order.

    labels: the likeliest class's name [n], "" where the record is not used; of several labels those
    that are likelier than not, with blanks between; of pixels an array of names for each record; of
    a number its value, in its units, NaN where not used. probabilities [n, K, ...], NaN there; of a
    number [n, 0]. used: bool [n]. classes: the names, in the order of the columns.
    """

    labels: np.ndarray
    probabilities: np.ndarray
    used: np.ndarray
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Served:
    """A run's final model with all that stands before it."""

    plan: Plan
    form: GivenForm
    model: nn.Module
    at: Path
    released: Mapping[str, Any]

    @staticmethod
    def of(folder: Path, own: Any = None) -> "Served":
        """Return the model of a run's folder, or of a deployment's party, by its directory.

        own: the module, class or factory, where it was handed in from Python.
        Raises DataError: no run that has ended, or a damaged one. ModelError: the model was handed
        in, and is not here.
        """
        folder = folder_of_run(folder)
        raw = Folder(folder).read_json("plan.json")
        plan = Plan.parse(raw)
        if own is not None:
            # Its weights are the run's, so whatever it brings decides nothing.
            plan = plan.model_copy(update={"model": name_of(own)})
        form = GivenForm.read(folder)
        beside = folder.absolute().parent
        if plan.local.head and not (beside / "site.toml").exists():
            raise DataError(
                f"{folder}: local.head is {plan.local.head}: each site's model has a head of its "
                "own, which no run's folder holds, so there is no model here to ask"
            )
        # A deployment's weights lie beside its plan; a simulation's where it was begun.
        at = beside if (beside / "federation.toml").exists() else Path()
        columns = folder / "columns.json"
        released = Folder(folder).read_json(columns.name) if columns.exists() else {}
        example = torch.zeros(form.shape, dtype=getattr(torch, form.values))
        made = plan.stage(at).example(example)
        model = Workshop(plan, made, len(form.classes)).module()
        path = folder / "model.safetensors"
        try:
            model.load_state_dict(load_file(path))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise DataError(
                f"{path} cannot be read as the plan's model ({type(error).__name__}: {error}): "
                "restore it, or run the plan again"
            ) from error
        return Served(plan, form, model.eval(), at, released)

    def staged(self, records: Any) -> tuple[Tensor, np.ndarray]:
        """Return what the model is given of records, [m, ...], and which of the n these are.

        records: a .csv, .parquet or .npz file, a table (a mapping or a DataFrame of columns), or an
        array [n, *shape]; labels are passed over. Raises DataError: they are of another form.
        """
        x, sieve, features = self._read(records)
        stage, example = self._stage, torch.zeros(self.form.shape, dtype=x.dtype)
        staged = stage(x, example, sieve.origin, None, features)
        made, good = staged.x, torch.from_numpy(sieve.good) & staged.good
        if self.released:
            names = [self.released[name] for name in self.plan.records.released]
            by = torch.tensor([[n[key] for n in names] for key in ("mean", "deviation")])
            made = scaled_by(made, stage.released(example, features), by.flatten())
        sieve.warn(values=True)
        return made[good], good.numpy()

    def predict(self, records: Any) -> Predictions:
        """Return what the model says of records; see `staged` for what they may be."""
        x, used = self.staged(records)
        target, classes = self.plan.task.target, self.form.classes
        with torch.no_grad():
            # Of no record at all, too: it tells the outputs' form.
            parts = (
                [self.model(x.new_zeros(0, *x.shape[1:])).double()]
                if not len(x)
                else [self.model(part).double() for part in x.split(_BATCH)]
            )
        outputs = torch.cat(parts)
        if target.kind == "number":
            values = np.full(len(used), np.nan)
            values[used] = unscaled(outputs.reshape(-1).numpy(), target)
            return Predictions(values, np.empty((len(used), 0)), used, classes)
        found = np.full((len(used), *outputs.shape[1:]), np.nan)
        several = target.kind == "several"
        found[used] = (outputs.sigmoid() if several else outputs.softmax(1)).numpy()
        if several:
            labels = [
                " ".join(c for c, p in zip(classes, row, strict=True) if p > 0.5) for row in found
            ]
            return Predictions(np.array(labels, str), found, used, classes)
        names = np.array([*classes, ""], str)
        at = used.reshape(-1, *(1 for _ in found.shape[2:]))
        best = np.where(at, np.nan_to_num(found, nan=-1.0).argmax(1), len(names) - 1)
        return Predictions(names[best], found, used, classes)

    def evaluate(self, records: Any, labels: Any = None) -> SiteScore:
        """Return accuracy, mean loss and number of records that are used.

        labels: the classes' names or numbers [n]; None where a file or a table has them, in the
        plan's label column or in the array y. Raises DataError: none, or none that is used.
        """
        given = self._labels(records) if labels is None else labels
        x, used = self.staged(records)
        column = self.plan.label or "y"
        sieve = Sieve("labels", len(used), 0)
        if len(given) != len(used):
            raise DataError(f"there are {len(given)} labels for {len(used)} records: give one each")
        how = self.plan.records.labels or ("names" if self._is_table(records) else None)
        cells = given if self._is_table(records) else array_of("labels", "y", given)
        form = self.plan.form.model_copy(update={"labels": how})
        y = targets_of(cells, self.form.classes, form, column, sieve)
        sieve.warn(values=True)
        both = used & sieve.good
        if not both.any():
            raise DataError("no record with a label is used: there is nothing to evaluate")
        return evaluate(self.model, self._loss, x[sieve.good[used]], torch.from_numpy(y[both]))

    def export(self, path: Path) -> None:
        """Write the model alone for use without fedpact: .pt as TorchScript, .onnx as ONNX.

        It takes what `staged` returns, [n, ...], for any n, and returns scores [n, K].
        Raises InputError: another ending, or ONNX without the packages that torch needs for it.
        """
        example = self._stage.example(torch.zeros(self.form.shape, dtype=self._dtype))
        batch = (example.expand(2, *example.shape).clone(),)
        if path.suffix == ".onnx":
            try:
                sizes = ({0: torch.export.Dim("n")},)
                # One file: weights lie in it, not beside it.
                torch.onnx.export(
                    self.model,
                    batch,
                    str(path),
                    dynamic_shapes=sizes,
                    external_data=False,
                    verbose=False,
                )
            except ImportError as error:
                raise InputError(
                    f"{path}: torch writes ONNX with packages that are not installed ({error}): "
                    "pip install 'fedpact[onnx]', or name a .pt file, which needs none"
                ) from error
        elif path.suffix == ".pt":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.jit.save(torch.jit.trace(self.model, batch), str(path))
        else:
            raise InputError(f"{path}: expected a name that ends in .pt (TorchScript) or .onnx")

    @property
    def _loss(self) -> Loss:
        return self.plan.task.per_record(len(self.form.classes))

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.form.values)

    @property
    def _stage(self) -> Any:
        return self.plan.stage(self.at)

    def _read(self, records: Any) -> tuple[Tensor, Sieve, tuple[str, ...]]:
        form, own = self.plan.records.shared(), self.form
        if self._is_table(records):
            origin, table = self._table(records)
            sieve = Sieve(origin, table.count, 1)
            x = numbers_of_table(table, form, own.values, sieve)
            return torch.from_numpy(x), sieve, table.features
        origin, given = "records", records
        if isinstance(records, str | Path):
            origin, given = str(records), read_npz(Path(records), labelled=False)["x"]
        array = array_of(origin, "x", given)
        if array.shape[1:] != own.shape:
            shape = ", ".join(map(str, own.shape))
            raise DataError(
                f"{origin}: x has shape {array.shape}: expected [n, {shape}], as the run's records "
                "have; bring them into that form"
            )
        sieve = Sieve(origin, len(array), 0)
        return (
            torch.from_numpy(numbers_of_array(array, form, own.values, sieve)),
            sieve,
            own.features,
        )

    def _table(self, records: Any) -> tuple[str, Table]:
        origin, columns, broken = _columns(records)
        names = self.form.features
        if not names:
            roles = {self.plan.label, self.plan.site, self.plan.person}
            names = tuple(name for name in columns if name not in roles)
        missing = [name for name in names if name not in columns]
        if missing or (len(names),) != self.form.shape:
            raise DataError(
                f"{origin} has the columns {', '.join(map(str, columns))}: expected the run's "
                f"{self.form.shape[0]} features {', '.join(self.form.features)}"
                + (f"; it lacks {', '.join(missing)}" if missing else "")
            )
        rows = len(columns[names[0]])
        used: dict[str, Cells] = {name: columns[name] for name in names}
        return origin, Table({**used, _LABEL: [""] * rows}, _LABEL, None, broken)

    def _labels(self, records: Any) -> Sequence[Any]:
        if self._is_table(records):
            origin, columns, _ = _columns(records)
            if self.plan.label in columns:
                return named_labels(records, self.plan.label, columns)
            raise DataError(f"{origin} has no column {self.plan.label!r}: give the labels")
        if isinstance(records, str | Path):
            return read_npz(Path(records))["y"].tolist()
        raise DataError("labels is None: give the labels of an array's records")

    @staticmethod
    def _is_table(records: Any) -> bool:
        if isinstance(records, str | Path):
            return Path(records).suffix.lower() in (".csv", ".parquet")
        named = (hasattr(records, key) for key in ("columns", "column_names"))
        return isinstance(records, Mapping) or any(named)


def _columns(records: Any) -> tuple[str, Mapping[str, Cells], Mapping[int, str]]:
    if isinstance(records, str | Path):
        return str(records), *read_columns(Path(records))
    return "table", columns_of(records) or {}, {}
