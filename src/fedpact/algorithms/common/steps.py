"""Shared by several algorithms: local steps at a site, and the mean of replies at the server.

A task's vectors are never changed in place, as the sites of a simulation share them.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, Literal

import torch
from torch import Tensor

from fedpact.common.check import count, positive
from fedpact.common.errors import InputError
from fedpact.common.messages import Reply, State, Task
from fedpact.privacy.oracle import UNIFORM, Batch, BatchAround, Oracle, Weighting

EXCLUDED_BY_TWO_MODELS: Final = {
    "fairness": "a site's loss would be that of an unused model",
    "local": "its steps alternate between two models, and momentum belongs to one",
    "local.head": "each site has its own model already",
}
"""Parts that exclude a model per site beside the shared one; see MethodFacts.excludes."""

EXCLUDED_BY_OWN_CLIP: Final = {
    "fairness": "it weights records by their losses, and the clip depends on their lengths",
    "local": "it uses plain steps, whose noise depends on the clip",
    "privacy.clip_schedule": "its clip already depends on the gradients",
    "privacy.mode": "every gradient is scaled to the clip, whatever that is",
    "control": "the controller's estimates assume a constant clip",
}
"""Parts that exclude a clip that each site chooses itself; see MethodFacts.excludes."""

Aggregation = Literal["size", "uniform"]
"""The sites' weights in a mean: p_i = N_i / Σ N, or 1 / (number of sites)."""


def round_steps(task: Task, own: int) -> int:
    """Return τ of this round: from the task if a controller chose it, else from the settings.

    Raises InputError: the task's is not an integer >= 1.
    """
    told = task.numbers.get("local_steps", own)
    if not (isinstance(told, int) or told.is_integer()):
        raise InputError(f"local_steps is {told!r}: expected an integer >= 1")
    return count(local_steps=int(told))


class HookedBatch(BatchAround):
    """A batch whose gradients a function returns, from the batch inside, w and the weighting."""

    def __init__(self, inner: Batch, hook: Callable[[Batch, Tensor, Weighting], Tensor]) -> None:
        super().__init__(inner)
        self._hook = hook

    def gradient(self, w: Tensor, weighting: Weighting = UNIFORM) -> Tensor:
        return self._hook(self._inner, w, weighting)


def sgd(oracle: Oracle, w: Tensor, steps: int, learning_rate: float) -> Tensor:
    """Return w [d] after `steps` times w ← w - η g(w), each gradient on a new batch."""
    for batch in oracle.batches(steps, "gradient"):
        step = batch.gradient(w)
        # Write the new w into the step's memory; copying the task's w would cost as much again.
        w = torch.add(w, step, alpha=-learning_rate, out=step)
    return w


def proximal_sgd(
    oracle: Oracle,
    centre: Tensor,
    steps: int,
    learning_rate: float,
    proximal: float,
    linear: Tensor | None = None,
) -> Tensor:
    """Return w [d] after `steps` steps of SGD from w̄ = `centre` on F(w) - ⟨h, w⟩ + (μ/2)‖w - w̄‖².

    A step is w ← w - η (g(w) - h + μ (w - w̄)). proximal: μ >= 0. linear: h [d], None for 0.
    With μ = 0 and no h this is `sgd`, bit for bit.
    """
    w = centre.clone()
    for batch in oracle.batches(steps, "gradient"):
        step = torch.add(batch.gradient(w), w - centre, alpha=proximal)
        if linear is not None:
            step.sub_(linear)
        w.add_(step, alpha=-learning_rate)
    return w


def follow_quantile(
    bound: float, share: float, target: float, rate: float, least: float, most: float
) -> float:
    """Return bound · exp(-rate (share - target)), in [least, most]; `least` for NaN.

    share: of values that are at most the bound, with noise. target: what it should be.
    """
    # In logarithms, as a very noisy share would overflow the exponential.
    logarithm = math.log(bound) - rate * (share - target)
    # exp(log(most)) may be above most, which a site would refuse.
    return min(max(least, math.exp(min(logarithm, math.log(most)))), most)


def weigh_replies(replies: Iterable[Reply], aggregation: Aggregation) -> Iterable[Reply]:
    """Yield the replies with weights according to `aggregation`."""
    if aggregation == "size":
        return replies
    return (replace(reply, weight=1.0) for reply in replies)


def weighted_mean(
    replies: Iterable[Reply], *, vectors: Iterable[str] = ("w",), numbers: Iterable[str] = ()
) -> State:
    """Return Σ p_i x_i of the named vectors and numbers, p_i = N_i / Σ N, N_i the reply's weight.

    One reply is held at a time. The mean of equal vectors is that vector, bit for bit.
    Raises InputError: no reply, or a weight that is not a finite number > 0.
    """
    total = 0.0
    means: dict[str, Tensor] = {}
    scalars: dict[str, float] = {}
    for reply in replies:
        total += positive(weight=reply.weight)
        share = reply.weight / total
        for name in vectors:
            if name in means:
                means[name].lerp_(reply.vectors[name], share)
            else:
                means[name] = reply.vectors[name].clone()
        for name in numbers:
            before = scalars.get(name, 0.0)
            scalars[name] = before + share * (reply.numbers[name] - before)
    if not total:
        raise InputError("replies is empty: expected the reply of at least one site")
    return State(means, scalars)
