"""`fedpact watch`: the state of a run from its files, as a local page, JSON and Prometheus metrics.

A run's folder or a server's directory shows all sites, as known to the server. A site's own
directory shows only that site: its ledger and its answers. Figures for the owner alone are not
included, as other accounts of the machine can open the page.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/

    /            the page, which refreshes every two seconds
    /data.json   the snapshot
    /metrics     the same for Prometheus

The server writes nothing, accepts only GET, and only for this machine's own host names, so that no
other web page in the same browser can read it.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, cast

from fedpact.common.errors import DataError, FedpactError, InputError
from fedpact.common.files import read_json_table
from fedpact.common.format import against_majority_class, count_noun
from fedpact.common.messages import REASONS, RoundRecord
from fedpact.common.run_folder import RUN, WAITS, folder_of_run
from fedpact.deployment.federation import Federation
from fedpact.deployment.final_model import read_ending
from fedpact.deployment.flower.program import is_held
from fedpact.deployment.processes import SERVER, last_log_lines, parties
from fedpact.deployment.server import FILE as HANDED_OVER
from fedpact.deployment.signatures import read_approvals
from fedpact.deployment.site_evaluation import own_figures, read_progress
from fedpact.deployment.site_records import SiteSettings, read_receipt
from fedpact.deployment.store import read_store
from fedpact.evaluation.intervals import released_so_far
from fedpact.plan import Plan
from fedpact.privacy.ledger.receipt import receipt
from fedpact.report.evaluations import compare_with_classes, describe_figures
from fedpact.report.run_summary import RunSummary, read_run
from fedpact.report.template import page

Document = dict[str, Any]
_TERMS: Final = ("epsilon_allowed", "epsilon_reserved", "delta")
# The time left is estimated from the mean of this many last rounds.
_RECENT: Final = 10


def take_snapshot(directory: Path) -> Document:
    """Return the state of a run's folder, or of a deployment's, server's or site's directory.

    Raises DataError: it is none of them, or its run is still being set up. LedgerError: a damaged
    ledger of a site.
    """
    if (directory / "site.toml").exists():
        return _site(directory)
    return _run(*find_run(directory))


def inspect_deployment(directory: Path) -> Document:
    """Return the snapshot with what only owners see: ledgers, and a site's exact figures.

    running: which parties run here. stopped: the last log line of each that ran here and does not.
    evaluations: their (ε, δ) for a held-out record; None if nothing is released.
    """
    places = parties(directory)
    any_party = next(iter(places.values()))
    plan = Plan.read(any_party / "plan.json")
    run, once = Federation.read(any_party / "federation.toml").run, plan.evaluation_terms
    seen: Document = {"state": "not begun", "ended": False, "round": 0, "rounds": plan.rounds}
    if SERVER not in places or (places[SERVER] / RUN / "privacy.json").exists():
        seen = take_snapshot(directory)
    running = {name: is_held(where) for name, where in places.items()}
    return {
        **seen,
        "run": run,
        "adjacency": plan.privacy.adjacency,
        "evaluations": [once.budget.epsilon, once.budget.delta] if once else None,
        "running": running,
        "stopped": {
            name: last_log_lines(directory, name)
            for name, where in places.items()
            if not running[name] and (where / "log.txt").exists()
        },
        # Only in a site's own directory, so that no one else sees these figures by accident.
        "own_figures": None if SERVER in places else own_figures(directory, run),
        "ledgers": {
            name: read_receipt(where / SiteSettings.read(where).ledger)
            for name, where in places.items()
            if name != SERVER
        },
    }


def find_run(directory: Path) -> tuple[Path, Path]:
    """Return the directory that a run belongs to (a server's, or the run's own), and its folder.

    Raises DataError: there is no run.
    """
    if (directory / "server" / "federation.toml").exists():
        directory = directory / "server"
    folder = folder_of_run(directory)
    if not (folder / "plan.json").exists() and folder == directory:
        raise DataError(
            f"{directory} has no run: expected the folder of a run, or the directory of a "
            "deployment's server or site"
        )
    return directory, folder


def _run(party: Path, folder: Path) -> Document:
    if not (folder / "privacy.json").exists():
        raise DataError(f"the run in {folder} is being set up: look again in a moment")
    run, held = read_run(folder, begun=False), is_held(party) or is_held(folder)
    waits, last = read_json_table(folder / WAITS).get("sites", {}), run.last
    ended = bool(run.summary) and not (held and run.status == "stopped")
    begun = (folder / "rounds.jsonl").exists()
    said = "running" if begun else "waiting for the first round"
    state = run.ended if ended else said if held else "interrupted"
    released = run.released or released_so_far(run.records, run.privacy.get("evaluation"))
    planned = int(run.plan["rounds"])
    recent = [record.seconds for record in run.records[1:][-_RECENT:]]
    missing = _missing(run.records, waits)
    sites = {
        site: {
            "epsilon_spent": last.epsilon.get(site),
            "epsilon_alone_spent": last.epsilon_alone.get(site),
            **{name: terms and getattr(terms, name) for name in _TERMS},
            "seconds": told.get("seconds"),
            "waiting": not ended and bool(told.get("waiting")),
            "refusals": Counter(r.refused[site] for r in run.records if site in r.refused),
            "missing": missing.get(site),
        }
        for site in sorted({*run.sites, *waits})
        for told, terms in [(waits.get(site, {}), run.site_privacy.get(site))]
    }
    return {
        "kind": "run",
        "name": run.title,
        "run": str(run.environment.get("run") or folder.resolve().name),
        "algorithm": run.plan.get("algorithm"),
        "status": run.status if ended else state,
        "state": state,
        "ended": ended,
        "private": run.private,
        "seeded": run.private and run.seeded,
        "adjacency": run.privacy["adjacency"],
        "round": last.round,
        "rounds": planned,
        "seconds_spent": run.seconds,
        "seconds_left": (planned - last.round) * statistics.fmean(recent)
        if recent and held and not ended
        else None,
        "bytes_down": run.bytes_down,
        "bytes_up": run.bytes_up,
        "sockets": run.sockets,
        "curves": _curves(run, released),
        "compared": _compare(run, released),
        "sites": sites,
        "to_do": list(_to_do(run, party, folder, missing, ended=ended, held=held)),
    }


def _missing(records: Iterable[RoundRecord], waits: Mapping[str, Document]) -> dict[str, Document]:
    """Return the sites missing from the last round in which they were asked, with the reason.

    since: the first round without the site. Before the first round: the sites waited for.
    """
    found = dict[str, Document]()
    for record in records:
        found = {site: was for site, was in found.items() if not record.was_asked(site)} | {
            site: _reason(code, found.get(site, {}).get("since", record.round))
            for site, code in record.refused.items()
        }
    return found | {site: _reason(one["code"], 0) for site, one in waits.items() if "code" in one}


def _reason(code: str, since: int) -> Document:
    return {"code": code, "since": since, "why": REASONS.get(code, "see its own log")}


def _curves(run: RunSummary, released: Document | None) -> list[Document]:
    """Return the available curves of accuracy and mean loss by round.

    points: [round, value], with the two ends of the interval if the value is released.
    """
    found, exact = list[Document](), "simulator only" if run.pooled else "on public test data"
    for name in ("accuracy", "loss"):
        figures = [
            (each["round"], figure)
            for each in (released or {"by_round": []})["by_round"]
            for figure in each["figures"]
            if figure["name"] == name
        ]
        about = {figure["about"] for _, figure in figures} - {"all"}
        of_sites = ", ".join(["released by the sites", *about])
        noisy = [[r, *(figure[key] for key in ("value", "low", "high"))] for r, figure in figures]
        public = [[record.round, getattr(record, name)] for record in run.evaluated]
        for of, points in ((of_sites, noisy), (exact, public)):
            # Labels that are numbers have no accuracy: NaN, or none where noise leaves none.
            known = [p for p in points if all(x is not None and x == x for x in p)]
            if known:
                found.append({"name": name, "of": of, "points": known})
    return found


def _compare(run: RunSummary, released: Document | None) -> list[str]:
    """Return what was learned, beside the commonest class; of released figures also the worst."""
    if released is not None:
        told = [describe_figures(released["figures"]), *compare_with_classes(released)]
        return [f"after round {released['round']}, as released: {one}" for one in told]
    told = against_majority_class(run.accuracy, run.summary.get("commonest"))
    return [f"after round {run.evaluated[-1].round}: {told}"] if told else []


def _to_do(
    run: RunSummary,
    party: Path,
    folder: Path,
    missing: Mapping[str, Document],
    *,
    ended: bool,
    held: bool,
) -> Iterable[str]:
    deployed = party != folder
    goes_on = f"`fedpact deploy server {party}`" if deployed else f"`fedpact resume {folder}`"
    if not held and (not ended or run.status == "stopped"):
        yield f"Nothing carries the run out; {goes_on} goes on after round {run.last.round}."
    # A budget that is spent is nothing to mend.
    for site, told in sorted(missing.items()):
        if not ended and told["code"] != "budget":
            yield f"Site {site} {told['why']}."
    if deployed and ended and run.last.round:
        handed = read_json_table(folder / HANDED_OVER)
        for site in run.sites:
            if handed.get(site, [None, None])[1] != run.last.round:
                yield (
                    f"Site {site} has not got the final model: start the server again when the "
                    "site is there, or have its owner run `fedpact deploy model`."
                )


def _site(directory: Path) -> Document:
    settings = SiteSettings.read(directory)
    federation = Federation.read(directory / "federation.toml")
    plan, path = read_json_table(directory / "plan.json"), directory / settings.ledger
    progress = read_progress(read_store(directory, f"{federation.run}/progress"))
    ledger = _ledger(path, path.stat().st_mtime_ns) if path.exists() else {"runs": {}, "entries": 0}
    ended = read_ending(directory, federation.run) is not None
    running, begun = is_held(directory), "running" if progress["answers"] else "no answer yet"
    to_do = [
        f"It refused {count_noun(n, 'task')} ({c}): it {REASONS.get(c, 'logs the reason')}."
        for c, n in progress["refusals"].items()
    ]
    if missing := read_approvals(directory).missing:
        to_do.append(
            f"It waits for {count_noun(missing, 'more approval')}: read what it will release with "
            f"`fedpact deploy approve {directory}`, then sign with --by NAME."
        )
    if not (running or ended):
        to_do.append(f"This site is stopped; `fedpact deploy site {directory}` starts it.")
    return {
        "kind": "site",
        "name": settings.name,
        "run": federation.run,
        "algorithm": plan.get("algorithm"),
        "state": "ended: the final model is here" if ended else begun,
        "ended": ended,
        "rounds": plan.get("rounds"),
        **progress,
        "ledger_entries": ledger["entries"],
        "adjacency": ledger.get("adjacency"),
        "ledger": {
            run: {key: each[key] for key in ("epsilon_spent", "epsilon_reserved", "delta")}
            for run, each in ledger["runs"].items()
        },
        "to_do": to_do,
    }


@lru_cache(maxsize=4)
def _ledger(path: Path, changed: int) -> Document:
    del changed
    return receipt(path)


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
    groups, lines = list(_label(of)), list[str]()
    for name, (kind, key, told) in _METRICS.items():
        found = [(labels, values[key]) for labels, values in groups if values.get(key) is not None]
        if key == "refusals":
            found = [({**own, "code": c}, n) for own, codes in found for c, n in codes.items()]
        if found:
            lines += [f"# HELP fedpact_{name} {told}", f"# TYPE fedpact_{name} {kind}"]
            # All digits: rounded down it would not be a bound.
            lines += [f"fedpact_{name}{_labels(labels)} {_number(n)}" for labels, n in found]
    return "\n".join(lines) + "\n"


def _label(of: Mapping[str, Any]) -> Iterator[tuple[dict[str, str], Mapping[str, Any]]]:
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
