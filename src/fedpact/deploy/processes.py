"""The processes of a party: Flower's part as a child, ours in the foreground."""

import ctypes
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from fedpact.engines.coordinator import Coordinator
from fedpact.engines.flower import QUIET, require_flower
from fedpact.engines.site import Site
from fedpact.messages import RoundRecord

OnRound = Callable[[RoundRecord], None]
_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG
_GRACE_SECONDS = 5.0
_LONGEST_PAUSE = 30.0
_KNOCK_SECONDS = 1.0
_log = logging.getLogger("fedpact.party")


def run_server(directory: Path, on_round: OnRound) -> dict[str, Any]:
    """Carry out, or go on with, the run of a server's directory; return its summary.

    Raises FedpactError: Flower is not installed, does not start, or the run cannot go on.
    """
    require_flower()
    from fedpact.engines.flower.server import serve

    coordinator = Coordinator.of(directory)
    _prepare(coordinator.federation.seeds == "test")
    host, port = coordinator.federation.address.rsplit(":", 1)
    local = host in ("127.0.0.1", "localhost")
    command = [
        *("flower-superlink", "--isolation", "process"),
        *("--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "tls.crt", "--ssl-keyfile", "tls.key"),
        *("--host", "127.0.0.1" if local else "0.0.0.0", "--port", port),
        *("--enable-supernode-auth", "--database", "flower/superlink.db"),
        *("--superexec-auth-secret-file", "runtime.secret"),
        "--disable-runtime-dependency-installation",
    ]
    with _ended_by_signals(), _flower(directory, command) as link, _ends_with(link):
        return serve(coordinator, f"127.0.0.1:{port}", on_round)


def run_site(directory: Path) -> None:
    """Take part until the process is told to stop; where the server is away, try again.

    Raises FedpactError: Flower is not installed, or the site's files do not fit.
    """
    require_flower()
    from fedpact.engines.flower.worker import release, work

    with Site(directory) as site:
        _prepare(site.federation.seeds == "test")
        command = [
            *("flower-supernode", "--isolation", "process"),
            *("--superlink", site.federation.address, "--root-certificates", "ca.crt"),
            *("--auth-supernode-private-key", "site.key"),
            *("--host", "127.0.0.1", "--port", str(site.settings.port)),
            *("--superexec-auth-secret-file", "runtime.secret"),
        ]
        waits = _Waits()
        with _ended_by_signals():
            while True:
                _wait_for(site.federation.address)
                release(site, directory)
                with _flower(directory, command) as node:
                    work(site, directory, lambda node=node: node.poll() is None)
                # Not enrolled yet, or the server is away: the site goes on knocking.
                _log.warning("no connection to the server: %s", _reason(directory))
                waits()


def environment(directory: Path) -> dict[str, str]:
    """Return the environment of a party's processes: Flower's files stay in its directory."""
    return {
        **os.environ,
        "FLWR_HOME": str(directory / "flower"),
        **QUIET,
    }


def _prepare(reproducible: bool) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("fedpact").setLevel(logging.INFO)
    if reproducible:
        torch.set_num_threads(1)


@contextmanager
def _flower(directory: Path, command: list[str]) -> Generator[subprocess.Popen[bytes]]:
    """Run one of Flower's processes, which dies with this one, and end it."""
    home = directory / "flower"
    home.mkdir(exist_ok=True)
    program = str(Path(sysconfig.get_path("scripts")) / command[0])
    with (home / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            [program, *command[1:]],
            cwd=directory,
            env=environment(directory.resolve()),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGKILL)


@contextmanager
def _ends_with(process: subprocess.Popen[bytes]) -> Generator[None]:
    """End this process, as SIGTERM does, should the other one end before the block does."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_KNOCK_SECONDS):
            if process.poll() is not None:
                _log.error("Flower's process ended with code %s: see its log", process.returncode)
                os.kill(os.getpid(), signal.SIGTERM)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


@contextmanager
def _ended_by_signals() -> Generator[None]:
    """Turn SIGTERM and SIGINT into an orderly end of the block."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before: Mapping[int, Any] = {n: signal.signal(n, end) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for(address: str) -> None:
    """Wait until somebody listens there: knocking costs less than a process that starts in vain."""
    host, port = address.rsplit(":", 1)
    while True:
        with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=5):
            return
        time.sleep(_KNOCK_SECONDS)


class _Waits:
    """Longer and longer pauses, short ones again after a good while without any."""

    def __init__(self) -> None:
        self._pause, self._last = 0.0, 0.0

    def __call__(self) -> None:
        calm = time.monotonic() - self._last > 2 * _LONGEST_PAUSE
        self._pause = 1.0 if calm else min(2 * self._pause, _LONGEST_PAUSE)
        time.sleep(self._pause)
        self._last = time.monotonic()


def _reason(directory: Path) -> str:
    """Return what Flower's process said last of an error, without its colours."""
    text = (directory / "flower" / "log.txt").read_text(encoding="utf-8", errors="replace")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in text.splitlines()]
    last = [i for i, line in enumerate(lines) if line.startswith("ERROR")]
    told = [line for line in lines[last[-1] if last else -3 :] if line and "flower.ai" not in line]
    return " ".join(told[:4])
