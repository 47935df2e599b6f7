"""The terms on which a site takes part: its public size, its sampling rate, its clip and its noise.

Everything here is public. The terms are fixed before the first release, from declared numbers only.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedpact.check import positive
from fedpact.errors import PlanError
from fedpact.theory.accounting import (
    Accountant,
    Budget,
    History,
    SampledGaussian,
    epsilon,
    joint,
    max_steps,
)
from fedpact.theory.calibration import smallest_sigma

ADJACENCY = "add/remove one record"

Channels = Mapping[str, float]
"""Channel name -> its noise multiplier relative to the gradient's, which is 1."""


@dataclass(frozen=True)
class Terms:
    """One site's terms in a private run.

    size: declared N_i. rate: q_i. clip: C, the longest contribution of a record to a gradient sum.
    sigmas: noise multiplier of each channel, relative to that channel's sensitivity.
    steps: joint events that are reserved. budget: (ε_i, δ_i), which the reserved events respect.
    accountant: by which the events were counted.
    """

    site: str
    size: float
    rate: float
    clip: float
    sigmas: Mapping[str, float]
    steps: int
    budget: Budget
    accountant: Accountant

    @property
    def event(self) -> SampledGaussian:
        """The joint event of one step: all channels on one Poisson batch."""
        return joint(self.rate, self.sigmas.values())

    def epsilon_after(self, spent: History) -> float:
        """Return ε at the site's δ after `spent`, an upper bound."""
        return epsilon(spent, self.budget.delta, self.accountant)


def calibrated(
    *,
    site: str,
    size: float,
    rate: float,
    clip: float,
    channels: Channels,
    steps: int,
    budget: Budget,
    accountant: Accountant,
) -> Terms:
    """Return the terms with the least noise at which `steps` joint events cost at most `budget`.

    With r_c the channels' relative noise, σ_c = r_c σ and σ_joint = σ / sqrt(Σ r_c^-2).
    """
    whole = smallest_sigma(budget, rate, steps, accountant)
    sigma = whole * math.sqrt(sum(ratio**-2 for ratio in channels.values()))
    sigmas = {name: ratio * sigma for name, ratio in channels.items()}
    # Rounding in the joint multiplier must not push the reservation past the budget.
    while joint(rate, sigmas.values()).sigma < whole:
        sigmas = {name: math.nextafter(value, math.inf) for name, value in sigmas.items()}
    return Terms(site, size, rate, clip, sigmas, steps, budget, accountant)


def with_given_noise(
    *,
    site: str,
    size: float,
    rate: float,
    clip: float,
    channels: Channels,
    sigma: float,
    steps: int,
    budget: Budget,
    accountant: Accountant,
) -> Terms:
    """Return terms with gradient noise `sigma`; as many of `steps` events as the budget allows.

    Raises PlanError: the budget does not allow a single one.
    """
    positive(sigma=sigma)
    sigmas = {name: ratio * sigma for name, ratio in channels.items()}
    allowed = max_steps(joint(rate, sigmas.values()), budget, accountant)
    if allowed < 1:
        raise PlanError(
            f"privacy.sigma is {sigma:g}: at q = {rate:g} a single step of site {site!r} costs more "
            f"than (ε = {budget.epsilon:g}, δ = {budget.delta:g}); raise sigma, or leave it out to "
            "have it calibrated"
        )
    return Terms(site, size, rate, clip, sigmas, min(steps, allowed), budget, accountant)
