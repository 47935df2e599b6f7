"""The in-process transport: sites trained by worker threads, each with one intra-op thread.

A worker has a model and a kernel of its own and trains one site at a time. Replies are yielded in
the order of site names, and at most a few wait for their turn, so memory does not grow with the
number of sites and results do not depend on the number of workers.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Self

import torch

from fedpact.client import Client
from fedpact.messages import Refusal, Reply, Task
from fedpact.privacy.batch_clipped import BatchClippedKernel
from fedpact.privacy.kernel import PerSampleKernel, PlainKernel


@dataclass(frozen=True)
class Bench:
    """What a worker computes with: a kernel over a model of its own, of the kind the run needs."""

    kernel: PerSampleKernel | BatchClippedKernel | PlainKernel

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


class InProcess:
    """See round.Transport. `workers` threads; `bench` makes what each of them computes with."""

    def __init__(
        self, clients: Mapping[str, Client[Bench]], workers: int, bench: Callable[[], Bench]
    ) -> None:
        self._clients = dict(sorted(clients.items()))
        self._workers = workers
        self._benches: SimpleQueue[Bench] = SimpleQueue()
        for _ in range(workers):
            self._benches.put(bench())
        # torch counts intra-op threads per thread, so each worker sets its own.
        self._pool = ThreadPoolExecutor(workers, "site", lambda: torch.set_num_threads(1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @property
    def sites(self) -> tuple[str, ...]:
        """See Transport."""
        return tuple(self._clients)

    def exchange(self, tasks: dict[str, Task]) -> Iterator[Reply | Refusal]:
        """See Transport."""
        waiting = deque[Future[Reply | Refusal]]()
        for name, client in self._clients.items():
            if len(waiting) >= 2 * self._workers:
                yield waiting.popleft().result()
            waiting.append(self._pool.submit(self._handle, client, tasks[name]))
        while waiting:
            yield waiting.popleft().result()

    def _handle(self, client: Client[Bench], task: Task) -> Reply | Refusal:
        bench = self._benches.get()
        try:
            return client.handle(task, bench)
        finally:
            self._benches.put(bench)
