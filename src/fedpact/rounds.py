"""The server's loop over rounds. Read this file first.

A round: the algorithm says what every site is told (`task`); the transport carries it to the sites
that take part (all, or those drawn for the round) and brings back their replies; the algorithm
folds the replies into the next state (`update`); the state is evaluated, recorded and committed.
Nothing feeds back but through the state, so a run goes
on from (plan, state, site directories, round).

Where the plan has [evaluation], sites are asked for noisy sums over records that they hold out, of
the new state, by a question of its own (`asked`). What they answer goes to the record alone.

Where the method lets τ follow the budgets, the state of a round's start also holds what is left:

left/rounds         rounds that plan.rounds and the budget of bytes still allow
left/seconds        what is left of the budget of seconds, inf without one
left/round_seconds  seconds of a round beside its steps, as measured; left/step_seconds: of a step
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Protocol

from fedpact.algorithms.wrappers.compression import START, DeltaTask, expand_task
from fedpact.algorithms.wrappers.released_scales import CONSTANTS
from fedpact.algorithms.wrappers.robust import Tally, fold_replies
from fedpact.common.errors import FedpactError
from fedpact.common.messages import EVALUATION, Refusal, Reply, RoundRecord, State, Task
from fedpact.common.params import all_finite
from fedpact.common.randomness.seeded import Participants
from fedpact.common.run_folder import Checkpoint
from fedpact.evaluation.intervals import Early
from fedpact.plan import Plan

_log = logging.getLogger("fedpact.server")


class Transport(Protocol):
    """How tasks reach the sites: threads in this process, or a network."""

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of the sites, sorted."""
        ...

    def exchange(self, tasks: dict[str, Task]) -> Iterator[Reply | Refusal]:
        """Send each of these sites its task; yield the answers in the order of their names."""
        ...

    @property
    def traffic(self) -> tuple[int, int] | None:
        """Bytes down and up of the last exchange, where tasks and answers are not what was sent."""
        ...


_DIGITS = 256  # bytes by which one message may be longer than those before it: numbers' digits

Evaluate = Callable[[Checkpoint, RoundRecord], RoundRecord]
"""Fills in what is measured of a state: accuracy, Ψ, ε."""


@dataclass
class Rounds:
    """The loop, from a checkpoint on. `status` says why it ended.

    stop: asked between rounds; true ends the run after the round that is committed last.
    own: whether the sites are this process's, as in a simulation. Strangers' replies are held until
    the round is over, and one that brings the update down is rejected; our own need no such care,
    and where they are not finite the run diverges.
    sums: how many numbers a site releases of its held-out records at a time; 0: none, ever.
    early: what has been released of how good the model is, and whether that ends the run.
    """

    plan: Plan
    run: str
    transport: Transport
    evaluate: Evaluate
    stop: Callable[[], bool] = lambda: False
    in_process: bool = False
    sums: int = 0
    status: str = "running"
    early: Early = field(default_factory=Early)

    def __call__(self, at: Checkpoint) -> Iterator[tuple[Checkpoint, RoundRecord]]:
        """Yield every committed round's checkpoint and record until the run ends."""
        limits = self.plan.budget
        while self.status == "running":
            if at.round >= self.plan.rounds:
                self.status = "finished"
            elif self.stop():
                self.status = "stopped"
            elif self.early.status:
                self.status = self.early.status
            elif self._rounds_left(at) < 1:
                self.status = "bytes"
            elif self._used_up(at):
                self.status = "iterations"
            elif limits.seconds is not None and at.costs.seconds >= limits.seconds:
                self.status = "seconds"
            else:
                outcome = self._round(at)
                if outcome is None:
                    self.status = "budget"
                elif not _finite(outcome[0]):
                    # The last finite model stays the run's; what was sent for it is spent.
                    self.status = "diverged"
                else:
                    at, record = outcome
                    self.early.see([record])
                    if "budget" in record.refused.values() and limits.when_spent == "stop":
                        self.status = "budget"
                    yield outcome

    def open_run(self, at: Checkpoint, record: RoundRecord) -> tuple[Checkpoint, RoundRecord]:
        """Return a run's start after round 0, in which sites release what it begins with.

        The same of a run that begins with nothing. Nothing is trained, and nothing committed: what
        ends before the start is written is carried out again. Raises FedpactError: no site replied.
        """
        if not self.plan.method.facts.opens_run:
            return at, record
        tasks = self._tasks(at, self._begin(at), 0)
        tally = Tally()
        replies = tally.through(self.transport.exchange(tasks))
        first = next(replies, None)
        if first is None:
            refused = ", ".join(f"{site} {code}" for site, code in tally.refused.items())
            raise FedpactError(
                f"round 0, in which sites release what scales their columns: no site replied "
                f"({refused or 'none was asked'}); see to what they refuse, and start again"
            )
        state = self._updated(at.state, chain([first], replies), tally)
        down = sum(task.wire_bytes for task in tasks.values())
        down, up = self.transport.traffic or (down, tally.bytes)
        costs = replace(at.costs, sent=at.costs.sent + down + up)
        included = dict.fromkeys(tally.replied, 0)
        after = Checkpoint(state, 0, included, costs)
        return after, replace(record, bytes_down=down, bytes_up=up, refused=tally.refused)

    def _round(self, at: Checkpoint) -> tuple[Checkpoint, RoundRecord] | None:
        """Carry out one round; None where every site refused."""
        started = time.perf_counter()
        began, method, state = self._clock(), self.plan.method, self._begin(at)
        tasks = self._tasks(at, state, at.round + 1)
        tally = Tally()
        replies = tally.through(self.transport.exchange(tasks))
        first = next(replies, None)
        if first is None:
            return None
        steps = method.steps(state)
        state = self._updated(state, chain([first], replies), tally)
        down = sum(task.wire_bytes for task in tasks.values())
        down, up = self.transport.traffic or (down, tally.bytes)
        number = at.round + 1
        included = {**at.included, **dict.fromkeys(tally.replied, number)}
        evaluated = self._evaluated(number, state, included)
        down, up = down + evaluated.bytes_down, up + evaluated.bytes_up
        after = Checkpoint(
            state,
            number,
            included,
            at.costs.after(down + up, steps, self._clock() - began),
        )
        record = RoundRecord(
            round=number,
            steps=steps,
            bytes_down=down,
            bytes_up=up,
            asked=[*tasks] if self._participants.partial else [],
            refused=tally.refused,
            numbers=state.numbers,
            evaluation=evaluated.evaluation,
            unevaluated=evaluated.unevaluated,
        )
        record = self.evaluate(after, record)
        return after, replace(record, seconds=time.perf_counter() - started)

    def finish(self, at: Checkpoint, record: RoundRecord) -> RoundRecord:
        """Return the last round's record with an evaluation, where a run that is over lacks one."""
        if self.status == "stopped" or not at.round or record.evaluation:
            return record
        found = self._asked(at.round, at.state, at.included)
        return replace(
            record,
            evaluation=found.evaluation,
            unevaluated=found.unevaluated,
            bytes_down=record.bytes_down + found.bytes_down,
            bytes_up=record.bytes_up + found.bytes_up,
        )

    def _evaluated(self, number: int, state: State, included: Mapping[str, int]) -> RoundRecord:
        due = self.plan.evaluation.is_due(number, self.plan.rounds)
        if due and all(map(all_finite, state.vectors.values())):
            return self._asked(number, state, included)
        return RoundRecord(number)

    def _asked(self, number: int, state: State, included: Mapping[str, int]) -> RoundRecord:
        """Ask the sites for what they release of their held-out records at a state."""
        if not self.sums:
            return RoundRecord(number)
        tasks, tally = self._questions(number, state, included), Tally()
        evaluation = dict[str, dict[str, list[float]]]()
        try:
            for reply in tally.through(self.transport.exchange(tasks)):
                evaluation[reply.site] = {c: v.tolist() for c, v in reply.vectors.items()}
        except FedpactError as error:
            if self.in_process:
                raise
            # What was trained stays; a server that is started again asks again.
            _log.warning("round %d was not evaluated: %s", number, error)
        missing = {site: "absent" for site in tasks if site not in evaluation} | tally.refused
        if not evaluation:
            said = ", ".join(f"{site} {code}" for site, code in sorted(missing.items()))
            _log.warning("round %d was not evaluated: %s", number, said)
        return RoundRecord(
            number,
            evaluation=evaluation,
            unevaluated=missing,
            bytes_down=sum(task.wire_bytes for task in tasks.values()),
            bytes_up=tally.bytes,
        )

    def _questions(self, number: int, state: State, included: Mapping[str, int]) -> dict[str, Task]:
        """Return what each site is asked of its held-out records.

        Where sites have models of their own, each is told which of its replies that is made of.
        """
        vectors = {name: state.vectors[name] for name in ("w", CONSTANTS) if name in state.vectors}
        own, distinct = self.plan.method.has_own_models, dict[int, Task]()
        last = {s: included.get(s, -1) if own else -1 for s in self.transport.sites}
        for each in set(last.values()):
            distinct[each] = Task(self.run, number, EVALUATION, vectors, {}, each)
        return {site: distinct[each] for site, each in last.items()}

    def _updated(self, state: State, replies: Iterator[Reply], tally: Tally) -> State:
        """Fold the replies; strangers' that bring the update down count as refusals."""
        if self.in_process:
            return self.plan.method.update(state, replies)
        outcome = fold_replies(self.plan.method, state, list(replies))
        for site, why in outcome.blamed.items():
            _log.warning("site %s: its reply is rejected: the update fails by it: %s", site, why)
            tally.reject(site)
        return outcome.state

    def _used_up(self, at: Checkpoint) -> bool:
        """Whether a controlled τ has no local iterations left."""
        method = self.plan.method
        return method.facts.controlled and method.steps(self._begin(at)) < 1

    @cached_property
    def _participants(self) -> Participants:
        return self.plan.participants(self.transport.sites)

    def _clock(self) -> float:
        """Seconds, for a run that has a budget of them; else nothing of time enters the state."""
        return 0.0 if self.plan.budget.seconds is None else time.perf_counter()

    def _begin(self, at: Checkpoint) -> State:
        """Return the state with what is left of the budgets, for a method that asks for it."""
        if not self.plan.method.facts.controlled:
            return at.state
        per_round, per_step = at.costs.split_seconds()
        allowed = self.plan.budget.seconds
        left = {
            "left/rounds": min(self.plan.rounds - at.round, self._rounds_left(at)),
            "left/seconds": math.inf if allowed is None else allowed - at.costs.seconds,
            "left/round_seconds": per_round,
            "left/step_seconds": per_step,
        }
        return State(at.state.vectors, {**at.state.numbers, **left})

    def _tasks(self, at: Checkpoint, state: State, number: int) -> dict[str, Task]:
        method = self.plan.method
        told, short = method.task(state), method.short(state)
        if short is not None and START in short and at.round:
            # Of a run that was begun before changes were told: nobody has its model.
            short = None
        included = {site: at.included.get(site, -1) for site in self._participants.of(number)}
        # Sites that are told the same share one Task, which is then encoded and hashed once.
        distinct = dict[int, Task]()
        for last in set(included.values()):
            told_by = self.run, number, self.plan.algorithm, told.vectors, told.numbers, last
            # Who took part in the last round has what it was told then; before the first one every
            # site has the plan's start.
            if short is not None and (last == at.round or at.round == 0):
                distinct[last] = DeltaTask(*told_by, changes=short)
            else:
                distinct[last] = Task(*told_by)
        return {site: distinct[last] for site, last in included.items()}

    def _rounds_left(self, at: Checkpoint) -> float:
        """Return how many more rounds the budget of bytes allows."""
        allowed = self.plan.budget.bytes
        if allowed is None:
            return math.inf
        tasks = self._tasks(at, at.state, at.round + 1).values()
        spare = 2 * len(self.transport.sites) * _DIGITS + self._evaluation_bytes(at)
        if not at.round:
            # A reply is taken to be as long as its task in full. Its codes have half as many bytes:
            # some 4 bits a coordinate where noise is most of it, so 16 leave room for the rest.
            expected = sum(task.wire_bytes + expand_task(task).wire_bytes for task in tasks)
            if self.plan.method.facts.coded:
                numbers = sum(v.nbytes for task in tasks for v in task.vectors.values())
                expected -= numbers // 2
        else:
            short = [task for task in tasks if isinstance(task, DeltaTask)]
            # The first round told next to nothing: here as much as the next one will.
            expected = (at.costs.sent + sum(task.wire_bytes for task in short)) / at.round
            if short:
                # Blocks of codes vary, and who comes back is told the model, which the mean lacks.
                spare += expected / 4
                spare += sum(t.wire_bytes for t in tasks if not isinstance(t, DeltaTask))
        return max(0.0, (allowed - spare - at.costs.sent) // expected)

    def _evaluation_bytes(self, at: Checkpoint) -> int:
        """Return at most how many bytes an evaluation of the last model takes."""
        if not self.sums:
            return 0
        task = next(iter(self._questions(at.round + 1, at.state, {}).values()))
        return len(self.transport.sites) * (task.wire_bytes + 8 * self.sums + 8 * _DIGITS)


def _finite(at: Checkpoint) -> bool:
    return all(map(all_finite, at.state.vectors.values()))
