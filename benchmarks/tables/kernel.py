"""One private step beside one plain step and every peer's: models, batch sizes and threads."""

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import child, steps
from benchmarks.problems import PROBLEMS, Problem
from benchmarks.results import Row, Table, shown
from benchmarks.scale import Scale
from benchmarks.timing import Turns, Work, by_turns
from fedpact.simulation.machine import available_cores, keep_freed_memory

TITLE = "The kernel beside its peers"
ABOUT = (
    "A private step computes the clipped sum of the batch's per-sample gradients, adds torch's "
    "normal noise and updates the weights. Figures are ratios to the plain step (nn.Module, its "
    "loss, torch.optim.SGD) of the same turn, with quartiles for fedpact. A, B, Bnp, C: the "
    "papers' logistic regression and CNNs; resnet, resnet18: ResNet-8 and ResNet-18 with "
    "GroupNorm on 3x32x32; unet: a U-Net of three levels with GroupNorm on 1x64x64; lstm64, "
    "lstm256: two layers of torch's LSTM on 80 tokens; transformer: two of torch's encoder layers"
    " of width 128 on 64 tokens; vit: the same layers on patches of 4x4 of 3x32x32; lora: a "
    "frozen transformer with low-rank factors on its attention's four products and a head. Opacus"
    " gets the model as its documentation requires: its own layers replace torch's LSTM and "
    "attention, and bare parameters are wrapped in modules. Each cell runs in a separate process "
    "for about 25 seconds; a slow peer takes part in two turns only. Goals are for one thread; at"
    " batch 16 they are 1.3 times those at 64."
)
THREADS = "1 and 2"
_PLAIN, _OWN = "plain", "kernel_step"
_TITLES = {
    _PLAIN: "plain",
    _OWN: "fedpact",
    "opacus_hooks": "Opacus, hooks",
    "opacus_ghost": "Opacus, ghost",
    "vmap_grad": "vmap(grad)",
    "vmap_grad_products": "vmap(grad), attention by products",
}
_KEEPS_GRADIENTS = ("opacus_hooks", "vmap_grad", "vmap_grad_products")
_MOST_BYTES = 4 * 2**30  # of the records' gradients, which those keep
_SECONDS = 25.0
_FEWEST, _SLOW = 3, 2  # turns of a cell, and of a slow peer

# By model: the goal at batches of 64 and more, if it has one.
_GOALS = {
    "A": None,
    "B": None,
    "Bnp": None,
    "C": None,
    "resnet": 1.3,
    "resnet18": 1.5,
    "unet": 1.35,
    "lstm64": 1.8,
    "lstm256": 1.5,
    "transformer": 1.25,
    "vit": 1.25,
    "lora": None,
}
_ATTENTION = ("transformer", "vit", "lora")
NAMES = tuple(f"kernel-{model}" for model in _GOALS)

Found = tuple[list[Row], bool]


@dataclass(frozen=True)
class _Cell:
    """A batch size and a number of threads. The label ends the names of its rows."""

    batch: int
    threads: int

    @property
    def label(self) -> str:
        return f"batch {self.batch}, {self.threads} thread{'s' * (self.threads > 1)}"


def _cells(scale: Scale) -> list[_Cell]:
    """Those of one table, the ones that tell most first."""
    if scale.tiny:
        return [_Cell(3, 1)]
    quick = [_Cell(batch, 1) for batch in (16, 64)]
    if scale.quick:
        return quick
    several = [_Cell(batch, 2) for batch in (16, 64, 256) if available_cores() > 1]
    return [*quick, _Cell(256, 1), *several]


def cells(name: str, scale: Scale) -> dict[str, Callable[[], Found]]:
    """See tables."""
    model = name.removeprefix("kernel-")
    return {cell.label: partial(_apart, model, cell, scale) for cell in _cells(scale)}


def _apart(model: str, cell: _Cell, scale: Scale) -> Found:
    """Measure a cell in a process of its own, which is given up where it takes far too long."""
    seconds = scale.of(_SECONDS, 0.0)
    given = (scale.of(model, f"tiny {model}"), cell.batch, cell.threads, seconds)
    given = ("tiny", *given[1:]) if given[0] not in PROBLEMS else given
    try:
        rows, busy = child.call(measured, *given, timeout=10 * _SECONDS)
    except subprocess.TimeoutExpired:
        note = f"not done after {10 * _SECONDS:.0f} s"
        return [Row(f"{_TITLES[_OWN]}, {cell.label}", None, note=note)], False
    return [Row(**row) for row in rows], busy


def measured(model: str, batch: int, threads: int, seconds: float) -> tuple[list[Any], bool]:
    """Return a cell's rows as JSON has them, and whether others used the machine."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    problem, cell = PROBLEMS[model], _Cell(batch, threads)
    works, took, notes = _tried(problem, batch, seconds)
    if _OWN in notes or _too_long(took, seconds):
        both = " and ".join(f"{took[m]:.1f} s" for m in (_PLAIN, _OWN) if m in took)
        reason = notes.get(_OWN, f"too long: a plain step and a private one take {both}")
        notes, found = {_OWN: reason}, {}
    else:
        found = _timed(works, took, seconds, threads)
    rows = list(_rows(model, cell, found, notes))
    return [asdict(row) for row in rows], any(turns.busy for turns in found.values())


def _tried(
    problem: Problem, batch: int, seconds: float
) -> tuple[dict[str, Work], dict[str, float], dict[str, str]]:
    """Return the methods that work, how long their second step took, and why others do not."""
    works: dict[str, Work] = {}
    took: dict[str, float] = {}
    notes: dict[str, str] = {}
    for method in _TITLES:
        needed = problem.size * batch * 4
        if method.endswith("products") and problem.name.removeprefix("tiny ") not in _ATTENTION:
            continue
        if method in _KEEPS_GRADIENTS and needed > _MOST_BYTES:
            notes[method] = f"would keep {needed / 2**30:.1f} GiB of gradients"
            continue
        if method not in (_PLAIN, _OWN) and _too_long(took, seconds):
            break
        try:
            work = steps.METHODS[method](problem, batch)
            work()
            # Of the processor, so that a busy machine has as many turns.
            started = time.process_time()
            work()
        except Exception as error:
            # Whatever a method cannot do with a model is what there is to say of it.
            why = (str(error).strip() or "no reason given").splitlines()[0]
            notes[method] = f"fails: {type(error).__name__}: {why}"[:200]
            continue
        works[method] = work
        took[method] = (time.process_time() - started) / torch.get_num_threads()
    return works, took, notes


def _too_long(took: Mapping[str, float], seconds: float) -> bool:
    """Whether the plain and the private step would not have enough turns in so many seconds."""
    return took[_PLAIN] + took.get(_OWN, 0.0) > seconds / 2 > 0


def _timed(
    works: Mapping[str, Work], took: Mapping[str, float], seconds: float, threads: int
) -> dict[str, Turns]:
    """Return the turns that each method was timed in."""
    both = (_PLAIN, _OWN)
    slow = {m: w for m, w in works.items() if m not in both and took[m] > seconds / 20 > 0}
    quick = {m: w for m, w in works.items() if m not in slow}
    turn = sum(max(took[method], 0.01) for method in quick)
    # Disturbed turns are made again, so a turn is counted one and a half times.
    times = int(min(max(seconds / (1.5 * turn), _FEWEST), 15)) if seconds else 1
    found = dict.fromkeys(quick, by_turns(quick, times, threads=threads))
    if slow:
        seldom = {_PLAIN: works[_PLAIN], **slow}
        found |= dict.fromkeys(slow, by_turns(seldom, _SLOW, threads=threads))
    return found


def _rows(
    model: str, cell: _Cell, found: Mapping[str, Turns], notes: Mapping[str, str]
) -> Iterator[Row]:
    goal = _GOALS.get(model) if cell.threads == 1 else None
    if goal is not None and cell.batch < 64:
        goal *= 1.3
    for method, title in _TITLES.items():
        name = f"{title}, {cell.label}"
        if method in notes:
            yield Row(name, None, note=notes[method])
        elif method in found:
            marks = {"goal": goal} if method == _OWN and goal is not None else {}
            yield found[method].row(name, method, _PLAIN, **marks)


def lines(table: Table) -> list[str]:
    """See tables: a line for each cell."""
    rows = {row.name: row for row in table.rows}
    titles = [t for t in _TITLES.values() if any(name.startswith(f"{t}, batch") for name in rows)]
    # A title may begin as another does, and what follows it is the cell.
    labels = list(dict.fromkeys("batch" + name.rpartition("batch")[2] for name in rows))
    notes = dict.fromkeys(
        f"* {row.name}: {row.note}." for row in table.rows if row.value is None and row.note
    )
    return [
        "| cell | " + " | ".join(titles) + " | goal | reached | no slower than any peer |",
        "| --- |" + " --- |" * (len(titles) + 3),
        *[_line(label, titles, rows) for label in labels],
        *(["", *notes] if notes else []),
    ]


def _line(label: str, titles: list[str], rows: Mapping[str, Row]) -> str:
    of = {title: rows[name] for title in titles if (name := f"{title}, {label}") in rows}
    own = of.get(_TITLES[_OWN])
    goal = own.goal if own else None
    reached = own.reaches(goal) if own else None
    peers = [row.value for t, row in of.items() if t not in (_TITLES[_PLAIN], _TITLES[_OWN])]
    best = min((value for value in peers if value is not None), default=None)
    first = own.value <= best if own and own.value is not None and best is not None else None
    cells = [label, *(_shown(title, of.get(title)) for title in titles)]
    cells += ["" if goal is None else f"≤ {shown(goal)}", _yes(reached), _yes(first)]
    return "| " + " | ".join(cells) + " |"


def _shown(title: str, row: Row | None) -> str:
    if row is None or row.value is None:
        return "–"
    if title == _TITLES[_PLAIN]:
        return row.note
    if title != _TITLES[_OWN] or row.low is None or row.high is None:
        return shown(row.value)
    return f"{shown(row.value)} ({shown(row.low)}–{shown(row.high)})"


def _yes(good: bool | None) -> str:
    return "" if good is None else ("yes" if good else "no")
