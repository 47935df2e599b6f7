"""One private step beside one plain step on a graphics card, where there is one."""

from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks import steps
from benchmarks.problems import PROBLEMS
from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.timing import Work, by_turns, milliseconds

TITLE = "A step on a graphics card"
ABOUT = (
    "Records, model, noise and step on the card, each step waited for to its end. Ratios to the "
    "plain step there."
)
NAMES = ("card",)

_TITLES = {"fedpact": "fedpact", "opacus_hooks": "Opacus, hooks", "opacus_ghost": "Opacus, ghost"}


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    del name
    if not torch.cuda.is_available():
        none = "torch finds no CUDA device on this machine: nothing was measured on one"
        return [Row("fedpact, on a card", None, note=none)], False
    return rows("cuda", torch.cuda.synchronize, scale)


def rows(device: str, wait: Callable[[], object], scale: Scale) -> tuple[list[Row], bool]:
    """Return what `run` does, for a device; wait: until it has done what it was asked."""
    found: list[Row] = []
    busy = False
    for model in scale.of(("A", "B", "C"), ("tiny",)):
        problem = replace(PROBLEMS[model], device=device)
        for batch in scale.of((75, 300), (3,)):
            works = {m: steps.METHODS[m](problem, batch) for m in ("plain", *_TITLES)}
            waited = {name: _to_its_end(work, wait) for name, work in works.items()}
            turns = by_turns(waited, scale.repetitions)
            busy |= turns.busy
            which = f"{model}, batch {batch}"
            plain = milliseconds(turns.time("plain").median)
            found.append(Row(f"plain, {which}", 1.0, note=plain))
            found += [turns.row(f"{title}, {which}", m, "plain") for m, title in _TITLES.items()]
    return found, busy


def _to_its_end(work: Work, wait: Callable[[], object]) -> Work:
    def waited() -> None:
        work()
        wait()

    return waited
