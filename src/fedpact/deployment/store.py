"""A site's state between rounds: site.db, an SQLite file that changes by transactions.

    reply, evaluation           the last replies with their tasks, to be repeated if asked again
    RUN/memory                  the algorithm's memory for a run (RunMemory, client.Client)
    opened                      the sites of the last sum that this site helped to open, with secure
                                aggregation; created at the first opening, then required
    progress, figures           counts of answers, and exact sums after each round, for the owner
                                alone: no message contains them

A killed process leaves the state before or after a transaction. The ledger is a separate file that
auditors read (privacy.ledger), and is written first: a reply is charged before it exists.
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
# SQLite allows at most 10^9 bytes per value: longer content is split into several rows.
_PIECE = 2**24
_DAMAGED = (
    "it is damaged, or was not written by fedpact. Restore it from a backup made after the last "
    "release, or move it away. Without it, a repeated task is charged again (never beyond the "
    "budget), the algorithm's memory at this site is lost, and the site can no longer take part "
    "in a run with secure aggregation that has charged it"
)


class Store:
    """A site's store in its directory, created if missing.

    Methods raise DataError: the file is damaged, or a folder; OSError: no space, or no permission.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / STORE_FILE
        if self.path.is_dir():
            raise DataError(f"{self.path} cannot be understood (it is a folder): {_DAMAGED}")
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, PRIVATE))
        with self._errors():
            self._db = sqlite3.connect(self.path, timeout=_WAIT_SECONDS, isolation_level=None)
            # A commit returns when it is on the disk, and its journal keeps its space.
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
        """Return the content stored under a name; None if there is none."""
        with self._errors():
            ask = "SELECT value FROM kept WHERE name = ? ORDER BY part"
            rows = self._db.execute(ask, (name,)).fetchall()
        return b"".join(value for (value,) in rows) if rows else None

    def write(self, name: str, *content: bytes | memoryview) -> None:
        """Store these parts under a name; durable after the surrounding transaction."""
        free_room(self.path)
        whole = memoryview(b"".join(content))
        with self.transaction(), self._errors():
            self._db.execute("DELETE FROM kept WHERE name = ?", (name,))
            for part, at in enumerate(range(0, len(whole) or 1, _PIECE)):
                row = name, part, whole[at : at + _PIECE]
                self._db.execute("INSERT INTO kept VALUES (?, ?, ?)", row)

    def remove(self, name: str) -> None:
        """Delete the content of a name."""
        with self._errors():
            self._db.execute("DELETE FROM kept WHERE name = ?", (name,))

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Write everything in the block, or nothing if it raises or its process is killed.

        A nested transaction is part of the outer one.
        """
        if self._db.in_transaction:
            yield
            return
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            with self._errors():
                self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def make_room(self, length: int) -> None:
        """Reserve space on the disk until the next `write` or `free_room`."""
        make_room(length, self.path)

    def free_room(self) -> None:
        """Release the space reserved by `make_room`."""
        free_room(self.path)

    @contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise OSError(None, str(error), str(self.path)) from error
        except sqlite3.DatabaseError as error:
            raise DataError(f"{self.path} cannot be understood ({error}): {_DAMAGED}") from None


@dataclass(frozen=True)
class StoreSlot:
    """A single entry of a store."""

    store: Store
    name: str

    @property
    def path(self) -> Path:
        """The store's file."""
        return self.store.path

    def read(self) -> bytes | None:
        """Return the content; None if there is none."""
        return self.store.read(self.name)

    def write(self, content: bytes) -> None:
        """Replace the content, using the space reserved for it."""
        with self.store.transaction():
            self.store.remove(f"room for {self.name}")
            self.store.write(self.name, content)

    def make_room(self, length: int) -> None:
        """Reserve space in the file until the next `write`. Raises OSError."""
        self.store.write(f"room for {self.name}", bytes(length))


@dataclass(frozen=True)
class RunMemory:
    """The algorithm's memory at this site for one run (client.MemoryStore).

    A directory may take part in several runs, and a control variate or local model of one must not
    be used by the next.
    """

    store: Store
    run: str

    @property
    def path(self) -> Path:
        """The store's file."""
        return self.store.path

    def read(self) -> bytes | None:
        """Return this run's content; None if there is none."""
        return self.store.read(f"{self.run}/memory")

    def write(self, *content: bytes | memoryview) -> None:
        """Store these parts, joined."""
        self.store.write(f"{self.run}/memory", *content)


def read_store(directory: Path, name: str) -> bytes | None:
    """Return a site's stored content, even while it runs; None if there is none.

    Raises DataError: damaged, or not readable by this account or now.
    """
    path = directory / STORE_FILE
    if not path.exists():
        return None
    try:
        with closing(Store(directory)) as store:
            return store.read(name)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): use the account that the site runs as, or "
            "try again when nobody writes the file"
        ) from None


def read_paid(directory: Path, name: str) -> tuple[int, str]:
    """Return length and head of the ledger that a site's stored reply names, as `LastReply` does.

    name: in the store. Raises DataError, as `read_store` does.
    """
    kept = read_store(directory, name)
    return (0, "") if kept is None else _parse_reply(directory / STORE_FILE, kept)[2]


_Question = tuple[str, int, int, str]
# For every method a reply, and its memory, is at most three times as long as its task.
_TIMES: Final = 4
_SPARE: Final = 1 << 16


class LastReply:
    """The last reply with its task, stored before it is sent.

    The format is one line of JSON, [run, round, attempt, digest of the task], then the encoded
    reply. The reply names the ledger that was charged for it (Reply.ledger_length, ledger_head); a
    ledger that does not continue from there is another one. name: in the store. ledger: length and
    head of that ledger; (0, "") without a reply. Raises DataError: an invalid entry.
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
        """Whether it answers this or a later round or attempt of the task's run."""
        run, number, attempt, _ = self._key
        return run == task.run and (number, attempt) >= (task.round, task.attempt)

    def keep(self, task: Task, block: bytes) -> None:
        """Store the encoded reply to a task."""
        self._store.write(self._name, json.dumps(_key(task)).encode() + b"\n", block)

    def note_kept(self, task: Task, block: bytes) -> None:
        """Use the reply for repeated tasks, once it is on the disk."""
        self._key, self._block = _key(task), block


@contextmanager
def room(task: Task, store: Store, *paths: Path) -> Generator[None]:
    """Reserve disk space for everything that a task's answer writes to a store and these files.

    The last path is the ledger's; space for its next lines is only tested. Raises FedpactError: not
    enough space.
    """
    *replaced, ledger = paths
    probe = ledger.with_name(ledger.name + ".room")
    # The reply, the method's memory of two rounds, and SQLite's journal of both.
    length = 6 * _TIMES * task.wire_bytes + _SPARE
    try:
        store.make_room(length)
        make_room(_SPARE, *replaced, probe)
    except OSError as error:
        store.free_room()
        raise FedpactError(
            f"round {task.round} needs {length} bytes on the disk of {store.path}, and {_SPARE} on "
            f"that of {ledger} ({error.strerror}): nothing is charged; free this space, and the "
            "site takes part again"
        ) from error
    free_room(probe)
    try:
        yield
    finally:
        store.free_room()
        free_room(*replaced)


def _parse_reply(path: Path, kept: bytes) -> tuple[_Question, bytes, tuple[int, str]]:
    with parse_errors(path, "restore it from a backup made after the last release"):
        head, _, block = kept.partition(b"\n")
        run, number, attempt, digest = json.loads(head.decode("ascii"))
        reply = from_bytes(block)
        key = str(run), int(number), int(attempt), str(digest)
        if [run, number, attempt, digest] != [*key] or not isinstance(reply, Reply):
            raise ValueError(f"a {type(reply).__name__} to {key}")
    return key, block, (reply.ledger_length, reply.ledger_head)


def _key(task: Task) -> _Question:
    return task.run, task.round, task.attempt, task.digest
