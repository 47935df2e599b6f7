"""Reservations in a ledger.

A reservation is a fixed sequence of events, listed before the run. PLD and RDP bound them all
together, and the reserved (ε, δ) is the guarantee.

If noise is shared (privacy.accounting.shared_noise), an event has the noise of h sites' shares, and
(ε, δ) holds if h sites are honest. A second ε at the same δ is then reserved for the site's own
share of each event, which holds against everybody. Every charge counts for both.

A companion reservation covers other records of the same site than its run, such as those held out
of training (`CompanionReservation`). A record belongs to one of the two, so the larger counts and
not the sum.

Reservations of different runs add up by basic composition, in ε and δ, as each was made after the
earlier results were seen.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from fedpact.common.errors import BudgetExhausted, PolicyRefused
from fedpact.privacy.accounting.accountant import Budget, SampledGaussian, add_budgets, epsilon
from fedpact.privacy.guarantee import Guarantee

FIXED: Final = "fixed sequence"

WHY: Final = (
    "All releases were planned before the run, so the reserved (ε, δ) is a proven bound on all of "
    "them together, also if the run stops early."
)


@dataclass(frozen=True)
class CompanionReservation:
    """Says that a reservation covers other records than those of run `beside`.

    split: a digest of the rule that separates them. The rule looks at each record alone; being part
    of the reservation, it cannot change during the run.
    """

    beside: str
    split: str


@dataclass
class FixedSequence:
    """Events that may be used in any order, each up to its number in `allowed`."""

    guarantee: Guarantee
    allowed: Counter[SampledGaussian]
    beside: CompanionReservation | None
    unit: str
    spent: Counter[SampledGaussian] = field(default_factory=Counter[SampledGaussian])
    _largest: int = 0

    @property
    def entry(self) -> dict[str, Any]:
        """The reservation's entry in the ledger."""
        promise = self.guarantee
        found = {"kind": "reserve", "epsilon": promise.epsilon, "delta": promise.delta}
        found |= promise.entries if promise.condition else {}
        found |= {} if self.beside is None else asdict(self.beside)
        events = [[e.q, e.sigma, n] for e, n in sorted(self.allowed.items())]
        return {**found, "unit": self.unit, "events": events}

    @property
    def terms(self) -> dict[str, Any]:
        """What identifies the reservation: `entry` without the ε alone, which follows from it."""
        return {name: value for name, value in self.entry.items() if name != "epsilon_alone"}

    def costs(self) -> list[tuple[float, float]]:
        """Return pairs (ε of all events, ε reserved): with other sites' noise, and without."""
        promise, cost = self.guarantee, self.guarantee.after(self.allowed)
        return [(cost.epsilon, promise.epsilon), (cost.alone, promise.alone)]

    def check(self, run: str, event: SampledGaussian, count: int) -> None:
        """Raise PolicyRefused: not reserved. BudgetExhausted: fewer than `count` are left."""
        if event not in self.allowed:
            raise not_reserved(run, event)
        allowed, spent = self.allowed[event], self.spent[event]
        if spent + count > allowed:
            raise BudgetExhausted(
                f"run {run!r} asks for {count} more of {event}: {spent} of {allowed} reserved "
                "events are spent"
            )

    def charge(self, event: SampledGaussian, count: int) -> None:
        """Count events, after `check`."""
        self.spent[event] += count
        self._largest = max(self._largest, count)

    def dearest_left(self, at_least: int, lines: int) -> list[tuple[SampledGaussian, int]]:
        """Return the most expensive remaining events, as the charge for unreadable lines.

        For each line, as many as the largest charge so far, or `at_least` if that is more.
        """
        missing = lines * max(1, at_least, self._largest)
        taken = list[tuple[SampledGaussian, int]]()
        costs = {event: epsilon({event: 1}, self.guarantee.delta, "rdp") for event in self.allowed}
        for event in sorted(self.allowed, key=lambda e: costs[e], reverse=True):
            count = min(missing, self.allowed[event] - self.spent[event])
            if count > 0:
                taken.append((event, count))
                missing -= count
        return taken


def from_entry(entry: Mapping[str, Any]) -> FixedSequence:
    """Return the reservation of an entry, with nothing charged. Raises ValueError and the like."""
    Budget(entry["epsilon"], entry["delta"])  # refuses what is no budget
    events = Counter({SampledGaussian(q, sigma): n for q, sigma, n in entry["events"]})
    beside = CompanionReservation(entry["beside"], entry["split"]) if "beside" in entry else None
    return FixedSequence(Guarantee.read(entry), events, beside, entry["unit"])


def cost_of_torn(lines: Sequence[bytes], reserved: Mapping[str, FixedSequence]) -> dict[str, Any]:
    """Return a ledger entry that charges unreadable lines to every open run.

    Each line counts as the most expensive remaining events. Its release never left the site, so
    this is more than was spent.
    """
    told = b"\n".join(lines)
    named = sum(int(digits) for digits in re.findall(rb'"count": (\d{1,15})', told))
    charges = [
        [run, event.q, event.sigma, count]
        for run, reservation in reserved.items()
        for event, count in reservation.dearest_left(named, len(lines))
    ]
    return {"kind": "torn", "charges": charges}


def over_runs(promised: Iterable[tuple[str, float, float]]) -> tuple[float, float]:
    """Return the (Σ ε, Σ δ) of one record over reservations (run, ε, δ), by basic composition.

    Reservations of one run cover different records, so the largest ε and δ among them count.
    """
    most = dict[str, tuple[float, float]]()
    for run, cost, delta in promised:
        before = most.get(run, (0.0, 0.0))
        most[run] = max(before[0], cost), max(before[1], delta)
    return add_budgets(e for e, _ in most.values()), add_budgets(d for _, d in most.values())


def not_reserved(run: str, event: SampledGaussian) -> PolicyRefused:
    """Return the error of a run that asks for an event it has not reserved."""
    return PolicyRefused(
        f"run {run!r} asks for {event}, which it has not reserved: reserve it at the run's start"
    )


def other_terms(run: str, path: Path, before: FixedSequence, asked: FixedSequence) -> PolicyRefused:
    """Return the error of a run that asks for another reservation than the one it has."""
    was, now = before.terms, asked.terms
    differ = (name for name in was | now if was.get(name) != now.get(name))
    told = ", ".join(f"{name} {was.get(name)} there and {now.get(name)} now" for name in differ)
    return PolicyRefused(
        f"run {run!r} has a reservation with other terms in {path} ({told}): a run's mechanisms "
        "are fixed at its start; use a new run name"
    )


def spend_of(run: str, runs: Mapping[str, Mapping[str, Any]]) -> dict[str, float] | None:
    """Return a run's cost, None if a receipt does not have the run.

    runs: of the receipt. Keys: epsilon_spent, epsilon_reserved, epsilon_alone_spent,
    epsilon_alone_reserved and delta. Training and evaluations cover different records, so the
    larger counts.
    """
    mine = [(run, told) for name, told in runs.items() if run == (told["beside"] or name)]
    if not mine:
        return None
    found = dict[str, float]()
    for state in ("spent", "reserved"):
        for key in (f"epsilon_{state}", f"epsilon_alone_{state}"):
            found[key], found["delta"] = over_runs((n, t[key], t["delta"]) for n, t in mine)
    return found
