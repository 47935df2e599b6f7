"""What it took to get somewhere: the bytes that a comparison's runs had sent at an accuracy."""

import statistics
from dataclasses import dataclass
from typing import Final

from fedpact.report.outcomes import Comparison, Entry, Outcome
from fedpact.text import percent, size

_STEP: Final = 0.05
_MOST: Final = 4


@dataclass(frozen=True)
class BytesToTarget:
    """A table: accuracies, and for each entry's name what its runs had sent by then."""

    levels: list[str]
    rows: list[tuple[str, ...]]


def count_bytes_until(outcome: Outcome, accuracy: float) -> float | None:
    """Return the bytes, both ways, up to the first evaluation with it; None if there was none."""
    sent = 0
    for record in outcome.run.records:
        sent += record.bytes_down + record.bytes_up
        if record.accuracy is not None and record.accuracy >= accuracy:
            return float(sent)
    return None


def find_bytes_to_targets(comparison: Comparison) -> BytesToTarget | None:
    """Return bytes to the highest multiples of 5 % that some run had; None: no run had any."""
    best = max((_best(outcome) for _, outcome in comparison.outcomes), default=0.0)
    # As a count of steps: 0.8 is no whole number of 0.05 in floating point.
    top = int(best / _STEP + 1e-9)
    levels = [_STEP * step for step in range(max(1, top - _MOST + 1), top + 1)]
    if not levels:
        return None
    rows = [(e.name, *(_cell(e, round(level, 9)) for level in levels)) for e in comparison.entries]
    return BytesToTarget([percent(level) for level in levels], rows)


def _best(outcome: Outcome) -> float:
    known = [r.accuracy for r in outcome.run.records if r.accuracy is not None]
    return max((accuracy for accuracy in known if accuracy == accuracy), default=0.0)


def _cell(entry: Entry, accuracy: float) -> str:
    found = [sent for o in entry.outcomes if (sent := count_bytes_until(o, accuracy)) is not None]
    if not found:
        return "–"
    told = size(statistics.fmean(found))
    if len(found) < len(entry.outcomes):
        return f"{told} ({len(found)} of {len(entry.outcomes)} runs)"
    return told if len(found) == 1 else f"{told} ± {size(statistics.stdev(found))}"
