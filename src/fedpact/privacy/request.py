"""From a budget to terms: the least noise at which all that is planned is in it."""

import math
from collections import Counter
from dataclasses import dataclass, replace

from fedpact.common import check
from fedpact.common.errors import PlanError
from fedpact.privacy.accounting import shared_noise
from fedpact.privacy.accounting.accountant import (
    ADJACENCY_BY_UNIT,
    Accountant,
    Budget,
    History,
    SampledGaussian,
    epsilon,
    joint,
    max_steps,
)
from fedpact.privacy.accounting.calibration import smallest_scale
from fedpact.privacy.terms import (
    Channels,
    FullDataRelease,
    Opening,
    Terms,
    check_ratios,
    multipliers_of,
    size_event,
)


@dataclass(frozen=True, kw_only=True)
class TermsRequest:
    """What a site's terms follow from, but for the noise. See Terms for what is not said here.

    columns: how the site releases what scales its columns, None where it does not.
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
    mechanism: str = "per_sample"
    size_noise: float | None = None
    opening: Opening | None = None
    openings: int = 0
    honest: int = 0
    grid: float = 0.0
    columns: FullDataRelease | None = None
    clips: tuple[float, ...] = ()
    protects: str = "record"

    def __post_init__(self) -> None:
        check_ratios(self.channels)

    @property
    def _priced(self) -> Budget:
        added = shared_noise.ADDED_DELTA if self.honest else 0.0
        return Budget(self.budget.epsilon, self.budget.delta - added) if added else self.budget

    def calibrate(self) -> Terms:
        """Return the terms with the least noise at which all that is planned is in the budget.

        Of shared noise σ is that of h shares together.

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
        before = self._affordable()
        whole = smallest_scale(self._priced, planned, self.accountant, spent=before)
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
        self._affordable()
        whole = full.history(full.steps, full.openings)
        if epsilon(whole, self._priced.delta, self.accountant) <= self.budget.epsilon:
            # How many more there could be is not asked, and costs a search far beyond the plan.
            return full
        before = full.history(0, full.openings)
        allowed = max_steps(full.event, self._priced, self.accountant, spent=before)
        if allowed < 1:
            opened = f", after the openings of {self.openings} rounds," if self.openings else ""
            raise PlanError(
                f"privacy.sigma is {sigma:g}: at q = {self.rate:g} a single step of site "
                f"{self.site!r}{opened} costs more than (ε = {self.budget.epsilon:g}, δ = "
                f"{self.budget.delta:g}); raise sigma, or leave it out to have it calibrated"
            )
        return replace(full, steps=min(self.steps, allowed))

    def _terms(self, sigma: float) -> Terms:
        """Terms whose channels have their ratios times sigma, shared out where noise is."""
        opening = self.opening
        sigma = sigma / math.sqrt(self.honest) if self.honest else sigma
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
            self.honest,
            self.grid,
            self.columns,
            self.clips,
            self.protects,
        )

    def _affordable(self) -> History:
        """Return what is released before training. Raises PlanError: it costs the whole budget."""
        size, budget = size_event(self.size_noise), self.budget
        cost = epsilon(size, budget.delta, self.accountant)
        if not cost < budget.epsilon:
            raise PlanError(
                f"privacy.size_noise is {self.size_noise:g}: the noisy size of site {self.site!r} "
                f"alone costs ε = {cost:.4g} at δ = {budget.delta:g} "
                f"({ADJACENCY_BY_UNIT[self.protects]}), of "
                f"the ε = {budget.epsilon:g} that it grants; raise size_noise, or declare sizes "
                'with privacy.sizes = "public"'
            )
        if self.columns is None:
            return size
        before = Counter(size) + self.columns.history
        cost = epsilon(before, budget.delta, self.accountant)
        if not cost < budget.epsilon:
            raise PlanError(
                f"what scales the columns of site {self.site!r} costs ε = {cost:.4g} at δ = "
                f"{budget.delta:g} ({ADJACENCY_BY_UNIT[self.protects]}) with {self.columns.times} "
                f"releases and "
                f"what else comes before training, of the ε = {budget.epsilon:g} that it grants; "
                "lower privacy.column_share or budget.spare_rounds, or declare mean and deviation"
            )
        return before


def _relative(mechanism: str, channels: Channels) -> float:
    """Return the joint multiplier of channels with σ = 1."""
    return joint(1.0, multipliers_of(mechanism, channels).values()).sigma
