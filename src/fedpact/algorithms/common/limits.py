"""The [budget] and [run] tables of a plan: what ends a run, and how it is carried out."""

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

from fedpact.common.configuration import FROZEN


class Limits(BaseModel):
    """When the run ends before its rounds do."""

    model_config = FROZEN
    bytes: int | None = Field(default=None, gt=0)
    """What it may send both ways, all sites together; left out, there is no limit."""
    seconds: float | None = Field(default=None, gt=0)
    """Wall-clock time of its rounds, evaluation aside; the round that passes it is the last. A
    run that depends on measured time does not repeat itself bit for bit."""
    when_spent: Literal["continue", "stop"] = "continue"
    """Where a site has spent its privacy budget, the others "continue" with weights among
    themselves until none of a round's sites is left, or the run is to "stop" after that round."""
    spare_rounds: int = Field(default=0, ge=0)
    """Rounds whose events are reserved beyond the run's, at the cost of a little more noise. A
    deployed site that dies in mid-round computes, and is charged for, that round again."""
    accuracy: float | None = Field(default=None, gt=0, le=1)
    """The run ends after the round whose accuracy, as it was released, is at least this: of
    held-out records with [evaluation], else of a public test set, or of a plain run."""
    patience: int | None = Field(default=None, ge=1)
    """It ends when so many evaluations in a row had no better accuracy than before them."""

    @property
    def good_enough(self) -> tuple[float | None, int | None]:
        """What ends the run by a released accuracy: that, and the patience for a better one."""
        return self.accuracy, self.patience

    @property
    def early(self) -> bool:
        """Whether a released accuracy may end the run."""
        return self.accuracy is not None or self.patience is not None

    def check_method(self, controlled: bool, task: str) -> None:
        """Raise ValueError: limits that the method or the task has no use for.

        controlled: whether τ follows what is left of a budget. task: its kind.
        """
        if controlled and self.spare_rounds:
            raise ValueError(
                f"budget.spare_rounds = {self.spare_rounds}: where τ follows what is left, spare "
                "events would be used like the others, and none are needed; leave it out"
            )
        if self.early and task == "regression":
            raise ValueError(
                f"budget.accuracy = {self.accuracy} and patience = {self.patience} with task.kind "
                "= 'regression', of which there is no accuracy: leave them out"
            )


class Running(BaseModel):
    """How the run is carried out; none of it changes what is trained but for rounding and noise.

    All of it may change when a run is resumed, except device and precision.
    """

    model_config = FROZEN
    workers: int = Field(default=0, ge=0)
    """Threads that train sites side by side, 0 for one a core, or one in all where a step has
    less than a million parameters times records: Python is then most of it."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """Where sites train and models are evaluated, "cpu", "cuda" or "cuda:1"; a GPU draws other
    noise than the CPU from the same seed, so its runs are repeated on one only. Sites take
    turns on a GPU, so workers stays as it is. Deployed sites choose their own."""
    precision: Literal["float32", "tf32", "bf16"] = "float32"
    """Of training passes: "float32"; "tf32", which GPUs since 2020 multiply several times
    faster; or "bf16", forward and backward by bfloat16 (PyTorch's autocast). What one record
    may move a sum by, and so ε, is the same: norms and sums are of the numbers that come of it,
    in float32. With "bf16" recurrent layers stay in float32."""
    evaluate_every: int = Field(default=0, ge=0)
    """Rounds between evaluations, 0 for each round of a short run and 50 to 100 evaluations
    of a longer one; the first and the last model are always evaluated."""
    ledgers: str | None = None
    """A folder that keeps the sites' ledgers across runs, so that reservations add up, or
    an earlier run's folder, to go on with its ledgers; without it each run has its own."""
    log: list[Literal["tensorboard", "mlflow"]] = Field(default_factory=list)
    """Whom else to tell of each round: "tensorboard", "mlflow", or both; of a deployment its
    server tells them."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.device != "cpu" and self.workers > 1:
            raise ValueError(
                f"run.workers = {self.workers} with run.device = {self.device!r}: sites take turns "
                "on a GPU, which each of them fills; leave workers out"
            )
        return self
