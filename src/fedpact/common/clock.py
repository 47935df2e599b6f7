"""The [clock] table of a plan: a simulated clock, by which sites are slow, late or left out.

In a round of τ local steps, site i takes

    t_i = s_i j_i (d_com,i + d_cmp,i τ + down_i B + up_i B_i),

with log s_i ~ N(0, spread²) drawn once and log j_i ~ N(0, jitter²) in each round, both from the
plan's seed; with probability `straggler_chance`, j_i is multiplied by `straggler_factor`. B and B_i
are the bytes that the site receives and sends. A round takes as long as its slowest site, or until
the deadline. d_com, d_cmp: FedProxVR's (ICPP 2020, Section 4.3).
"""

import math
from collections.abc import Collection, Mapping

import torch
from pydantic import BaseModel, Field, NonNegativeFloat

from fedpact.common.configuration import FROZEN
from fedpact.common.errors import PlanError
from fedpact.common.randomness.seeded import seeded_generator

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
