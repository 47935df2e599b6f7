"""The server's loop over rounds. Read this file first.

In each round the algorithm creates a task (`task`), the transport sends it to the participating
sites (all, or those sampled for the round) and returns their replies, and the algorithm combines
the replies into the next state (`update`). The state is then evaluated, recorded and committed.
The state is all that one round passes to the next, so a run can resume from (plan, state, site
directories, round). Tasks are created and counted in algorithms.wrappers.tasks.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from fedpact.algorithms.wrappers.robust import Tally, fold_replies
from fedpact.algorithms.wrappers.tasks import HeldOutQuestions, RoundTasks
from fedpact.common.errors import FedpactError
from fedpact.common.messages import RoundRecord, State, Task, Transport
from fedpact.common.params import all_finite
from fedpact.common.run_folder import Checkpoint
from fedpact.evaluation.held_out import SumsForm
from fedpact.evaluation.intervals import Early
from fedpact.plan import Plan

_log = logging.getLogger("fedpact.server")


Evaluate = Callable[[Checkpoint, RoundRecord], RoundRecord]
"""Adds what is measured of a state to its record: accuracy, Ψ, ε."""


@dataclass
class Rounds:
    """The loop, starting from a checkpoint. `status` says why it ended.

    stop: called between rounds; true ends the run after the last committed round.
    in_process: whether the sites run in this process, as in a simulation. Replies from other
    processes are collected until the round is over, and one that makes the update fail is rejected.
    In-process replies are folded in as they come; if they are not finite, the run diverges.
    form: what sites are asked about their held-out records, and when; None: nothing.
    """

    plan: Plan
    run: str
    transport: Transport
    evaluate: Evaluate
    stop: Callable[[], bool] = lambda: False
    in_process: bool = False
    form: SumsForm | None = None
    status: str = "running"
    _spent: bool = field(default=False, init=False)

    def __call__(self, at: Checkpoint) -> Iterator[tuple[Checkpoint, RoundRecord]]:
        """Yield every committed round's checkpoint and record until the run ends."""
        while self.status == "running":
            if self._spent:
                self.status = "budget"
            elif at.round >= self.plan.rounds:
                self.status = "finished"
            elif self.stop():
                self.status = "stopped"
            elif ending := self._early.status or self._tasks.ending(at):
                self.status = ending
            elif (outcome := self._round(at)) is None:
                self.status = "budget"
            elif not _finite(outcome[0].state):
                # The run keeps its last finite model. The budget of this round is spent.
                self.status = "diverged"
            else:
                at, record = outcome
                self.see([record])
                yield outcome

    def see(self, records: Sequence[RoundRecord]) -> None:
        """Pass on rounds, which may end the run; those of earlier sessions come first."""
        self._early.see(records)
        stops = self.plan.budget.when_spent == "stop"
        self._spent |= stops and any("budget" in record.refused.values() for record in records)

    def open_run(self, at: Checkpoint, record: RoundRecord) -> tuple[Checkpoint, RoundRecord]:
        """Carry out round 0, in which sites release column scales, if the algorithm has one.

        Returns its arguments otherwise. Nothing is trained or committed: if the process ends before
        the start is written, round 0 is repeated. Raises FedpactError: no site replied.
        """
        if not self.plan.method.facts.opens_run:
            return at, record
        tasks, tally = self._tasks.of(at, self._tasks.begin(at), 0), Tally()
        state = self._fold(at.state, tasks, tally)
        if state is None:
            refused = ", ".join(f"{site} {code}" for site, code in tally.refused.items())
            raise FedpactError(
                f"round 0, in which sites release the scales of their columns: no site replied "
                f"({refused or 'none was asked'}); resolve what they refuse, and start again"
            )
        down, up = self._bytes_sent(tasks, tally)
        costs = replace(at.costs, sent=at.costs.sent + down + up)
        after = Checkpoint(state, 0, dict.fromkeys(tally.replied, 0), costs)
        return after, replace(record, bytes_down=down, bytes_up=up, refused=tally.refused)

    def finish(self, at: Checkpoint, record: RoundRecord) -> RoundRecord:
        """Return the last record, evaluated if the run is over and its model was not yet."""
        if self.status == "stopped" or not at.round or record.evaluation:
            return record
        return self._questions.ask(at, record)

    def _round(self, at: Checkpoint) -> tuple[Checkpoint, RoundRecord] | None:
        """Carry out one round; None if every site refused."""
        started, number, begin = time.perf_counter(), at.round + 1, self._tasks.begin(at)
        tasks, steps = self._tasks.of(at, begin, number), self.plan.method.steps(begin)

        def timed(up: Mapping[str, int], replied: Collection[str]) -> tuple[float, frozenset[str]]:
            sent = {site: (task.wire_bytes, up.get(site, 0)) for site, task in tasks.items()}
            sites = self.transport.sites
            return self.plan.clock.round(self.plan.seed, number, steps, sites, sent, replied)

        deadline = self.plan.clock.deadline
        tally = Tally(None if deadline is None else lambda *answers: timed(*answers)[1])
        state = self._fold(begin, tasks, tally)
        if state is None:
            return None
        down, up = self._bytes_sent(tasks, tally)
        record = RoundRecord(
            round=number,
            steps=steps,
            bytes_down=down,
            bytes_up=up,
            asked=[*tasks] if self._tasks.participants.partial else [],
            refused=tally.refused,
            simulated_seconds=timed(tally.lengths, tally.answered)[0]
            if self.plan.clock.used
            else 0.0,
            numbers=state.numbers,
        )
        included = {**at.included, **dict.fromkeys(tally.replied, number)}
        after = Checkpoint(state, number, included)
        if self.form is not None and self.form.is_due(number) and _finite(state):
            record = self._questions.ask(after, record)
        # Without a budget in seconds, the state must not depend on time.
        counted = self.plan.budget.seconds is not None
        seconds = time.perf_counter() - started if counted else 0.0
        sent = record.bytes_down + record.bytes_up
        after = replace(after, costs=at.costs.after(sent, steps, seconds))
        record = self.evaluate(after, record)
        return after, replace(record, seconds=time.perf_counter() - started)

    def _fold(self, state: State, tasks: dict[str, Task], tally: Tally) -> State | None:
        """Exchange tasks for replies and combine them into the next state; None without replies."""
        replies = tally.through(self.transport.exchange(tasks))
        first = next(replies, None)
        if first is None:
            return None
        if self.in_process:
            return self.plan.method.update(state, chain([first], replies))
        # A reply that makes the update fail counts as a refusal.
        after, blamed = fold_replies(self.plan.method, state, [first, *replies])
        for site, why in blamed.items():
            _log.warning("site %s: reply rejected, because the update fails with it: %s", site, why)
            tally.reject(site)
        return after

    def _bytes_sent(self, tasks: dict[str, Task], tally: Tally) -> tuple[int, int]:
        """Return the bytes that an exchange took, down and up."""
        return self.transport.traffic or (sum(t.wire_bytes for t in tasks.values()), tally.bytes)

    @cached_property
    def _tasks(self) -> RoundTasks:
        plan = self.plan
        who, other = plan.participants(self.transport.sites), self._questions.most_bytes
        return RoundTasks(self.run, plan.method, who, plan.rounds, plan.budget, other)

    @cached_property
    def _questions(self) -> HeldOutQuestions:
        sums = 0 if self.form is None else sum(self.form.lengths.values())
        return HeldOutQuestions(self.run, self.plan.method, self.transport, sums, self.in_process)

    @cached_property
    def _early(self) -> Early:
        return Early(self.plan.budget.accuracy, self.plan.budget.patience, self.form)


def _finite(state: State) -> bool:
    return all(map(all_finite, state.vectors.values()))
