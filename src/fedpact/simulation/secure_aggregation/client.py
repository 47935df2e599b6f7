"""A site's side of a session, and what it has opened already.

It holds one session at a time, in memory only: a site that is started again has dropped out of it.
Of a session's slots it uses each for one reply, in their order, and none again. The rules that
protect a site (docs/notes/secure-aggregation.md) are kept here, whatever the server asks: each
question is answered once, the same question with the same answer; no other is.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedpact.common.errors import DataError, FedpactError, InputError
from fedpact.common.files import parse_errors
from fedpact.common.messages import Refusal, Reply, Step, Task, to_bytes
from fedpact.simulation.secure_aggregation import keys, messages
from fedpact.simulation.secure_aggregation.encoding import Coding
from fedpact.simulation.secure_aggregation.graph import MaskingGraph
from fedpact.simulation.secure_aggregation.keys import Advert, KeyContext, Secrets, SecretsDoNotFit
from fedpact.simulation.secure_aggregation.words import RingWords

_LOST = (
    "it says which sums this site has helped to open, and without it a server could have a second "
    "one of the same round opened. No older copy will do, as it lacks the last sums: "
    "take part in a new run only, for which you move it away"
)
_Opened = tuple[str, int, int, tuple[str, ...]]


class Slot(Protocol):
    """Where one content is kept durably, in a file."""

    @property
    def path(self) -> Path:
        """The file, for messages."""
        ...

    def read(self) -> bytes | None:
        """Return the content, None if there is none."""
        ...

    def write(self, content: bytes) -> None:
        """Replace the content."""
        ...

    def make_room(self, length: int) -> None:
        """Hold room for what `write` gets next. Raises OSError: there is none."""
        ...


class UnmaskedSums:
    """Over which sites this one has agreed to a sum last, of which round and attempt; durable.

    slot: None in a simulation, which keeps it in memory.
    """

    def __init__(self, slot: Slot | None) -> None:
        self._slot = slot
        self._last: _Opened | None = None
        block = None if slot is None else slot.read()
        if slot is not None and block is not None:
            with parse_errors(slot.path, _LOST):
                run, number, attempt, names = json.loads(block)
                self._last = str(run), int(number), int(attempt), tuple(map(str, names))

    def begin(self, run: str, charged: bool) -> None:
        """Take part in a run. charged: it was charged for before.

        From its first charge on there is a file that names the run. Raises DataError: there is
        none, so that nobody knows which of its sums were opened.
        """
        found = None if self._last is None else self._last[0]
        # The same run again, as after a restart: what it has agreed to still binds it.
        if found == run:
            return
        if charged:
            there = "has no list of opened sums" if found is None else f"is of run {found!r}"
            where = "" if self._slot is None else self._slot.path
            raise DataError(f"{where} {there}, and this site has released in {run!r}: {_LOST}")
        # Before every round that there may be: a run may open with round 0.
        self._keep((run, -1, 0, ()))

    def make_room(self, task: Task, sites: Iterable[str]) -> None:
        """Take room on the disk for a sum of a task over any of these sites, kept until `allows`.

        Raises FedpactError: there is none.
        """
        if self._slot is None:
            return
        asked = task.run, task.round, task.attempt, sorted(sites)
        try:
            self._slot.make_room(len(json.dumps(asked).encode()))
        except OSError as error:
            raise FedpactError(
                f"round {task.round} needs room on the disk for {self._slot.path} "
                f"({error.strerror}): nothing is charged; make room, and the site takes part again"
            ) from error

    def allows(self, task: Task, survivors: tuple[str, ...]) -> bool:
        """Whether a sum over these sites may be opened, and remember that this one agreed to it.

        Of a round and attempt that is one list only; and none of an earlier one.
        """
        asked = task.run, task.round, task.attempt, survivors
        last = self._last
        # A second list of one (round, attempt) would open a second sum of the same vectors, and the
        # difference of the two is single sites' own.
        again = last is not None and last[0] == task.run and asked[1:3] <= last[1:3]
        if again and last != asked:
            return False
        if last != asked:
            self._keep(asked)
        return True

    def _keep(self, last: _Opened) -> None:
        # On the disk before the signature leaves: else a restart would let it sign another list.
        if self._slot is not None:
            self._slot.write(json.dumps(last).encode())
        self._last = last


_log = logging.getLogger("fedpact.site")

Train = Callable[[Task], Reply | Refusal]
"""Answers the task that a session carries: with the stored reply where it was answered before."""


@dataclass
class _Asked:
    """What was asked at a place. answered: step -> the question's hash, and the answer."""

    place: KeyContext
    answered: dict[str, tuple[bytes, Step | Refusal]] = field(
        default_factory=dict[str, tuple[bytes, Step | Refusal]]
    )

    def is_next(self, step: str) -> bool:
        """Whether every question before this one was answered, and none refused."""
        # Who refused once has left for good: its secrets are not to be asked for in another order.
        refused = any(isinstance(answer, Refusal) for _, answer in self.answered.values())
        return not refused and {*messages.BEFORE[step]} <= self.answered.keys()


@dataclass
class _Slot(_Asked):
    """One sum of a session. survivors: the list that this site has signed."""

    number: int = 0
    task: Task | None = None
    survivors: tuple[str, ...] = ()


@dataclass
class _Session(_Asked):
    """What a site knows of a session.

    held: of each site in it, this one too, its shares for this one. roster: what the list of these
    is called. agreed: whether enough sites have signed it.
    """

    secrets: Secrets = field(default_factory=lambda: Secrets(0))
    adverts: dict[str, Advert] = field(default_factory=dict[str, Advert])
    held: dict[str, bytes] = field(default_factory=dict[str, bytes])
    roster: str = ""
    agreed: bool = False
    slot: _Slot | None = None

    def at(self, place: KeyContext) -> _Asked | None:
        """Return this session or its slot where `place` is one of them that is still of use."""
        name, number = messages.slot_of(place.session)
        if number < 0:
            return self if place == self.place else None
        whose = name == self.place.session and place.run == self.place.run
        if not (whose and "roster" in self.answered and number < self.secrets.slots):
            return None
        last = -1 if self.slot is None else self.slot.number
        # Slots go forward only: masks of one that was used, or passed over, are never made again.
        if self.slot is None or number > last:
            self.slot = _Slot(place, number=number)
        return self.slot if self.slot.place == place else None


class Masker:
    """A site's side of secure aggregation.

    key: the site's long-term key. peers: every site's, this one's too, as the site itself has them.
    circle: t, and who masks with whom. opened: what lasts over sessions.
    """

    def __init__(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        peers: Mapping[str, ec.EllipticCurvePublicKey],
        circle: MaskingGraph,
        coding: Coding,
        opened: UnmaskedSums,
    ) -> None:
        self._name, self._key, self._peers = name, key, dict(peers)
        self._circle, self._coding, self._opened = circle, coding, opened
        self._session: _Session | None = None

    def begin(self, run: str, charged: bool) -> None:
        """Take part in a run. charged: it was charged for before."""
        self._opened.begin(run, charged)

    def answer(self, question: Step, train: Train) -> Step | Refusal:
        """Return the answer to a question of a session; a Refusal that says why there is none.

        Its code depends on public quantities and on what was asked only: "session", "asked",
        "keys", "few", "opened", "range", or what `train` refuses with.
        """
        place, digest = messages.place_of(question), hashlib.sha256(to_bytes(question)).digest()
        # A step that nobody knows must not reach the state below.
        if question.step not in messages.BEFORE:
            return self._refusal(place, "session")
        # A new session throws the old one's secrets away, so that none can be opened in both.
        if question.step == "keys" and (self._session is None or self._session.place != place):
            self._session = self._begun(place, question)
        session = self._session
        asked = None if session is None else session.at(place)
        if (
            session is None
            or asked is None
            or (asked is session) != (question.step in messages.SETUP_STEPS)
        ):
            return self._refusal(place, "session")
        before = asked.answered.get(question.step)
        # The same question again, as after a lost answer, gets the same answer and costs nothing.
        if before is not None:
            return before[1] if before[0] == digest else self._refusal(place, "asked")
        if not asked.is_next(question.step):
            return self._refusal(place, "session")
        # Whatever goes wrong, the site has dropped out of this session, or of this sum.
        asked.answered[question.step] = digest, self._refusal(place, "session")
        try:
            given = self._answers(session, question, train)
        except SecretsDoNotFit as error:
            # Who does not fit is for the owner to know: the server is told a code.
            _log.warning("round %d: %s", place.round, error)
            given = self._refusal(place, "keys")
        except DataError:
            given = self._refusal(place, "range")
        asked.answered[question.step] = digest, given
        return given

    def _begun(self, place: KeyContext, question: Step) -> _Session:
        # The server says how many sums; each costs this site a key pair, so there is a most.
        slots = messages.to_number(messages.block(question, "slots"))
        if slots > keys.SUMS_AHEAD:
            raise InputError(
                f"keys for {slots} sums are asked for: expected {keys.SUMS_AHEAD} at most"
            )
        return _Session(place, secrets=Secrets(slots))

    def _answers(self, session: _Session, question: Step, train: Train) -> Step | Refusal:
        if question.step == "keys":
            advert = session.secrets.advert().sign(self._key, self._name, session.place)
            return self._step(question, messages.from_advert(advert))
        if question.step == "shares":
            return self._shares(session, question)
        if question.step == "roster":
            return self._roster(session, question)
        slot = session.slot
        if slot is None:
            return self._refusal(session.place, "session")
        if question.step == "masked":
            return self._masked(session, slot, question, train)
        if question.step == "open":
            return self._open(session, slot, question)
        if question.step == "consistency":
            return self._consistency(session, slot, question)
        return self._unmask(session, slot, question)

    def _shares(self, session: _Session, question: Step) -> Step | Refusal:
        """Check everybody's keys, and seal for each a share of each b, for neighbours of each m."""
        adverts, secrets = messages.to_adverts(messages.blocks(question)), session.secrets
        keys.check_adverts(adverts, self._peers, session.place)
        # With fewer neighbours than l the server could be all of them: no share is dealt.
        if not self._circle.holds(adverts):
            return self._refusal(session.place, "few")
        for peer, advert in adverts.items():
            if not advert.has(secrets.slots):
                raise SecretsDoNotFit(f"{peer} has keys for another number of sums")
        # A signature of ours over other keys of ours would be another session's.
        if replace(adverts.get(self._name, Advert(b"", b"", b"")), signature=b"") != (
            secrets.advert()
        ):
            raise SecretsDoNotFit(f"the keys of {self._name} are not those that it made")
        session.adverts = dict(sorted(adverts.items()))
        dealt = self._dealt(session)
        session.held[self._name] = dealt.pop(self._name)
        sealed = {
            peer: secrets.encrypt(self._name, peer, adverts[peer].seal, content, session.place)
            for peer, content in dealt.items()
        }
        return self._step(question, messages.under("share/", sealed))

    def _dealt(self, session: _Session) -> dict[str, bytes]:
        """Return for each site its shares: of b of each slot, then, for a neighbour, of m."""
        circle, secrets = self._circle, session.secrets
        places = {peer: circle.place(peer) for peer in session.adverts}
        # Shares of b go to all, of m to neighbours: they alone need it where this site drops out.
        near = [places[peer] for peer in session.adverts if peer in circle.around(self._name)]
        slots = range(secrets.slots)
        of_seeds = keys.split_secrets(
            [secrets.seed(slot) for slot in slots], circle.threshold, places.values()
        )
        masks = [secrets.mask_key(slot).private_bytes_raw() for slot in slots]
        of_masks = keys.split_secrets(masks, circle.graph.shares, near)
        return {peer: of_seeds[at] + of_masks.get(at, b"") for peer, at in places.items()}

    def _roster(self, session: _Session, question: Step) -> Step | Refusal:
        """Keep the others' shares, and sign who is in this session: one list."""
        sealed = messages.blocks(question, "share/")
        for peer, block in sealed.items():
            if peer == self._name or peer not in session.adverts:
                raise SecretsDoNotFit(f"{peer} has no keys in this session")
            # Opened now, not when it is asked for: who dealt garbage is out before training.
            key = session.adverts[peer].seal
            held = session.secrets.decrypt(self._name, peer, key, block, session.place)
            each = 2 if peer in self._circle.around(self._name) else 1
            if len(held) != each * keys.SHARE * session.secrets.slots:
                raise SecretsDoNotFit(f"{peer} has sealed {len(held)} bytes, which are no shares")
            session.held[peer] = held
        if not self._circle.holds(session.held):
            return self._refusal(session.place, "few")
        session.roster = keys.roster_of({peer: session.adverts[peer] for peer in session.held})
        signature = keys.sign_list(
            self._key, self._name, session.roster, session.held, session.place
        )
        return self._step(question, {"signature": signature})

    def _masked(
        self, session: _Session, slot: _Slot, question: Step, train: Train
    ) -> Step | Refusal:
        """Train, and mask what came of it, if enough sites have signed who is in the session."""
        if not session.agreed:
            signatures = messages.blocks(question, "signature/")
            if len(signatures) < self._circle.threshold:
                return self._refusal(slot.place, "few")
            self._check_signed(signatures, session.roster, tuple(session.held), session.place)
            session.agreed = True
        task = messages.task_in(question)
        # The masks are of this slot's round: another task under them would be a second message.
        if (task.run, task.round) != (slot.place.run, slot.place.round):
            return self._refusal(slot.place, "session")
        # Where what was opened cannot be written down, nothing is opened, and the charge in vain.
        self._opened.make_room(task, session.held)
        reply = train(task)
        if isinstance(reply, Refusal):
            return reply
        slot.task = task
        words = self._coding.encode(task, reply)
        # Modulo 2^b, where unsigned words wrap by themselves.
        masked = self._coding.mask(reply, words + self._mask(session, slot, task, words))
        return self._step(question, {"reply": to_bytes(masked)})

    def _mask(self, session: _Session, slot: _Slot, task: Task, words: RingWords) -> RingWords:
        """PRG(b) ± PRG(k) of each neighbour in the session, as many words as there are."""
        mask = keys.expand_seed(session.secrets.seed(slot.number), words).copy()
        mask_key = session.secrets.mask_key(slot.number)
        # One of each pair adds PRG(k), the other takes it off: where both are in they cancel.
        for peer in self._circle.around(self._name) & session.held.keys():
            if peer != self._name:
                public = session.adverts[peer].mask_of(slot.number)
                add_pair(mask, mask_key, public, (self._name, peer), slot.place, task.attempt)
        return mask

    def _open(self, session: _Session, slot: _Slot, question: Step) -> Step | Refusal:
        """Open a share of every b: all of the session are in the sum, as t sites have signed."""
        everybody = tuple(sorted(session.held))
        if slot.task is None or not self._opened.allows(slot.task, everybody):
            return self._refusal(slot.place, "opened")
        return self._step(question, messages.under("seed/", self._of(session, slot, everybody)))

    def _consistency(self, session: _Session, slot: _Slot, question: Step) -> Step | Refusal:
        """Sign who is in the sum: that is on the disk first, and no other list is signed."""
        survivors = messages.to_names(messages.block(question, "survivors"))
        # Who is not in the sum has nothing to agree to, and strangers have no shares to open.
        if self._name not in survivors or not set(survivors) <= set(session.held):
            return self._refusal(slot.place, "session")
        if not self._circle.holds(survivors):
            return self._refusal(slot.place, "few")
        task = slot.task
        if task is None or not self._opened.allows(task, survivors):
            return self._refusal(slot.place, "opened")
        slot.survivors, what = survivors, keys.of_attempt(task.attempt, session.roster)
        signature = keys.sign_list(self._key, self._name, what, survivors, slot.place)
        return self._step(question, {"signature": signature})

    def _unmask(self, session: _Session, slot: _Slot, question: Step) -> Step | Refusal:
        """Open, of each site, one of its two shares, if t sites have signed this one's list."""
        survivors, signatures = slot.survivors, messages.blocks(question, "signature/")
        if len(signatures) < self._circle.threshold:
            return self._refusal(slot.place, "few")
        what = keys.of_attempt(slot.task.attempt if slot.task else 0, session.roster)
        self._check_signed(signatures, what, survivors, slot.place)
        # Of a site in the sum its b alone, of one that is missing its m alone: with both secrets of
        # one site the server could take both of its masks off.
        missing = self._circle.around(self._name) & (session.held.keys() - {*survivors})
        told = messages.under("seed/", self._of(session, slot, survivors))
        told |= messages.under("mask/", self._of(session, slot, missing, session.secrets.slots))
        return self._step(question, told)

    def _of(
        self, session: _Session, slot: _Slot, peers: Iterable[str], skip: int = 0
    ) -> dict[str, bytes]:
        """Return the shares of this slot that these sites have dealt. skip: 0 of b, else of m."""
        # A row has one share a slot: first those of all b, then, from a neighbour, those of all m.
        at = keys.SHARE * (skip + slot.number)
        return {peer: session.held[peer][at : at + keys.SHARE] for peer in peers}

    def _check_signed(
        self, signatures: Mapping[str, bytes], what: str, names: tuple[str, ...], place: KeyContext
    ) -> None:
        """Raise SecretsDoNotFit unless all of these signed this list, and are on it."""
        for peer, signature in signatures.items():
            key = self._peers[peer] if peer in names else None
            if not (key and keys.has_signed(key, peer, what, names, place, signature)):
                raise SecretsDoNotFit(
                    f"{peer} has not signed that {', '.join(sorted(names))} are in"
                )

    def _step(self, question: Step, blocks: Mapping[str, bytes]) -> Step:
        return messages.step(messages.place_of(question), self._name, question.step, blocks)

    def _refusal(self, place: KeyContext, code: str) -> Refusal:
        return Refusal(place.run, place.round, self._name, code)


def add_pair(
    total: RingWords,
    mask_key: X25519PrivateKey,
    public: bytes,
    pair: tuple[str, str],
    place: KeyContext,
    attempt: int,
) -> None:
    """Add to `total` what the first of a pair adds for the second; the second adds its negative.

    mask_key: m of one of them; public: M of the other. place, attempt: the slot's and the task's.
    """
    own, peer = pair
    stream = keys.expand_seed(keys.pair_seed(mask_key, public, own, peer, place, attempt), total)
    operation = np.add if own < peer else np.subtract
    operation(total, stream, out=total)
