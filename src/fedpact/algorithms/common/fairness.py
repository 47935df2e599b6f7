"""Fairness at a site: releasing the round's loss, and weighting records by it.

F_i = (Σ_B clamp(ℓ_j, 0, C_l) + noise) / expected batch size is released on a batch that the solver
asks for anyway, as one joint event. C_l follows a quantile of the losses (Andrew, Thakkar, McMahan,
Ramaswamy, arXiv 1905.03871), whose count is released on that batch too, or FedFDP's (16). Either
each site has its own bound, or the server has one for all (`FairRelease.loss_of`).

Defaults: losses with an exponential tail have E[min(C_l, ℓ)] = γ E[ℓ], so γ = 0.9 underestimates F
by a tenth where the median would halve it. A count at ten times the gradient's noise raises the
noise of the joint event by half a percent. The quantile's step is the one of Andrew et al.
"""

import math
from collections.abc import Iterator
from typing import Final, Literal, Self

from pydantic import BaseModel, Field, model_validator
from torch import Tensor

from fedpact.algorithms import BaseSettings
from fedpact.algorithms.common.steps import HookedBatch, follow_quantile, round_steps, sgd
from fedpact.common.configuration import FROZEN
from fedpact.common.errors import InputError, PlanError
from fedpact.common.messages import Local, Numbers, State, Task
from fedpact.privacy.oracle import (
    UNIFORM,
    Batch,
    Fair,
    Oracle,
    OracleWrapper,
    Range,
    Uniform,
    Weighting,
)

EXCLUDED_BY_LOSSES: Final = {
    "fairness": "it has its own fairness",
    "robust": "its weights depend on losses that sites report, so one lie could choose them",
    "local.head": "it compares the sites' losses at one model, and here each site has its own head",
}
"""Parts that exclude weighting sites by their losses; see MethodFacts.excludes."""

FAIR_LOSS: Final = Range(-1e9, 1e9)
"""The values of F that sites accept: wider than any loss, without overflow."""


class LossRelease(BaseModel):
    """The settings for releasing a loss."""

    model_config = FROZEN
    loss_bound_rule: Literal["quantile", "mean"] = "quantile"
    """How C_l is updated from released numbers: "quantile", so that the share loss_quantile of
    losses is below it; "mean", to the last loss, FedFDP's (16)."""
    loss_bound: float = Field(default=2.5, gt=0)
    """C_l⁰, the initial bound on a record's loss."""
    least_loss_bound: float = Field(default=0.01, gt=0)
    """The smallest value of C_l."""
    most_loss_bound: float = Field(default=10.0, gt=0)
    """The largest value of C_l."""
    loss_noise: float = Field(default=2.5, gt=0)
    """The loss's noise multiplier relative to the gradient's."""
    loss_quantile: float = Field(default=0.9, gt=0, lt=1)
    """γ, the share of losses that should be below C_l."""
    quantile_rate: float = Field(default=0.2, gt=0)
    """η_q, the step size of log C_l."""
    count_noise: float = Field(default=10.0, gt=0)
    """The noise multiplier of the count of losses below C_l, relative to the gradient's."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.least_loss_bound <= self.loss_bound <= self.most_loss_bound:
            raise PlanError(
                f"loss_bound is {self.loss_bound:g}: expected a number between least_loss_bound = "
                f"{self.least_loss_bound:g} and most_loss_bound = {self.most_loss_bound:g}"
            )
        return self

    @property
    def loss_channels(self) -> dict[str, float]:
        """The channels that release a loss -> noise multiplier relative to the gradient's."""
        if self.loss_bound_rule == "quantile":
            return {"loss": self.loss_noise, "below": self.count_noise}
        return {"loss": self.loss_noise}

    def release(self, batch: Batch, w: Tensor, bound: float) -> tuple[float, float]:
        """Return the loss F_i at w [d], clipped to C_l = bound, and the next C_l."""
        found = self.answers(batch, w, bound)
        return found["loss"], self.after(bound, found)

    def answers(self, batch: Batch, w: Tensor, bound: float) -> dict[str, float]:
        """Return the released numbers of the losses at w [d], by channel."""
        found = {"loss": batch.loss(w, bound)}
        if self.loss_bound_rule == "quantile":
            found["below"] = batch.below(w, bound)
        return found

    def after(self, bound: float, found: Numbers) -> float:
        """Return the next C_l. found: what `answers` returned, or its means over sites."""
        if self.loss_bound_rule == "quantile":
            limits = self.least_loss_bound, self.most_loss_bound
            rule = self.loss_quantile, self.quantile_rate
            return follow_quantile(bound, found["below"], *rule, *limits)
        # NaN gives the smallest bound.
        return min(max(self.least_loss_bound, found["loss"]), self.most_loss_bound)


class LossSettings(LossRelease, BaseSettings):
    """Settings of an algorithm whose sites release the loss at w̄ in addition to SGD steps."""

    learning_rate: float = Field(default=0.5, gt=0)
    local_steps: int = Field(default=1, ge=1)

    def descend(self, task: Task, oracle: Oracle, memory: State) -> Local:
        """Return a site's reply after τ steps of SGD, with its "loss" at the task's w.

        The loss is released on the first step's batch, in one joint event with its gradient. The
        site's memory holds its next C_l.
        """
        steps, rate = round_steps(task, self.local_steps), self.learning_rate
        start = task.vectors["w"]
        bound = memory.numbers.get("loss_bound", self.loss_bound)
        batch = next(oracle.batches(1, "gradient", *self.loss_channels))
        w = start.add(batch.gradient(start), alpha=-rate)
        loss, bound = self.release(batch, start, bound)
        if steps > 1:
            w = sgd(oracle, w, steps - 1, rate)
        return Local({"w": w}, {"loss": loss}, State(numbers={"loss_bound": bound}))


class FairRelease(LossRelease):
    """A LossRelease whose bound is each site's own, or the server's for all of them.

    Replies, tasks and the server's state call F "loss", the share "below" and C_l "loss_bound".
    """

    loss_of: Literal["own", "common"] = "own"
    """"own": the loss of the model that a site sends, and the site has its own C_l in its memory.
    "common": the loss of the model that all sites received, and C_l is the server's; sites send
    F_i and the share of losses below C_l, and the next C_l follows their mean. Nothing a site
    does then depends on its own releases alone."""

    @property
    def why_own_noise(self) -> str:
        """Why noise shared among sites would not protect it; empty if it would."""
        if self.loss_of == "common":
            return ""
        return (
            'with loss_of = "own" a site\'s loss is of a model that only its own noise hides, and '
            'its loss bound follows its own releases; use loss_of = "common"'
        )

    @property
    def sent(self) -> tuple[str, ...]:
        """The numbers that a site sends."""
        return tuple(self.loss_channels) if self.loss_of == "common" else ("loss",)

    @property
    def first(self) -> dict[str, float]:
        """The server's initial numbers."""
        return {"loss_bound": self.loss_bound} if self.loss_of == "common" else {}

    @property
    def told(self) -> dict[str, Range]:
        """The numbers that a task may carry, with their ranges."""
        bound = Range(self.least_loss_bound, self.most_loss_bound)
        return {"loss": FAIR_LOSS} | ({"loss_bound": bound} if self.loss_of == "common" else {})

    def local(
        self, batch: Batch, task: State, w: Tensor, memory: Numbers
    ) -> tuple[dict[str, float], State]:
        """Return the numbers that a site sends about its losses, and its next memory.

        task: the model and numbers that the site received. w: the model that it sends, [d].
        """
        if self.loss_of == "common":
            bound = task.numbers.get("loss_bound", self.loss_bound)
            return self.answers(batch, task.vectors["w"], bound), State()
        bound = memory.get("loss_bound", self.loss_bound)
        loss, bound = self.release(batch, w, bound)
        return {"loss": loss}, State(numbers={"loss_bound": bound})

    def update(self, before: Numbers, means: Numbers) -> dict[str, float]:
        """Return the server's next numbers. before: its last. means: of what the sites sent."""
        # One site's false loss must not become a number that other sites refuse.
        loss = min(max(FAIR_LOSS.least, means["loss"]), FAIR_LOSS.most)
        if self.loss_of == "own":
            return {"loss": loss}
        bound = before.get("loss_bound", self.loss_bound)
        return {"loss": loss, "loss_bound": self.after(bound, means)}


WeightRule = Literal["fixed", "relative"]
""""fixed": λ as given. "relative": λ = given / F, which follows the released loss during training.

Relative weights are 1 - c + c ℓ/F, with c as given: whatever the scale of the loss, a record of
twice the mean loss has weight 1 + c, and for c <= 1 no weight is below 0.
"""

_LEAST_LOSS = 0.01


def weight(rule: WeightRule, given: float, reference: float) -> float:
    """Return λ for the reference F; 0 while F is not finite.

    A noisy F may be at or below 0: "relative" uses at least 0.01.
    """
    if not math.isfinite(reference):
        return 0.0
    return given if rule == "fixed" else given / max(reference, _LEAST_LOSS)


def weighting(rule: WeightRule, given: float, reference: float) -> Weighting:
    """Return the weighting of records for the reference F; uniform while F is not finite."""
    lam = weight(rule, given, reference)
    return Fair(lam, reference) if lam > 0 else Uniform()


class FairOracle(OracleWrapper):
    """An oracle whose gradients weight records; the last batch also answers the channels `extra`.

    A solver asks it for gradients only; `last_batch` stays open when the solver is done. An opening
    batch has no weights, and differences have none either, to keep their bound.
    """

    def __init__(self, inner: Oracle, weights: Weighting, extra: tuple[str, ...]) -> None:
        super().__init__(inner)
        self._weights, self._extra = weights, extra
        self._source: Iterator[Batch]
        self._last: Batch | None = None

    @property
    def last_batch(self) -> Batch:
        """The last batch, still open. Raises InputError if none was asked for."""
        if self._last is None:
            raise InputError("no batch was asked for: expected a solver of at least one step")
        return self._last

    def batches(self, count: int, *channels: str) -> Iterator[Batch]:
        if count > 1:
            for batch in self._inner.batches(count - 1, *channels):
                yield HookedBatch(batch, self._weigh)
        # The iterator is not exhausted, which would close the batch.
        self._source = iter(self._inner.batches(1, *channels, *self._extra))
        self._last = next(self._source)
        yield HookedBatch(self._last, self._weigh)

    def _weigh(self, batch: Batch, w: Tensor, weighting: Weighting) -> Tensor:
        if weighting != UNIFORM:
            raise InputError(f"weighting is {weighting}: expected none, as the batch has its own")
        return batch.gradient(w, self._weights)
