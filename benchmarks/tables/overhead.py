"""What a site costs in a round beyond its kernel."""

import torch

from benchmarks import federation, steps
from benchmarks.problems import PROBLEMS
from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.timing import Spread

TITLE = "Overhead"
ABOUT = (
    "Rounds of 100 sites of model A, one step of 75 expected records each, one worker, with "
    "ledgers and checkpoint on the disk; minus 100 times the clipped sum alone on such a batch in"
    " the same turn. What remains is sampling, noise, ledger, memory, messages, aggregation, ε "
    "and the commit. The row without the disk has the folder in memory (/dev/shm)."
)
NAMES = ("overhead",)


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    del name
    torch.set_num_threads(1)
    model, batch, sites = scale.of("A", "tiny"), scale.of(75, 3), scale.of(100, 2)
    data = federation.made_up(model, sites * 20 * batch)
    kernel = steps.kernel_alone(PROBLEMS[model], batch)

    def kernels() -> None:
        for _ in range(sites):
            kernel()

    plan = federation.plan_of(model, sites, 0.05, scale.rounds + 2, 1)
    rows: list[Row] = []
    busy = False
    for title, folder in (("a site and round", None), ("the same in memory", "/dev/shm")):
        turns = federation.rounds_by_turns(plan, data, {"kernels": kernels}, folder)
        pairs = zip(turns.seconds["fedpact"], turns.seconds["kernels"], strict=True)
        rest = Spread.of([(whole - bare) / sites * 1e3 for whole, bare in pairs])
        bare = turns.time("kernels").median / sites * 1e3
        marks = {} if folder else {"goal": 0.35, "stretch": 0.3}
        note = f"the kernel itself: {bare:.3g} ms"
        rows.append(Row(title, rest.median, rest.low, rest.high, unit="ms", note=note, **marks))
        busy |= turns.busy
    return rows, busy
