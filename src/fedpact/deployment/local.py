"""A trial federation on this machine: starts its parties as child processes."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from fedpact.common.errors import DataError, FedpactError, TransportLost
from fedpact.common.files import private_opener, safe_name
from fedpact.deployment.federation import Federation
from fedpact.deployment.site_records import SiteSettings

_GRACE_SECONDS = 10.0
_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG
SERVER: Final = "server"


def parties(directory: Path) -> dict[str, Path]:
    """Return name -> directory of the parties of a deployment, or of a single party.

    Raises DataError: the directory is neither.
    """
    if (directory / "site.toml").exists():
        return {SiteSettings.read(directory).name: directory}
    if (directory / "server.key").exists():
        return {SERVER: directory}
    server = directory / SERVER
    if not (server / "federation.toml").exists():
        raise DataError(
            f"{directory} has no deployment: name the directory that `fedpact deploy init` wrote"
        )
    names = Federation.read(server / "federation.toml").names
    return {SERVER: server, **{name: directory / "sites" / safe_name(name) for name in names}}


class Parties:
    """Parties of a deployment as child processes, which end with the block.

    On Linux they also end with this process, however it ends.
    """

    def __init__(self, directory: Path) -> None:
        self._places = parties(directory)
        self._children = dict[str, subprocess.Popen[bytes]]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self, *names: str) -> dict[str, int]:
        """Start these parties (default: all) unless they run; return the process IDs."""
        for name in names or self._places:
            if not self.runs(name):
                self._children[name] = _spawn(name, self._places[name].resolve())
        return {name: child.pid for name, child in self._children.items() if self.runs(name)}

    def runs(self, name: str) -> bool:
        """Whether a party was started here and has not ended."""
        return name in self._children and self._children[name].poll() is None

    def exit_code(self, name: str) -> int | None:
        """The exit code of a party's process, or minus a signal's number; None while it runs."""
        return self._children[name].poll()

    def stop(self, *names: str) -> None:
        """End these parties (default: all) by SIGTERM, then by SIGKILL."""
        chosen = [child for n, child in self._children.items() if not names or n in names]
        for child in chosen:
            child.terminate()
        end = time.monotonic() + _GRACE_SECONDS
        for child in chosen:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))
            # Also its child processes, which count ε.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


_ENDS: Final = {
    0: "has ended",
    1: "has ended with code 1, a fault of fedpact: see log.txt",
    FedpactError.exit_code: "has ended with code 2: mend what its last line says, then start it "
    "again",
    TransportLost.exit_code: "has ended with code 69, as Flower's SuperLink was lost: start it "
    "again: it continues",
}


def describe_end(code: int | None) -> str:
    """Describe how a party's process ended, and what to do. code: see `Parties.exit_code`."""
    code = code or 0
    number = -code if code < 0 else code - 128
    if number not in {*signal.Signals}:
        return _ENDS.get(code, f"has ended with code {code}")
    memory = ", perhaps for want of memory (see `dmesg`)" * (number == signal.SIGKILL)
    return f"was killed by {signal.Signals(number).name}{memory}: start it again: it continues"


def last_log_lines(directory: Path, name: str) -> str:
    """Return the last line of a party's log."""
    log = parties(directory)[name] / "log.txt"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "its log is empty")


def _spawn(name: str, where: Path) -> subprocess.Popen[bytes]:
    """Start a party's process in a separate session, so that Ctrl-C does not reach it.

    A server prints its rounds where this process prints; all else goes to log.txt.
    """
    kind = "server" if name == SERVER else "site"
    with open(where / "log.txt", "ab", opener=private_opener) as log:
        return subprocess.Popen(
            [sys.executable, "-m", "fedpact", "deploy", kind, str(where)],
            env={**os.environ, "NO_COLOR": "1"},  # its log is shown elsewhere, too
            stdin=subprocess.DEVNULL,
            stdout=None if name == SERVER else log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def die_with_parent() -> None:
    """Have a child killed when its parent ends (Linux), as subprocess.Popen(preexec_fn=...)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGKILL)
