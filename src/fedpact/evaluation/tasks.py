"""The [task] table of a plan: what is learned, by which loss, and how it is measured.

All of it is public. The kernel clips the gradient of each record's loss, so class weights and
user-defined losses do not change how far a record can move a release.
"""

import math
from collections.abc import Callable
from typing import Any, Final, Literal, Self, cast

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn

from fedpact.common.configuration import FROZEN
from fedpact.common.errors import ModelError, PlanError
from fedpact.common.losses import (
    LabelEntropy,
    Loss,
    WeightedEntropy,
    cross_entropy,
    pixel_entropy,
    squared_error,
)
from fedpact.common.user_code import NamedFunction, own_function
from fedpact.data.dataset import Dataset
from fedpact.data.schema import LabelForm
from fedpact.evaluation.metrics import TASK_BY_LABELS, measures_of


def check_loss(
    name: str, loss: Loss, module: nn.Module, x: Tensor, y: Tensor, *, finite: bool
) -> None:
    """Raise ModelError unless a loss gives one number for each record, from that record only.

    x, y [n, ...]: made-up records. The kernel separates records in any case, but a loss that mixes
    them would be a different one in every batch. finite: whether losses must be finite, as in a
    private run, which silently leaves out records without a finite loss.
    """
    device = next((p.device for p in module.parameters()), x.device)
    x, y = x.to(device), y.to(device)
    with torch.no_grad():
        outputs = module(x)
        try:
            losses, again = loss(outputs, y), loss(outputs, y)
            alone = [loss(outputs[i : i + 1], y[i : i + 1]) for i in range(len(y))]
        except Exception as error:
            raise ModelError(
                f"task.loss = {name!r} failed on {len(y)} made-up records, outputs "
                f"{tuple(outputs.shape)} and labels {tuple(y.shape)}: {type(error).__name__}: "
                f"{error}; expected loss(outputs, labels) -> losses [{len(y)}]"
            ) from error
        for found, count in ((losses, len(y)), *((one, 1) for one in alone)):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            if shape != (count,):
                raise ModelError(
                    f"task.loss = {name!r} returns {shape} for {count} records: expected "
                    f"({count},), one number for each record; do not reduce over the batch "
                    '(reduction="none"), only within a record'
                )
        if finite and not bool(losses.isfinite().all()):
            raise ModelError(
                f"task.loss = {name!r} gives {losses.tolist()} on {len(y)} made-up records: "
                "expected finite numbers for any record, as a record without one is left out of "
                "every sum; keep arguments of logarithms, roots and quotients positive, for "
                "example with torch.nn.functional.logsigmoid, log_softmax or .clamp(min=1e-6)"
            )
        if not torch.equal(losses.nan_to_num(), again.nan_to_num()):
            raise ModelError(
                f"task.loss = {name!r} gives the same records other losses the second time: "
                "expected a function without random numbers and without state, as a repeated "
                "request must give the same release"
            )
        if not torch.allclose(losses, torch.cat(alone), rtol=1e-4, atol=1e-5, equal_nan=True):
            raise ModelError(
                f"task.loss = {name!r} gives a record another loss in a batch with others: "
                "expected a loss that depends on the record's own output and label only"
            )


TaskKind = Literal[
    "classification", "multi_label", "regression", "segmentation", "tokens", "next_token"
]

_TARGETS: Final[dict[str, Any]] = {
    **{task: kind for kind, task in TASK_BY_LABELS.items()},
    "tokens": "pixels",
    "next_token": "pixels",
}
_FORM: Final = "loss(outputs [B, ...], labels [B, ...]) -> losses [B]"


class TaskSettings(BaseModel):
    """What is learned, and by which loss."""

    model_config = FROZEN
    kind: TaskKind = "classification"
    """"classification"; "multi_label", arrays of 0 and 1 for each of several labels;
    "regression", a number; "segmentation", a class for each pixel of an image, whose loss is
    the mean over its pixels; "tokens", a class for each token of a text; "next_token", the next
    token of each, where the label column names the tokens, and -100 for those not learned."""
    range: list[float] | None = Field(default=None, min_length=2, max_length=2)
    """For regression, the smallest and largest possible label; labels are clamped to it and
    mapped to -1..1."""
    class_weights: list[float] | None = Field(default=None, min_length=1)
    """Factors of the losses of each class, in the order of the classes; for multi_label, of the
    labels that are present."""
    loss: NamedFunction | None = None
    """Your own loss, as package.module:name: loss(outputs, labels) -> one number for each
    record."""
    metrics: list[NamedFunction] | None = None
    """Measures besides accuracy and loss: auc, f1, ece, r2, or package.module:name,
    metric(outputs, labels) -> a number. Default: those for the kind; none with more than two
    classes, or more than 20 of pixels or tokens."""

    @model_validator(mode="before")
    @classmethod
    def _one_word(cls, raw: Any) -> Any:
        """Accept a kind or a metric as text, and tuples and arrays of numbers."""
        if not isinstance(raw, dict):
            return {"kind": raw} if isinstance(raw, str) else raw
        found = dict(cast(dict[str, Any], raw))
        if isinstance(found.get("metrics"), str) or callable(found.get("metrics")):
            found["metrics"] = [found["metrics"]]
        for key in {"range", "class_weights", "metrics"} & set(found):
            if isinstance(found[key], tuple):
                found[key] = list(cast(tuple[Any, ...], found[key]))
            elif hasattr(found[key], "tolist"):
                found[key] = found[key].tolist()
        return found

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.kind == "regression") != (self.range is not None) or (
            self.range is not None and not 0 < self.range[1] - self.range[0] < math.inf
        ):
            raise ValueError(
                f"kind = {self.kind!r} with range = {self.range}: expected, for regression only, "
                "[low, high], low < high: the smallest and largest possible label by public "
                "knowledge"
            )
        weights = self.class_weights
        if weights is not None:
            if self.kind not in ("classification", "multi_label") or self.loss is not None:
                raise ValueError(
                    f"class_weights with kind = {self.kind!r} and loss = {self.loss!r}: they only "
                    "apply to the losses of classification and multi_label; leave them out"
                )
            if not all(1e-6 <= w <= 1e6 for w in weights):
                raise ValueError(
                    f"class_weights = {weights}: expected a number from 1e-6 to 1e6 for each class"
                )
        return self

    @property
    def target(self) -> LabelForm:
        """The form of a record's label."""
        low, high = self.range or (-1.0, 1.0)
        after = self.kind == "next_token"
        return LabelForm(kind=_TARGETS[self.kind], low=low, high=high, next=after)

    @property
    def own_code(self) -> list[str]:
        """The names of user-defined losses and metrics."""
        return [name for name in (self.loss, *(self.metrics or ())) if name is not None]

    @property
    def plain(self) -> bool:
        """Whether the loss is the cross entropy of classes."""
        return self.kind == "classification" and self.class_weights is None and self.loss is None

    def per_record(self, classes: int) -> Loss:
        """Return the loss. Raises PlanError: the wrong number of weights. ModelError: no such
        function."""
        if self.loss is not None:
            return own_function(self.loss, "task.loss", (), _FORM)
        weights = tuple(self.class_weights or ())
        if weights and len(weights) != classes:
            raise PlanError(
                f"task.class_weights has {len(weights)} weights for {classes} classes: give one of "
                "each, in the order of the classes"
            )
        if self.kind == "multi_label":
            return LabelEntropy(weights)
        if self.kind == "regression":
            return squared_error
        if self.target.kind == "pixels":
            return pixel_entropy
        return WeightedEntropy(weights) if weights else cross_entropy

    def measures(self, classes: int) -> dict[str, Callable[[Tensor, Tensor], float]]:
        """Return name -> measure of outputs and labels [n, ...]. Raises ModelError."""
        return measures_of(self.target.kind, self.metrics, classes)

    def check_data(self, data: Dataset) -> None:
        """Raise PlanError: the data set's labels do not fit the task."""
        if data.kind != self.target.kind:
            found = next(kind for kind, target in _TARGETS.items() if target == data.kind)
            raise PlanError(
                f"task.kind = {self.kind!r}, and the labels of data set {data.name} are those of "
                f"{found}: set task.kind to that, or pass labels of the other kind"
            )
        if self.target.next != data.next:
            raise PlanError(
                f"task.kind = {self.kind!r}, and the labels of data set {data.name} were read for "
                "another task: pass its table or arrays (x, y) themselves, or give from_arrays "
                'form = RecordForm(target=LabelForm(kind="pixels", next=True))'
            )

    def check_plain(self, what: str) -> None:
        """Raise PlanError: a feature needs the cross entropy of classes, and the task has another.

        what: the feature, as the subject of a sentence; "" for none.
        """
        if what and not self.plain:
            given = ("kind", "class_weights", "loss")
            told = ", ".join(f"{n} = {getattr(self, n)!r}" for n in given if getattr(self, n))
            raise PlanError(
                f"{what} cannot be combined with [task] {told}: it needs the cross entropy "
                "of classes; leave that table out"
            )
