"""The in-process transport: sites trained by worker threads, each with one intra-op thread.

A worker has a model and a kernel of its own and trains one site at a time, or several in lockstep
where the plan stacks sites. Replies are yielded in the order of site names, and at most a few wait
for their turn, more of them where they are short, so memory does not grow with the number of sites
and results do not depend on the number of workers.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Final, Protocol, Self

from fedpact.client import Client
from fedpact.draws.seeded import SeededDraws
from fedpact.messages import Refusal, Reply, Task
from fedpact.params import init_worker_thread
from fedpact.persample.kernel import PerSampleKernel, PlainKernel
from fedpact.privacy.batch_clipped import BatchClippedKernel


@dataclass(frozen=True)
class Worker:
    """What a worker computes with: a kernel over a model of its own, of the kind the run needs.

    draws: makes a simulated site's draws from seed, site and round.
    """

    kernel: PerSampleKernel | BatchClippedKernel | PlainKernel
    draws: Callable[[int, str, int], SeededDraws] = SeededDraws

    @property
    def private(self) -> PerSampleKernel | BatchClippedKernel:
        """The clipping kernel of a private run."""
        if isinstance(self.kernel, PlainKernel):
            raise TypeError("a plain run's worker was asked for a private release")
        return self.kernel

    @property
    def plain(self) -> PlainKernel:
        """The kernel of a plain run."""
        if not isinstance(self.kernel, PlainKernel):
            raise TypeError("a private run's worker was asked for exact numbers")
        return self.kernel


_SOME: Final = 8
_BYTES: Final = 2**20
"""Replies that are taken together, at most so many and so long, if they are as long as a task."""

WorkerJob = Callable[[Worker], Reply | Refusal]


class WorkerSlots(Protocol):
    """Where a worker's sites sit."""

    @property
    def size(self) -> int:
        """How many sites a worker trains at a time."""
        ...

    def serve(self, jobs: Sequence[WorkerJob]) -> list[Reply | Refusal]:
        """Carry out at most `size` jobs and return their results in order."""
        ...


@dataclass(frozen=True)
class OneByOne:
    """A table for one site at a time."""

    bench: Worker
    size = 1

    def serve(self, jobs: Sequence[WorkerJob]) -> list[Reply | Refusal]:
        """Carry out at most `size` jobs and return their results in order."""
        return [job(self.bench) for job in jobs]


class InProcess:
    """A transport with `workers` threads; `table` makes what each of them trains sites at."""

    traffic = None

    def __init__(
        self, clients: Mapping[str, Client[Worker]], workers: int, table: Callable[[], WorkerSlots]
    ) -> None:
        self._clients = dict(sorted(clients.items()))
        # How long each took last, in seconds.
        self.took = dict[str, float]()
        self._workers = workers
        tables = [table() for _ in range(workers)]
        self._together = tables[0].size
        self._free: SimpleQueue[WorkerSlots] = SimpleQueue()
        for one in tables:
            self._free.put(one)
        # torch counts intra-op threads per thread, so each worker sets its own.
        self._pool = ThreadPoolExecutor(workers, "site", init_worker_thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of the sites, sorted."""
        return tuple(self._clients)

    def exchange(self, tasks: dict[str, Task]) -> Iterator[Reply | Refusal]:
        """Send each of these sites its task; yield the answers in the order of their names."""
        waiting = deque[Future[list[Reply | Refusal]]]()
        names, size = sorted(tasks), self._together
        longest = max((task.wire_bytes for task in tasks.values()), default=1)
        some = max(1, min(_SOME, _BYTES // longest) // size)
        for start in range(0, len(names), size):
            if len(waiting) >= 2 * some * self._workers:
                yield from _taken(waiting, some)
            jobs = [partial(self._timed, name, tasks[name]) for name in names[start : start + size]]
            waiting.append(self._pool.submit(self._serve, jobs))
        while waiting:
            yield from _taken(waiting, some)

    def _timed(self, name: str, task: Task, bench: Worker) -> Reply | Refusal:
        began = time.perf_counter()
        try:
            return self._clients[name].handle(task, bench)
        finally:
            self.took[name] = time.perf_counter() - began

    def _serve(self, jobs: Sequence[WorkerJob]) -> list[Reply | Refusal]:
        table = self._free.get()
        try:
            return table.serve(jobs)
        finally:
            self._free.put(table)


def _taken(waiting: deque[Future[list[Reply | Refusal]]], some: int) -> Iterator[Reply | Refusal]:
    """Yield the first results when the last of them is there.

    To be woken for each costs a small model's site a tenth of its time, the worker's included.
    """
    first = [waiting.popleft() for _ in range(min(some, len(waiting)))]
    first[-1].exception()
    for future in first:
        yield from future.result()
