"""Which processes are ours: a number alone does not say so, as systems give numbers out again."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Process:
    """A process that was started for a party.

    number: the system's. started: when, as the system tells it; "" where a version of before this
    was written down has recorded the number alone.
    """

    number: int
    started: str

    @staticmethod
    def of(number: int) -> "Process":
        """Return a process that was started just now."""
        return Process(number, _started(number) or "")

    def runs(self, words: Sequence[str]) -> bool:
        """Whether it still runs, and is the one whose command was started with these last words.

        A process of ours that has ended and was not waited for does not run.
        """
        with suppress(ChildProcessError):
            if os.waitpid(self.number, os.WNOHANG)[0] != 0:
                return False
        started = _started(self.number)
        if started is None or self.started not in ("", started):
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
    try:
        # The name of the program may have spaces and brackets in it: what follows has none.
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return f"{_BOOT.read_text().strip()} {fields[19]}"


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
