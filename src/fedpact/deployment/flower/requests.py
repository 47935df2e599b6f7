"""Requests to sites that are under way, and sites that are slow to answer."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedpact.algorithms.wrappers.compression import DeltaTask, expand_task
from fedpact.common.messages import Message as Answer
from fedpact.common.messages import Refusal, Reply, Step, Task

_log = logging.getLogger("fedpact.server")


class Clock:
    """Counts the seconds spent inside Flower, or asleep."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += time.perf_counter() - self._began


@dataclass
class PendingRequests:
    """One round, or one step of it, under way.

    check: what is wrong with a site's answer, in a word, None if nothing is; refusals pass by it.
    least: how many answers are worth waiting for those who are away. answers: what is settled.
    asked: when each site was last asked; first: when it was first. took: seconds to its answer.
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
        """Return of each site that was asked how long it took, or is being waited for."""
        now = time.monotonic()
        for site in self.answers:
            if site in self.first:
                self.took.setdefault(site, now - self.first[site])
        return {
            site: {"seconds": self.took.get(site, now - began), "waiting": site not in self.took}
            for site, began in sorted(self.first.items())
        }

    def tell_in_full(self, site: str) -> bool:
        """Have a site asked anew, by the whole of its task; false where that was what it had."""
        task = self.tasks[site]
        if not isinstance(task, DeltaTask):
            return False
        self.tasks = {**self.tasks, site: expand_task(task)}
        self.asked.pop(site, None)
        return True

    @property
    def open(self) -> list[str]:
        """The sites whose answers are not settled."""
        return [site for site in self.tasks if site not in self.answers]

    @property
    def replies(self) -> dict[str, Reply]:
        """Site -> reply, by name."""
        return {s: a for s, a in sorted(self.answers.items()) if isinstance(a, Reply)}

    @property
    def refusals(self) -> dict[str, Refusal]:
        """Site -> refusal, by name."""
        return {s: a for s, a in sorted(self.answers.items()) if isinstance(a, Refusal)}


class Slow:
    """The sites that were waited for in vain, and the questions that they still owe an answer to.

    It outlives a round: whoever has such a question is not asked another one before Flower has
    dropped it, so that a site that wakes up does not spend its budget on rounds that are over.
    Who misses rounds one after the other, answering after each or never, is asked less and less:
    after n misses not for 2^(n-1) - 1 rounds, until it answers one in time. Its ledger is charged
    for each question, so of R rounds that it misses it pays for about log2(R).
    """

    def __init__(self) -> None:
        self._until = dict[str, float]()
        self._owed = dict[str, str]()
        # Of each site how many rounds it missed in a row, the last of them, and when it is asked.
        self._missed = dict[str, tuple[int, int]]()
        self._next = dict[str, int]()

    def __contains__(self, site: str) -> bool:
        return site in self._until

    @property
    def owed(self) -> list[str]:
        """The numbers of the questions."""
        return list(self._owed)

    def add(self, site: str, this: PendingRequests, seconds: float) -> None:
        """A site did not answer in time. seconds: for which Flower keeps what it was asked."""
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
        self._owed |= {number: site for number, other in this.sent.items() if other == site}

    def may_be_asked(self, site: str, number: int) -> bool:
        """Whether, in this round, Flower has dropped what the site has not answered."""
        return time.monotonic() >= self._until.get(site, 0.0) and not self._pauses(site, number)

    def is_waited_for(self, site: str, number: int) -> bool:
        """Whether a round is held up by the site, if it is there."""
        return site not in self and not self._pauses(site, number)

    def settle(self, number: str | None, answered: bool) -> str | None:
        """Take note of what came for a question; a site that has answered is not slow any more.

        answered: by the site; else Flower has dropped the question. Returns who owed it.
        """
        site = self._owed.pop(number or "", None)
        if site is not None and answered:
            _log.info("site %s answers again", site)
            self._forget(site)
        return site

    def in_time(self, site: str) -> None:
        """The site has answered a question of the round under way."""
        self._missed.pop(site, None)
        self._next.pop(site, None)

    def begin_anew(self, site: str) -> None:
        """The site was started again: it knows nothing of what it was asked, and is asked now."""
        self._forget(site)
        self._next.pop(site, None)

    def recall(self) -> None:
        """Ask all of them again: there are too few others."""
        self._next.clear()

    def _pauses(self, site: str, number: int) -> bool:
        return number < self._next.get(site, 0)

    def _forget(self, site: str) -> None:
        self._until.pop(site, None)
        self._owed = {number: other for number, other in self._owed.items() if other != site}


def advice(this: PendingRequests) -> str:
    """Return what to do where too few sites have replied.

    What sites say is told as their word: any of them may say what it likes.
    """
    said = dict[str, list[str]]()
    for site, refusal in this.refusals.items():
        said.setdefault(refusal.code, []).append(site)
    told = list[str]()
    if "stale" in said:
        told.append(
            f"By the word of {', '.join(said['stale'])} a later round than this one was answered: "
            "if server/run was put back to an older state, put the newer one back; without it, "
            "begin a new run"
        )
    if wrong := [*said.get("ledger", ()), *said.get("rejected: ledger", ())]:
        told.append(
            f"{', '.join(wrong)}: another ledger than this server has seen. Find out with their "
            "owners whether a ledger was put back or a site runs twice "
            "(docs/how-to/operate-a-deployment.md)"
        )
    if "terms" in said:
        told.append(
            f"By the word of {', '.join(said['terms'])} their plan.json or federation.toml says "
            "something else than this server's: compare both files, hand the same out to every "
            "party, and start it again; where a site has promised another ε under this run's name, "
            "give the run a new one"
        )
    told.append(
        "What was sent is not lost: sites keep their replies; resume the run when they can be "
        "reached"
    )
    return ". ".join(told)


def summarise_round(this: PendingRequests) -> str:
    """Return what came of each site."""
    return ", ".join(
        f"{site} {answer.code if isinstance(answer, Refusal) else 'replied'}"
        for site, answer in sorted(this.answers.items())
    )
