"""What a table's cell shows of the stored results, and which cells have none."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from experiments.evidence.runs import Run
from experiments.evidence.stored import Stored

_HUGE: Final = 1e6
_GUESS, _GUESS_LOSS = 0.102, math.log(10) - 1e-3  # of ten classes, which all data sets here have


@dataclass
class Book:
    """The stored results as a page shows them. missing: the runs without one, by number from 1."""

    stored: Stored
    missing: dict[str, str] = field(default_factory=dict[str, str])

    def values(self, run: Run, look: int, name: str) -> list[float]:
        """Return a number of a run after a round, one a seed that has been run."""
        each = (outcome["looks"].get(str(look), {}) for outcome in self.stored.seeds(run).values())
        return [float(seen[name]) for seen in each if name in seen]

    def mean(self, run: Run, look: int, name: str = "accuracy") -> float | None:
        """Return the mean over seeds, or None where none was run or one has diverged.

        Sentences and curves are of means: where a seed has diverged the table alone says so.
        """
        found = [] if self._ended(run, look) else self.values(run, look, name)
        return statistics.fmean(found) if found else None

    def paired(self, runs: Sequence[tuple[Run, int]], name: str = "accuracy") -> list[float | None]:
        """Return the means of runs after a round each, over the seeds that all of them share.

        None for a run without any, or of which one has diverged; all of them where they share none.
        """
        seen = [
            {
                seed: float(outcome["looks"][str(look)][name])
                for seed, outcome in self.stored.seeds(run).items()
                if name in outcome["looks"].get(str(look), {}) and not self._ended(run, look)
            }
            for run, look in runs
        ]
        shared = set[str].intersection(*(set(one) for one in seen if one)) if any(seen) else set()
        return [
            statistics.fmean(one[seed] for seed in shared) if one and shared else None
            for one in seen
        ]

    def accuracy(self, run: Run, look: int) -> str:
        """Return a cell in per cent."""
        found = [100 * value for value in self.values(run, look, "accuracy")]
        return told(found, 2) + self._ended(run, look) if found else self.lacks(run)

    def held_out(self, run: Run, look: int) -> str:
        """Return a cell in per cent, of the sites' held-out records where there is a test set."""
        found = [100 * value for value in self.values(run, look, "held_out")]
        return told(found, 2) + self._ended(run, look) if found else self.lacks(run)

    def psi(self, run: Run, look: int) -> str:
        """Return a cell of Ψ."""
        found = self.values(run, look, "psi")
        return told(found, 5) + self._ended(run, look) if found else self.lacks(run)

    def _ended(self, run: Run, look: int) -> str:
        """Return what a cell says of seeds whose weights were no numbers any more at this look."""
        each = (outcome.get("diverged", look) for outcome in self.stored.seeds(run).values())
        rounds = [str(last) for last in each if last < look]
        if rounds:
            return f", diverged after round {', '.join(rounds)}"
        pairs = zip(
            self.values(run, look, "accuracy"), self.values(run, look, "loss"), strict=False
        )
        guesses = any(right < _GUESS and loss > _GUESS_LOSS for right, loss in pairs)
        return ", a guess: diverged, and another processor's rounding may not" if guesses else ""

    def lacks(self, run: Run) -> str:
        """Return the cell of a run that has no result, and keep its command."""
        command = (
            f'`python -m experiments.evidence "{run.title} seed="`, {_cost(run.minutes)} a seed'
        )
        return self.not_run(run.title, command)

    def not_run(self, title: str, command: str) -> str:
        """Return the cell of something that has no result, and keep how to make it."""
        self.missing.setdefault(title, command)
        return f"not run [{list(self.missing).index(title) + 1}]"


def told(found: Sequence[float], digits: int) -> str:
    """Return mean ± standard deviation, and of how many seeds where they are not three.

    What diverged beyond all numbers has no mean: it is counted, and the others are told.
    """
    known = [value for value in found if math.isfinite(value)]
    if len(known) < len(found):
        lost = f"no number in {len(found) - len(known)} of {len(found)} seeds"
        return f"{lost}, else {told(known, digits)}" if known else lost
    # Of what diverged the power of ten says enough.
    form = f".{digits}f" if max(map(abs, found)) < _HUGE else ".0e"
    mean = f"{statistics.fmean(found):{form}}"
    if len(found) == 1:
        return f"{mean} (1 seed)"
    spread = f"{mean} ± {statistics.stdev(found):{form}}"
    return spread if len(found) == 3 else f"{spread} ({len(found)} seeds)"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cost(minutes: float) -> str:
    return f"{minutes / 60:.1f} h" if minutes >= 90 else f"{max(minutes, 1):.0f} min"
