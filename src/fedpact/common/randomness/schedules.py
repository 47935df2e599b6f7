"""Public schedules: factors by which a step size or a clip changes with the round or step.

For number t = 1, ..., T, with h = `halved_after`:

    constant  1        inverse  1 / (1 + (t - 1) / h)        cosine  (1 + cos(π (t - 1) / T)) / 2
    a list    f(1), f(2), ..., whose last number holds for all that follow, each in [0, 1e6]

They depend on the plan only and cost no privacy.
"""

import math
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, Field, model_validator

from fedpact.common.configuration import FROZEN
from fedpact.common.errors import PlanError

ScheduleKind = Literal["constant", "inverse", "cosine"]

_MOST: Final = 1e6  # a longer step is what the learning rate is for


def factor(
    schedule: ScheduleKind | list[float], halved_after: float, number: int, total: int
) -> float:
    """Return f(t) for t = number, 1 .. total, >= 0."""
    if isinstance(schedule, list):
        return schedule[min(number, len(schedule)) - 1]
    if schedule == "inverse":
        return 1 / (1 + (number - 1) / halved_after)
    if schedule == "cosine":
        return (1 + math.cos(math.pi * (number - 1) / total)) / 2
    return 1.0


class Scheduled(BaseModel):
    """The part of a table that has a schedule."""

    model_config = FROZEN
    schedule: ScheduleKind | list[Annotated[float, Field(ge=0, le=_MOST)]] = Field(
        default="constant", min_length=1
    )
    """f, the factor of step t of T: 1 if constant; 1 / (1 + (t - 1) / h) if inverse;
    (1 + cos(π (t - 1) / T)) / 2 if cosine; or a list f(1), f(2), ..., whose last number holds for
    all further steps."""
    halved_after: float = Field(default=10.0, gt=0)
    """h of schedule = "inverse": after so many steps f is half."""

    @model_validator(mode="after")
    def _halves(self) -> Self:
        if self.halved_after != 10.0 and self.schedule != "inverse":
            raise ValueError(
                f"halved_after is {self.halved_after:g} with schedule = {self.schedule!r}: it "
                'belongs to schedule = "inverse"; leave it out'
            )
        return self

    def check_moves(self, table: str, total: int) -> None:
        """Raise PlanError unless f > 0 for one of the steps 1 to `total`."""
        if not any(self.factor(number, total) > 0 for number in range(1, total + 1)):
            raise PlanError(
                f"{table}.schedule is {self.schedule}: expected a number above 0 for one of the "
                f"run's steps 1 to {total}; it would spend its budget without training"
            )

    def factor(self, number: int, total: int) -> float:
        """Return f(number), number = 1 .. total."""
        return factor(self.schedule, self.halved_after, number, total)
