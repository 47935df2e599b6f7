"""Predictions and evaluations of a finished run's model on new records.

Records are read, scaled and turned into features exactly as in training. A record that cannot be
used gets an empty prediction.
"""

import logging
import math
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, Final

import numpy as np
import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedpact.common.errors import DataError, InputError, ModelError, nearest
from fedpact.common.files import parse_errors
from fedpact.common.format import count_noun, format_metric, list_some
from fedpact.common.messages import SiteScore
from fedpact.common.params import FlatModel
from fedpact.common.run_folder import COLUMNS, Folder, folder_of_run, read_scales
from fedpact.common.user_code import model_again
from fedpact.data.cells import SUFFIXES, Cells
from fedpact.data.columns import FileColumn, declared_columns
from fedpact.data.dataset import Dataset, RecordFilter, with_columns
from fedpact.data.features.extract import FeatureStage, same_answer
from fedpact.data.inputs import check_shape, read_declared
from fedpact.data.schema import RecordForm
from fedpact.data.tables import Roles, Table, labels_of, of_arrays, read_numbers
from fedpact.data.targets import ambiguous, read_labels, token_labels, unscale
from fedpact.data.tokens import is_tokens
from fedpact.evaluation.metrics import evaluate, find_display
from fedpact.plan import Plan
from fedpact.privacy.column_scales import scale_columns
from fedpact.simulation.workshop import TrainingSetup

FORM: Final = "records.json"


@dataclass(frozen=True)
class RecordedForm:
    """The public form of a raw record: shape, "float32" or "int64", the labels' names.

    features: a table's columns in order, () if unknown or none. made_by: identifies the code and
    weights that compute the model's features, see FeatureStage.answer; None before `by`. answers:
    those of the final model; see TrainingSetup.answers; None if unknown.
    """

    shape: tuple[int, ...]
    values: str
    classes: tuple[str, ...]
    features: tuple[str, ...] = ()
    made_by: tuple[float, ...] | None = None
    answers: tuple[float, ...] | None = None

    @property
    def example(self) -> Tensor:
        """A record of zeros."""
        return torch.zeros(self.shape, dtype=getattr(torch, self.values))

    def by(self, stage: FeatureStage, setup: TrainingSetup, w: Tensor) -> "RecordedForm":
        """Return the form with what identifies features, and the model with its weights w [d]."""
        module = setup.module()
        FlatModel(module).load(w)
        return replace(self, made_by=stage.answer(self.example), answers=setup.answers(module))

    def write(self, folder: Folder) -> None:
        """Write it into a run's folder."""
        folder.write_json(FORM, asdict(self))

    @staticmethod
    def read(folder: Path) -> "RecordedForm":
        """Read it from a run's folder. Raises DataError: it has none."""
        if not (folder / FORM).exists():
            raise DataError(
                f"{folder} has no {FORM}, which describes a record: the run has not ended; "
                f"`fedpact resume {quote(str(folder))}` finishes it, and writes the file"
            )
        raw = Folder(folder).read_json(FORM)
        with parse_errors(folder / FORM, "put it back, or run the plan again in another folder"):
            return TypeAdapter(RecordedForm).validate_python(raw)


def _read_targets(
    table: Table, x: Tensor, classes: Sequence[str], form: RecordForm
) -> tuple[np.ndarray, np.ndarray]:
    """Return a table's labels in training's form, and which of them are valid, [n].

    x: its records [n, ...]. Raises DataError: labels are missing, or not one for each record.
    """
    count = table.sieve.count
    if table.y is None:
        raise DataError(
            f"{table.sieve.origin}: there are no labels; give them in the label column of the run, "
            "in the array y of an .npz file, or as evaluate(records, labels)"
        )
    if len(table.y) != count:
        raise DataError(f"there are {len(table.y)} labels for {count} records: give one each")
    sieve = RecordFilter("labels", count, table.sieve.first)
    table = token_labels(replace(table, sieve=sieve), x.numpy(), form, classes)
    y = read_labels(table, classes, form)
    sieve.warn(values=True)
    return y, sieve.good


@dataclass(frozen=True)
class OwnColumns:
    """A deployed site's column mapping; see data.columns.

    label: the label's column; None: as in the plan.
    """

    label: str | None = None
    sources: Mapping[str, FileColumn] = field(default_factory=dict[str, FileColumn])

    @staticmethod
    def of(party: Path) -> "OwnColumns":
        """Read it from a site's directory; empty for a server. Raises DataError: damaged."""
        path = party / "site.toml"
        if not path.exists():
            return OwnColumns()
        with parse_errors(path, "mend it, as `fedpact deploy check` says"):
            raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
            named = raw.get("columns", {}).items()
            sources = {name: FileColumn.model_validate(one) for name, one in named}
            return OwnColumns(raw.get("label"), sources)

    def declared(
        self,
        features: Sequence[str],
        label: str | None,
        origin: str,
        columns: Mapping[str, Cells],
    ) -> dict[str, Cells]:
        """Return the site's columns together with the declared ones; the label may be missing.

        Raises DataError: a declared column, on which the model was trained, or its source is not
        there.
        """
        wanted = {
            name: one
            for name, one in self.sources.items()
            if name in features or (name == label and one.column in columns)
        }
        found = {**columns, **declared_columns(origin, columns, [*wanted], wanted)}
        if self.label is not None and self.label in columns and label and label not in found:
            found[label] = columns[self.label]
        lacking = [name for name in features if name not in found and not is_tokens(features)]
        if lacking:
            raise DataError(
                f"{origin} has no column {', '.join(lacking)}, on which the model was trained: it "
                f"has {list_some(columns)}; add the missing columns, or rename those that hold "
                f"them{nearest(lacking[0], columns)}"
            )
        return found


_BATCH: Final = 1024
_SHOWN: Final = 20


@dataclass(frozen=True, eq=False, repr=False)
class Predictions:
    """A model's predictions, one row per record.

    labels: the most probable class's name [n], "" if the record is not used or its probabilities
    are NaN; for multiple labels, those with a probability above 1/2, separated by blanks; for
    pixels, an array of names per record; for regression, the value in its units, NaN if not used.
    probabilities [n, K, ...], NaN if not used; for regression [n, 0]. classes: the names of their
    columns. used: bool [n].
    """

    labels: np.ndarray
    probabilities: np.ndarray
    used: np.ndarray
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        count, used = count_noun(len(self), "record"), int(self.used.sum())
        told = f"of {list_some(self.classes, 5)}; " if self.classes else ""
        return f"Predictions({count}, {used} used; {told}.labels, .probabilities)"


@dataclass(frozen=True)
class Evaluated(SiteScore):
    """A model's scores on records. metrics: those of the plan's task, by name."""

    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    def __str__(self) -> str:
        """Return it as a sentence: accuracy, if there is any, mean loss, and the metrics."""
        found = [] if math.isnan(self.accuracy) else [f"accuracy {self.accuracy:.2%}"]
        found.append(f"mean loss {self.loss:.4g}")
        for name, value in self.metrics.items():
            about = find_display(name)
            found.append(f"{about.label} {format_metric(about.form, value)}")
        return ", ".join(found)


_log = logging.getLogger(__name__)


def _fill(model: nn.Module, path: Path) -> None:
    """Load a run's weights. Raises DataError: they cannot be read, or are not the model's."""
    try:
        model.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise DataError(
            f"{path} cannot be read as the plan's model ({type(error).__name__}: {error}): "
            "restore it, or run the plan again"
        ) from error


@dataclass(frozen=True, eq=False)
class Predictor:
    """A run's model with its preprocessing."""

    plan: Plan
    form: RecordedForm
    model: nn.Module
    at: Path
    released: Mapping[str, Any]
    site: OwnColumns = OwnColumns()

    @staticmethod
    def of(folder: Path, own: Any = None, *, average: bool = False) -> "Predictor":
        """Return the model of a run's folder, or of a deployment's party, by its directory.

        own: the module, class or factory, if it was passed in from Python. average: use the average
        of models that the server kept instead of the last model.
        Raises DataError: no finished run, a damaged one, or no average. ModelError: the model was
        passed in from Python and is missing, or another one.
        """
        folder = folder_of_run(folder)
        raw = Folder(folder).read_json("plan.json")
        plan = Plan.parse(raw)
        if own is not None:
            # The run's weights are loaded below, so the object's own weights do not matter.
            plan = plan.model_copy(update={"model": model_again(own, plan.model)})
        form = RecordedForm.read(folder)
        beside = folder.absolute().parent
        if plan.head and not (beside / "site.toml").exists():
            raise DataError(
                f"{folder}: head is {plan.head}: each site's model has its own head, "
                "which a run's folder does not hold, so there is no whole model here"
            )
        # Weights of features are relative to a party's directory, or else to where a run starts.
        at = beside if (beside / "federation.toml").exists() else Path()
        names = plan.records.released
        released = read_scales(folder / COLUMNS, names) if names else {}
        stage = plan.stage(at)
        made_by = form.made_by
        if made_by is not None and not same_answer(stage.answer(form.example), made_by):
            raise ModelError(
                f"features.kind = {plan.features.kind!r} has other code or weights than when "
                f"{folder} was made, so its model would get other features: restore the file and "
                "its weights"
            )
        made = stage.example(form.example)
        setup = TrainingSetup(plan, made, len(form.classes))
        model = setup.module()
        _fill(model, folder / "model.safetensors")
        if not setup.answers_as(form.answers, model):
            raise ModelError(
                f"model {plan.model!r} answers otherwise than when {folder} was made: it has other "
                "code, or is another model of the same weights; restore its file, or pass the same "
                "model as then"
            )
        path = folder / "average.safetensors"
        if average and not path.exists():
            raise DataError(
                f"{folder} holds no average of models (its plan has server.average = "
                f"{plan.server.average!r}; in a deployment only the server has it): use the last "
                "model, without average"
            )
        if average:
            _fill(model, path)
        return Predictor(plan, form, model.eval(), at, released, OwnColumns.of(beside))

    def preprocess(self, records: Any) -> tuple[Tensor, np.ndarray]:
        """Return the model's inputs [m, ...], and which of the n records they are, bool [n].

        records: as a run accepts them; labels are ignored.
        Raises DataError: another form.
        """
        x, table, _ = self._read(records)
        return self._run_stage(x, table)

    def _read(self, records: Any) -> tuple[Tensor, Table, RecordForm]:
        """Read records as in the run: x [n, *shape], their table, and the form of its labels.

        records: anything that a run accepts (see data.inputs), with or without labels; a .csv,
        .parquet or .npz file; an array [n, *shape]. Raises DataError: another form.
        """
        plan, own, form = self.plan, self.form, self.plan.form
        if isinstance(records, Dataset):
            records = with_columns(records, plan.records)
            if own.features and records.features:
                # The file may have had another order of columns.
                records = with_columns(records, RecordForm(features=[*own.features]))
            if records.classes != own.classes:
                raise DataError(
                    f"data set {records.name} has the classes {', '.join(records.classes)}, but "
                    f"the run's are {', '.join(own.classes)}; create it with the run's classes"
                )
            table = of_arrays(records.name, records.x, records.y.numpy(), form)
            form = form.in_arrays(records.features)
        elif isinstance(records, str | Path) and Path(records).suffix.lower() not in SUFFIXES:
            raise DataError(
                f"records is {str(records)!r}: expected the path of a .csv, .parquet or .npz file, "
                "or records from Python, as a table, arrays, or a data set of fedpact.from_arrays"
            )
        else:
            roles = Roles(plan.label, plan.site, plan.person)
            asked = records, form, roles, own.shape, own.features
            convert = partial(self.site.declared, own.features, plan.label)
            table, form = read_declared(*asked, labelled=False, convert=convert)
        check_shape(table, own.shape, own.features, "the run")
        x = torch.from_numpy(read_numbers(table, form, own.values))
        return x, table, form

    def _run_stage(self, x: Tensor, table: Table) -> tuple[Tensor, np.ndarray]:
        sieve, features = table.sieve, self.form.features or table.features
        stage, example = self._stage, torch.zeros(self.form.shape, dtype=x.dtype)
        fits = torch.from_numpy(sieve.good)
        staged = stage(x, example, sieve.origin, None, features, ~fits)
        made, good = staged.x, fits & staged.good
        if self.released:
            names = [self.released[name] for name in self.plan.records.released]
            by = torch.tensor([[n[key] for n in names] for key in ("mean", "deviation")])
            made = scale_columns(made, stage.released(example, features), by.flatten())
        sieve.warn(values=True)
        return made[good], good.numpy()

    def predict(self, records: Any) -> Predictions:
        """Return the model's predictions; see `preprocess` for the records."""
        x, used = self.preprocess(records)
        target, classes = self.plan.task.target, self.form.classes
        try:
            outputs = self._answers(x)
        except Exception as error:
            x, used = self._take(x, used, error)
            outputs = self._answers(x)
        if target.kind == "number":
            values = np.full(len(used), np.nan)
            values[used] = unscale(outputs.reshape(-1).numpy(), target)
            return Predictions(values, np.empty((len(used), 0)), used, ())
        found = np.full((len(used), *outputs.shape[1:]), np.nan)
        several = target.kind == "several"
        found[used] = (outputs.sigmoid() if several else outputs.softmax(1)).numpy()
        if several:
            labels = [
                " ".join(c for c, p in zip(classes, row, strict=True) if p > 0.5) for row in found
            ]
            return Predictions(np.array(labels, str), found, used, classes)
        names = np.array([*classes, ""], str)
        best = np.where(np.isnan(found).any(1), len(names) - 1, found.argmax(1))
        return Predictions(names[best], found, used, classes)

    def _answers(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            # Also without any record, to learn the form of the outputs.
            parts = x.split(_BATCH) if len(x) else [x.new_zeros(0, *x.shape[1:])]
            return torch.cat([self.model(part).double() for part in parts])

    def _take(self, x: Tensor, used: np.ndarray, error: Exception) -> tuple[Tensor, np.ndarray]:
        """Return the records that the model takes one by one, and which of all they are, bool [n].

        x: the used ones. Raises `error`, that of all together, if it takes none of them, or each.
        """
        told = dict[int, Exception]()
        for place, one in enumerate(x):
            try:
                self._answers(one[None])
            except Exception as own:  # a model may raise anything
                told[place] = own
        if len(told) in (0, len(x)):
            raise error
        rows = used.nonzero()[0][[*told]]
        _log.warning(
            "the model fails on %d of %d records, which are not used: %s (%s)",
            *(len(told), len(used), ", ".join(str(row + 1) for row in rows[:_SHOWN])),
            next(iter(told.values())),
        )
        good = torch.ones(len(x), dtype=torch.bool)
        good[[*told]] = False
        used = used.copy()
        used[rows] = False
        return x[good], used

    # In inference mode, tensors have no version, by which in-place changes to records are noticed.
    @torch.inference_mode(False)
    def evaluate(self, records: Any, labels: Any = None) -> Evaluated:
        """Return the model's scores on the records that can be used.

        labels: the classes' names or numbers [n], of tokens a list for each record; None if the
        records have labels, as in a file, a table with the plan's label column, or pairs (x, y).
        Raises DataError: no labels, or no record that can be used.
        """
        x, table, form = self._read(records)
        if labels is not None:
            # Of a table's records a number that is also a class's name means that class.
            named = table.labels == "names" and ambiguous(self.form.classes)
            if not is_tokens(table.features):  # whose labels are lists of any length
                labels = labels_of("labels", "y", labels, form.target.kind, x.ndim)
            table = replace(table, y=labels, labels="names" if named else None)
        y, good = _read_targets(table, x, self.form.classes, form)
        x, used = self._run_stage(x, table)
        both = used & good
        if not both.any():
            raise DataError("no record with a label can be used: there is nothing to evaluate")
        x, classes = x[good[used]], len(self.form.classes)
        kept, loss = list[tuple[Tensor, Tensor]](), self.plan.task.per_record(classes)
        try:
            score = evaluate(self.model, loss, x, torch.from_numpy(y[both]), kept=kept)
        except Exception as error:
            kept.clear()
            x, both = self._take(x, both, error)
            score = evaluate(self.model, loss, x, torch.from_numpy(y[both]), kept=kept)
        outputs, y = (torch.cat(parts) for parts in zip(*kept, strict=True))
        measures = self.plan.task.measures(classes).items()
        return Evaluated(**vars(score), metrics={name: of(outputs, y) for name, of in measures})

    def export(self, path: Path) -> None:
        """Write the model for use without fedpact: .pt as TorchScript, .onnx as ONNX.

        Its input is what `preprocess` returns, [n, ...] for any n, its output scores [n, K].
        Raises InputError: another suffix, or ONNX without the packages that torch needs for it.
        """
        if path.suffix not in (".pt", ".onnx"):
            raise InputError(f"{path}: expected a name that ends in .pt (TorchScript) or .onnx")
        path.parent.mkdir(parents=True, exist_ok=True)
        example = self._stage.example(self.form.example)
        batch = (example.expand(2, *example.shape).clone(),)
        if path.suffix == ".onnx":
            try:
                sizes = ({0: torch.export.Dim("n")},)
                # One file, including the weights.
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
                    f"{path}: torch needs packages for ONNX that are not installed ({error}): "
                    "pip install 'fedpact[onnx]', or name a .pt file, which needs none"
                ) from error
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.jit.save(self._trace_for(path, *batch), str(path))

    def _trace_for(self, path: Path, two: Tensor) -> Any:
        """Return the traced model. Raises ModelError: it cannot be traced for any n."""
        try:
            # With gradients attention would take another way than in the trace's own check.
            with torch.no_grad():
                made: Any = torch.jit.trace(self.model, (two,))
                for n in (1, 3):
                    x = two[:1].repeat_interleave(n, 0)
                    torch.testing.assert_close(made(x), self.model(x), equal_nan=True)
        except Exception as error:
            raise ModelError(
                f"{path}: traced with 2 records, the model does not answer as itself for 1 and 3 "
                f"({type(error).__name__}): take the number of records from x.shape[0] and not "
                "from len(x), or export a .onnx file"
            ) from error
        return made

    @property
    def _stage(self) -> FeatureStage:
        return self.plan.stage(self.at)
