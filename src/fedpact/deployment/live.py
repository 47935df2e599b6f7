"""A run, live: what its files say, as a page on this machine, as JSON, and for Prometheus.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/

A run's folder or a server's directory shows all sites, as the server counts them. A site's own
directory shows that site: its ledger, what it answered, and no other site's name.

/            the page, which asks for the next one every two seconds
    /data.json   the snapshot
    /metrics     the same for Prometheus

It writes nothing, takes no request but GET, and answers under no other name than this machine's,
so that no page of somebody else's in the same browser can read it.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, cast

from rich.console import Console

from fedpact.common.errors import DataError, FedpactError, InputError
from fedpact.common.format import upper
from fedpact.common.run_folder import WAITS, folder_of_run
from fedpact.deployment.federation import Federation, parse_toml
from fedpact.deployment.site_evaluation import PROGRESS, Progress
from fedpact.deployment.site_records import SiteSettings
from fedpact.deployment.store import read_store
from fedpact.privacy.accounting import shared_noise
from fedpact.privacy.accounting.accountant import ADJACENCY_BY_UNIT, epsilon
from fedpact.privacy.ledger.hash_chain import read_all
from fedpact.privacy.ledger.receipt import spent_of

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[str, Mapping[str, str], float | None]
"""A metric's name, its labels, its value; None where there is none yet."""

_MARKED: Final = (
    "simulator_only: of held-out records, exactly, which no site of a deployment would release."
)
_HELP: Final = {
    "fedpact_round": ("gauge", "The last round."),
    "fedpact_rounds_planned": ("gauge", "How many rounds the plan has."),
    "fedpact_epsilon_spent": ("gauge", "Epsilon spent, an upper bound at the run's delta."),
    "fedpact_epsilon_reserved": ("gauge", "Epsilon reserved in the ledger."),
    "fedpact_delta": ("gauge", "The delta that epsilon is stated at."),
    "fedpact_refusals_total": ("counter", "Questions that were refused, by code."),
    "fedpact_answers_total": ("counter", "Questions that were answered or refused."),
    "fedpact_ledger_entries": ("gauge", "Entries of the site's ledger."),
    "fedpact_answer_seconds": ("gauge", "How long the last answer took."),
    "fedpact_waiting": ("gauge", "Whether an answer is being waited for."),
    "fedpact_bytes_down_total": ("counter", "Bytes sent to sites."),
    "fedpact_bytes_up_total": ("counter", "Bytes that sites sent."),
    "fedpact_accuracy": ("gauge", f"Accuracy of the last evaluated model. {_MARKED}"),
    "fedpact_loss": ("gauge", f"Mean loss of the last evaluated model. {_MARKED}"),
    "fedpact_ended": ("gauge", "Whether the run has ended."),
}


def text(of: Mapping[str, Any]) -> str:
    """Return a snapshot (see take_snapshot) as a page for Prometheus."""
    samples = list(_of_site(of) if of["kind"] == "site" else _of_run(of))
    lines = list[str]()
    for name, (kind, told) in _HELP.items():
        found = [(labels, value) for n, labels, value in samples if n == name and value is not None]
        if found:
            lines += [f"# HELP {name} {told}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_labels(labels)} {_number(value)}" for labels, value in found]
    return "\n".join(lines) + "\n"


def _of_run(of: Mapping[str, Any]) -> Iterator[Sample]:
    run = {"run": of["name"]}
    yield "fedpact_round", run, of["round"]
    yield "fedpact_rounds_planned", run, of["rounds"]
    yield "fedpact_bytes_down_total", run, of["bytes_down"]
    yield "fedpact_bytes_up_total", run, of["bytes_up"]
    yield "fedpact_ended", run, of["status"] not in ("running", "not begun")
    marked = {**run, "simulator_only": "true"} if of["simulator_only"] else run
    for key in ("accuracy", "loss"):
        seen = [each[key] for each in of["history"] if each[key] is not None]
        yield f"fedpact_{key}", marked, seen[-1] if seen else None
    for site, each in of["sites"].items():
        labels = {**run, "site": site}
        yield "fedpact_epsilon_spent", labels, each["epsilon_spent"]
        yield "fedpact_epsilon_reserved", labels, each["epsilon_reserved"]
        yield "fedpact_delta", labels, each["delta"]
        yield "fedpact_answer_seconds", labels, each["seconds"]
        yield "fedpact_waiting", labels, each["waiting"]
        for code, count in each["refusals"].items():
            yield "fedpact_refusals_total", {**labels, "code": code}, count


def _of_site(of: Mapping[str, Any]) -> Iterator[Sample]:
    own = {"run": of["run"], "site": of["name"]}
    yield "fedpact_round", own, of["round"]
    yield "fedpact_rounds_planned", own, of["rounds"]
    yield "fedpact_answers_total", own, of["answers"]
    yield "fedpact_answer_seconds", own, of["seconds"]
    yield "fedpact_ledger_entries", {"site": of["name"]}, of["ledger_entries"]
    for code, count in of["refusals"].items():
        yield "fedpact_refusals_total", {**own, "code": code}, count
    for run, each in of["ledger"].items():
        labels = {"run": run, "site": of["name"]}
        yield "fedpact_epsilon_spent", labels, each["epsilon_spent"]
        yield "fedpact_epsilon_reserved", labels, each["epsilon_reserved"]
        yield "fedpact_delta", labels, each["delta"]


def _labels(labels: Mapping[str, str]) -> str:
    told = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{told}}}" if told else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    # To the last digit: rounded down it would be no bound.
    return repr(float(value))


Document = dict[str, Any]


def take_snapshot(directory: Path) -> Document:
    """Return what a run's folder, a server's or a site's directory, or a deployment's, says.

    Raises DataError: it is none of them. LedgerError: a site's ledger is damaged.
    """
    if (directory / "site.toml").exists():
        return _site(directory)
    if (directory / "server" / "federation.toml").exists():
        directory = directory / "server"
    folder = folder_of_run(directory)
    if not (folder / "plan.json").exists() and folder == directory:
        raise DataError(
            f"{directory} holds no run: expected the folder of a run, or the directory of a "
            "deployment's server or site"
        )
    return _run(folder)


def _run(folder: Path) -> Document:
    plan, privacy = _json(folder / "plan.json"), _json(folder / "privacy.json")
    summary = _json(folder / "summary.json")
    records = _rounds(folder / "rounds.jsonl")
    last = records[-1] if records else {}
    done, planned = int(last.get("round", 0)), plan.get("rounds")
    named: Mapping[str, Any] = privacy.get("sites") or {}
    waits = _json(folder / WAITS)
    names = sorted({*named, *last.get("epsilon", {}), *waits.get("sites", {})})
    refusals = dict[str, dict[str, int]]()
    for record in records:
        for site, code in record.get("refused", {}).items():
            of_site = refusals.setdefault(site, {})
            of_site[code] = of_site.get(code, 0) + 1
    return {
        "kind": "run",
        "name": str(_json(folder / "environment.json").get("run") or folder.name),
        "algorithm": plan.get("algorithm"),
        "status": _status(summary, begun=bool(records)),
        "private": bool(privacy.get("private")),
        "adjacency": privacy.get("adjacency"),
        "round": done,
        "rounds": planned,
        "bytes_down": sum(record.get("bytes_down", 0) for record in records),
        "bytes_up": sum(record.get("bytes_up", 0) for record in records),
        # Of held-out records themselves, which no site of a deployment would tell.
        "simulator_only": bool(privacy.get("accuracy_pooled")),
        "asked_in_round": waits.get("round"),
        "history": [
            {key: record.get(key) for key in ("round", "accuracy", "loss", "seconds")}
            for record in records
        ],
        "sites": {
            name: {
                "epsilon_spent": _bound(last.get("epsilon", {}), name),
                "epsilon_reserved": _bound(named.get(name, {}), "epsilon_reserved"),
                "delta": named.get(name, {}).get("delta"),
                "seconds": waits.get("sites", {}).get(name, {}).get("seconds"),
                "waiting": bool(waits.get("sites", {}).get(name, {}).get("waiting")),
                "refusals": refusals.get(name, {}),
            }
            for name in names
        },
    }


def _status(summary: Mapping[str, Any], *, begun: bool) -> str:
    return str(summary.get("status") or ("running" if begun else "not begun"))


def _bound(of: Mapping[str, Any], name: str) -> float | None:
    """Return an ε of a run's files, where null stands for infinity; None where there is none."""
    if name not in of:
        return None
    return math.inf if of[name] is None else float(of[name])


def _site(directory: Path) -> Document:
    settings = parse_toml(SiteSettings, directory / "site.toml")
    federation = Federation.read(directory / "federation.toml")
    plan, path = _json(directory / "plan.json"), directory / settings.ledger
    progress = Progress.of(read_store(directory, PROGRESS))
    if progress.run != federation.run:
        # Of an earlier run of this site.
        progress = Progress()
    ledger = _ledger(path, *_stamp(path)) if path.exists() else {"runs": {}, "entries": 0}
    handed = _json(directory / "run" / "summary.json")
    return {
        "kind": "site",
        "name": settings.name,
        "run": federation.run,
        "algorithm": plan.get("algorithm"),
        "status": "ended: the final model is here"
        # Else the model is an earlier run's.
        if handed.get("run") == federation.run
        else progress.state,
        "round": progress.round,
        "rounds": plan.get("rounds"),
        "answers": progress.answers,
        "refusals": dict(progress.refusals),
        "seconds": progress.seconds,
        "ledger_entries": ledger["entries"],
        "adjacency": ledger.get("adjacency"),
        "ledger": ledger["runs"],
    }


@lru_cache(maxsize=16)
def _ledger(path: Path, changed: int, length: int) -> Document:
    """What a ledger promised and spent. changed, length: of the file, so that it is read anew."""
    del changed, length
    entries, torn = read_all(path)
    exposed = {entry["run"] for entry in entries if entry["kind"] == "unprotected"}
    runs = dict[str, Document]()
    for entry in entries:
        if entry["kind"] != "reserve":
            continue
        spent = spent_of(entry["run"], entries)
        shared = shared_noise.ADDED_DELTA if entry.get("honest") else 0.0
        cost = epsilon(spent, entry["delta"] - shared)
        reserved = math.inf if entry["run"] in exposed else entry["epsilon"]
        runs[entry["run"]] = {
            # What an unreadable last line was is decided when the ledger is opened.
            "epsilon_spent": reserved if torn or math.isinf(reserved) else cost,
            "epsilon_reserved": reserved,
            "delta": entry["delta"],
            "rounds": max((e["round"] for e in entries if e["kind"] == "charge"
                           and e["run"] == entry["run"]), default=0),
            "unit": entry["unit"],
        }  # fmt: skip
    unit = next((run["unit"] for run in runs.values()), "record")
    return {"runs": runs, "entries": len(entries), "adjacency": ADJACENCY_BY_UNIT[unit]}


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _json(path: Path) -> Mapping[str, Any]:
    """Return a JSON file's table; an empty one where it is not there, or none yet."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _rounds(path: Path) -> list[Document]:
    """Return the rounds so far; a line that is being written is left for the next look."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError:
        return []
    found = list[Document]()
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


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
    page = (files("fedpact.deployment") / "page.html").read_text(encoding="utf-8")

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


def watch(directory: Path, port: int, once: bool, as_json: bool) -> None:
    """Carry out `fedpact watch`."""
    out = Console(highlight=False, soft_wrap=True)
    if once or as_json:
        found = take_snapshot(directory)
        told = encode_json(found) if as_json else "\n".join(_lines(found))
        out.print(told, markup=False)
        return
    with create_server(directory, port) as server:
        where = address(server)
        out.print(f"{where} shows {directory}, {where}metrics is for Prometheus; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            out.print("ended")


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{found['name']}: {found['status']}, round {found['round']} of {found['rounds']}"
    if found["kind"] == "site":
        for run, each in found["ledger"].items():
            yield f"  {run}: ε {upper(each['epsilon_spent'])} of {upper(each['epsilon_reserved'])}"
        codes = ", ".join(f"{code} {count}" for code, count in found["refusals"].items())
        yield f"  {found['answers']} answers; refusals: {codes or 'none'}"
        return
    yield f"  {found['bytes_down']:,} bytes down, {found['bytes_up']:,} up"
    for site, each in found["sites"].items():
        told = f"  {site}:"
        if each["epsilon_spent"] is not None:
            told += f" ε {upper(each['epsilon_spent'])}"
        if each["seconds"] is not None:
            told += f" {each['seconds']:.3f} s" + (" and waiting" if each["waiting"] else "")
        yield told + "".join(f" {code} {count}" for code, count in each["refusals"].items())
