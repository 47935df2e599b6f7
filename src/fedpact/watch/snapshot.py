"""What a directory's files say of a run at this moment: nothing is asked of whoever carries it out.

A run's folder or a server's directory shows all sites, as the server counts them. A site's own
directory shows that site: its ledger, what it answered, and no other site's name.
"""

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedpact.engines.parties.federation import Federation, parse_toml
from fedpact.engines.parties.progress import Progress
from fedpact.engines.parties.records import SiteSettings
from fedpact.engines.together import BACKUP_FILE
from fedpact.errors import DataError
from fedpact.folder import WAITS, folder_of_run
from fedpact.ledger.chain import read_all
from fedpact.ledger.receipt import spent_of
from fedpact.theory import shares
from fedpact.theory.accounting import ADJACENCY_BY_UNIT, epsilon

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
        "status": _status(folder, summary, begun=bool(records)),
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


def _status(folder: Path, summary: Mapping[str, Any], *, begun: bool) -> str:
    if (folder / BACKUP_FILE).exists():
        return "being extended, or cut off at that: resume, load or extend it"
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
    progress = Progress.read(directory)
    if progress.run != federation.run:
        # Of a run that was extended since, which goes on from there.
        progress = Progress(round=int(plan.get("after") or 0))
    ledger = _ledger(path, *_stamp(path)) if path.exists() else {"runs": {}, "entries": 0}
    handed = _json(directory / "run" / "summary.json")
    return {
        "kind": "site",
        "name": settings.name,
        "run": federation.run,
        "algorithm": plan.get("algorithm"),
        "status": "ended: the final model is here"
        # Of a run that was extended since, the model is of before.
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
        shared = shares.ADDED_DELTA if entry.get("honest") else 0.0
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
