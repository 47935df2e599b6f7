"""Runs side by side, each in a process of its own, so that none can take another down with it."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

from fedpact.data.dataset import Dataset
from fedpact.files import write_whole
from fedpact.plan import Plan

_WORKER = [sys.executable, "-m", "fedpact.comparison.worker"]
_POLL = 0.1  # seconds between two looks at what the processes said


@dataclass(frozen=True, eq=False)
class Job:
    """One run to carry out: the entry's name and seed, the whole plan, and the run's folder.

    data: the records, where they were handed in.
    """

    name: str
    seed: int
    plan: Plan
    folder: Path
    data: Dataset | None = None

    @property
    def here(self) -> bool:
        """Whether no other process can carry it out."""
        return self.data is not None or bool(self.plan.handed)


@dataclass(frozen=True)
class RunProgress:
    """What a run has just done: a round, or its end. failed: why it ended without a result.

    joining: of a run that has ended, the site whose worth of joining is found, which and of how
    many; ended is false and round 0 then.
    """

    job: Job
    round: int = 0
    accuracy: float | None = None
    loss: float | None = None
    ended: bool = False
    failed: str | None = None
    joining: tuple[str, int, int] | None = None


OnNews = Callable[[RunProgress], None]


def run_jobs(
    jobs: Sequence[Job], side_by_side: int, on_news: OnNews, stop: Callable[[], bool]
) -> dict[tuple[str, int], str]:
    """Carry out all jobs, so many at a time; return why those that failed did: (name, seed) -> why.

    on_news is called in this thread. Once stop() is true no further run begins, and those under
    way end after their round; they are not failures. An exception here, Ctrl-C among them, ends
    all processes at once: their folders can be resumed.
    """
    pool, failed = _Pool(), dict[tuple[str, int], str]()
    threads = ThreadPoolExecutor(side_by_side)
    try:
        waiting: set[Future[None]] = {threads.submit(pool.run, job) for job in jobs}
        while waiting:
            done, waiting = wait(waiting, _POLL, FIRST_COMPLETED)
            for future in done:
                future.result()
            if stop():
                pool.stop()
            for news in pool.news():
                if news.failed is not None:
                    failed[news.job.name, news.job.seed] = news.failed
                on_news(news)
        return failed
    finally:
        pool.kill()
        threads.shutdown(cancel_futures=True)


class _Pool:
    """The processes under way. `run` is called by threads, the rest by their owner."""

    def __init__(self) -> None:
        self._running = set[subprocess.Popen[str]]()
        self._queue: SimpleQueue[RunProgress] = SimpleQueue()
        self._stopping = False

    def run(self, job: Job) -> None:
        """Carry out one job in a process and put its news into the queue."""
        if self._stopping:
            return
        _error_file(job).unlink(missing_ok=True)
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            # A session of its own: Ctrl-C reaches the processes through `stop` alone.
            process = subprocess.Popen(
                _WORKER,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
            self._running.add(process)
            if self._stopping:
                process.send_signal(signal.SIGINT)
            refusal = self._converse(process, job)
            code = process.wait()
            self._running.discard(process)
            why = None
            if code != 0 and not self._stopping:
                why = refusal or _explain(job, code, errors)
        self._queue.put(RunProgress(job, ended=True, failed=why))

    def _converse(self, process: subprocess.Popen[str], job: Job) -> str | None:
        """Tell the process what to do and pass on its rounds; return its refusal, if any."""
        refusal = None
        if process.stdin is None or process.stdout is None:
            raise TypeError("a run's process has no pipes")
        # A process that was ended before it read closes the pipe; its exit code tells.
        with contextlib.suppress(BrokenPipeError), process.stdin as told:
            plan = job.plan.document()
            # A model's file is found where this process finds it.
            json.dump({"plan": plan, "folder": str(job.folder), "path": sys.path}, told)
        with process.stdout as lines:
            for line in _complete(lines):
                said = json.loads(line)
                refusal = said.get("error", refusal)
                if "round" in said:
                    self._queue.put(
                        RunProgress(job, said["round"], said["accuracy"], said.get("loss"))
                    )
        return refusal

    def news(self) -> Iterable[RunProgress]:
        """Yield what has happened since the last call."""
        with contextlib.suppress(Empty):
            while True:
                yield self._queue.get_nowait()

    def stop(self) -> None:
        """Have the runs under way end after their round, once, and begin no further one."""
        if not self._stopping:
            self._stopping = True
            self._signal(signal.SIGINT)

    def kill(self) -> None:
        """End whatever is still under way, at once."""
        self._stopping = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for process in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)


def _complete(lines: Iterable[str]) -> Iterable[str]:
    """The lines that have their end: a process that is killed may leave half of one."""
    return (line for line in lines if line.endswith("\n"))


def _explain(job: Job, code: int, errors: IO[str]) -> str:
    """Say why a process ended, and keep what it printed beside the run's folder."""
    errors.seek(0)
    text = errors.read()
    path = _error_file(job)
    write_whole(path, text.encode(), private=False)
    if code < 0:
        ended = f"the process was ended by signal {-code}"
        ended += ", as it is where memory runs out" if code == -signal.SIGKILL else ""
    else:
        last = text.strip().splitlines()[-1:] or ["it printed nothing"]
        ended = f"the process ended with code {code}: {last[0]}"
    return f"{ended}; see {path}"


def _error_file(job: Job) -> Path:
    return job.folder.with_name(job.folder.name + ".error.txt")
