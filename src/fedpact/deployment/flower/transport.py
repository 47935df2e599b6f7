"""The transport over Flower's Grid: asks the sites, waits, asks again, and checks the answers.

A site is identified by its public key, verified by Flower's SuperLink, and its answers by their
signature under that key. Rounds do not wait for a disconnected site. A connected site that does not
answer is asked again until the round's time is over; later rounds do not wait for it until it has
answered or restarted. So a site that hangs delays one round, not every round. A site that answers
after the end of each round is asked exponentially less often. Sites without an answer, and rejected
ones, appear in the round's record as refusals, and the round continues with the others.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message

from fedpact.algorithms.wrappers.compression import shortest
from fedpact.common.errors import FedpactError, InputError
from fedpact.common.messages import (
    EVALUATION,
    FREE,
    MOST_VECTORS,
    READY,
    REASONS,
    Refusal,
    Reply,
    Step,
    Task,
    from_bytes,
    to_bytes,
)
from fedpact.common.messages import Message as Answer
from fedpact.deployment.admission import REFUSALS, Admission
from fedpact.deployment.federation import Federation
from fedpact.deployment.flower import flower_records
from fedpact.deployment.flower.internals import PromptGrid, public_pem
from fedpact.deployment.flower.requests import Clock, PendingRequests, Slow, advice
from fedpact.simulation.secure_aggregation import keys
from fedpact.simulation.secure_aggregation.encoding import Form
from fedpact.simulation.secure_aggregation.messages import reply_in
from fedpact.simulation.secure_aggregation.transport import Take

_log = logging.getLogger("fedpact.server")
_POLL_SECONDS = 0.1
_NODES_SECONDS = 1.0
_READY_SECONDS = 5.0

OnWait = Callable[[int, Mapping[str, Mapping[str, Any]]], None]


class TooFewReplies(FedpactError):
    """A round got fewer replies than federation.toml requires, in every attempt."""


class FlowerTransport:
    """See messages.Transport.

    key: the server's private key. agreed: see Federation.agreed. form: returns the form of replies
    to a task. on_wait: called during a round with its number and the seconds of each site, answered
    or awaited.
    """

    traffic = None

    def __init__(
        self,
        grid: PromptGrid,
        federation: Federation,
        key: ec.EllipticCurvePrivateKey,
        agreed: str,
        admission: Admission,
        form: Callable[[Task], Form],
        on_wait: OnWait = lambda *_: None,
    ) -> None:
        self._grid, self._federation, self._key = grid, federation, key
        self._agreed = agreed
        self._admission, self._form = admission, form
        self._on_wait = on_wait
        self._keys = {n: keys.public_key(m.key) for n, m in federation.sites.items()}
        self._names = {public_pem(key).strip(): name for name, key in self._keys.items()}
        self._nodes = dict[str, int]()
        self._since, self._slow = dict[str, str](), Slow()
        self._looked, self._joined = 0.0, False
        self._waiting = Clock()

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of the sites, sorted."""
        return self._federation.names

    def exchange(self, tasks: dict[str, Task]) -> Iterator[Reply | Refusal]:
        """Send each of these sites its task; yield the answers in the order of their names. Raises
        TooFewReplies."""
        began, before = time.perf_counter(), self._waiting.seconds
        patience, any_task = self._federation.patience, next(iter(tasks.values()))
        # The final model goes to all connected sites.
        least = 0 if any_task.algorithm in FREE else patience.least_replies
        form = self._form(any_task)

        def check(site: str, answer: Answer) -> str | None:
            if not isinstance(answer, Reply):
                return "unreadable"
            return self._admission.fault(site, tasks[site], answer, form)

        this = PendingRequests(tasks, check, least)
        self._wait_for_all()
        for _ in range(patience.retries + 1):
            self._collect(this)
            if not this.open or len(this.replies) >= least:
                break
            _log.warning("round %d: too few replies, tried again", any_task.round)
        # Judged together, as the first reply could not be compared with others.
        for site in self._admission.outliers(any_task, this.replies):
            self._reject(this, site, "far off")
        # Before absent sites are recorded as refusals.
        replies = this.replies
        for site in this.open:
            this.refuse(site, "absent")
        spent = [site for site, refusal in this.refusals.items() if refusal.code == "budget"]
        if len(tasks) - len(spent) < least:
            # No later round can have enough replies: the run ends without using these.
            replies = dict[str, Reply]()
        elif len(replies) < least and any_task.algorithm != EVALUATION:
            raise TooFewReplies(
                f"round {any_task.round} got {len(replies)} replies of at least "
                f"{least} (patience.least_replies), after {patience.retries + 1} "
                f"times {patience.round_seconds:g} s: {this.outcome}. {advice(this)}"
            )
        waited = self._waiting.seconds - before
        own = time.perf_counter() - began - waited
        if any_task.algorithm != READY:
            _log.info("round %d: %.2f s waiting, %.3f s own work", any_task.round, waited, own)
        yield from (each for _, each in sorted({**replies, **this.refusals}.items()))

    def wait_until_ready(self, run: str) -> None:
        """Wait until the required number of sites is ready for the first round.

        Asking costs no budget. Raises TooFewReplies: too few after patience.round_seconds; the
        message says which sites are missing and why.
        """
        patience, ready, told = self._federation.patience, set[str](), ""
        least = patience.start_sites or len(self.sites)
        end = time.monotonic() + max(patience.round_seconds, patience.join_seconds)
        refused, next_turn = dict[str, str](), 0.0
        while True:
            ready &= set(self._present())
            # Sites that refused are asked again, but not at every check for new ones.
            if time.monotonic() >= next_turn:
                refused, next_turn = {}, time.monotonic() + patience.resend_seconds
            sites = {*self.sites} - ready - {*refused}
            asked = {site: Task(run, 0, READY, {}, {}) for site in sorted(sites)}
            missing = dict(refused)
            for answer in self.exchange(asked) if asked else ():
                if isinstance(answer, Refusal):
                    missing[answer.site] = answer.code
                else:
                    ready.add(answer.site)
            if len(ready) >= least:
                return
            refused = {site: code for site, code in missing.items() if code != "absent"}
            # For `fedpact watch`.
            self._on_wait(0, {s: {"waiting": True, "code": c} for s, c in sorted(missing.items())})
            why = "; ".join(f"{s} {REASONS.get(c, c)}" for s, c in sorted(missing.items()))
            if time.monotonic() >= end:
                break
            if why != told:
                waits = f"the first round waits for {least} of {len(self.sites)} sites"
                _log.warning("%s: %s", waits, why)
                told = why
            with self._waiting:
                time.sleep(_READY_SECONDS)
        raise TooFewReplies(
            f"run {run} has not begun: {len(ready)} of {len(self.sites)} sites are ready, and its "
            f"first round waits for {least} (patience.start_sites of federation.toml; left out, "
            f"for all). {why}. Nothing is reserved or charged at any "
            "site: have their owners see to it, with `fedpact deploy check` of the site's "
            "directory, and start the server again"
        )

    def within_reach(self, number: int) -> dict[str, str]:
        """Return the sites that a round would ask, each with its start time."""
        self._wait_for_all()
        return {
            site: self._since[site]
            for site in self._present()
            if self._slow.may_be_asked(site, number)
        }

    def carry(self, asks: Mapping[str, Step], least: int, take: Take) -> dict[str, Refusal]:
        """Send each site its step, and `take` each answer that is a Step."""

        def check(site: str, answer: Answer) -> str | None:
            return take(site, answer) if isinstance(answer, Step) else "unreadable"

        this = PendingRequests(asks, check, least)
        self._wait_for_all()
        self._collect(this)
        for site in this.open:
            this.refuse(site, "absent")
        return this.refusals

    def _wait_for_all(self) -> None:
        """Wait once for sites to connect; later rounds do not wait for missing ones."""
        end, told = time.monotonic() + self._federation.patience.join_seconds, None
        while not self._joined and time.monotonic() < end:
            absent = {*self.sites} - {*self._present()}
            self._joined = not absent
            if absent != told:
                # For `fedpact watch`.
                self._on_wait(0, {s: {"waiting": True, "code": "absent"} for s in sorted(absent)})
                told = absent
            if not self._joined:
                self._sleep()
        self._joined = True

    def _sleep(self) -> None:
        with self._waiting:
            time.sleep(_POLL_SECONDS)

    def _collect(self, this: PendingRequests) -> None:
        """Ask sites and collect answers until all are settled, none is awaited, or time is up."""
        patience = self._federation.patience
        told = time.monotonic()
        end = told + patience.round_seconds
        while this.open and time.monotonic() < end:
            present = self._present(this)
            # In each iteration: a site may have connected, or been silent long enough.
            self._ask(this, present)
            # Answers to earlier rounds only show that a site is alive.
            numbers = [*this.sent, *self._slow.owed]
            with self._waiting:
                arrived = list(self._grid.pull_messages(numbers)) if numbers else []
            for message in arrived:
                self._take(this, message)
            if arrived or time.monotonic() - told >= _NODES_SECONDS:
                self._on_wait(next(iter(this.tasks.values())).round, this.waits())
                told = time.monotonic()
            waited_for = any(
                site in present and self._slow.is_waited_for(site, this.tasks[site].round)
                for site in this.open
            )
            if not waited_for:
                if len(this.answers) - len(this.refusals) >= this.least:
                    break
                self._slow.recall()
            if not arrived:
                self._sleep()
        # On the disk before replies are used: a ledger that was seen is remembered.
        self._admission.standing.save()
        for site in this.open:
            # An absent site is not slow, and a site that was not asked owes no answer.
            if site in this.asked and (site in self._slow or site in self._nodes):
                self._slow.add(site, this, patience.round_seconds)

    def _present(self, this: PendingRequests | None = None) -> dict[str, int]:
        """Return site -> node of the connected sites, at most a second old.

        A restarted site does not know earlier tasks.
        """
        if time.monotonic() - self._looked >= _NODES_SECONDS:
            found = dict[str, int]()
            with self._waiting:
                nodes = list(self._grid.get_nodes())
            for node in nodes:
                name = self._names.get(node.public_key.strip())
                if name is None:
                    continue
                found[name] = node.node_id
                if self._since.get(name) != node.last_activated_at:
                    self._since[name] = node.last_activated_at
                    self._slow.begin_anew(name)
                    if this is not None:
                        this.asked.pop(name, None)
            for name in sorted(set(found) ^ set(self._nodes)):
                _log.info("site %s %s", name, "is connected" if name in found else "is gone")
            self._nodes, self._looked = found, time.monotonic()
        return self._nodes

    def _ask(self, this: PendingRequests, present: dict[str, int]) -> None:
        now, patience = time.monotonic(), self._federation.patience
        for site in this.open:
            last = this.asked.get(site)
            if site not in present or (last and now - last < patience.resend_seconds):
                continue
            # Flower may still hold an earlier task, which the site would answer and charge.
            if last is None and not self._slow.may_be_asked(site, this.tasks[site].round):
                continue
            question = this.tasks[site]
            block = to_bytes(shortest(question) if isinstance(question, Task) else question)
            seen = self._admission.standing.last_seen(site)
            purpose = keys.signing_context(site, seen, self._agreed)
            record = flower_records.to_record(
                block, keys.sign(self._key, purpose, block), seen, self._agreed
            )
            # A site that returns later must not spend budget on a round that is over.
            message = Message(record, present[site], "train", ttl=patience.round_seconds)
            with self._waiting:
                numbers = self._grid.push_messages([message])
            this.sent.update({number: site for number in numbers if number})
            this.asked[site] = now
            this.first.setdefault(site, now)

    def _take(self, this: PendingRequests, message: Message) -> None:
        number = message.metadata.reply_to_message_id
        site, failed = this.sent.pop(number, None), message.has_error()
        owed_by = self._slow.settle(number, answered=not failed)
        if site is None or site in this.answers:
            # Late or repeated, so not used; but its charge is spent.
            whose = site or owed_by
            if whose is not None and not failed:
                self._look(this, whose, self._open(whose, message))
            return
        if failed:
            # A site that is asked several times fails as often: log it once.
            this.sent = {number: other for number, other in this.sent.items() if other != site}
            _log.warning("site %s: Flower reports error %s", site, message.error.code)
            return
        self._slow.in_time(site)
        answer = self._open(site, message)
        fault = answer if isinstance(answer, str) else self._find_fault(this, site, answer)
        if fault is not None:
            self._reject(this, site, fault)
        elif isinstance(answer, Refusal) and answer.code == "model" and this.tell_in_full(site):
            _log.info("site %s has no model to change: it is told in full", site)
        elif isinstance(answer, Step):
            # Its content has been processed.
            this.answers[site] = replace(answer, vectors={})
        elif isinstance(answer, Reply | Refusal):
            this.answers[site] = answer

    def _find_fault(self, this: PendingRequests, site: str, answer: Answer) -> str | None:
        task = this.tasks[site]
        if isinstance(answer, Refusal):
            if (answer.run, answer.round, answer.site) != (task.run, task.round, site):
                return "stale"
            # Codes appear in logs, reports and advice, so only known ones are accepted.
            return None if answer.code in REFUSALS else "unreadable"
        fault = this.check(site, answer)
        if fault == "stale" and isinstance(answer, Step):
            self._look(this, site, answer)
        return fault

    def _open(self, site: str, message: Message) -> Answer | str:
        try:
            block, signature = flower_records.from_record(message.content)
            if not keys.is_signed(self._keys[site], f"reply of {site}", block, signature):
                return "key"
            return from_bytes(block, MOST_VECTORS + 4 * len(self.sites))
        except InputError:
            return "unreadable"

    def _look(self, this: PendingRequests, site: str, answer: Answer | str) -> None:
        """Record the ledger shown by a site's late answer, if any."""
        try:
            reply = reply_in(answer) if isinstance(answer, Step) else answer
        except InputError:
            return  # another step's, which has no reply in it
        about = self._federation.run, site
        if not isinstance(reply, Reply) or (reply.run, reply.site) != about:
            return
        standing = self._admission.standing
        fits = standing.look(site, reply.ledger_length, reply.ledger_head, late=True)
        if not fits and site in this.open:
            self._reject(this, site, "ledger")

    def _reject(self, this: PendingRequests, site: str, why: str) -> None:
        _log.warning("site %s: its reply is rejected: %s", site, why)
        this.refuse(site, f"rejected: {why}")
