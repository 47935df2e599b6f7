"""Flower's SuperLink, in a process that ends when the program's main thread does.

    python -P program.py MOST_BYTES ARGUMENTS...

MOST_BYTES: the longest body of a request. ARGUMENTS: of `flower-superlink`.

The SuperLink lets in nobody without a party's key, and its requests pass a Guard; Flower has no
options for that. Nothing of fedpact is imported here: the process runs in the server's directory,
from which it may not be found.
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
    """What the sites' connections have carried, TLS and all, as the kernel counts it.

    carried: bytes (to, from) the other end of a site's connection, as last looked at.
    """

    # In Linux's tcp_info: what the other end has acknowledged, and what was received.
    _COUNTED = struct.Struct("=120xQQ")

    def __init__(self) -> None:
        self._open, self.carried = dict[Any, socket.socket](), dict[Any, tuple[int, int]]()
        self._before = 0, 0

    def opened(self, client: Any, by: socket.socket) -> None:
        """Note a connection; who had its address before has ended his."""
        down, up = self.carried.pop(client, (0, 0))
        self._before = self._before[0] + down, self._before[1] + up
        self._open[client] = by

    def look(self, client: Any) -> None:
        """Count what a site's connection has carried until now."""
        try:
            told = self._open[client].getsockopt(socket.IPPROTO_TCP, 11, self._COUNTED.size)
            self.carried[client] = self._COUNTED.unpack(told)
        except (KeyError, OSError, ValueError, struct.error):
            pass  # it has ended, or is no TCP of Linux

    def total(self) -> tuple[int, int]:
        """Return bytes (to, from) all sites."""
        for client in list(self.carried):
            self.look(client)
        down, up = zip(self._before, *self.carried.values(), strict=True)
        return sum(down), sum(up)


class Guard:
    """Refuses requests to a SuperLink before their bodies are read; an ASGI application.

    Other machines have Flower's Fleet API alone, by which sites connect. No body may be longer than
    `most` bytes, as Flower reads a body before it looks at who sends it. At SOCKETS it tells this
    machine what the sites' connections have carried.
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
        """Return the HTTP status that a request is answered with here, None for no answer."""
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
    """Give back the pages of libraries' code that this process has mapped; on Linux alone.

    Loading a library touches most of its code once: some 80 MB of PyTorch's, of which training
    needs a third. What is needed again is mapped again from the kernel's cache of files.
    """
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    with open("/proc/self/maps", encoding="utf-8") as maps:
        lines = [line.split() for line in maps]
    for place, rights, _, _, _, *name in lines:
        # Code is never written to, so that nothing is lost.
        if rights == "r-xp" and name and ".so" in name[0]:
            start, end = (int(each, 16) for each in place.split("-"))
            advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _guard_superlink(most: int) -> None:
    """Have uvicorn, in this process, let in parties alone, and put a Guard before what it runs."""
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
    """Run `flower-superlink` with this process's arguments; return how it ended."""
    try:
        (script,) = entry_points(group="console_scripts", name="flower-superlink")
        # What is loaded stays; see deployment/party.py.
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
        # None and text are what `sys.exit` takes, too.
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # a second signal while it ends is a KeyboardInterrupt
        traceback.print_exc()
    return 1


if __name__ == "__main__":
    most_bytes = int(sys.argv.pop(1))
    status = run_superlink(most_bytes)
    logging.shutdown()
    sys.stdout.flush()
    # Whatever other threads it has left.
    os._exit(status)
