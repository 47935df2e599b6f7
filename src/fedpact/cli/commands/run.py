"""`fedpact run`, `fedpact resume` and `fedpact extend`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fedpact.cli.console import (
    INTERRUPTED,
    AsJson,
    Config,
    Engine,
    Overrides,
    StopOnInterrupt,
    plain_console,
    print_run,
    show,
)
from fedpact.common.errors import DataError
from fedpact.common.format import exact_percent, headline_metric, size

if TYPE_CHECKING:
    from fedpact.api import Result
    from fedpact.common.messages import RoundRecord
    from fedpact.plan import Plan


def run(
    config: Config = None,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default, nobody changes it
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; a folder of the same plan is resumed.")
    ] = None,
    engine: Engine = "local",
    as_json: AsJson = False,
) -> None:
    """Train by simulation as a plan says, and write the run's folder with its report."""
    from fedpact.api import default_folder
    from fedpact.plan import Plan

    plan = Plan.read(config, overrides)
    _carry_out(plan, out or default_folder(plan), engine, as_json)


def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that was stopped.")],
    engine: Engine = "local",
    as_json: AsJson = False,
) -> None:
    """Resume a run from its last committed round."""
    from fedpact.common.run_folder import Folder
    from fedpact.plan import Plan
    from fedpact.report.compared_runs import RESUMABLE

    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: name the folder of a run, as in runs/first")
    found = Folder(folder)
    ended = (folder / "summary.json").exists()
    if ended and (status := found.read_json("summary.json")["status"]) not in RESUMABLE:
        further = status != "diverged" and found.partition.exists()
        more = f" `fedpact extend {folder} --rounds N` trains it further." * further
        plain_console(stderr=True, quiet=as_json).print(
            f"The run has ended ({status}), so there is nothing to resume.{more}"
        )
        return _print_figures(found.read_json("summary.json"), folder, as_json)
    _carry_out(Plan.parse(found.read_json("plan.json")), folder, engine, as_json)


def extend(
    run: Annotated[Path, typer.Argument(help="The folder of a simulated run that has ended.")],
    rounds: Annotated[int, typer.Option(min=1, help="How many more rounds.")],
    epsilon: Annotated[
        float | None, typer.Option(help="The new run's ε; default: the plan's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The new run's folder; default: RUN-more.")
    ] = None,
    engine: Engine = "local",
    as_json: AsJson = False,
) -> None:
    """Train a finished run for more rounds, in the same ledgers: both ε add up."""
    from fedpact.api import extend as carry_on
    from fedpact.api import extended_folder
    from fedpact.common.run_folder import Folder
    from fedpact.simulation.run import extend_plan

    folder = run
    if (folder / "federation.toml").exists() or (folder / "server").exists():
        raise DataError(
            f"{folder} is a deployment: `fedpact deploy extend SERVER --rounds {rounds} --out "
            "NEW` writes the new run's files for every party; each site's ledger counts both "
            "runs, as far as its policy allows"
        )
    plan, new = extend_plan(Folder(folder), rounds, epsilon), extended_folder(folder, out)
    carry = partial(carry_on, folder, rounds, epsilon=epsilon, out=new, engine=engine)
    _run_and_show(plan, new, carry, as_json)


def _carry_out(plan: Plan, folder: Path, engine: str, as_json: bool) -> None:
    from fedpact.api import run as carry_out

    _run_and_show(plan, folder, partial(carry_out, plan, folder, engine=engine), as_json)


def _run_and_show(plan: Plan, folder: Path, carry: Callable[..., Result], as_json: bool) -> None:
    """Carry out a run with a progress line, then print its figures.

    carry: takes on_round and stop, as `fedpact.run` does.
    """
    # Standard output is for the JSON document, so progress goes where people look: the terminal.
    console = plain_console(stderr=True, quiet=as_json)
    asked = StopOnInterrupt(console)
    live = _Live(plan, folder, console)
    with live.status:
        result = carry(on_round=live, stop=asked)
    _print_figures(result.summary, folder, as_json)
    if result.summary["status"] == "stopped":
        raise typer.Exit(INTERRUPTED)


def _print_figures(summary: dict[str, Any], folder: Path, as_json: bool) -> None:
    from fedpact.report.run_summary import read_run

    report = folder / "report.html"
    show(
        {**summary, "folder": str(folder), "report": str(report)},
        as_json,
        lambda: print_run(read_run(folder), report),
    )


class _Live:
    """A live line on a terminal, plain lines elsewhere."""

    def __init__(self, plan: Plan, folder: Path, console: Console) -> None:
        from fedpact.common.run_folder import Folder
        from fedpact.evaluation.metrics import METRICS

        self._console, self.status = console, console.status("starting")
        self._plan, self._folder = plan, Folder(folder)
        self._fares, self._evaluated, self._sent = "accuracy -", 0, 0
        self._metrics = {metric.label: "-" for metric in METRICS.values()}
        stored = folder / "rounds.jsonl"
        done = len(stored.read_bytes().splitlines()) - 1 if stored.exists() else 0
        # The first round prepares what the others use, so it does not count either.
        self._began, self._first = time.perf_counter(), max(1, done)

    def __call__(self, record: RoundRecord) -> None:
        from fedpact.evaluation.metrics import find_display

        if record.accuracy is not None:
            self._fares = " ".join(headline_metric(record.accuracy, record.loss, exact_percent))
            self._evaluated = record.round
        self._metrics |= {
            find_display(name).label: f"{v:.3g}" for name, v in record.metrics.items()
        }
        self._sent += record.bytes_up + record.bytes_down
        metrics = "  ".join(f"{label} {value}" for label, value in self._metrics.items())
        old = self._evaluated != record.round
        fares = self._fares + f" (round {self._evaluated})" * old
        line = f"round {record.round}/{self._plan.rounds}  {fares}  {metrics}"
        line += f"  {self._privacy(record)}  {size(self._sent)}{self._time_left(record.round)}"
        if self._console.is_terminal:
            self.status.update(Text(line))
        else:
            self._console.print(line, soft_wrap=True)

    def _privacy(self, record: RoundRecord) -> str:
        if not self._plan.private:
            return "NOT PRIVATE"
        return f"ε {record.most_spent(f' of {self._allowed}')}"

    @cached_property
    def _allowed(self) -> str:
        """What the sites' budgets are, of all reservations: as the statement has them."""
        sites = self._folder.read_json("privacy.json")["sites"].values()
        each = {site["epsilon"] for site in sites}
        return f"up to {max(each):g}" if len(each) > 1 else f"{max(each):g}"

    def _time_left(self, done: int) -> str:
        if done <= self._first:
            self._began = time.perf_counter()
            return ""
        each = (time.perf_counter() - self._began) / (done - self._first)
        return f"  {each * (self._plan.rounds - done):.0f} s left"
