"""What a ledger proves, as plain data: by run, what was promised and what was spent.

A receipt holds mechanisms, counts and budgets. It holds nothing about records: no content, no hash,
no true count.
"""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpact.errors import LedgerError
from fedpact.ledger.chain import Entry, read_all
from fedpact.ledger.reservations import FILTER, FIXED, over_runs
from fedpact.theory import shares
from fedpact.theory.accounting import UNITS, SampledGaussian, epsilon
from fedpact.theory.persons import PERSON_RECORDS, epsilon_per_person


def receipt(path: Path) -> dict[str, Any]:
    """Return the receipt of a ledger file, after checking every link of its chain.

    Raises LedgerError: no such file, altered, or not a ledger.
    """
    if not path.is_file():
        raise LedgerError(f"{path} is no ledger: name a ledger.jsonl, or the folder of a run")
    entries, torn = read_all(path)
    if not entries or entries[0].get("kind") != "open":
        raise LedgerError(f"{path} is no ledger: its first entry does not open one")
    runs = {e["run"]: _run(e, entries) for e in entries if e["kind"] in ("reserve", "filter")}
    if torn:
        # What the line was is decided when the ledger is opened; until then it may be anything.
        for run in runs.values():
            run["epsilon_spent"] = run["epsilon_reserved"]
            run["epsilon_alone_spent"] = run["epsilon_alone_reserved"]
    whole, delta = _together(runs, "epsilon_reserved")
    return {
        "site": entries[0]["site"],
        "hypothetical": entries[0]["hypothetical"],
        # A ledger's runs have one unit.
        "adjacency": UNITS[next((run["unit"] for run in runs.values()), "record")],
        "accountant": "best of PLD and RDP",
        "covers": "every release of the runs it names",
        "runs": runs,
        # Of a run and what stands beside it, which is of other records, the larger.
        "epsilon_reserved": whole,
        "epsilon_alone_reserved": _together(runs, "epsilon_alone_reserved")[0],
        "delta_reserved": delta,
        "entries": len(entries),
        "unreadable_last_line": torn,
        "head": entries[-1]["hash"],
    }


def _together(runs: dict[str, dict[str, Any]], epsilon: str) -> tuple[float, float]:
    """Return (Σ ε, Σ δ) over all runs, ε of that name."""
    return over_runs((r["beside"] or name, r[epsilon], r["delta"]) for name, r in runs.items())


def _run(reservation: Entry, entries: list[Entry]) -> dict[str, Any]:
    run, budget, delta = reservation["run"], reservation["epsilon"], reservation["delta"]
    spent, closed = _spent(run, entries)
    honest = reservation.get("honest", 0)
    cost = epsilon(spent, delta - (shares.ADDED_DELTA if honest else 0.0))
    alone, budget_alone = cost, reservation.get("epsilon_alone", budget)
    if honest:
        alone = epsilon(shares.all_alone(spent, honest), delta)
    if any(entry["kind"] == "unprotected" and entry["run"] == run for entry in entries):
        # Exact numbers left the site: no ε bounds what the run has told.
        budget = cost = budget_alone = alone = math.inf
    if reservation["kind"] == "filter":
        accounting = FILTER
        # A progress figure, as if the events had been fixed in advance: all it reserved is proven.
        cost = alone = budget if closed else min(budget, cost)
        reserved: dict[SampledGaussian, int | None] = dict.fromkeys(sorted(spent))
    else:
        accounting = FIXED
        reserved = {SampledGaussian(q, sigma): n for q, sigma, n in reservation["events"]}
    return {
        "accounting": accounting,
        # Whom ε is of.
        "unit": reservation.get("unit", "record"),
        # The run whose records these are not; None: of the records that are trained on.
        "beside": reservation.get("beside"),
        "epsilon_reserved": budget,
        "delta": delta,
        "epsilon_spent": cost,
        # How many sites' shares the two above need to be noise; 0: none but the site's own.
        "honest": honest,
        "epsilon_alone_reserved": budget_alone,
        "epsilon_alone_spent": alone,
        "epsilon_per_person": _per_person(reserved, delta, honest, budget)
        if reservation.get("unit", "record") == "record"
        else None,
        "events": [
            {"q": event.q, "sigma": event.sigma, "reserved": n, "spent": spent[event]}
            for event, n in reserved.items()
        ],
    }


def _per_person(
    reserved: Mapping[SampledGaussian, int | None], delta: float, honest: int, budget: float
) -> dict[str, float] | None:
    """Return k -> ε at δ of all that is reserved, for a person's k records; None of a filter."""
    events = {event: n for event, n in reserved.items() if n is not None}
    if len(events) < len(reserved) or not events:
        return None
    # An infinite budget stands for exact numbers that have left.
    least = budget if math.isinf(budget) else 0.0
    if not honest:
        found = {k: epsilon_per_person(events, delta, k) for k in PERSON_RECORDS}
        return {str(k): max(least, cost) for k, cost in found.items()}
    own, left = shares.all_alone(events, honest), delta - shares.ADDED_DELTA
    found = {
        k: shares.covered(
            epsilon_per_person(events, left, k), budget, epsilon_per_person(own, delta, k)
        )
        for k in PERSON_RECORDS
    }
    return {str(k): max(least, cost) for k, cost in found.items()}


def _spent(run: str, entries: list[Entry]) -> tuple[Counter[SampledGaussian], bool]:
    """Return the events charged to a run, and whether its filter was closed by a torn line."""
    spent, closed = Counter[SampledGaussian](), False
    for entry in entries:
        if entry["kind"] == "charge" and entry["run"] == run:
            spent[SampledGaussian(entry["q"], entry["sigma"])] += entry["count"]
        elif entry["kind"] == "torn":
            closed = closed or run in entry.get("closed", ())
            for name, q, sigma, count in entry["charges"]:
                if name == run:
                    spent[SampledGaussian(q, sigma)] += count
    return spent, closed
