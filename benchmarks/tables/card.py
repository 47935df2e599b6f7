"""Private steps and rounds on a graphics card, where there is one."""

from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks import federation, steps
from benchmarks.problems import PROBLEMS
from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.timing import Work, by_turns, milliseconds

TITLE = "A graphics card"
ABOUT = (
    "Records, model, noise and step on the GPU; each step is timed to its completion. Ratios to "
    "the plain step on the GPU. card-rounds: rounds of ten and of a hundred sites of model B, "
    "batch 75, five local steps."
)
NAMES = ("card", "card-rounds")
DEVICE = "cuda"

_TITLES = {
    "fedpact": "fedpact",
    "opacus_hooks": "Opacus, hooks",
    "opacus_ghost": "Opacus, ghost",
    "vmap_grad": "vmap(grad)",
}
# Model -> batch -> goal, of fedpact's step beside the plain one.
_GOALS = {
    "B": {64: 0.5, 1024: 1.2},
    "resnet": {64: 0.5, 1024: 1.2},
    "transformer": {64: 0.5, 1024: 1.1},
    "lstm64": {64: 0.5, 512: 4.0},
}
_SITES = {10: 0.06, 100: 0.4}  # and the goal in seconds


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    if not torch.cuda.is_available():
        none = "torch finds no CUDA device on this machine: nothing was measured on one"
        return [Row("fedpact, on a card", None, note=none)], False
    if name == "card-rounds":
        return rounds("cuda", scale)
    return rows("cuda", torch.cuda.synchronize, scale)


def rows(device: str, wait: Callable[[], object], scale: Scale) -> tuple[list[Row], bool]:
    """Return the steps' rows for a device; wait: until it has done what it was asked."""
    found: list[Row] = []
    busy = False
    for model, goals in scale.of(_GOALS, {"tiny": {3: 0.5}}).items():
        problem = replace(PROBLEMS[model], device=device)
        for batch, goal in goals.items():
            works: dict[str, Work] = {}
            which = f"{model}, batch {batch}"
            failed: list[Row] = []
            for method in ("plain", *_TITLES):
                try:
                    work = steps.METHODS[method](problem, batch)
                    work()
                except Exception as error:
                    # Whatever a method cannot do with a model is what there is to say of it.
                    why = (str(error).strip() or "no reason given").splitlines()[0]
                    note = f"fails: {type(error).__name__}: {why}"[:200]
                    failed.append(Row(f"{_TITLES.get(method, method)}, {which}", None, note=note))
                else:
                    works[method] = _to_its_end(work, wait)
            turns = by_turns(works, scale.repetitions)
            busy |= turns.busy
            plain = milliseconds(turns.time("plain").median)
            found.append(Row(f"plain, {which}", 1.0, note=plain))
            for method, title in _TITLES.items():
                if method in works:
                    marks = {"goal": goal} if method == "fedpact" else {}
                    found.append(turns.row(f"{title}, {which}", method, "plain", **marks))
            found += failed
    return found, busy


def rounds(device: str, scale: Scale) -> tuple[list[Row], bool]:
    """Return the rounds' rows for a device."""
    found: list[Row] = []
    busy = False
    model, batch = scale.of("B", "tiny"), scale.of(75, 3)
    for sites, goal in scale.of(_SITES, {2: 0.06}).items():
        plan = federation.plan_of(
            model, sites, 0.05, scale.rounds + 2, workers=1, steps=5, device=device
        )
        turns = federation.rounds_by_turns(plan, federation.made_up(model, sites * 20 * batch), {})
        took = turns.time("fedpact")
        title = f"fedpact, a round of {sites} sites"
        found.append(Row(title, took.median, took.low, took.high, unit="s", goal=goal))
        busy |= turns.busy
    return found, busy


def _to_its_end(work: Work, wait: Callable[[], object]) -> Work:
    def waited() -> None:
        work()
        wait()

    return waited
