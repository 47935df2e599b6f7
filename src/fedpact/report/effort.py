"""What the runs of a comparison did for what they reached: steps, their length, records, noise."""

from collections.abc import Callable
from typing import Any, Final

from fedpact.report.outcomes import Comparison, Entry, Outcome
from fedpact.text import number, span

EFFORT_HEADINGS: Final = ("τ", "η", "iterations", "records read", "σ")
EFFORT_NOTE: Final = (
    "τ: local iterations of a round; η: the length of a step; records read: in the batches of all "
    "sites, as expected; σ: of a step's joint noise, from the least of any site to the most"
)


def effort(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the table, an entry a row: its name, then its cells in the order of the headings."""
    return [
        (
            entry.name,
            _reach(entry, lambda o: o.steps),
            _reach(entry, _rate),
            _mean(entry, lambda o: o.iterations),
            _mean(entry, lambda o: o.records_read),
            _reach(entry, lambda o: o.sigma),
        )
        for entry in comparison.entries
    ]


def effort_document(entry: Entry) -> dict[str, Any]:
    """Return the same as plain data: least and most over rounds, sites and runs, or a mean."""
    pairs = {"local_steps": lambda o: o.steps, "learning_rate": _rate, "sigma": lambda o: o.sigma}
    means = {"iterations": lambda o: o.iterations, "records_read": lambda o: o.records_read}
    found: dict[str, Any] = {name: entry.range(of) for name, of in pairs.items()}
    return found | {name: s and s.mean for name, of in means.items() for s in [entry.spread(of)]}


def _rate(outcome: Outcome) -> tuple[float, float] | None:
    eta = outcome.learning_rate
    return None if eta is None else (eta, eta)


def _reach(entry: Entry, measure: Callable[[Outcome], tuple[float, float] | None]) -> str:
    found = entry.range(measure)
    if found is None:
        return number(None)
    low, high = map(number, found)
    return span(low, high)


def _mean(entry: Entry, measure: Callable[[Outcome], float | None]) -> str:
    spread = entry.spread(measure)
    return number(None) if spread is None else spread.describe(number)
