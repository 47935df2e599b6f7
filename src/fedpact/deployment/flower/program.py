"""Flower's SuperLink, in a process that ends when the program's main thread does.

    python -P program.py MOST_BYTES ARGUMENTS...

MOST_BYTES: the longest body of a request. ARGUMENTS: of `flower-superlink`.

The SuperLink accepts only connections with a party's key, and a Guard checks its requests; Flower
has no options for that. This file imports nothing of fedpact, which may not be importable from the
server's directory, in which the process runs.
"""

import ctypes
import gc
import json
import logging
import mmap
import os
import socket
import ssl
import struct
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from importlib.metadata import entry_points
from typing import Any, Final

ANCHORS: Final = "flower/parties.pem"
"""In the server's directory: whose connections a SuperLink lets in (keys.render_anchors)."""
CLIENT: Final = "flower/client.pem"
"""In a party's directory: what it shows of itself (keys.write_client_certificate)."""

SOCKETS: Final = "/fedpact/sockets"

_STARTED_SECONDS = 10.0
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


def _guard_superlink(most: int) -> None:
    """Make uvicorn in this process accept only parties, and wrap its application in a Guard."""
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    sockets = Sockets()

    class Counted(AutoHTTPProtocol):
        def connection_made(self, transport: Any) -> None:
            told = transport.get_extra_info
            sockets.opened(told("peername"), told("socket"))
            super().connection_made(transport)

    more = {"ssl_ca_certs": ANCHORS, "ssl_cert_reqs": ssl.CERT_REQUIRED, "http": Counted}
    run = uvicorn.run
    uvicorn.run = lambda app, **options: run(Guard(app, sockets, most), **options, **more)


def run_superlink(most: int) -> int:
    """Run `flower-superlink` with this process's arguments; return its exit status."""
    try:
        (script,) = entry_points(group="console_scripts", name="flower-superlink")
        # Loaded modules stay alive; see deployment/party.py.
        gc.disable()
        program = script.load()
        gc.freeze()
        gc.enable()
        _guard_superlink(most)
        timer = threading.Timer(_STARTED_SECONDS, release_code)
        timer.daemon = True
        timer.start()
        program()
        return 0
    except SystemExit as end:
        # `sys.exit` also accepts None and text.
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # a second signal while it ends is a KeyboardInterrupt
        traceback.print_exc()
    return 1


if __name__ == "__main__":
    most_bytes = int(sys.argv.pop(1))
    status = run_superlink(most_bytes)
    logging.shutdown()
    sys.stdout.flush()
    # Exit even if other threads are still running.
    os._exit(status)
