"""The kinds of partition: one entry of PARTITION_KINDS each, and the settings that they take.

A kind is here whole: what deals the records, which settings are its own, what they have to be.
Whatever is incomplete is an error when this file is imported; docs/extending.md adds a kind.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from numpy.random import Generator
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from fedpact.data import splits
from fedpact.errors import FedpactError


@dataclass(frozen=True)
class PartitionKind:
    """A way to spread records over sites.

    split: of labels y [n], the number of sites, the settings and a seeded generator, it returns one
    array of indices a site, none of them twice; None: the data set's own sites. own: the settings
    that only matter here and in the kinds that name them too. least: records every site gets, so
    that n / least sites are the most. mistake: of the settings, "" or what is wrong with them.
    """

    split: Callable[[np.ndarray, int, Any, Generator], splits.Indices] | None
    own: tuple[str, ...] = ()
    least: int = 2
    mistake: Callable[[Any], str] = lambda _: ""


def _labels_mistake(settings: Any) -> str:
    if settings.labels_per_site is None:
        return "labels_per_site is missing: kind = 'labels' needs it; give one >= 1"
    return ""


def _power_law(y: np.ndarray, sites: int, s: Any, rng: Generator) -> splits.Indices:
    return splits.power_law(y, sites, (s.smallest, s.largest), s.exponent, s.labels_per_site, rng)


def _power_law_mistake(settings: Any) -> str:
    low, high = settings.smallest, settings.largest
    if low is None or high is None or not low <= high:
        return (
            f"smallest is {low}, largest is {high}: kind = 'power_law' needs both, with "
            "2 <= smallest <= largest; give the sizes of the smallest and largest site"
        )
    return ""


PARTITION_KINDS: Final[dict[str, PartitionKind]] = {
    "iid": PartitionKind(lambda y, sites, _, rng: splits.iid(y, sites, rng)),
    "dirichlet": PartitionKind(
        lambda y, sites, s, rng: splits.dirichlet(y, sites, s.beta, rng),
        own=("beta",),
        least=splits.DIRICHLET_LEAST,
    ),
    "labels": PartitionKind(
        lambda y, sites, s, rng: splits.by_labels(y, sites, s.labels_per_site, rng),
        own=("labels_per_site",),
        mistake=_labels_mistake,
    ),
    "shards": PartitionKind(
        lambda y, sites, s, rng: splits.shards(y, sites, s.shards_per_site, rng),
        own=("shards_per_site",),
    ),
    "power_law": PartitionKind(
        _power_law,
        own=("labels_per_site", "smallest", "largest", "exponent"),
        mistake=_power_law_mistake,
    ),
    "natural": PartitionKind(None),
}


def site_names(sites: int) -> list[str]:
    """Return what so many simulated sites are called, in order; a data set's own have theirs.

    >>> site_names(2)
    ['site-00', 'site-01']
    """
    width = max(2, len(str(sites - 1)))
    return [f"site-{i:0{width}}" for i in range(sites)]


def _known(kind: str) -> str:
    if kind not in PARTITION_KINDS:
        raise ValueError(
            f"{kind!r} is no kind of partition: expected one of {', '.join(PARTITION_KINDS)}"
        )
    return kind


class PartitionSettings(BaseModel):
    """How a simulation spreads records over sites.

    kind: iid; dirichlet (each label by Dirichlet(beta) proportions); labels (labels_per_site labels
    a site); shards (sorted by label, shards_per_site shards a site); power_law (sizes with density
    ∝ s^-exponent in [smallest, largest], held-out records included, and labels_per_site labels if
    given: FedProxVR's setting); natural (the data set's own sites).
    beta: of dirichlet; the smaller, the more unlike the sites. labels_per_site: of labels and
    power_law, how many labels a site has. shards_per_site: of shards, how many a site gets.
    smallest, largest: of power_law, the sizes of the smallest and the largest site. exponent: of
    power_law, s^-exponent is the density of sizes.
    held_out: fraction of each site's records kept for evaluation, in [0, 1); at least one record
    stays in training. Of persons, where the data set names them: each by itself, with all records.
    "own", with kind = "natural": the test part that the data set has at each site, without persons
    who are in training as well; with a fraction, that part takes no part in anything.

    A setting that the kind does not use is refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Annotated[str, AfterValidator(_known)] = "iid"
    beta: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    labels_per_site: int | None = Field(default=None, ge=1)
    shards_per_site: int = Field(default=2, ge=1)
    smallest: int | None = Field(default=None, ge=2)
    largest: int | None = Field(default=None, ge=2)
    exponent: float = Field(default=2.0, ge=0, le=20)
    held_out: Annotated[float, Field(ge=0, lt=1)] | Literal["own"] = 0.2

    @model_validator(mode="after")
    def _fits_the_kind(self) -> Self:
        for name in _SPECIFIC - set(PARTITION_KINDS[self.kind].own):
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default:
                kinds = sorted(kind for kind, about in PARTITION_KINDS.items() if name in about.own)
                raise ValueError(
                    f"{name} is {value!r} with kind = {self.kind!r}: it is a setting of "
                    f"{' and '.join(kinds)}; leave it out or change the kind"
                )
        if self.held_out == "own" and self.kind != "natural":
            raise ValueError(
                f'held_out = "own" with kind = {self.kind!r}: a data set has its test parts at its '
                'own sites; use kind = "natural", or a fraction'
            )
        if mistake := PARTITION_KINDS[self.kind].mistake(self):
            raise ValueError(mistake)
        return self


def check_kinds(kinds: Mapping[str, PartitionKind], settings: type[BaseModel]) -> None:
    """Raise FedpactError: a kind's setting that is no field, or a field that no kind names."""
    shared = {"kind", "held_out"}
    named = {name for kind in kinds.values() for name in kind.own}
    if odd := named ^ (set(settings.model_fields) - shared):
        raise FedpactError(
            f"{', '.join(sorted(odd))}: expected the settings of PartitionSettings, but for "
            f"{' and '.join(sorted(shared))}, to be those that kinds have as their own; add the "
            "field, or name it in the kind's `own`"
        )


check_kinds(PARTITION_KINDS, PartitionSettings)
# The settings that matter for some kinds only; in others they have to keep their default.
_SPECIFIC: Final = {name for kind in PARTITION_KINDS.values() for name in kind.own}
