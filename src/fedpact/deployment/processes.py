"""Runs a party's process, or for a trial those of all parties as children of this one."""

import ctypes
import errno
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Self

import torch

from fedpact.common.errors import DataError, FedpactError, InputError, TransportLost
from fedpact.common.files import LOCK, only_one, private_opener, safe_name
from fedpact.common.messages import RoundRecord
from fedpact.deployment.federation import Federation
from fedpact.deployment.flower import program
from fedpact.deployment.server import Coordinator
from fedpact.deployment.site import Site
from fedpact.deployment.site_records import SiteSettings
from fedpact.privacy.accounting.apart import in_a_child
from fedpact.simulation.machine import require_flower

OnRound = Callable[[RoundRecord], None]
_LOST_SECONDS = 3.0  # less than the 5 after which Flower would end the process with its own code
_PAUSE_SECONDS = 2.0
_GRACE_SECONDS = 10.0
_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG
_KNOCK_SECONDS = 1.0
_LOCK_SECONDS, _PORT_SECONDS, _AGAIN_SECONDS = 1.0, 10.0, 0.1
_IN_MEMORY, _SMALL_BYTES = ":flwr-in-memory:", 2**25
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
TESTED: Final = {"torch": ("2.13", "2.14"), "flwr": ("1.41", "1.42")}
"""The minor versions that the test suite has passed with."""
_log = logging.getLogger("fedpact.party")


def run_server(directory: Path, on_round: OnRound) -> dict[str, Any]:
    """Start or resume the run of a server's directory; return its summary.

    Raises FedpactError: Flower is not installed, does not start, or the run cannot continue.
    """
    require_flower()
    from fedpact.deployment import keys
    from fedpact.deployment.flower import server_process

    program.share_memory_pools()
    program.release_code()
    with _file_errors(directory), _end_by_signals(), _hold(directory), in_a_child():
        with in_a_child():  # its child ends before this process grows
            coordinator = Coordinator(directory)
            coordinator.price()
        keys.check_server_keys(directory, coordinator.federation)
        _prepare(coordinator.federation.seeds == "test")
        host, port = coordinator.federation.address.rsplit(":", 1)
        own = "127.0.0.1" if host in ("127.0.0.1", "localhost") else "0.0.0.0"
        # It holds the messages that sites have not fetched; small ones are faster in memory.
        round_bytes = 16 * coordinator.longest_message * len(coordinator.federation.sites)
        on_disk = round_bytes > _SMALL_BYTES
        database = str(_home(directory) / "superlink.db") if on_disk else _IN_MEMORY
        most = server_process.most_request_bytes(coordinator)
        arguments = [
            *("--isolation", "process", "--ssl-ca-certfile", str(directory / "ca.crt")),
            *("--ssl-certfile", str(directory / "tls.crt")),
            *("--ssl-keyfile", str(directory / "tls.key"), "--host", own, "--port", port),
            *("--enable-supernode-auth", "--database", database),
            *("--superexec-auth-secret-file", str(directory / "runtime.secret")),
            "--disable-runtime-dependency-installation",
        ]
        _insist(lambda: _check_port(own, int(port)), _PORT_SECONDS)
        # Its content can be recreated: nodes are registered and a Flower run begins at every
        # start. The database of a SuperLink that was killed may be incomplete.
        for left in _home(directory).glob("superlink.db*"):
            left.unlink()
        keys.write_client_certificate(directory, "server.key")
        keys.write_anchors(directory, coordinator.federation)
        program.release_code()

        def report_and_release(record: RoundRecord) -> None:
            on_round(record)
            # Not all that a round loads is needed again. It takes 3 ms.
            program.release_code()

        link = program.superlink(directory, most, arguments)
        with link as thread, _ends_with(thread.is_alive, directory):
            return server_process.serve(coordinator, f"127.0.0.1:{port}", report_and_release)


def run_site(directory: Path) -> None:
    """Take part until the process is stopped, and reconnect whenever the server is away.

    Raises FedpactError: Flower is not installed, or the site's files do not match.
    """
    require_flower()
    from fedpact.deployment import keys
    from fedpact.deployment.flower import site_process

    program.release_code()
    with _file_errors(directory), _hold(directory), in_a_child(), Site(directory) as site:
        program.release_code()
        keys.check_site_keys(directory, site.federation, site.name)
        keys.write_client_certificate(_home(directory).parent, "site.key")
        _prepare(site.federation.seeds == "test")
        last = ""

        def tell(told: str) -> None:
            """Write to the site's log, without repeating the same line."""
            nonlocal last
            if told != last:
                _log.warning("%s", told)
            last = told

        with _end_by_signals():
            if site.settings.socket is not None:
                site_process.listen(site, directory, directory / site.settings.socket)
            while True:
                try:
                    site_process.work(site, directory, tell)
                except site_process.NotLetIn as error:
                    gone = "The server has gone, as expected: stop this site, or leave it waiting"
                    tell(f"{site.ending}. {gone} for more rounds" if site.ending else str(error))
                except OSError as error:
                    if error.errno not in _FULL:
                        raise
                    tell(f"no space for {directory} ({error.strerror}): waiting for space")
                # Not enrolled yet, or the server is away: try again.
                time.sleep(_PAUSE_SECONDS)


@contextmanager
def _hold(directory: Path) -> Generator[None]:
    """Hold a party's directory for its process. Raises InputError: another one does."""
    with ExitStack() as held:
        lock = directory / LOCK, f"{directory} is in use already"
        _insist(lambda: held.enter_context(only_one(*lock)), _LOCK_SECONDS)
        yield


def _insist(attempt: Callable[[], None], seconds: float) -> None:
    """Repeat an attempt that raises InputError for some seconds, then raise it.

    A health check holds the lock for an instant, and a server that was just killed its port. Yet
    after exit code 2 a supervisor leaves a party stopped.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return attempt()
        except InputError:
            if time.monotonic() > end:
                raise
        time.sleep(_AGAIN_SECONDS)


def describe_untested() -> list[str]:
    """Return warnings if torch or Flower are of no minor version that the tests passed with."""
    return [
        f"{name} {here} is installed, but this version of fedpact was tested with "
        f"{' and '.join(tested)}: install one of these, or try the run on one machine first"
        for name, tested in TESTED.items()
        if ".".join((here := version(name)).split(".")[:2]) not in tested
    ]


def _prepare(reproducible: bool) -> None:
    # Parties connect directly, the server also to itself: the environment's proxies are for others.
    os.environ["no_proxy"] = "*"
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("fedpact").setLevel(logging.INFO)
    for told in describe_untested():
        _log.warning("%s", told)
    if reproducible:
        torch.set_num_threads(1)


@contextmanager
def _file_errors(directory: Path) -> Generator[None]:
    """Turn an OSError, such as missing permissions or a full disk, into a clear FedpactError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ConnectionError | TimeoutError | socket.gaierror | ssl.SSLError):
            raise FedpactError(
                f"the network failed ({type(error).__name__}: {error}): nothing is lost; restart "
                "this party when the other side can be reached"
            ) from error
        raise FedpactError(
            # A write to a full disk does not name its file.
            f"{error.filename or f'a file in {directory}'} cannot be used "
            f"({error.strerror or error}): check that the account of this process owns the "
            "directory, and that the disk has space; then restart this party"
        ) from error


def _home(directory: Path) -> Path:
    """Return Flower's directory, which holds messages; only its owner may read it."""
    home = directory / "flower"
    home.mkdir(exist_ok=True)
    home.chmod(0o700)
    return home


@contextmanager
def _ends_with(runs: Callable[[], bool], directory: Path) -> Generator[None]:
    """End this process if the SuperLink ends during the block. Raises TransportLost.

    The main thread is interrupted as by SIGTERM. If it or another thread blocks, the process
    exits _LOST_SECONDS later with the same exit code.
    """
    done, lost = threading.Event(), threading.Event()

    def reason() -> str:
        return (
            f"Flower's SuperLink has ended: see why in {directory / program.LOG}, then "
            "restart this server: it continues after the last committed round"
        )

    def watch() -> None:
        while not done.wait(_KNOCK_SECONDS):
            # It may have ended because the block has.
            if not runs() and not done.is_set():
                lost.set()
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(_LOST_SECONDS)
                _log.error("%s", reason())
                os._exit(TransportLost.exit_code)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except SystemExit:
        if not lost.is_set():
            raise
        raise TransportLost(reason()) from None
    finally:
        done.set()


@contextmanager
def _end_by_signals() -> Generator[None]:
    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before: Mapping[int, Any] = {n: signal.signal(n, end) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_port(host: str, port: int) -> None:
    """Raise InputError: another program listens at this port, or this account may not."""
    with socket.socket() as probe:
        # Connections of an earlier server that have not timed out do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InputError(
                f"port {port} of this machine is not available ({error.strerror}): end the program "
                "that listens there, or change address in federation.toml at every party; a port "
                "below 1024 needs the capability CAP_NET_BIND_SERVICE"
            ) from None


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
