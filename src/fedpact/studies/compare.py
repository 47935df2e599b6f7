"""Run several plans on the same data, partition, seeds and budgets, and compare them."""

import contextlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fedpact.algorithms.wrappers.released_scales import check_as_declared
from fedpact.api import with_own
from fedpact.common import check
from fedpact.common.configuration import key_of
from fedpact.common.errors import InputError, PlanError
from fedpact.common.files import check_out, write_whole
from fedpact.common.format import count_noun
from fedpact.common.notebook import Bar, frame, in_notebook
from fedpact.common.records import strict
from fedpact.common.run_folder import Folder, find_unused_path
from fedpact.common.user_code import is_handed
from fedpact.data.dataset import Dataset
from fedpact.plan import Plan
from fedpact.report.compared_runs import (
    DATA,
    RESUMABLE,
    Comparison,
    differences,
    read_compared,
    run_folder,
)
from fedpact.report.comparison import (
    comparison_table,
    document,
    inequality,
    run_figures,
    write_comparison,
)
from fedpact.report.comparison_charts import on_the_way, sweeps
from fedpact.report.page import write_report
from fedpact.report.run_summary import RunSummary
from fedpact.report.tuning_cost import count_tuning_cost as trying
from fedpact.simulation.machine import available_cores
from fedpact.simulation.run import changed_keys, with_counted_sites
from fedpact.simulation.simulate import SiteModels, of_run
from fedpact.studies.pool import Job, OnNews, RunProgress, carry_out_here, run_jobs
from fedpact.studies.sweep import (
    expand_points,
    expand_sweep,
    free_name,
    no_setting,
    settings_of,
)

_logger = logging.getLogger("fedpact")


@dataclass(frozen=True, eq=False, repr=False)
class Compared(Comparison):
    """A finished comparison, with the fields of report.compared_runs.Comparison."""

    def __repr__(self) -> str:
        named = ", ".join(f"{name} {fares}" for name, fares, *_ in comparison_table(self).rows[:8])
        more = ", …" if len(self.entries) > 8 else ""
        told = "; NOT AN EQUAL COMPARISON" if self.inequalities else ""
        runs = count_noun(len(self.runs), "run")
        return f"Comparison({named}{more}; {runs}{told}; {str(self.folder)!r})"

    def _repr_html_(self) -> str:
        note = f"mean ± standard deviation over seeds; {self.folder / 'comparison.html'}"
        return comparison_table(self).html("Comparison", note, (inequality(self) or "").split("\n"))

    def frame(self) -> Any:
        """Return a pandas DataFrame with a row for each run: swept values and figures."""
        found = [
            {
                "entry": entry.name,
                "seed": run.seed,
                **entry.point.values,
                **run_figures(run),
                "status": run.status,
            }
            for entry in self.entries
            for run in entry.runs
        ]
        return frame(found)

    def figures(self) -> dict[str, Any]:
        """Return the page's figures as matplotlib Figures, by title."""
        rows = [*sweeps(self).values(), *on_the_way(self)]
        return {drawing.title: drawing for row in rows for drawing in row}


_ALONE = {"local": ("mr_mtl", ("settings.proximal=0.0", "settings.proximal_noise=0.0"))}
"""A name for `--algorithms` -> the algorithm and the settings that it stands for."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def read_plans(
    configs: Sequence[Path], chosen: Sequence[str] = (), overrides: Sequence[str] = ()
) -> dict[str, Plan]:
    """Return name -> plan: each configuration file with each chosen algorithm.

    Without files, the embedded default is used; without algorithms, each file's own. "local" trains
    each site alone under the same privacy: mr_mtl with λ = κ = 0. An algorithm gets those of a
    file's [settings], and of the overrides `settings.KEY=VALUE`, that it knows.
    Raises PlanError: an invalid file or override, or a setting that no algorithm knows.
    """
    found: dict[str, Plan] = {}
    for config in configs or [None]:
        stem = "default"
        if config:
            stem = _folder_name(config.stem) or "plan"
        if not chosen:
            found[free_name(stem, found)] = Plan.read(config, overrides)
        for algorithm in chosen:
            name = _named_by(algorithm)
            name = name if len(configs) < 2 else f"{stem}-{name}"
            found[free_name(name, found)] = _with_algorithm(config, algorithm, overrides)
    _all_known(chosen, overrides)
    return found


def name_plans(plans: Plan | Mapping[str, Plan] | Sequence[Plan]) -> dict[str, Plan]:
    """Return plans by name: as given, or named by algorithm and numbered where it repeats.

    Raises InputError: no plan, something else, or a name that cannot be a folder's.
    """
    found: dict[str, Plan] = {}
    if isinstance(plans, Mapping):
        found.update({name: _plan(plan) for name, plan in plans.items()})
    else:
        # Text is iterable, too.
        alone = isinstance(plans, Plan | str) or not isinstance(plans, Iterable)
        for plan in map(_plan, [plans] if alone else plans):
            found[free_name(_named_by(plan.algorithm), found)] = plan
    if not found:
        raise InputError("there is nothing to compare: give at least one plan")
    for name in found:
        if not _NAME.fullmatch(name):
            raise InputError(
                f"an entry is called {name!r}: expected letters, digits, '.', '_' and '-', a letter"
                " or digit first, as it names a folder"
            )
    return found


def _named_by(algorithm: str) -> str:
    """Return an entry's name for an algorithm; for package.module:name the name alone."""
    return _folder_name(algorithm.rpartition(":")[2]) or "algorithm"


def _folder_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-_")


def _plan(given: Any) -> Plan:
    if isinstance(given, Plan):
        return given
    raise InputError(
        f"plans holds {given!r}: expected plans, in a list or by name; a file is read by "
        "fedpact.Plan.read(FILE), a table by fedpact.Plan.parse({...})"
    )


def comparable(plans: Mapping[str, Plan]) -> None:
    """Raise PlanError unless the plans have the same data and independent runs."""
    found = differences({name: plan.document() for name, plan in plans.items()})
    for difference in found:
        if difference.key in DATA:
            values = ", ".join(f"{name}: {value}" for name, value in difference.values.items())
            raise PlanError(
                f"the plans differ in {difference.key} ({values}): accuracy and Ψ of different "
                "records have nothing in common; compare runs on the same data"
            )
    for name, plan in plans.items():
        if plan.run.ledgers is not None:
            raise PlanError(
                f"{name}: run.ledgers is {plan.run.ledgers!r}: the runs of a comparison are "
                "alternatives, and in ledgers that are kept across runs each would pay for the "
                "others; leave it out"
            )


def seeds_of(plans: Mapping[str, Plan], seeds: int | Sequence[int]) -> list[int]:
    """Return the seeds of every entry: those given, or this many, starting with the first plan's.

    Raises InputError: no seed, a repeated one, or one that is not an integer >= 0.
    """
    if not isinstance(seeds, Iterable):
        first = next(iter(plans.values())).seed
        return [first + i for i in range(check.count(seeds=seeds))]
    found = [check.natural(seed=seed) for seed in seeds]
    if not found or len(set(found)) < len(found):
        raise InputError(f"seeds are {found}: expected at least one, each once")
    return found


def reseed(plan: Plan, seed: int, workers: int) -> Plan:
    """Return a plan with another seed, and with `workers` unless it sets run.workers."""
    raw = plan.document()
    raw["seed"] = seed
    raw["run"]["workers"] = plan.run.workers or workers
    return Plan.parse(raw)


def _with_algorithm(config: Path | None, chosen: str, overrides: Sequence[str]) -> Plan:
    algorithm, fixed = _ALONE.get(chosen, (chosen, ()))
    general = [text for text in overrides if _setting(text) is None]
    base = Plan.read(config, general)
    # The embedded configuration's settings belong to its own algorithm.
    own = base.settings if config or algorithm == base.algorithm else {}
    fields = settings_of(algorithm)
    # A list or a plain value reads the same in JSON and in TOML.
    kept = [f"settings.{key}={json.dumps(own[key])}" for key in own if key in fields]
    mine = [text for text in overrides if _setting(text) in fields]
    return Plan.read(
        config, [*general, f"algorithm={algorithm}", "settings={}", *kept, *mine, *fixed]
    )


def _all_known(chosen: Sequence[str], overrides: Sequence[str]) -> None:
    names = [_ALONE.get(name, (name,))[0] for name in chosen]
    for text in overrides:
        key = _setting(text)
        if names and key is not None and not any(key in settings_of(name) for name in names):
            raise PlanError(f"--set {text!r}: settings.{key} is {no_setting(names)}")


def _setting(override: str) -> str | None:
    key = key_of(override)
    return key.split(".")[1] if key.startswith("settings.") else None


def compare(
    plans: Plan | Mapping[str, Plan] | Sequence[Plan],
    seeds: int | Sequence[int] = 3,
    out: Path | str | None = None,
    *,
    model: Any = None,
    data: Any = None,
    test: Any = None,
    jobs: int = 0,
    joining: bool = False,
    counted: bool = False,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    points: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    on_news: OnNews | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Compared:
    """Run every plan with every seed; write the runs' folders, comparison.html and comparison.json.

    plans: by name, a list, or a single plan; unnamed plans are named by algorithm.
    seeds: a list, or their number, starting with the first plan's seed.
    out: the comparison's folder, by default runs/compare-TIME. A run is in out/NAME/seed-S. Runs
        there that have ended are kept, others are resumed.
    model, data, test: your own objects for all plans, as in `fedpact.run`. Objects that another
        process cannot import are trained in this process, one run after another.
    jobs: parallel runs, in as many processes; 0: one for each core. A plan with run.workers = 0
        gets its share of the cores. With budget.seconds, runs are sequential.
    joining: also compute the value of joining for each site (simulation.simulate).
    counted: also compute the privacy cost of trying all entries (report.tuning_cost).
    sweep: key -> values; each plan runs with all combinations. Swept keys do not count as
        differences. points: instead of a sweep, the points (key -> value) of each plan, by name.
    on_news: called for every round, every end and every site of `joining`; a notebook shows a bar
        by default. stop: polled every 0.1 s; true ends runs after their current round.

    A run that fails is in its entry's `missing` with the reason, and without on_news in a warning.
    Plans that differ in more than their method are compared and marked (Comparison.inequalities).
    Raises InputError before anything is written: no plans, different data, an invalid name or seed,
    an unsuitable folder, or several jobs with budget.seconds.
    """
    named = name_plans(plans)
    entries, at = expand_points(named, points) if points else expand_sweep(named, sweep or {})
    for key, own in {"model": model, "data": data}.items():
        if own is not None and key in (sweep or {}):
            raise PlanError(
                f"{key}=... with a sweep of {key}: it would take the place of every value of the "
                "sweep; leave it out, and give all values in the sweep"
            )
    records = dict[str, Dataset | None]()
    for name, plan in entries.items():
        entries[name], records[name] = with_own(plan, model=model, data=data, test=test)
    comparable(entries)
    if joining:
        check_held_out(entries)
    if counted:
        check_countable(entries, seeds)
    chosen = seeds_of(entries, seeds)
    folder = _own_folder(out)
    side_by_side, workers = shares(serialise_timed(entries, jobs), len(entries) * len(chosen))
    wanted = [
        Job(name, seed, reseed(plan, seed, workers), run_folder(folder, name, seed), records[name])
        # All entries with one seed before the next, so that early results can be compared.
        for seed in chosen
        for name, plan in entries.items()
    ]
    missing = [job for job in wanted if not has_ended(job)]
    others = [job for job in missing if not job.here]
    silent, on_news = on_news is None, on_news or _watcher(len(missing))
    failed = run_jobs(others, side_by_side, on_news, stop)
    failed |= carry_out_here([job for job in missing if job.here], on_news, stop)
    if joining and not stop():
        _joining(wanted, on_news, stop)
    for (name, seed), why in failed.items() if silent else ():
        _logger.warning("%s with seed %d failed: %s", name, seed, why)
    documents = {name: plan.document() for name, plan in entries.items()}
    found = Compared(folder, read_compared(folder, documents, chosen, failed, at))
    return store(replace(found, counted=trying(private_runs(found))) if counted else found)


def store(comparison: Compared) -> Compared:
    """Write comparison.html and comparison.json into the comparison's folder; return it."""
    comparison.folder.mkdir(parents=True, exist_ok=True)
    found = strict(document(comparison))
    text = json.dumps(found, indent=2, allow_nan=False, default=str) + "\n"
    write_whole(comparison.folder / "comparison.json", text.encode(), private=False)
    write_comparison(comparison)
    return comparison


def _watcher(runs: int) -> OnNews:
    """Return a progress bar of finished runs in a notebook, elsewhere a function without effect."""
    if not (runs and in_notebook()):
        return lambda _: None
    bar, ended = Bar(runs), set[tuple[str, int]]()

    def show(news: RunProgress) -> None:
        if news.ended:
            ended.add((news.job.name, news.job.seed))
        bar(len(ended), f"{news.job.name}, seed {news.job.seed}")

    return show


def check_held_out(plans: Mapping[str, Plan]) -> None:
    """Raise PlanError if the value of joining cannot be computed for a plan."""
    for name, plan in plans.items():
        check_as_declared(plan.method)
        plan.task.check_plain("what joining was worth")
        if is_handed(plan.data):
            raise PlanError(
                f"{name}: joining with data {plan.data}: the value of joining is computed for data "
                "that a plan names; write the records to a file"
            )
        if not plan.held_out:
            raise PlanError(
                f"{name}: partition.held_out and evaluation.share are 0: the value of joining is "
                "measured on held-out records; set one of them, or leave --joining out"
            )


def check_countable(plans: Mapping[str, Plan], seeds: int | Sequence[int]) -> None:
    """Raise PlanError if the cost of trying is not defined for these plans."""
    private = {name: plan for name, plan in plans.items() if plan.private}
    units = {name: plan.privacy.unit for name, plan in private.items()}
    if len(set(units.values())) > 1:
        told = ", ".join(f"{name}: {unit}" for name, unit in units.items())
        raise PlanError(
            f"--counted with ε of different units ({told}): they cannot be added; use one "
            "privacy.unit, or leave --counted out"
        )
    runs = len(private) * len(seeds_of(plans, seeds))
    if runs < 2:
        raise PlanError(
            f"--counted with {runs} private runs of {len(plans)} entries: expected at least two; "
            "add settings or seeds, or leave --counted out"
        )


def private_runs(comparison: Comparison) -> dict[str, dict[int, RunSummary]]:
    """Return the private runs that have ended: entry -> seed -> run."""
    return {
        entry.name: {run.seed: run for run in entry.runs}
        for entry in comparison.entries
        if entry.private
    }


class _Stopped(Exception):
    """Ends the computation for a run before its next site."""


def _joining(jobs: Sequence[Job], on_news: OnNews, stop: Callable[[], bool]) -> None:
    """Compute the value of joining for every run that has ended, until stop()."""
    alones: SiteModels = {}
    with contextlib.suppress(_Stopped):
        for job in jobs:
            which = itertools.count(1)

            def on_site(
                site: str, of: int, job: Job = job, which: Iterator[int] = which
            ) -> None:  # a site may take minutes
                if stop():
                    raise _Stopped
                on_news(RunProgress(job, joining=(site, next(which), of)))

            if has_ended(job) and not (job.folder / "joining.json").exists():
                of_run(job.folder, known=alones, on_site=on_site)
                write_report(job.folder)


def serialise_timed(plans: Mapping[str, Plan], jobs: int) -> int:
    """Return the number of parallel jobs: 1 if a budget is measured time."""
    timed = [name for name, plan in plans.items() if plan.budget.seconds is not None]
    if timed and jobs > 1:
        raise PlanError(
            f"jobs is {jobs} and {timed[0]} has budget.seconds = {plans[timed[0]].budget.seconds}: "
            "runs side by side take time from each other; give --jobs 1, or a budget of bytes or "
            "rounds"
        )
    return 1 if timed else jobs


def _own_folder(out: Path | str | None) -> Path:
    """Return the comparison's folder. Raises InputError: it cannot be written, or is a run's."""
    folder = check_out(comparison_folder() if out is None else Path(out))
    if (folder / "plan.json").exists():
        raise InputError(
            f"out is {str(folder)!r}, which is the folder of a run: name another one for a "
            "comparison, which may be new"
        )
    return folder


def comparison_folder() -> Path:
    """Return a new folder's name under runs/."""
    return find_unused_path(Path("runs") / f"compare-{datetime.now().strftime('%Y%m%d-%H%M%S')}")


def shares(jobs: int, runs: int) -> tuple[int, int]:
    """Return the number of parallel runs, and of worker threads for each; at least 1.

    jobs: 0: one for each core.
    """
    cores = available_cores()
    side_by_side = max(1, min(check.natural(jobs=jobs) or cores, runs))
    return side_by_side, max(1, cores // side_by_side)


def has_ended(job: Job) -> bool:
    """Whether the job's folder contains its complete run, including the report.

    Raises PlanError: the folder contains a run of another plan.
    """
    folder = Folder(job.folder)
    if not (job.folder / "plan.json").exists():
        return False
    # [run] and [about] do not change what is trained.
    said = {"run": job.plan.run, "about": job.plan.about}
    found = Plan.parse(folder.read_json("plan.json")).model_copy(update=said)
    if found != (plan := with_counted_sites(job.plan, found)):
        raise PlanError(
            f"{job.folder} holds a run of another configuration ({changed_keys(found, plan)}): "
            "choose another folder with --out, or remove that one"
        )
    if not all((job.folder / name).exists() for name in ("summary.json", "report.html")):
        return False
    return folder.read_json("summary.json")["status"] not in RESUMABLE
