"""Files that are written whole or not at all, are their owner's, and say clearly what is wrong.

Whatever the project replaces on a disk it replaces through `replacing`. A file is private (0600)
unless whoever writes it says that others may read it; then the umask decides.
"""

import contextlib
import fcntl
import glob
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fedpact.common.errors import DataError, InputError

PRIVATE = 0o600
PARTIAL = ".partial"
"""How the names of files end that were being written when their process was killed."""

LOCK = "lock"
"""Held by the process that works on a run's folder, or a party's directory."""

_BY_UMASK = 0o666


@contextlib.contextmanager
def replacing(path: Path, *, private: bool) -> Iterator[Path]:
    """Give a new file beside `path`, and put it in its place if the block ends well.

    A reader or a restart finds the old content or the new, never half, whoever else writes it.
    After the block the new content is on the disk, and so is its name. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    mode = PRIVATE if private else _BY_UMASK
    try:
        # The room that `make_room` took, where it did.
        _room(path).rename(partial)
    except FileNotFoundError:
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield partial
        sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def write_whole(path: Path, *content: bytes | memoryview, private: bool = True) -> None:
    """Replace a file by these parts, in their order; see `replacing`."""
    # Not cut to nothing first, which would give back the room that was taken.
    with replacing(path, private=private) as partial, partial.open("r+b") as file:
        file.writelines(content)
        file.truncate()


def remove_left(*paths: Path) -> None:
    """Remove what processes that were killed left beside files that nobody else writes now."""
    for path in paths:
        free_room(path)
        for one in path.parent.glob(f"{glob.escape(path.name)}.*{PARTIAL}"):
            one.unlink(missing_ok=True)


def make_room(length: int, *paths: Path) -> None:
    """Take room on the disk, of each private file `length` bytes, that `write_whole` is to write.

    It stays taken until then, or until `free_room`. Raises OSError: there is not enough; then none
    is taken.
    """
    try:
        for path in paths:
            with open(_room(path), "ab", opener=private_opener) as file:
                _take(file, length)
    except BaseException:
        free_room(*paths)
        raise


def free_room(*paths: Path) -> None:
    """Give back what `make_room` took and `write_whole` did not use."""
    for path in paths:
        _room(path).unlink(missing_ok=True)


def _room(path: Path) -> Path:
    return path.with_name(path.name + ".room")


def _take(file: IO[bytes], length: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, length)
    else:  # macOS
        file.write(bytes(max(0, length - file.tell())))
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Return when a file's content, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private_opener(path: str, flags: int) -> int:
    """Open a file as `open` does; if it is new, only its owner may read it. For open(opener=)."""
    return os.open(path, flags, PRIVATE)


@contextlib.contextmanager
def parse_errors(path: Path, advice: str) -> Iterator[None]:
    """Raise DataError, with what to do, for whatever a damaged file makes its reader raise.

    FileNotFoundError passes: whether there has to be a file is the reader's to know.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): use the account that may read it"
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError) as error:
        raise DataError(
            f"{path} cannot be understood ({type(error).__name__}: {error}): it is damaged, or not "
            f"what fedpact wrote there; {advice}"
        ) from None


@contextlib.contextmanager
def only_one(path: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock for the block, which vanishes with its process however that ends.

    what: "directory has a server already", as the error says it. wait: until nobody else holds it.
    Raises InputError: it is held, or another account's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        opened = private_opener(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except PermissionError:
        raise InputError(
            f"{path} cannot be opened by this account: use the one whose files those in "
            f"{path.parent} are"
        ) from None
    with open(opened, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise InputError(
                f"{what} (it holds {path}): let it be, or end it before another one is started"
            ) from None
        yield


def check_out(out: Path) -> Path:
    """Return a folder that is to be written. Raises InputError: it is no folder, or cannot be."""
    places = (out.absolute(), *out.absolute().parents)
    found = next(place for place in places if os.path.lexists(place))
    if not os.path.exists(found):
        raise InputError(
            f"out is {str(out)!r}, and {found} is a link to {os.readlink(found)}, which is not "
            "there: mount what it leads to, or name another folder"
        )
    try:
        str(out).encode()
    except UnicodeEncodeError:
        raise InputError(
            f"out is {str(out)!r}, which is no text in UTF-8, as pages and records of a run are: "
            "name another folder"
        ) from None
    if not (found.is_dir() and os.access(found, os.W_OK | os.X_OK)):
        why = "may not be written to" if found.is_dir() else "is no folder"
        raise InputError(f"out is {str(out)!r}, and {found} {why}: name a folder that can be made")
    return out


def check_file(option: str, out: Path, *endings: str) -> None:
    """Find out that a file cannot be written before what is for it is computed.

    option: what it was given as. endings: how its name may end, where that says what is written.
    Raises InputError.
    """
    if endings and out.suffix.lower() not in endings:
        raise InputError(
            f"{option} is {str(out)!r}: expected a name that ends in {' or '.join(endings)}"
        )
    if out.is_dir():
        raise InputError(f"{option} is {str(out)!r}, which is a folder: name a file in it")
    check_out(out.parent)
