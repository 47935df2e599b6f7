"""What a ledger proves, as plain data: by run, what was promised and what was spent.

A receipt holds mechanisms, counts and budgets. It holds nothing about records: no content, no hash,
no true count.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from fedpact.errors import LedgerError
from fedpact.privacy.chain import Entry, read_entries
from fedpact.privacy.terms import ADJACENCY
from fedpact.theory.accounting import SampledGaussian, epsilon


def receipt(path: Path) -> dict[str, Any]:
    """Return the receipt of a ledger file, after checking every link of its chain.

    Raises LedgerError: no such file, altered, or not a ledger.
    """
    if not path.is_file():
        raise LedgerError(f"{path} is no ledger: name a ledger.jsonl, or the folder of a run")
    entries = read_entries(path)
    if not entries or entries[0].get("kind") != "open":
        raise LedgerError(f"{path} is no ledger: its first entry does not open one")
    runs = {e["run"]: _run(e, entries) for e in entries if e["kind"] == "reserve"}
    return {
        "site": entries[0]["site"],
        "hypothetical": entries[0]["hypothetical"],
        "adjacency": ADJACENCY,
        "accountant": "best of PLD and RDP",
        "covers": "every release of the runs it names",
        "runs": runs,
        "epsilon_reserved": sum(run["epsilon_reserved"] for run in runs.values()),
        "delta_reserved": sum(run["delta"] for run in runs.values()),
        "entries": len(entries),
        "head": entries[-1]["hash"],
    }


def _run(reservation: Entry, entries: list[Entry]) -> dict[str, Any]:
    run, delta = reservation["run"], reservation["delta"]
    spent = Counter[SampledGaussian]()
    for entry in entries:
        if entry["kind"] == "charge" and entry["run"] == run:
            spent[SampledGaussian(entry["q"], entry["sigma"])] += entry["count"]
        elif entry["kind"] == "torn":
            for name, q, sigma, count in entry["charges"]:
                if name == run:
                    spent[SampledGaussian(q, sigma)] += count
    return {
        "epsilon_reserved": reservation["epsilon"],
        "delta": delta,
        "epsilon_spent": epsilon(spent, delta),
        "events": [
            {"q": q, "sigma": sigma, "reserved": n, "spent": spent[SampledGaussian(q, sigma)]}
            for q, sigma, n in reservation["events"]
        ],
    }
