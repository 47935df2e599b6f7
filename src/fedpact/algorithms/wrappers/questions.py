"""Evaluation between rounds: the server asks sites for noisy sums over held-out records.

Each request is an EVALUATION task with the new model. The answers go into the round's record and
never into the state.
"""

import logging
from dataclasses import dataclass, replace

from fedpact.algorithms.wrappers.base import Method
from fedpact.algorithms.wrappers.released_scales import CONSTANTS
from fedpact.algorithms.wrappers.robust import Tally
from fedpact.algorithms.wrappers.tasks import DIGITS
from fedpact.common.errors import FedpactError
from fedpact.common.messages import EVALUATION, RoundRecord, Task, Transport
from fedpact.common.run_folder import Checkpoint

_log = logging.getLogger("fedpact.server")


@dataclass(frozen=True)
class HeldOutQuestions:
    """Asks all sites.

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
        return len(self.transport.sites) * (task.wire_bytes + 8 * self.sums + 8 * DIGITS)

    def _tasks(self, at: Checkpoint) -> dict[str, Task]:
        """Return each site's task.

        If sites have their own models, it says which reply the site's model belongs to.
        """
        vectors = {n: at.state.vectors[n] for n in ("w", CONSTANTS) if n in at.state.vectors}
        own, distinct = self.method.has_own_models, dict[int, Task]()
        last = {site: at.included.get(site, -1) if own else -1 for site in self.transport.sites}
        for each in set(last.values()):
            distinct[each] = Task(self.run, at.round, EVALUATION, vectors, {}, each)
        return {site: distinct[each] for site, each in last.items()}
