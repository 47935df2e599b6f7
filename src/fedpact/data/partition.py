"""Partitions of records over sites: kinds, settings, and their application.

An entry of PARTITION_KINDS defines a kind completely; one that is incomplete is an error when this
file is imported. docs/how-to/extend.md shows how to add one.

>>> from fedpact.data.load import load_dataset
>>> settings = PartitionSettings(kind="labels", labels_per_site=2)
>>> partition = make_partition(load_dataset("digits"), settings, sites=5, seed=1)
>>> [(site.name, len(site.y.unique())) for site in partition.sites(load_dataset("digits"))][:2]
[('site-00', 2), ('site-01', 2)]
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
import torch
from numpy.random import PCG64, Generator
from pydantic import AfterValidator, BaseModel, Field, model_validator
from torch import Tensor

from fedpact.common import check
from fedpact.common.configuration import FROZEN, check_kinds
from fedpact.common.errors import DataError
from fedpact.common.files import replacing, safe_name
from fedpact.data import splits
from fedpact.data.dataset import Dataset


@dataclass(frozen=True)
class PartitionKind:
    """A way to spread records over sites.

    split: (values [n] to split by, number of sites, settings, seeded generator) -> one array of
    indices for each site, all different; None: the data set's own sites. by: the values to split
    by: "label", which must be classes, a "feature", or "any": labels, or zeros if they are not
    classes. own: the settings that only this kind, and others that name them, use. least: a site's
    least number of records. mistake: settings -> what is wrong with them, or "". noise: (settings,
    place of the site in [0, 1]) -> the deviation of the noise on its features; None: no noise.
    """

    split: Callable[[np.ndarray, int, Any, Generator], splits.Indices] | None
    by: Literal["any", "label", "feature"] = "any"
    own: tuple[str, ...] = ()
    least: int = 2
    mistake: Callable[[Any], str] = lambda _: ""
    noise: Callable[[Any, float], float] | None = None


def _labels_mistake(settings: Any) -> str:
    if settings.labels_per_site is None:
        return f"labels_per_site is missing: kind = {settings.kind!r} needs it; give one >= 1"
    return ""


_LABELS: Final = PartitionKind(
    splits.by_labels, by="label", own=("labels_per_site",), mistake=_labels_mistake
)


def _power_law_mistake(settings: Any) -> str:
    low, high = settings.smallest, settings.largest
    if low is None or high is None or not low <= high:
        return (
            f"smallest is {low}, largest is {high}: kind = 'power_law' needs both, with "
            "2 <= smallest <= largest; give the sizes of the smallest and largest site"
        )
    return ""


def _growing(units: Callable[[np.ndarray], np.ndarray]) -> PartitionKind:
    return PartitionKind(
        lambda y, sites, _, rng: splits.growing(y, units(np.arange(1.0, sites + 1)), rng)
    )


PARTITION_KINDS: Final[dict[str, PartitionKind]] = {
    "iid": PartitionKind(splits.iid),
    "dirichlet": PartitionKind(
        splits.dirichlet, by="label", own=("beta",), least=splits.DIRICHLET_LEAST
    ),
    "inner_dirichlet": PartitionKind(splits.inner_dirichlet, by="label", own=("beta",)),
    "quantity_skew": PartitionKind(
        splits.quantity_skew, own=("beta",), least=splits.DIRICHLET_LEAST
    ),
    "labels": _LABELS,
    "pathological": _LABELS,  # what flwr-datasets calls it
    "shards": PartitionKind(splits.shards, by="label", own=("shards_per_site",)),
    "feature_skew": PartitionKind(splits.feature_skew, by="feature", own=("feature", "strictness")),
    "feature_noise": PartitionKind(
        splits.iid, own=("noise",), noise=lambda s, place: (s.noise * place) ** 0.5
    ),
    "power_law": PartitionKind(
        splits.power_law,
        own=("labels_per_site", "smallest", "largest", "exponent"),
        mistake=_power_law_mistake,
    ),
    "linear": _growing(np.positive),
    "square": _growing(np.square),
    "exponential": _growing(lambda i: np.exp(i - i[-1])),  # of the last, so that none overflows
    "natural": PartitionKind(None),
}

# By flwr-datasets' names: the kinds that they are, if not those that the names say.
_USUAL_NAMES: Final = {"shard": "shards", "continuous": "feature_skew", "natural_id": "natural"}


def site_names(sites: int) -> list[str]:
    """Return the names of so many simulated sites, in order.

    >>> site_names(2)
    ['site-00', 'site-01']
    """
    width = max(2, len(str(sites - 1)))
    return [f"site-{i:0{width}}" for i in range(sites)]


def _check_kind(kind: str) -> str:
    if kind.endswith("Partitioner"):
        name = re.sub("(?<=.)(?=[A-Z])", "_", kind.removesuffix("Partitioner")).lower()
        kind = _USUAL_NAMES.get(name, name)
    if kind not in PARTITION_KINDS:
        raise ValueError(
            f"{kind!r} is no kind of partition: expected one of {', '.join(PARTITION_KINDS)}, or "
            "flwr-datasets' name for it; else use natural and name each record's site (site=...)"
        )
    return kind


class PartitionSettings(BaseModel):
    """How a simulation spreads records over sites.

    A setting that the kind does not use is refused.
    """

    model_config = FROZEN
    kind: Annotated[str, AfterValidator(_check_kind)] = "iid"
    """iid, dirichlet, natural (the data set's own sites), or another one (`fedpact settings
    partition`). In full: dirichlet (each label by Dirichlet(beta) proportions); inner_dirichlet
    (equal sizes, each site's labels by Dirichlet(beta) proportions); quantity_skew (sizes by
    Dirichlet(beta) proportions); labels, also called pathological (labels_per_site labels a site);
    shards (sorted by label, shards_per_site shards a site); feature_skew (sorted by a feature);
    feature_noise (iid records with noise on their features, more from site to site); power_law
    (sizes with density ∝ s^-exponent in [smallest, largest], held-out records included, and
    labels_per_site labels if given: FedProxVR's setting); linear, square and exponential (site i's
    size ∝ i, i², e^i). flwr-datasets' names, as ShardPartitioner, are read as these."""
    beta: float = Field(default=1.0, gt=0)
    """The Dirichlet distribution's concentration, alpha or beta in papers; the smaller, the more
    sites differ. Of dirichlet, inner_dirichlet and quantity_skew."""
    labels_per_site: int | None = Field(default=None, ge=1)
    """Of labels, pathological and power_law, how many labels a site has."""
    shards_per_site: int = Field(default=2, ge=1)
    """Of shards, how many a site gets."""
    feature: int = Field(default=0, ge=0)
    """Of feature_skew, the place, from 0, of the number in a record that records are sorted by."""
    strictness: float = Field(default=1.0, ge=0, le=1)
    """Of feature_skew, 1: sorted; 0: iid."""
    noise: float = Field(default=0.1, ge=0)
    """Of feature_noise, σ: the variance of the last site's noise; site i of m has σ i/m."""
    smallest: int | None = Field(default=None, ge=2)
    """Of power_law, the sizes of the smallest and the largest site."""
    largest: int | None = Field(default=None, ge=2)
    """Of power_law, the sizes of the smallest and the largest site."""
    exponent: float = Field(default=2.0, ge=0, le=20)
    """Of power_law, s^-exponent is the density of sizes."""
    held_out: Annotated[float, Field(ge=0, lt=1)] | Literal["own"] = 0.2
    """Fraction of each site's records kept for evaluation, in [0, 1); at least one record stays
    in training. Of persons, where the data set names them: each by itself, with all records.
    "own", with kind = "natural": the test part that the data set has at each site, without
    persons who are in training as well; with a fraction, that part takes no part in anything."""
    validation: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of each site's training records to choose settings by: they are not trained on, and
    evaluated in place of the held-out and test records, which are not used then."""

    @model_validator(mode="before")
    @classmethod
    def _kind_alone(cls, raw: Any) -> Any:
        return {"kind": raw} if isinstance(raw, str) else raw

    @model_validator(mode="after")
    def _fits_the_kind(self) -> Self:
        for name in _SPECIFIC - set(PARTITION_KINDS[self.kind].own):
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default:
                kinds = sorted(kind for kind, about in PARTITION_KINDS.items() if name in about.own)
                raise ValueError(
                    f"{name} is {value!r} with kind = {self.kind!r}: only kind = "
                    f"{' or '.join(map(repr, kinds))} uses it; leave it out or set partition.kind"
                )
        if self.held_out == "own" and self.kind != "natural":
            raise ValueError(
                f'held_out = "own" with kind = {self.kind!r}: a data set has its test parts at its '
                'own sites; use kind = "natural", or a fraction'
            )
        if mistake := PARTITION_KINDS[self.kind].mistake(self):
            raise ValueError(mistake)
        return self


check_kinds(PARTITION_KINDS, PartitionSettings, ("kind", "held_out", "validation"))
# The settings that matter for some kinds only; in others they have to keep their default.
_SPECIFIC: Final = {name for kind in PARTITION_KINDS.values() for name in kind.own}


@dataclass(frozen=True, eq=False)
class SiteRecords:
    """One site's records: x [n, ...], y [n] to train on; x_held, y_held, maybe none, to evaluate.

    name: as in the data set; sites are ordered by it. persons: the person of each training record,
    int64 [n] from 0 without gaps; None where the data set does not say.
    """

    name: str
    x: Tensor
    y: Tensor
    x_held: Tensor
    y_held: Tensor
    persons: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Partition:
    """Site name -> ascending indices into the data set's training records, in the names' order.

    train, held_out: disjoint; every site is in both, and a site's held-out part may be empty. With
    settings.validation, held_out is that part of the training records.
    label_counts [sites, classes]: training records of each label.
    """

    settings: PartitionSettings
    seed: int
    classes: tuple[str, ...]
    train: Mapping[str, np.ndarray]
    held_out: Mapping[str, np.ndarray]
    label_counts: np.ndarray

    def sites(self, dataset: Dataset) -> list[SiteRecords]:
        """Return the sites' records, by name. Raises DataError for another data set's partition."""
        used = np.concatenate([*self.train.values(), *self.held_out.values()])
        if not (
            len(used) == len(np.unique(used))
            and 0 <= used.min() <= used.max() < len(dataset.y)
            and dataset.classes == self.classes
            and np.array_equal(_label_counts(dataset, self.train), self.label_counts)
        ):
            raise DataError(
                f"the partition was made from other records than those of data set {dataset.name}: "
                "make it again with make_partition"
            )
        return [
            SiteRecords(
                name,
                *self._take(dataset, self.train[name], place),
                *self._take(dataset, self.held_out[name], place),
                splits.number_persons(dataset.person, self.train[name]),
            )
            for place, name in enumerate(self.train, start=1)
        ]

    def _take(self, dataset: Dataset, indices: np.ndarray, place: int) -> tuple[Tensor, Tensor]:
        """Return the records of these indices at the site of this place, counted from 1."""
        chosen = torch.from_numpy(indices)
        x, y = dataset.x[chosen], dataset.y[chosen]
        if (noise := PARTITION_KINDS[self.settings.kind].noise) is None:
            return x, y
        if not x.is_floating_point():
            raise DataError(
                f"partition.kind = {self.settings.kind!r} adds noise to features, and those of "
                f"data set {dataset.name} are tokens: choose another kind"
            )
        # A record's noise follows from its index alone.
        draws = [
            Generator(PCG64((self.seed, int(i)))).standard_normal(x[0].numel()) for i in indices
        ]
        deviation = noise(self.settings, place / len(self.train))
        drawn = torch.from_numpy(np.reshape(draws, x.shape)).to(x.dtype)
        return x + deviation * drawn, y

    def save(self, path: Path | str) -> None:
        """Write the partition as JSON. For simulations: the file shows the sites' labels."""
        content = {
            "settings": self.settings.model_dump(),
            "seed": self.seed,
            "classes": self.classes,
            "train": {name: indices.tolist() for name, indices in self.train.items()},
            "held_out": {name: indices.tolist() for name, indices in self.held_out.items()},
            "label_counts": self.label_counts.tolist(),
        }
        with replacing(Path(path), private=False) as target:
            target.write_text(json.dumps(content))

    @staticmethod
    def load(path: Path | str) -> "Partition":
        """Read back what `save` wrote. Raises DataError where it is something else."""
        try:
            raw: dict[str, Any] = json.loads(Path(path).read_text())
            if not raw["train"] or raw["train"].keys() != raw["held_out"].keys():
                raise ValueError("its sites do not agree")
            train, held_out = (
                {name: np.array(indices, np.int64) for name, indices in raw[part].items()}
                for part in ("train", "held_out")
            )
            counts = np.array(raw["label_counts"], np.int64)
            settings = PartitionSettings(**raw["settings"])
            return Partition(settings, raw["seed"], tuple(raw["classes"]), train, held_out, counts)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"partition file {path} cannot be used ({type(error).__name__}: {error}): expected "
                "what Partition.save wrote; make the partition again"
            ) from error


def make_partition(
    dataset: Dataset,
    settings: PartitionSettings,
    sites: int,
    seed: int,
    held: Callable[[str, np.ndarray], np.ndarray] | None = None,
) -> Partition:
    """Spread a data set's training records over sites, every record to at most one.

    Persons, where the data set names them, are spread and held out whole. sites: >= 1; of kind
    "natural" the number of the data set's own. seed: >= 0; the partition is the same on every
    machine, and held_out does not change which site a record belongs to. held: instead of
    settings.held_out, (site's name, its records [n]) -> which are held out, bool [n].
    Raises DataError: a site would have fewer than 2 records, or none to train on, or the data set
    does not allow the settings; InputError: sites or seed.
    """
    check.count(sites=sites)
    if held is not None and settings.held_out == "own":
        raise DataError(
            'partition.held_out = "own" with evaluation.share: the data set\'s own split and each '
            "record's own choice would both say what is held out; leave one of them out"
        )
    rng = Generator(PCG64(check.natural(seed=seed)))
    split = PARTITION_KINDS[settings.kind].split
    if split is None:
        records = _natural(dataset, settings, sites)
    else:
        least = PARTITION_KINDS[settings.kind].least
        free = np.arange(len(dataset.y)) if dataset.held is None else np.flatnonzero(~dataset.held)
        whose = splits.number_persons(dataset.person, free)
        firsts = np.arange(len(free)) if whose is None else np.unique(whose, return_index=True)[1]
        what = "records" if whose is None else "persons"
        if sites * least > len(firsts):
            most = len(firsts) // least
            raise DataError(
                f"sites is {sites} for the {len(firsts)} {what} of data set {dataset.name}: the "
                f"split {settings.kind!r} gives every site at least {least}; "
                + (f"take at most {most} sites" if most else f"expected {least} {what} or more")
            )
        parts = split(_strata(dataset, settings)[free][firsts], sites, settings, rng)
        _check_parts(settings.kind, parts, sites, len(firsts))
        if whose is not None:
            parts = [np.flatnonzero(np.isin(whose, persons)) for persons in parts]
        records = {name: free[part] for name, part in zip(site_names(sites), parts, strict=True)}
    for name, part in records.items():
        if len(part) < 2:
            raise DataError(
                f"site {name} would have {len(part)} of the {len(dataset.y)} records of data set "
                f"{dataset.name} with kind = {settings.kind!r}: expected at least 2; "
                + ("take fewer sites or a more even split" if sites > 1 else "collect more")
            )
    train, held_out = {}, {}
    for name, part in records.items():
        if settings.held_out == "own":
            train[name], test = _own_parts(dataset, part)
            held_out[name] = splits.of_others(dataset.person, test, train[name])
            continue
        if held is not None:
            out = held(name, part)
        else:
            out = splits.hold_out(dataset.person, part, settings.held_out, seed, rng)
        held_out[name], train[name] = np.sort(part[out]), np.sort(part[~out])
        if out.all():
            raise DataError(
                f"everybody at site {name}, of {len(part)} records, is held out by its own choice: "
                "lower the share, take fewer sites, or another seed"
            )
    if settings.validation:
        for name, part in train.items():
            share = settings.validation
            out = splits.hold_out(dataset.person, part, share, seed, rng, "validation")
            out &= not out.all()  # at least one person stays in training
            held_out[name], train[name] = part[out], part[~out]
    return Partition(
        settings, seed, dataset.classes, train, held_out, _label_counts(dataset, train)
    )


def _check_parts(kind: str, parts: splits.Indices, sites: int, count: int) -> None:
    """Raise DataError unless there is a part for each site, and nothing is in two."""
    dealt = np.concatenate([np.ravel(part) for part in parts] or [np.array(())])
    inside = dealt.dtype.kind in "iu" and bool(((dealt >= 0) & (dealt < count)).all())
    if not (len(parts) == sites and inside and len(np.unique(dealt)) == len(dealt)):
        raise DataError(
            f"the split {kind!r} gave {len(parts)} arrays of {len(dealt)} {dealt.dtype} indices: "
            f"expected one array for each of {sites} sites, with integers from 0 to {count - 1}, "
            "none twice; correct its function in PARTITION_KINDS"
        )


def _strata(dataset: Dataset, settings: PartitionSettings) -> np.ndarray:
    """Return what a split goes by, [n]: labels, or a feature; zeros where labels are no classes."""
    by = PARTITION_KINDS[settings.kind].by
    if by == "feature":
        numbers = dataset.x.flatten(1)
        if settings.feature >= numbers.shape[1]:
            raise DataError(
                f"partition.feature is {settings.feature}: a record of data set {dataset.name} has "
                f"{numbers.shape[1]} numbers; expected at most {numbers.shape[1] - 1}"
            )
        return numbers[:, settings.feature].double().numpy()
    if dataset.kind == "class":
        return dataset.y.numpy()
    if by == "label" or settings.labels_per_site is not None:
        raise DataError(
            f"partition.kind = {settings.kind!r} spreads records by their class, and the labels of "
            f"data set {dataset.name} are none: use iid, natural, quantity_skew, a kind that goes "
            "by features, or power_law without labels_per_site"
        )
    return np.zeros(len(dataset.y), np.int64)


def _natural(dataset: Dataset, settings: PartitionSettings, sites: int) -> dict[str, np.ndarray]:
    if dataset.site is None:
        raise DataError(
            f"data set {dataset.name} has no sites of its own: choose another kind of partition, "
            "or name the site of each record (site=...)"
        )
    names = np.asarray(dataset.site)
    records = {str(name): np.flatnonzero(names == name) for name in np.unique(names)}
    if dataset.held is not None and settings.held_out != "own":
        records = {name: _own_parts(dataset, part)[0] for name, part in records.items()}
    if len(records) != sites:
        raise DataError(
            f"sites is {sites} and data set {dataset.name} has {len(records)} sites of its own: "
            f"set sites = {len(records)}, or name no column of sites"
        )
    safe = {name: safe_name(name) for name in sorted(records)}
    if len({name.casefold() for name in safe.values()}) < len(records):
        raise DataError(
            f"the site names of data set {dataset.name} are not different as file names: "
            f"{', '.join(f'{name!r} is {file}' for name, file in safe.items())}; rename the "
            "sites"
        )
    return {name: records[name] for name in safe}


def _own_parts(dataset: Dataset, part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if dataset.held is None:
        raise DataError(
            f'held_out = "own" and data set {dataset.name} has no test parts at its sites: give a '
            "fraction"
        )
    held = dataset.held.numpy()[part]
    return part[~held], part[held]


def _label_counts(dataset: Dataset, train: Mapping[str, np.ndarray]) -> np.ndarray:
    """Count, at each site, the records of each class, or with such a label or pixel."""
    y, classes = dataset.y.numpy(), len(dataset.classes)
    if dataset.kind == "class":
        return np.stack([np.bincount(y[i], minlength=classes) for i in train.values()])
    if dataset.kind == "number":
        return np.array([[len(i)] for i in train.values()])
    if dataset.kind == "pixels":
        flat = y.reshape(len(y), -1)
        # Each class once a record; there may be as many as tokens.
        pairs = np.where(flat >= 0, np.arange(len(y))[:, None] * classes + flat, -1)
        met = [np.unique(pairs[i]) for i in train.values()]
        return np.stack([np.bincount(p[p >= 0] % classes, minlength=classes) for p in met])
    return np.stack([y[i].astype(np.int64).sum(0) for i in train.values()])
