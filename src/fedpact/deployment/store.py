"""A site's state between rounds: site.db, an SQLite file that changes by transactions.

    reply, evaluation           the last replies with their tasks, to be repeated if asked again
    RUN/memory                  the algorithm's memory for a run (client.Client)
    opened                      the sites of the last sum that this site helped to open, with secure
                                aggregation; created at the first opening, then required
    RUN/progress, RUN/figures   counts of answers, and exact sums after each round, for the owner
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
    """A single entry of a store; see client.MemoryStore."""

    store: Store
    name: str

    @staticmethod
    def of_memory(store: Store, run: str) -> "StoreSlot":
        """Return that of the algorithm's memory for a run, which no other run may use."""
        return StoreSlot(store, f"{run}/memory")

    @property
    def path(self) -> Path:
        """The store's file."""
        return self.store.path

    def read(self) -> bytes | None:
        """Return the content; None if there is none."""
        return self.store.read(self.name)

    def write(self, *content: bytes | memoryview) -> None:
        """Replace the content by these parts, using the space reserved for it."""
        with self.store.transaction():
            self.store.remove(f"room for {self.name}")
            self.store.write(self.name, *content)

    def make_room(self, length: int) -> None:
        """Reserve space in the file until the next `write`. Raises OSError."""
        self.store.write(f"room for {self.name}", bytes(length))


@contextmanager
def existing_store(directory: Path) -> Generator[Store | None]:
    """Open a site's store for another process of its owner; None if there is none.

    Raises DataError: damaged, or not readable by this account or now.
    """
    path = directory / STORE_FILE
    if not path.exists():
        yield None
        return
    try:
        with closing(Store(directory)) as store:
            yield store
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): use the account that the site runs as, or "
            "try again when nobody writes the file"
        ) from None


def read_store(directory: Path, name: str) -> bytes | None:
    """Return a site's stored content, even while it runs; None if there is none."""
    with existing_store(directory) as store:
        return store and store.read(name)


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
        if kept is None:
            return
        with parse_errors(store.path, "restore it from a backup made after the last release"):
            head, _, self._block = kept.partition(b"\n")
            run, number, attempt, digest = json.loads(head.decode("ascii"))
            reply = from_bytes(self._block)
            self._key = str(run), int(number), int(attempt), str(digest)
            if [run, number, attempt, digest] != [*self._key] or not isinstance(reply, Reply):
                raise ValueError(f"a {type(reply).__name__} to {self._key}")
            self.ledger = reply.ledger_length, reply.ledger_head

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


@contextmanager
def room(task: Task, store: Path, witness: Path, ledger: Path) -> Generator[None]:
    """Reserve disk space for everything that a task's answer writes to these files.

    Space for the ledger's next lines is only tested. Raises FedpactError: not enough space.
    """
    # The reply, the method's memory of two rounds, and SQLite's journal of both.
    length = 6 * _TIMES * task.wire_bytes + _SPARE
    try:
        make_room(length, store)
        make_room(_SPARE, witness, ledger)
    except OSError as error:
        free_room(store)
        raise FedpactError(
            f"round {task.round} needs {length} bytes on the disk of {store}, and {_SPARE} on "
            f"that of {ledger} ({error.strerror}): nothing is charged; free this space, and the "
            "site takes part again"
        ) from error
    free_room(ledger)
    try:
        yield
    finally:
        free_room(store, witness)


def _key(task: Task) -> _Question:
    return task.run, task.round, task.attempt, task.digest
