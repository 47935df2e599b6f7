"""The terms on which a site takes part: its public size, its sampling rate, its clip and its noise.

Everything here is public. The terms are fixed before the first release, from declared numbers only.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedpact import check
from fedpact.errors import InputError, PlanError
from fedpact.theory.accounting import (
    Accountant,
    Budget,
    History,
    SampledGaussian,
    epsilon,
    joint,
    max_steps,
    running_epsilon,
)
from fedpact.theory.calibration import smallest_sigma

ADJACENCY = "add/remove one record"

Channels = Mapping[str, float]
"""Channel name -> its noise multiplier relative to the gradient's, which is 1."""


@dataclass(frozen=True)
class Terms:
    """One site's terms in a private run.

    size: declared N_i > 0. rate: q_i in (0, 1]. clip: C > 0, the longest contribution of a record
    to a gradient sum. sigmas: noise multiplier > 0 of each channel, relative to that channel's
    sensitivity. steps: joint events that are reserved. budget: (ε_i, δ_i), which the reserved
    events respect. accountant: by which the events were counted.
    All sigmas 0, with any clip up to infinity, describes the noiseless twin: no ledger takes it.
    Raises InputError.
    """

    site: str
    size: float
    rate: float
    clip: float
    sigmas: Mapping[str, float]
    steps: int
    budget: Budget
    accountant: Accountant

    def __post_init__(self) -> None:
        check.positive(size=self.size)
        check.rate(rate=self.rate)
        check.natural(steps=self.steps)
        for name, sigma in self.sigmas.items():
            check.non_negative(**{f"sigmas[{name!r}]": sigma})
        noisy = [sigma > 0 for sigma in self.sigmas.values()]
        if not noisy or any(noisy) != all(noisy):
            raise InputError(
                f"sigmas is {dict(self.sigmas)}: expected at least one channel, and noise on all: "
                "one exact release on a batch leaves its records unprotected"
            )
        if all(noisy) or self.clip != math.inf:
            check.positive(clip=self.clip)

    @property
    def event(self) -> SampledGaussian:
        """The joint event of one step: all channels on one Poisson batch."""
        return joint(self.rate, self.sigmas.values())

    def epsilon_after(self, spent: History) -> float:
        """Return ε at the site's δ after `spent`, an upper bound that is cheap to ask for."""
        if self.accountant == "rdp":
            return epsilon(spent, self.budget.delta, "rdp")
        return running_epsilon(spent, self.budget.delta, {self.event: self.steps})


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
    _check_ratios(channels)
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
    _check_ratios(channels)
    check.positive(sigma=sigma)
    check.count(steps=steps)
    sigmas = {name: ratio * sigma for name, ratio in channels.items()}
    allowed = max_steps(joint(rate, sigmas.values()), budget, accountant)
    if allowed < 1:
        raise PlanError(
            f"privacy.sigma is {sigma:g}: at q = {rate:g} a single step of site {site!r} costs "
            f"more than (ε = {budget.epsilon:g}, δ = {budget.delta:g}); raise sigma, or leave it "
            "out to have it calibrated"
        )
    return Terms(site, size, rate, clip, sigmas, min(steps, allowed), budget, accountant)


def _check_ratios(channels: Channels) -> None:
    for name, ratio in channels.items():
        check.positive(**{f"channels[{name!r}]": ratio})
    if not channels:
        raise PlanError("channels is empty: an algorithm that releases nothing needs no terms")
