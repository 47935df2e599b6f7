"""The page's server: on this machine's own address alone, from the standard library.

    /            the page, which asks for the next one every two seconds
    /data.json   the snapshot
    /metrics     the same for Prometheus

It writes nothing, takes no request but GET, and answers under no other name than this machine's,
so that no page of somebody else's in the same browser can read it.
"""

import json
import math
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, cast

from fedpact.errors import FedpactError, InputError
from fedpact.watch.metrics import CONTENT_TYPE, text
from fedpact.watch.snapshot import take_snapshot

_HOST: Final = "127.0.0.1"
_POLICY: Final = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def create_server(directory: Path, port: int = 0) -> ThreadingHTTPServer:
    """Return the page's server, which listens and is not running yet. port: 0 for a free one.

    Raises DataError: the directory holds no run. InputError: the port cannot be had.
    """
    take_snapshot(directory)
    try:
        found = ThreadingHTTPServer((_HOST, port), _handler(lambda: take_snapshot(directory)))
    except (OSError, OverflowError) as error:
        raise InputError(
            f"--port {port} cannot be had ({error}): leave it out for a free one, or name another"
        ) from None
    found.daemon_threads = True
    return found


def address(of: ThreadingHTTPServer) -> str:
    """Return where the page is."""
    return f"http://{_HOST}:{of.server_port}/"


def encode_json(snapshot: dict[str, Any]) -> str:
    """Return a snapshot as JSON, which has no infinity: "inf" in its place."""
    return json.dumps(_finite(snapshot), ensure_ascii=False)


def _finite(of: Any) -> Any:
    if isinstance(of, dict):
        return {key: _finite(value) for key, value in of.items()}
    if isinstance(of, list):
        return [_finite(value) for value in of]
    return repr(of) if isinstance(of, float) and not math.isfinite(of) else of


def _handler(snapshot: Callable[[], dict[str, Any]]) -> type[BaseHTTPRequestHandler]:
    page = (files("fedpact.watch") / "page.html").read_text(encoding="utf-8")

    class Handler(BaseHTTPRequestHandler):
        """One request."""

        def do_GET(self) -> None:
            """Answer a request for the page or its data."""
            port = cast(ThreadingHTTPServer, self.server).server_port
            if self.headers.get("Host") not in (f"{_HOST}:{port}", f"localhost:{port}"):
                self.send_error(HTTPStatus.FORBIDDEN)
            elif self.path == "/":
                self._send("text/html; charset=utf-8", page)
            elif self.path in ("/data.json", "/metrics"):
                self._told()
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _told(self) -> None:
            try:
                found = snapshot()
            except FedpactError as error:
                told = json.dumps({"error": str(error)})
                self._send("application/json", told, HTTPStatus.SERVICE_UNAVAILABLE)
                return
            if self.path == "/metrics":
                self._send(CONTENT_TYPE, text(found))
            else:
                self._send("application/json", encode_json(found))

        def _send(self, kind: str, body: str, status: HTTPStatus = HTTPStatus.OK) -> None:
            block = body.encode()
            self.send_response(status)
            for name, value in (
                ("Content-Type", kind),
                ("Content-Length", str(len(block))),
                ("Content-Security-Policy", _POLICY),
                ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(block)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing of requests."""

    return Handler
