"""How records are spread over sites: one function for each kind of partition.

Each takes labels y [n] (int64) or a feature's values, the number of sites, a partition's settings
and a seeded generator, and returns one array of indices for each site. No record goes to two sites;
`by_labels` and `power_law` may leave some out.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from fedpact.common.errors import DataError

Indices = list[np.ndarray]

DIRICHLET_LEAST = 10  # records every site of a Dirichlet split has
_TRIES = 2000


def iid(y: np.ndarray, sites: int, _: Any, rng: Generator) -> Indices:
    """Shuffle, and cut into equal parts (sizes differ by at most 1)."""
    return np.array_split(rng.permutation(len(y)), sites)


def dirichlet(y: np.ndarray, sites: int, settings: Any, rng: Generator) -> Indices:
    """Spread each label over the sites by proportions drawn from Dirichlet(beta, ..., beta).

    Label by label, a site that already has n / sites records gets no more; all proportions are
    redrawn until every site has 10 records (Li, Diao, Chen, He, Federated learning on
    non-IID data silos, ICDE 2022, section 4; the split of FedFDP's and ALI-DPFL's experiments).
    Raises DataError: not reached in 2,000 tries.
    """
    labels, per_label = np.unique(y, return_counts=True)
    parts = _large_enough(lambda: _dirichlet_counts(per_label, sites, settings.beta, rng), settings)
    dealt: list[Indices] = [[] for _ in range(sites)]
    for label, counts in zip(labels, parts, strict=True):
        records = rng.permutation(np.flatnonzero(y == label))
        for site, part in zip(dealt, np.split(records, np.cumsum(counts)[:-1]), strict=True):
            site.append(part)
    return [np.concatenate(parts) for parts in dealt]


def _large_enough(draw: Callable[[], np.ndarray], settings: Any) -> np.ndarray:
    """Draw numbers of records [..., sites] until every site has 10."""
    for _ in range(_TRIES):
        if (counts := draw()).sum(0).min() >= DIRICHLET_LEAST:
            return counts
    raise DataError(
        f"partition.kind = {settings.kind!r} with beta = {settings.beta} left a site with fewer "
        f"than {DIRICHLET_LEAST} records in each of {_TRIES} tries: raise beta or take fewer sites"
    )


def _dirichlet_counts(per_label: np.ndarray, sites: int, beta: float, rng: Generator) -> np.ndarray:
    """Draw counts [labels, sites] whose rows sum to per_label."""
    total, held = per_label.sum(), np.zeros(sites, np.int64)
    rows = []
    for count in per_label:
        share = rng.dirichlet(np.full(sites, beta)) * (held < total / sites)
        if not share.sum() > 0:  # a tiny beta gave everything to sites that are full
            share = (held < total / sites).astype(float)
        reached = np.cumsum(share)
        # Divided by its own last value, so that it is exactly 1 from the last open site on.
        cuts = (reached[:-1] / reached[-1] * count).astype(np.int64)
        rows.append(np.diff(cuts, prepend=0, append=count))
        held += rows[-1]
    return np.stack(rows)


def quantity_skew(y: np.ndarray, sites: int, settings: Any, rng: Generator) -> Indices:
    """Shuffle, and cut by proportions drawn from Dirichlet(beta, ..., beta).

    They are drawn again until every site has 10 records (Li, Diao, Chen, He, as above, section
    4.4). Raises DataError: not reached in 2,000 tries.
    """

    def draw() -> np.ndarray:
        reached = np.cumsum(rng.dirichlet(np.full(sites, settings.beta)))
        cuts = (reached[:-1] / reached[-1] * len(y)).astype(np.int64)
        return np.diff(cuts, prepend=0, append=len(y))[None]

    sizes = _large_enough(draw, settings)[0]
    return np.split(rng.permutation(len(y)), np.cumsum(sizes[:-1]))


def growing(y: np.ndarray, units: np.ndarray, rng: Generator) -> Indices:
    """Shuffle, and cut in proportion to units [sites], rounded down; the last site has the rest.

    With i, i^2 or e^i for site i, flwr-datasets' Linear-, Square- and ExponentialPartitioner.
    """
    sizes = (units / units.sum() * len(y)).astype(np.int64)
    return np.split(rng.permutation(len(y)), np.cumsum(sizes[:-1]))


def inner_dirichlet(y: np.ndarray, sites: int, settings: Any, rng: Generator) -> Indices:
    """Give sites of equal sizes (give or take 1) labels by proportions from Dirichlet(beta, ...).

    In a random order of sites, record by record, a site takes a label by its own proportions among
    the labels that are left (Acar et al., Federated learning based on dynamic regularization, ICLR
    2021; flwr-datasets' InnerDirichletPartitioner).
    """
    labels, place = np.unique(y, return_inverse=True)
    stock = [rng.permutation(np.flatnonzero(place == k)).tolist() for k in range(len(labels))]
    weights = rng.dirichlet(np.full(len(labels), settings.beta), size=sites)
    parts: list[list[int]] = [[] for _ in range(sites)]
    turns = rng.permutation(np.arange(len(y)) % sites)
    reached = np.cumsum(weights, axis=1)
    for site, u in zip(turns.tolist(), rng.random(len(y)).tolist(), strict=True):
        # A tiny beta gave everything to labels that are used up, or left too little to be divided.
        if not reached[site, -1] > 1e-300:
            weights[site] = [bool(left) for left in stock]
            reached[site] = np.cumsum(weights[site])
        label = int(np.searchsorted(reached[site], u * reached[site, -1], side="right"))
        parts[site].append(stock[label].pop())
        if not stock[label]:
            weights[:, label] = 0
            reached = np.cumsum(weights, axis=1)
    return [np.array(part, np.int64) for part in parts]


def feature_skew(values: np.ndarray, sites: int, settings: Any, rng: Generator) -> Indices:
    """Sort by s z + (1 - s) ε and cut into equal parts; z: standardised values [n], ε: N(0, 1).

    Equal values are in random order. It is flwr-datasets' ContinuousPartitioner, s its strictness.
    """
    z = (values - values.mean()) / (values.std() or 1.0)
    strictness = settings.strictness
    blend = strictness * z + (1 - strictness) * rng.standard_normal(len(z))
    return np.array_split(np.lexsort((rng.random(len(z)), blend)), sites)


def by_labels(y: np.ndarray, sites: int, settings: Any, rng: Generator) -> Indices:
    """Give every site exactly `labels_per_site` labels, and divide a label equally among its sites.

    Labels are used equally often, give or take one; one that no site gets is left out.
    Raises DataError: a label has fewer records than sites that need it.
    """
    dealt = _deal_labels(y, sites, settings.labels_per_site, rng)
    parts: list[Indices] = [[] for _ in range(sites)]
    for label in np.unique(y):
        holders = [site for site in range(sites) if label in dealt[site]]
        records = rng.permutation(np.flatnonzero(y == label))
        if len(records) < len(holders):
            raise DataError(
                f"label {label} has {len(records)} records for {len(holders)} sites that hold it: "
                "take fewer sites or fewer labels_per_site"
            )
        if holders:
            for site, part in zip(holders, np.array_split(records, len(holders)), strict=True):
                parts[site].append(part)
    return [np.concatenate(site) for site in parts]


def _deal_labels(y: np.ndarray, sites: int, per_site: int, rng: Generator) -> list[np.ndarray]:
    """Give each site the labels that were used least so far, ties broken at random."""
    present = np.unique(y)
    if per_site > len(present):
        raise DataError(
            f"labels_per_site is {per_site}: expected at most {len(present)}, the number of "
            "labels that have records; lower it"
        )
    used = np.zeros(len(present))
    dealt: list[np.ndarray] = []
    for _ in range(sites):
        least = np.lexsort((rng.random(len(present)), used))[:per_site]
        used[least] += 1
        dealt.append(np.sort(present[least]))
    return dealt


def shards(y: np.ndarray, sites: int, settings: Any, rng: Generator) -> Indices:
    """Sort by label, cut into equal shards, deal each site `shards_per_site` of them.

    McMahan, Moore, Ramage, Hampson, Agüera y Arcas, Communication-efficient learning of deep
    networks from decentralized data, AISTATS 2017, section 3. Raises DataError: too few records.
    """
    per_site = settings.shards_per_site
    number = sites * per_site
    if number > len(y):
        raise DataError(
            f"{sites} sites with shards_per_site = {per_site} need {number} shards of at least one "
            f"record, and there are {len(y)} records: take fewer sites or shards"
        )
    shuffled = rng.permutation(len(y))
    cut = np.array_split(shuffled[np.argsort(y[shuffled], kind="stable")], number)
    deal = rng.permutation(number).reshape(sites, per_site)
    return [np.concatenate([cut[shard] for shard in mine]) for mine in deal]


def power_law(y: np.ndarray, sites: int, settings: Any, rng: Generator) -> Indices:
    """Draw sizes from p(s) ∝ s^-exponent on [smallest, largest]; fill each with its labels.

    With labels_per_site = k a site's records come in equal parts (give or take one) from k labels,
    dealt as in `by_labels`: the setting of FedProxVR's experiments. Without, they are random.
    Raises DataError: more records are needed than there are.
    """
    bounds, per_site = (settings.smallest, settings.largest), settings.labels_per_site
    sizes = power_law_sizes(sites, bounds, settings.exponent, rng)
    if per_site is None:
        _enough("records", len(y), sizes.sum())
        return np.split(rng.permutation(len(y)), np.cumsum(sizes))[:-1]
    dealt = _deal_labels(y, sites, per_site, rng)
    stock = {label: rng.permutation(np.flatnonzero(y == label)) for label in np.unique(y)}
    taken = dict.fromkeys(stock, 0)
    parts: list[Indices] = [[] for _ in range(sites)]
    for site, size in enumerate(sizes):
        shares = np.diff(np.arange(per_site + 1) * size // per_site)
        for label, share in zip(dealt[site], shares, strict=True):
            start, taken[label] = taken[label], taken[label] + share
            parts[site].append(stock[label][start : taken[label]])
    for label, records in stock.items():
        _enough(f"records of label {label}", len(records), taken[label])
    return [np.concatenate(site) for site in parts]


def power_law_sizes(
    sites: int, bounds: tuple[int, int], exponent: float, rng: Generator
) -> np.ndarray:
    """Return integer sizes [sites] by inverting the distribution function of the bounded law."""
    low, high = bounds[0], bounds[1] + 1  # the integer part of a draw from [low, high)
    u, power = rng.random(sites), 1 - exponent
    if abs(power) < 1e-9:
        sizes = low * (high / low) ** u
    else:
        sizes = (low**power + u * (high**power - low**power)) ** (1 / power)
    return np.clip(sizes.astype(np.int64), *bounds)


def _enough(what: str, have: int, need: int) -> None:
    if need > have:
        raise DataError(
            f"the power law's sizes need {need} {what}, and there are {have}: lower `largest`, "
            "raise `exponent`, take fewer sites or another seed"
        )


def number_persons(person: Sequence[str] | None, indices: np.ndarray) -> Tensor | None:
    """Return the number of the person of each of these records, int64 [n] from 0 without gaps.

    Persons are numbered in order of appearance; None if they are not known.
    """
    if person is None:
        return None
    known: dict[str, int] = {}
    numbers = [known.setdefault(person[int(i)], len(known)) for i in indices]
    return torch.tensor(numbers, dtype=torch.int64)


def hold_out(
    person: Sequence[str] | None,
    part: np.ndarray,
    share: float,
    seed: int,
    rng: Generator,
    use: str = "held out",
) -> np.ndarray:
    """Return which of a site's records `part` [n] are held out, bool [n].

    Records by `rng`, at least one stays. A person is held out with probability `share`, at all
    sites, by a digest of seed, use and name alone.
    """
    if person is None:
        out = np.zeros(len(part), bool)
        out[rng.permutation(len(part))[: min(round(share * len(part)), len(part) - 1)]] = True
        return out
    whose = [person[int(i)] for i in part]
    drawn = {name: _draw(seed, use, name) for name in set(whose)}
    return np.array([drawn[name] < share for name in whose], bool)


def of_others(person: Sequence[str] | None, test: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Return the test records of persons without training records."""
    if person is None:
        return test
    known = {person[i] for i in train.tolist()}
    return test[np.array([person[i] not in known for i in test.tolist()], bool)]


def limit_records_per_person(persons: Tensor, most: int, seed: int) -> Tensor:
    """Return which records are used where a person may have at most `most` of them, bool [n].

    persons: each record's, int64 [n]. A person with more keeps those at some places among their
    own, by a digest of seed and place. It depends neither on other persons' records nor on any
    value.
    """
    places: dict[int, list[int]] = {}
    for i, person in enumerate(persons.tolist()):
        places.setdefault(person, []).append(i)
    good = torch.ones(len(persons), dtype=torch.bool)
    for own in places.values():
        if len(own) > most:
            order = sorted(range(len(own)), key=lambda k: _draw(seed, "kept", str(k)))
            good[[own[k] for k in order[most:]]] = False
    return good


def _draw(seed: int, *key: str) -> float:
    """Return a number in [0, 1) that follows from the key."""
    digest = hashlib.shake_256(json.dumps((seed, *key)).encode()).digest(8)
    return int.from_bytes(digest, "little") / 2.0**64
