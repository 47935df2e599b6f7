"""Writing files atomically and privately, locks, and errors of damaged files.

Files are replaced only through `replacing`. A file is private (0600) unless its writer says that
others may read it; then the umask decides.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import re
import secrets
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from fedpact.common.errors import DataError, InputError

PRIVATE = 0o600
PARTIAL = ".partial"
"""The suffix of files that were being written when their process was killed."""

LOCK = "lock"
"""The file that is locked by the process that uses a run's folder, or a party's directory."""

_BY_UMASK = 0o666


@contextlib.contextmanager
def replacing(path: Path, *, private: bool) -> Iterator[Path]:
    """Yield a new file in the same folder, and rename it to `path` if the block succeeds.

    A reader or a restart finds the old content or the new, never a part. After the block the
    content and the name are on the disk. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    mode = PRIVATE if private else _BY_UMASK
    try:
        # The room that `make_room` has taken, if any.
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
    """Replace a file by these parts, in order; see `replacing`."""
    # Not truncated first, which would free the room that was taken.
    with replacing(path, private=private) as partial, partial.open("r+b") as file:
        file.writelines(content)
        file.truncate()


def remove_left(*paths: Path) -> None:
    """Remove partial files of killed processes; no other process may be writing these paths."""
    for path in paths:
        free_room(path)
        for one in path.parent.glob(f"{glob.escape(path.name)}.*{PARTIAL}"):
            one.unlink(missing_ok=True)


def make_room(length: int, *paths: Path) -> None:
    """Take `length` bytes on the disk for each private file that `write_whole` will write.

    They stay taken until then, or until `free_room`. Raises OSError: there is not enough; then
    nothing is taken.
    """
    try:
        for path in paths:
            with open(_room(path), "ab", opener=private_opener) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, length)
                else:  # macOS
                    file.write(bytes(max(0, length - file.tell())))
                    file.flush()
                    os.fsync(file.fileno())
    except BaseException:
        free_room(*paths)
        raise


def free_room(*paths: Path) -> None:
    """Give back what `make_room` took and `write_whole` did not use."""
    for path in paths:
        _room(path).unlink(missing_ok=True)


def _room(path: Path) -> Path:
    return path.with_name(path.name + ".room")


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private_opener(path: str, flags: int) -> int:
    """Open a file; if it is new, only its owner may read it. For open(opener=)."""
    return os.open(path, flags, PRIVATE)


@contextlib.contextmanager
def parse_errors(path: Path, advice: str) -> Iterator[None]:
    """Turn what a damaged file makes its reader raise into a DataError with advice.

    FileNotFoundError passes through, as only the reader knows whether the file must exist.
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


def read_json_table(path: Path) -> Mapping[str, Any]:
    """Return a JSON file's table; an empty one if it is missing or incomplete."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return cast(Mapping[str, Any], found) if isinstance(found, dict) else {}


@contextlib.contextmanager
def only_one(path: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock inside the block; it is released however the process ends.

    what: "directory has a server already", for the error. wait: until the lock is free.
    Raises InputError: it is held, or belongs to another account.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        opened = private_opener(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except PermissionError:
        raise InputError(
            f"{path} cannot be opened by this account: use the one that owns the files in "
            f"{path.parent}"
        ) from None
    with open(opened, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise InputError(
                f"{what} (it holds {path}): leave it running, or end it before starting another"
            ) from None
        yield


def check_out(out: Path) -> Path:
    """Return an output folder. Raises InputError: it is not a folder, or cannot be created."""
    places = (out.absolute(), *out.absolute().parents)
    found = next(place for place in places if os.path.lexists(place))
    try:
        str(out).encode()
    except UnicodeEncodeError:
        raise InputError(
            f"out is {str(out)!r}, which is not valid UTF-8, as a run's files are: name another "
            "folder"
        ) from None
    if not (found.is_dir() and os.access(found, os.W_OK | os.X_OK)):
        why = "is not writable" if found.is_dir() else "is not a folder"
        raise InputError(f"out is {str(out)!r}, but {found} {why}: name a folder that can be made")
    return out


def check_file(option: str, out: Path, *endings: str) -> None:
    """Raise InputError if a file cannot be written, before its content is computed.

    option: the command's option that names it. endings: allowed suffixes, if they matter.
    """
    if endings and out.suffix.lower() not in endings:
        raise InputError(
            f"{option} is {str(out)!r}: expected a name that ends in {' or '.join(endings)}"
        )
    if out.is_dir():
        raise InputError(f"{option} is {str(out)!r}, which is a folder: name a file in it")
    check_out(out.parent)


# Latin letters that are not a letter with an accent.
_LETTERS: Final = str.maketrans(
    {"ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L"}
)

_LONGEST_NAME: Final = 100


def safe_name(name: str) -> str:
    """Return a name that is safe in file systems: Zürich is Zurich, St. Anna is St.-Anna.

    Letters that are not Latin are coded by punycode: 北京 is xn--1lq90i. A long name is cut, and
    ends in a digest of the whole.
    """
    parted = unicodedata.normalize("NFKD", name.translate(_LETTERS))
    # Marks of other letters stay: が is not か.
    joined = unicodedata.normalize("NFC", re.sub(r"(?<=[A-Za-z])[\u0300-\u036f]+", "", parted))
    kept = [c if c.isalnum() or c in "_.-" or unicodedata.combining(c) else " " for c in joined]
    plain = "-".join("".join(kept).split()).strip(".-") or "site"
    coded = plain if plain.isascii() else "xn--" + plain.encode("punycode").decode()
    if len(coded) <= _LONGEST_NAME:
        return coded
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{coded[: _LONGEST_NAME - 13]}-{digest}"
