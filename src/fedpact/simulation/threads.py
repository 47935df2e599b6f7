"""Sites served by worker threads of this process.

Each worker has a model and a kernel, and trains one site at a time. Replies are yielded in the
order of site names, so results do not depend on the number of workers. Only a few replies are
buffered, so memory does not grow with the number of sites.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Self

import torch

from fedpact.algorithms.wrappers.released_scales import ColumnRecords, find_examined
from fedpact.client import Client
from fedpact.common.messages import Refusal, Reply, State, Task, Vectors
from fedpact.common.params import init_worker_thread
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.evaluation.held_out import HeldOut, SumsForm, charge_of
from fedpact.per_sample.kernel import PlainKernel
from fedpact.plan import Plan
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.oracle import Charge, Oracle, PlainOracle, PrivateOracle, Records
from fedpact.privacy.policy import Policy
from fedpact.privacy.terms import Terms
from fedpact.simulation.workshop import Worker


class InProcess:
    """A transport with `workers` threads. worker: creates what a thread computes with."""

    traffic = None

    def __init__(
        self, clients: Mapping[str, Client[Worker]], workers: int, worker: Callable[[], Worker]
    ) -> None:
        self._clients = dict(sorted(clients.items()))
        self._workers = workers
        self._free: SimpleQueue[Worker] = SimpleQueue()
        for _ in range(workers):
            self._free.put(worker())
        # torch counts intra-op threads per thread, so each worker sets its own.
        self._pool = ThreadPoolExecutor(workers, "site", init_worker_thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(self._clients)

    def exchange(self, tasks: dict[str, Task]) -> Iterator[Reply | Refusal]:
        waiting = deque[Future[Reply | Refusal]]()
        for name, task in sorted(tasks.items()):
            if len(waiting) >= 4 * self._workers:
                yield waiting.popleft().result()
            waiting.append(self._pool.submit(self._serve, name, task))
        while waiting:
            yield waiting.popleft().result()

    def _serve(self, name: str, task: Task) -> Reply | Refusal:
        worker = self._free.get()
        try:
            return self._clients[name].handle(task, worker)
        finally:
            self._free.put(worker)


@dataclass(frozen=True, eq=False)
class VirtualSite:
    """A site of a simulation; it can be pickled.

    memory, ledger: paths of files. terms, ledger: None in a plain run.
    held: the held-out records, of which it releases `form`; None if it releases nothing.
    split: identifies the split in the ledger.
    """

    name: str
    plan: Plan
    run: str
    records: Records
    memory: Path
    terms: Terms | None = None
    ledger: Path | None = None
    policy: Policy | None = None
    held: HeldOut | None = None
    form: SumsForm | None = None
    split: str = ""

    @property
    def size(self) -> float:
        """N_i, as declared or released."""
        return self.terms.size if self.terms else float(self.records.count)

    @property
    def batch_size(self) -> float:
        """The largest expected size of a batch."""
        opening = self.plan.method.facts.opening
        rate = self.plan.rate(self.name, self.size)
        return self.size * max(rate, opening.rate if opening else 0.0)

    def open_ledger(self) -> Ledger | None:
        """Open the site's ledger; None in a plain run. Raises what Ledger raises."""
        return None if self.ledger is None else Ledger(self.ledger, self.name, hypothetical=True)

    def client(self, ledger: Ledger | None) -> Client[Worker]:
        """Return the site's client. ledger: open, with the run reserved."""
        plan, terms, device = self.plan, self.terms, torch.device(self.plan.run.device)
        scaled = ColumnRecords(self.records.to(device))
        size, private = self.size, plan.private

        def oracle(task: Task, memory: State, bench: Worker) -> Oracle:
            draws, records = SeededDraws(*plan.seeds(self.name, task.round)), scaled(task)
            if terms is None or ledger is None:
                opening = plan.method.facts.opening
                rates = plan.rate(self.name, size), opening.rate if opening else 1.0
                return PlainOracle(records, bench.plain, rates[0], size, draws, rates[1])
            charge = Charge(ledger, self.run, task.round, task.digest + memory.digest)
            exact = None if private else PlainKernel(bench.private.model, bench.private.loss)
            left = partial(charge.steps_left, terms)
            own = terms.at(task.round)
            # A simulation protects nobody, so placement needs no check of this machine.
            return PrivateOracle(
                records, bench.private, own, draws, charge, left, exact, placement="compact"
            )

        return Client(
            self.name,
            size,
            plan.method,
            oracle,
            ledger,
            self.memory,
            self.policy,
            device,
            self._examine(ledger),
        )

    def _examine(self, ledger: Ledger | None) -> Callable[[Task, State, Worker], Vectors] | None:
        """Return what answers questions about held-out records; None if there are none."""
        held, form, once = self.held, self.form, self.form and self.form.once
        if ledger is None or held is None or form is None or once is None:
            return None
        device = torch.device(self.plan.run.device)
        held = replace(held, x=held.x.to(device), y=held.y.to(device))

        def examine(task: Task, memory: State, bench: Worker) -> Vectors:
            draws = SeededDraws(*self.plan.seeds(self.name, task.round))
            w, by = find_examined(self.plan.method, task, memory)
            sums = partial(held.totals, form, bench.private, w, by)
            return once.release(charge_of(ledger, task), sums, draws)

        return examine
