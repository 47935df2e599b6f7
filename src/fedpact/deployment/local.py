"""A whole federation on this machine: start its parties in the background, look, end them."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedpact.common.errors import DataError, PlanError
from fedpact.common.files import PRIVATE, only_one, parse_errors, write_whole
from fedpact.common.messages import RoundRecord
from fedpact.deployment.federation import Federation, parse_toml
from fedpact.deployment.final_model import read_ending
from fedpact.deployment.processes import Process, environment
from fedpact.deployment.site_evaluation import own_figures
from fedpact.deployment.site_records import SiteSettings
from fedpact.plan import Plan
from fedpact.privacy.ledger.receipt import receipt
from fedpact.simulation.flower import require_flower

_GRACE_SECONDS = 10.0
_SERVER = "server"
_MODULE = "fedpact.deployment.party"
_ENDED_HERE = "ended, and the final model is here"


def parties(directory: Path) -> dict[str, Path]:
    """Return each party's directory by name: of a whole deployment, or of the one party it is.

    Raises DataError: neither lies there.
    """
    if (directory / "site.toml").exists():
        return {parse_toml(SiteSettings, directory / "site.toml").name: directory}
    if (directory / "server.key").exists():
        return {_SERVER: directory}
    server = directory / _SERVER
    if not (server / "federation.toml").exists():
        raise DataError(
            f"{directory} holds no deployment: name the directory that `fedpact deploy init` wrote"
        )
    names = Federation.read(server / "federation.toml").names
    return {_SERVER: server, **{name: directory / "sites" / name for name in names}}


def start_parties(directory: Path, only: str | None = None) -> dict[str, int]:
    """Start every party that does not run, or one of them; return name -> process number."""
    parties(directory)  # before there is a lock in a folder that is no deployment
    with one_at_a_time(directory):
        places = parties(directory)
        running = _running(directory, places)
        for name, where in places.items():
            if name not in running and only in (None, name):
                running[name] = Process.of(_spawn(_kind(name), where.resolve()))
                # Written down one by one: a start that is cut off leaves nobody unknown.
                _record(directory, running)
    return {name: process.number for name, process in running.items()}


def stop(directory: Path, only: str | None = None) -> list[str]:
    """End every party that runs, or one of them; return the names of those that ran.

    A process is one of them if it was started when this says, for the party's directory; one of a
    site that has been taken out of federation.toml since is, too.
    """
    places = parties(directory)
    with one_at_a_time(directory):
        running = _running(directory, places)
        places = _with_former(directory, places, running)
        chosen = {name: p for name, p in running.items() if only in (None, name)}
        _signal(chosen, places, signal.SIGTERM)
        end = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < end and any(
            process.runs(_words(name, places)) for name, process in chosen.items()
        ):
            time.sleep(0.05)
        # Flower's process dies with its parent.
        _signal(chosen, places, signal.SIGKILL)
        _record(directory, {name: p for name, p in running.items() if name not in chosen})
    return sorted(chosen)


def run_all_parties(directory: Path) -> Path:
    """Start all parties, wait until the server has ended, stop the rest; return its run folder.

    Raises PlanError: it ended without a run, with the last words of its log.
    """
    require_flower()
    start_parties(directory)
    try:
        while inspect_deployment(directory)["running"][_SERVER]:
            time.sleep(0.5)
    finally:
        stop(directory)
    run = directory / _SERVER / "run"
    if not (run / "summary.json").exists():
        raise PlanError(
            f"the server ended before its run had: {last_log_lines(directory, _SERVER)}"
        )
    return run


def inspect_deployment(directory: Path) -> dict[str, Any]:
    """Return who runs, the last committed round, and what each ledger on this machine says.

    evaluations: the (ε, δ) that they may cost whoever is held out; None without any. ended: how the
    log of each party ends that has run here and does not any more.
    """
    places = parties(directory)
    running = _running(directory, places)
    server = places.get(_SERVER)
    any_party = next(iter(places.values()))
    plan = Plan.read(any_party / "plan.json")
    federation = Federation.read(any_party / "federation.toml")
    return {
        "run": federation.run,
        "adjacency": plan.privacy.adjacency,
        "evaluations": [plan.evaluation.epsilon, plan.evaluation.delta]
        if plan.private and plan.evaluation.used
        else None,
        "running": {name: name in running for name in {**places, **running}},
        "ended": {
            name: last_log_lines(directory, name)
            for name, where in places.items()
            if name not in running and (where / "log.txt").exists()
        },
        "round": _last_round(server) if server else None,
        "status": _outcome(server) if server else _at_site(any_party, federation.run),
        # A site's alone: of no other directory, so that nobody sees it in passing.
        "own_figures": own_figures(directory) if (directory / "site.toml").exists() else None,
        "ledgers": {name: ledger_of(where) for name, where in places.items() if name != _SERVER},
    }


def last_log_lines(directory: Path, name: str) -> str:
    """Return the last line of a party's log."""
    log = parties(directory)[name] / "log.txt"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "its log is empty")


def _spawn(kind: str, where: Path) -> int:
    """Start a party's process in a session of its own, which outlives this one."""
    log, appending = str(where / "log.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", _MODULE, kind, str(where)],
        environment(where),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, appending, PRIVATE),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def ledger_path(site: Path) -> Path:
    """Return where a site's owner says that its ledger is."""
    return site / parse_toml(SiteSettings, site / "site.toml").ledger


def ledger_of(site: Path) -> Mapping[str, Any] | None:
    """Return the receipt of a site's ledger, None before there is one."""
    path = ledger_path(site)
    # The site may be about to write its first entry.
    return receipt(path) if path.exists() and b"\n" in path.read_bytes() else None


def _last_round(server: Path) -> dict[str, Any] | None:
    path = server / "run" / "rounds.jsonl"
    # What follows the last end of a line is being written, or was when the server was killed.
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    if not lines:
        return None
    with parse_errors(path, "the server says more when it is started"):
        record = RoundRecord.from_json(lines[-1].decode())
    told = ("round", "accuracy", "loss", "epsilon", "epsilon_alone", "refused", "seconds")
    return {name: getattr(record, name) for name in told}


def _outcome(server: Path) -> str:
    path = server / "run" / "summary.json"
    return json.loads(path.read_bytes())["status"] if path.exists() else "not ended"


def _at_site(site: Path, run: str) -> str:
    """Return how a run stands as far as a site knows: whether it has the final model."""
    return "known to the server" if read_ending(site, run) is None else _ENDED_HERE


def _kind(name: str) -> str:
    return "server" if name == _SERVER else "site"


def _words(name: str, places: Mapping[str, Path]) -> list[str]:
    """Return what stands in the command of a party's process, and in no stranger's."""
    return [_MODULE, _kind(name), str(places[name].resolve())]


def _signal(
    processes: Mapping[str, Process], places: Mapping[str, Path], number: signal.Signals
) -> None:
    for name, process in processes.items():
        process.send(number, _words(name, places))


def one_at_a_time(directory: Path) -> AbstractContextManager[None]:
    """Have a start, stop or extension wait for another, so that no process goes unrecorded."""
    return only_one(directory / "processes.lock", "processes are being started or ended", wait=True)


def _with_former(
    directory: Path, places: Mapping[str, Path], names: Iterable[str]
) -> dict[str, Path]:
    """Return these places, and where each other party lay when its process was recorded."""
    alone = (directory / "site.toml").exists()
    former = {name: directory if alone else directory / "sites" / name for name in names}
    return {**former, **places}


def _running(directory: Path, places: Mapping[str, Path]) -> dict[str, Process]:
    """Return the processes that were recorded, and still run for these parties or former ones.

    Whether a party was started by itself or with the whole deployment, both directories tell it.
    """
    own = _recorded(directory)
    known = _with_former(directory, places, own)
    elsewhere = [_whole_of(directory)] if directory in places.values() else places.values()
    running = dict[str, Process]()
    for recorded in (*map(_recorded, elsewhere), own):
        running |= {n: p for n, p in recorded.items() if n in known and p.runs(_words(n, known))}
    return running


def _whole_of(party: Path) -> Path:
    """Return where the deployment of a party on this machine lies, if it is one as `init` wrote."""
    above = party.resolve().parent
    return above.parent if above.name == "sites" else above


def _recorded(directory: Path) -> dict[str, Process]:
    """Return the processes that a directory's record names, which may have ended."""
    path = directory / "processes.json"
    with suppress(FileNotFoundError), parse_errors(path, "end what runs by hand, then remove it"):
        entries = json.loads(path.read_bytes()).items()
        return {name: Process(**entry) for name, entry in entries}
    return {}


def _record(directory: Path, running: Mapping[str, Process]) -> None:
    content = {name: asdict(process) for name, process in running.items()}
    write_whole(directory / "processes.json", json.dumps(content).encode() + b"\n")
