"""Timing by turns: what is compared runs in turn in one process, and only ratios are quoted.

Machines drift; a ratio is taken within one turn, and its median and quartiles over all turns. A
turn in which other processes took more than a tenth of a core is not counted. Where most turns are
so disturbed, all count, and what runs on one thread is compared by its processor time. What takes
less than ten milliseconds runs several times in a turn, after once unmeasured.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import Row

Work = Callable[[], object]

_Took = tuple[float, float]  # seconds by the clock, and of this thread's processor time

_LEAST_SECONDS = 0.01  # of one function in a turn: short ones run several times
_OTHERS = 0.1  # cores


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """Return those of at least one value."""
        if len(values) < 2:
            return Spread(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, low, high)


@dataclass(frozen=True)
class Turns:
    """Seconds of each function, turn by turn. busy: too few turns were undisturbed."""

    seconds: Mapping[str, Sequence[float]]
    busy: bool

    def time(self, name: str) -> Spread:
        """Seconds of a function."""
        return Spread.of(self.seconds[name])

    def ratio(self, name: str, to: str) -> Spread:
        """How many times as long as another it takes."""
        pairs = zip(self.seconds[name], self.seconds[to], strict=True)
        return Spread.of([a / b for a, b in pairs])

    def row(self, title: str, name: str, to: str, **marks: float | bool | str) -> Row:
        """A row with a ratio; marks: goal, stretch, larger_is_better."""
        found = self.ratio(name, to)
        note = f"{milliseconds(self.time(name).median)}"
        return Row(title, found.median, found.low, found.high, note=note, **marks)  # type: ignore[arg-type]


def milliseconds(seconds: float) -> str:
    """Return a duration as text."""
    return f"{seconds * 1e3:.3g} ms"


def by_turns(works: Mapping[str, Work], repetitions: int, *, threads: int = 1) -> Turns:
    """Time the functions in turn, `repetitions` undisturbed times each, after two runs unmeasured.

    It is given up after as many disturbed turns; where fewer than a third of the turns wanted are
    undisturbed then, all of them count. threads: how many the functions use.
    """
    inner = {name: _how_often(work) for name, work in works.items()}
    quiet: list[dict[str, _Took]] = []
    disturbed: list[dict[str, _Took]] = []
    while max(len(quiet), len(disturbed)) < repetitions:
        others = Others()
        turn = {name: _took(work, inner[name]) for name, work in works.items()}
        (quiet if others.undisturbed else disturbed).append(turn)
    busy = len(quiet) < max(1, repetitions // 3)
    place = 1 if busy and threads == 1 else 0
    turns = quiet + disturbed if busy else quiet
    return Turns({name: [turn[name][place] for turn in turns] for name in works}, busy)


def _how_often(work: Work) -> int:
    work()
    return max(1, round(_LEAST_SECONDS / max(_took(work, 1)[0], 1e-7)))


def _took(work: Work, times: int) -> _Took:
    if times > 1:
        # A short function would be charged for the caches that the one before it has left.
        work()
    started, used = time.perf_counter(), time.thread_time()
    for _ in range(times):
        work()
    return (time.perf_counter() - started) / times, (time.thread_time() - used) / times


class Others:
    """How many cores other processes have used since it was made; 0 where nobody can tell."""

    def __init__(self) -> None:
        self._since, self._began = self._used(), time.perf_counter()

    @property
    def undisturbed(self) -> bool:
        """Whether they have used no more than a tenth of a core."""
        return self.cores() <= _OTHERS

    def cores(self) -> float:
        """Return the mean number of cores."""
        return (self._used() - self._since) / (time.perf_counter() - self._began)

    @staticmethod
    def _used() -> float:
        try:
            first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return 0.0
        ticks = [float(number) for number in first]
        # user, nice, system, idle, iowait, irq, softirq, steal
        everybody = sum(ticks[:3] + ticks[5:8]) / os.sysconf("SC_CLK_TCK")
        own = os.times()
        return everybody - sum(own[:4])
