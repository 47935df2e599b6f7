"""The runs of a comparison as read from its folder, where they are NAME/seed-S."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedpact.common.errors import InputError
from fedpact.evaluation.metrics import METRICS
from fedpact.report.comparable import Difference, JsonMapping, differences
from fedpact.report.run_summary import Guarantee, RunSummary, read_run
from fedpact.report.tuning_cost import TuningCost

# Keys on which it depends which records are where.
_PLACES = ("partition", "sites", "records", "evaluation")

RESUMABLE = ("stopped", "running", "not ended")
"""What a run's status is as long as it has not ended for good."""


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
    """One configuration or algorithm, with its runs that have ended, one a seed.

    plan: plan.json's content, of whatever seed. missing: seed -> why its run is not among them.
    """

    name: str
    plan: JsonMapping
    runs: Sequence[RunSummary]
    missing: Mapping[int, str] = field(default_factory=dict[int, str])

    def spread(self, measure: Callable[[RunSummary], float | None]) -> Spread | None:
        """Return a measure's mean and deviation over the runs; None where a run has no value."""
        values = [measure(run) for run in self.runs]
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        if not all(map(math.isfinite, known)):
            return Spread(math.nan, None)
        deviation = statistics.stdev(known) if len(known) > 1 else None
        return Spread(statistics.fmean(known), deviation)

    def range(
        self, measure: Callable[[RunSummary], tuple[float, float] | None]
    ) -> tuple[float, float] | None:
        """Return the least and the largest of all runs; None where no run has any."""
        known = [pair for run in self.runs if (pair := measure(run)) is not None]
        return (min(low for low, _ in known), max(high for _, high in known)) if known else None

    @property
    def private(self) -> bool | None:
        """Whether its runs were private; None while none has ended."""
        return self.runs[0].private if self.runs else None

    @property
    def spent(self) -> Guarantee | None:
        """The largest ε and δ of all runs, as a mean would bound nothing; None if plain."""
        known = [run.spent for run in self.runs if run.spent is not None]
        return Guarantee.largest(known) if known else None

    @property
    def statuses(self) -> str:
        """How its runs ended, and which are missing."""
        ends = [run.status for run in self.runs if run.status != "finished"]
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
    def runs(self) -> list[RunSummary]:
        """All runs that have ended."""
        return [run for entry in self.entries for run in entry.runs]

    @property
    def measured(self) -> list[str]:
        """The metrics of the table: those of any run, METRICS first."""
        return list(dict.fromkeys([*METRICS, *(n for run in self.runs for n in run.measured)]))

    @property
    def judged(self) -> str:
        """By what the models are judged: "accuracy", or "mean loss" where no run has any."""
        return "accuracy" if any(r.counted for r in self.runs) or not self.runs else "mean loss"

    @property
    def averaged(self) -> bool:
        """Whether the server of a run kept an average of models."""
        return any(run.averaged("loss") is not None for run in self.runs)

    @property
    def pooled(self) -> bool:
        """Whether held-out records stand in for a public test set: simulator only."""
        return any(run.pooled for run in self.runs)

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
        found = [f"{d.key} ({self._by_base(d.values)})" for d in self.differences if d.unequal]
        seeds = {e.name: sorted(run.seed for run in e.runs) for e in self.entries}
        if len(set(map(tuple, seeds.values()))) > 1:
            shown = {name: ", ".join(map(str, s)) or "none" for name, s in seeds.items()}
            found.append(f"seeds ({'; '.join(f'{name}: {s}' for name, s in shown.items())})")
        spread = any("partition" in clause for clause in found) or any(
            key.split(".")[0] in _PLACES for key in self.swept
        )
        if not spread and self._records_differ():
            found.append("the records of the sites, under the same partition settings and seed")
        return found

    def base(self, entry: Entry) -> str:
        """Return what an entry is but for what is swept."""
        return self.points[entry.name].base if entry.name in self.points else entry.name

    def _by_base(self, values: Mapping[str, str]) -> str:
        """Return who has which value, a sweep's points as one where they have the same."""
        found = dict[str, list[str]]()
        for name, value in values.items():
            base = self.points[name].base if name in self.points else name
            if value not in (known := found.setdefault(base, [])):
                known.append(value)
        return ", ".join(f"{base}: {' or '.join(known)}" for base, known in found.items())

    def _records_differ(self) -> bool:
        by_seed: dict[int, set[str]] = {}
        for run in self.runs:
            if run.partition is not None:
                by_seed.setdefault(run.seed, set()).add(run.partition)
        return any(len(digests) > 1 for digests in by_seed.values())


def read_comparison(
    folder: Path,
    plans: Mapping[str, JsonMapping],
    seeds: Sequence[int],
    failed: Mapping[tuple[str, int], str] | None = None,
) -> Comparison:
    """Read a comparison's runs, folder/NAME/seed-S, in the order of the plans.

    plans: name -> plan.json's content, of whatever seed. failed: (name, seed) -> why there is no
    run. A run that has not ended is missing, and so is one whose files are damaged.
    """
    entries = []
    for name, plan in plans.items():
        runs, missing = list[RunSummary](), dict[int, str]()
        for seed in seeds:
            why = (failed or {}).get((name, seed))
            found = _read(run_folder(folder, name, seed)) if why is None else why
            if isinstance(found, RunSummary):
                runs.append(found)
            else:
                missing[seed] = found
        entries.append(Entry(name, plan, runs, missing))
    return Comparison(folder, entries)


def run_folder(folder: Path, name: str, seed: int) -> Path:
    """Return where the run of an entry and a seed is."""
    return folder / name / f"seed-{seed}"


def _read(folder: Path) -> RunSummary | str:
    if not (folder / "rounds.jsonl").exists():
        return "not begun"
    try:
        run = read_run(folder)
    except InputError as error:
        return str(error)
    return f"{run.status} after round {run.last.round}" if run.status in RESUMABLE else run
