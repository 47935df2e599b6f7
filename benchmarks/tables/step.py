"""One private step beside one plain step, on one intra-op thread."""

import torch

from benchmarks import steps
from benchmarks.problems import PROBLEMS
from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.timing import Turns, by_turns, milliseconds

TITLE = "One private step"
ABOUT = (
    "A step computes the clipped sum of the batch's per-sample gradients, adds noise and updates "
    "the weights; fedpact's goes through the oracle with all its checks. All batches are in "
    "memory; sampling and gathering are among the parts below. Ratios to the plain step "
    "(nn.Module, cross_entropy, torch.optim.SGD) of the same turn, one intra-op thread. A: "
    "logistic regression 784→10; B: the papers' CNN with padding 2 (d = 1,663,370); Bnp: without "
    "padding (582,026); C: with padding on 3x32x32; 13M: B with 4,096 hidden units (d = 12.9 "
    "million)."
)
NAMES = ("step-A", "step-B", "step-Bnp", "step-C", "step-13M")

# By model and batch.
_MARKS = {
    ("A", 75): (1.5, 1.2),
    ("A", 300): (1.0, 0.8),
    ("B", 75): (0.85, 0.75),
    ("C", 75): (0.9, 0.8),
    ("13M", 75): (0.95, 0.9),
}
# On B at 75: how many times as fast as a peer fedpact is.
_FASTER = {"opacus_hooks": (14, 15), "opacus_ghost": (2.8, 3), "vmap_grad": (8, 9)}
_TITLES = {
    "channels_last": "plain, channels_last",
    "fedpact": "fedpact",
    "fedpact_secure": "fedpact, secure noise on the grid",
    "kernel_alone": "fedpact's clipped sum alone",
    "opacus_hooks": "Opacus, hooks",
    "opacus_ghost": "Opacus, ghost",
    "vmap_grad": "vmap(grad)",
}


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    torch.set_num_threads(1)
    model = name.removeprefix("step-")
    problem = PROBLEMS[scale.of(model, "tiny")]
    rows: list[Row] = []
    busy = False
    for batch in scale.of((75,) if model == "13M" else (75, 300), (3,)):
        # Peers that keep the per-sample gradients of 13 million numbers would need 4 GiB for them.
        methods = [m for m in _TITLES if model != "13M" or m in ("fedpact", "fedpact_secure")]
        if model == "A":
            methods.remove("channels_last")
        works = {m: steps.METHODS[m](problem, batch) for m in ("plain", *methods)}
        turns = by_turns(works, scale.repetitions)
        rows += _rows(model, batch, methods, turns)
        busy |= turns.busy
    return rows, busy


def _rows(model: str, batch: int, methods: list[str], turns: Turns) -> list[Row]:
    goal, stretch = _MARKS.get((model, batch), (None, None))
    marked = (model, batch) == ("B", 75)
    plain = turns.time("plain")
    rows = [Row(f"plain, batch {batch}", 1.0, note=milliseconds(plain.median))]
    for method in methods:
        marks = {"goal": goal, "stretch": stretch} if method == "fedpact" else {}
        rows.append(turns.row(f"{_TITLES[method]}, batch {batch}", method, "plain", **marks))
    for peer, (goal, stretch) in _FASTER.items():
        if peer in methods and marked:
            marks = {"goal": goal, "stretch": stretch, "larger_is_better": True}
            title = f"{_TITLES[peer]} / fedpact, batch {batch}"
            rows.append(turns.row(title, peer, "fedpact", **marks))
    return rows
