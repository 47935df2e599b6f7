"""Parallel runs in processes that each carry out one after another, or runs in this process.

A process is kept for the next run, as to start one takes seconds: longer than a small run. It is
not after a plan with code of its own, which may have changed torch's settings or any module.
concurrent.futures.ProcessPoolExecutor is not used: if one of its processes dies, for example
because memory runs out, it ends all of them without telling which one died.
"""

import contextlib
import math
import multiprocessing
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Event
from pathlib import Path
from types import ModuleType
from typing import Any

from fedpact.api import run
from fedpact.common.configuration import flatten
from fedpact.common.errors import FedpactError
from fedpact.common.messages import RoundRecord
from fedpact.data.dataset import Dataset
from fedpact.plan import Plan
from fedpact.studies.worker import carry_out_jobs

_SPAWN = multiprocessing.get_context("spawn")
_POLL = 0.1  # seconds between two looks at `stop`


@dataclass(frozen=True, eq=False)
class Job:
    """A run to carry out. name: of the entry. data: the records, if they were passed in."""

    name: str
    seed: int
    plan: Plan
    folder: Path
    data: Dataset | None = None

    @property
    def here(self) -> bool:
        """Whether only this process can carry it out."""
        return self.data is not None or bool(self.plan.handed)

    @property
    def has_own_code(self) -> bool:
        """Whether the plan may name code, as package.module:name."""
        return any(":" in str(value) for value in flatten(self.plan.document()).values())

    @property
    def errors(self) -> Path:
        """The file with what the run printed, kept if it failed."""
        return self.folder.with_name(self.folder.name + ".error.txt")


@dataclass(frozen=True)
class RunProgress:
    """A run's progress: a round, or its end. failed: why it ended without a result.

    joining: (site, its number, number of sites) while the value of joining is computed; then ended
    is false and round is 0.
    """

    job: Job
    round: int = 0
    accuracy: float | None = None
    loss: float | None = None
    ended: bool = False
    failed: str | None = None
    joining: tuple[str, int, int] | None = None


OnNews = Callable[[RunProgress], None]
Failures = dict[tuple[str, int], str]
"""(entry, seed) of a run that failed -> why."""


def run_jobs(
    jobs: Sequence[Job], side_by_side: int, on_news: OnNews, stop: Callable[[], bool]
) -> Failures:
    """Carry out all jobs, `side_by_side` at a time; return the failures.

    Once stop() is true, no run begins, and running ones end after their current round, which is not
    a failure. An exception here, such as Ctrl-C, ends all processes; their folders can be resumed.
    """
    stopping, failed = _SPAWN.Event(), Failures()
    waiting, idle, running = deque(jobs), list[_Process](), dict[Any, _Process]()
    try:
        while waiting or running:
            if stop():
                stopping.set()
                waiting.clear()
            while waiting and len(running) < side_by_side:
                idle = [each for each in idle if each.alive]
                process = idle.pop() if idle else _Process(stopping)
                process.begin(waiting.popleft())
                running[process.said] = process
            found = wait(list(running), _POLL)
            if stop():  # before a process that Ctrl-C has ended counts as a failure
                stopping.set()
            for ready in found:
                process = running[ready]
                news = process.next_news()
                if news.ended:
                    del running[ready]
                    if process.alive and not news.job.has_own_code:
                        idle.append(process)
                    elif process.alive:
                        process.end(at_work=False)
                    if news.failed is not None:
                        failed[news.job.name, news.job.seed] = news.failed
                on_news(news)
        return failed
    finally:
        for process in (*running.values(), *idle):
            process.end(at_work=process not in idle)


class _Process:
    """A process for jobs, one at a time. said: the connection over which it reports rounds."""

    def __init__(self, stopping: Event) -> None:
        self._stopping = stopping
        self.said, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(
            target=carry_out_jobs, args=(_work, theirs, stopping), daemon=True
        )
        with _without_main():
            self._process.start()
        # Only the process keeps its end, so reading ends when it dies.
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether the process can carry out a job."""
        return self._process.is_alive()

    def begin(self, job: Job) -> None:
        """Have a job carried out."""
        self._job = job
        job.errors.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # it has died, which next_news tells
            self.said.send((str(job.errors), job.plan.document(), str(job.folder)))

    def next_news(self) -> RunProgress:
        """Wait for and return the next report on the job, or its end."""
        try:
            kind, *said = self.said.recv()
        except (EOFError, OSError):
            self._process.join()
            self.said.close()
            failed = None if self._stopping.is_set() else self._explain()
        else:
            if kind == "round":
                return RunProgress(self._job, *said)
            (failed,) = said
        if self.alive or failed is None:
            self._job.errors.unlink(missing_ok=True)
        return RunProgress(self._job, ended=True, failed=failed)

    def end(self, *, at_work: bool) -> None:
        """End the process, which an idle one does by itself when the connection closes."""
        self.said.close()
        if at_work:
            self._process.kill()
        self._process.join()

    def _explain(self) -> str:
        """Return why the process died."""
        code, path = self._process.exitcode or 0, self._job.errors
        if code < 0:
            ended = f"the process was ended by signal {-code}"
            ended += ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
        else:
            text = path.read_text("utf-8", errors="replace") if path.exists() else ""
            last = text.strip().splitlines()[-1:] or ["it printed nothing"]
            ended = f"the process ended with code {code}: {last[0]}"
        return f"{ended}; see {path}"


@contextlib.contextmanager
def _without_main() -> Any:
    """Keep a new process from importing, and thus running, the caller's script.

    No job needs it: models and records of a script are trained in this process.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _work(says: Connection, stopping: Event, plan: dict[str, Any], folder: str) -> str | None:
    """Carry out a run and report its rounds; return why it was refused, or None."""

    def on_round(record: RoundRecord) -> None:
        says.send(("round", record.round, _number(record.accuracy), _number(record.loss)))

    try:
        run(Plan.parse(plan), Path(folder), on_round=on_round, stop=stopping.is_set)
    except FedpactError as error:
        return str(error)
    return None


def _number(value: float | None) -> float | None:
    """Return None for NaN, which is the accuracy in regression."""
    return None if value is None or math.isnan(value) else value


def carry_out_here(jobs: Sequence[Job], on_news: OnNews, stop: Callable[[], bool]) -> Failures:
    """Carry out all jobs sequentially in this process; see run_jobs."""
    failed = Failures()
    for job in jobs:
        if stop():
            break

        def on_round(record: RoundRecord, job: Job = job) -> None:
            on_news(RunProgress(job, record.round, _number(record.accuracy), _number(record.loss)))

        why = None
        try:
            run(job.plan, job.folder, data=job.data, on_round=on_round, stop=stop)
        except FedpactError as error:
            why = str(error)
        except Exception as error:  # the other runs continue
            traceback.print_exc()
            why = f"it ended with {type(error).__name__}: {error}"
        if why is not None:
            failed[job.name, job.seed] = why
        on_news(RunProgress(job, ended=True, failed=why))
    return failed
