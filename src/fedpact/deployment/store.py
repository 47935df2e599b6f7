"""What a site keeps of its rounds, in one file: site.db, SQLite, changed by transactions.

reply, evaluation   its last replies, each with the question, for when it is asked again
RUN/committed, RUN/pending  what its algorithm remembers of a run (RunMemory, client.Client)
opened              of which sites it has helped to open a sum last, under secure aggregation; made
                    at the first opening, and missed after the first charge
progress            what it has answered, and
figures             exact sums after each round: for its owner, no message has any of it

A process that is killed leaves what was there before a transaction, or after it. The ledger is a
file of its own, which others read (privacy.ledger), and is written first: what a reply costs is
charged before the reply is there.
"""

import json
import os
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedpact.common.errors import DataError, FedpactError
from fedpact.common.files import PRIVATE, free_room, make_room, parse_errors
from fedpact.common.messages import Reply, Task, from_bytes

STORE_FILE: Final = "site.db"
# Another process of the site's owner may read meanwhile.
_WAIT_SECONDS = 30.0
# SQLite allows no value above 10^9 bytes: a longer content lies in several rows.
_PIECE = 2**24
_DAMAGED = (
    "it is damaged, or not what fedpact wrote there. Put it back from a backup of after the last "
    "release, or move it away: then a round that was answered and is asked again is charged again, "
    "and never beyond the budget, what the algorithm remembers at this site begins anew, and in a "
    "run with secure aggregation that has charged it the site takes part no more"
)


class Store:
    """A site's store in its directory, made if it is not there.

    Each method raises DataError: the file is damaged; OSError: no room, or no right.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / STORE_FILE
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, PRIVATE))
        with self._told():
            self._db = sqlite3.connect(self.path, _WAIT_SECONDS, isolation_level=None)
            # A commit is on the disk when it returns, and its journal keeps the room it took.
            self._db.execute("PRAGMA synchronous = EXTRA")
            self._db.execute("PRAGMA journal_mode = PERSIST")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS kept "
                "(name TEXT, part INTEGER, value BLOB, PRIMARY KEY (name, part))"
            )

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def read(self, name: str) -> bytes | None:
        """Return what is kept under a name, None if nothing is."""
        with self._told():
            ask = "SELECT value FROM kept WHERE name = ? ORDER BY part"
            rows = self._db.execute(ask, (name,)).fetchall()
        return b"".join(value for (value,) in rows) if rows else None

    def write(self, name: str, *content: bytes | memoryview) -> None:
        """Keep these parts under a name; durable once the transaction around it is over."""
        free_room(self.path)
        whole = memoryview(b"".join(content))
        with self.transaction(), self._told():
            self._db.execute("DELETE FROM kept WHERE name = ?", (name,))
            for part, at in enumerate(range(0, len(whole) or 1, _PIECE)):
                row = name, part, whole[at : at + _PIECE]
                self._db.execute("INSERT INTO kept VALUES (?, ?, ?)", row)

    def remove(self, name: str) -> None:
        """Keep nothing under a name."""
        with self._told():
            self._db.execute("DELETE FROM kept WHERE name = ?", (name,))

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Write all that the block does, or nothing if it raises or its process is killed.

        A transaction within another one is a part of that.
        """
        if self._db.in_transaction:
            yield
            return
        with self._told():
            self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            with self._told():
                self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def make_room(self, length: int) -> None:
        """Hold room on the disk until the next `write`, or `free_room`."""
        make_room(length, self.path)

    def free_room(self) -> None:
        """Give back what `make_room` took."""
        free_room(self.path)

    @contextmanager
    def _told(self) -> Generator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise OSError(None, str(error), str(self.path)) from error
        except sqlite3.DatabaseError as error:
            raise DataError(f"{self.path} cannot be understood ({error}): {_DAMAGED}") from None


@dataclass(frozen=True)
class StoreSlot:
    """One content of a store, for who keeps no other."""

    store: Store
    name: str

    @property
    def path(self) -> Path:
        """The file that it lies in."""
        return self.store.path

    def read(self) -> bytes | None:
        """Return the content, None if there is none."""
        return self.store.read(self.name)

    def write(self, content: bytes) -> None:
        """Replace the content; what room there is for it is used."""
        with self.store.transaction():
            self.store.remove(f"room for {self.name}")
            self.store.write(self.name, content)

    def make_room(self, length: int) -> None:
        """Hold room in the file until the next `write`. Raises OSError."""
        self.store.write(f"room for {self.name}", bytes(length))


@dataclass(frozen=True)
class RunMemory:
    """What the algorithm remembers at this site of one run (client.MemoryStore).

    A directory may take part in one run after the other: a control variate or a model of its own
    from an earlier one is nothing that the next may start with.
    """

    store: Store
    run: str

    @property
    def path(self) -> Path:
        """The file that it lies in."""
        return self.store.path

    def read(self, name: str) -> bytes | None:
        """Return what is kept of this run under a name, None if nothing is."""
        return self.store.read(f"{self.run}/{name}")

    def write(self, name: str, *content: bytes | memoryview) -> None:
        """Keep these parts under a name."""
        self.store.write(f"{self.run}/{name}", *content)


def read_store(directory: Path, name: str) -> bytes | None:
    """Return what a site keeps under a name, also while it runs; None if nothing is."""
    if not (directory / STORE_FILE).exists():
        return None
    with closing(Store(directory)) as store:
        return store.read(name)


_Question = tuple[str, int, int, str]
# A reply, or what a method remembers, is at most three times as long as its task in every method.
_TIMES: Final = 4
_SPARE: Final = 1 << 16


class LastReply:
    """The last reply and the question that it answers, kept before it is sent.

    It is kept as one line of JSON, [run, round, attempt, digest of the task], then the reply as it
    was encoded. The reply names the ledger it was made with (Reply.ledger_length, ledger_head): a
    ledger that does not go on from there is not the one that paid for it.
    name: in the store. ledger: length and head of the ledger it was made with; (0, "") where there
    is no reply. Raises DataError: something that this site did not write.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._key: _Question = "", 0, 0, ""
        self._block = b""
        self.ledger = 0, ""
        kept = store.read(name)
        if kept is not None:
            self._key, self._block, self.ledger = _parse_reply(store.path, kept)

    def answer_to(self, task: Task) -> bytes | None:
        """Return the stored reply, if it answers this task."""
        return self._block if self._key == _key(task) else None

    def is_newer_than(self, task: Task) -> bool:
        """Whether it answers a later round or attempt of the task's run, or this one."""
        run, number, attempt, _ = self._key
        return run == task.run and (number, attempt) >= (task.round, task.attempt)

    def keep(self, task: Task, block: bytes) -> None:
        """Store the encoded reply to a task."""
        self._store.write(self._name, json.dumps(_key(task)).encode() + b"\n", block)

    def note_kept(self, task: Task, block: bytes) -> None:
        """Answer with a stored reply from now on: it is on the disk."""
        self._key, self._block = _key(task), block


@contextmanager
def room(task: Task, store: Store, *paths: Path) -> Generator[None]:
    """Hold room on the disk for what a task's answer will write to a store and these files.

    The last path is the ledger's: its next lines cannot be written ahead, but there is to be room
    for them. Raises FedpactError: there is none.
    """
    *replaced, ledger = paths
    probe = ledger.with_name(ledger.name + ".room")
    # A reply, what the method remembers, and what SQLite keeps of both until they are committed.
    length = 3 * _TIMES * task.wire_bytes + _SPARE
    try:
        store.make_room(length)
        make_room(_SPARE, *replaced, probe)
    except OSError as error:
        store.free_room()
        raise FedpactError(
            f"round {task.round} needs {length} bytes on the disk beside {store.path}, and {_SPARE}"
            f" beside {ledger} ({error.strerror}): nothing is charged; make room, and the site "
            "takes part again"
        ) from error
    free_room(probe)
    try:
        yield
    finally:
        store.free_room()
        free_room(*replaced)


def _parse_reply(path: Path, kept: bytes) -> tuple[_Question, bytes, tuple[int, str]]:
    with parse_errors(path, "put it back from a backup of after the last release"):
        head, _, block = kept.partition(b"\n")
        run, number, attempt, digest = json.loads(head.decode("ascii"))
        reply = from_bytes(block)
        key = str(run), int(number), int(attempt), str(digest)
        if [run, number, attempt, digest] != [*key] or not isinstance(reply, Reply):
            raise ValueError(f"a {type(reply).__name__} to {key}")
    return key, block, (reply.ledger_length, reply.ledger_head)


def _key(task: Task) -> _Question:
    return task.run, task.round, task.attempt, task.digest
