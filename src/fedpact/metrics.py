"""How good a model is, and how evenly: accuracy, mean loss, Ψ, entropy, the sites it serves worst.

Nothing in here is private. What it computes from a site's records is for a simulator's eyes, or
comes from public test data.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Final, Literal, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from fedpact.check import count
from fedpact.errors import FedpactError, InputError
from fedpact.losses import Loss
from fedpact.messages import RoundRecord, SiteScore
from fedpact.params import check_unwritten
from fedpact.persample.passes import by_pixel


@dataclass(frozen=True)
class Metric:
    """One number about the sites' held-out records, for a simulator's eyes. All fields are needed.

    label: what it is called in tables. of: of the scores by site and the sites' numbers of training
    records. form: how it is written. note: what a reader is told, in half a sentence. about: in
    full, below its figure.
    """

    label: str
    of: Callable[[Mapping[str, SiteScore], Mapping[str, float]], float]
    form: Literal["number", "percent"]
    note: str
    about: str


class Fairness(TypedDict):
    """How accuracy is spread over sites, each site counting once.

    variance: of the sites' accuracies, divided by their number. entropy: see `entropy`, in nats.
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

    Outputs [n, K] or [n, T, K] count as class scores, and a record's accuracy is its share of
    right positions, or pixels (of [n, K, ...]), or labels (of y [n, K] of 0 and 1); a record whose
    scores hold NaN is wrong. For other outputs accuracy is NaN. kept: outputs and labels are added.
    Sums are float64, so batches only change rounding inside the model. A diverged model has a
    non-finite loss, which is returned as it is. Training modes and weights are left as found.
    Raises InputError: no records, or x and y of different lengths. ModelError: the model writes
    over x.
    """
    if not (len(x) == len(y) > 0):
        raise InputError(
            f"x has {len(x)} records and y has {len(y)}: expected equally many and at least one; "
            "leave a site without held-out records out of the evaluation"
        )
    right, total = (torch.zeros((), dtype=torch.float64, device=x.device) for _ in range(2))
    version = x._version
    # Convolutions and pooling take half the time where channels lie side by side.
    images = x.dim() == 4 and by_pixel(module)
    with _evaluating(module, images):
        for xs, ys in zip(x.split(count(batch=batch)), y.split(batch), strict=True):
            # As _evaluating has the weights: `contiguous` would leave a single channel as it is.
            outputs = module(xs.to(memory_format=torch.channels_last) if images else xs)
            # Nothing is read before the end, so a GPU is not waited for.
            total += loss(outputs, ys).double().sum()
            right += _right(outputs, ys)
            if kept is not None:
                kept.append((outputs, ys))
    check_unwritten(module, x, version)
    return SiteScore(float(right) / len(y), float(total) / len(y), len(y))


@contextmanager
def _evaluating(module: nn.Module, images: bool) -> Iterator[None]:
    # A part that is frozen in evaluation mode must not come back in training mode.
    modes = [(part, part.training) for part in module.modules()]
    weights = module.parameters() if images else ()
    kernels = [(weight, weight.data) for weight in weights if weight.dim() == 4]
    module.eval()
    try:
        for weight, data in kernels:
            weight.data = data.to(memory_format=torch.channels_last)
        with torch.no_grad():
            yield
    finally:
        for weight, data in kernels:
            weight.data = data
        for part, training in modes:
            part.training = training


def _right(outputs: Tensor, y: Tensor) -> Tensor | float:
    """Return how many records are right, a part of one counted as it is, in float64."""
    if y.is_floating_point() and outputs.shape == y.shape and y.dim() == 2:
        # Several labels: the share of those that are right.
        right = ((outputs > 0) == (y > 0.5)) & ~outputs.isnan()
        return right.double().mean(1).sum()
    if outputs.dim() > 2 and outputs.shape[2:] == y.shape[1:]:
        # A class for each pixel: scores stand behind the record's place.
        outputs = outputs.movedim(1, -1)
    if y.is_floating_point() or outputs.shape[:-1] != y.shape or outputs.shape[-1] < 2:
        return math.nan
    # NaN is the largest number to argmax: a broken model would be right about class 0.
    right = (outputs.argmax(-1) == y) & ~outputs.isnan().any(-1)
    return right.reshape(len(y), -1).double().mean(1).sum()


def psi(losses: Sequence[float], weights: Sequence[float]) -> float:
    """Return Ψ = Σ p_i (F_i - F)² with F = Σ p_i F_i and p_i = weight_i / Σ weights (FedFDP).

    0 if and only if all sites with weight have one loss. A NaN among their losses gives NaN, an
    infinite one inf: a site that the model has lost makes no fair average.
    Raises InputError: nothing given, lengths differ, a weight negative or not finite, all zero.

    >>> psi([1.0, 3.0], [10, 10])
    1.0
    """
    p = np.asarray(weights, dtype=np.float64)
    if not (len(losses) == len(p) > 0):
        raise InputError(
            f"{len(losses)} losses and {len(p)} weights: expected one of each for every site, and "
            "at least one site"
        )
    # Weights may be any scale: divided by the largest first, their sum cannot overflow.
    if not (np.isfinite(p).all() and p.min() >= 0 and p.max() > 0):
        raise InputError(
            f"weights range from {p.min()} to {p.max()}: expected finite numbers >= 0, one of them "
            "> 0; give the sites' public sizes"
        )
    p = p / p.max()
    counted = p > 0
    p, f = p[counted] / p.sum(), np.asarray(losses, dtype=np.float64)[counted]
    if np.isnan(f).any():
        return math.nan
    if np.isinf(f).any():
        return math.inf
    with np.errstate(over="ignore"):
        # Taken from the first loss on, equal losses give exactly 0.
        f = f - f[0]
        mean = float(np.sum(p * f))
        return float(np.sum(p * (f - mean) ** 2)) if math.isfinite(mean) else math.inf


def entropy(values: Sequence[float]) -> float:
    """Return -Σ s_i log s_i with s_i = value_i / Σ values, in nats: how evenly values >= 0 lie.

    At most log n, where all n are equal (all zero included), and 0 where one has everything. Of the
    sites' accuracies it is a measure of fairness (Li, Sanjabi, Beirami, Smith, Fair resource
    allocation in federated learning, ICLR 2020). A NaN gives NaN.
    Raises InputError: no values, or one that is negative or infinite.

    >>> entropy([0.5, 0.5]) == math.log(2), entropy([0.9, 0.0])
    (True, 0.0)
    """
    held = np.asarray(values, dtype=np.float64)
    if not held.size or (held < 0).any() or np.isinf(held).any():
        raise InputError(
            f"the entropy of {held.size} values"
            + (f" from {held.min()} to {held.max()}" if held.size else "")
            + ": expected at least one, each finite and >= 0; give the sites' accuracies"
        )
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
    """Return how accuracy is spread over the sites, each counting once whatever its size.

    A site whose accuracy is NaN ranks worst, and makes the figures it enters NaN.
    Raises InputError: no scores.

    >>> spread = fairness({"a": SiteScore(0.5, 1.0, 10), "b": SiteScore(1.0, 0.1, 90)})
    >>> spread["worst_site"], spread["mean"], spread["variance"]
    ('a', 0.75, 0.0625)
    """
    if not scores:
        raise InputError("no site has a score: give the scores of at least one")
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
    """Return the sites' names from the lowest accuracy to the highest, NaN first, then by name.

    Where none has an accuracy, from the largest loss to the smallest.
    """
    without = all(math.isnan(score.accuracy) for score in scores.values())

    def rank(name: str) -> tuple[float, str]:
        best = -scores[name].loss if without else scores[name].accuracy
        return (-math.inf if math.isnan(best) else best, name)

    return sorted(scores, key=rank)


METRICS: Final[dict[str, Metric]] = {
    "psi": Metric(
        label="Ψ",
        of=lambda scores, sizes: psi([s.loss for s in scores.values()], [sizes[n] for n in scores]),
        form="number",
        note="spread of the sites' losses; 0 is even",
        about="Ψ(w) = Σ pᵢ (Fᵢ(w) − F(w))², the spread of the sites' mean losses; 0 means that all "
        "sites fare alike. It is in squared units of the loss: compare it between runs that are "
        "equally good only.",
    ),
}
"""Name -> metric. It stands in rounds.jsonl, summary.json, the page, the comparison and their JSON
by this entry alone; docs/extending.md adds one."""


def of_sites(scores: Mapping[str, SiteScore], sizes: Mapping[str, float]) -> dict[str, float]:
    """Return every metric of METRICS; none where no site has a score."""
    return {name: metric.of(scores, sizes) for name, metric in METRICS.items() if scores}


_TAKEN: Final = frozenset(
    (
        *("status", "private", "rounds", "worst_site", "fairness", "delta", "adjacency"),
        *("accountant", "model_parameters", "weights", "folder", "report"),  # in summary.json
        *("worst_accuracy", "worst_tenth", "accuracy_variance", "accuracy_entropy", "bytes"),
        *("runs", "missing"),  # in a comparison
    )
)


def names_in_use() -> frozenset[str]:
    """Return the names under which rounds, summary and comparison have numbers already."""
    return _TAKEN | {field.name for field in fields(RoundRecord)} | set(METRICS)


def check_names(metrics: Mapping[str, Metric]) -> None:
    """Raise FedpactError: a metric's name is no identifier, or stands for something else."""
    taken = names_in_use() - set(METRICS)
    if odd := [name for name in metrics if name in taken or not name.isidentifier()]:
        raise FedpactError(
            f"metrics are named {', '.join(odd)}: expected identifiers that rounds, summary and "
            "comparison have no other number under; choose another name"
        )


check_names(METRICS)
