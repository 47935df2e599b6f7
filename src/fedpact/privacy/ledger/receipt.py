"""Receipts of a ledger, and what remains in it for further runs.

A receipt holds mechanisms, counts and budgets. It holds nothing about records: no content, no hash,
no true count.

    apart    The new run may cost (ε - Σ ε_i, δ - Σ δ_i), summed over the reservations of earlier
             runs. This holds however the new run's q, σ and steps were chosen (basic composition).
    joint    The events reserved by earlier runs and those of the new run are one sequence at δ,
             which costs less. This is a proof only for a fixed sequence: every earlier run reserved
             fixed events, and nothing in the new run depends on their releases.

Reservations count, not what was spent: how far a run went may depend on what it released.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedpact.common.errors import BudgetExhausted, InputError, LedgerError
from fedpact.common.format import upper
from fedpact.privacy.accounting.accountant import (
    ADJACENCY_BY_UNIT,
    Budget,
    History,
    SampledGaussian,
)
from fedpact.privacy.accounting.group_privacy import PERSON_RECORDS
from fedpact.privacy.guarantee import Guarantee
from fedpact.privacy.ledger.hash_chain import Chained, LedgerEntry, read_all
from fedpact.privacy.ledger.ledger import RollbackGuard
from fedpact.privacy.ledger.reservations import FIXED, over_runs

_PLACED = {
    "compact": "compact: batch invariance checked on this machine",
    "scattered": "scattered: batch invariance by construction",
}


def receipt(path: Path, data_set: str | None = None) -> dict[str, Any]:
    """Return the receipt of a ledger file, after checking every link of its chain.

    data_set: whose ledger it must be; None accepts any.
    Raises LedgerError: no such file, altered, rolled back to an older state, another data set's, or
    not a ledger.
    """
    if not path.is_file():
        raise LedgerError(f"{path} is no ledger: name one site's ledger.jsonl")
    # Read before the ledger, as a running site writes to the ledger first.
    witness = RollbackGuard(path)
    entries, torn = read_all(path)
    witness.check(Chained(entries))
    if not entries or entries[0].get("kind") != "open":
        raise LedgerError(f"{path} is no ledger: its first entry does not open one")
    if data_set is not None and entries[0]["site"] != data_set:
        raise LedgerError(
            f"ledger {path} is of data set {entries[0]['site']!r}, and site.toml has {data_set!r}: "
            "name the ledger that belongs to this site, or restore its own from a backup"
        )
    runs = {e["run"]: _run(e, entries) for e in entries if e["kind"] == "reserve"}
    if torn:
        # Opening the ledger decides what a torn line counts as; until then it may be anything.
        for run in runs.values():
            run["epsilon_spent"] = run["epsilon_reserved"]
            run["epsilon_alone_spent"] = run["epsilon_alone_reserved"]
    whole, delta = _together(runs, "epsilon_reserved")
    told = {
        "site": entries[0]["site"],
        "hypothetical": entries[0]["hypothetical"],
        # A ledger's runs have one unit.
        "adjacency": ADJACENCY_BY_UNIT[next((run["unit"] for run in runs.values()), "record")],
        "accountant": "best of PLD and RDP",
        "covers": "every release of the runs it names",
        "runs": runs,
        # Of a run and its companion, which covers other records, the larger counts.
        "epsilon_reserved": whole,
        "epsilon_alone_reserved": _together(runs, "epsilon_alone_reserved")[0],
        "delta_reserved": delta,
        "entries": len(entries),
        "unreadable_last_line": torn,
        "head": entries[-1]["hash"],
        "first_entry": _day(entries[0]),
        "last_entry": _day(entries[-1]),
    }
    return {**told, "sentence": _sentence(told)}


def _day(entry: LedgerEntry) -> str | None:
    """Return an entry's time in UTC, by its machine's clock; None without one."""
    time = entry.get("time")
    return None if time is None else datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds")


def _sentence(told: Mapping[str, Any]) -> str:
    """Return the receipt in words, for readers who have never seen one."""
    runs = told["runs"].values()
    of = f"the data set {told['site']!r}"
    if not runs:
        return f"Nothing of {of} has been promised to any run, and nothing released."
    if not math.isfinite(told["epsilon_reserved"]):
        return f"Exact numbers of {of} have left: no ε bounds what is known of its records."
    hypothetical = bool(told["hypothetical"])
    reserved = _sum_reserved(told)
    whose = "person, with all records," if "person" in told["adjacency"] else "record"
    count = sum(run["beside"] is None for run in runs)
    many = f"{count} runs" if count > 1 else "run"
    factor = "" if reserved.condition else f", a factor of at most {_odds(reserved.epsilon)},"
    return (
        ("This is of a simulation, which protects nobody; a deployment could say: " * hypothetical)
        + f"Whether or not any one {whose} is in {of}, all that the {many} named here may release "
        f"turns out nearly alike: the chance of any outcome differs by at most e^ε{factor} and by "
        f"δ = {upper(reserved.delta)} more, with ε = {reserved}. A person with records in "
        "other data sets too, as at a second site, pays the sum of both."
    )


def _sum_reserved(told: Mapping[str, Any]) -> Guarantee:
    """Return what all runs of a receipt reserve together."""
    return Guarantee(
        told["epsilon_reserved"],
        told["delta_reserved"],
        told["epsilon_alone_reserved"],
        max((run["honest"] for run in told["runs"].values()), default=0),
    )


def _odds(cost: float) -> str:
    return upper(math.exp(cost), 3) if cost < 700 else "more than 1e300"


def _together(runs: dict[str, dict[str, Any]], epsilon: str) -> tuple[float, float]:
    """Return (Σ ε, Σ δ) over all runs, ε of that name."""
    return over_runs((r["beside"] or name, r[epsilon], r["delta"]) for name, r in runs.items())


def _run(reservation: LedgerEntry, entries: list[LedgerEntry]) -> dict[str, Any]:
    run, spent = reservation["run"], spent_of(reservation["run"], entries)
    promise = Guarantee.read(reservation)
    cost = promise.after(spent)
    if any(entry["kind"] == "unprotected" and entry["run"] == run for entry in entries):
        # Exact numbers left the site: no ε bounds what the run released.
        promise = cost = replace(promise, epsilon=math.inf, alone=math.inf)
    reserved = {SampledGaussian(q, sigma): n for q, sigma, n in reservation["events"]}
    placed = [e for e in entries if e["kind"] == "placement" and e["run"] == run]
    return {
        "accounting": FIXED,
        # What ε protects, "record" or "person".
        "unit": reservation["unit"],
        # Why a record's gradient does not depend on the others in its pass.
        "placement": [_PLACED[entry["placement"]] for entry in placed],
        # The arithmetic of its passes: "float32", "tf32" or "bf16".
        "precision": [entry["precision"] for entry in placed],
        # The run that trains on the other records; None for training records.
        "beside": reservation.get("beside"),
        "epsilon_reserved": promise.epsilon,
        "delta": promise.delta,
        "epsilon_spent": cost.epsilon,
        # The number of honest sites that the two ε above need; 0 for none.
        "honest": promise.honest,
        "epsilon_alone_reserved": promise.alone,
        "epsilon_alone_spent": cost.alone,
        "epsilon_per_person": _per_person(promise, reserved)
        if reservation["unit"] == "record"
        else None,
        "events": [
            {"q": event.q, "sigma": event.sigma, "reserved": n, "spent": spent[event]}
            for event, n in reserved.items()
        ],
    }


def _per_person(promise: Guarantee, events: History) -> dict[str, float] | None:
    """Return k -> ε at δ of all reserved events, for a person's k records; None without events."""
    if not events:
        return None
    # The promise is infinite if exact numbers have left the site.
    least = promise.epsilon if math.isinf(promise.epsilon) else 0.0
    found = {k: promise.per_person(events, k).epsilon for k in PERSON_RECORDS}
    return {str(k): max(least, cost) for k, cost in found.items()}


def spent_of(run: str, entries: Sequence[LedgerEntry]) -> Counter[SampledGaussian]:
    """Return the events charged to a run, including those that torn lines count as."""
    spent = Counter[SampledGaussian]()
    for entry in entries:
        if entry["kind"] == "charge" and entry["run"] == run:
            spent[SampledGaussian(entry["q"], entry["sigma"])] += entry["count"]
        elif entry["kind"] == "torn":
            for name, q, sigma, count in entry["charges"]:
                if name == run:
                    spent[SampledGaussian(q, sigma)] += count
    return spent


@dataclass(frozen=True)
class Remaining:
    """What is left. budget: for the new run together with the events in `spent`.

    epsilon_reserved, delta_reserved: sums over the earlier runs, `runs` of them. condition: what
    they assume about other sites, in words; "" for nothing. unit: what these ε protect.
    """

    site: str
    runs: int
    epsilon_reserved: float
    delta_reserved: float
    budget: Budget
    spent: History
    condition: str = ""
    unit: str = "record"


def remaining(path: Path, whole: Budget, *, joint: bool = False) -> Remaining:
    """Return the rest of the budget `whole`, which all runs on the ledger's records share.

    Raises LedgerError: no ledger, or an altered one. BudgetExhausted: nothing is left. InputError:
    joint, with a run whose noise was shared.
    """
    told = receipt(path)
    runs = told["runs"].values()
    unit = next((run["unit"] for run in runs), "record")
    epsilon, delta = told["epsilon_reserved"], told["delta_reserved"]
    condition = _sum_reserved(told).condition
    if joint and condition:
        raise InputError(
            f"--joint with ledger {path}: an earlier run assumes {condition}, and one sequence of "
            "its events and others' would rest on them; leave --joint out"
        )
    if not math.isfinite(epsilon):
        raise BudgetExhausted(
            f"ledger {path} has a run that let exact numbers out: no ε bounds what is known of its "
            "records, and nothing is left for another run"
        )
    if joint:
        return Remaining(told["site"], len(runs), epsilon, delta, whole, _events(told), unit=unit)
    left = _rest(whole.epsilon, epsilon), _rest(whole.delta, delta)
    if not min(left) > 0:
        raise BudgetExhausted(
            f"ledger {path} has reserved (ε, δ) = ({upper(epsilon)}, {upper(delta)}) for "
            f"{len(runs)} runs, {told['adjacency']}: of ({whole.epsilon:g}, "
            f"{whole.delta:g}) nothing is left for one more; raise the budget's ε and δ, "
            "both, or ask for --joint where all events were fixed"
        )
    return Remaining(told["site"], len(runs), epsilon, delta, Budget(*left), {}, condition, unit)


def _rest(whole: float, spent: float) -> float:
    """Return the largest number that added to `spent` is at most `whole`, in floating point too."""
    left = whole - spent
    while left > 0 and spent + left > whole:
        left = math.nextafter(left, 0.0)
    return left


def _events(told: dict[str, Any]) -> History:
    events = Counter[SampledGaussian]()
    for run in told["runs"].values():
        for event in run["events"]:
            events[SampledGaussian(event["q"], event["sigma"])] += event["reserved"]
    return events
