"""`fedpact compare`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedpact.cli.console import (
    INTERRUPTED,
    AsJson,
    StopOnInterrupt,
    plain_console,
    show,
    wide_console,
)
from fedpact.common import check
from fedpact.common.errors import InputError
from fedpact.common.files import check_file, check_out, write_whole
from fedpact.common.format import count_noun as counted_noun
from fedpact.common.format import duration, headline_metric

if TYPE_CHECKING:
    from fedpact.plan import Plan
    from fedpact.report.compared_runs import Comparison
    from fedpact.studies.pool import Job, RunProgress

_BETWEEN_LINES = 20.0  # seconds between two lines on one run


def compare(
    configs: Annotated[
        list[Path] | None,
        typer.Argument(help=".toml or .json plans; left out, the built-in example."),
    ] = None,
    algorithms: Annotated[
        str,
        typer.Option(help="Run each with these, as in fedavg,fedfdp; local: each site alone."),
    ] = "",
    overrides: Annotated[
        list[str], typer.Option("--set", help="key=value: change a key of all plans; repeatable.")
    ] = [],  # noqa: B006 - typer reads the default, nobody changes it
    sweeps: Annotated[
        list[str],
        typer.Option("--sweep", help="KEY=V1,V2,...: run each with each value; repeatable."),
    ] = [],  # noqa: B006 - as above
    ranges: Annotated[
        list[str],
        typer.Option("--draw", help="KEY=LOW:HIGH: choose it by random trials; repeatable."),
    ] = [],  # noqa: B006 - as above
    draws: Annotated[int | None, typer.Option(help="Points that --draw tries; default: 8.")] = None,
    halving: Annotated[
        int, typer.Option(help="With --draw: start with few rounds, continue the best 1/HALVING.")
    ] = 1,
    seeds: Annotated[int, typer.Option(help="Runs of each, with consecutive seeds.")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="The folder of results; finished runs in it are kept.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs at the same time; 0 for one per core.")] = 0,
    joining: Annotated[
        bool, typer.Option(help="Compare each site with training on its own records alone.")
    ] = False,
    counted: Annotated[
        bool, typer.Option(help="Account for the ε of trying all settings, from the ledgers.")
    ] = False,
    curves: Annotated[
        Path | None, typer.Option("--csv", help="Write every run's rounds to this file.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--latex", help="Write the table to this file, for booktabs.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare plans or algorithms on the same partition, seeds and budgets."""
    chosen = [name.strip() for name in algorithms.split(",")] if algorithms else []
    _check_files(configs or [])
    from fedpact.report.comparison import document
    from fedpact.studies.compare import comparison_folder, read_plans
    from fedpact.studies.search import draw_points, search
    from fedpact.studies.sweep import expand_sweep, read_sweeps

    check.count(seeds=seeds)
    for option, file in (("--csv", curves), ("--latex", table)):
        if file is not None:
            check_file(option, file)
    plans, sweep = read_plans(configs or [], chosen, overrides), read_sweeps(sweeps)
    folder = check_out(out or comparison_folder())
    console = plain_console(stderr=True, quiet=as_json)
    points = draw_points(plans, ranges, draws)
    entries, _ = expand_sweep(plans, {} if points else sweep)
    console.print(_how_many(len(entries), len(points), seeds) + f", in {folder}")
    stop = StopOnInterrupt(console)
    stop()  # installs the handler
    # Of a search it is not known how many runs there will be.
    news = _News(console, 0 if points else _count_missing(folder, entries, seeds))
    how = {"jobs": jobs, "joining": joining, "counted": counted, "sweep": sweep}
    how |= {"halving": halving, "on_news": news, "stop": stop}
    found = search(plans, points, seeds, folder, **how)
    paths = {"folder": str(folder), "report": str(found.folder / "comparison.html")}
    _export(found, curves, table)
    show({**document(found), **paths}, as_json, lambda: _print(found))
    if news.failed:
        raise typer.Exit(2)
    if stop() and _lacks_part(found, bool(points), joining, console):
        raise typer.Exit(INTERRUPTED)


def _lacks_part(found: Comparison, searched: bool, joining: bool, console: Console) -> bool:
    """Whether runs, a search's choice or values of joining are missing; print how many of these."""
    if searched and not found.chosen:
        return True
    lacking = [run for run in found.runs if joining and not run.joining]
    if lacking:
        console.print(
            f"the value of joining is missing for {len(lacking)} of "
            f"{counted_noun(len(found.runs), 'run')}: the same command with --out {found.folder} "
            "computes it"
        )
    return bool(lacking) or any(entry.missing for entry in found.entries)


def _count_missing(folder: Path, entries: Mapping[str, Plan], seeds: int) -> int:
    from fedpact.report.compared_runs import read_compared
    from fedpact.studies.compare import seeds_of

    plans = {name: plan.document() for name, plan in entries.items()}
    return sum(len(e.missing) for e in read_compared(folder, plans, seeds_of(entries, seeds)))


def _check_files(configs: list[Path]) -> None:
    for config in configs:
        if not (config.suffix or config.exists()):
            raise InputError(
                f"there is no file {str(config)!r}: expected plans, .toml or .json; algorithms are "
                f"named by --algorithms {','.join(map(str, configs))}"
            )


def _how_many(entries: int, points: int, seeds: int) -> str:
    at = f" at {counted_noun(points, 'point')} each" if points else ""
    return f"{counted_noun(entries, 'entry')}{at}, {counted_noun(seeds, 'seed')}"


def _export(comparison: Comparison, curves: Path | None, table: Path | None) -> None:
    from fedpact.report.exports import curves_as_csv, table_as_latex

    for file, form in ((curves, curves_as_csv), (table, table_as_latex)):
        if file is not None:
            write_whole(file, form(comparison).encode(), private=False)


class _News:
    """Prints each run's end or failure, and now and then how far the others are."""

    def __init__(self, console: Console, total: int) -> None:
        self.failed = self._ended = 0
        self._console, self._total, self._began = console, total, time.monotonic()
        self._told: dict[tuple[Job, str], float] = {}

    def __call__(self, news: RunProgress) -> None:
        """Print a run's progress."""
        name = f"{news.job.name} seed {news.job.seed}"
        if news.ended:
            self._ended += 1
            self.failed += news.failed is not None
            said = "FAILED: " + news.failed if news.failed else "ended"
            style = "red" if news.failed is not None else None
            self._console.print(f"{name}: {said}{self._time_left()}", style=style)
            return
        if news.joining is not None:
            site, at, of = news.joining
            what, told = "site", f"{at}/{of}  {site} alone and tuned"
        else:
            what, told = "round", f"{news.round}/{news.job.plan.rounds}"
            if news.accuracy is not None or news.loss is not None:
                told += "  " + " ".join(headline_metric(news.accuracy, news.loss))
        now = time.monotonic()
        if now - self._told.get((news.job, what), -math.inf) >= _BETWEEN_LINES:
            self._told[news.job, what] = now
            self._console.print(f"{name}: {what} {told}")

    def _time_left(self) -> str:
        if not self._ended < self._total:
            return ""
        each = (time.monotonic() - self._began) / self._ended
        left = duration(each * (self._total - self._ended))
        return f" ({self._ended} of {self._total} runs; about {left} left)"


def _print(comparison: Comparison) -> None:
    from fedpact.evaluation.metrics import find_display
    from fedpact.report import comparison as report
    from fedpact.report.evaluations import summarise_evaluations, summarise_joining

    out = wide_console()

    def tell(line: str, style: str = "") -> None:
        out.print(line, style=style, soft_wrap=True)

    report.comparison_table(comparison).print(out, f"comparison {comparison.folder}")
    for key in comparison.swept:
        for swept in report.tabulate_sweep(comparison, key):
            swept.print(out, f"{swept.first} over {key}")
    if paired := report.paired_table(comparison):
        paired.print(out, "more than chance?")
        tell(f"differences {report.PAIRED_NOTE}")
    report.effort(comparison).print(out, "what each did to meet it")
    tell(report.EFFORT_NOTE)
    pooled = [f"{comparison.judged} (on held-out records)"] * comparison.pooled
    metrics = [find_display(name).label for name in comparison.measured]
    simulator = ", ".join((*pooled, *metrics))
    out.print(f"mean ± standard deviation over seeds; {simulator} and worst site: simulator only")
    out.print("seconds: wall clock of all rounds; runs at the same time share the machine")
    if sentence := report.inequality(comparison):
        tell(sentence, "bold red")
    for line in (
        *filter(None, [report.baseline(comparison)]),
        *report.guarantees(comparison),
        *comparison.choice,
        *report.lines_by_entry(comparison, summarise_evaluations),
        *report.lines_by_entry(comparison, summarise_joining),
        *report.describe_tuning_cost(comparison),
    ):
        tell(line)
    for entry in comparison.entries:
        for why in dict.fromkeys(entry.missing.values()):
            which = ", ".join(str(seed) for seed, reason in entry.missing.items() if reason == why)
            tell(f"{entry.name} seed {which} is missing: {why}", "red")
    if any(entry.missing for entry in comparison.entries):
        tell(f"the same command with --out {comparison.folder} runs what is missing")
    tell(str(comparison.folder / "comparison.html"))
