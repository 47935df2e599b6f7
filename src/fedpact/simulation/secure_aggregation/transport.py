"""The transport under secure aggregation: one exchange becomes several steps.

`Secured` runs sessions over a carrier, which exchanges questions and answers with the sites. A
session has keys and shares for several rounds, so a round without a missing site takes two steps,
`masked` and `open`. For each site in the sum, `Secured` returns a reply with the site's own weight,
ledger and public numbers, and the weighted mean of all; the algorithm's mean of these is that mean.
"""

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric import ec

from fedpact.algorithms.wrappers.compression import expand_task, is_initial
from fedpact.common.errors import FedpactError, InputError
from fedpact.common.files import parse_errors, write_whole
from fedpact.common.messages import EVALUATION, Refusal, Reply, State, Step, Task, encoded_length
from fedpact.simulation.secure_aggregation import messages
from fedpact.simulation.secure_aggregation.encoding import Coding, Form
from fedpact.simulation.secure_aggregation.graph import MaskingGraph
from fedpact.simulation.secure_aggregation.keys import SUMS_AHEAD, KeyContext, SecretsDoNotFit
from fedpact.simulation.secure_aggregation.session import BelowThreshold, Session

_log = logging.getLogger("fedpact.server")
_LOST = (
    "it records which sums were opened, and sites open one sum per attempt: restore it from a "
    "backup, or begin a new run"
)


class FalseSum(FedpactError):
    """A sum is impossible for honest sites; which site lied is unknown."""


Take = Callable[[str, Step], str | None]
"""Stores a site's answer and returns None, or a code if it is invalid."""


class Carrier(Protocol):
    """How the steps of a session reach the sites."""

    @property
    def sites(self) -> tuple[str, ...]: ...

    def within_reach(self, number: int) -> dict[str, str]:
        """Return the sites that can be asked in a round, each with the time of its start."""
        ...

    def exchange(self, tasks: dict[str, Task]) -> Iterator[Reply | Refusal]:
        """Send tasks without secure aggregation; see messages.Transport."""
        ...

    def carry(self, asks: Mapping[str, Step], least: int, take: Take) -> dict[str, Refusal]:
        """Ask each site its question and `take` each answer that is a Step.

        least: the number of answers to wait for. Returns a refusal for each site without a valid
        answer.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Server:
    """The server's settings.

    keys: the sites' long-term keys. rounds: of the run. least: the number of replies that a round
    needs, >= the threshold. retries: of a round. layout: of the replies to a task. fault: returns a
    code for an invalid masked reply, else None. mean_fault: returns, for sites and their mean with
    its error in each coordinate, how it shows that one of them lied, else None.
    """

    keys: Mapping[str, ec.EllipticCurvePublicKey]
    circle: MaskingGraph
    coding: Coding
    rounds: int
    least: int
    retries: int
    layout: Callable[[Task], Form]
    fault: Callable[[str, Task, Reply], str | None] = lambda *_: None
    mean_fault: Callable[[Task, list[str], State, float], str | None] = lambda *_: None


class Attempts:
    """The last round and attempt of which sites were asked to open a sum; durable under `path`.

    A retry after that needs a new attempt, as sites open one sum of each.
    extra: the number of attempts in addition to each round's first; sites are charged for them.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._last, self.extra = (0, -1), 0
        if path is not None:
            with suppress(FileNotFoundError), parse_errors(path, _LOST):
                number, attempt, self.extra = map(int, json.loads(path.read_bytes()))
                self._last = number, attempt

    def next(self, number: int) -> int:
        """Return the number of a round's next attempt."""
        return self._last[1] + 1 if self._last[0] == number else 0

    def begin(self, number: int, attempt: int) -> None:
        """Record that sites are about to be asked to open a sum."""
        self.extra += attempt > 0
        self._last = number, attempt
        if self._path is not None:
            write_whole(self._path, json.dumps([number, attempt, self.extra]).encode())


class Secured:
    """A transport that learns only the sum of the sites' replies.

    A site that deals unusable shares spoils a sum that all sites are charged for. It is left out
    until the server restarts.
    """

    def __init__(self, carrier: Carrier, server: Server, attempts: Attempts) -> None:
        self._carrier, self._server, self._attempts = carrier, server, attempts
        self._down = self._up = 0
        self._out = set[str]()
        self._session: Session | None = None
        # Of the session: the sites that were reachable at its start, the codes of those that are
        # not in it, and the number of rounds until those are asked again.
        self._here, self._outside, self._pause = dict[str, str](), dict[str, str](), 1
        # The sites that received the last model.
        self._told = set[str]()

    @property
    def sites(self) -> tuple[str, ...]:
        return self._carrier.sites

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of all steps of the last exchange, including abandoned sessions."""
        return self._down, self._up

    def exchange(self, tasks: dict[str, Task]) -> Iterator[Reply | Refusal]:
        """Send each site its task; yield the answers in the order of site names.

        Evaluations are not summed: each site's counts have the site's own noise.
        Raises BelowThreshold: too few sites, after all retries.
        """
        self._down = self._up = 0
        first, refused = next(iter(tasks.values())), dict[str, Refusal]()
        if first.algorithm == EVALUATION:
            yield from self._carrier.exchange(tasks)
            return
        replies = self._retry(tasks, refused)
        for site in self.sites:
            given = replies.get(site) or refused.get(site)
            yield given or Refusal(first.run, first.round, site, "too few others")

    def _retry(self, tasks: dict[str, Task], refused: dict[str, Refusal]) -> dict[str, Reply]:
        """Retry with new sessions; return {} if too many sites have spent their budgets."""
        left, number = self._server.retries, next(iter(tasks.values())).round
        while True:
            attempt = self._attempts.next(number)
            # Tasks of a first attempt stay shared: they are encoded once.
            asked = dict(sorted(tasks.items()))
            if attempt != next(iter(tasks.values())).attempt:
                asked = {s: dataclasses.replace(t, attempt=attempt) for s, t in asked.items()}
            refused.clear()
            try:
                return self._sum(asked, refused)
            except (BelowThreshold, SecretsDoNotFit) as error:
                self._session = None
                spent = sum(refusal.code == "budget" for refusal in refused.values())
                # Too few sites have budget left for any later round.
                if len(self.sites) - spent < self._server.least:
                    return {}
                if isinstance(error, SecretsDoNotFit) and error.by:
                    _log.warning("site %s is left out until the server is started again", error.by)
                    self._out.add(error.by)
                lost = any(refusal.code == "attempt" for refusal in refused.values())
                if lost and self._attempts.next(number) == attempt:
                    # A site has lost its reply to this attempt, and may not compute a second one.
                    self._attempts.begin(number, attempt)
                # Send whole models: restarted sites may lack the base of the changes. A site with
                # another initial model always does, so that retry is not counted.
                free = any(is_initial(task) for task in tasks.values())
                tasks = {site: expand_task(task) for site, task in tasks.items()}
                if free and any(refusal.code == "model" for refusal in refused.values()):
                    continue
                if not left:
                    raise BelowThreshold(_explain(error, refused, self._server.retries)) from None
                _log.warning("%s; the round is tried again", error)
                left -= 1

    def _sum(self, tasks: dict[str, Task], refused: dict[str, Refusal]) -> dict[str, Reply]:
        """Compute one sum; return a reply for each site in it."""
        server, task = self._server, next(iter(tasks.values()))
        try:
            session = self._ready(task)
        finally:
            for site, code in self._outside.items():
                refused[site] = Refusal(task.run, task.round, site, code)
        this = session.slot(task.round, server.coding)

        def masked(site: str, answer: Step) -> str | None:
            reply = messages.reply_in(answer)
            why = server.fault(site, tasks[site], reply)
            if why is None:
                this.take_masked(site, reply)
            return why

        # A site without the last model needs the whole one.
        short = {s for s, t in tasks.items() if s in self._told or is_initial(t)}
        in_full = {s: t if s in short else expand_task(t) for s, t in tasks.items()}
        missing = self._step(this.ask_masked(in_full), masked)
        self._told = set(this.replies)
        refused |= missing
        if session.used == session.slots or any(r.code == "session" for r in missing.values()):
            # A restarted site has lost its keys of this session.
            self._session = None
        asks = this.ask_open() if this.is_whole else this.ask_consistency()
        if len(asks) < server.least:
            raise BelowThreshold(
                f"round {task.round}: {len(asks)} replies, and patience.least_replies is "
                f"{server.least}: nothing is opened"
            )
        # Before any site can open: after a crash, this attempt is not repeated.
        self._attempts.begin(task.round, task.attempt)
        # Sites in the sum stay in it, whether or not they sign and open shares.
        if not this.is_whole:
            self._step(asks, this.take_consistency)
            asks = this.ask_unmask()
        self._step(asks, this.take_opened)
        mean, error = server.coding.mean(task, this.replies, this.total(), server.layout(task))
        why = server.mean_fault(task, sites := sorted(this.replies), mean, error)
        if why is not None:
            raise FalseSum(
                f"round {task.round}: the sum over {', '.join(sites)} is impossible for honest "
                f"sites: {why}. Secure aggregation hides which of them lied, and a retry costs all "
                "of them budget: find out among the owners, then start the server again; the run "
                "continues from its last round"
            )
        return {
            reply.site: dataclasses.replace(
                reply, vectors=mean.vectors, numbers={**mean.numbers, **reply.numbers}
            )
            for _, reply in sorted(this.replies.items())
        }

    def _ready(self, task: Task) -> Session:
        """Return a session with a slot for this round; a new one if reachable sites are missing."""
        here, session = self._carrier.within_reach(task.round), self._session
        if session is not None and not self._is_outdated(session, here):
            return session
        server = self._server
        self._session, self._here = None, here
        self._outside = dict.fromkeys(sorted(self._out), "rejected: shares")
        public = {site: key for site, key in server.keys.items() if site not in self._out}
        slots = max(1, min(SUMS_AHEAD, server.rounds - task.round + 1))
        place = KeyContext.new(task.run, task.round)
        session = Session(place, public, server.circle, slots)
        for ask, take in (
            (session.ask_keys, session.take_keys),
            (session.ask_shares, session.take_shares),
            (session.ask_roster, session.take_roster),
        ):
            missing = self._step(ask(), take)
            self._outside |= {site: refusal.code for site, refusal in missing.items()}
        # Sites that dealt shares are in it, whether or not they signed.
        self._outside = {s: code for s, code in self._outside.items() if s not in session.sealed}
        self._pause = 2 * self._pause if self._refusing_sites() else 1
        self._session = session
        return session

    def _refusing_sites(self) -> set[str]:
        """Return the sites that were reachable and are not in the session, but may be later."""
        return self._here.keys() & self._outside.keys() - self._out

    def _is_outdated(self, session: Session, here: Mapping[str, str]) -> bool:
        """Whether a site has joined or restarted, or one that refused should be asked again."""
        if any(self._here.get(site) != since for site, since in here.items()):
            return True
        # With exponential backoff.
        return session.used >= self._pause // 2 and bool(self._refusing_sites() & here.keys())

    def _step(self, asks: dict[str, Step], take: Take) -> dict[str, Refusal]:
        """Ask the questions; return a refusal for each site without a valid answer."""
        self._down += sum(encoded_length(question) for question in asks.values())

        def counted(site: str, answer: Step) -> str | None:
            question = asks[site]
            about = answer.run, answer.round, answer.session, answer.step, answer.site
            if about != (question.run, question.round, question.session, question.step, site):
                return "stale"
            try:
                wrong = take(site, answer)
                # Do not count invalid answers, whose length the site could choose.
                self._up += 0 if wrong else encoded_length(answer)
                return wrong
            except (InputError, SecretsDoNotFit) as error:
                _log.warning("site %s: %s", site, error)
                return "step"

        return self._carrier.carry(asks, self._server.least, counted)


def _explain(error: Exception, refused: Mapping[str, Refusal], retries: int) -> str:
    who = ", ".join(f"{site} {refusal.code}" for site, refusal in sorted(refused.items()))
    return (
        f"{error} (tried {retries + 1} times; {who or 'no site refused'}). Sites keep their "
        "replies; resume the run when more of them can be reached"
    )
