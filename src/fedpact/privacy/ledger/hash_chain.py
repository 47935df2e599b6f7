"""An append-only file of JSON lines, each with the hash of the previous one.

`append` returns when its line is on the disk, unless it is asked not to wait. One process at a time
has the file open (flock). An altered or removed line breaks the chain, and the file does not open.
A crash can leave an unreadable last line, and each further crash before that one was counted can
leave another. These lines stay in the file, and the next line includes their hash; the caller that
opens the file must decide how to count them.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

from fedpact.common.errors import LedgerError
from fedpact.common.files import private_opener, sync

LedgerEntry = dict[str, Any]

# json.dumps makes one of these on every call that does not take its defaults.
_SORTED: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def _digest(entry: LedgerEntry) -> str:
    """The hash of an entry, from the rest of it."""
    rest = {key: value for key, value in entry.items() if key != "hash"}
    return hashlib.sha256(_SORTED(rest).encode()).hexdigest()


def _encode(entry: LedgerEntry) -> bytes:
    return json.dumps(entry).encode()


def _decode(line: bytes) -> LedgerEntry | None:
    """Return a line's JSON object, {} for other JSON, None for invalid JSON."""
    try:
        entry = json.loads(line.decode("ascii"))
    except (ValueError, RecursionError):
        return None
    return cast(LedgerEntry, entry) if isinstance(entry, dict) else {}


def _hash_of(torn: Sequence[bytes]) -> str | None:
    return hashlib.sha256(b"\n".join(torn)).hexdigest() if torn else None


def _parse(path: Path, content: bytes) -> tuple[list[LedgerEntry], list[bytes]]:
    """Return the entries, and unreadable last lines. Raises LedgerError: a broken link."""
    entries: list[LedgerEntry] = []
    torn: list[bytes] = []
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for place, line in enumerate(lines):
        entry = _decode(line)
        if entry is None and entries:
            torn.append(line)
            continue
        intact = (
            entry is not None
            and entry.get("number") == len(entries)
            and entry.get("previous") == (entries[-1]["hash"] if entries else "")
            and entry.get("torn") == _hash_of(torn)
            and entry.get("hash") == _digest(entry)
            and line == _encode(entry)
        )
        if entry is None or not intact:
            raise LedgerError(
                f"ledger {path}: line {place + 1} is unreadable or was altered. "
                "The site can no longer prove what it spent: restore the file from a backup that "
                "is not older than its last release, or retire this data set's budget"
            )
        entries.append(entry)
        torn = []
    return entries, torn


def read_entries(path: Path) -> list[LedgerEntry]:
    """Return a ledger's entries after checking the whole chain; the file may be in use.

    Unreadable last lines are omitted: opening the ledger counts them (see `read_all`). Raises
    LedgerError: a missing file, or a line that is not an entry or out of order.
    """
    return read_all(path)[0]


def read_all(path: Path) -> tuple[list[LedgerEntry], bool]:
    """Return the entries, and whether an unreadable line follows. Raises LedgerError."""
    try:
        entries, torn = _parse(path, path.read_bytes())
    except OSError as error:
        raise LedgerError(f"ledger {path} cannot be read: {error.strerror}") from error
    return entries, bool(torn)


class Chained:
    """Entries of a chain, identified by their hashes."""

    def __init__(self, entries: Sequence[LedgerEntry]) -> None:
        self._heads: list[str] = ["", *(entry["hash"] for entry in entries)]

    @property
    def head(self) -> str:
        """The last entry's hash, "" without one."""
        return self._heads[-1]

    @property
    def length(self) -> int:
        """The number of entries."""
        return len(self._heads) - 1

    def holds(self, length: int, head: str) -> bool:
        """Whether these entries continue a chain of `length` entries that ended with `head`."""
        return 0 <= length <= self.length and self._heads[length] == head


class HashChain(Chained):
    """The open file. entries: those when it was opened. torn: unreadable last lines.

    head: hash of the last entry, "" if none. length: number of entries. Raises LedgerError: a
    broken chain, a file in use elsewhere, or one that cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            _make_directory(path.parent)
            self._file = open(path, "a+b", buffering=0, opener=private_opener)  # noqa: SIM115
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            content = self._locked_content()
            self.entries, self.torn = _parse(path, content)
        except BaseException:
            self._file.close()
            raise
        found = os.fstat(self._file.fileno())
        self._place = found.st_dev, found.st_ino
        self._size = len(content)
        self._unfinished = not content.endswith(b"\n") and bool(content)
        self._broken = self._waiting = False
        super().__init__(self.entries)

    def close(self) -> None:
        """Flush and close the file, which releases the lock."""
        try:
            if self._waiting and not self._file.closed:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def append(self, body: LedgerEntry, *, wait: bool = True) -> LedgerEntry:
        """Write one entry to the disk and return it; if that fails, the file is unchanged.

        wait: for the disk. Without it, the entry survives the process, but perhaps not the machine.
        Raises LedgerError: the disk is full, or another program changed the file.
        """
        self._check()
        entry = {"number": self.length, **body, "time": round(time.time(), 3)}
        entry["previous"] = self.head
        if self.torn:
            entry["torn"] = _hash_of(self.torn)
        entry["hash"] = _digest(entry)
        line = (b"\n" if self._unfinished else b"") + _encode(entry) + b"\n"
        try:
            self._write(line, wait)
        except OSError as error:
            self._undo()
            raise LedgerError(
                f"ledger {self.path} cannot be written ({error.strerror}): nothing was released "
                "for this entry; make room on the disk, then resume the run"
            ) from error
        self._size += len(line)
        self._unfinished, self.torn = False, []
        self._heads.append(entry["hash"])
        return entry

    def _locked_content(self) -> bytes:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LedgerError(
                f"ledger {self.path} is open elsewhere: one run at a time may spend from it; wait "
                "until the other one ends, or stop it"
            ) from error
        except OSError as error:
            raise _unusable(self.path, error) from error
        try:
            # A killed process's line may not be on the disk yet: make it durable before using it.
            os.fsync(self._file.fileno())
            sync(self.path.parent)
            self._file.seek(0)
            return self._file.readall()
        except OSError as error:
            raise _unusable(self.path, error) from error

    def _check(self) -> None:
        """Raise LedgerError unless the file at `path` is the open one, unchanged."""
        if self._file.closed or self._broken:
            state = "closed" if self._file.closed else "in doubt after a failed write"
            raise LedgerError(f"ledger {self.path} is {state}: open it again")
        try:
            found = os.stat(self.path)
            # An open file's inode number is not reused.
            same = (found.st_dev, found.st_ino, found.st_size) == (*self._place, self._size)
        except OSError:
            same = False
        if not same:
            raise LedgerError(
                f"ledger {self.path} was changed, moved or replaced while this process had it "
                "open: nothing more is released; find out by whom, and open it again"
            )

    def _write(self, line: bytes, wait: bool) -> None:
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]
        if wait:
            os.fsync(self._file.fileno())
        self._waiting = not wait

    def _undo(self) -> None:
        self._broken = True
        with contextlib.suppress(OSError):
            os.ftruncate(self._file.fileno(), self._size)
            os.fsync(self._file.fileno())
            self._broken = False


def _unusable(path: Path, error: OSError) -> LedgerError:
    return LedgerError(
        f"ledger {path} cannot be used ({error.strerror}): expected a file on a disk with room and "
        "locks that this process may write; nothing is released without one"
    )


def _make_directory(directory: Path) -> None:
    new = [d for d in (directory, *directory.parents) if not d.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for made in new:
        sync(made.parent)
