"""What the server asks between rounds: noisy sums over records that sites hold out of training.

Each question is a task of its own, EVALUATION, with the new state's model. What sites answer goes
to the round's record alone, and nothing of it back into the state.
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

    sums: how many numbers a site releases at a time; 0: none, ever. strict: whether what goes wrong
    on the way ends the run; else the round is recorded without.
    """

    run: str
    method: Method
    transport: Transport
    sums: int
    strict: bool

    def ask(self, at: Checkpoint, record: RoundRecord) -> RoundRecord:
        """Return a round's record with what sites released of its state, and the bytes of that."""
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
            # What was trained stays; a server that is started again asks again.
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
        """Return at most how many bytes `ask` takes."""
        if not self.sums:
            return 0
        task = next(iter(self._tasks(replace(at, round=at.round + 1, included={})).values()))
        return len(self.transport.sites) * (task.wire_bytes + 8 * self.sums + 8 * DIGITS)

    def _tasks(self, at: Checkpoint) -> dict[str, Task]:
        """Return what each site is asked.

        Where sites have models of their own, each is told which of its replies that is made of.
        """
        vectors = {n: at.state.vectors[n] for n in ("w", CONSTANTS) if n in at.state.vectors}
        own, distinct = self.method.has_own_models, dict[int, Task]()
        last = {site: at.included.get(site, -1) if own else -1 for site in self.transport.sites}
        for each in set(last.values()):
            distinct[each] = Task(self.run, at.round, EVALUATION, vectors, {}, each)
        return {site: distinct[each] for site, each in last.items()}
