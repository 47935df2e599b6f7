"""The server's loop over rounds. Read this file first.

A round: the algorithm says what every site is told (`task`); the transport carries it to the sites
and brings back their replies; the algorithm folds the replies into the next state (`update`); the
state is evaluated, recorded and committed. Nothing feeds back but through the state, so a run goes
on from (plan, state, site directories, round).
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from fedpact import algorithms
from fedpact.folder import Checkpoint
from fedpact.messages import Refusal, Reply, RoundRecord, Task, to_bytes
from fedpact.plan import Plan


class Transport(Protocol):
    """How tasks reach the sites: threads in this process, or a network."""

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of the sites, sorted."""
        ...

    def exchange(self, tasks: dict[str, Task]) -> Iterator[Reply | Refusal]:
        """Send each site its task; yield the answers in the order of site names as they come."""
        ...


Evaluate = Callable[[Checkpoint, RoundRecord], RoundRecord]
"""Fills in what is measured of a state: accuracy, Ψ, ε."""


@dataclass
class Rounds:
    """The loop, from a checkpoint on. `status` says why it ended.

    stop: asked between rounds; true ends the run after the round that is committed last.
    """

    plan: Plan
    run: str
    transport: Transport
    evaluate: Evaluate
    stop: Callable[[], bool] = lambda: False
    status: str = "running"

    def __call__(self, at: Checkpoint) -> Iterator[tuple[Checkpoint, RoundRecord]]:
        """Yield every committed round's checkpoint and record until the run ends."""
        limits = self.plan.budget
        while self.status == "running":
            if at.round >= self.plan.rounds:
                self.status = "finished"
            elif self.stop():
                self.status = "stopped"
            elif self._next_would_exceed_bytes(at):
                self.status = "bytes"
            else:
                outcome = self._round(at)
                if outcome is None:
                    self.status = "budget"
                elif not _finite(outcome[0]):
                    # The last finite model stays the run's; what was sent for it is spent.
                    self.status = "diverged"
                else:
                    at, record = outcome
                    if "budget" in record.refused.values() and limits.when_spent == "stop":
                        self.status = "budget"
                    yield outcome

    def _round(self, at: Checkpoint) -> tuple[Checkpoint, RoundRecord] | None:
        """Carry out one round; None where every site refused."""
        started = time.perf_counter()
        algorithm, settings = algorithms.load(self.plan.algorithm), self.plan.algorithm_settings
        tasks = self._tasks(at)
        tally = _Tally()
        replies = tally.through(self.transport.exchange(tasks))
        first = next(replies, None)
        if first is None:
            return None
        state = algorithm.update(at.state, _put_back(first, replies), settings)
        down = sum(task.wire_bytes for task in tasks.values())
        number = at.round + 1
        after = Checkpoint(
            state,
            number,
            {**at.included, **dict.fromkeys(tally.replied, number)},
            at.sent + down + tally.bytes,
        )
        record = RoundRecord(
            round=number,
            steps=algorithm.steps(settings),
            bytes_down=down,
            bytes_up=tally.bytes,
            refused=tally.refused,
            numbers=state.numbers,
        )
        record = self.evaluate(after, record)
        return after, replace(record, seconds=time.perf_counter() - started)

    def _tasks(self, at: Checkpoint) -> dict[str, Task]:
        told = algorithms.load(self.plan.algorithm).task(at.state, self.plan.algorithm_settings)
        included = {site: at.included.get(site, -1) for site in self.transport.sites}
        # Sites that are told the same share one Task, which is then encoded and hashed once.
        distinct = {
            last: Task(
                run=self.run,
                round=at.round + 1,
                algorithm=self.plan.algorithm,
                vectors=told.vectors,
                numbers=told.numbers,
                included=last,
            )
            for last in set(included.values())
        }
        return {site: distinct[last] for site, last in included.items()}

    def _next_would_exceed_bytes(self, at: Checkpoint) -> bool:
        allowed = self.plan.budget.bytes
        if allowed is None:
            return False
        # Messages of one run differ in length by a few digits only. Before the first round a reply
        # is taken to be as long as its task.
        tasks = self._tasks(at).values() if at.round == 0 else ()
        expected = at.sent / at.round if at.round else 2 * sum(task.wire_bytes for task in tasks)
        return at.sent + expected > allowed


def _finite(at: Checkpoint) -> bool:
    return all(bool(vector.isfinite().all()) for vector in at.state.vectors.values())


class _Tally:
    """Counts answers on their way to `update`, and takes out the refusals."""

    def __init__(self) -> None:
        self.bytes = 0
        self.replied: list[str] = []
        self.refused: dict[str, str] = {}

    def through(self, answers: Iterator[Reply | Refusal]) -> Iterator[Reply]:
        for answer in answers:
            self.bytes += len(to_bytes(answer))
            if isinstance(answer, Refusal):
                self.refused[answer.site] = answer.code
            else:
                self.replied.append(answer.site)
                yield answer


def _put_back(first: Reply, rest: Iterator[Reply]) -> Iterator[Reply]:
    yield first
    yield from rest
