"""The privacy cost of trying several runs, from the events that their ledgers reserved.

Runs are alternatives on the same records, so for an observer of all runs their events add up at
each site; see privacy.accounting.tuning_cost for an observer of the best run only. Each figure is
that of the site where it is largest.

In each run a record is either trained on or held out for evaluations, and pays for one of the two.
In runs with the same split it pays for the same one. The most expensive combination counts.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from fedpact.common.errors import DataError
from fedpact.common.run_folder import Folder
from fedpact.privacy.accounting import shared_noise
from fedpact.privacy.accounting.accountant import SampledGaussian
from fedpact.privacy.accounting.tuning_cost import (
    Trials,
    as_document,
    count_trials,
    describe_trials,
)
from fedpact.privacy.ledger.hash_chain import read_entries
from fedpact.privacy.ledger.reservations import from_entry
from fedpact.report.run_summary import RunSummary

_SPLITS = 6
"""Up to this number of splits of a site's records, all combinations are tried: 2^6."""


@dataclass(frozen=True)
class TuningCost:
    """The cost of several runs. alone: without other sites' noise; None if none is assumed.

    honest: the number of honest sites in each sum that `found` assumes, 0 for none.
    """

    told: str
    found: Trials
    alone: Trials | None
    honest: int

    @property
    def lines(self) -> list[str]:
        """The cost in words, and for whom each ε holds."""
        if self.alone is None:
            return describe_trials(self.found)
        honest = f"If at least {self.honest} sites of each sum are honest."
        both = ((honest, self.found), ("If no other site is honest.", self.alone))
        return [f"{condition} {line}" for condition, of in both for line in describe_trials(of)]

    @property
    def document(self) -> dict[str, Any]:
        """The same as plain data."""
        alone = None if self.alone is None else as_document(self.alone)
        return {"of": self.told, **as_document(self.found), "honest": self.honest, "alone": alone}


@dataclass(frozen=True)
class _Promise:
    """The reservations of a run at one site. events: for the records that are trained on.

    held: for the records that `split` holds out, None without evaluations. exact: whether exact
    numbers were released, so that no ε holds. units: what is protected, "record" or "person".
    """

    events: Counter[SampledGaussian]
    held: Counter[SampledGaussian] | None
    split: str
    epsilon: float
    delta: float
    honest: int
    exact: bool
    units: frozenset[str]


def count_tuning_cost(runs: Mapping[str, Mapping[int, RunSummary]]) -> list[TuningCost]:
    """Return the cost of trying each setting once, and of all seeds if there are several.

    runs: setting -> seed -> private run. Empty with fewer than two runs. Raises DataError: a ledger
    is missing, or their units differ. LedgerError: one is damaged.
    """
    by_seed: dict[int, list[str]] = {}
    for name, seeds in runs.items():
        for seed in seeds:
            by_seed.setdefault(seed, []).append(name)
    promises = {
        (name, seed): {s: _promise(Folder(run.path).ledger(s, None)) for s in run.site_privacy}
        for name, seeds in runs.items()
        for seed, run in seeds.items()
    }
    each = (one for run in promises.values() for one in run.values())
    if len(units := sorted({unit for one in each for unit in one.units})) > 1:
        raise DataError(
            f"the ledgers of these runs are per {' and per '.join(units)}: expected one unit, as "
            "events of different units cannot be added; compare runs of one privacy.unit, or "
            "leave --counted out"
        )
    groups = list[tuple[str, list[list[tuple[str, int]]]]]()
    names = f"{len(runs)} settings, each once: {', '.join(runs)}"
    groups.append((names, [[(name, seed) for name in each] for seed, each in by_seed.items()]))
    if len(by_seed) > 1:
        told = f"all {len(promises)} runs, every seed of every setting counted"
        groups.append((told, [list(promises)]))
    found = list[TuningCost]()
    for told, choices in groups:
        choices = [keys for keys in choices if len(keys) >= 2]
        if choices:
            found.append(_worst(told, [[promises[key] for key in keys] for keys in choices]))
    return found


def _worst(told: str, choices: Iterable[Sequence[Mapping[str, _Promise]]]) -> TuningCost:
    """Return each figure's maximum over choices of runs and sites. choices: of runs, by site."""
    found = dict[Any, tuple[Trials, Trials]]()
    honest = 0
    for runs in choices:
        for site in sorted({name for run in runs for name in run}):
            each = [run[site] for run in runs if site in run]
            honest = max(honest, *(one.honest for one in each))
            for fallen in _ways(each) if len(each) >= 2 else ():
                # Many sites and combinations have the same events.
                key = tuple(
                    (tuple(sorted(one.events.items())), one.delta, one.exact) for one in fallen
                )
                if key not in found:
                    found[key] = _at_site(fallen)
    together, alone = zip(*found.values(), strict=True)
    return TuningCost(told, _largest(together), _largest(alone) if honest else None, honest)


def _ways(runs: Sequence[_Promise]) -> Iterator[list[_Promise]]:
    """Yield the runs with the events that a record pays for, for each combination of sides.

    With more than _SPLITS splits, as if it were on both sides of each, which costs no less.
    """
    splits = sorted({one.split for one in runs if one.held is not None})
    if len(splits) > _SPLITS:
        yield [replace(one, events=one.events + (one.held or Counter())) for one in runs]
        return
    for sides in product((False, True), repeat=len(splits)):
        held = dict(zip(splits, sides, strict=True))
        fallen = [
            replace(one, events=one.held, honest=0)
            if one.held is not None and held[one.split]
            else one
            for one in runs
        ]
        # The order of runs does not matter.
        yield sorted(fallen, key=lambda one: sorted(one.events.items()))


def _largest(found: Sequence[Trials]) -> Trials:
    return Trials(
        runs=max(one.runs for one in found),
        delta=max(one.delta for one in found),
        one=max(one.one for one in found),
        every=max(one.every for one in found),
        winner=max(map(_of_winner, found)),
    )


def _of_winner(cost: Trials) -> float:
    """Return the winner's ε; infinity where none is proven."""
    return math.inf if cost.winner is None else cost.winner


def _at_site(runs: Sequence[_Promise]) -> tuple[Trials, Trials]:
    """Return the cost at one site, with and without other sites' noise."""
    delta, count = max(one.delta for one in runs), len(runs)
    if any(one.exact for one in runs):
        nothing = Trials(count, delta, math.inf, math.inf, math.inf)
        return nothing, nothing
    own = [
        shared_noise.all_alone(one.events, one.honest) if one.honest else one.events for one in runs
    ]
    alone = count_trials(own, delta)
    shared = [one.epsilon for one in runs if one.honest]
    if not shared:
        return alone, alone
    # ADDED_DELTA is the distance of each run from Gaussian noise, and of K random runs on average;
    # one more is for the rounding of that average.
    left = delta - (count + 1) * shared_noise.ADDED_DELTA
    sums = count_trials([one.events for one in runs], left)

    def covered(cost: float, without: float) -> float:
        # Weaker than shared_noise.cover: several runs take ADDED_DELTA off δ each, and what a
        # larger ε needs for all of them has not been proven.
        return cost if cost <= max(min(shared), shared_noise.COVERED) else without

    winner = covered(_of_winner(sums), _of_winner(alone))
    every = covered(sums.every, alone.every)
    return Trials(count, delta, covered(sums.one, alone.one), every, winner), alone


def reserved_events(run: RunSummary) -> dict[str, object]:
    """Return the events that each site's ledger reserves for a run: in training and held out."""
    found = {s: _promise(Folder(run.path).ledger(s, None)) for s in run.site_privacy}
    return {site: (one.events, one.held) for site, one in found.items()}


def _promise(path: Path) -> _Promise:
    if not path.is_file():
        raise DataError(
            f"{path} is missing: the cost of trying is counted from every run's ledgers; restore "
            "it, or remove the run's folder and compare again, or leave --counted out"
        )
    entries = read_entries(path)
    made = [from_entry(e) for e in entries if e["kind"] == "reserve"]
    events, held, splits = Counter[SampledGaussian](), Counter[SampledGaussian](), set[str]()
    for one in made:
        (events if one.beside is None else held).update(one.allowed)
        splits |= set() if one.beside is None else {one.beside.split}
    return _Promise(
        events,
        held if splits else None,
        " ".join(sorted(splits)),
        min((one.guarantee.epsilon for one in made), default=math.inf),
        max((one.guarantee.delta for one in made), default=0.5),
        max((one.guarantee.honest for one in made), default=0),
        not made or any(e["kind"] == "unprotected" for e in entries),
        frozenset(one.unit for one in made),
    )
