"""Which processes are ours: a number alone does not say so, as systems give numbers out again."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
# A machine that takes longer from a process to its command stands still: that is told as it is.
_EXEC_SECONDS = 10.0
_PAUSE = 0.001


@dataclass(frozen=True)
class Process:
    """A process that was started for a party.

    number: the system's. started: when, as the system tells it.
    """

    number: int
    started: str

    @staticmethod
    def of(number: int) -> "Process":
        """Return a process that was started just now, once the system tells its command.

        Whoever started it is let go on before that: to another look it would be a stranger's.
        """
        end = time.monotonic() + _EXEC_SECONDS
        while _nameless(number) and time.monotonic() < end:
            time.sleep(_PAUSE)
        return Process(number, _started(number) or "")

    def runs(self, words: Sequence[str]) -> bool:
        """Whether it still runs, and is the one whose command was started with these last words.

        A process of ours that has ended and was not waited for does not run.
        """
        with suppress(ChildProcessError):
            if os.waitpid(self.number, os.WNOHANG)[0] != 0:
                return False
        if _started(self.number) != self.started:
            return False
        return _command(self.number).endswith(" ".join(words))

    def send(self, number: signal.Signals, words: Sequence[str]) -> None:
        """Send it a signal if it runs: never to another process that has its number by now."""
        if not hasattr(os, "pidfd_open"):
            if self.runs(words):
                # There Flower's process does not die with its parent.
                (os.killpg if number == signal.SIGKILL else os.kill)(self.number, number)
            return
        with suppress(ProcessLookupError):
            # What is looked at is what the signal goes to.
            handle = os.pidfd_open(self.number)
            try:
                if self.runs(words):
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)


def _started(number: int) -> str | None:
    """Return when a process was started, None if there is none."""
    if not _BOOT.exists():
        return _asked(number, "lstart") or None
    fields = _stat(number)
    return None if fields is None else f"{_BOOT.read_text().strip()} {fields[19]}"


def _nameless(number: int) -> bool:
    """Whether a process is about to begin its command; one that has ended is not."""
    fields = _stat(number) if _BOOT.exists() else None
    return fields is not None and fields[0] not in "ZX" and not _command(number)


def _stat(number: int) -> list[str] | None:
    try:
        # The name of the program may have spaces and brackets in it: what follows has none.
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _command(number: int) -> str:
    if not _BOOT.exists():
        return _asked(number, "command")
    try:
        words = Path(f"/proc/{number}/cmdline").read_bytes().rstrip(b"\0")
    except OSError:
        return ""
    return os.fsdecode(words.replace(b"\0", b" "))


def _asked(number: int, what: str) -> str:
    done = subprocess.run(["ps", "-o", f"{what}=", "-p", str(number)], capture_output=True)
    return done.stdout.decode(errors="replace").strip()
