"""What is under way between a server and its sites: questions, answers, and who is slow."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fedpact.messages import Message as Answer
from fedpact.messages import Refusal, Reply, Step, Task

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
class UnderWay:
    """One round, or one step of it, under way.

    check: what is wrong with a site's answer, in a word, None if nothing is; refusals pass by it.
    least: how many answers are worth waiting for those who are away. answers: what is settled.
    asked: when each site was last asked.
    """

    tasks: Mapping[str, Task | Step]
    check: Callable[[str, Answer], str | None]
    least: int
    answers: dict[str, Reply | Step | Refusal] = field(
        default_factory=dict[str, Reply | Step | Refusal]
    )
    asked: dict[str, float] = field(default_factory=dict[str, float])
    sent: dict[str, str] = field(default_factory=dict[str, str])

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
    """

    def __init__(self) -> None:
        self._until = dict[str, float]()
        self._owed = dict[str, str]()

    def __contains__(self, site: str) -> bool:
        return site in self._until

    @property
    def owed(self) -> list[str]:
        """The numbers of the questions."""
        return list(self._owed)

    def add(self, site: str, this: UnderWay, seconds: float) -> None:
        """A site did not answer in time. seconds: for which Flower keeps what it was asked."""
        if site not in self:
            _log.warning("site %s: no answer in time: not waited for until it answers", site)
        self._until[site] = this.asked[site] + seconds
        self._owed |= {number: site for number, other in this.sent.items() if other == site}

    def may_be_asked(self, site: str) -> bool:
        """Whether Flower has dropped what the site was asked and has not answered."""
        return time.monotonic() >= self._until.get(site, 0.0)

    def settle(self, number: str | None, answered: bool) -> None:
        """Take note of what came for a question; a site that has answered is not slow any more.

        answered: by the site; else Flower has dropped the question.
        """
        site = self._owed.pop(number or "", None)
        if site is not None and answered:
            _log.info("site %s answers again", site)
            self.forget(site)

    def forget(self, site: str) -> None:
        """The site has answered, or begun anew."""
        self._until.pop(site, None)
        self._owed = {number: other for number, other in self._owed.items() if other != site}
