"""The terms on which a site takes part: its public size, its sampling rate, its clip and its noise.

Everything here is public. The terms are fixed before the first release, from declared numbers only.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

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

Mechanism = Literal["per_sample", "batch_clipped"]
"""What is clipped to C: each record's gradient (the sum is released), or the batch's mean."""

# Of each channel under batch clipping. What is not named has no proof here, and is refused.
_BATCH_CLIPPED: Final[Mapping[str, float]] = {"gradient": 2.0, "loss": 1.0, "below": 1.0}


def sensitivity(mechanism: Mechanism, channel: str) -> float:
    """Return how far one record, added or removed, moves a channel's release before noise.

    In units of the channel's bound (C for the gradient), to which its sigma is relative too; so
    sigma over this is its noise multiplier. Raises PlanError: a channel without a known one.
    """
    if mechanism == "per_sample":
        return 1.0
    if channel not in _BATCH_CLIPPED:
        raise PlanError(
            f"channel {channel!r} has no known sensitivity under batch clipping: expected "
            f'{", ".join(_BATCH_CLIPPED)}; use privacy.mode = "per_sample"'
        )
    return _BATCH_CLIPPED[channel]


@dataclass(frozen=True)
class Terms:
    """One site's terms in a private run.

    size: N_i > 0, declared or released with noise. rate: q_i in (0, 1]. clip: C > 0, the longest
    contribution of a record to a gradient sum, or the longest mean gradient of a batch. sigmas: the
    standard deviation > 0 of each channel's noise, relative to that channel's bound. steps: joint
    events that are reserved. budget: (ε_i, δ_i), which the reserved events respect. accountant: by
    which the events were counted. mechanism: what is clipped. size_noise: the noise multiplier of
    the released size; None where it is declared.
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
    mechanism: Mechanism = "per_sample"
    size_noise: float | None = None

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
        _ = self.multipliers

    @property
    def multipliers(self) -> dict[str, float]:
        """Each channel's noise multiplier: its noise over its sensitivity to one record."""
        return _multipliers(self.mechanism, self.sigmas)

    @property
    def releases(self) -> dict[str, float]:
        """Everything the site releases -> its noise multiplier: the channels, and a noisy size."""
        size = {} if self.size_noise is None else {"size": self.size_noise}
        return self.multipliers | size

    @property
    def event(self) -> SampledGaussian:
        """The joint event of one step: all channels on one Poisson batch."""
        return joint(self.rate, self.multipliers.values())

    @property
    def batch_size(self) -> float:
        """The expected batch size q N."""
        return self.rate * self.size

    @property
    def noise_variance(self) -> float:
        """The variance of a released gradient's noise in each coordinate.

        (σ C)² for a clipped mean, (σ C / (q N))² for a clipped sum over the expected batch size.
        """
        sigma = self.sigmas["gradient"]
        divisor = 1.0 if self.mechanism == "batch_clipped" else self.batch_size
        return (sigma * self.clip / divisor) ** 2 if sigma else 0.0

    def history(self, steps: int) -> History:
        """Return the run's events up to `steps` joint ones: the released size comes before them."""
        return Counter(_size_event(self.size_noise)) + Counter({self.event: steps})

    def epsilon_after(self, spent: History) -> float:
        """Return ε at the site's δ after `spent`, an upper bound that is cheap to ask for."""
        if self.accountant == "rdp":
            return epsilon(spent, self.budget.delta, "rdp")
        return running_epsilon(spent, self.budget.delta, self.history(self.steps))


def _size_event(noise: float | None) -> dict[SampledGaussian, int]:
    """A count of all records: sensitivity 1, no sampling."""
    return {} if noise is None else {SampledGaussian(1.0, noise): 1}


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
    mechanism: Mechanism = "per_sample",
    size_noise: float | None = None,
) -> Terms:
    """Return the terms with the least noise at which `steps` joint events cost at most `budget`.

    With a noisy size, the steps and its release do together.

    With r_c the channels' relative noise and s_c their sensitivities, σ_c = r_c σ and
    σ_joint = σ / sqrt(Σ (s_c / r_c)²). Raises PlanError: the size alone costs more than the budget.
    """
    _check_ratios(channels)
    before = _affordable_size(site, size_noise, budget, accountant)
    whole = smallest_sigma(budget, rate, steps, accountant, spent=before)
    needs = (sensitivity(mechanism, name) / ratio for name, ratio in channels.items())
    sigma = whole * math.sqrt(sum(need**2 for need in needs))
    sigmas = {name: ratio * sigma for name, ratio in channels.items()}
    # Rounding in the joint multiplier must not push the reservation past the budget.
    while joint(rate, _multipliers(mechanism, sigmas).values()).sigma < whole:
        sigmas = {name: math.nextafter(value, math.inf) for name, value in sigmas.items()}
    return Terms(site, size, rate, clip, sigmas, steps, budget, accountant, mechanism, size_noise)


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
    mechanism: Mechanism = "per_sample",
    size_noise: float | None = None,
) -> Terms:
    """Return terms with gradient noise `sigma`; as many of `steps` events as the budget allows.

    Raises PlanError: the budget does not allow a single one, after the size where that is noisy.
    """
    _check_ratios(channels)
    check.positive(sigma=sigma)
    check.count(steps=steps)
    sigmas = {name: ratio * sigma for name, ratio in channels.items()}
    event = joint(rate, _multipliers(mechanism, sigmas).values())
    before = _affordable_size(site, size_noise, budget, accountant)
    allowed = max_steps(event, budget, accountant, spent=before)
    if allowed < 1:
        raise PlanError(
            f"privacy.sigma is {sigma:g}: at q = {rate:g} a single step of site {site!r} costs "
            f"more than (ε = {budget.epsilon:g}, δ = {budget.delta:g}); raise sigma, or leave it "
            "out to have it calibrated"
        )
    steps = min(steps, allowed)
    return Terms(site, size, rate, clip, sigmas, steps, budget, accountant, mechanism, size_noise)


def _affordable_size(
    site: str, noise: float | None, budget: Budget, accountant: Accountant
) -> History:
    """Return what a released size costs before training. Raises PlanError: the whole budget."""
    event = _size_event(noise)
    cost = epsilon(event, budget.delta, accountant)
    if not cost < budget.epsilon:
        raise PlanError(
            f"privacy.size_noise is {noise:g}: the noisy size of site {site!r} alone costs ε = "
            f"{cost:.4g} at δ = {budget.delta:g} ({ADJACENCY}), of the ε = {budget.epsilon:g} that "
            'it grants; raise size_noise, or declare sizes with privacy.sizes = "public"'
        )
    return event


def _multipliers(mechanism: Mechanism, sigmas: Mapping[str, float]) -> dict[str, float]:
    return {name: sigma / sensitivity(mechanism, name) for name, sigma in sigmas.items()}


def _check_ratios(channels: Channels) -> None:
    for name, ratio in channels.items():
        check.positive(**{f"channels[{name!r}]": ratio})
    if not channels:
        raise PlanError("channels is empty: an algorithm that releases nothing needs no terms")
