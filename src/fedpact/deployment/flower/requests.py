"""Pending requests to sites, and sites that are slow to answer."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fedpact.algorithms.wrappers.compression import DeltaTask, expand_task
from fedpact.common.messages import Message as Answer
from fedpact.common.messages import Refusal, Reply, Step, Task

_log = logging.getLogger("fedpact.server")


class Clock:
    """Counts the seconds spent in Flower or asleep."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += time.perf_counter() - self._began


@dataclass
class PendingRequests:
    """One round, or one step of it, in progress.

    check: returns the fault of a site's answer, in a word, None if there is none; not used for
    refusals. least: the number of answers below which absent sites are waited for. answers: the
    settled ones. asked, first: when each site was asked last and first. took: seconds to its
    answer.
    """

    tasks: Mapping[str, Task | Step]
    check: Callable[[str, Answer], str | None]
    least: int
    answers: dict[str, Reply | Step | Refusal] = field(
        default_factory=dict[str, Reply | Step | Refusal]
    )
    asked: dict[str, float] = field(default_factory=dict[str, float])
    sent: dict[str, str] = field(default_factory=dict[str, str])
    first: dict[str, float] = field(default_factory=dict[str, float])
    took: dict[str, float] = field(default_factory=dict[str, float])

    def waits(self) -> dict[str, dict[str, Any]]:
        """Return the seconds of each site that was asked, answered or awaited."""
        now = time.monotonic()
        for site in self.answers:
            if site in self.first:
                self.took.setdefault(site, now - self.first[site])
        return {
            site: {"seconds": self.took.get(site, now - began), "waiting": site not in self.took}
            for site, began in sorted(self.first.items())
        }

    def tell_in_full(self, site: str) -> bool:
        """Ask a site again with its complete task; return false if it already had that."""
        task = self.tasks[site]
        if not isinstance(task, DeltaTask):
            return False
        self.tasks = {**self.tasks, site: expand_task(task)}
        self.asked.pop(site, None)
        return True

    def refuse(self, site: str, code: str) -> None:
        """Settle a site's answer by a refusal in its place."""
        task = self.tasks[site]
        self.answers[site] = Refusal(task.run, task.round, site, code)

    @property
    def open(self) -> list[str]:
        """The sites whose answers are not settled."""
        return [site for site in self.tasks if site not in self.answers]

    @property
    def outcome(self) -> str:
        """The outcome of each site, in words."""
        return ", ".join(
            f"{site} {answer.code if isinstance(answer, Refusal) else 'replied'}"
            for site, answer in sorted(self.answers.items())
        )

    @property
    def replies(self) -> dict[str, Reply]:
        """Site -> reply, by name."""
        return {s: a for s, a in sorted(self.answers.items()) if isinstance(a, Reply)}

    @property
    def refusals(self) -> dict[str, Refusal]:
        """Site -> refusal, by name."""
        return {s: a for s, a in sorted(self.answers.items()) if isinstance(a, Refusal)}


class Slow:
    """The sites that did not answer in time, and the tasks that they have not answered yet.

    A site with such a task is not asked again before Flower has dropped it, so that one that
    recovers does not spend its budget on rounds that are over. After n consecutive missed rounds it
    is skipped for 2^(n-1) - 1 rounds, until it answers in time: each task is charged, so for R
    missed rounds it pays about log2(R). owed: message number of such a task -> its site.
    """

    def __init__(self) -> None:
        self._until = dict[str, float]()
        self.owed = dict[str, str]()
        # Site -> (number of consecutive missed rounds, the last of them); site -> next round.
        self._missed = dict[str, tuple[int, int]]()
        self._next = dict[str, int]()

    def __contains__(self, site: str) -> bool:
        return site in self._until

    def add(self, site: str, this: PendingRequests, seconds: float) -> None:
        """Record that a site did not answer in time. seconds: how long Flower keeps its task."""
        times, last = self._missed.get(site, (0, -1))
        number = this.tasks[site].round
        if number != last:
            times += 1
            self._missed[site] = times, number
            if times > 1:
                self._next[site] = number + 2 ** (times - 1)
            again = "" if times == 1 else f", nor asked before round {self._next[site]}"
            _log.warning(
                "site %s: no answer in time: not waited for until it answers%s", site, again
            )
        self._until[site] = this.asked[site] + seconds
        self.owed |= {number: site for number, other in this.sent.items() if other == site}

    def may_be_asked(self, site: str, number: int) -> bool:
        """Whether the site may be asked in this round: Flower has dropped its earlier task."""
        dropped = time.monotonic() >= self._until.get(site, 0.0)
        return dropped and number >= self._next.get(site, 0)

    def is_waited_for(self, site: str, number: int) -> bool:
        """Whether a round waits for the site, if it is connected."""
        return site not in self and number >= self._next.get(site, 0)

    def settle(self, number: str | None, answered: bool) -> str | None:
        """Record the end of a task; return its site. A site that has answered is no longer slow.

        answered: by the site; otherwise Flower has dropped the task.
        """
        site = self.owed.pop(number or "", None)
        if site is not None and answered:
            _log.info("site %s answers again", site)
            self._forget(site)
        return site

    def in_time(self, site: str) -> None:
        """Record that the site has answered in the current round."""
        self._missed.pop(site, None)
        self._next.pop(site, None)

    def begin_anew(self, site: str) -> None:
        """Record that the site restarted: it does not know earlier tasks, and is asked now."""
        self._forget(site)
        self._next.pop(site, None)

    def recall(self) -> None:
        """Ask all of them again, as there are too few others."""
        self._next.clear()

    def _forget(self, site: str) -> None:
        self._until.pop(site, None)
        self.owed = {number: other for number, other in self.owed.items() if other != site}


_ADVICE: Final = {
    ("stale",): "by their word a later round than this one was answered: if server/run was put "
    "back to an older state, put the newer one back; without it, begin a new run",
    ("ledger", "rejected: ledger"): "another ledger than this server has seen. Find out with their "
    "owners whether a ledger was put back or a site runs twice "
    "(docs/how-to/operate-a-deployment.md); for a new ledger of other records, stop the server, "
    "remove the site from server/ledgers.json, and let its owner remove ledger.jsonl.seen beside "
    "the new ledger",
    ("terms",): "by their word their plan.json or federation.toml says something else than this "
    "server's: compare both files, hand the same out to every party, and start it again; where a "
    "site has promised another ε under this run's name, give the run a new one",
}


def advice(this: PendingRequests) -> str:
    """Return advice for a round with too few replies.

    Claims of sites are attributed to them, as they may be false.
    """
    told = list[str]()
    for codes, words in _ADVICE.items():
        if sites := [site for site, refusal in this.refusals.items() if refusal.code in codes]:
            told.append(f"{', '.join(sites)}: {words}")
    told.append(
        "What was sent is not lost: sites keep their replies; resume the run when they can be "
        "reached"
    )
    return ". ".join(told)
