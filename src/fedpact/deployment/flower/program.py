"""One of Flower's programs, in a process that ends when the program's main thread does.

    python -P program.py NAME ARGUMENTS...

A SuperNode's main thread asks the server for work, and a second one serves the SuperNode's own
site. What the first raises ends that thread alone: an error of TLS, as from a server that is killed
in the midst of a handshake, is one after which it does not try again. The second thread then keeps
the process alive and goes on answering that there is no work, so that nobody notices.

A SuperLink's requests pass a Guard. Nothing of fedpact is imported here: the process runs in the
party's directory, from which it may not be found.
"""

import base64
import gc
import logging
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Container, MutableMapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

SITE_KEYS: Final = Path("flower/site-keys")
"""In the server's directory: the sites' public keys, as their requests' headers have them."""

# Flower cuts whatever is longer into pieces of 5 MiB, each a request of its own.
_MOST_BYTES = 6 * 2**20
# What a site sends before it is let in, its key and little else, is shorter.
_MOST_UNSIGNED_BYTES = 2**16

_Event = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Event]]
_Send = Callable[[_Event], Awaitable[None]]
_App = Callable[[_Event, _Receive, _Send], Awaitable[None]]


class Guard:
    """Refuses requests to a SuperLink before their bodies are read; an ASGI application.

    Other machines have Flower's Fleet API alone, by which sites connect. Only requests that a
    site's key has signed may be long, as Flower reads a body before it looks at who sends it.
    site_keys: see SITE_KEYS.
    """

    def __init__(self, app: _App, site_keys: Container[str]) -> None:
        self._app, self._keys = app, site_keys

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
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        here = scope["client"] is not None and scope["client"][0] in ("127.0.0.1", "::1")
        if scope["path"] != "/health" and not scope["path"].startswith(
            "/v1/" if here else "/v1/fleet/"
        ):
            return 404
        if "transfer-encoding" in headers:
            return 411  # a body of unknown length
        length = int(headers.get("content-length", "0"))
        if length <= _MOST_UNSIGNED_BYTES:
            return None
        return None if length <= _MOST_BYTES and (here or self._is_signed(headers)) else 413

    def _is_signed(self, headers: dict[str, str]) -> bool:
        """Whether a site's key has signed the time in these headers, which Flower looks at."""
        try:
            key, signature = headers["flwr-public-key"], headers["flwr-signature"]
            if key not in self._keys:
                return False
            public = serialization.load_pem_public_key(base64.b64decode(key))
            signed = headers["flwr-timestamp"].encode()
            # As Flower verifies it; what federation.toml lists are such keys.
            if isinstance(public, ec.EllipticCurvePublicKey):
                public.verify(base64.b64decode(signature), signed, ec.ECDSA(hashes.SHA256()))
                return True
        except (KeyError, ValueError, InvalidSignature):
            pass
        return False


def _guard_superlink() -> None:
    """Have whatever application uvicorn runs in this process behind a Guard."""
    import uvicorn

    run, keys = uvicorn.run, frozenset(SITE_KEYS.read_text(encoding="ascii").split())
    uvicorn.run = lambda app, **options: run(Guard(app, keys), **options)


def run_script(name: str) -> int:
    """Run the console script `name` with this process's arguments; return how it ended."""
    try:
        (script,) = entry_points(group="console_scripts", name=name)
        # What is loaded stays; see deployment/party.py.
        gc.disable()
        program = script.load()
        gc.freeze()
        gc.enable()
        if name == "flower-superlink":
            _guard_superlink()
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
