"""Checks that a party's process runs and can be reached.

A supervisor asks every half minute, on the machine on which the party computes. So this module
reads a few lines of TOML itself, and imports neither torch nor Flower.
"""

import fcntl
import socket
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Final

from fedpact.common.errors import DataError
from fedpact.common.files import LOCK

NODE: Final = "flower/node"
"""In a site's directory: the number of its node, touched while it is connected to its server."""
_SECONDS: Final = 5.0
_FRESH_SECONDS: Final = 60.0


def is_held(directory: Path) -> bool:
    """Whether a party's process runs in its directory."""
    if not (directory / LOCK).exists():
        return False
    with suppress(OSError), open(directory / LOCK, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def find_outage(directory: Path) -> str:
    """Return why a party is not working on this machine; "" if it is.

    A server listens at its port, a site with a `socket` at that. Any other site touches its file
    NODE while the server confirms the connection; a site that waits for the server is healthy but
    not working. Raises DataError: not a party's directory.
    """
    place = _place(directory)
    if not is_held(directory):
        return f"no process runs in {directory}"
    try:
        if place is None:
            age = time.time() - (directory / NODE).stat().st_mtime
            # A time in the future says nothing: the clock was set back.
            if not abs(age) < _FRESH_SECONDS:
                return f"a process runs in {directory}, and is not connected to the server"
        elif isinstance(place, Path):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(place))
        else:
            socket.create_connection(("127.0.0.1", place), timeout=_SECONDS).close()
    except OSError as error:
        where = f"{'port' if isinstance(place, int) else 'file'} {place or NODE}"
        return f"a process runs in {directory}, and {where} does not answer ({error})"
    return ""


def _place(directory: Path) -> int | Path | None:
    """Return the port or Unix socket at which a party listens; None for none."""
    site = directory / "site.toml"
    path = site if site.exists() else directory / "federation.toml"
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        if path == site:
            return directory / told["socket"] if "socket" in told else None
        return int(told["address"].rsplit(":", 1)[1])
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise DataError(
            f"{path} says no port ({type(error).__name__}: {error}): name the directory of one "
            "party, as `fedpact deploy init` wrote it"
        ) from None
