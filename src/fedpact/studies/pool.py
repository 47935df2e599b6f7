"""Runs in processes of their own or in this one, and the plans of a sweep."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import product
from os import PathLike, fspath
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from fedpact import algorithms
from fedpact.api import run
from fedpact.common.configuration import (
    drop_overridden,
    flatten,
    key_of,
    select_given,
    set_key,
    value_of,
)
from fedpact.common.errors import FedpactError, PlanError
from fedpact.common.files import write_whole
from fedpact.common.messages import RoundRecord
from fedpact.common.user_code import name_object, name_of_function
from fedpact.data.dataset import Dataset
from fedpact.plan import Plan
from fedpact.report.compared_runs import SweepPoint

_WORKER = [sys.executable, "-m", "fedpact.studies.worker"]
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


def carry_out_here(
    jobs: Sequence[Job], on_news: OnNews, stop: Callable[[], bool]
) -> dict[tuple[str, int], str]:
    """Carry out all jobs; return why those that failed did. See run_jobs."""
    failed = dict[tuple[str, int], str]()
    for job in jobs:
        if stop():
            break
        why = _carried_out(job, on_news, stop)
        if why is not None:
            failed[job.name, job.seed] = why
        on_news(RunProgress(job, ended=True, failed=why))
    return failed


def _carried_out(job: Job, on_news: OnNews, stop: Callable[[], bool]) -> str | None:
    def on_round(record: RoundRecord) -> None:
        on_news(RunProgress(job, record.round, record.accuracy, record.loss))

    try:
        run(job.plan, job.folder, data=job.data, on_round=on_round, stop=stop)
    except FedpactError as error:
        return str(error)
    except Exception as error:  # one run's fault is not the others'
        traceback.print_exc()
        return f"it ended with {type(error).__name__}: {error}"
    return None


_ELSEWHERE = {
    "seed": "every entry runs with the same seeds: give their number with --seeds",
    "algorithm": "each algorithm has settings of its own: name them with --algorithms",
}


_COMMA = re.compile(r""",(?=(?:[^][{}"']|"[^"]*"|'[^']*'|\[[^]]*\]|\{[^}]*\})*$)""")


def read_sweeps(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return key -> its values of `KEY=V1,V2,...`; a value is read as in `--set`.

    Raises PlanError: no such text, a key twice, a value twice, or a key that is no sweep's.
    """
    found = dict[str, list[Any]]()
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip()
        if not (key and equals and values.strip()):
            raise PlanError(
                f"--sweep {text!r}: expected KEY=V1,V2,..., as in privacy.epsilon=0.5,1,2"
            )
        if key in found:
            raise PlanError(
                f"--sweep {text!r}: {key} is swept already; give all its values at once"
            )
        found[key] = _values(values)
    return found


def expand_sweep(
    plans: Mapping[str, Plan], sweeps: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, Plan], dict[str, SweepPoint]]:
    """Return the plans with each combination of values, and where each entry is in the sweep.

    An algorithm's plan is swept over those of the settings that it knows. Entries are called
    NAME-KEY-VALUE. Raises PlanError: a value that does not fit, a key that no plan has.
    """
    if not isinstance(sweeps, Mapping):
        raise PlanError(f'sweep is {sweeps!r}: expected {{"privacy.epsilon": [0.5, 1, 2]}}')
    if not sweeps:
        return dict(plans), {}
    sweeps = {key: _plain(key, values) for key, values in sweeps.items()}
    for key, values in sweeps.items():
        if key in _ELSEWHERE:
            raise PlanError(f"sweep {key}: {_ELSEWHERE[key]}")
        texts = [json.dumps(value) for value in values]
        if not texts or len(set(texts)) < len(texts):
            raise PlanError(f"sweep {key}: its values are {list(values)}: expected some, each once")
        if not any(_knows(plan, key) for plan in plans.values()):
            raise PlanError(f"sweep {key}: {_no_setting(plans.values())}")
    entries, points = dict[str, Plan](), dict[str, SweepPoint]()
    for name, plan in plans.items():
        own = [key for key in sweeps if _knows(plan, key)]
        for values in product(*(sweeps[key] for key in own)):
            chosen = dict(zip(own, values, strict=True))
            entry = _free("-".join([name, *map(_part, chosen.items())]), entries)
            entries[entry], points[entry] = _changed(plan, chosen), SweepPoint(name, chosen)
    return entries, points


def _plain(key: str, values: Any) -> list[Any]:
    """Return a key's values as a plan.json has them: models, losses and metrics by name."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise PlanError(f"sweep {key}: its values are {values!r}: expected a list, as [{values!r}]")
    name = name_of_function if key.startswith("task.") else name_object
    found = [value.item() if hasattr(value, "item") else name(value) for value in values]
    try:
        return json.loads(json.dumps(found, default=_at))
    except TypeError as error:
        raise PlanError(
            f"sweep {key}: its values are {found!r}: expected what a plan has under it ({error})"
        ) from None


def _at(value: object) -> str:
    if not isinstance(value, PathLike):
        raise TypeError(f"{type(value).__name__} is nothing that a file can hold")
    return fspath(value)


def _no_setting(plans: Iterable[Plan]) -> str:
    names = list(dict.fromkeys(plan.algorithm for plan in plans))
    known = sorted(
        {field for name in names for field in algorithms.load(name).Settings.model_fields}
    )
    return f"it is no setting of {' or '.join(names)}: expected one of {', '.join(known)}"


def _values(text: str) -> list[Any]:
    try:
        return tomllib.loads(f"values = [{text}]")["values"]
    except tomllib.TOMLDecodeError:
        # Words without quotes, maybe beside lists and tables, whose commas are their own.
        return [value_of(part.strip()) for part in _COMMA.split(text)]


def _knows(plan: Plan, key: str) -> bool:
    if not key.startswith("settings."):
        return True
    return key.removeprefix("settings.") in algorithms.load(plan.algorithm).Settings.model_fields


def _changed(plan: Plan, chosen: Mapping[str, Any]) -> Plan:
    # What follows from other keys follows them where they change: only what was given is kept. What
    # one value of the sweep leaves without effect another one uses.
    raw = select_given(plan.document(), lambda found: Plan.parse(found).document())
    keys = [key_of(key) for key in chosen]
    drop_overridden(raw, keys)
    for key, value in chosen.items():
        set_key(raw, key, value, f"sweep {key}")
    try:
        return Plan.parse(raw, typed=keys)
    except PlanError as error:
        told = ", ".join(f"{key}={value}" for key, value in flatten(chosen).items())
        raise PlanError(f"sweep {told}: {error}") from None


def _part(chosen: tuple[str, Any]) -> str:
    key, value = chosen
    text = f"{key.rpartition('.')[2]}-{value}"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-") or "value"


def _free(name: str, taken: Mapping[str, Plan]) -> str:
    numbered = (f"{name}-{i}" if i > 1 else name for i in range(1, len(taken) + 2))
    return next(each for each in numbered if each not in taken)
