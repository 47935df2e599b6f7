"""The runs of a comparison as read from its folder, where they are NAME/seed-S.

Of their plans the meaning is compared. A list of equal values for all sites is a single value.
sites_per_round equal to the number of sites, class weights and schedules of ones, and the noise of
sizes that are not released count as not given. Weights are identified by their digest.

A comparison is fair if its runs have the same data, partition, seeds, rounds, budgets and kind of
privacy. Parts of the method may differ, and are shown. A setting that several algorithms share,
such as τ or η, makes runs unequal if one of them uses a default that differs from the others.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedpact import algorithms
from fedpact.algorithms.wrappers.base import Method
from fedpact.common.configuration import DEFAULTS_KEY, flatten
from fedpact.common.errors import InputError
from fedpact.evaluation.metrics import METRICS
from fedpact.privacy.guarantee import Guarantee
from fedpact.report.run_summary import RunSummary, read_run
from fedpact.report.tuning_cost import TuningCost

JsonMapping = Mapping[str, Any]

# Parts of the method, which may differ. All other keys must be equal.
_METHOD = (
    *("algorithm", "model", "settings", "control", "fairness", "server", "compression", "robust"),
    *("secure_aggregation", "sampling_rate", "batch_size"),
)
_METHOD_OF_PRIVACY = ("privacy.clip", "privacy.sigma")
# Does not change what is trained, or differs between the runs of an entry.
_NOTHING = ("run", "seed", "about")
_EACH = ("sampling_rate", "privacy.epsilon", "privacy.delta", "privacy.sigma")
"""Settings that may be lists of values, one for each site."""
_ONES = {
    "privacy.clip_schedule": "constant",
    "local.schedule": "constant",
    "task.class_weights": None,
}
"""Settings that may be lists of factors -> what means a factor of 1."""
LOCAL_STEPS_KEY = "settings.local_steps"
"""The key of τ, also for algorithms without such a setting."""
_UNKNOWN = object()
DATA = ("data", "label", "site")
"""Keys that must be equal for figures to be comparable at all."""


@dataclass(frozen=True)
class Difference:
    """A key in which plans differ. values: entry -> value, marked if it is a default.

    unequal: whether it makes the comparison unfair.
    """

    key: str
    values: Mapping[str, str]
    unequal: bool


def differences(plans: Mapping[str, JsonMapping], swept: Collection[str] = ()) -> list[Difference]:
    """Return every key in which plans (entry -> plan.json's content) differ, unequal ones first.

    swept: keys that are compared. Of a plain run's privacy settings only the mode counts.
    """
    flat = {name: _applicable(plan) for name, plan in plans.items()}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    found = []
    for key in keys:
        # Keys that a plain run or another algorithm does not have are no difference, unless given.
        optional = key.startswith("privacy.") or (
            key.startswith("settings.")
            and all(_is_left(key, plans[name]) for name, own in flat.items() if key in own)
        )
        values = {
            name: repr(values.get(key))
            for name, values in flat.items()
            if key in values or not optional
        }
        if len(set(values.values())) > 1:
            method = key.split(".")[0] in _METHOD or key in _METHOD_OF_PRIVACY
            having = {n: value for n, value in values.items() if key in flat[n]}
            unequal = key not in swept and (not method or _differ_by_default(key, having, plans))
            shown = {
                n: value + " by default" * _is_left(key, plans[n]) for n, value in values.items()
            }
            found.append(Difference(key, shown, unequal))
    return sorted(found, key=lambda difference: not difference.unequal)


def _differ_by_default(
    key: str, values: Mapping[str, str], plans: Mapping[str, JsonMapping]
) -> bool:
    """Whether two algorithms differ in a shared setting, and one of the values is a default."""
    return key.startswith("settings.") and any(
        values[one] != values[other]
        and plans[one].get("algorithm") != plans[other].get("algorithm")
        and (_is_left(key, plans[one]) or _is_left(key, plans[other]))
        for one, other in combinations(values, 2)
    )


def _is_left(key: str, plan: JsonMapping) -> bool:
    return key in plan.get(DEFAULTS_KEY, ())


def _applicable(plan: JsonMapping) -> dict[str, Any]:
    """Return the settings that have a meaning in a plan, by dotted key."""
    flat = flatten(plan)
    # Whole, so that what only one plan gives its sites counts.
    flat["privacy.per_site"] = (plan.get("privacy") or {}).get("per_site") or {}
    flat.setdefault(LOCAL_STEPS_KEY, _steps(plan))
    plain = flat.get("privacy.mode") == "none"
    for key in (*_EACH, *_ONES):
        value = flat.get(key)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            flat[key] = _ONES[key] if key in _ONES and value[0] == 1 else value[0]
    if flat.get("sites_per_round") == flat.get("sites") is not None:
        flat["sites_per_round"] = None
    idle = {f"{table}.weights" for table in ("initial", "features") if flat.get(f"{table}.sha256")}
    idle |= {"privacy.size_noise"} if flat.get("privacy.sizes") == "public" else set()
    return {
        key: value
        for key, value in flat.items()
        if key.split(".")[0] not in (*_NOTHING, DEFAULTS_KEY)
        and value is not _UNKNOWN
        and key not in idle
        and not key.startswith("privacy.per_site.")
        and not (plain and key.startswith("privacy.") and key != "privacy.mode")
    }


def _steps(plan: JsonMapping) -> Any:
    """Return τ of a plan without such a setting."""
    name, control = str(plan.get("algorithm")), plan.get("control", {})
    if name not in algorithms.names() and ":" not in name:
        return _UNKNOWN
    method = Method(name)
    if method.facts.controlled or control.get("kind", "fixed") != "fixed":
        return "chosen in each round"
    return _UNKNOWN if "local_steps" in type(method.settings).model_fields else method.steps()


# Keys that determine each site's records.
_PLACES = ("partition", "sites", "records", "evaluation")

RESUMABLE = ("stopped", "running", "not ended")
"""The statuses of a run that can be continued."""


@dataclass(frozen=True)
class Spread:
    """Mean over an entry's runs, and sample standard deviation; None for a single run."""

    mean: float
    deviation: float | None

    def describe(self, form: Callable[[float], str]) -> str:
        """Return it in words; form: formats a single value."""
        # Equal numbers that were added in another order differ by rounding.
        if self.deviation is None or self.deviation <= 1e-12 * abs(self.mean):
            return form(self.mean)
        return f"{form(self.mean)} ± {form(self.deviation)}"


_SYMBOLS = {"privacy.epsilon": "ε", "privacy.delta": "δ"}


def name_swept_value(key: str, value: Any) -> str:
    """Return a swept key and value as the page shows them.

    >>> name_swept_value("privacy.epsilon", 2.0), name_swept_value("partition.beta", 0.3)
    ('ε = 2', 'partition.beta = 0.3')
    """
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    return f"{_SYMBOLS.get(key, key)} = {int(value) if whole else value}"


@dataclass(frozen=True)
class SweepPoint:
    """An entry's place in a sweep. base: its name without swept values. values: key -> value."""

    base: str
    values: Mapping[str, Any]

    def __str__(self) -> str:
        return ", ".join(name_swept_value(key, value) for key, value in self.values.items())


@dataclass(frozen=True, eq=False)
class Entry:
    """One configuration or algorithm, with its runs that have ended, one for each seed.

    plan: plan.json's content, of any seed. missing: seed -> why it has no run.
    """

    name: str
    plan: JsonMapping
    runs: Sequence[RunSummary]
    missing: Mapping[int, str] = field(default_factory=dict[int, str])
    point: SweepPoint = SweepPoint("", {})

    @property
    def base(self) -> str:
        """Its name without swept values."""
        return self.point.base or self.name

    def spread(self, figure: str) -> Spread | None:
        """Return a figure's mean and deviation over the runs; None if a run has no value."""
        values = [run.figures.get(figure) for run in self.runs]
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        if not all(map(math.isfinite, known)):
            return Spread(math.nan, None)
        deviation = statistics.stdev(known) if len(known) > 1 else None
        return Spread(statistics.fmean(known), deviation)

    def range(self, name: str) -> tuple[float, float] | None:
        """Return the range of a RunSummary's range over all runs; None if no run has one."""
        known = [pair for run in self.runs if (pair := getattr(run, name)) is not None]
        return (min(low for low, _ in known), max(high for _, high in known)) if known else None

    @property
    def private(self) -> bool | None:
        """Whether its runs were private; None if none has ended."""
        return self.runs[0].private if self.runs else None

    @property
    def spent(self) -> Guarantee | None:
        """The largest ε and δ of all runs, since a mean is no bound; None if plain."""
        known = [run.spent for run in self.runs if run.spent is not None]
        return Guarantee.largest(known) if known else None

    @property
    def statuses(self) -> str:
        """How its runs ended, and which are missing."""
        ends = [run.status for run in self.runs if run.status != "finished"]
        # A model that diverges may stay finite to the end.
        worse = [run for run in self.runs if run.worse and run.status != "diverged"]
        ends += ["worse than before training"] * len(worse)
        told = [f"{ends.count(end)} × {end}" for end in dict.fromkeys(ends)]
        if self.missing:
            told.append(f"missing: seed {', '.join(map(str, sorted(self.missing)))}")
        return "; ".join(told)


@dataclass(frozen=True)
class PairedDifference:
    """An entry's measure minus the reference's, over the seeds that both have run.

    low, high: 95 % interval of the mean by Student's t. p: two-sided, for no difference in means.
    Both assume normal differences. For a single seed, or equal differences, which say nothing about
    their spread, the interval is NaN and p is 1.
    """

    entry: Entry
    reference: Entry
    seeds: int
    mean: float
    low: float
    high: float
    p: float

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.low)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The entries in order. folder: contains their folders.

    counted: the cost of trying them all, if requested.
    chosen: entry -> the settings (key -> value) that were chosen for it on validation records.
    """

    folder: Path
    entries: Sequence[Entry]
    counted: Sequence[TuningCost] = ()
    chosen: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    @property
    def swept(self) -> list[str]:
        """The swept keys."""
        return list(dict.fromkeys(key for entry in self.entries for key in entry.point.values))

    @property
    def choice(self) -> list[str]:
        """How settings were chosen and which, a line for each entry; empty if none were."""
        found = [
            f"{name}: " + ", ".join(name_swept_value(key, value) for key, value in of.items())
            for name, of in self.chosen.items()
        ]
        how = (
            "Each entry's settings were chosen by trials (in the folder trials) on validation "
            "records, which are part of the training records. Test records were not used for it, "
            "nor a seed's held-out records in that seed's trials"
        )
        return [how, *found] if found else []

    @property
    def runs(self) -> list[RunSummary]:
        """All runs that have ended."""
        return [run for entry in self.entries for run in entry.runs]

    @property
    def measured(self) -> list[str]:
        """The metrics of any run, METRICS first."""
        return list(dict.fromkeys([*METRICS, *(n for run in self.runs for n in run.measured)]))

    @property
    def judged(self) -> str:
        """What is compared: "accuracy", or "mean loss" if no run has an accuracy."""
        return "accuracy" if any(r.counted for r in self.runs) or not self.runs else "mean loss"

    @property
    def key_figures(self) -> dict[str, str]:
        """What is drawn over a swept key, and compared by pairs: name -> the figure's key."""
        if self.judged == "accuracy":
            return {"accuracy": "accuracy", "worst site": "worst_accuracy"}
        return {"mean loss": "loss"}

    @property
    def averaged(self) -> bool:
        """Whether some run kept an average of models."""
        return any(run.figures["average_loss"] is not None for run in self.runs)

    @property
    def pooled(self) -> bool:
        """Whether some accuracy is on held-out records, for lack of a public test set."""
        return any(run.pooled for run in self.runs)

    @cached_property
    def differences(self) -> list[Difference]:
        """The keys in which the entries' plans differ."""
        return differences({entry.name: entry.plan for entry in self.entries}, self.swept)

    @property
    def left_apart(self) -> bool:
        """Whether algorithms use different defaults of a shared setting."""
        return any(d.unequal and d.key.startswith("settings.") for d in self.differences)

    @cached_property
    def inequalities(self) -> list[str]:
        """Why the comparison is not fair, a line for each algorithm; empty if it is.

        What is the same at each point of a sweep is stated once.
        """
        found, unequal = dict[str, list[str]](), [d for d in self.differences if d.unequal]
        seeds = {
            e.name: ", ".join(map(str, sorted(run.seed for run in e.runs))) for e in self.entries
        }
        for entry in self.entries:
            own = found.setdefault(entry.base, [])
            own += [f"{d.key} = {d.values[entry.name]}" for d in unequal if entry.name in d.values]
            if len(set(seeds.values())) > 1:
                own.append(f"seeds {seeds[entry.name] or 'none'}")
        lines = [f"{base}: {'; '.join(dict.fromkeys(own))}" for base, own in found.items() if own]
        spread = any("partition" in d.key for d in unequal) or any(
            key.split(".")[0] in _PLACES for key in self.swept
        )
        digests = dict[int, set[str]]()
        for run in self.runs:
            if run.partition:
                digests.setdefault(run.seed, set()).add(run.partition["digest"])
        if not spread and any(len(of) > 1 for of in digests.values()):
            lines.append("the records of the sites, under the same partition settings and seed")
        return lines

    def by_base(self, difference: Difference) -> dict[str, str]:
        """Return base name -> value of a key; different values in a sweep are joined by "or"."""
        found = dict[str, dict[str, None]]()
        for entry in self.entries:
            if entry.name in difference.values:
                found.setdefault(entry.base, {})[difference.values[entry.name]] = None
        return {base: " or ".join(values) for base, values in found.items()}

    def describe(self, entries: Sequence[Entry]) -> str:
        """Return the entries' names; all entries of a point become "all at POINT"."""
        found = list[str]()
        for at, group in self.groups.items():
            names = [entry.name for entry in group if entry in entries]
            found += [f"all at {at}"] if at and len(names) == len(group) > 1 else names
        return ", ".join(found)

    @cached_property
    def groups(self) -> dict[str, list[Entry]]:
        """Point of the sweep in words -> its entries."""
        return _group(self.entries, lambda entry: str(entry.point))

    def pair(self, figure: str) -> list[PairedDifference]:
        """Return each entry's difference from the first entry at the same point.

        Then each algorithm's difference from itself at the first point, with a correction of its
        own: if each point has a single algorithm, only that.
        """
        groups = [*self.groups.values()]
        if all(len(group) == 1 for group in groups):
            return _differences([self.entries], figure)
        bases = _group(self.entries, lambda entry: entry.base).values()
        return _differences(groups, figure) + _differences(bases, figure)


def _group(entries: Iterable[Entry], by: Callable[[Entry], str]) -> dict[str, list[Entry]]:
    found = dict[str, list[Entry]]()
    for entry in entries:
        found.setdefault(by(entry), []).append(entry)
    return found


def read_compared(
    folder: Path,
    plans: Mapping[str, JsonMapping],
    seeds: Sequence[int],
    failed: Mapping[tuple[str, int], str] = MappingProxyType({}),
    points: Mapping[str, SweepPoint] = MappingProxyType({}),
) -> list[Entry]:
    """Read a comparison's runs, folder/NAME/seed-S, in the order of the plans.

    plans: name -> plan.json's content, of any seed. failed: (name, seed) -> why there is no run.
    points: name -> its place in a sweep. A run that has not ended, or whose files are damaged, is
    missing.
    """
    entries = list[Entry]()
    for name, plan in plans.items():
        runs, missing = list[RunSummary](), dict[int, str]()
        for seed in seeds:
            found = failed.get((name, seed)) or _read(run_folder(folder, name, seed))
            if isinstance(found, RunSummary):
                runs.append(found)
            else:
                missing[seed] = found
        entries.append(Entry(name, plan, runs, missing, points.get(name, SweepPoint("", {}))))
    return entries


def _differences(groups: Iterable[Sequence[Entry]], figure: str) -> list[PairedDifference]:
    """Compare the others of each group with its first entry.

    p is corrected for all of them by Holm's method (Scandinavian Journal of Statistics 6, 1979).
    """
    pairs = [(entry, group[0]) for group in groups for entry in group[1:]]
    found = [one for pair in pairs if (one := _pair(*pair, figure))]
    least, order = 0.0, sorted(range(len(found)), key=lambda i: found[i].p)
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(found) - rank) * found[i].p))
        found[i] = replace(found[i], p=least)
    return found


def _pair(entry: Entry, reference: Entry, figure: str) -> PairedDifference | None:
    """Compare them over their common seeds; None if these have no finite figures."""
    # scipy.stats takes time to load.
    from scipy.stats import ttest_1samp

    others = {run.seed: run.figures[figure] for run in reference.runs}
    pairs = [(run.figures[figure], others[run.seed]) for run in entry.runs if run.seed in others]
    found = [a - b for a, b in pairs if a is not None and b is not None]
    if not found or not all(map(math.isfinite, found)):
        return None
    n, mean = len(found), statistics.fmean(found)
    # Accuracies on few records are often equally far apart; what is left is rounding.
    if max(found) - min(found) <= 1e-9 * max(1.0, abs(mean)):
        return PairedDifference(entry, reference, n, mean, math.nan, math.nan, 1.0)
    test: Any = ttest_1samp(found, 0.0)
    low, high = map(float, test.confidence_interval(0.95))
    return PairedDifference(entry, reference, n, mean, low, high, float(test.pvalue))


def run_folder(folder: Path, name: str, seed: int) -> Path:
    """Return the folder of an entry's run with a seed."""
    return folder / name / f"seed-{seed}"


def _read(folder: Path) -> RunSummary | str:
    if not (folder / "rounds.jsonl").exists():
        return "not begun"
    try:
        run = read_run(folder)
    except InputError as error:
        return str(error)
    return f"{run.status} after round {run.last.round}" if run.status in RESUMABLE else run
