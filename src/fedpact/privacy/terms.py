"""The terms on which a site takes part: its public size, its sampling rate, its clip and its noise.

Everything here is public. The terms are fixed before the first release, from declared numbers only.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal

from fedpact import check
from fedpact.errors import InputError, PlanError
from fedpact.theory.accounting import (
    ADJACENCY,
    Accountant,
    Budget,
    History,
    RunningEpsilon,
    SampledGaussian,
    epsilon,
    joint,
    max_steps,
)
from fedpact.theory.calibration import smallest_scale

Channels = Mapping[str, float]
"""Channel name -> its noise multiplier relative to the gradient's, which is 1."""

Mechanism = Literal["per_sample", "batch_clipped"]
"""What is clipped to C: each record's gradient (the sum is released), or the batch's mean."""

# What a policy calls the other releases; no channel has such a name, which would stand for both.
_SIZE: Final = "size"
_ANCHOR: Final = "anchor "

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
class Opening:
    """The joint event that opens a round: one of its own, beside the batches of the local steps.

    rate: each record's chance to be in it, in (0, 1]; 1 takes all of them, without amplification.
    channels: channel name -> noise relative to the batches' base σ, > 0. Raises InputError.
    """

    rate: float
    channels: Channels

    def __post_init__(self) -> None:
        check.rate(rate=self.rate)
        _check_ratios(self.channels)


@dataclass(frozen=True)
class Terms:
    """One site's terms in a private run.

    size: N_i > 0, declared or released with noise. rate: q_i in (0, 1]. clip: C > 0, the longest
    contribution of a record to a gradient sum, or the longest mean gradient of a batch. sigmas: the
    standard deviation > 0 of each channel's noise, relative to that channel's bound. steps: joint
    events that are reserved. budget: (ε_i, δ_i), which the reserved events respect. accountant: by
    which the events were counted. mechanism: what is clipped. size_noise: the noise multiplier of
    the released size; None where it is declared. opening_rate, opening_sigmas, openings: the same
    of the event that opens a round, and how many are reserved; no sigmas: there is none.
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
    opening_rate: float = 1.0
    opening_sigmas: Mapping[str, float] = field(default_factory=dict[str, float])
    openings: int = 0

    def __post_init__(self) -> None:
        check.positive(size=self.size)
        check.rate(rate=self.rate)
        check.rate(opening_rate=self.opening_rate)
        check.natural(steps=self.steps)
        check.natural(openings=self.openings)
        for name in (*self.sigmas, *self.opening_sigmas):
            if name == _SIZE or name.startswith(_ANCHOR):
                raise InputError(
                    f"a channel is called {name!r}: expected another name than {_SIZE!r} and "
                    f"{_ANCHOR + '...'!r}, by which a policy allows other releases"
                )
        noisy = [
            check.non_negative(**{f"sigmas[{name!r}]": sigma}) > 0
            for name, sigma in (*self.sigmas.items(), *self.opening_sigmas.items())
        ]
        if not self.sigmas or any(noisy) != all(noisy):
            raise InputError(
                f"sigmas is {dict(self.sigmas)}, opening_sigmas {dict(self.opening_sigmas)}: "
                "expected at least one channel, and noise on all: one exact release leaves its "
                "records unprotected"
            )
        if bool(self.openings) != bool(self.opening_sigmas):
            raise InputError(
                f"openings is {self.openings} with opening_sigmas {dict(self.opening_sigmas)}: "
                "expected both or none"
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
        """Everything the site releases -> its noise multiplier.

        The channels of the batches; "anchor gradient" and the like, those of the event that opens a
        round; "size", a noisy one. A policy names what it allows by these, and no other name is
        anything's.
        """
        size = {} if self.size_noise is None else {_SIZE: self.size_noise}
        opening = {_ANCHOR + name: s for name, s in self.opening.multipliers.items()}
        return self.multipliers | (opening if self.openings else {}) | size

    @cached_property
    def opening(self) -> "Terms":
        """The terms of the event that opens a round, as those of a batch; these without one."""
        if not self.openings:
            return self
        return replace(
            self,
            rate=self.opening_rate,
            sigmas=self.opening_sigmas,
            steps=self.openings,
            opening_sigmas={},
            openings=0,
        )

    @cached_property
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

        (σ C)² for a clipped mean, (σ C / (q N))² for a clipped sum over the expected batch size;
        0 where the batches release no gradient.
        """
        sigma = self.sigmas.get("gradient", 0.0)
        divisor = 1.0 if self.mechanism == "batch_clipped" else self.batch_size
        return (sigma * self.clip / divisor) ** 2 if sigma else 0.0

    def history(self, steps: int, openings: int | None = None) -> Counter[SampledGaussian]:
        """Return the run's events up to `steps` batches and `openings`, by default all openings.

        The released size comes before them. No steps means no openings either.
        """
        opened = min(steps, self.openings) if openings is None else openings
        opening = Counter({self.opening.event: opened}) if opened else Counter[SampledGaussian]()
        return Counter(_size_event(self.size_noise)) + opening + Counter({self.event: steps})

    def steps_after(self, spent: History) -> int:
        """Return how many of the reserved batches are left after `spent`, a public number >= 0.

        An opening, or a released size, that is an event of the same kind counts as a batch.
        """
        return max(0, self.history(self.steps)[self.event] - spent.get(self.event, 0))

    def epsilon_after(self, spent: History) -> float:
        """Return ε at the site's δ after `spent`, an upper bound that is cheap to ask for."""
        return self._running(spent)

    @cached_property
    def _running(self) -> RunningEpsilon:
        return RunningEpsilon(self.history(self.steps), self.budget.delta, self.accountant)


def _size_event(noise: float | None) -> dict[SampledGaussian, int]:
    """A count of all records: sensitivity 1, no sampling."""
    return {} if noise is None else {SampledGaussian(1.0, noise): 1}


@dataclass(frozen=True, kw_only=True)
class TermsRequest:
    """What a site's terms follow from, but for the noise. See Terms for what is not said here.

    channels: of the batches. opening: the event that opens each round, None where there is none;
    openings: how many are planned. Raises InputError, and PlanError: no channel.
    """

    site: str
    size: float
    rate: float
    clip: float
    channels: Channels
    steps: int
    budget: Budget
    accountant: Accountant
    mechanism: Mechanism = "per_sample"
    size_noise: float | None = None
    opening: Opening | None = None
    openings: int = 0

    def __post_init__(self) -> None:
        _check_ratios(self.channels)

    def calibrated(self) -> Terms:
        """Return the terms with the least noise at which all that is planned is in the budget.

        Planned are `steps` joint events, `openings` of rounds, and the size where it is noisy.
        With r_c the channels' relative noise and s_c their sensitivities, σ_c = r_c σ and
        σ_joint = σ / sqrt(Σ (s_c / r_c)²). Raises PlanError: the size alone costs more.
        """
        # The batches' joint multiplier is the unit: a power of σ that the caches share.
        unit = _relative(self.mechanism, self.channels)
        planned = Counter({SampledGaussian(self.rate, 1.0): self.steps})
        least = 0.0
        if self.opening:
            least = _relative(self.mechanism, self.opening.channels) / unit
            planned[SampledGaussian(self.opening.rate, least)] += self.openings
        before = self._affordable_size()
        whole = smallest_scale(self.budget, planned, self.accountant, spent=before)
        sigma = whole / unit
        # Rounding in the joint multipliers must not push the reservation past the budget.
        found = self._terms(sigma)
        while found.event.sigma < whole or (
            self.opening and found.opening.event.sigma < whole * least
        ):
            sigma = math.nextafter(sigma, math.inf)
            found = self._terms(sigma)
        return found

    def with_noise(self, sigma: float) -> Terms:
        """Return terms with gradient noise `sigma`; as many of `steps` as the budget allows.

        All openings are paid for first, as every round begins with one.
        Raises PlanError: the budget does not allow a single step after them and a noisy size.
        """
        check.positive(sigma=sigma)
        check.count(steps=self.steps)
        full = self._terms(sigma)
        self._affordable_size()
        whole = full.history(full.steps, full.openings)
        if epsilon(whole, self.budget.delta, self.accountant) <= self.budget.epsilon:
            # How many more there could be is not asked, and costs a search far beyond the plan.
            return full
        before = full.history(0, full.openings)
        allowed = max_steps(full.event, self.budget, self.accountant, spent=before)
        if allowed < 1:
            opened = f", after the openings of {self.openings} rounds," if self.openings else ""
            raise PlanError(
                f"privacy.sigma is {sigma:g}: at q = {self.rate:g} a single step of site "
                f"{self.site!r}{opened} costs more than (ε = {self.budget.epsilon:g}, δ = "
                f"{self.budget.delta:g}); raise sigma, or leave it out to have it calibrated"
            )
        return replace(full, steps=min(self.steps, allowed))

    def _terms(self, sigma: float) -> Terms:
        """Terms whose channels have their ratios times sigma."""
        opening = self.opening
        return Terms(
            self.site,
            self.size,
            self.rate,
            self.clip,
            {name: ratio * sigma for name, ratio in self.channels.items()},
            self.steps,
            self.budget,
            self.accountant,
            self.mechanism,
            self.size_noise,
            opening.rate if opening else 1.0,
            {name: r * sigma for name, r in opening.channels.items()} if opening else {},
            self.openings if opening else 0,
        )

    def _affordable_size(self) -> History:
        """Return what a released size costs before training. Raises PlanError: the whole budget."""
        event, budget = _size_event(self.size_noise), self.budget
        cost = epsilon(event, budget.delta, self.accountant)
        if not cost < budget.epsilon:
            raise PlanError(
                f"privacy.size_noise is {self.size_noise:g}: the noisy size of site {self.site!r} "
                f"alone costs ε = {cost:.4g} at δ = {budget.delta:g} ({ADJACENCY}), of the ε = "
                f"{budget.epsilon:g} that it grants; raise size_noise, or declare sizes with "
                'privacy.sizes = "public"'
            )
        return event


def _relative(mechanism: Mechanism, channels: Channels) -> float:
    """Return the joint multiplier of channels with σ = 1."""
    return joint(1.0, _multipliers(mechanism, channels).values()).sigma


def _multipliers(mechanism: Mechanism, sigmas: Mapping[str, float]) -> dict[str, float]:
    return {name: sigma / sensitivity(mechanism, name) for name, sigma in sigmas.items()}


def _check_ratios(channels: Channels) -> None:
    for name, ratio in channels.items():
        check.positive(**{f"channels[{name!r}]": ratio})
    if not channels:
        raise PlanError("channels is empty: an algorithm that releases nothing needs no terms")
