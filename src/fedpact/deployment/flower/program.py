"""One of Flower's programs, in a process that ends when the program's main thread does.

    python -P program.py NAME ARGUMENTS...

A SuperNode's main thread asks the server for work, and a second one serves the SuperNode's own
site. What the first raises ends that thread alone: an error of TLS, as from a server that is killed
in the midst of a handshake, is one after which it does not try again. The second thread then keeps
the process alive and goes on answering that there is no work, so that nobody notices.

A SuperLink lets in nobody without a party's key, and its requests pass a Guard. A SuperNode shows
its site's. Flower has options for neither. Nothing of fedpact is imported here: the process runs in
the party's directory, from which it may not be found.
"""

import gc
import logging
import os
import ssl
import sys
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from importlib.metadata import entry_points
from typing import Any, Final

ANCHORS: Final = "flower/parties.pem"
"""In the server's directory: whose connections a SuperLink lets in (keys.render_anchors)."""
CLIENT: Final = "flower/client.pem"
"""In a party's directory: what it shows of itself (keys.write_client_certificate)."""

# Flower cuts whatever is longer into pieces of 5 MiB, each a request of its own.
_MOST_BYTES = 6 * 2**20

_Event = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Event]]
_Send = Callable[[_Event], Awaitable[None]]
_App = Callable[[_Event, _Receive, _Send], Awaitable[None]]


class Guard:
    """Refuses requests to a SuperLink before their bodies are read; an ASGI application.

    Other machines have Flower's Fleet API alone, by which sites connect. No request may be longer
    than the pieces of a message, as Flower reads a body before it looks at who sends it.
    """

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: _Event, receive: _Receive, send: _Send) -> None:
        """Answer one request."""
        status = self._refusal(scope) if scope["type"] == "http" else None
        if status is None:
            return await self._app(scope, receive, send)
        headers = [(b"content-length", b"0"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body"})

    def _refusal(self, scope: _Event) -> int | None:
        """Return the HTTP status with which a request is refused, None for none."""
        headers = dict(scope["headers"])
        here = scope["client"] is not None and scope["client"][0] in ("127.0.0.1", "::1")
        if scope["path"] != "/health" and not scope["path"].startswith(
            "/v1/" if here else "/v1/fleet/"
        ):
            return 404
        if b"transfer-encoding" in headers:
            return 411  # a body of unknown length
        return 413 if int(headers.get(b"content-length", b"0")) > _MOST_BYTES else None


def _guard_superlink() -> None:
    """Have uvicorn, in this process, let in parties alone, and put a Guard before what it runs."""
    import uvicorn

    parties = {"ssl_ca_certs": ANCHORS, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    run = uvicorn.run
    uvicorn.run = lambda app, **options: run(Guard(app), **options, **parties)


def _show_certificate() -> None:
    """Have httpx, in this process, show the site's certificate where it uses TLS."""
    import httpx

    class Client(httpx.Client):
        def __init__(self, *, verify: Any = True, **options: Any) -> None:
            if isinstance(verify, ssl.SSLContext):
                verify.load_cert_chain(CLIENT)
            super().__init__(verify=verify, **options)

    httpx.Client = Client


def run_script(name: str) -> int:
    """Run the console script `name` with this process's arguments; return how it ended."""
    try:
        (script,) = entry_points(group="console_scripts", name=name)
        # What is loaded stays; see deployment/party.py.
        gc.disable()
        program = script.load()
        gc.freeze()
        gc.enable()
        _guard_superlink() if name == "flower-superlink" else _show_certificate()
        program()
        return 0
    except SystemExit as end:
        # None and text are what `sys.exit` takes, too.
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # a second signal while it ends is a KeyboardInterrupt
        traceback.print_exc()
    return 1


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    status = run_script(sys.argv[0])
    logging.shutdown()
    sys.stdout.flush()
    # Whatever other threads it has left.
    os._exit(status)
