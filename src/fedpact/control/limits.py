"""The [budget] table of a plan: what ends a run before its rounds do."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    """When the run ends before its rounds do.

    bytes: what it may send both ways, all sites together; None for no limit.
    seconds: wall-clock time of its rounds, evaluation aside; the round that passes it is the last.
    A run that depends on measured time does not repeat itself bit for bit.
    when_spent: where a site has spent its privacy budget, the others "continue" with weights among
    themselves until none is left, or the run is to "stop" after that round.
    spare_rounds: rounds whose events are reserved beyond the run's, at the cost of a little more
    noise. A deployed site that dies in mid-round computes, and is charged for, that round again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    bytes: int | None = Field(default=None, gt=0)
    seconds: float | None = Field(default=None, gt=0)
    when_spent: Literal["continue", "stop"] = "continue"
    spare_rounds: int = Field(default=0, ge=0)
