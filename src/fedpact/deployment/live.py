"""`fedpact watch`: the state of a run (snapshot.py) as a local page, JSON and Prometheus metrics.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/

    /            the page, which refreshes every two seconds
    /data.json   the snapshot
    /metrics     the same for Prometheus

It writes nothing, accepts only GET, and only for this machine's own host names, so that no other
web page in the same browser can read it.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, cast

from rich.console import Console

from fedpact.common.errors import FedpactError, InputError
from fedpact.deployment.snapshot import find_run, take_snapshot
from fedpact.report.template import page

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_MARKED: Final = "simulator_only: exact, on held-out records, which no site would release."
# name -> (type, key in a snapshot or in its entry for a site or run, meaning)
_METRICS: Final = {
    "round": ("gauge", "round", "The last round."),
    "rounds_planned": ("gauge", "rounds", "How many rounds the plan has."),
    "epsilon_spent": ("gauge", "epsilon_spent", "Epsilon spent, an upper bound at delta."),
    "epsilon_reserved": ("gauge", "epsilon_reserved", "Epsilon reserved in the ledger."),
    "delta": ("gauge", "delta", "The delta of epsilon."),
    "refusals_total": ("counter", "refusals", "Tasks that were refused, by code."),
    "answers_total": ("counter", "answers", "Tasks that were answered or refused."),
    "ledger_entries": ("gauge", "ledger_entries", "Entries of the site's ledger."),
    "answer_seconds": ("gauge", "seconds", "Seconds of the last answer."),
    "waiting": ("gauge", "waiting", "Whether an answer is awaited."),
    "bytes_down_total": ("counter", "bytes_down", "Bytes sent to sites."),
    "bytes_up_total": ("counter", "bytes_up", "Bytes that sites sent."),
    "accuracy": ("gauge", "accuracy", f"Accuracy of the last evaluated model. {_MARKED}"),
    "loss": ("gauge", "loss", f"Mean loss of the last evaluated model. {_MARKED}"),
    "ended": ("gauge", "ended", "Whether the run has ended."),
}


def text(of: Mapping[str, Any]) -> str:
    """Return a snapshot in Prometheus' text format."""
    groups, lines = list(_labelled(of)), list[str]()
    for name, (kind, key, told) in _METRICS.items():
        found = [(labels, values[key]) for labels, values in groups if values.get(key) is not None]
        if key == "refusals":
            found = [({**own, "code": c}, n) for own, codes in found for c, n in codes.items()]
        if found:
            lines += [f"# HELP fedpact_{name} {told}", f"# TYPE fedpact_{name} {kind}"]
            # All digits: rounded down it would not be a bound.
            lines += [f"fedpact_{name}{_labels(labels)} {_number(n)}" for labels, n in found]
    return "\n".join(lines) + "\n"


def _labelled(of: Mapping[str, Any]) -> Iterator[tuple[dict[str, str], Mapping[str, Any]]]:
    """Yield labels and values: of the run, then of each site or ledger."""
    run = {"run": of["run"]}
    if of["kind"] == "site":
        yield {**run, "site": of["name"]}, of
        for name, each in of["ledger"].items():
            yield {"run": name, "site": of["name"]}, each
        return
    yield run, of
    seen = set[str]()
    for curve in of["curves"]:
        # Released values come first.
        if curve["name"] not in seen:
            seen.add(curve["name"])
            marked = {"simulator_only": "true"} if curve["of"] == "simulator only" else {}
            yield {**run, **marked}, {curve["name"]: curve["points"][-1][1]}
    for site, each in of["sites"].items():
        yield {**run, "site": site}, each


_ESCAPED: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def _labels(labels: Mapping[str, str]) -> str:
    each = (f'{name}="{value.translate(_ESCAPED)}"' for name, value in labels.items())
    return f"{{{','.join(each)}}}"


def _number(value: float) -> str:
    return repr(float(value)) if math.isfinite(value) else "+Inf" if value > 0 else "-Inf"


_HOST: Final = "127.0.0.1"
_POLICY: Final = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'"
)


def create_server(directory: Path, port: int = 0) -> ThreadingHTTPServer:
    """Return the page's server, listening but not yet running. port: 0 for a free one.

    Raises DataError: the directory has no run. InputError: the port is not available.
    """
    if not (directory / "site.toml").exists():
        find_run(directory)
    try:
        found = ThreadingHTTPServer((_HOST, port), _handler(directory))
    except (OSError, OverflowError) as error:
        raise InputError(
            f"--port {port} is not available ({error}): leave it out for a free one, or use another"
        ) from None
    found.daemon_threads = True
    return found


def address(of: ThreadingHTTPServer) -> str:
    """Return the URL of the page."""
    return f"http://{_HOST}:{of.server_port}/"


def encode_json(snapshot: dict[str, Any]) -> str:
    """Return a snapshot as JSON, with infinity as the string "inf"."""
    return json.dumps(_finite(snapshot), ensure_ascii=False)


def _finite(of: Any) -> Any:
    if isinstance(of, dict):
        return {key: _finite(value) for key, value in of.items()}
    if isinstance(of, list):
        return [_finite(value) for value in of]
    return repr(of) if isinstance(of, float) and not math.isfinite(of) else of


def _handler(directory: Path) -> type[BaseHTTPRequestHandler]:
    html = page("watch")

    class Handler(BaseHTTPRequestHandler):
        """One request."""

        def do_GET(self) -> None:
            """Answer a request for the page or its data."""
            port = cast(ThreadingHTTPServer, self.server).server_port
            if self.headers.get("Host") not in (f"{_HOST}:{port}", f"localhost:{port}"):
                self.send_error(HTTPStatus.FORBIDDEN)
            elif self.path == "/":
                self._send("text/html; charset=utf-8", html)
            elif self.path in ("/data.json", "/metrics"):
                self._told()
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _told(self) -> None:
            try:
                found = take_snapshot(directory)
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
            with suppress(BrokenPipeError, ConnectionResetError):  # the page was closed meanwhile
                self.end_headers()
                self.wfile.write(block)

        def log_message(self, format: str, *args: Any) -> None:
            """Do not log requests."""

    return Handler


def watch(directory: Path, port: int, as_json: bool) -> None:
    """Run `fedpact watch`."""
    out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if as_json:
        out.print(encode_json(take_snapshot(directory)))
        return
    with create_server(directory, port) as server:
        where = address(server)
        out.print(f"{where} shows {directory}, {where}metrics is for Prometheus; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            out.print("ended")
