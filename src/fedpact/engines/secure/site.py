"""A site's side of secure aggregation: keys, shares, one masked reply, and which shares it opens.

It holds one session at a time, in memory only: a site that is started again has dropped out of it.
The rules that protect a site (docs/secure-aggregation.md) are kept here, whatever the server asks:
each question of a session is answered once, the same question with the same answer; no other is.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from fedpact.engines.secure import keys, wire
from fedpact.engines.secure.keys import Advert, Place, Secrets, SecretsDoNotFit
from fedpact.engines.secure.ring import Coding, Words
from fedpact.errors import DataError, FedpactError
from fedpact.files import make_room, understood, write_whole
from fedpact.messages import Refusal, Reply, Step, Task, to_bytes

_log = logging.getLogger("fedpact.site")

Train = Callable[[Task], Reply | Refusal]
"""Answers the task that a session carries: with the stored reply where it was answered before."""

_LOST = (
    "it says which sums this site has helped to open, and without it a server could have a second "
    "one of the same round opened: put it back from a backup, or take part in a new run only, for "
    "which it may be moved away"
)
_Opened = tuple[str, int, int, tuple[str, ...]]


class Opened:
    """Over which sites this one has agreed to a sum last, of which round and attempt; durable.

    path: None in a simulation, which keeps it in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._last: _Opened | None = None
        if path is not None:
            with suppress(FileNotFoundError), understood(path, _LOST):
                run, number, attempt, names = json.loads(path.read_bytes())
                self._last = str(run), int(number), int(attempt), tuple(map(str, names))

    def begin(self, run: str, charged: bool) -> None:
        """Take part in a run. charged: it was charged for before.

        From its first charge on there is a file that names the run. Raises DataError: there is
        none, so that nobody knows which of its sums were opened.
        """
        found = None if self._last is None else self._last[0]
        if found == run:
            return
        if charged:
            there = "is missing" if found is None else f"is of run {found!r}"
            raise DataError(f"{self._path} {there}, and this site has released in {run!r}: {_LOST}")
        # Before every round that there may be: a run may open with round 0.
        self._keep((run, -1, 0, ()))

    def make_room(self, task: Task, sites: Iterable[str]) -> None:
        """Take room on the disk for a sum of a task over any of these sites, kept until `allows`.

        Raises FedpactError: there is none.
        """
        if self._path is None:
            return
        asked = task.run, task.round, task.attempt, sorted(sites)
        try:
            make_room(len(json.dumps(asked).encode()), self._path)
        except OSError as error:
            raise FedpactError(
                f"round {task.round} needs room on the disk for {self._path} ({error.strerror}): "
                "nothing is charged; make room, and the site takes part again"
            ) from error

    def allows(self, task: Task, survivors: tuple[str, ...]) -> bool:
        """Whether a sum over these sites may be opened, and remember that this one agreed to it.

        Of a round and attempt that is one list only; and none of an earlier one.
        """
        asked = task.run, task.round, task.attempt, survivors
        last = self._last
        again = last is not None and last[0] == task.run and asked[1:3] <= last[1:3]
        if again and last != asked:
            return False
        if last != asked:
            self._keep(asked)
        return True

    def _keep(self, last: _Opened) -> None:
        if self._path is not None:
            write_whole(self._path, json.dumps(last).encode())
        self._last = last


@dataclass
class _Session:
    """What a site knows of a session. answered: step -> the question's hash, and the answer."""

    place: Place
    secrets: Secrets
    adverts: dict[str, Advert] = field(default_factory=dict[str, Advert])
    held: dict[str, bytes] = field(default_factory=dict[str, bytes])
    task: Task | None = None
    survivors: tuple[str, ...] = ()
    answered: dict[str, tuple[bytes, Step | Refusal]] = field(
        default_factory=dict[str, tuple[bytes, Step | Refusal]]
    )

    def is_next(self, step: str) -> bool:
        """Whether every question before this one was answered, and none refused."""
        done = {s for s, (_, answer) in self.answered.items() if isinstance(answer, Step)}
        return done == set(self.answered) == set(wire.STEPS[: wire.STEPS.index(step)])


class Masker:
    """See the module.

    key: the site's long-term key. peers: every site's, this one's too, as the site itself has them.
    threshold: t. opened: what lasts over sessions.
    """

    def __init__(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        peers: Mapping[str, ec.EllipticCurvePublicKey],
        threshold: int,
        coding: Coding,
        opened: Opened,
    ) -> None:
        self._name, self._key, self._peers = name, key, dict(peers)
        self._threshold, self._coding, self._opened = threshold, coding, opened
        self._session: _Session | None = None

    def begin(self, run: str, charged: bool) -> None:
        """See Opened.begin."""
        self._opened.begin(run, charged)

    def answer(self, question: Step, train: Train) -> Step | Refusal:
        """Return the answer to a question of a session; a Refusal that says why there is none.

        Its code depends on public quantities and on what was asked only: "session", "asked",
        "keys", "few", "opened", "range", or what `train` refuses with.
        """
        place, digest = wire.place_of(question), hashlib.sha256(to_bytes(question)).digest()
        if question.step == "keys" and (self._session is None or self._session.place != place):
            self._session = _Session(place, Secrets())
        session = self._session
        if session is None or session.place != place or question.step not in wire.STEPS:
            return self._refusal(place, "session")
        before = session.answered.get(question.step)
        if before is not None:
            return before[1] if before[0] == digest else self._refusal(place, "asked")
        if not session.is_next(question.step):
            return self._refusal(place, "session")
        # Whatever goes wrong, the site has dropped out of this session.
        session.answered[question.step] = digest, self._refusal(place, "session")
        try:
            given = self._answers(session, question, train)
        except SecretsDoNotFit as error:
            # Who does not fit is for the owner to know: the server is told a code.
            _log.warning("round %d: %s", place.round, error)
            given = self._refusal(place, "keys")
        except DataError:
            given = self._refusal(place, "range")
        session.answered[question.step] = digest, given
        return given

    def _answers(self, session: _Session, question: Step, train: Train) -> Step | Refusal:
        if question.step == "keys":
            advert = session.secrets.advert().signed(self._key, self._name, session.place)
            return self._step(session, question, wire.from_advert(advert))
        if question.step == "shares":
            return self._shares(session, question)
        if question.step == "masked":
            return self._masked(session, question, train)
        if question.step == "consistency":
            return self._consistency(session, question)
        return self._unmask(session, question)

    def _shares(self, session: _Session, question: Step) -> Step | Refusal:
        """Check everybody's keys, and seal for each a share of m and one of b."""
        adverts = wire.to_adverts(wire.blocks(question))
        if len(adverts) < self._threshold:
            return self._refusal(session.place, "few")
        keys.check_adverts(adverts, self._peers, session.place)
        secrets = session.secrets
        # A signature of ours over other keys of ours would be another session's.
        if replace(adverts.get(self._name, Advert(b"", b"", b"")), signature=b"") != (
            secrets.advert()
        ):
            raise SecretsDoNotFit(f"the keys of {self._name} are not those that it made")
        session.adverts = dict(sorted(adverts.items()))
        both = [
            keys.shares(secret, self._threshold, len(adverts))
            for secret in (secrets.mask_key, secrets.seed)
        ]
        sealed = dict[str, bytes]()
        for peer, of_mask, of_seed in zip(session.adverts, *both, strict=True):
            if peer == self._name:
                session.held[peer] = of_mask + of_seed
            else:
                sealed[peer] = secrets.sealed(
                    self._name, peer, adverts[peer].seal, of_mask + of_seed, session.place
                )
        return self._step(session, question, wire.under("share/", sealed))

    def _masked(self, session: _Session, question: Step, train: Train) -> Step | Refusal:
        """Keep the others' shares, train, and mask what came of it."""
        sealed = wire.blocks(question, "share/")
        if len(sealed) + 1 < self._threshold:
            return self._refusal(session.place, "few")
        for peer, block in sealed.items():
            if peer == self._name or peer not in session.adverts:
                raise SecretsDoNotFit(f"{peer} has no keys in this session")
            key = session.adverts[peer].seal
            session.held[peer] = session.secrets.opened(self._name, peer, key, block, session.place)
        task, place = wire.task_in(question), session.place
        if (task.run, task.round) != (place.run, place.round):
            return self._refusal(place, "session")
        # Where what was opened cannot be written down, nothing is opened, and the charge in vain.
        self._opened.make_room(task, session.held)
        reply = train(task)
        if isinstance(reply, Refusal):
            return reply
        session.task = task
        words = self._coding.encode(reply)
        masked = self._coding.masked(reply, words + self._mask(session, words))
        return self._step(session, question, {"reply": to_bytes(masked)})

    def _mask(self, session: _Session, words: Words) -> Words:
        """PRG(b) ± PRG(k) of each who shares a mask with us, as many words as there are."""
        mask = keys.stream(session.secrets.seed, words).copy()
        for peer in session.held:
            if peer != self._name:
                public = session.adverts[peer].mask
                add_pair(mask, session.secrets.mask_key, public, (self._name, peer), session.place)
        return mask

    def _consistency(self, session: _Session, question: Step) -> Step | Refusal:
        """Sign who is in the sum: that is on the disk first, and no other list is signed."""
        survivors = wire.to_names(wire.block(question, "survivors"))
        if len(survivors) < self._threshold:
            return self._refusal(session.place, "few")
        if self._name not in survivors or not set(survivors) <= set(session.held):
            return self._refusal(session.place, "session")
        task = session.task
        if task is None or not self._opened.allows(task, survivors):
            return self._refusal(session.place, "opened")
        session.survivors = survivors
        signature = keys.signed_list(self._key, self._name, survivors, task.attempt, session.place)
        return self._step(session, question, {"signature": signature})

    def _unmask(self, session: _Session, question: Step) -> Step | Refusal:
        """Open, of each site, one of its two shares, if t sites have signed this one's list."""
        survivors, signatures = session.survivors, wire.blocks(question, "signature/")
        if len(signatures) < self._threshold:
            return self._refusal(session.place, "few")
        attempt = session.task.attempt if session.task else 0
        for peer, signature in signatures.items():
            key = self._peers[peer] if peer in survivors else None
            if not (
                key and keys.has_signed(key, peer, survivors, attempt, session.place, signature)
            ):
                raise SecretsDoNotFit(f"{peer} has not signed that {', '.join(survivors)} are in")
        told = dict[str, bytes]()
        for peer, both in session.held.items():
            of_mask, of_seed = both[: len(both) // 2], both[len(both) // 2 :]
            if peer in survivors:
                told["seed/" + peer] = of_seed
            else:
                told["mask/" + peer] = of_mask
        return self._step(session, question, told)

    def _step(self, session: _Session, question: Step, blocks: Mapping[str, bytes]) -> Step:
        return wire.step(session.place, self._name, question.step, blocks)

    def _refusal(self, place: Place, code: str) -> Refusal:
        return Refusal(place.run, place.round, self._name, code)


def add_pair(
    total: Words, mask_key: bytes, public: bytes, pair: tuple[str, str], place: Place
) -> None:
    """Add to `total` what the first of a pair adds for the second; the second adds its negative.

    mask_key: m of one of them; public: M of the other.
    """
    own, peer = pair
    stream = keys.stream(keys.pair_seed(mask_key, public, own, peer, place), total)
    operation = np.add if own < peer else np.subtract
    operation(total, stream, out=total)
