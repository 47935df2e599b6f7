"""The [privacy] table of a plan: each site's budget, clip and noise."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from fedpact.common import check
from fedpact.common.configuration import FROZEN
from fedpact.common.errors import PlanError
from fedpact.common.run_settings import ScheduleKind, factor
from fedpact.per_sample.clipping import check_clip
from fedpact.privacy import column_scales
from fedpact.privacy.accounting.accountant import (
    ACCOUNTANTS,
    ADJACENCY_BY_UNIT,
    Accountant,
    Budget,
    round_rate_up,
)
from fedpact.privacy.accounting.group_privacy import MOST_RECORDS, PERSON_RECORDS
from fedpact.privacy.mechanisms import MECHANISMS, mechanism_of
from fedpact.privacy.noise import calibrate, with_noise
from fedpact.privacy.terms import FullDataRelease, Terms

_Epsilon = Annotated[float, Field(gt=0)]
_Delta = Annotated[float, Field(gt=0, lt=1)]
_Rate = Annotated[float, Field(gt=0, le=1)]


class SiteGrant(BaseModel):
    """One site's values, if they differ from those of all sites."""

    model_config = FROZEN
    epsilon: _Epsilon | None = None
    """The site's ε."""
    delta: _Delta | None = None
    """The site's δ."""
    sigma: _Epsilon | None = None
    """The site's noise over C."""
    sampling_rate: _Rate | None = None
    """The site's q."""


def _one_of(table: Mapping[str, object], *more: str) -> AfterValidator:
    def check_name(name: str) -> str:
        # Looked up when a plan is read: a module of one's own may have added an entry.
        if name not in table and name not in more:
            raise ValueError(f"{name!r}: expected one of {', '.join((*table, *more))}")
        return name

    return AfterValidator(check_name)


class Privacy(BaseModel):
    """How records are protected: (ε, δ) per record, under adding or removing one record."""

    model_config = FROZEN
    mode: Annotated[str, _one_of(MECHANISMS, "none")] = "per_sample"
    """"per_sample" clips each record's gradient; "automatic" scales it up or down to a norm of
    almost C (AUTO-S); "batch_clipped" clips the mean gradient of a batch, which one record can
    change by 2C, so it needs twice the sigma; "none" trains without any protection, and the report
    says so."""
    epsilon: _Epsilon | list[_Epsilon] = 2.0
    """ε of each record at each site: one value for all sites, or a list in the order of site
    names."""
    delta: _Delta | list[_Delta] = 1e-5
    """δ of each record at each site: one value for all sites, or a list in the order of site
    names."""
    clip: float = Field(default=1.0, gt=0)
    """C, the largest norm of one record's gradient in a sum, or of a batch's mean gradient."""
    clip_schedule: ScheduleKind | list[_Epsilon] = Field(default="constant", min_length=1)
    """The clip of round t of T is C f(t): f = 1 if constant; 1 / (1 + (t - 1) / h) if inverse;
    (1 + cos(π (t - 1) / T)) / 2 if cosine; or a list f(1), f(2), ... The noise is σ C f(t), so
    the cost of a round does not change."""
    clip_halved_after: float = Field(default=10.0, gt=0)
    """h of clip_schedule = "inverse": after so many rounds the clip is half."""
    sigma: _Epsilon | list[_Epsilon] | None = None
    """The gradient's noise over C: one value, or a list in the order of site names. By default it
    is calibrated to spend ε exactly."""
    accountant: Annotated[Accountant, _one_of(ACCOUNTANTS)] = "best"
    """"pld", "rdp", or "best", the smaller of the two bounds."""
    sizes: Literal["public", "noisy"] = "public"
    """"public": N_i is declared. "noisy": each site releases one noisy count of its records before
    training, paid from its budget: in a simulation only. A plain run uses exact sizes."""
    size_noise: float = Field(default=10.0, gt=0)
    """The standard deviation of that count's noise, in records; its sensitivity is 1."""
    column_share: float = Field(default=0.04, gt=0, lt=1)
    """The share of the budget for releasing means of columns with scale = "released": 1/σ² adds
    up over Gaussian releases, and this is the release's part of the total."""
    trust: Literal["own", "sum"] = "own"
    """"own": each site's noise alone protects its records. "sum": sites share the noise, and only
    sums over sites are revealed ([secure_aggregation]). ε then requires `honest` sites; the larger
    ε that requires none is also stated. See docs/notes/noise-for-the-sum.md."""
    honest: int = Field(default=0, ge=0)
    """h, the number of sites in a sum whose noise must be unknown to an attacker; less than the
    threshold, as a site knows its own noise."""
    unit: Literal["record", "person"] = "record"
    """What (ε, δ) protects: a "record", or a "person" with all records at the site. For persons,
    persons are sampled, sizes count persons, and each of a person's m records has weight 1/m; this
    needs a column that identifies the person (`person`)."""
    person_records: int | None = Field(default=None, ge=1, le=MOST_RECORDS)
    """k. With unit = "record", ε is also stated for a person with up to k records, in addition to
    2, 3, 5 and 10. If persons are known, a site uses at most k records of each."""
    per_site: dict[str, SiteGrant] = Field(default_factory=dict[str, SiteGrant])
    """Site name -> values that differ from those of all sites."""

    @property
    def shares_noise(self) -> bool:
        """Whether sites share the noise, so that ε is about sums over sites."""
        return self.honest > 0

    def noise_copies(self, sites: int) -> float:
        """Return the variance of the noise in a sum over the sites, relative to what ε needs."""
        return sites / (self.honest or 1)

    @model_validator(mode="after")
    def _check_shared(self) -> Self:
        if (self.trust == "sum") != (self.honest > 0):
            raise ValueError(
                f'trust = "{self.trust}" with honest = {self.honest}: expected trust = "sum" with '
                'honest >= 1, the number of sites whose noise is relied on, or trust = "own" '
                "without it"
            )
        if self.clip_halved_after != 10.0 and self.clip_schedule != "inverse":
            raise ValueError(
                f"clip_halved_after is {self.clip_halved_after:g} with clip_schedule = "
                f'{self.clip_schedule!r}: it belongs to clip_schedule = "inverse"; leave it out'
            )
        if self.honest and (self.mode != "per_sample" or self.sizes == "noisy"):
            raise ValueError(
                f'trust = "sum" with mode = "{self.mode}", sizes = "{self.sizes}": expected mode = '
                '"per_sample" and sizes = "public", as only sums of clipped records have shared '
                "noise"
            )
        if self.unit == "person" and self.mode != "none" and not mechanism_of(self.mode).summed:
            raise ValueError(
                f'unit = "person" with mode = "{self.mode}": a person\'s records share the '
                "person's clip, which is impossible if a batch is clipped as a whole; use "
                'mode = "per_sample"'
            )
        return self

    @property
    def calibrates(self) -> bool:
        """Whether σ is calibrated to the budgets, which requires the number of iterations."""
        return self.mode != "none" and self.sigma is None

    def clips(self, rounds: int) -> tuple[float, ...]:
        """Return C of each round, or () if it is constant."""
        if self.clip_schedule == "constant":
            return ()
        kind, half = self.clip_schedule, self.clip_halved_after
        return tuple(self.clip * factor(kind, half, t, rounds) for t in range(1, rounds + 1))

    def check_rate(self, rate: float | None, batch: float | None) -> None:
        """Raise ValueError if q is given twice, or would depend on a released size."""
        if rate is not None and batch is not None:
            raise ValueError(
                f"sampling_rate = {rate} and batch_size = {batch}: they set the same thing; leave "
                "one out"
            )
        if self.sizes == "noisy" and batch is not None:
            raise ValueError(
                f'batch_size = {batch:g} with privacy.sizes = "noisy": q = B / N, and with it the '
                "noise, would depend on a release, which the accounting does not cover; give "
                "sampling_rate instead"
            )

    def check_clips(self, rounds: int) -> None:
        """Raise InputError unless every round's clip is within the kernel's range."""
        if self.mode == "none":
            return
        for number, clip in enumerate((self.clip, *self.clips(rounds))):
            kind = "clip_halved_after" if self.clip_schedule == "inverse" else "clip_schedule"
            by = f" of round {number}, by privacy.{kind}," if number else ""
            name = f"privacy.clip{by}"
            check_clip(name, check.positive(**{name: clip}))

    def check_means(self, *, exact: bool, released: bool) -> None:
        """Raise ValueError if persons are protected, but means over records are released.

        exact: without noise. released: with noise for one record, to scale columns.
        """
        if released and self.unit == "person":
            raise ValueError(
                'privacy.unit = "person" with scale = "released": a column\'s mean is summed over '
                "records, with noise for one record; declare mean and deviation"
            )
        if exact and self.unit == "person":
            raise ValueError(
                'privacy.unit = "person" with estimator = "raw": exact means over records do not '
                "depend on persons; use another estimator"
            )

    def check_sum(self, threshold: int, whose: str, needs_own_noise: str) -> None:
        """Raise ValueError if sites cannot share noise.

        threshold: of secure aggregation. whose: the method, in words. needs_own_noise: why shared
        noise would not protect it; "" if it would.
        """
        if not self.honest:
            return
        if not threshold:
            raise ValueError(
                'privacy.trust = "sum" needs a server that only sees sums: set '
                'secure_aggregation.threshold, or trust = "own"'
            )
        if needs_own_noise:
            raise ValueError(
                f'privacy.trust = "sum" cannot be combined with {whose}: {needs_own_noise}'
            )
        given = [grant.sigma for grant in self.per_site.values()]
        if isinstance(self.sigma, list) or any(s is not None for s in given):
            raise ValueError(
                'privacy.trust = "sum" with a sigma for each site: the noise is that of the sum; '
                "give one number, or leave it out"
            )

    def colluding(self, threshold: int, sites: int) -> int:
        """Return c, the number of sites that may collude with the server, by h or t."""
        # Shared noise needs h honest sites among any t of a sum. Otherwise, two lists of t sites
        # that a server might have signed in one round share at least 2t - K sites: one more than c.
        return threshold - self.honest if self.honest else 2 * threshold - sites - 1

    def check_shared(self, threshold: int, sites: int) -> None:
        """Raise PlanError unless every sum of at least `threshold` sites has `honest` unknown ones.

        At most c = t - h parties may collude, including the site that looks at a sum; 2t > K + c
        rules out two lists with t signatures each.
        """
        if self.honest and not sites - threshold < self.honest < threshold:
            least, most = sites - threshold + 1, threshold - 1
            needed = max(self.honest, sites - self.honest) + 1
            remedies = list[str]()
            if least <= most:
                remedies.append(f"honest = {least}" + f" to {most}" * (least < most))
            if needed <= sites:
                remedies.append(f"a threshold of at least {needed}")
            or_both = f"honest below {sites}, and a threshold of {sites}"
            raise PlanError(
                f"privacy.honest = {self.honest} with {sites} sites and secure_aggregation."
                f"threshold = {threshold}: expected {', or '.join(remedies) or or_both}; in a sum "
                f"of {threshold} sites at least one, which looks at it, knows its share, and with "
                "too many dishonest sites two lists can reach the threshold"
            )

    @property
    def adjacency(self) -> str:
        """Which data sets are neighbours."""
        return ADJACENCY_BY_UNIT[self.unit]

    @property
    def told_records(self) -> tuple[int, ...]:
        """The numbers of records per person for which ε is stated; none if ε is per person."""
        if self.unit == "person":
            return ()
        asked = () if self.person_records is None else (self.person_records,)
        return tuple(sorted({*PERSON_RECORDS, *asked}))

    def check_sites(self, sites: tuple[str, ...]) -> None:
        """Raise PlanError if a list or a table does not fit these sites."""
        for name in ("epsilon", "delta", "sigma"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != len(sites):  # pyright: ignore[reportUnknownArgumentType]
                raise PlanError(
                    f"privacy.{name} lists {len(value)} values for {len(sites)} sites: "  # pyright: ignore[reportUnknownArgumentType]
                    "give one value for all of them, or one for each in the order of their names"
                )
        unknown = sorted(set(self.per_site) - set(sites))
        if unknown:
            raise PlanError(
                f"privacy.per_site names {', '.join(unknown)}: the sites are {_few(sites)}"
            )

    def budget(self, site: str, sites: tuple[str, ...]) -> Budget:
        """Return (ε_i, δ_i) of one of these sites."""
        grant = self.per_site.get(site, SiteGrant())
        place = sites.index(site)
        return Budget(
            grant.epsilon or _at(self.epsilon, place), grant.delta or _at(self.delta, place)
        )

    def rate(self, site: str, size: float, rate: float, batch: float | None) -> float:
        """Return q_i of a site of nominal size N_i: its own, else B / N_i, else that of all.

        B / N_i is rounded up to the shared grid.
        """
        own = self.per_site.get(site, SiteGrant()).sampling_rate
        if own is not None:
            return own
        return rate if batch is None else round_rate_up(min(1.0, batch / size))

    def release_of(
        self, released: tuple[str, ...], site: str, sites: tuple[str, ...], times: int
    ) -> FullDataRelease | None:
        """Return a site's release of its columns' means; None if there is none."""
        if not released:
            return None
        budget = self.budget(site, sites)
        return column_scales.release(
            len(released), budget, self.accountant, self.column_share, times
        )

    def least_noise_of(self, released: int) -> float:
        """Return the smallest noise deviation in sums of columns under any of the budgets."""
        of = self.largest
        return column_scales.deviation(
            column_scales.release(released, of, self.accountant, self.column_share, 1)
        )

    @property
    def largest(self) -> Budget:
        """The largest ε and the largest δ of all sites."""
        grants = self.per_site.values()
        epsilon = max(_most(self.epsilon), *(one.epsilon or 0.0 for one in grants), 0.0)
        delta = max(_most(self.delta), *(one.delta or 0.0 for one in grants), 0.0)
        return Budget(epsilon, delta)

    def terms(self, sites: tuple[str, ...], asked: Terms) -> Terms:
        """Return a site's terms, with σ_i as given or calibrated.

        asked: the terms at unit noise (privacy.noise). A site that takes part in no round gets the
        noise of a single round, and reserves nothing.
        Raises PlanError: the given σ does not allow a single step.
        """
        once = replace(asked, steps=1, opening_sigmas={}, openings=0)
        planned = asked if asked.steps else once
        sigma = self.per_site.get(asked.site, SiteGrant()).sigma
        if sigma is None and self.sigma is not None:
            sigma = _at(self.sigma, sites.index(asked.site))
        found = calibrate(planned) if sigma is None else with_noise(planned, sigma)
        return found if asked.steps else replace(found, steps=0)

    def together(self, each: dict[str, Terms]) -> dict[str, Terms]:
        """Return the terms of all sites; if they share noise, all with the largest σ.

        Every site relies on the others' shares, so all add as much as the strictest budget needs.
        """
        if not self.honest:
            return each
        loudest = max(each.values(), key=lambda one: one.event.sigma)
        return {name: replace(one, sigmas=loudest.sigmas) for name, one in each.items()}


def _most(value: float | list[float]) -> float:
    return max(value) if isinstance(value, list) else value


def _at(value: float | list[float], place: int) -> float:
    return value[place] if isinstance(value, list) else value


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{names[0]} to {names[-1]}"
