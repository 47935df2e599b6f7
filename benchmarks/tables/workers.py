"""Two workers against one."""

import torch

from benchmarks import federation
from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.timing import Spread, milliseconds
from fedpact.simulation.machine import available_cores

TITLE = "Workers"
ABOUT = (
    "Rounds of ten sites of model B, batch 75, one step each, with one worker and with one per "
    "core (at most two): runs in turn, the median round of each. The results are bit for bit the "
    "same."
)
NAMES = ("workers",)


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    del name
    torch.set_num_threads(1)
    model, batch = scale.of("B", "tiny"), scale.of(75, 3)
    sites = scale.of(10, 2)
    data = federation.made_up(model, sites * 20 * batch)
    times: dict[int, list[float]] = {1: [], 2: []}
    busy = False
    for _ in range(scale.of(3, 1)):
        for workers, found in times.items():
            plan = federation.plan_of(model, sites, 0.05, scale.rounds + 2, workers)
            turns = federation.rounds_by_turns(plan, data, {})
            found.append(turns.time("fedpact").median)
            busy |= turns.busy
    note = f"{milliseconds(min(times[1]))} and {milliseconds(min(times[2]))} a round"
    if available_cores() < 2:
        return [Row("2 workers against 1", None, note="one core only")], busy
    gain = Spread.of([one / two for one, two in zip(times[1], times[2], strict=True)])
    marks = {"goal": 1.75, "stretch": 1.9, "larger_is_better": True}
    return [Row("2 workers / 1", gain.median, gain.low, gain.high, note=note, **marks)], busy
