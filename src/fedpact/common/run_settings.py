"""The [about], [budget], [run], [clock] and [secure_aggregation] tables of a plan, and schedules.

They are what people say of a run, from which nothing is computed, when a run ends, and how it is
carried out.

Of a simulated clock, by which sites are slow, late or left out: in a round of τ local steps, site i
takes

    t_i = s_i j_i (d_com,i + d_cmp,i τ + down_i B + up_i B_i),

with log s_i ~ N(0, spread²) drawn once and log j_i ~ N(0, jitter²) in each round, both from the
plan's seed; with probability `straggler_chance`, j_i is multiplied by `straggler_factor`. B and B_i
are the bytes that the site receives and sends. A round takes as long as its slowest site, or until
the deadline. d_com, d_cmp: FedProxVR's (ICPP 2020, Section 4.3).

Schedules are public: factors by which a step size or a clip changes with the round or step. For
number t = 1, ..., T, with h = `halved_after`:

    constant  1        inverse  1 / (1 + (t - 1) / h)        cosine  (1 + cos(π (t - 1) / T)) / 2
    a list    f(1), f(2), ..., whose last number holds for all that follow, each in [0, 1e6]

They depend on the plan only and cost no privacy.
"""

import datetime
import math
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Final, Literal, Self

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    model_validator,
)

from fedpact.common.configuration import FROZEN
from fedpact.common.errors import PlanError
from fedpact.common.randomness.seeded import seeded_generator

_CONTROLS: Final = r"\x00-\x1f\x7f\u0085\u2028\u2029"


def _in_a_line(text: str) -> str:
    found = re.sub(f"[{_CONTROLS}]+", " ", text).strip()
    if not found:
        raise ValueError("it says nothing: expected words, on one line")
    return found


OneLine = Annotated[str, Field(pattern=f"^[^{_CONTROLS}]*$", max_length=2000)]
"""A text on one line: it stands in receipts, tables and files of other forms."""
JoinedText = Annotated[str, AfterValidator(_in_a_line)]
"""A text of any length, not empty, of which lines are joined to one."""


def _write_day(day: object) -> object:
    """TOML has days of its own; as a text they are the same everywhere."""
    return day.isoformat() if type(day) is datetime.date else day


class About(BaseModel):
    """What people say of a run, for its model card; "" is not stated."""

    model_config = FROZEN
    name: OneLine = ""
    """What the model is called."""
    purpose: OneLine = ""
    """What it is for."""
    data_version: OneLine = ""
    """Which version of the data set, whose name is the plan's data, or a site's data_set."""
    curators: list[OneLine] = Field(default_factory=list[str])
    """Who publishes it."""
    published: Annotated[str, BeforeValidator(_write_day)] = ""
    """YYYY-MM-DD."""
    authors: list[OneLine] = Field(default_factory=list[str])
    """Who writes the card."""
    licence: OneLine = ""
    """An identifier, as in apache-2.0."""
    contact: OneLine = ""
    """Whom to write to."""

    @model_validator(mode="after")
    def _is_a_day(self) -> Self:
        if self.published:
            try:
                day = datetime.date.fromisoformat(self.published)
            except ValueError:
                day = None
            if day is None or day.isoformat() != self.published:
                raise ValueError(
                    f"published is {self.published!r}: expected a day as in 2026-01-31"
                )
        return self


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


PerSite = NonNegativeFloat | list[NonNegativeFloat]


class SimulatedClock(BaseModel):
    """How long simulated sites take; only the deadline affects training."""

    model_config = FROZEN
    message_seconds: PerSite = 0.0
    """d_com, seconds of a round without its steps; one value for all sites, or a list in the order
    of site names."""
    step_seconds: PerSite = 0.0
    """d_cmp, seconds of one local step; one value, or a list in the order of site names."""
    down_seconds: PerSite = 0.0
    """Seconds per byte that a site receives, 8e-6 at 1 Mbit/s; one value, or a list."""
    up_seconds: PerSite = 0.0
    """Seconds per byte that a site sends; one value, or a list."""
    spread: float = Field(default=0.0, ge=0, le=5)
    """Differences between sites: the standard deviation of the logarithm of each site's factor."""
    jitter: float = Field(default=0.0, ge=0, le=5)
    """Differences between rounds: the same for a factor drawn for each site and round."""
    straggler_chance: float = Field(default=0.0, ge=0, le=1)
    """The probability that a site is straggler_factor times as slow in a round."""
    straggler_factor: float = Field(default=10.0, ge=1)
    """How many times as slow a straggler is."""
    deadline: float | None = Field(default=None, gt=0)
    """Seconds after which the server stops waiting. Later replies are charged and sent, but not
    included. It always waits for the fastest site."""

    @property
    def used(self) -> bool:
        """Whether the plan has a clock."""
        return self != SimulatedClock()

    def check(self, sites: int, needs_all_sites: str, threshold: int) -> None:
        """Raise ValueError if a list does not fit, or a deadline may leave out a needed site."""
        for name in ("message_seconds", "step_seconds", "down_seconds", "up_seconds"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != sites:
                raise PlanError(
                    f"clock.{name} lists {len(value)} values for {sites} sites: give one value for "
                    "all of them, or one for each in the order of their names"
                )
        if self.deadline is None:
            return
        why = "masked sums are of the sites that are asked" if threshold else needs_all_sites
        if why:
            raise ValueError(
                f"clock.deadline is {self.deadline:g}, and each round needs all its sites: {why}; "
                "leave the deadline out"
            )

    def round(
        self,
        seed: int,
        number: int,
        steps: int,
        sites: tuple[str, ...],
        sent: Mapping[str, tuple[int, int]],
        replied: Collection[str] | None = None,
    ) -> tuple[float, frozenset[str]]:
        """Return the seconds that a round takes, and which of the sites asked are late.

        sent: each site asked, with the bytes down and up. replied: those that did not refuse, of
        which a round waits for the fastest; by default all.
        """
        took = {
            site: self._factor(seed, number, site)
            * self._alone(sites.index(site), steps, *sent[site])
            for site in sent
        }
        last, counted = max(took.values()), sent if replied is None else replied
        if self.deadline is None or last <= self.deadline:
            return last, frozenset()
        waited = max(self.deadline, min((took[s] for s in took if s in counted), default=0.0))
        return waited, frozenset(site for site, seconds in took.items() if seconds > waited)

    def _alone(self, place: int, steps: int, down: int, up: int) -> float:
        """Return a site's seconds without its factors."""
        fixed = _at(self.message_seconds, place) + _at(self.step_seconds, place) * steps
        return fixed + _at(self.down_seconds, place) * down + _at(self.up_seconds, place) * up

    def _factor(self, seed: int, number: int, site: str) -> float:
        own = seeded_generator(seed, "clock", site)
        each = seeded_generator(seed, "clock", site, number)
        power = sum(
            scale * float(torch.randn(1, generator=draws, dtype=torch.float64))
            for scale, draws in ((self.spread, own), (self.jitter, each))
        )
        straggles = float(torch.rand(1, generator=each)) < self.straggler_chance
        return math.exp(power) * (self.straggler_factor if straggles else 1.0)


def _at(value: float | list[float], place: int) -> float:
    return value[place] if isinstance(value, list) else value


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
