"""Metrics over sites, and the measures of a model's outputs that a task reports.

Nothing here is private: figures are of a public test set, or, in simulations only, of the sites'
held-out records.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from fedpact.common.check import count
from fedpact.common.errors import FedpactError, InputError, ModelError
from fedpact.common.losses import UNLABELLED, Loss
from fedpact.common.messages import RoundRecord, SiteScore
from fedpact.common.params import check_unwritten, keeping_modes
from fedpact.common.user_code import own_function
from fedpact.per_sample.layers import by_pixel


@dataclass(frozen=True)
class Metric:
    """A number about the sites' held-out records (simulator only), or about a model's outputs.

    label: its name in tables. of: computes it from scores by site, and numbers of training records
    by site; or from outputs and labels [n, ...], NaN if undefined. form: how it is formatted. note:
    a short explanation. about: the caption of its chart. kinds: of the labels, as in
    schema.LabelForm, if it is of outputs.
    """

    label: str
    of: Callable[[Any, Any], float]
    form: Literal["number", "percent"]
    note: str
    about: str
    kinds: tuple[str, ...] = ()


class Fairness(TypedDict):
    """The spread of accuracy over sites, each site counting once.

    variance: population variance of the sites' accuracies. entropy: see `entropy`, in nats.
    worst_tenth: mean accuracy of the worst ceil(10 %) of the sites. worst_site: its name.
    """

    mean: float
    variance: float
    entropy: float
    worst_tenth: float
    worst_site: str
    worst_accuracy: float


def evaluate(
    module: nn.Module,
    loss: Loss,
    x: Tensor,
    y: Tensor,
    batch: int = 128,
    kept: list[tuple[Tensor, Tensor]] | None = None,
) -> SiteScore:
    """Return the accuracy and the mean loss of a model over all records x [n, ...], y [n, ...].

    Outputs [n, K] or [n, T, K] are class scores. A record's accuracy is its share of correct
    positions, pixels (outputs [n, K, ...]) or labels (y [n, K] of 0 and 1); with NaN scores it is
    wrong. For other outputs accuracy is NaN. A diverged model has a non-finite loss. kept: outputs
    and labels are appended. Sums are in float64. Training modes and weights are restored.
    Raises InputError: no records, or x and y of different lengths. ModelError: the model modifies
    x.
    """
    if not (len(x) == len(y) > 0):
        raise InputError(
            f"x has {len(x)} records and y has {len(y)}: expected equally many and at least one; "
            "leave a site without held-out records out of the evaluation"
        )
    right, total = (torch.zeros((), dtype=torch.float64, device=x.device) for _ in range(2))
    version = x._version
    # Convolutions and pooling take half the time with channels last.
    images = x.dim() == 4 and by_pixel(module)
    with _evaluating(module, images):
        for xs, ys in zip(x.split(count(batch=batch)), y.split(batch), strict=True):
            # Like the weights: `contiguous` would not change a single channel.
            outputs = module(xs.to(memory_format=torch.channels_last) if images else xs)
            # Nothing is read before the end, so that a GPU is never waited for.
            total += loss(outputs, ys).double().sum()
            right += _right(outputs, ys)
            if kept is not None:
                kept.append((outputs, ys))
    check_unwritten(module, x, version)
    return SiteScore(float(right) / len(y), float(total) / len(y), len(y))


@contextmanager
def _evaluating(module: nn.Module, images: bool) -> Iterator[None]:
    weights = module.parameters() if images else ()
    kernels = [(weight, weight.data) for weight in weights if weight.dim() == 4]
    try:
        for weight, data in kernels:
            weight.data = data.to(memory_format=torch.channels_last)
        with keeping_modes(module), torch.no_grad():
            module.eval()
            yield
    finally:
        for weight, data in kernels:
            weight.data = data


def _right(outputs: Tensor, y: Tensor) -> Tensor | float:
    """Return the number of correct records in float64; a record may be partly correct."""
    if y.is_floating_point() and outputs.shape == y.shape and y.dim() == 2:
        # Several labels: the share of correct ones.
        right = ((outputs > 0) == (y > 0.5)) & ~outputs.isnan()
        return right.double().mean(1).sum()
    if outputs.dim() > 2 and outputs.shape[2:] == y.shape[1:]:
        # A class for each pixel: scores are in the second dimension.
        outputs = outputs.movedim(1, -1)
    if y.is_floating_point() or outputs.shape[:-1] != y.shape or outputs.shape[-1] < 2:
        return math.nan
    # argmax treats NaN as the largest: a broken model would be right about class 0.
    right = (outputs.argmax(-1) == y) & ~outputs.isnan().any(-1)
    labelled = (y != UNLABELLED).reshape(len(y), -1).sum(1).clamp(min=1)
    return (right.reshape(len(y), -1).double().sum(1) / labelled).sum()


def psi(losses: Sequence[float], weights: Sequence[float]) -> float:
    """Return Ψ = Σ p_i (F_i - F)² with F = Σ p_i F_i and p_i = weight_i / Σ weights (FedFDP).

    0 if and only if all sites with a positive weight have the same loss. A NaN loss gives NaN, an
    infinite one inf. Weights: >= 0, at least one > 0.

    >>> psi([1.0, 3.0], [10, 10])
    1.0
    """
    p, f = np.asarray(weights, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    # Divided by the largest first, their sum cannot overflow.
    f, p = f[p > 0], p[p > 0] / p.max()
    p = p / p.sum()
    if np.isnan(f).any():
        return math.nan
    with np.errstate(over="ignore", invalid="ignore"):
        # With the first loss subtracted, equal losses give exactly 0.
        f = f - f[0]
        found = float(np.sum(p * (f - np.sum(p * f)) ** 2))
    return found if math.isfinite(found) else math.inf


def entropy(values: Sequence[float]) -> float:
    """Return -Σ s_i log s_i with s_i = value_i / Σ values, in nats, for finite values >= 0.

    At most log n, if all n values are equal (also all zero), and 0 if only one is positive. For the
    sites' accuracies it measures fairness (Li, Sanjabi, Beirami, Smith, Fair resource allocation in
    federated learning, ICLR 2020). A NaN gives NaN.

    >>> entropy([0.5, 0.5]) == math.log(2), entropy([0.9, 0.0])
    (True, 0.0)
    """
    held = np.asarray(values, dtype=np.float64)
    if np.isnan(held).any():
        return math.nan
    if held.min() == held.max():
        return math.log(held.size)
    # Divided by the largest first, no sum overflows and none is 0.
    share = held / held.max()
    share = share / share.sum()
    share = share[share > 0]
    return float(-np.sum(share * np.log(share))) + 0.0


def fairness(scores: Mapping[str, SiteScore]) -> Fairness:
    """Return the spread of accuracy over sites, each counting once.

    scores: at least one. A NaN accuracy ranks worst, and makes the figures that include it NaN.

    >>> spread = fairness({"a": SiteScore(0.5, 1.0, 10), "b": SiteScore(1.0, 0.1, 90)})
    >>> spread["worst_site"], spread["mean"], spread["variance"]
    ('a', 0.75, 0.0625)
    """
    ranked = ranking(scores)
    accuracies = np.array([scores[name].accuracy for name in ranked], dtype=np.float64)
    tenth = math.ceil(len(ranked) / 10)
    return {
        "mean": float(accuracies.mean()),
        "variance": float(accuracies.var()),
        "entropy": entropy(accuracies.tolist()),
        "worst_tenth": float(accuracies[:tenth].mean()),
        "worst_site": ranked[0],
        "worst_accuracy": float(accuracies[0]),
    }


def ranking(scores: Mapping[str, SiteScore]) -> list[str]:
    """Return the sites' names by ascending accuracy, NaN first, then by name.

    If all accuracies are NaN, by descending loss.
    """
    without = all(math.isnan(score.accuracy) for score in scores.values())

    def rank(name: str) -> tuple[float, str]:
        best = -scores[name].loss if without else scores[name].accuracy
        return (-math.inf if math.isnan(best) else best, name)

    return sorted(scores, key=rank)


METRICS: Final[dict[str, Metric]] = {
    "psi": Metric(
        label="spread of losses Ψ",
        of=lambda scores, sizes: psi([s.loss for s in scores.values()], [sizes[n] for n in scores]),
        form="number",
        note="spread of the sites' losses; 0 is even",
        about="Ψ(w) = Σ pᵢ (Fᵢ(w) − F(w))², the spread of the sites' mean losses; 0 means that all "
        "sites fare alike. It is in squared units of the loss: compare it between runs that are "
        "equally good only.",
    ),
}
"""Name -> metric. An entry here is enough to show it in all files, pages and comparisons; see
docs/how-to/extend.md."""


def of_sites(scores: Mapping[str, SiteScore], sizes: Mapping[str, float]) -> dict[str, float]:
    """Return every metric of METRICS; none if no site has a score.

    Raises InputError: a metric is no number.
    """
    return {name: _number(name, of.of(scores, sizes)) for name, of in METRICS.items() if scores}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except Exception as error:
        raise InputError(
            f"metric {name!r} is {value!r}: expected a number, NaN if it is undefined; correct its "
            "function in METRICS"
        ) from error


_TAKEN: Final = frozenset(
    (
        *("status", "private", "rounds", "worst_site", "fairness", "delta", "adjacency"),
        *("accountant", "model_parameters", "weights", "folder", "report"),  # in summary.json
        *("worst_accuracy", "worst_tenth", "accuracy_variance", "accuracy_entropy", "bytes"),
        *("runs", "missing"),  # in a comparison
    )
)


def names_in_use() -> frozenset[str]:
    """Return the names of numbers in rounds, summary and comparison."""
    return _TAKEN | {field.name for field in fields(RoundRecord)} | set(METRICS)


def check_names(metrics: Mapping[str, Metric]) -> None:
    """Raise FedpactError: a metric's name is not an identifier, or is taken."""
    taken = names_in_use() - set(METRICS)
    if odd := [name for name in metrics if name in taken or not name.isidentifier()]:
        raise FedpactError(
            f"metrics are named {', '.join(odd)}: expected identifiers that are not yet used in "
            "rounds, summary or comparison; choose another name"
        )


check_names(METRICS)


_BINS: Final = 15
_MOST_OF_PIXELS: Final = 20
_FORM: Final = "metric(outputs [n, ...], labels [n, ...]) -> a number"


def _with_label(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return classes' scores [n, K] and labels [n]; pixels and tokens with a label are records.

    Several labels [n, K], and their scores, are returned as they are.
    """
    if y.is_floating_point():
        return outputs, y
    if outputs.dim() > 2:
        outputs, y = outputs.movedim(1, -1).flatten(0, -2), y.flatten()
    return outputs[y != UNLABELLED], y[y != UNLABELLED]


def _one_hot(y: Tensor, classes: int) -> Tensor:
    """Return which label a record has, 0 or 1, float64 [n, K]; of two classes, of the second."""
    if y.is_floating_point():
        return y.double()
    return (y[:, None] == torch.arange(1 if classes == 2 else 0, classes)).double()


def _log_odds(outputs: Tensor, y: Tensor) -> Tensor:
    """Return log(p / (1 - p)) for the probabilities p of what `_one_hot` has, [n, K]."""
    if y.is_floating_point():
        return outputs.double()
    z = outputs.double()
    z = z - z.amax(1, keepdim=True)
    classes = range(1 if z.shape[1] == 2 else 0, z.shape[1])
    # Sorted, so that equal probabilities are equal here too.
    others = (torch.cat([z[:, :k], z[:, k + 1 :]], 1).sort(1)[0].logsumexp(1) for k in classes)
    return torch.stack([z[:, k] - other for k, other in zip(classes, others, strict=True)], 1)


def area(outputs: Tensor, y: Tensor) -> float:
    """Return the area under the ROC curve; for several classes or labels, the mean over those that
    occur. NaN if a score is NaN or +∞.

    By ranks (Mann and Whitney) of the log-odds, which do not saturate; equal ones count half.
    """
    outputs, y = _with_label(outputs, y)
    if outputs.isnan().any() or (outputs == math.inf).any():
        return math.nan
    there = _one_hot(y, outputs.shape[1])
    found = [_area(s, t) for s, t in zip(_log_odds(outputs, y).T, there.T, strict=True)]
    known = [value for value in found if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _area(score: Tensor, there: Tensor) -> float:
    positive, count = float(there.sum()), len(there)
    if positive in (0, count):
        return math.nan
    # Ranks from 1; equal scores share their mean.
    _, place, alike = score.unique(return_inverse=True, return_counts=True)
    ranks = (alike.cumsum(0) - (alike.double() - 1) / 2)[place]
    below = float(ranks @ there.double()) - positive * (positive + 1) / 2
    return below / (positive * (count - positive))


def f1(outputs: Tensor, y: Tensor) -> float:
    """Return 2 TP / (2 TP + FP + FN) of the second of two classes, or the mean over classes.

    NaN if a score is NaN.
    """
    outputs, y = _with_label(outputs, y)
    if outputs.isnan().any():
        return math.nan
    classes = outputs.shape[1]
    said = (outputs > 0).double() if y.is_floating_point() else _one_hot(outputs.argmax(1), classes)
    there = _one_hot(y, classes)
    both, either = 2 * (said * there).sum(0), (said + there).sum(0)
    met = either > 0
    return float((both[met] / either[met]).mean()) if met.any() else math.nan


def calibration_error(outputs: Tensor, y: Tensor) -> float:
    """Return the expected calibration error over 15 equal bins of confidence (Guo et al., 2017).

    With several labels, each counts as a record, with the probability of its prediction.
    """
    if y.is_floating_point():
        p, there = outputs.double().sigmoid().flatten(), y.flatten()
        confidence, right = torch.maximum(p, 1 - p), (p > 0.5) == (there > 0.5)
    else:
        outputs, y = _with_label(outputs, y)
        confidence, said = outputs.double().softmax(-1).max(-1)
        right = said == y
    if confidence.isnan().any() or not len(confidence):
        return math.nan
    place = (confidence * _BINS).long().clamp(0, _BINS - 1)
    gap = torch.zeros(_BINS, dtype=torch.float64).index_add(0, place, right.double() - confidence)
    return float(gap.abs().sum()) / len(confidence)


def r_squared(outputs: Tensor, y: Tensor) -> float:
    """Return R² = 1 - Σ (y - ŷ)² / Σ (y - mean y)²; NaN if all labels are equal."""
    y = y.double()
    around = float(((y - y.mean()) ** 2).sum())
    missed = float(((outputs.double().reshape(y.shape) - y) ** 2).sum())
    return 1 - missed / around if around > 0 else math.nan


def commonest(y: Tensor, classes: Sequence[str]) -> dict[str, Any] | None:
    """Return the most frequent class among labels y [n, ...]; None if they are not classes.

    accuracy: of always predicting it.

    >>> commonest(torch.tensor([1, 0, 1, 1]), ["no", "yes"])
    {'name': 'yes', 'accuracy': 0.75}
    """
    if y.is_floating_point() or not y.numel():
        return None
    counts = torch.bincount(y[y != UNLABELLED], minlength=len(classes))
    most = int(counts.argmax())
    accuracy = float(counts[most]) / max(1, int(counts.sum()))
    return {"name": classes[most], "accuracy": accuracy}


TASK_BY_LABELS: Final = {
    "class": "classification",
    "several": "multi_label",
    "number": "regression",
    "pixels": "segmentation",
}
"""Kind of label -> kind of task."""

MEASURES: Final[Mapping[str, Metric]] = {
    "auc": Metric(
        "ROC area",
        area,
        "number",
        "1 ranks all records correctly, 0.5 is chance",
        "The area under the ROC curve: how often a record of a class has a higher score for it "
        "than one of another. Of more than two classes or labels it is the mean over them.",
        ("class", "several"),
    ),
    "f1": Metric(
        "F1",
        f1,
        "number",
        "precision and recall together; 1 is best",
        "F1 = 2 TP / (2 TP + FP + FN) of the second of two classes; of more classes, labels or "
        "pixels' classes (there it is the Dice score) the mean over them.",
        ("class", "several", "pixels"),
    ),
    "ece": Metric(
        "calibration error",
        calibration_error,
        "number",
        "how far confidence is from accuracy; 0 is best",
        "The expected calibration error over 15 bins of confidence: how far, on average, the "
        "probability that the model gives its answer is from how often it is right.",
        ("class", "several", "pixels"),
    ),
    "r2": Metric(
        "R²",
        r_squared,
        "number",
        "share of the labels' variance that is explained",
        "R² = 1 − Σ (y − ŷ)² / Σ (y − mean y)²: 1 is exact, 0 as good as the mean.",
        ("number",),
    ),
}
"""Name -> measure. An entry here is enough to use it in task.metrics."""


def measures_of(
    kind: str, named: list[str] | None, classes: int
) -> dict[str, Callable[[Tensor, Tensor], float]]:
    """Return the named measures, or, for None, those of the kind of labels.

    The default is none for more than two classes, or more than 20 of pixels or tokens, as memory
    grows with their number.
    Raises ModelError: an unknown name, one for other labels, or one that is taken.
    """
    if named is None:
        few = {"class": classes == 2, "pixels": classes <= _MOST_OF_PIXELS}.get(kind, True)
        named = [name for name, one in MEASURES.items() if kind in one.kinds and few]
    return {short(name): _measure(name, kind) for name in named}


def check_measures(
    measures: Mapping[str, Callable[[Tensor, Tensor], float]],
    outputs: Tensor,
    y: Tensor,
    classes: int,
) -> None:
    """Compute each measure once on made-up outputs and labels. Raises ModelError: it fails.

    outputs, y [n, ...]: only their shapes and types are used. Every class or label has records.
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
    """Return a metric's display name: the last part of package.module:name."""
    return name.rpartition(":")[2].partition("@")[0]


def find_display(name: str) -> Metric:
    """Return how a metric or measure of this name is shown."""
    own = Metric(name, r_squared, "number", "user-defined", "A user-defined metric.")
    return {**METRICS, **MEASURES}.get(name, own)


def _measure(name: str, kind: str) -> Callable[[Tensor, Tensor], float]:
    known = MEASURES.get(name)
    if known is not None:
        if kind not in known.kinds:
            own = [name for name, one in MEASURES.items() if kind in one.kinds]
            of = " or ".join(TASK_BY_LABELS[each] for each in known.kinds)
            raise ModelError(
                f"task.metrics has {name!r}, which is of {of}, and the task is "
                f"{TASK_BY_LABELS[kind]}: expected some of {', '.join(own)}, or your own, {_FORM}"
            )
        return known.of
    called = short(name)
    if not called.isidentifier() or called in names_in_use() or called in MEASURES:
        raise ModelError(
            f"task.metrics has {name!r}: {called!r} is the name of another number of a round, or "
            "not an identifier; rename the function"
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
