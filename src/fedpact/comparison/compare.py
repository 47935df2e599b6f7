"""`fedpact.compare`: several plans, several seeds, one table and one page."""

import contextlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fedpact import check
from fedpact.api import with_own
from fedpact.comparison.compared import Compared
from fedpact.comparison.entrants import comparable, name_plans, reseed, seeds_of
from fedpact.comparison.here import carry_out_here
from fedpact.comparison.pool import Job, OnNews, RunProgress, run_jobs
from fedpact.comparison.sweep import expand_sweep
from fedpact.data.dataset import Dataset
from fedpact.engines.joining import SiteModels, of_run
from fedpact.engines.process import available_cores
from fedpact.errors import InputError, PlanError
from fedpact.files import check_out, write_whole
from fedpact.folder import Folder, find_unused_path
from fedpact.methods.released import check_as_declared
from fedpact.own.named import is_handed
from fedpact.plan import Plan
from fedpact.records.rounds import strict
from fedpact.report.comparison import document, write_comparison
from fedpact.report.counted import count_tuning_cost as trying
from fedpact.report.outcomes import RESUMABLE, Comparison, read_comparison, run_folder
from fedpact.report.page import write_report
from fedpact.report.reading import RunFolder
from fedpact.shown.progress import Bar, in_notebook


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
    on_news: OnNews | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Compared:
    """Carry out every plan with every seed; write their folders, comparison.html and .json.

    plans: by name, or a list, or one alone, then named by algorithm. seeds: which, or how many from
    the first plan's on; a plan's own seed counts for nothing else. out: the comparison's folder, by
    default runs/compare-TIME; a run is out/NAME/seed-S, as `fedpact.run` makes it. In a folder of
    the same plans, runs that have ended are kept, others are resumed, and missing ones are made.
    model, data, test: of your own, for all plans, as `fedpact.run` takes them; a single plan may
    have a model of its own, Plan(model=...). What no other process can import is trained in this
    one, run after run.
    jobs: runs side by side, each in a process of its own, 0 for one a core; a plan that leaves
    run.workers at 0 gets its share of the cores. Runs that share a machine take longer, so where a
    plan has budget.seconds they go one after the other; their seconds mean the same only then.
    joining: find out, too, what joining was worth to each site (engines.joining); kept where it is.
    counted: find out, too, what trying all this costs a site (report.counted).
    sweep: key -> values: every plan with each value, of several keys in all combinations; the swept
    keys are what is compared, and make nothing unequal.
    on_news: called with every round, every end and every site of `joining`; by default a notebook
    shows a bar. stop: asked every tenth of a second; true ends the runs under way after their
    round, and `joining` before its next site.
    A run that fails is among the entry's `missing` with the reason; the others go on. Plans that
    differ in more than their method are compared, and marked (Comparison.inequalities).
    Raises InputError (PlanError among them), before anything is written: no plans, plans on
    different data, a bad name or seed, a folder that cannot be or holds runs of other plans,
    several jobs for plans with budget.seconds.
    """
    entries, points = expand_sweep(name_plans(plans), sweep or {})
    records = dict[str, Dataset | None]()
    for name, plan in entries.items():
        entries[name], records[name] = with_own(plan, model=model, data=data, test=test)
    comparable(entries)
    if joining:
        _holds_out(entries)
    if counted:
        _countable(entries, seeds)
    chosen = seeds_of(entries, seeds)
    folder = _own_folder(out)
    side_by_side, workers = shares(serialise_timed(entries, jobs), len(entries) * len(chosen))
    wanted = [
        Job(name, seed, reseed(plan, seed, workers), run_folder(folder, name, seed), records[name])
        # All entries with one seed before the next: what is there early can be compared.
        for seed in chosen
        for name, plan in entries.items()
    ]
    missing = [job for job in wanted if not has_ended(job)]
    others = [job for job in missing if not job.here]
    on_news = on_news or _watcher(len(missing))
    failed = run_jobs(others, side_by_side, on_news, stop)
    failed |= carry_out_here([job for job in missing if job.here], on_news, stop)
    if joining and not stop():
        _joining(wanted, on_news, stop)
    documents = {name: plan.document() for name, plan in entries.items()}
    comparison = read_comparison(folder, documents, chosen, failed)
    comparison = replace(comparison, points=points)
    if counted:
        comparison = replace(comparison, counted=trying(_private_runs(comparison)))
    folder.mkdir(parents=True, exist_ok=True)
    found = strict(document(comparison))
    text = json.dumps(found, indent=2, allow_nan=False, default=str) + "\n"
    write_whole(folder / "comparison.json", text.encode(), private=False)
    write_comparison(comparison)
    return Compared(**{each.name: getattr(comparison, each.name) for each in fields(comparison)})


def _watcher(runs: int) -> OnNews:
    """In a notebook a bar of the runs that have ended, elsewhere nobody."""
    if not (runs and in_notebook()):
        return lambda _: None
    bar, ended = Bar(runs), set[tuple[str, int]]()

    def show(news: RunProgress) -> None:
        if news.ended:
            ended.add((news.job.name, news.job.seed))
        bar(len(ended), f"{news.job.name}, seed {news.job.seed}")

    return show


def _holds_out(plans: Mapping[str, Plan]) -> None:
    """Raise PlanError: what joining is worth is asked of a plan without held-out records."""
    for name, plan in plans.items():
        check_as_declared(plan.method)
        plan.task.check_plain("what joining was worth")
        if is_handed(plan.data):
            raise PlanError(
                f"{name}: joining with data {plan.data}: what joining is worth is asked of data "
                "that a plan names; write the records to a file"
            )
        if not (plan.partition.held_out or plan.evaluation.used):
            raise PlanError(
                f"{name}: partition.held_out is 0, and evaluation.share: what joining is worth is "
                "found on the sites' held-out records; give some, or leave --joining out"
            )


def _countable(plans: Mapping[str, Plan], seeds: int | Sequence[int]) -> None:
    """Raise PlanError: what trying costs is asked where nothing adds up."""
    private = {name: plan for name, plan in plans.items() if plan.private}
    units = {name: plan.privacy.unit for name, plan in private.items()}
    if len(set(units.values())) > 1:
        told = ", ".join(f"{name}: {unit}" for name, unit in units.items())
        raise PlanError(
            f"--counted with ε of different units ({told}): one ε of them all would be of neither; "
            "give them one privacy.unit, or leave --counted out"
        )
    runs = len(private) * len(seeds_of(plans, seeds))
    if runs < 2:
        raise PlanError(
            f"--counted with {runs} private runs of {len(plans)} entries: what trying costs is of "
            "two or more runs with an (ε, δ); add settings or seeds, or leave --counted out"
        )


def _private_runs(comparison: Comparison) -> dict[str, dict[int, RunFolder]]:
    """Return those with an (ε, δ) that have ended: entry -> seed -> run."""
    return {
        entry.name: {outcome.seed: outcome.run for outcome in entry.outcomes}
        for entry in comparison.entries
        if entry.private
    }


class _Stopped(Exception):
    """Ends what is found of a run, before its next site."""


def _joining(jobs: Sequence[Job], on_news: OnNews, stop: Callable[[], bool]) -> None:
    """Have every run that has ended say what joining was worth to its sites, until stop()."""
    alones: SiteModels = {}
    with contextlib.suppress(_Stopped):
        for job in jobs:
            if has_ended(job) and not (job.folder / "joining.json").exists():
                of_run(job.folder, known=alones, on_site=_telling(job, on_news, stop))
                write_report(job.folder)


def _telling(job: Job, on_news: OnNews, stop: Callable[[], bool]) -> Callable[[str, int], None]:
    """Return what is told of each site, which may take minutes each."""
    which = itertools.count(1)

    def on_site(site: str, of: int) -> None:
        if stop():
            raise _Stopped
        on_news(RunProgress(job, joining=(site, next(which), of)))

    return on_site


def serialise_timed(plans: Mapping[str, Plan], jobs: int) -> int:
    """Return the jobs, one where a budget is measured time, which runs side by side would share."""
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
    """Return how many runs go side by side, and how many worker threads each of them gets.

    jobs: 0 for one a core. Neither is below 1.
    """
    cores = available_cores()
    side_by_side = max(1, min(check.natural(jobs=jobs) or cores, runs))
    return side_by_side, max(1, cores // side_by_side)


def has_ended(job: Job) -> bool:
    """Whether the job's folder holds its whole run, report included.

    Raises PlanError: the folder holds a run of another plan.
    """
    folder = Folder(job.folder)
    if not (job.folder / "plan.json").exists():
        return False
    # How it is carried out may differ, what is trained may not.
    said = {"run": job.plan.run, "about": job.plan.about}
    found = Plan.parse(folder.read_json("plan.json")).model_copy(update=said)
    if found != job.plan:
        raise PlanError(
            f"{job.folder} holds a run of another configuration: choose another folder with --out, "
            "or remove that one"
        )
    if not all((job.folder / name).exists() for name in ("summary.json", "report.html")):
        return False
    return folder.read_json("summary.json")["status"] not in RESUMABLE
