"""A run's model in use: records go the way to it that they went in training.

They are read as the plan declares, scaled and turned into features by the same stage, and scaled by
what the sites released where they did. What is not fit to be used is answered with nothing.
"""

import math
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedpact.data.given.targets import unscale
from fedpact.engines.asked import PredictionInputs, RecordedForm, read_prediction_inputs
from fedpact.engines.workshop import TrainingSetup
from fedpact.errors import DataError, InputError, ModelError
from fedpact.folder import COLUMNS, Folder, folder_of_run, read_scales
from fedpact.messages import SiteScore
from fedpact.metrics import evaluate
from fedpact.models.weights import read_checked
from fedpact.own.named import model_again
from fedpact.plan import Plan
from fedpact.privacy.columns import scale_columns
from fedpact.tasks.measures import find_display
from fedpact.text import format_metric

_BATCH: Final = 1024


@dataclass(frozen=True, eq=False, repr=False)
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

    def __repr__(self) -> str:
        count, used = len(self), int(self.used.sum())
        told = ", ".join(self.classes[:5]) + (", ..." if len(self.classes) > 5 else "")
        return f"Predictions({count} records, {used} used; of {told}; .labels, .probabilities)"


@dataclass(frozen=True)
class Evaluated(SiteScore):
    """How good a model is on records. metrics: those of the plan's task, by name."""

    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    def __str__(self) -> str:
        """Return it as a sentence: accuracy, where there is any, mean loss, and the measures."""
        found = [] if math.isnan(self.accuracy) else [f"accuracy {self.accuracy:.2%}"]
        found.append(f"mean loss {self.loss:.4g}")
        for name, value in self.metrics.items():
            about = find_display(name)
            found.append(f"{about.label} {format_metric(about.form, value)}")
        return ", ".join(found)


@dataclass(frozen=True, eq=False)
class Predictor:
    """A run's model with all that stands before it."""

    plan: Plan
    form: RecordedForm
    model: nn.Module
    at: Path
    released: Mapping[str, Any]

    @staticmethod
    def of(folder: Path, own: Any = None, *, average: bool = False) -> "Predictor":
        """Return the model of a run's folder, or of a deployment's party, by its directory.

        own: the module, class or factory, where it was handed in from Python. average: the average
        of models that the server kept, in place of the last one.
        Raises DataError: no run that has ended, a damaged one, or no average. ModelError: the model
        was handed in, and is not here, or is another.
        """
        folder = folder_of_run(folder)
        raw = Folder(folder).read_json("plan.json")
        plan = Plan.parse(raw)
        if own is not None:
            # Its weights are the run's, so whatever it brings decides nothing.
            plan = plan.model_copy(update={"model": model_again(own, plan.model)})
        form = RecordedForm.read(folder)
        beside = folder.absolute().parent
        if plan.local.head and not (beside / "site.toml").exists():
            raise DataError(
                f"{folder}: local.head is {plan.local.head}: each site's model has a head of its "
                "own, which no run's folder holds, so there is no model here to ask"
            )
        at = beside if (beside / "federation.toml").exists() else _begun_at(plan, folder)
        names = plan.records.released
        released = read_scales(folder / COLUMNS, names) if names else {}
        stage = plan.stage(at)
        if form.made_by is not None and not stage.made_by(form.example).is_as(form.made_by):
            raise ModelError(
                f"features.kind = {plan.features.kind!r} has other code or weights than when "
                f"{folder} was made, so its model would be given other numbers: put back the file "
                "and the weights of then"
            )
        made = stage.example(form.example)
        model = TrainingSetup(plan, made, len(form.classes)).module()
        path = folder / ("average.safetensors" if average else "model.safetensors")
        if average and not path.exists():
            raise DataError(
                f"{folder} holds no average of models (its plan has server.average = "
                f"{plan.server.average!r}; a deployment's server has it, and no site): ask the "
                "last model, without average"
            )
        try:
            model.load_state_dict(load_file(path))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise DataError(
                f"{path} cannot be read as the plan's model ({type(error).__name__}: {error}): "
                "restore it, or run the plan again"
            ) from error
        return Predictor(plan, form, model.eval(), at, released)

    def preprocess(self, records: Any) -> tuple[Tensor, np.ndarray]:
        """Return what the model is given of records, [m, ...], and which of the n these are.

        records: as `read_prediction_inputs` has them; labels are passed over.
        Raises DataError: of another form.
        """
        return self._staged(read_prediction_inputs(records, self.plan, self.form))

    def _staged(self, given: PredictionInputs) -> tuple[Tensor, np.ndarray]:
        x, sieve, features = given.x, given.sieve, given.features
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
        """Return what the model says of records; see `preprocess` for what they may be."""
        x, used = self.preprocess(records)
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
            values[used] = unscale(outputs.reshape(-1).numpy(), target)
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

    @torch.inference_mode(
        False
    )  # as a model that writes over its records is found by their version
    def evaluate(self, records: Any, labels: Any = None) -> Evaluated:
        """Return how good the model is on records that are used: accuracy, mean loss, measures.

        labels: the classes' names or numbers [n]; None where the records have their own, as in a
        file, a table with the plan's label column, or pairs (x, y).
        Raises DataError: none, or none that is used.
        """
        given = read_prediction_inputs(records, self.plan, self.form)
        given = given if labels is None else given.given(labels)
        y, good = given.targets(self.plan.label or "y")
        x, used = self._staged(given)
        both = used & good
        if not both.any():
            raise DataError("no record with a label is used: there is nothing to evaluate")
        kept, classes = list[tuple[Tensor, Tensor]](), len(self.form.classes)
        x, right = x[good[used]], torch.from_numpy(y[both])
        score = evaluate(self.model, self.plan.task.per_record(classes), x, right, kept=kept)
        outputs, y = (torch.cat(parts) for parts in zip(*kept, strict=True))
        measures = self.plan.task.measures(classes).items()
        return Evaluated(**vars(score), metrics={name: of(outputs, y) for name, of in measures})

    def export(self, path: Path) -> None:
        """Write the model alone for use without fedpact: .pt as TorchScript, .onnx as ONNX.

        It takes what `preprocess` returns, [n, ...], for any n, and returns scores [n, K].
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
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.form.values)

    @property
    def _stage(self) -> Any:
        return self.plan.stage(self.at)


def _begun_at(plan: Plan, folder: Path) -> Path:
    """Return from where a simulation's features find their weights: here, or above its folder.

    It was begun in a directory that it is mostly below, and may be asked from another.
    """
    weights, sha256 = plan.features.weights, plan.features.sha256
    for at in (Path(), *folder.absolute().parents) if weights is not None else ():
        # Another file of that name is none, nor is one that may not be read.
        with suppress(ModelError):
            read_checked(at / str(weights), sha256, "features.weights")
            return at
    return Path()
