"""A party's process: whether it is at work, and in a server's the SuperLink, in a thread.

A supervisor asks for the first every half minute, on the machine on which the party computes. So
this module reads a few lines of TOML itself, and imports neither torch nor Flower.

As a process of its own the SuperLink would take 100 MB more, and could be lost alone. It accepts
only connections with a party's key, and a Guard checks its requests; Flower has no options for
that.
"""

import ctypes
import fcntl
import json
import logging
import mmap
import os
import socket
import ssl
import struct
import sys
import threading
import time
import tomllib
from collections.abc import Awaitable, Callable, Generator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, cast

from fedpact.common.errors import DataError
from fedpact.common.files import LOCK, private_opener

ANCHORS: Final = "flower/parties.pem"
"""In the server's directory: whose connections a SuperLink lets in (keys.write_anchors)."""
CLIENT: Final = "flower/client.pem"
"""In a party's directory: what it shows of itself (keys.write_client_certificate)."""

SOCKETS: Final = "/fedpact/sockets"

LOG: Final = "flower/log.txt"
"""In a server's directory: what its SuperLink says."""

NODE: Final = "flower/node"
"""In a site's directory: the number of its node, touched while it is connected to its server."""
_SECONDS: Final = 5.0
_FRESH_SECONDS: Final = 60.0
_GRACE_SECONDS = 5.0
_M_ARENA_MAX = -8  # of malloc.h
_Event = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Event]]
_Send = Callable[[_Event], Awaitable[None]]
_App = Callable[[_Event, _Receive, _Send], Awaitable[None]]


class Sockets:
    """The traffic of the sites' connections including TLS, as counted by the kernel.

    carried: bytes (to, from) the other end of each connection, when last read.
    """

    # Fields of Linux's tcp_info: bytes acknowledged by the other end, and bytes received.
    _COUNTED = struct.Struct("=120xQQ")

    def __init__(self) -> None:
        self._open, self.carried = dict[Any, socket.socket](), dict[Any, tuple[int, int]]()
        self._before = 0, 0

    def opened(self, client: Any, by: socket.socket) -> None:
        """Record a new connection; an earlier one with the same address has ended."""
        down, up = self.carried.pop(client, (0, 0))
        self._before = self._before[0] + down, self._before[1] + up
        self._open[client] = by

    def look(self, client: Any) -> None:
        """Update the traffic of a site's connection."""
        try:
            told = self._open[client].getsockopt(socket.IPPROTO_TCP, 11, self._COUNTED.size)
            self.carried[client] = self._COUNTED.unpack(told)
        except (KeyError, OSError, ValueError, struct.error):
            pass  # it has ended, or is no TCP of Linux

    def total(self) -> tuple[int, int]:
        """Return the bytes (to, from) all sites."""
        for client in list(self.carried):
            self.look(client)
        down, up = zip(self._before, *self.carried.values(), strict=True)
        return sum(down), sum(up)


class Guard:
    """Refuses requests to a SuperLink before their bodies are read; an ASGI application.

    Other machines may use only Flower's Fleet API, by which sites connect. No body may be longer
    than `most` bytes, as Flower reads a body before it authenticates the sender. At SOCKETS this
    machine can read the traffic of the sites' connections.
    """

    def __init__(self, app: _App, sockets: Sockets, most: int) -> None:
        self._app, self._sockets, self._most = app, sockets, most

    async def __call__(self, scope: _Event, receive: _Receive, send: _Send) -> None:
        """Answer one request."""
        status = self._refusal(scope) if scope["type"] == "http" else None
        if status is None:
            if scope["type"] == "http" and scope["path"].startswith("/v1/fleet/"):
                self._sockets.look(scope["client"])
            return await self._app(scope, receive, send)
        body = json.dumps(self._sockets.total()).encode() if status == 200 else b""
        headers = [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _refusal(self, scope: _Event) -> int | None:
        """Return the HTTP status with which a request is refused; None if it is not."""
        headers = dict(scope["headers"])
        here = scope["client"] is not None and scope["client"][0] in ("127.0.0.1", "::1")
        if here and scope["path"] == SOCKETS:
            return 200
        if scope["path"] != "/health" and not scope["path"].startswith(
            "/v1/" if here else "/v1/fleet/"
        ):
            return 404
        if b"transfer-encoding" in headers:
            return 411  # a body of unknown length
        return 413 if int(headers.get(b"content-length", b"0")) > self._most else None


def release_code() -> None:
    """Release the memory pages of libraries' code in this process (Linux only).

    Loading a library touches most of its code once: about 80 MB for PyTorch, of which training
    needs a third. Needed pages are mapped again from the kernel's file cache.
    """
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    with open("/proc/self/maps", encoding="utf-8") as maps:
        lines = [line.split() for line in maps]
    for place, rights, _, _, _, *name in lines:
        # Code pages are never modified, so nothing is lost.
        if rights == "r-xp" and name and ".so" in name[0]:
            start, end = (int(each, 16) for each in place.split("-"))
            advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def share_memory_pools() -> None:
    """Have threads of this process share two memory pools; else each has one (Linux's glibc)."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


@contextmanager
def superlink(directory: Path, most: int, arguments: Sequence[str]) -> Generator[threading.Thread]:
    """Run `flower-superlink` with these arguments during the block, in the thread that is given.

    directory: the server's. most: the longest body of a request in bytes. The thread ends before
    the block does if the SuperLink fails; LOG has the reason.
    """
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    os.environ["FLWR_HOME"] = str((directory / LOG).parent.resolve())
    # A template library would load Pygments to colour error pages: 5 MB.
    cast(Any, sys.modules)["mako.ext.pygmentplugin"] = None
    (script,) = entry_points(group="console_scripts", name="flower-superlink")
    program, flower = script.load(), logging.getLogger("flwr")
    sockets, servers = Sockets(), list[uvicorn.Server]()

    # uvicorn's other parser, httptools, does not limit the length of headers.
    class Counted(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            told = transport.get_extra_info
            sockets.opened(told("peername"), told("socket"))
            super().connection_made(transport)

    with open(directory / LOG, "a", encoding="utf-8", opener=private_opener) as log:

        def run(app: _App, *, log_config: Any, **options: Any) -> None:
            for handler in log_config["handlers"].values():
                handler["stream"] = log
            anchors = {"ssl_ca_certs": directory / ANCHORS, "ssl_cert_reqs": ssl.CERT_REQUIRED}
            more: Any = {**options, **anchors, "log_config": log_config, "http": Counted}
            servers.append(uvicorn.Server(uvicorn.Config(Guard(app, sockets, most), **more)))
            servers[0].run()

        def work() -> None:
            try:
                program()
            except SystemExit:
                pass  # the log says why
            except BaseException as error:
                flower.exception("%s: %s", type(error).__name__, error)

        for handler in flower.handlers:
            handler.setStream(log)  # pyright: ignore[reportAttributeAccessIssue]
        flower.propagate = False
        uvicorn.run, sys.argv = run, ["flower-superlink", *arguments]
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield thread
        finally:
            for server in servers:
                server.should_exit = True
            thread.join(_GRACE_SECONDS)


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
