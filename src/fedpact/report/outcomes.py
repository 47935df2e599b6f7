"""What came out of each run of a comparison, and its mean ± standard deviation over seeds.

A comparison's folder holds one folder an entry, and in it one a seed: NAME/seed-S, each a run's.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedpact.errors import InputError
from fedpact.metrics import METRICS, Fairness, fairness, ranking
from fedpact.report import evaluations
from fedpact.report.counted import TuningCost
from fedpact.report.equality import Difference, JsonMapping, differences
from fedpact.report.reading import RunFolder, read_run

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
        """Return a metric (tasks.measures.find_display) of the last model; None if unknown."""
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
        found = [each.sigma for site in sites for each in site.reservations]
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
