"""Parallel runs, each in its own process, or sequential runs in this process.

concurrent.futures.ProcessPoolExecutor is not used: if one of its processes dies, for example
because memory runs out, it ends all of them without telling which one died.
"""

import contextlib
import math
import multiprocessing
import os
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
from fedpact.common.errors import FedpactError
from fedpact.common.messages import RoundRecord
from fedpact.data.dataset import Dataset
from fedpact.plan import Plan

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
    def errors(self) -> Path:
        """The file with the output of the run's process, kept if it failed."""
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
    waiting, running = deque(jobs), dict[Any, _Process]()
    try:
        while waiting or running:
            if stop():
                stopping.set()
                waiting.clear()
            while waiting and len(running) < side_by_side:
                process = _Process(waiting.popleft(), stopping)
                running[process.said] = process
            for ready in wait(list(running), _POLL):
                process = running[ready]
                news = process.next_news()
                if news.ended:
                    del running[ready]
                    if news.failed is not None:
                        failed[news.job.name, news.job.seed] = news.failed
                on_news(news)
        return failed
    finally:
        for process in running.values():
            process.end()


class _Process:
    """A job in its own process. said: the connection over which it reports its rounds."""

    def __init__(self, job: Job, stopping: Event) -> None:
        self._job, self._stopping, self._refusal = job, stopping, None
        self.said, says = _SPAWN.Pipe(duplex=False)
        job.errors.parent.mkdir(parents=True, exist_ok=True)
        asked = job.plan.document(), str(job.folder)
        self._process = _SPAWN.Process(
            target=_work, args=(says, stopping, str(job.errors), *asked), daemon=True
        )
        with _without_main():
            self._process.start()
        # Only the process keeps the sending end, so reading ends when it dies.
        says.close()

    def next_news(self) -> RunProgress:
        """Wait for and return the next report of the process, or its end."""
        with contextlib.suppress(EOFError, OSError):
            kind, *said = self.said.recv()
            if kind == "round":
                return RunProgress(self._job, *said)
            self._refusal = said[0]
        self._process.join()
        self.said.close()
        failed = None
        if not self._stopping.is_set() or self._refusal:
            failed = self._refusal or self._explain()
        if failed is None or self._refusal:
            self._job.errors.unlink(missing_ok=True)
        return RunProgress(self._job, ended=True, failed=failed)

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()

    def _explain(self) -> str | None:
        """Return why it failed; None if it did not."""
        code, path = self._process.exitcode or 0, self._job.errors
        if code == 0:
            return None
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


def _work(
    says: Connection, stopping: Event, errors: str, plan: dict[str, Any], folder: str
) -> None:
    """Carry out a run in this new process. Its output goes to the file `errors`."""
    # Ctrl-C reaches all processes of a terminal; the first one handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    printed = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(printed, 1)
    os.dup2(printed, 2)

    def on_round(record: RoundRecord) -> None:
        says.send(("round", record.round, _number(record.accuracy), _number(record.loss)))

    try:
        run(Plan.parse(plan), Path(folder), on_round=on_round, stop=stopping.is_set)
    except FedpactError as error:
        says.send(("refused", str(error)))


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
