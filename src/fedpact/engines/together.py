"""Several files that an extension changes together: all of them or none, whatever cuts it off.

Before the first is changed, each folder gets a private note of what its own files hold. While the
first folder's note is there nothing was changed, as far as anybody is told: `rollback` undoes it
all. A note is of files of its own folder alone, which have fixed names, and is obeyed only if the
account that reads it wrote it: no policy, ledger or key, and no other folder, follows from one.
"""

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from fedpact.errors import DataError
from fedpact.files import only_one, parse_errors, sync, write_whole
from fedpact.folder import ATTEMPTS, EARLIER, FIRST_PLAN, LOCK, RUN

BACKUP_FILE: Final = ".fedpact-before.json"
"""What the files of a folder held that are being changed together."""

_NAMES: Final = (
    *("plan.json", "federation.toml", EARLIER, FIRST_PLAN),
    *("environment.json", "privacy.json", "summary.json", ATTEMPTS),
)
_KIND: Final = "what these files held before they are changed together"


@contextlib.contextmanager
def exclusive(*places: Path, wait: bool = False) -> Iterator[None]:
    """Hold run folders or parties' directories for the block, after `rollback`.

    Whoever runs, resumes or extends one holds it. wait: until nobody else does. A folder that is
    made for its lock goes again if the block leaves nothing in it. Raises InputError: it is held.
    """
    roots = _roots(places)
    new = [each for root in roots for each in (root, *root.parents) if not each.exists()]
    with _locked(roots, wait):
        rollback(*places)
        try:
            yield
        finally:
            for each in new:
                _remove_empty(each)


def recover(*places: Path) -> None:
    """Undo a change that was cut off, for whoever is to read the files.

    Raises InputError: it is going on. DataError: see `rollback`.
    """
    # No lock, and no write, where there is nothing to undo: a reader may read only.
    noted = [root for root in _roots(places) if _has_note(root)]
    if noted:
        with _locked(noted, wait=False):
            rollback(*places)


def keep_before(*places: Path) -> None:
    """Write down what the files hold, in each folder, as they are to be changed together.

    Until `commit` they are not: `rollback` makes them what they were, also after a crash.
    """
    roots = _roots(places)
    for root in roots:
        files = {name: _text(root / name) for name in _NAMES}
        note = {"fedpact": _KIND, "folders": len(roots), "files": files}
        write_whole(root / BACKUP_FILE, json.dumps(note).encode())


def rollback(*places: Path) -> None:
    """Undo a change of several files that was not settled; nothing where there is none.

    Raises DataError: a note is none that this account wrote, or is of other folders, too.
    """
    roots = _roots(places)
    notes = {root: note for root in roots if (note := _note(root)) is not None}
    for root, note in notes.items():
        if note["folders"] > len(roots):
            raise DataError(
                f"{root} was being extended together with other folders when that was cut off "
                f"(its {BACKUP_FILE}): `fedpact deploy up DIRECTORY` or `fedpact extend`, with the "
                "directory that was extended, makes all of them what they were, or what they were "
                "to be; then this one can be used"
            )
    undone = notes.get(roots[0], {"folders": 1})["folders"] > 1
    # The first one last: without its note all have been changed.
    for root in reversed(notes):
        if undone or notes[root]["folders"] == 1:
            _write_back(root, notes[root]["files"])
        _drop(root)


def commit(*places: Path) -> None:
    """Say that all files were changed together."""
    for root in _roots(places):
        _drop(root)


def _roots(places: Iterable[Path]) -> list[Path]:
    """Return the folders of which files are changed: of a server's directory its run's, too."""
    with_run = ((p, p / RUN) if (p / "server.key").exists() else (p,) for p in places)
    return [root for roots in with_run for root in roots]


@contextlib.contextmanager
def _locked(roots: Iterable[Path], wait: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for root in roots:
            server = (root / "server.key").exists()
            told = "has a server already, or is being extended" if server else "is in use already"
            stack.enter_context(only_one(root / LOCK, f"{root} {told}", wait=wait))
        yield


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
        folder.rmdir()


def _has_note(root: Path) -> bool:
    return os.path.lexists(root / BACKUP_FILE)


def _text(path: Path) -> str | None:
    return path.read_text("utf-8") if path.exists() else None


def _note(root: Path) -> dict[str, Any] | None:
    """Return a folder's note, None without one. Raises DataError: see `rollback`."""
    path = root / BACKUP_FILE
    advice = "see who put it there and compare the folder with a backup, then remove it"
    with contextlib.suppress(FileNotFoundError), parse_errors(path, advice):
        with open(path, "rb", opener=_unfollowed) as file:
            found = os.fstat(file.fileno())
            private = stat.S_ISREG(found.st_mode) and not found.st_mode & 0o077
            if not private or found.st_uid != os.geteuid():
                raise ValueError("it is no private file of the account that this runs under")
            note = json.load(file)
        if note["fedpact"] != _KIND or not isinstance(note["folders"], int):
            raise ValueError("it is of another kind")
        for name, text in note["files"].items():
            if name not in _NAMES or not (text is None or isinstance(text, str)):
                raise ValueError(f"{name!r} is no text file that is changed so")
        return note
    return None


def _unfollowed(path: str, flags: int) -> int:
    # Not blocking: of a pipe nobody writes into.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _write_back(root: Path, files: Mapping[str, str | None]) -> None:
    for name, text in files.items():
        path = root / name
        if text is None:
            path.unlink(missing_ok=True)
        elif not path.exists() or path.read_bytes() != text.encode():
            private = path.exists() and not path.stat().st_mode & 0o077
            write_whole(path, text.encode(), private=private)


def _drop(root: Path) -> None:
    (root / BACKUP_FILE).unlink(missing_ok=True)
    sync(root)
