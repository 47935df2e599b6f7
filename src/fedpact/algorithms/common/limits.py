"""The [budget], [run] and [secure_aggregation] tables of a plan: when a run ends, and how it is
carried out."""

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

from fedpact.common.configuration import FROZEN
from fedpact.common.errors import PlanError


class Limits(BaseModel):
    """When the run ends before its last round."""

    model_config = FROZEN
    bytes: int | None = Field(default=None, gt=0)
    """The total of bytes sent in both directions, over all sites; by default unlimited."""
    seconds: float | None = Field(default=None, gt=0)
    """Wall-clock time of the rounds, without evaluation; the round that exceeds it is the last. A
    run that depends on measured time is not repeatable bit for bit."""
    when_spent: Literal["continue", "stop"] = "continue"
    """If a site has spent its privacy budget: "continue" with the others until a round has no
    sites left, or "stop" the run after that round."""
    spare_rounds: int = Field(default=0, ge=0)
    """Additional rounds to reserve, at the cost of a little more noise. A deployed site that
    crashes in the middle of a round computes that round again and is charged again."""
    accuracy: float | None = Field(default=None, gt=0, le=1)
    """The run ends after the round whose released accuracy is at least this: on held-out records
    with [evaluation], else on a public test set, or in a plain run."""
    patience: int | None = Field(default=None, ge=1)
    """The run ends after so many evaluations in a row without a better accuracy."""

    @property
    def early(self) -> bool:
        """Whether a released accuracy may end the run."""
        return self.accuracy is not None or self.patience is not None

    def check_method(self, controlled: bool, task: str) -> None:
        """Raise ValueError if limits do not fit the method or the task.

        controlled: whether τ depends on the remaining budgets. task: its kind.
        """
        if controlled and self.spare_rounds:
            raise ValueError(
                f"budget.spare_rounds = {self.spare_rounds}: if τ depends on what is left, spare "
                "events would be used like the others, and none are needed; leave it out"
            )
        if self.early and task == "regression":
            raise ValueError(
                f"budget.accuracy = {self.accuracy} and patience = {self.patience} with task.kind "
                "= 'regression', which has no accuracy: leave them out"
            )


class Running(BaseModel):
    """How the run is carried out; it changes only rounding and noise.

    When a run is resumed, all of it may change, except device and precision.
    """

    model_config = FROZEN
    workers: int = Field(default=0, ge=0)
    """Threads that train sites in parallel; 0 for one per core, or a single one if a step has less
    than a million parameters times records, as it is then mostly Python."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """Where sites train and models are evaluated: "cpu", "cuda" or "cuda:1". With the same seed, a
    GPU's noise differs from the CPU's, so a run can only be repeated on the same kind of device.
    Sites take turns on a GPU, so leave workers at its default. Deployed sites choose their own."""
    precision: Literal["float32", "tf32", "bf16"] = "float32"
    """Of training passes: "float32"; "tf32", with several times faster products on GPUs since 2020;
    or "bf16", forward and backward in bfloat16 (PyTorch's autocast). The sensitivity, and so ε, is
    the same, as norms and sums are computed from the resulting gradients in float32. With "bf16"
    recurrent layers stay in float32."""
    evaluate_every: int = Field(default=0, ge=0)
    """Rounds between evaluations; 0 for every round of a short run, and 50 to 100 evaluations of a
    longer one. The first and the last model are always evaluated."""
    ledgers: str | None = None
    """A folder with ledgers that are kept across runs, so that reservations add up; or an earlier
    run's folder, to use its ledgers further. By default each run has new ledgers."""
    log: list[Literal["tensorboard", "mlflow"]] = Field(default_factory=list)
    """Where else to log each round: "tensorboard", "mlflow", or both; in a deployment, the server
    logs."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.device != "cpu" and self.workers > 1:
            raise ValueError(
                f"run.workers = {self.workers} with run.device = {self.device!r}: sites take turns "
                "on a GPU, as each uses all of it; leave workers out"
            )
        return self


class SecureSettings(BaseModel):
    """Whether the server only sees sums over sites."""

    model_config = FROZEN
    threshold: int = Field(default=0, ge=0)
    """t, the number of sites that must stay until the end of a round: more than half of all and at
    least 2; 0 for no secure aggregation."""

    def check_sites(self, count: int) -> None:
        """Raise PlanError: a threshold that `count` sites cannot have."""
        threshold = self.threshold
        if threshold and not (2 <= threshold <= count < 2 * threshold):
            raise PlanError(
                f"secure_aggregation.threshold = {threshold} with {count} sites: expected at least "
                "2, more than half of the sites, and at most all of them; with less, two halves of "
                "them could open both secrets of a site"
            )
