"""What is measured of a model beside accuracy and loss, from its outputs and the labels.

Of the public test set; without one, of the sites' held-out records together, which is for a
simulator's eyes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from fedpact.errors import ModelError
from fedpact.metrics import METRICS, Metric, names_in_use
from fedpact.own.named import own_function

_BINS: Final = 15
_FORM: Final = "metric(outputs [n, ...], labels [n, ...]) -> a number"


@dataclass(frozen=True)
class Measure:
    """One number of a model's outputs. kinds: what labels it is of, as form.LabelForm has them.

    of: (outputs [n, ...], labels [n, ...]) -> the number, NaN where it is not defined. label, form,
    note, about: as of metrics.Metric.
    """

    label: str
    of: Callable[[Tensor, Tensor], float]
    kinds: tuple[str, ...]
    form: Literal["number", "percent"]
    note: str
    about: str


def _columns(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities and labels of each class or label, [n, K] both; pixels count as records.

    Of two classes the second one's alone.
    """
    if y.is_floating_point():
        return outputs.double().sigmoid(), y.double()
    if outputs.dim() > 2:
        outputs, y = outputs.movedim(1, -1).flatten(0, -2), y.flatten()
    p = outputs.double().softmax(-1)
    each = (y[:, None] == torch.arange(p.shape[1])).double()
    return (p[:, 1:], each[:, 1:]) if p.shape[1] == 2 else (p, each)


def area(outputs: Tensor, y: Tensor) -> float:
    """Return the area under the ROC curve; of several classes or labels the mean over those met.

    By ranks (Mann and Whitney), where scores that are equal count half.
    """
    found = [_area(p, t) for p, t in zip(*(v.T for v in _columns(outputs, y)), strict=True)]
    known = [value for value in found if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _area(score: Tensor, there: Tensor) -> float:
    positive, count = float(there.sum()), len(there)
    if positive in (0, count) or score.isnan().any():
        return math.nan
    _, place, many = torch.unique(score, return_inverse=True, return_counts=True)
    ranks = (many.cumsum(0) - (many - 1) / 2).double()[place]
    below = float((ranks * there).sum()) - positive * (positive + 1) / 2
    return below / (positive * (count - positive))


def f1(outputs: Tensor, y: Tensor) -> float:
    """Return 2 TP / (2 TP + FP + FN): of the second of two classes, else the mean over all met."""
    p, there = _columns(outputs, y)
    if y.is_floating_point() or p.shape[1] == 1:
        said = (p > 0.5).double()
    else:
        said = (p.argmax(1)[:, None] == torch.arange(p.shape[1])).double()
    both, either = 2 * (said * there).sum(0), (said + there).sum(0)
    met = either > 0
    return float((both[met] / either[met]).mean()) if met.any() else math.nan


def calibration_error(outputs: Tensor, y: Tensor) -> float:
    """Return Σ |accuracy - confidence| of 15 equal bins of confidence, by their shares of records.

    The expected calibration error (Guo et al., ICML 2017); of several labels each counts as a
    record, with the probability of what is said of it.
    """
    if y.is_floating_point():
        p, there = _columns(outputs, y)
        confidence, right = (
            torch.maximum(p, 1 - p).flatten(),
            ((p > 0.5) == (there > 0.5)).flatten(),
        )
    else:
        if outputs.dim() > 2:
            outputs, y = outputs.movedim(1, -1).flatten(0, -2), y.flatten()
        confidence, said = outputs.double().softmax(-1).max(-1)
        right = said == y
    if confidence.isnan().any():
        return math.nan
    place = (confidence * _BINS).long().clamp(0, _BINS - 1)
    gap = torch.zeros(_BINS, dtype=torch.float64).index_add(0, place, right.double() - confidence)
    return float(gap.abs().sum()) / len(confidence)


def r_squared(outputs: Tensor, y: Tensor) -> float:
    """Return R² = 1 - Σ (y - ŷ)² / Σ (y - mean y)²; NaN where all labels are equal."""
    y = y.double()
    around = float(((y - y.mean()) ** 2).sum())
    missed = float(((outputs.double().reshape(y.shape) - y) ** 2).sum())
    return 1 - missed / around if around > 0 else math.nan


@dataclass(frozen=True)
class Commonest:
    """What always answering one class would give. accuracy: the share of labels that are it."""

    name: str
    accuracy: float


def commonest(y: Tensor, classes: Sequence[str]) -> Commonest | None:
    """Return it for the class that most labels y [n, ...] are; None if they are not of classes.

    An accuracy says something only beside it.

    >>> commonest(torch.tensor([1, 0, 1, 1]), ["no", "yes"])
    Commonest(name='yes', accuracy=0.75)
    """
    if y.is_floating_point() or not y.numel():
        return None
    counts = torch.bincount(y.flatten(), minlength=len(classes))
    most = int(counts.argmax())
    return Commonest(classes[most], float(counts[most]) / y.numel())


TASK_BY_LABELS: Final = {
    "class": "classification",
    "several": "multi_label",
    "number": "regression",
    "pixels": "segmentation",
}
"""What a record's label is -> the task that learns it."""

_OF_CLASSES: Final = ("class", "several", "pixels")

MEASURES: Final[Mapping[str, Measure]] = {
    "auc": Measure(
        "ROC area",
        area,
        ("class", "several"),
        "number",
        "1 ranks all records rightly, 0.5 is chance",
        "The area under the ROC curve: how often a record of a class has a higher score for it "
        "than one of another. Of more than two classes or labels it is the mean over them.",
    ),
    "f1": Measure(
        "F1",
        f1,
        _OF_CLASSES,
        "number",
        "precision and recall together; 1 is best",
        "F1 = 2 TP / (2 TP + FP + FN) of the second of two classes; of more classes, labels or "
        "pixels' classes (there it is the Dice score) the mean over them.",
    ),
    "ece": Measure(
        "calibration error",
        calibration_error,
        _OF_CLASSES,
        "number",
        "how far confidence is from accuracy; 0 is best",
        "The expected calibration error over 15 bins of confidence: how far, on average, the "
        "probability that the model gives its answer is from how often it is right.",
    ),
    "r2": Measure(
        "R²",
        r_squared,
        ("number",),
        "number",
        "share of the labels' variance that is explained",
        "R² = 1 − Σ (y − ŷ)² / Σ (y − mean y)²: 1 is exact, 0 as good as the mean.",
    ),
}
"""Name -> measure. By this entry alone it can stand in task.metrics, and wherever METRICS are."""


def measures_of(
    kind: str, named: list[str] | None, classes: int
) -> dict[str, Callable[[Tensor, Tensor], float]]:
    """Return what is measured, by name: what is named, or what goes with the kind.

    Of more than two classes nothing is measured that is not named.
    Raises ModelError: a name that is none, one of another kind, or that is taken.
    """
    if named is None:
        few = kind != "class" or classes == 2
        named = [name for name, one in MEASURES.items() if kind in one.kinds and few]
    return {short(name): _measure(name, kind) for name in named}


def check_measures(
    measures: Mapping[str, Callable[[Tensor, Tensor], float]],
    outputs: Tensor,
    y: Tensor,
    classes: int,
) -> None:
    """Take each measure once of made-up outputs and labels. Raises ModelError: it is no number.

    outputs, y [n, ...]: of which only the form counts. Every class or label has records.
    """
    count = max(8, 2 * min(classes, 32))
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(count, *outputs.shape[1:], generator=generator, dtype=outputs.dtype)
    shape = (count, *y.shape[1:])
    if y.is_floating_point():
        labels = torch.rand(shape, generator=generator)
        labels = labels * 2 - 1 if y.ndim == 1 else labels.round()
    else:
        labels = (torch.arange(math.prod(shape)) % classes).reshape(shape)
    for of in measures.values():
        of(made, labels)


def short(name: str) -> str:
    """Return what a metric is called where it is shown: the last part of package.module:name."""
    return name.rpartition(":")[2].partition("@")[0]


def find_display(name: str) -> Metric | Measure:
    """Return how a metric or measure of this name is shown."""
    known: Mapping[str, Metric | Measure] = {**METRICS, **MEASURES}
    own = Measure(name, r_squared, (), "number", "of one's own", "A metric of one's own.")
    return known.get(name, own)


def _tasks(kinds: tuple[str, ...]) -> str:
    """Return the tasks of kinds of labels."""
    return " or ".join(TASK_BY_LABELS[kind] for kind in kinds)


def _measure(name: str, kind: str) -> Callable[[Tensor, Tensor], float]:
    known = MEASURES.get(name)
    if known is not None:
        if kind not in known.kinds:
            own = [name for name, one in MEASURES.items() if kind in one.kinds]
            raise ModelError(
                f"task.metrics has {name!r}, which is of {_tasks(known.kinds)}, and the task is "
                f"{_tasks((kind,))}: expected some of {', '.join(own)}, or your own, {_FORM}"
            )
        return known.of
    called = short(name)
    if not called.isidentifier() or called in names_in_use() or called in MEASURES:
        raise ModelError(
            f"task.metrics has {name!r}: {called!r} stands for another number of a round, or is no "
            "identifier; call the function otherwise"
        )
    own = own_function(name, "task.metrics", list(MEASURES), _FORM)

    def measured(outputs: Tensor, y: Tensor) -> float:
        try:
            return float(own(outputs, y))
        except Exception as error:
            raise ModelError(
                f"task.metrics: {name!r} failed on outputs {tuple(outputs.shape)} and labels "
                f"{tuple(y.shape)}: {type(error).__name__}: {error}; expected {_FORM}"
            ) from error

    return measured
