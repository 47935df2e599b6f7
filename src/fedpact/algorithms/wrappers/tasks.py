"""The tasks of a round and of an evaluation, and how many more rounds the budgets allow.

If τ depends on the budgets, the state at the start of a round also holds what is left of them:

left/rounds         rounds that plan.rounds and the budget of bytes still allow
left/seconds        what is left of the budget of seconds, inf without one
left/round_seconds  measured seconds of a round without its steps; left/step_seconds: of a step
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fedpact.algorithms.wrappers.base import Method
from fedpact.algorithms.wrappers.compression import START, DeltaTask, expand_task
from fedpact.algorithms.wrappers.released_scales import CONSTANTS
from fedpact.algorithms.wrappers.robust import Tally
from fedpact.common.errors import FedpactError
from fedpact.common.messages import EVALUATION, RoundRecord, State, Task, Transport
from fedpact.common.randomness.seeded import Participants
from fedpact.common.run_folder import Checkpoint
from fedpact.common.run_settings import Limits

_DIGITS = 256  # bytes by which a message may exceed earlier ones, as numbers have more digits
_log = logging.getLogger("fedpact.server")


def _latest_tasks(included: Mapping[str, int], task: Callable[[int], Task]) -> dict[str, Task]:
    """Return each site's task, by the last round that it was included in.

    Sites that get the same content share one Task, which is then encoded and hashed once.
    """
    distinct = {last: task(last) for last in set(included.values())}
    return {site: distinct[last] for site, last in included.items()}


@dataclass(frozen=True)
class RoundTasks:
    """Creates a run's tasks. run: its name. rounds: T. budget: of bytes and seconds.

    other_bytes: the most bytes that a round takes in addition to tasks and replies.
    """

    run: str
    method: Method
    participants: Participants
    rounds: int
    budget: Limits
    other_bytes: Callable[[Checkpoint], int]

    def ending(self, at: Checkpoint) -> str:
        """Return which budget allows no further round (bytes, iterations, seconds), or ""."""
        seconds = self.budget.seconds
        if self._rounds_left(at) < 1:
            return "bytes"
        if self.method.facts.controlled and self.method.steps(self.begin(at)) < 1:
            return "iterations"
        return "seconds" if seconds is not None and at.costs.seconds >= seconds else ""

    def begin(self, at: Checkpoint) -> State:
        """Return the state, with what is left of the budgets if τ depends on it."""
        if not self.method.facts.controlled:
            return at.state
        per_round, per_step = at.costs.split_seconds()
        allowed = self.budget.seconds
        left = {
            "left/rounds": min(self.rounds - at.round, self._rounds_left(at)),
            "left/seconds": math.inf if allowed is None else allowed - at.costs.seconds,
            "left/round_seconds": per_round,
            "left/step_seconds": per_step,
        }
        return State(at.state.vectors, {**at.state.numbers, **left})

    def of(self, at: Checkpoint, state: State, number: int) -> dict[str, Task]:
        """Return the task of each site that takes part in a round, in full or as changes."""
        told, short = self.method.task(state), self.method.short(state)
        if short is not None and START in short and at.round:
            # No site has the model of the last round yet.
            short = None
        included = {site: at.included.get(site, -1) for site in self.participants.of(number)}

        def task(last: int) -> Task:
            content = self.run, number, self.method.name, told.vectors, told.numbers, last
            # Sites of the last round have its model; before the first round, every site has the
            # plan's initial state.
            if short is not None and (last == at.round or at.round == 0):
                return DeltaTask(*content, changes=short)
            return Task(*content)

        return _latest_tasks(included, task)

    def _rounds_left(self, at: Checkpoint) -> float:
        """Return how many more rounds the budget of bytes allows."""
        allowed = self.budget.bytes
        if allowed is None:
            return math.inf
        tasks = self.of(at, at.state, at.round + 1).values()
        spare = 2.0 * len(self.participants.sites) * _DIGITS + self.other_bytes(at)
        if not at.round:
            # A reply is assumed to be as long as a full task, or half as long if it is compressed:
            # mostly noise takes some 4 bits a coordinate, so 16 leave room for the rest.
            expected = sum(task.wire_bytes + expand_task(task).wire_bytes for task in tasks)
            if self.method.facts.coded:
                numbers = sum(v.nbytes for task in tasks for v in task.vectors.values())
                expected -= numbers // 2
        else:
            short = [task for task in tasks if isinstance(task, DeltaTask)]
            # The first task was nearly empty: count it as long as the next one.
            expected = (at.costs.sent + sum(task.wire_bytes for task in short)) / at.round
            if short:
                # Compressed blocks vary, and a returning site gets the model, unlike on average.
                spare += expected / 4
                spare += sum(t.wire_bytes for t in tasks if not isinstance(t, DeltaTask))
        return max(0.0, (allowed - spare - at.costs.sent) // expected)


@dataclass(frozen=True)
class HeldOutQuestions:
    """Evaluation between rounds: all sites are asked for noisy sums over held-out records.

    Each request is an EVALUATION task with the new model. The answers go into the round's record
    and never into the state.

    sums: how many numbers a site releases at a time; 0: never any. strict: whether a failing
    exchange ends the run; otherwise the round is recorded without an evaluation.
    """

    run: str
    method: Method
    transport: Transport
    sums: int
    strict: bool

    def ask(self, at: Checkpoint, record: RoundRecord) -> RoundRecord:
        """Return a round's record with what sites released about its model, and the bytes."""
        if not self.sums:
            return record
        tasks, tally = self._tasks(at), Tally()
        evaluation = dict[str, dict[str, list[float]]]()
        try:
            for reply in tally.through(self.transport.exchange(tasks)):
                evaluation[reply.site] = {c: v.tolist() for c, v in reply.vectors.items()}
        except FedpactError as error:
            if self.strict:
                raise
            # Training is kept, and a restarted server asks again.
            _log.warning("round %d was not evaluated: %s", at.round, error)
        missing = {site: "absent" for site in tasks if site not in evaluation} | tally.refused
        if not evaluation:
            said = ", ".join(f"{site} {code}" for site, code in sorted(missing.items()))
            _log.warning("round %d was not evaluated: %s", at.round, said)
        return replace(
            record,
            evaluation=evaluation,
            unevaluated=missing,
            bytes_down=record.bytes_down + sum(task.wire_bytes for task in tasks.values()),
            bytes_up=record.bytes_up + tally.bytes,
        )

    def most_bytes(self, at: Checkpoint) -> int:
        """Return the most bytes that `ask` takes."""
        if not self.sums:
            return 0
        task = next(iter(self._tasks(replace(at, round=at.round + 1, included={})).values()))
        return len(self.transport.sites) * (task.wire_bytes + 8 * self.sums + 8 * _DIGITS)

    def _tasks(self, at: Checkpoint) -> dict[str, Task]:
        vectors = {n: at.state.vectors[n] for n in ("w", CONSTANTS) if n in at.state.vectors}
        # If sites have their own models, the task says which reply the site's model belongs to.
        own, sites = self.method.has_own_models, self.transport.sites
        last = {site: at.included.get(site, -1) if own else -1 for site in sites}
        return _latest_tasks(last, lambda of: Task(self.run, at.round, EVALUATION, vectors, {}, of))
