"""The cells of the page's tables, from the stored results, and a list of those not run."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from experiments.evidence.runs import Run
from experiments.evidence.stored import Stored

_HUGE: Final = 1e6
_GUESS, _GUESS_LOSS = 0.102, math.log(10) - 1e-3  # of ten classes, which all data sets here have
LARGE_LOSS: Final = 10.0  # four times a guess's


@dataclass
class Book:
    """The stored results as a page shows them. missing: the command of each run without one."""

    stored: Stored
    missing: dict[str, str] = field(default_factory=dict[str, str])

    def values(self, run: Run, look: int, name: str) -> list[float]:
        """Return a number of a run after a round, one per seed that has been run."""
        each = (outcome["looks"].get(str(look), {}) for outcome in self.stored.seeds(run).values())
        return [float(seen[name]) for seen in each if name in seen]

    def mean(self, run: Run, look: int, name: str = "accuracy") -> float | None:
        """Return the mean over seeds, or None if none was run or one has diverged.

        Sentences and curves use means: a diverged seed appears in the table alone.
        """
        found = [] if self._ended(run, look) else self.values(run, look, name)
        return statistics.fmean(found) if found else None

    def paired(self, runs: Sequence[tuple[Run, int]], name: str = "accuracy") -> list[float | None]:
        """Return the mean of each run at its round, over the seeds that all runs share.

        None for a run without seeds or with a diverged one; all None if they share no seed.
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
        return mean_text(found, 2) + self.note(run, look) if found else self.lacks(run)

    def held_out(self, run: Run, look: int) -> str:
        """Return a cell in per cent, on the sites' held-out records if there is a test set."""
        found = [100 * value for value in self.values(run, look, "held_out")]
        return mean_text(found, 2) + self.note(run, look) if found else self.lacks(run)

    def psi(self, run: Run, look: int) -> str:
        """Return a cell of Ψ."""
        found = self.values(run, look, "psi")
        return mean_text(found, 5) + self.note(run, look) if found else self.lacks(run)

    def note(self, run: Run, look: int) -> str:
        """Return a cell's note on seeds that had diverged, or whose loss was large, at a round."""
        loss = max(self.values(run, look, "loss"), default=0.0)
        large = f", unstable: loss {loss:.0f}" if loss > LARGE_LOSS else ""
        return self._ended(run, look) or large

    def _ended(self, run: Run, look: int) -> str:
        """Return a cell's note on seeds that had diverged at this round."""
        each = (outcome.get("diverged", look) for outcome in self.stored.seeds(run).values())
        rounds = [str(last) for last in each if last < look]
        if rounds:
            return f", diverged after round {', '.join(rounds)}"
        pairs = zip(
            self.values(run, look, "accuracy"), self.values(run, look, "loss"), strict=False
        )
        guesses = any(right < _GUESS and loss > _GUESS_LOSS for right, loss in pairs)
        return ", at chance: diverged; may differ on another processor" if guesses else ""

    def lacks(self, run: Run) -> str:
        """Return the cell of a run without a result, and list its command."""
        command = (
            f'`python -m experiments.evidence "{run.title} seed="`, {_cost(run.minutes)} a seed'
        )
        return self.not_run(run.title, command)

    def not_run(self, title: str, command: str) -> str:
        """Return the cell of something without a result, and list its command."""
        self.missing.setdefault(title, command)
        return f"not run [{list(self.missing).index(title) + 1}]"


def mean_text(found: Sequence[float], digits: int) -> str:
    """Return mean ± standard deviation, and the number of seeds unless it is three.

    Values that are not finite have no mean: they are counted, and the others are averaged.
    """
    known = [value for value in found if math.isfinite(value)]
    if len(known) < len(found):
        lost = f"not finite in {len(found) - len(known)} of {len(found)} seeds"
        return f"{lost}, otherwise {mean_text(known, digits)}" if known else lost
    # For diverged runs the power of ten is enough.
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
