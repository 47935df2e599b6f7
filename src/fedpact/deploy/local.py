"""A whole federation on this machine: start its parties in the background, look, end them."""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpact.deploy.processes import environment
from fedpact.engines.federation import Federation, parse_toml
from fedpact.engines.site import SiteSettings
from fedpact.engines.standing import Standing
from fedpact.errors import DataError
from fedpact.folder import write_whole
from fedpact.messages import RoundRecord
from fedpact.privacy.receipt import receipt

_GRACE_SECONDS = 10.0
_SERVER = "server"


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


def start(directory: Path, only: str | None = None) -> dict[str, int]:
    """Start every party that does not run, or one of them; return name -> process number."""
    running = {name: number for name, number in _recorded(directory).items() if _is_alive(number)}
    for name, where in parties(directory).items():
        if name in running or (only is not None and name != only):
            continue
        kind = "server" if name == _SERVER else "site"
        running[name] = _spawn(kind, where.resolve())
    _record(directory, running)
    return running


def stop(directory: Path, only: str | None = None) -> list[str]:
    """End every party that runs, or one of them; return the names of those that ran."""
    recorded = _recorded(directory)
    chosen = {n: p for n, p in recorded.items() if only in (None, n) and _is_alive(p)}
    for number in chosen.values():
        os.kill(number, signal.SIGTERM)
    end = time.monotonic() + _GRACE_SECONDS
    while any(map(_is_alive, chosen.values())) and time.monotonic() < end:
        time.sleep(0.05)
    for number in filter(_is_alive, chosen.values()):
        os.killpg(number, signal.SIGKILL)
    _record(directory, {n: p for n, p in recorded.items() if n not in chosen and _is_alive(p)})
    return sorted(chosen)


def look(directory: Path) -> dict[str, Any]:
    """Return who runs, the last committed round, and what each ledger on this machine says."""
    numbers = _recorded(directory)
    places = parties(directory)
    server = places.get(_SERVER)
    return {
        "run": Federation.read(next(iter(places.values())) / "federation.toml").run,
        "running": {name: _is_alive(numbers.get(name, 0)) for name in places},
        "round": _last_round(server) if server else None,
        "status": _outcome(server) if server else "known to the server",
        "ledgers": {name: ledger_of(where) for name, where in places.items() if name != _SERVER},
    }


def readmit(directory: Path, site: str) -> str:
    """Let a site in again that the server has barred; return why it had. The server may run.

    Raises InputError of some kind: no server lies there, or the site is not barred.
    """
    server = parties(directory).get(_SERVER)
    if server is None:
        raise DataError(f"{directory} is a site's: name the server's directory, which bars sites")
    return Standing(server / "run").readmit(site)


def last_words(directory: Path, name: str) -> str:
    """Return the last line of a party's log."""
    log = parties(directory)[name] / "log.txt"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "its log is empty")


def _spawn(kind: str, where: Path) -> int:
    """Start a party's process in a session of its own, which outlives this one."""
    log, appending = str(where / "log.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "fedpact.deploy.party", kind, str(where)],
        environment(where),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, appending, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def ledger_of(site: Path) -> Mapping[str, Any] | None:
    """Return the receipt of a site's ledger, None before there is one."""
    settings = parse_toml(SiteSettings, site / "site.toml")
    path = site / settings.ledger
    # The site may be about to write its first entry.
    return receipt(path) if path.exists() and b"\n" in path.read_bytes() else None


def _last_round(server: Path) -> dict[str, Any] | None:
    path = server / "run" / "rounds.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if not lines:
        return None
    record = RoundRecord.from_json(lines[-1])
    told = ("round", "accuracy", "epsilon", "refused", "seconds")
    return {name: getattr(record, name) for name in told}


def _outcome(server: Path) -> str:
    path = server / "run" / "summary.json"
    return json.loads(path.read_bytes())["status"] if path.exists() else "not ended"


def _is_alive(number: int) -> bool:
    """Whether a process of ours runs; one that has ended and was not waited for does not."""
    if number <= 0:
        return False
    try:
        done, _ = os.waitpid(number, os.WNOHANG)
        return done == 0
    except ChildProcessError:
        pass
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{number}/stat")
    # A number may have gone to another program since.
    return not stat.exists() or b"fedpact" in Path(f"/proc/{number}/cmdline").read_bytes()


def _recorded(directory: Path) -> dict[str, int]:
    path = directory / "processes.json"
    return json.loads(path.read_bytes()) if path.exists() else {}


def _record(directory: Path, numbers: Mapping[str, int]) -> None:
    write_whole(directory / "processes.json", json.dumps(numbers).encode() + b"\n")
