"""A site's side of a session, and its record of opened sums.

A site has one session at a time, in memory only, so a restart drops out of it. It uses each slot of
a session for one reply, in order. The rules that protect a site (docs/notes/secure-aggregation.md)
are enforced here, whatever the server asks. A repeated question gets the same answer.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedpact.client import MemoryStore
from fedpact.common.errors import DataError, FedpactError, InputError
from fedpact.common.files import parse_errors
from fedpact.common.messages import Refusal, Reply, Step, Task, to_bytes
from fedpact.simulation.secure_aggregation import keys, messages
from fedpact.simulation.secure_aggregation.encoding import Coding
from fedpact.simulation.secure_aggregation.graph import MaskingGraph
from fedpact.simulation.secure_aggregation.keys import Advert, KeyContext, Secrets, SecretsDoNotFit
from fedpact.simulation.secure_aggregation.words import RingWords

_LOST = (
    "it records which sums this site has helped to open, and without it a server could have a "
    "second one of the same round opened. An older copy lacks the last sums: "
    "take part in a new run only, for which you move it away"
)
_Opened = tuple[str, int, int, tuple[str, ...]]


class Slot(MemoryStore, Protocol):
    """Durable storage of one value in a file, with room for the next."""

    def make_room(self, length: int) -> None:
        """Reserve space for the next `write`. Raises OSError: the disk is full."""
        ...


class UnmaskedSums:
    """The last list of sites that this one agreed to sum, with its round and attempt; durable.

    slot: None in a simulation, which stores it in memory.
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
        """Take part in a run. charged: whether the site was charged for it before.

        Raises DataError: it was, but the file of the run is missing, so it is unknown which sums
        were opened.
        """
        found = None if self._last is None else self._last[0]
        # After a restart in the same run, earlier agreements still bind.
        if found == run:
            return
        if charged:
            there = "has no list of opened sums" if found is None else f"is of run {found!r}"
            where = "" if self._slot is None else self._slot.path
            raise DataError(f"{where} {there}, and this site has released in {run!r}: {_LOST}")
        # Round -1 precedes every round; a run may begin with round 0.
        self._keep((run, -1, 0, ()))

    def make_room(self, task: Task, sites: Iterable[str]) -> None:
        """Reserve disk space for a sum of a task over any of these sites, until `allows`.

        Raises FedpactError: the disk is full.
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
        """Whether a sum over these sites may be opened; if so, record this site's agreement.

        Only one list is allowed for a round and attempt, and none for earlier ones.
        """
        asked = task.run, task.round, task.attempt, survivors
        last = self._last
        # A second list for one (round, attempt) would open a second sum of the same vectors, whose
        # difference from the first could be a single site's vector.
        again = last is not None and last[0] == task.run and asked[1:3] <= last[1:3]
        if again and last != asked:
            return False
        if last != asked:
            self._keep(asked)
        return True

    def _keep(self, last: _Opened) -> None:
        # On disk before the signature leaves, or after a restart the site could sign another list.
        if self._slot is not None:
            self._slot.write(json.dumps(last).encode())
        self._last = last


_log = logging.getLogger("fedpact.site")

Train = Callable[[Task], Reply | Refusal]
"""Answers a session's task; with the stored reply if it was answered before."""


@dataclass
class _Asked:
    """Answered questions of a context. answered: step -> the question's hash, and the answer."""

    place: KeyContext
    answered: dict[str, tuple[bytes, Step | Refusal]] = field(
        default_factory=dict[str, tuple[bytes, Step | Refusal]]
    )

    def is_next(self, step: str) -> bool:
        """Whether every question before this one was answered, and none refused."""
        # A refusal is final: otherwise a server could ask for secrets in another order.
        refused = any(isinstance(answer, Refusal) for _, answer in self.answered.values())
        return not refused and {*messages.BEFORE[step]} <= self.answered.keys()


@dataclass
class _Slot(_Asked):
    """One sum of a session. survivors: the list that this site signed."""

    number: int = 0
    task: Task | None = None
    survivors: tuple[str, ...] = ()


@dataclass
class _Session(_Asked):
    """A session as a site sees it.

    held: site -> its shares for this site, from all sites including this one. roster: the name of
    the list of these sites. agreed: whether enough sites have signed it.
    """

    secrets: Secrets = field(default_factory=lambda: Secrets(0))
    adverts: dict[str, Advert] = field(default_factory=dict[str, Advert])
    held: dict[str, bytes] = field(default_factory=dict[str, bytes])
    roster: str = ""
    agreed: bool = False
    slot: _Slot | None = None

    def at(self, place: KeyContext) -> _Asked | None:
        """Return this session or its slot with this context; None if there is none, or it ended."""
        name, number = messages.slot_of(place.session)
        if number < 0:
            return self if place == self.place else None
        whose = name == self.place.session and place.run == self.place.run
        if not (whose and "roster" in self.answered and number < self.secrets.slots):
            return None
        last = -1 if self.slot is None else self.slot.number
        # Slots only advance: masks of a used or skipped slot are never made again.
        if self.slot is None or number > last:
            self.slot = _Slot(place, number=number)
        return self.slot if self.slot.place == place else None


class Masker:
    """A site's side of secure aggregation.

    key: the site's long-term key. peers: every site's public key, from this site's own files.
    circle: the threshold and the neighbours. opened: lasts over sessions.
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
        """Take part in a run; see UnmaskedSums.begin."""
        self._opened.begin(run, charged)

    def answer(self, question: Step, train: Train) -> Step | Refusal:
        """Return the answer to a question of a session, or a Refusal.

        The refusal's code depends on public quantities and the question only: "session", "asked",
        "keys", "few", "opened", "range", or a code of `train`.
        """
        place, digest = messages.place_of(question), hashlib.sha256(to_bytes(question)).digest()
        # An unknown step must not reach the state below.
        if question.step not in messages.BEFORE:
            return self._refusal(place, "session")
        # A new session discards the old one's secrets, so that none can be opened in both.
        if question.step == "keys" and (self._session is None or self._session.place != place):
            slots = int.from_bytes(messages.block(question, "slots")[:4])
            # Each sum costs this site a key pair, so their number is limited.
            if not 1 <= slots <= keys.SUMS_AHEAD:
                raise InputError(f"asked keys for {slots} sums: expected 1 to {keys.SUMS_AHEAD}")
            self._session = _Session(place, secrets=Secrets(slots))
        session = self._session
        asked = None if session is None else session.at(place)
        if (
            session is None
            or asked is None
            or (asked is session) != (question.step in messages.SETUP_STEPS)
        ):
            return self._refusal(place, "session")
        before = asked.answered.get(question.step)
        # A repeated question, as after a lost answer, gets the same answer at no cost.
        if before is not None:
            return before[1] if before[0] == digest else self._refusal(place, "asked")
        if not asked.is_next(question.step):
            return self._refusal(place, "session")
        # If anything fails below, the site has dropped out of this session or sum.
        asked.answered[question.step] = digest, self._refusal(place, "session")
        try:
            given = self._answers(session, question, train)
        except SecretsDoNotFit as error:
            # The owner's log names the site; the server gets a code.
            _log.warning("round %d: %s", place.round, error)
            given = self._refusal(place, "keys")
        except DataError:
            given = self._refusal(place, "range")
        asked.answered[question.step] = digest, given
        return given

    def _answers(self, session: _Session, question: Step, train: Train) -> Step | Refusal:
        if question.step == "keys":
            advert = session.secrets.advert().sign(self._key, self._name, session.place)
            return self._step(question, {"keys": advert.pack()})
        if question.step in ("shares", "roster"):
            return (self._shares if question.step == "shares" else self._roster)(session, question)
        slot = session.slot
        if slot is None:
            return self._refusal(session.place, "session")
        if question.step == "masked":
            return self._train_and_mask(session, slot, question, train)
        steps = {"open": self._open, "consistency": self._consistency, "unmask": self._unmask}
        return steps[question.step](session, slot, question)

    def _shares(self, session: _Session, question: Step) -> Step | Refusal:
        """Check all keys; seal a share of each b for every site, and of each m for neighbours."""
        secrets, sent = session.secrets, messages.blocks(question)
        adverts = {peer: Advert.unpack(block, secrets.slots) for peer, block in sent.items()}
        keys.check_adverts(adverts, self._peers, session.place)
        # With fewer than l neighbours, all could be corrupt.
        if not self._circle.holds(adverts):
            return self._refusal(session.place, "few")
        # Own keys that differ, with a valid signature, are of another session.
        if replace(adverts.get(self._name, Advert(b"", b"", b"")), signature=b"") != (
            secrets.advert()
        ):
            raise SecretsDoNotFit(f"the keys of {self._name} are not the ones it created")
        session.adverts = dict(sorted(adverts.items()))
        dealt = self._dealt(session)
        session.held[self._name] = dealt.pop(self._name)
        sealed = {
            peer: secrets.encrypt(self._name, peer, adverts[peer].seal, content, session.place)
            for peer, content in dealt.items()
        }
        return self._step(question, messages.under("share/", sealed))

    def _dealt(self, session: _Session) -> dict[str, bytes]:
        """Return for each site its shares: of each slot's b, then, for a neighbour, of each m."""
        circle, secrets = self._circle, session.secrets
        places = {peer: circle.place(peer) for peer in session.adverts}
        # Only neighbours share masks with this site, so only they need shares of m.
        near = [places[peer] for peer in session.adverts if peer in circle.around(self._name)]
        slots = range(secrets.slots)
        of_seeds = keys.split_secrets(
            [secrets.seed(slot) for slot in slots], circle.threshold, places.values()
        )
        masks = [secrets.mask_key(slot).private_bytes_raw() for slot in slots]
        of_masks = keys.split_secrets(masks, circle.graph.shares, near)
        return {peer: of_seeds[at] + of_masks.get(at, b"") for peer, at in places.items()}

    def _roster(self, session: _Session, question: Step) -> Step | Refusal:
        """Store the others' shares, and sign the list of sites in this session."""
        sealed = messages.blocks(question, "share/")
        for peer, block in sealed.items():
            if peer == self._name or peer not in session.adverts:
                raise SecretsDoNotFit(f"{peer} has no keys in this session")
            # Decrypt now, so that a site that dealt garbage is excluded before training.
            key = session.adverts[peer].seal
            held = session.secrets.decrypt(self._name, peer, key, block, session.place)
            each = 2 if peer in self._circle.around(self._name) else 1
            if len(held) != each * keys.SHARE * session.secrets.slots:
                raise SecretsDoNotFit(f"{peer} has sealed {len(held)} bytes, which are not shares")
            session.held[peer] = held
        if not self._circle.holds(session.held):
            return self._refusal(session.place, "few")
        session.roster = keys.roster_of({peer: session.adverts[peer] for peer in session.held})
        signature = keys.sign_list(
            self._key, self._name, session.roster, session.held, session.place
        )
        return self._step(question, {"signature": signature})

    def _train_and_mask(
        self, session: _Session, slot: _Slot, question: Step, train: Train
    ) -> Step | Refusal:
        """Train and mask the reply, if enough sites have signed the session's list."""
        if not session.agreed:
            signatures = messages.blocks(question, "signature/")
            if len(signatures) < self._circle.threshold:
                return self._refusal(slot.place, "few")
            self._check_signed(signatures, session.roster, tuple(session.held), session.place)
            session.agreed = True
        task = messages.task_in(question)
        # A slot's masks are for its round: a second task under them would be a second message.
        if (task.run, task.round) != (slot.place.run, slot.place.round):
            return self._refusal(slot.place, "session")
        # Before the charge, which would be wasted if the agreement could not be written.
        self._opened.make_room(task, session.held)
        reply = train(task)
        if isinstance(reply, Refusal):
            return reply
        slot.task = task
        words = self._coding.encode(task, reply)
        # Modulo 2^b, as unsigned words wrap.
        masked = self._coding.mask(reply, words + self._mask(session, slot, task, words))
        return self._step(question, {"reply": to_bytes(masked)})

    def _mask(self, session: _Session, slot: _Slot, task: Task, words: RingWords) -> RingWords:
        """Return PRG(b) ± PRG(k) of each neighbour in the session, as many words as `words`."""
        mask = keys.expand_seed(session.secrets.seed(slot.number), words).copy()
        mask_key = session.secrets.mask_key(slot.number)
        # One of each pair adds PRG(k) and the other subtracts it, so they cancel in a sum of both.
        for peer in self._circle.around(self._name) & session.held.keys():
            if peer != self._name:
                public = session.adverts[peer].mask_of(slot.number)
                add_pair(mask, mask_key, public, (self._name, peer), slot.place, task.attempt)
        return mask

    def _open(self, session: _Session, slot: _Slot, question: Step) -> Step | Refusal:
        """Open a share of every b, as all sites of the signed list are in the sum."""
        everybody = tuple(sorted(session.held))
        if slot.task is None or not self._opened.allows(slot.task, everybody):
            return self._refusal(slot.place, "opened")
        return self._step(question, messages.under("seed/", self._of(session, slot, everybody)))

    def _consistency(self, session: _Session, slot: _Slot, question: Step) -> Step | Refusal:
        """Record the list of sites in the sum on disk, then sign it; no other list is signed."""
        names = messages.block(question, "survivors").decode(errors="replace").split("\n")
        survivors = tuple(sorted(set(names)))
        # A site outside the sum has nothing to agree to, and strangers have no shares to open.
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
        """Open one of each site's two shares, if t sites have signed this site's list."""
        survivors, signatures = slot.survivors, messages.blocks(question, "signature/")
        if len(signatures) < self._circle.threshold:
            return self._refusal(slot.place, "few")
        what = keys.of_attempt(slot.task.attempt if slot.task else 0, session.roster)
        self._check_signed(signatures, what, survivors, slot.place)
        # b for a site in the sum, m for a missing one: with both, the server could remove both
        # masks.
        missing = self._circle.around(self._name) & (session.held.keys() - {*survivors})
        told = messages.under("seed/", self._of(session, slot, survivors))
        told |= messages.under("mask/", self._of(session, slot, missing, session.secrets.slots))
        return self._step(question, told)

    def _of(
        self, session: _Session, slot: _Slot, peers: Iterable[str], skip: int = 0
    ) -> dict[str, bytes]:
        """Return this slot's shares from these sites. skip: 0 for b, the number of slots for m."""
        # A row has the shares of each slot's b, then, from a neighbour, those of each m.
        at = keys.SHARE * (skip + slot.number)
        return {peer: session.held[peer][at : at + keys.SHARE] for peer in peers}

    def _check_signed(
        self, signatures: Mapping[str, bytes], what: str, names: tuple[str, ...], place: KeyContext
    ) -> None:
        """Raise SecretsDoNotFit unless each of these sites signed this list and is on it."""
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
    """Add to `total` the first site's mask for the second; the second's is its negative.

    mask_key: m of one site. public: M of the other. place, attempt: the slot's and the task's.
    """
    own, peer = pair
    stream = keys.expand_seed(keys.pair_seed(mask_key, public, own, peer, place, attempt), total)
    operation = np.add if own < peer else np.subtract
    operation(total, stream, out=total)
