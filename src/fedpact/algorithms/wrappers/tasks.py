"""The tasks of a round, and how many more rounds the budgets allow.

If τ depends on the budgets, the state at the start of a round also holds what is left of them:

left/rounds         rounds that plan.rounds and the budget of bytes still allow
left/seconds        what is left of the budget of seconds, inf without one
left/round_seconds  measured seconds of a round without its steps; left/step_seconds: of a step
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedpact.algorithms.common.limits import Limits
from fedpact.algorithms.wrappers.base import Method
from fedpact.algorithms.wrappers.compression import START, DeltaTask, expand_task
from fedpact.common.messages import State, Task
from fedpact.common.randomness.seeded import Participants
from fedpact.common.run_folder import Checkpoint

DIGITS = 256  # bytes by which a message may exceed earlier ones, as numbers have more digits


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
        # Sites that get the same content share one Task, which is then encoded and hashed once.
        distinct = dict[int, Task]()
        for last in set(included.values()):
            told_by = self.run, number, self.method.name, told.vectors, told.numbers, last
            # Sites of the last round have its model; before the first round, every site has the
            # plan's initial state.
            if short is not None and (last == at.round or at.round == 0):
                distinct[last] = DeltaTask(*told_by, changes=short)
            else:
                distinct[last] = Task(*told_by)
        return {site: distinct[last] for site, last in included.items()}

    def _rounds_left(self, at: Checkpoint) -> float:
        """Return how many more rounds the budget of bytes allows."""
        allowed = self.budget.bytes
        if allowed is None:
            return math.inf
        tasks = self.of(at, at.state, at.round + 1).values()
        spare = 2.0 * len(self.participants.sites) * DIGITS + self.other_bytes(at)
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
