"""The terms of a site's releases: sizes, σ, ε and δ, and what is released once of all records.

s_c = Σ_j v_c(j) + N(0, σ² b_c²)     for each channel c, with ‖v_c(j)‖ <= b_c for every record j

Without sampling, a release of m channels is a Gaussian with multiplier σ / √m. A table of counts
with each record in one cell has b = 1. The event is charged before any record is read.

Terms are public, and fixed before the first release from declared numbers only.

N_i = max(1, n_i + N(0, σ²))     sensitivity 1 under add/remove: SampledGaussian(1, σ)

A noisy size is released once, before training, and reserved with the events of the run. Dividing by
N_i or weighting with it is post-processing. σ, q and the number of steps are fixed before it and
never depend on it; otherwise composition would need a filter. The true count is only used to
sample.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from fedpact.common import check
from fedpact.common.check import positive
from fedpact.common.errors import InputError, PlanError
from fedpact.common.format import span, upper
from fedpact.common.randomness import secure
from fedpact.common.randomness.seeded import Draws
from fedpact.per_sample.clipping import check_clip
from fedpact.privacy.accounting import shared_noise
from fedpact.privacy.accounting.accountant import (
    ADJACENCY_BY_UNIT,
    Accountant,
    Budget,
    History,
    SampledGaussian,
    epsilon,
    epsilon_on_the_way,
    joint,
)
from fedpact.privacy.accounting.calibration import smallest_scale
from fedpact.privacy.batches import clip_for, most_records
from fedpact.privacy.guarantee import Guarantee
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.mechanisms import mechanism_of, sensitivity


@dataclass(frozen=True)
class FullDataRelease:
    """A release of sums over all records of a site, made up to `times` times within a budget.

    name: its name in ledger, policy and noise streams. bounds: channel -> b_c > 0. sigma: each
    channel's noise over its bound. times: the number reserved, >= 1. budget: (ε, δ) for adding or
    removing one record. Raises InputError.
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
        """Return the release with the least noise such that `times` of them fit the budget.

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
        """One release of all channels on all records."""
        return joint(1.0, [self.sigma] * len(self.bounds))

    @property
    def history(self) -> Counter[SampledGaussian]:
        """All reserved events."""
        return Counter({self.event: self.times})

    @property
    def releases(self) -> dict[str, float]:
        """Its names in a policy, such as "evaluation hits" -> noise multiplier."""
        return {f"{self.name} {channel}": self.sigma for channel in self.bounds}

    def release(
        self,
        charge: Callable[[SampledGaussian, tuple[str, ...]], None],
        sums: Callable[[], Mapping[str, Tensor]],
        draws: Draws,
    ) -> dict[str, Tensor]:
        """Charge, then compute the sums [k] of every channel, and return them with noise.

        charge: takes the event and its purpose. sums: returns float64 tensors that may be
        overwritten. Raises what `charge` raises, before any record is read.
        """
        charge(self.event, tuple(self.releases))
        exact = sums()
        return {
            channel: draws.add_noise(exact[channel], self.sigma, bound, 0, f"{self.name} {channel}")
            for channel, bound in self.bounds.items()
        }


Channels = Mapping[str, float]
"""Channel name -> its noise multiplier relative to the gradient's, which is 1."""

# Names of other releases in a policy. No channel may have one, as it would be ambiguous.
_SIZE: Final = "size"
_OPENING: Final = "opening "
_COLUMNS: Final = "columns "

SUMMED: Final = frozenset({"gradient", "loss", "below"})
"""The channels for which sites can share noise."""


@dataclass(frozen=True)
class Opening:
    """The joint event that opens a round, in addition to the batches of the local steps.

    rate: each record's probability of being in it, in (0, 1]; 1 takes all, without amplification.
    channels: channel name -> noise relative to the batches' base σ, > 0; None: as much as leaves
    the opening's mean as noisy as that of a round's batches. Raises InputError; PlanError: no
    channel.
    """

    rate: float
    channels: Mapping[str, float | None]

    def __post_init__(self) -> None:
        check.rate(rate=self.rate)
        for name, ratio in self.channels.items():
            if ratio is not None:
                check.positive(**{f"channels[{name!r}]": ratio})
        if not self.channels:
            raise PlanError("channels is empty: an algorithm that releases nothing needs no terms")

    def ratios(self, rate: float, steps: float) -> Channels:
        """Return each channel's noise relative to σ.

        rate, steps: of a round's batches, their number in the mean of all rounds.
        """
        balanced = self.rate / (rate * math.sqrt(max(1, steps)))
        return {name: balanced if r is None else r for name, r in self.channels.items()}


@dataclass(frozen=True)
class Terms:
    """One site's terms in a private run.

    size: N_i > 0, declared or released with noise. rate: q_i in (0, 1]. clip: C > 0, the largest
    norm of a record's contribution to a gradient sum, or of a batch's mean gradient. sigmas: the
    standard deviation > 0 of each channel's noise, relative to that channel's bound. steps: the
    number of reserved joint events. budget: (ε_i, δ_i), which covers the reserved events.
    accountant: counted the events. mechanism: one of MECHANISMS. size_noise: the noise multiplier
    of the released size; None if the size is declared. opening_rate, opening_sigmas, openings: rate
    and noise of the event that opens a round, and the number reserved; no sigmas, no such event.
    columns: the release that scales columns, or None. honest: h, the number of sites whose shares
    of noise protect a record together if only sums over sites are opened; sigmas are then those of
    the site's own share. 0: the site's own noise suffices. grid: ν >= shared_noise.SHARE_DEVIATION
    if each release is rounded to 1/ν of its noise's deviation, 0 if not. Shares always are rounded.
    clips: C of each round if it changes, the last one for all later rounds; see `at`. protects:
    "record" or "person", the unit of size, rate and budget.
    All sigmas 0, with any clip up to infinity, describe a run without noise: no ledger accepts it.
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
    mechanism: str = "per_sample"
    size_noise: float | None = None
    opening_rate: float = 1.0
    opening_sigmas: Mapping[str, float] = field(default_factory=dict[str, float])
    openings: int = 0
    honest: int = 0
    grid: float = 0.0
    columns: FullDataRelease | None = None
    clips: tuple[float, ...] = ()
    protects: str = "record"

    def __post_init__(self) -> None:
        if self.protects not in ADJACENCY_BY_UNIT:
            raise InputError(
                f"protects is {self.protects!r}: expected one of {', '.join(ADJACENCY_BY_UNIT)}"
            )
        check.positive(size=self.size)
        check.rate(rate=self.rate)
        check.rate(opening_rate=self.opening_rate)
        check.natural(steps=self.steps)
        check.natural(openings=self.openings)
        check.natural(honest=self.honest)
        for name in (*self.sigmas, *self.opening_sigmas):
            if name == _SIZE or name.startswith((_OPENING, _COLUMNS)):
                raise InputError(
                    f"a channel is called {name!r}: expected a name other than {_SIZE!r}, "
                    f"{_OPENING + '...'!r} and {_COLUMNS + '...'!r}, by which a policy allows "
                    "other releases"
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
        for clip in (self.clip, *self.clips):
            # Checked here, as a batch would only find out after the charge.
            if all(noisy) or clip != math.inf:
                check_clip("clip", clip_for(check.positive(clip=clip), self.batch_size))
        _ = self.multipliers
        if self.honest:
            self._check_shared()
        if self.grid and (self.honest or not self.grid >= shared_noise.SHARE_DEVIATION):
            raise InputError(
                f"grid is {self.grid!r} with honest = {self.honest}: expected 0, or at least "
                f"{shared_noise.SHARE_DEVIATION:g} and no shared noise, which has a grid of its own"
            )

    def _check_shared(self) -> None:
        """Raise InputError unless the lemma of privacy.accounting.shared_noise covers the run."""
        if (
            not {"gradient"} <= {*self.sigmas} <= SUMMED
            or self.openings
            or not mechanism_of(self.mechanism).summed
        ):
            raise InputError(
                f"honest is {self.honest} with channels {[*self.sigmas]}, openings "
                f"{self.openings}, mechanism {self.mechanism!r}: expected sums over the "
                f"batch, of {', '.join(sorted(SUMMED))}, and a gradient's among them"
            )
        once = self.size_noise is not None or self.columns is not None
        if once or not self.delta > 0:
            raise InputError(
                f"honest is {self.honest} with size_noise {self.size_noise}, columns "
                f"{self.columns} and δ = {self.budget.delta:g}: expected declared sizes and scales,"
                f" and δ > {shared_noise.ADDED_DELTA:g}"
            )

    @property
    def adjacency(self) -> str:
        """Which data sets are neighbours."""
        return ADJACENCY_BY_UNIT[self.protects]

    @property
    def delta(self) -> float:
        """The δ for pricing events: with shared noise, less the error of the sum's distribution."""
        return shared_noise.delta_of_events(self.budget.delta, self.honest)

    @property
    def units(self) -> float:
        """ν, the standard deviation of a release's noise in units of its grid; 0 without a grid."""
        return shared_noise.SHARE_DEVIATION if self.honest else self.grid

    def unit(self, channel: str, bound: float) -> float:
        """Return the grid spacing of a channel's share of noise, in units of the sum.

        bound: the channel's, C for a gradient. With shared noise σ is the same at all sites.
        """
        return self.sigmas[channel] * bound / shared_noise.SHARE_DEVIATION

    def at(self, round_number: int) -> "Terms":
        """Return the terms of a round >= 1, with its clip.

        The noise is σ times the clip, so multipliers and events are the same in every round.
        """
        if not self.clips:
            return self
        number = min(max(1, round_number), len(self.clips))
        return replace(self, clip=self.clips[number - 1], clips=())

    @property
    def multipliers(self) -> dict[str, float]:
        """Each channel's noise multiplier: its noise over its sensitivity to one record."""
        return {name: s / sensitivity(self.mechanism, name) for name, s in self.sigmas.items()}

    @property
    def releases(self) -> dict[str, float]:
        """Name of everything that the site releases -> noise multiplier; policies allow by name.

        The channels of batches; "opening gradient" and the like for the event that opens a round;
        "size" for a noisy size; "columns moments" for column scales.
        """
        size = {} if self.size_noise is None else {_SIZE: self.size_noise}
        opening = {_OPENING + name: s for name, s in self.opening.multipliers.items()}
        columns = {} if self.columns is None else self.columns.releases
        return self.multipliers | (opening if self.openings else {}) | size | columns

    @cached_property
    def opening(self) -> "Terms":
        """The opening event as the terms of a batch; these terms if there is none."""
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
        """The joint event of a step: all channels of a Poisson batch, with h shares of noise."""
        together = math.sqrt(self.shares)
        return joint(self.rate, [m * together for m in self.multipliers.values()])

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
        divisor = self.batch_size if mechanism_of(self.mechanism).summed else 1.0
        return (sigma * self.clip / divisor) ** 2 if sigma else 0.0

    def history(
        self, steps: int, openings: int | None = None, asked: int | None = None
    ) -> Counter[SampledGaussian]:
        """Return the run's events up to `steps` batches and `openings`, by default all openings.

        The released size and column scales come first; `asked` is the number of releases of the
        latter, by default all reserved ones. No steps means no openings either.
        """
        opened = min(steps, self.openings) if openings is None else openings
        found = Counter(size_event(self.size_noise)) + Counter({self.event: steps})
        if opened:
            found[self.opening.event] += opened
        if self.columns is not None:
            times = self.columns.times
            found[self.columns.event] += times if asked is None else min(asked, times)
        return found

    def steps_after(self, spent: History) -> int:
        """Return the number of reserved batches left after `spent`, a public number >= 0.

        An opening or a released size with the same event counts as a batch.
        """
        return max(0, self.history(self.steps)[self.event] - spent.get(self.event, 0))

    @property
    def shares_noise(self) -> bool:
        """Whether ε is about sums over sites that share the noise."""
        return self.honest > 0

    @property
    def shares(self) -> int:
        """The number of sites' shares in the noise that an event is counted with, at least 1."""
        return self.honest or 1

    def as_one_share(self, of: int) -> "Terms":
        """Return terms in which one share has the noise of `of` shares and nothing else counts."""
        sigmas = {name: sigma * math.sqrt(of) for name, sigma in self.sigmas.items()}
        return replace(self, sigmas=sigmas, honest=1)

    @cached_property
    def guarantee(self) -> Guarantee:
        """The budget, and ε of all that is reserved if no other site's share is noise."""
        alone = self.budget.epsilon
        if self.honest:
            own = shared_noise.all_alone(self.history(self.steps), self.honest)
            alone = epsilon(own, self.budget.delta, self.accountant)
        return Guarantee(self.budget.epsilon, self.budget.delta, alone, self.honest)

    def guarantee_after(self, spent: History) -> Guarantee:
        """Return upper bounds after some of the reserved events; cheap to compute."""
        planned, delta = self.history(self.steps), self.budget.delta
        cost = alone = epsilon_on_the_way(spent, planned, self.delta, self.accountant)
        if self.honest:
            done, whole = (shared_noise.all_alone(of, self.honest) for of in (spent, planned))
            alone = epsilon_on_the_way(done, whole, delta, self.accountant)
        return Guarantee(cost, delta, alone, self.honest)

    def per_person(self, records: int) -> Guarantee:
        """Return upper bounds on what is reserved for a person's `records` records together."""
        return self.guarantee.per_person(self.history(self.steps), records)


def size_event(noise: float | None) -> dict[SampledGaussian, int]:
    """Return the event of a released size, a count of all records: sensitivity 1, no sampling."""
    return {} if noise is None else {SampledGaussian(1.0, noise): 1}


def channels(terms: Mapping[str, Terms]) -> str:
    """Return each channel with the range of its σ over all sites."""
    each = {
        name: [of.sigmas[name] for of in terms.values()]
        for name in next(iter(terms.values())).sigmas
    }
    spans = {name: span(f"{min(of):.4f}", f"{max(of):.4f}") for name, of in each.items()}
    return ", ".join(f"{name} {told}" for name, told in spans.items())


def noisy_size(records: int, noise: float, draws: Draws) -> float:
    """Return N_i >= 1, a multiple of 2^-10: `records` plus noise of standard deviation `noise`.

    The noise is added on the grid (common.randomness.secure). Not charged here; see `charge_size`.
    Raises InputError: noise is not a finite number > 0.
    """
    total = torch.tensor([records], dtype=torch.float64)
    release = secure.noisy(
        total, positive(noise=noise), 1.0, lambda n, like: draws.gaussian(n, like, 0, "size")
    )
    return max(1.0, float(release))


def charge_size(ledger: Ledger, run: str, terms: Terms) -> None:
    """Charge the released size; nothing if it is declared. Raises what Ledger.charge raises."""
    for event, count in size_event(terms.size_noise).items():
        ledger.charge(run, "size", event, count, purpose=("size",), round_number=0)


# Up to here the last bit of a float64 is 2^-26 of a unit: it changes probabilities by that factor.
_MOST_UNITS: Final = 2.0**27


def delta_too_large(promised: Iterable[tuple[float, float]]) -> str:
    """Return a warning about a δ of 1/N or more; promised: (δ, N) of each site; "" if none."""
    worst = max(promised, key=lambda one: one[0] * one[1], default=(0.0, 0.0))
    delta, size = worst
    if not delta * size >= 1:
        return ""
    return (
        f"δ = {upper(delta)} at a site with N = {size:g} is too large: δ bounds each one's chance "
        f"of being revealed, so about {delta * size:.2g} of them may be. Choose a δ far below "
        f"1/N, such as {0.01 / size:.1g}"
    )


def check_grid(terms: Iterable[Terms]) -> None:
    """Raise PlanError unless sums are small enough in grid units for float64 to round them.

    A release is u floor(S/u + ν z + 1/2), z normal and ν u the noise's deviation: post-processing
    of a Gaussian mechanism for any S and u. S/u + ν z is a float64 number, so the release may
    differ if it is within its last bit of a half.
    terms: of any sites; those without a grid are skipped.
    """
    for one in terms:
        for each in (one, one.opening) if one.grid else ():
            longest = most_records(each.batch_size) * one.grid / min(each.sigmas.values())
            if not longest <= _MOST_UNITS:
                raise PlanError(
                    f"a sum of site {one.site!r} has up to {longest:.3g} units of its grid: "
                    f"expected at most {_MOST_UNITS:.3g}, as far as floating point is shown to "
                    "round it like a real number; use smaller batches, or compression.kind = "
                    '"none"'
                )
