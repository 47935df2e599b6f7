"""What a run was promised at a site, and what it has charged: fixed events, or a filter.

    fixed sequence   the events are enumerated before the run; PLD and RDP bound them all together
    Rényi filter     q, σ or the number of unlike events follow from earlier releases; each event is
                     admitted while the filter has room for it (theory.filters)

Either way (ε, δ) as reserved is the guarantee. `entry` is how a promise stands in a ledger.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from fedpact.errors import BudgetExhausted, PolicyRefused
from fedpact.theory.accounting import Budget, SampledGaussian, epsilon
from fedpact.theory.filters import RenyiFilter

FIXED: Final = "fixed sequence"
FILTER: Final = "Rényi filter"

WHY: Final[Mapping[str, str]] = {
    FIXED: "The events were fixed before the run, so PLD composition is a proof; a stopping time "
    "alone does not change that for the reserved (ε, δ).",
    FILTER: "Events were chosen from earlier releases, so composition of fixed events is no proof. "
    "The filter admitted each while it had room, which makes the whole run (ε, δ) as reserved.",
}


class FixedSequence:
    """Events that may be used in any order, each up to its number in `allowed`."""

    def __init__(self, budget: Budget, allowed: Counter[SampledGaussian]) -> None:
        self.budget, self.allowed = budget, allowed
        self.spent = Counter[SampledGaussian]()
        self._largest = 0

    @property
    def entry(self) -> dict[str, Any]:
        """See the module."""
        events = [[e.q, e.sigma, n] for e, n in sorted(self.allowed.items())]
        return {"kind": "reserve", **_budget(self.budget), "events": events}

    def check(self, run: str, event: SampledGaussian, count: int) -> None:
        """Raise PolicyRefused: not this event. BudgetExhausted: not as many more of it."""
        if event not in self.allowed:
            raise not_reserved(run, event)
        allowed, spent = self.allowed[event], self.spent[event]
        if spent + count > allowed:
            raise BudgetExhausted(
                f"run {run!r} asks for {count} more of {event}: {spent} of {allowed} reserved "
                "events are spent"
            )

    def charge(self, event: SampledGaussian, count: int) -> None:
        """Count events that `check` let pass."""
        self.spent[event] += count
        self._largest = max(self._largest, count)

    def dearest_left(self, at_least: int) -> list[tuple[SampledGaussian, int]]:
        """Return what an unreadable line is counted as: the dearest events that are left.

        As many as the largest charge so far, or `at_least`, should that be more.
        """
        missing, taken = max(1, at_least, self._largest), list[tuple[SampledGaussian, int]]()
        costs = {event: epsilon({event: 1}, self.budget.delta, "rdp") for event in self.allowed}
        for event in sorted(self.allowed, key=lambda e: costs[e], reverse=True):
            count = min(missing, self.allowed[event] - self.spent[event])
            if count > 0:
                taken.append((event, count))
                missing -= count
        return taken


class Filtered:
    """Events that are not known in advance: each is admitted while the filter has room.

    Replaying the same charges in the same order restores the filter bit for bit.
    """

    def __init__(self, budget: Budget, orders: tuple[float, ...] | None) -> None:
        self.budget = budget
        self._filter = RenyiFilter(budget, orders)
        self._closed = False

    @property
    def entry(self) -> dict[str, Any]:
        """See the module."""
        return {"kind": "filter", **_budget(self.budget), "orders": list(self._filter.orders)}

    @property
    def spent(self) -> Counter[SampledGaussian]:
        """The events charged so far."""
        return Counter(self._filter.history)

    def check(self, run: str, event: SampledGaussian, count: int) -> None:
        """Raise BudgetExhausted: the filter does not admit so many, or is closed."""
        if self._closed or not self._filter.admits(event, count):
            why = "a line was lost in a crash" if self._closed else "they do not fit what is left"
            raise BudgetExhausted(
                f"run {run!r} asks for {count} of {event}, under a Rényi filter for (ε = "
                f"{self.budget.epsilon:g}, δ = {self.budget.delta:g}), add/remove one record: {why}"
            )

    def charge(self, event: SampledGaussian, count: int) -> None:
        """Count events that `check` let pass."""
        self._filter.record(event, count)

    def close(self) -> None:
        """Count all that is left as spent.

        For an unreadable line: any event may have stood there, up to the dearest that the filter
        admitted, and after that one nothing more fits.
        """
        self._closed = True


Reservation = FixedSequence | Filtered


def from_entry(entry: Mapping[str, Any]) -> Reservation:
    """Return a reservation as its entry has it, nothing charged. Raises ValueError and the like."""
    budget = Budget(entry["epsilon"], entry["delta"])
    if entry["kind"] == "filter":
        return Filtered(budget, tuple(entry["orders"]))
    return FixedSequence(
        budget, Counter({SampledGaussian(q, sigma): n for q, sigma, n in entry["events"]})
    )


def not_reserved(run: str, event: SampledGaussian) -> PolicyRefused:
    """Return the error of a run that asks for what it has not reserved."""
    return PolicyRefused(
        f"run {run!r} asks for {event}, which its reservation does not name: reserve it at "
        "the run's start"
    )


def _budget(budget: Budget) -> dict[str, float]:
    return {"epsilon": budget.epsilon, "delta": budget.delta}
