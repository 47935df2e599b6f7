"""Sums over all records of a site, released together: one joint Gaussian event at q = 1.

    s_c = Σ_j v_c(j) + N(0, σ² b_c²)     for each channel c, with ‖v_c(j)‖ <= b_c for every record j

Without sampling, with m channels, it is a Gaussian with multiplier σ / √m. A table of counts in
which each record stands in one cell has b = 1. The ledger has the event before a record is read.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from fedpact import check
from fedpact.draws.seeded import Draws
from fedpact.errors import InputError
from fedpact.theory.accounting import Accountant, Budget, SampledGaussian, joint
from fedpact.theory.calibration import smallest_scale


@dataclass(frozen=True)
class FullDataRelease:
    """What such a release is, how often it may be made, and what all of them may cost.

    name: what ledger, policy and noise know it by. bounds: channel -> b_c > 0. sigma: each
    channel's noise over its bound. times: how many are reserved, >= 1. budget: (ε, δ) of a record,
    under add/remove of one. Raises InputError.
    """

    name: str
    bounds: Mapping[str, float]
    sigma: float
    times: int
    budget: Budget
    accountant: Accountant = "best"

    def __post_init__(self) -> None:
        check.positive(sigma=self.sigma)
        check.count(times=self.times)
        for channel, bound in self.bounds.items():
            check.positive(**{f"bounds[{channel!r}]": bound})
        if not self.bounds:
            raise InputError(f"{self.name} has no channel: expected at least one to release")

    @staticmethod
    def within(
        name: str,
        bounds: Mapping[str, float],
        times: int,
        budget: Budget,
        accountant: Accountant = "best",
    ) -> "FullDataRelease":
        """Return the release with the least noise at which `times` of it are within the budget.

        Raises BudgetExhausted: no noise is enough. InputError.
        """
        planned = {SampledGaussian(1.0, 1.0): check.count(times=times)}
        least = smallest_scale(budget, planned, accountant)
        found = FullDataRelease(
            name, bounds, least * math.sqrt(len(bounds)), times, budget, accountant
        )
        while found.event.sigma < least:
            # Rounding must not push the reservation past the budget.
            sigma = math.nextafter(found.sigma, math.inf)
            found = FullDataRelease(name, bounds, sigma, times, budget, accountant)
        return found

    @property
    def event(self) -> SampledGaussian:
        """One release: all channels, of all records."""
        return joint(1.0, [self.sigma] * len(self.bounds))

    @property
    def history(self) -> Counter[SampledGaussian]:
        """All that is reserved."""
        return Counter({self.event: self.times})

    @property
    def releases(self) -> dict[str, float]:
        """What it is called in a policy, as "evaluation hits", -> its noise multiplier."""
        return {f"{self.name} {channel}": self.sigma for channel in self.bounds}

    def release(
        self,
        charge: Callable[[SampledGaussian, tuple[str, ...]], None],
        sums: Callable[[], Mapping[str, Tensor]],
        draws: Draws,
    ) -> dict[str, Tensor]:
        """Charge, then take the sums [k] of every channel, and return them with noise.

        charge: of the event and what it is for. sums: float64; may be written over.
        Raises what `charge` raises, before any record is read.
        """
        charge(self.event, tuple(self.releases))
        exact = sums()
        return {
            channel: draws.add_noise(exact[channel], self.sigma, bound, 0, f"{self.name} {channel}")
            for channel, bound in self.bounds.items()
        }
