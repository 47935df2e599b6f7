"""The runs of a comparison as read, and what trying several of them costs.

Every run's ledger names the events that it reserved. Runs are alternatives on the same records, so
at each site their events add up against whoever sees every run; see privacy.accounting.tuning_cost
for whoever
sees the best alone. Of each figure the site where it is most is told.

A record is trained on or held out for evaluations, so of the two promises of a run it pays one; in
runs whose ledgers know of the same split, the same one. Of all ways in which it may fall the
dearest counts.

A comparison's folder holds one folder an entry, and in it one a seed: NAME/seed-S, each a run's.
"""

import hashlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from fedpact.common.errors import DataError, InputError
from fedpact.evaluation.metrics import METRICS, Fairness, fairness, ranking
from fedpact.privacy.accounting import shared_noise
from fedpact.privacy.accounting.accountant import SampledGaussian
from fedpact.privacy.accounting.tuning_cost import (
    LAWS,
    Trials,
    as_document,
    count_trials,
    describe_trials,
)
from fedpact.privacy.ledger.hash_chain import read_entries
from fedpact.privacy.ledger.reservations import from_entry
from fedpact.report import evaluations
from fedpact.report.comparable import Difference, JsonMapping, differences
from fedpact.report.run_files import RunFolder, read_run

_SPLITS = 6
"""Of so many splits of a site's records all ways are gone through, 2^6."""


@dataclass(frozen=True)
class TuningCost:
    """What so many runs cost. alone: without other sites' noise; None where none is needed.

    honest: of how many sites of each sum `found` needs the noise, 0 for none.
    """

    told: str
    found: Trials
    alone: Trials | None
    honest: int

    @property
    def lines(self) -> list[str]:
        """What it costs and for whom each ε holds, in words."""
        if self.alone is None:
            return describe_trials(self.found)
        ifs = f"If at least {self.honest} sites of each sum are honest. "
        other = "If no other site is honest. "
        return [ifs + line for line in describe_trials(self.found)] + [
            other + line for line in describe_trials(self.alone)
        ]

    @property
    def document(self) -> dict[str, Any]:
        """The same as plain data."""
        alone = None if self.alone is None else as_document(self.alone)
        return {"of": self.told, **as_document(self.found), "honest": self.honest, "alone": alone}


@dataclass(frozen=True)
class _Promise:
    """What a run's ledger promises at one site. exact: exact numbers left, so no ε is of it.

    events: for the records that are trained on. held: for those that `split` holds out, None where
    nothing is promised for them alone. units: whom its events are of.
    """

    events: Counter[SampledGaussian]
    held: Counter[SampledGaussian] | None
    split: str
    epsilon: float
    delta: float
    honest: int
    exact: bool
    units: frozenset[str]


def count_tuning_cost(runs: Mapping[str, Mapping[int, RunFolder]]) -> list[TuningCost]:
    """Return what trying costs: each setting once, and with all seeds where there are several.

    runs: setting -> seed -> its run, private ones. Nothing where there are fewer than two runs.
    Raises DataError: a run's folder lacks a ledger, or they are of unlike units, whose events do
    not add up; LedgerError: one is damaged.
    """
    by_seed: dict[int, list[str]] = {}
    for name, seeds in runs.items():
        for seed in seeds:
            by_seed.setdefault(seed, []).append(name)
    promises = {
        (name, seed): _promises(run) for name, seeds in runs.items() for seed, run in seeds.items()
    }
    _check_units(one for run in promises.values() for one in run.values())
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


def _check_units(promises: Iterable[_Promise]) -> None:
    if len(units := sorted({unit for one in promises for unit in one.units})) > 1:
        raise DataError(
            f"the ledgers of these runs are per {' and per '.join(units)}: expected one unit, as "
            "events of unlike units do not add up; compare runs of one privacy.unit, or leave "
            "--counted out"
        )


def _worst(told: str, choices: Iterable[Sequence[Mapping[str, _Promise]]]) -> TuningCost:
    """Return each figure of the choice and site where it is most. choices: of runs, by site."""
    found = dict[Any, tuple[Trials, Trials]]()
    honest = 0
    for runs in choices:
        for site in sorted({name for run in runs for name in run}):
            each = [run[site] for run in runs if site in run]
            honest = max(honest, *(one.honest for one in each))
            for fallen in _ways(each) if len(each) >= 2 else ():
                # Many sites, and ways, have the same events.
                key = tuple(
                    (tuple(sorted(one.events.items())), one.delta, one.exact) for one in fallen
                )
                if key not in found:
                    found[key] = _at_site(fallen)
    together, alone = zip(*found.values(), strict=True)
    return TuningCost(told, _largest(together), _largest(alone) if honest else None, honest)


def _ways(runs: Sequence[_Promise]) -> Iterable[list[_Promise]]:
    """Yield the runs with the events that a record pays, for each way in which it may fall.

    With more splits than are gone through, as if it were on both sides of each: no less.
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
        # The order of runs is nothing to their cost.
        yield sorted(fallen, key=lambda one: sorted(one.events.items()))


def _largest(found: Sequence[Trials]) -> Trials:
    return Trials(
        runs=max(one.runs for one in found),
        delta=max(one.delta for one in found),
        one=max(one.one for one in found),
        every=max(one.every for one in found),
        winner={law: max(one.winner[law] for one in found) for law in LAWS},
    )


def _at_site(runs: Sequence[_Promise]) -> tuple[Trials, Trials]:
    """Return what they cost one site: with the help of others' shares of noise, and without."""
    delta, count = max(one.delta for one in runs), len(runs)
    if any(one.exact for one in runs):
        nothing = Trials(count, delta, math.inf, math.inf, dict.fromkeys(LAWS, math.inf))
        return nothing, nothing
    own = [
        shared_noise.all_alone(one.events, one.honest) if one.honest else one.events for one in runs
    ]
    alone = count_trials(own, delta)
    shared = [one.epsilon for one in runs if one.honest]
    if not shared:
        return alone, alone
    # Each run is off a Gaussian's law by so much, and K drawn ones by so much on average; one more
    # for the rounding of that average.
    left = delta - (count + 1) * shared_noise.ADDED_DELTA
    sums = count_trials([one.events for one in runs], left)

    def covered(cost: float, without: float) -> float:
        # Less than shared_noise.cover proves: several runs take ADDED_DELTA off δ each, and how
        # much a larger ε needs of all of them has not been proven.
        return cost if cost <= max(min(shared), shared_noise.COVERED) else without

    winner = {law: covered(cost, alone.winner[law]) for law, cost in sums.winner.items()}
    every = covered(sums.every, alone.every)
    return Trials(count, delta, covered(sums.one, alone.one), every, winner), alone


def _promises(run: RunFolder) -> dict[str, _Promise]:
    """Return what each site's ledger of a run promises."""
    return {site: _promise(run.path / "sites" / site / "ledger.jsonl") for site in run.site_privacy}


def _promise(path: Path) -> _Promise:
    if not path.is_file():
        raise DataError(
            f"{path} is missing: what trying costs is counted from the ledgers of every run; put "
            "it back, remove the run's folder and compare again, or leave --counted out"
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
        min((one.epsilon for one in made), default=math.inf),
        max((one.budget.delta for one in made), default=0.5),
        max((one.honest for one in made), default=0),
        not made or any(e["kind"] == "unprotected" for e in entries),
        frozenset(one.unit for one in made),
    )


# Keys on which it depends which records are where.
_PLACES = ("partition", "sites", "records", "evaluation")

RESUMABLE = ("stopped", "running", "not ended")
"""What a run's status is as long as it has not ended for good."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """One run that has ended. partition: a digest of which record is where; None if not known."""

    seed: int
    run: RunFolder
    partition: str | None

    @property
    def accuracy(self) -> float | None:
        """Of the last model, on public test data or all held-out records; None without one."""
        found = self.run.evaluated[-1].accuracy if self.run.evaluated else None
        return found if self.run.counted else None

    @property
    def loss(self) -> float | None:
        """Mean loss of the last model, likewise."""
        return self.run.evaluated[-1].loss if self.run.evaluated else None

    def averaged(self, name: str) -> float | None:
        """Return "accuracy" or "loss" of the server's average of models; None without one."""
        found = self.run.evaluated[-1].average.get(name) if self.run.evaluated else None
        return found if self.run.counted or name != "accuracy" else None

    def metric(self, name: str) -> float | None:
        """Return a metric (evaluation.metrics.find_display) of the last model; None if unknown."""
        records = reversed(self.run.records)
        return next((r.metrics[name] for r in records if name in r.metrics), None)

    @cached_property
    def fairness(self) -> Fairness | None:
        """How the last model's accuracy is spread over the sites; None without held-out records."""
        scores = self.run.scores
        return fairness(scores) if scores and self.run.counted else None

    @property
    def worst(self) -> float | None:
        """Accuracy at the site that the last model serves worst."""
        return self.fairness["worst_accuracy"] if self.fairness else None

    @property
    def worst_loss(self) -> float | None:
        """Mean loss at that site where there is no accuracy; None where there is."""
        scores = self.run.scores
        return scores[ranking(scores)[0]].loss if scores and not self.run.counted else None

    @property
    def epsilon(self) -> float | None:
        """The largest ε that a site has spent, of whoever is trained on or held out.

        inf if unknown; None if not private.
        """
        if not self.run.private:
            return None
        spent = [site.epsilon_spent for site in self.run.site_privacy.values()]
        return math.inf if any(map(math.isnan, spent)) else max(*spent, self._held_out)

    @property
    def epsilon_alone(self) -> float | None:
        """The same without other sites' noise; None where no ε needs it."""
        spent = [site.epsilon_alone for site in self.run.site_privacy.values() if site.honest]
        if not spent:
            return None
        return math.inf if any(map(math.isnan, spent)) else max(*spent, self._held_out)

    @cached_property
    def _held_out(self) -> float:
        """The largest ε that evaluations have cost at a site: of other records, so nothing adds."""
        return max(
            (evaluations.bound_evaluation_cost(self.run, site) for site in self.run.site_privacy),
            default=0,
        )

    @property
    def honest(self) -> int:
        """Of how many sites of each sum ε needs the noise."""
        return max((site.honest for site in self.run.site_privacy.values()), default=0)

    @property
    def delta(self) -> float | None:
        """The largest δ of a site; None if not private."""
        found = [site.delta for site in self.run.site_privacy.values()]
        return max(*found, evaluations.delta(self.run)) if found else None

    @property
    def steps(self) -> tuple[int, int] | None:
        """The least and the largest τ of a round; None before the first."""
        taken = [record.steps for record in self.run.records if record.round]
        return (min(taken), max(taken)) if taken else None

    @property
    def iterations(self) -> float:
        """Local iterations of all rounds: batches that a site was asked for which is in each."""
        return sum(record.steps for record in self.run.records)

    @property
    def records_read(self) -> float | None:
        """Records in the batches of all sites, as expected; None before the run has ended."""
        return self.run.summary.get("records_read")

    @property
    def learning_rate(self) -> float | None:
        """η; None where the algorithm has none."""
        return self.run.plan.get("settings", {}).get("learning_rate")

    @property
    def sigma(self) -> tuple[float, float] | None:
        """The least and the largest σ of a site's step, all channels together; None without."""
        sites = self.run.site_privacy.values()
        found = [site.sigma for site in sites]
        return (min(found), max(found)) if found else None

    @property
    def rounds(self) -> float:
        """Rounds carried out."""
        return self.run.last.round

    @property
    def bytes(self) -> float:
        """Bytes of all messages as sent, both ways."""
        return sum(self.run.bytes)

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of all rounds."""
        return self.run.seconds


@dataclass(frozen=True)
class Spread:
    """Mean over the runs of an entry, and their sample standard deviation; None of one run."""

    mean: float
    deviation: float | None

    def describe(self, form: Callable[[float], str]) -> str:
        """Return it in words; form: of a single value."""
        return f"{form(self.mean)} ± {form(self.deviation)}" if self.deviation else form(self.mean)


@dataclass(frozen=True, eq=False)
class Entry:
    """One configuration or algorithm. missing: seed -> why its run is not among the outcomes.

    plan: plan.json's content, of whatever seed.
    """

    name: str
    plan: JsonMapping
    outcomes: Sequence[Outcome]
    missing: Mapping[int, str]

    def spread(self, measure: Callable[[Outcome], float | None]) -> Spread | None:
        """Return a measure's mean and deviation over the runs; None where a run has no value."""
        values = [measure(outcome) for outcome in self.outcomes]
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        if not all(map(math.isfinite, known)):
            return Spread(math.nan, None)
        deviation = statistics.stdev(known) if len(known) > 1 else None
        return Spread(statistics.fmean(known), deviation)

    def range(
        self, measure: Callable[[Outcome], tuple[float, float] | None]
    ) -> tuple[float, float] | None:
        """Return the least and the largest of all runs; None where no run has any."""
        known = [pair for outcome in self.outcomes if (pair := measure(outcome)) is not None]
        return (min(low for low, _ in known), max(high for _, high in known)) if known else None

    @property
    def private(self) -> bool | None:
        """Whether its runs were private; None while none has ended."""
        return self.outcomes[0].run.private if self.outcomes else None

    @property
    def epsilon(self) -> float | None:
        """The largest ε of all runs: a mean over seeds would bound nothing."""
        known = [o.epsilon for o in self.outcomes if o.epsilon is not None]
        return max(known, default=None)

    @property
    def epsilon_alone(self) -> float | None:
        """The largest without other sites' noise; None where no run's ε needs it."""
        known = [o.epsilon_alone for o in self.outcomes if o.epsilon_alone is not None]
        return max(known, default=None)

    @property
    def honest(self) -> int:
        """Of how many sites of each sum ε needs the noise."""
        return max((o.honest for o in self.outcomes), default=0)

    @property
    def delta(self) -> float | None:
        """The largest δ that goes with it."""
        return max((o.delta for o in self.outcomes if o.delta is not None), default=None)

    @property
    def statuses(self) -> str:
        """How its runs ended, and which are missing."""
        ends = [o.run.status for o in self.outcomes if o.run.status != "finished"]
        told = [f"{ends.count(end)} × {end}" for end in dict.fromkeys(ends)]
        if self.missing:
            told.append(f"missing: seed {', '.join(map(str, sorted(self.missing)))}")
        return "; ".join(told)


@dataclass(frozen=True)
class SweepPoint:
    """Where an entry is in a sweep. base: what it is but for that. values: swept key -> value."""

    base: str
    values: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Comparison:
    """The entries in their order. folder: where their folders are.

    counted: what trying them all costs, where that was asked. points: of entries of a sweep.
    """

    folder: Path
    entries: Sequence[Entry]
    counted: Sequence[TuningCost] = ()
    points: Mapping[str, SweepPoint] = field(default_factory=dict[str, SweepPoint])

    @property
    def swept(self) -> list[str]:
        """The keys whose values are what is compared."""
        return list(dict.fromkeys(key for point in self.points.values() for key in point.values))

    @property
    def outcomes(self) -> list[tuple[Entry, Outcome]]:
        """All runs that have ended."""
        return [(entry, outcome) for entry in self.entries for outcome in entry.outcomes]

    @property
    def measured(self) -> list[str]:
        """The metrics of the table: those of any run, METRICS first."""
        found = (name for _, outcome in self.outcomes for name in outcome.run.measured)
        return list(dict.fromkeys([*METRICS, *found]))

    @property
    def judged(self) -> str:
        """By what the models are judged: "accuracy", or "mean loss" where no run has any."""
        counted = [outcome.run.counted for _, outcome in self.outcomes]
        return "accuracy" if any(counted) or not counted else "mean loss"

    @property
    def headings(self) -> tuple[str, ...]:
        """By what the last models are judged, and the servers' averages where a run has one."""
        averaged = any(outcome.averaged("loss") is not None for _, outcome in self.outcomes)
        return (self.judged, f"{self.judged}, averaged model") if averaged else (self.judged,)

    @property
    def pooled(self) -> bool:
        """Whether held-out records stand in for a public test set: simulator only."""
        return any(o.run.pooled for _, o in self.outcomes)

    @cached_property
    def differences(self) -> list[Difference]:
        """What the entries' plans differ in."""
        return differences({entry.name: entry.plan for entry in self.entries}, self.swept)

    @property
    def left_apart(self) -> bool:
        """Whether a setting that algorithms share was left to defaults that are not the same."""
        return any(d.unequal and d.key.startswith("settings.") for d in self.differences)

    @cached_property
    def inequalities(self) -> list[str]:
        """Why this is no comparison between equals, one clause each; empty where it is one."""
        found = [
            f"{d.key} ({', '.join(f'{name}: {value}' for name, value in d.values.items())})"
            for d in self.differences
            if d.unequal
        ]
        seeds = {e.name: sorted(o.seed for o in e.outcomes) for e in self.entries}
        if len(set(map(tuple, seeds.values()))) > 1:
            shown = (f"{name}: {', '.join(map(str, s)) or 'none'}" for name, s in seeds.items())
            found.append(f"seeds ({'; '.join(shown)})")
        spread = any("partition" in clause for clause in found) or any(
            key.split(".")[0] in _PLACES for key in self.swept
        )
        if not spread and self._records_differ():
            found.append("the records of the sites, under the same partition settings and seed")
        return found

    def _records_differ(self) -> bool:
        by_seed: dict[int, set[str]] = {}
        for _, outcome in self.outcomes:
            if outcome.partition is not None:
                by_seed.setdefault(outcome.seed, set()).add(outcome.partition)
        return any(len(digests) > 1 for digests in by_seed.values())


def read_comparison(
    folder: Path,
    plans: Mapping[str, JsonMapping],
    seeds: Sequence[int],
    failed: Mapping[tuple[str, int], str] | None = None,
) -> Comparison:
    """Read a comparison's runs, folder/NAME/seed-S, in the order of the plans.

    plans: name -> plan.json's content, of whatever seed. failed: (name, seed) -> why there is no
    outcome. A run that has not ended is missing, and so is one whose files are damaged.
    """
    entries = []
    for name, plan in plans.items():
        outcomes, missing = list[Outcome](), dict[int, str]()
        for seed in seeds:
            why = (failed or {}).get((name, seed))
            found = _read(run_folder(folder, name, seed), seed) if why is None else why
            if isinstance(found, Outcome):
                outcomes.append(found)
            else:
                missing[seed] = found
        entries.append(Entry(name, plan, outcomes, missing))
    return Comparison(folder, entries)


def run_folder(folder: Path, name: str, seed: int) -> Path:
    """Return where the run of an entry and a seed is."""
    return folder / name / f"seed-{seed}"


def _read(folder: Path, seed: int) -> Outcome | str:
    if not (folder / "rounds.jsonl").exists():
        return "not begun"
    try:
        run = read_run(folder)
        if run.status in RESUMABLE:
            return f"{run.status} after round {run.last.round}"
        return Outcome(seed, run, _partition_digest(folder / "partition.json"))
    except InputError as error:
        return str(error)


def _partition_digest(path: Path) -> str | None:
    if not path.exists():
        return None
    partition = json.loads(path.read_text(encoding="utf-8"))
    records = json.dumps([partition.get("train"), partition.get("held_out")], sort_keys=True)
    return hashlib.blake2b(records.encode(), digest_size=16).hexdigest()
