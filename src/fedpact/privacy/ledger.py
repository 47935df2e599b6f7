"""A site's ledger: what it has promised and what it has spent, written down before it is released.

One file of JSON lines, append-only. Each entry carries the hash of the one before, so an altered
file does not open. Kinds of entries:

    open      whose ledger this is, and whether its releases are hypothetical (a simulation's)
    reserve   a run may make these events; all of them together cost at most (ε, δ)
    charge    `count` joint events of one kind, for one request, about to be released

`charge` returns only after the entry is on the disk. A crash between the two costs budget, never
privacy. The events of a reservation may be used in any order and number up to the reserved counts:
what is left unused only lowers the cost.
"""

import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedpact.check import count as at_least_one
from fedpact.errors import BudgetExhausted, LedgerError, PolicyRefused
from fedpact.theory.accounting import Budget, History, SampledGaussian, epsilon

_FORMAT = 1
Entry = dict[str, Any]


def _digest(entry: Entry) -> str:
    body = {key: value for key, value in entry.items() if key != "hash"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_entries(path: Path) -> list[Entry]:
    """Return a ledger's entries after checking every link of the chain.

    Raises LedgerError: a line that is no entry, or whose hash or place in the chain is wrong.
    """
    entries: list[Entry] = []
    head = ""
    for number, line in enumerate(path.read_bytes().splitlines()):
        try:
            entry: Entry = json.loads(line)
            intact = (
                entry["number"] == number
                and entry["previous"] == head
                and entry["hash"] == _digest(entry)
            )
        except (ValueError, KeyError, TypeError):
            intact = False
            entry = {}
        if not intact:
            raise LedgerError(
                f"ledger {path}: line {number + 1} is unreadable or was altered. "
                "The site can no longer prove what it spent: restore the file from a backup that "
                "is not older than its last release, or retire this data set's budget"
            )
        head = entry["hash"]
        entries.append(entry)
    return entries


class Ledger:
    """An open ledger. One process at a time writes to it; threads may share it.

    Raises LedgerError: another site's ledger, an altered one, or one that is open elsewhere.
    """

    def __init__(self, path: Path, site: str, *, hypothetical: bool) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._reserved: dict[str, tuple[Budget, Counter[SampledGaussian]]] = {}
        self._spent: dict[str, Counter[SampledGaussian]] = {}
        self._requests: dict[tuple[str, str], int] = {}
        self.head, self.length = "", 0
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = read_entries(path) if path.exists() else []
        self._file = path.open("ab")
        for entry in entries:
            self._apply(entry)
        opening = {"site": site, "hypothetical": hypothetical, "format": _FORMAT}
        if not entries:
            self._append({"kind": "open", **opening})
        elif any(entries[0].get(key) != value for key, value in opening.items()):
            found = {key: entries[0].get(key) for key in opening}
            self.close()
            raise LedgerError(
                f"ledger {path} was opened as {found}, not as {opening}: "
                "name the ledger that belongs to this site and to this kind of run"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Everything charged is on the disk already."""
        self._file.close()

    def reserve(self, run: str, budget: Budget, events: History) -> None:
        """Promise a run these events, at a cost of at most `budget`; the same promise twice is one.

        Raises PolicyRefused: the events cost more than the budget, or the run has other terms.
        """
        asked = Counter({event: number for event, number in events.items() if number})
        with self._lock:
            if run in self._reserved:
                if self._reserved[run] != (budget, asked):
                    raise PolicyRefused(
                        f"run {run!r} has a reservation with other terms in {self.path}: a run's "
                        "mechanisms are fixed at its start; use a new run name"
                    )
                return
            cost = epsilon(asked, budget.delta)
            if not cost <= budget.epsilon:
                raise PolicyRefused(
                    f"the events reserved for run {run!r} cost ε = {cost:.6g} at δ = "
                    f"{budget.delta:g} (add/remove one record), more than the ε = "
                    f"{budget.epsilon:g} they were promised for"
                )
            self._append(
                {
                    "kind": "reserve",
                    "run": run,
                    "epsilon": budget.epsilon,
                    "delta": budget.delta,
                    "events": [[e.q, e.sigma, n] for e, n in sorted(asked.items())],
                }
            )

    def charge(
        self,
        run: str,
        request: str,
        event: SampledGaussian,
        count: int,
        *,
        purpose: tuple[str, ...],
        round_number: int,
        attempt: int = 0,
    ) -> None:
        """Write down `count` events on the disk, before the first of them is released.

        request: identifies what is released (task and place in it); a request that was charged
        before is the same release and is not charged again. purpose: the channels of the event.
        Raises PolicyRefused: nothing reserved, or not this event. BudgetExhausted: too many.
        """
        at_least_one(count=count)
        with self._lock:
            if self._requests.get((run, request), 0) >= count:
                return
            if run not in self._reserved or event not in self._reserved[run][1]:
                raise PolicyRefused(
                    f"run {run!r} asks for {event}, which its reservation in {self.path} does not "
                    "name: reserve it at the run's start"
                )
            allowed = self._reserved[run][1][event]
            spent = self._spent.get(run, Counter())[event]
            if spent + count > allowed:
                raise BudgetExhausted(
                    f"run {run!r} asks for {count} more of {event}: {spent} of {allowed} reserved "
                    "events are spent"
                )
            self._append(
                {
                    "kind": "charge",
                    "mechanism": "sampled_gaussian",
                    "run": run,
                    "round": round_number,
                    "attempt": attempt,
                    "request": request,
                    "purpose": list(purpose),
                    "q": event.q,
                    "sigma": event.sigma,
                    "count": count,
                }
            )

    def spent(self, run: str) -> Mapping[SampledGaussian, int]:
        """Return the events charged to a run so far."""
        with self._lock:
            return dict(self._spent.get(run, Counter()))

    def _append(self, entry: Entry) -> None:
        entry = {
            "number": self.length,
            **entry,
            "time": round(time.time(), 3),
            "previous": self.head,
        }
        entry["hash"] = _digest(entry)
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._apply(entry)

    def _apply(self, entry: Entry) -> None:
        match entry["kind"]:
            case "reserve":
                events = {SampledGaussian(q, sigma): n for q, sigma, n in entry["events"]}
                budget = Budget(entry["epsilon"], entry["delta"])
                self._reserved[entry["run"]] = (budget, Counter(events))
            case "charge":
                event = SampledGaussian(entry["q"], entry["sigma"])
                self._spent.setdefault(entry["run"], Counter())[event] += entry["count"]
                self._requests[entry["run"], entry["request"]] = entry["count"]
            case _:
                pass
        self.head, self.length = entry["hash"], self.length + 1
