"""Two workers against one, and a site's threads against one."""

from collections.abc import Callable

import torch

from benchmarks import federation, steps
from benchmarks.problems import PROBLEMS
from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.timing import Spread, Work, by_turns, milliseconds
from fedpact.engines.process import available_cores
from fedpact.params import threads

TITLE = "Workers"
ABOUT = (
    "Rounds of ten sites of model B, batch 75, one step each, by one worker and by one a core (two "
    "at most): runs in turn, the median round of each. The results are the same bits. "
    "threads: a private step where torch is set to one thread and to one a core, as a site finds "
    "it that has its machine to itself, and a plain step with torch's own threads."
)
NAMES = ("workers", "threads")


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    torch.set_num_threads(1)
    return _threads(scale) if name == "threads" else _workers(scale)


def _threads(scale: Scale) -> tuple[list[Row], bool]:
    rows: list[Row] = []
    busy = False
    cores = available_cores()
    if cores < 2:
        return [Row("threads", None, note="one core only")], busy
    cases = (("Bnp", 256), ("B", 256), ("C", 256), ("resnet", 64), ("vit", 64))
    for model, batch in scale.of(cases, (("tiny", 3),)):
        problem = PROBLEMS[model]
        works = {
            "one": _on(1, steps.fedpact(problem, batch)),
            "all": _on(cores, steps.fedpact(problem, batch)),
            "plain": _on(cores, steps.plain(problem, batch)),
        }
        turns = by_turns(works, scale.repetitions, threads=cores)
        busy |= turns.busy
        rows.append(turns.row(f"{model}, batch {batch}: one thread / {cores}", "one", "all"))
        rows.append(turns.row(f"{model}, batch {batch}: private / plain, {cores}", "all", "plain"))
    return rows, busy


def _on(number: int, step: Work) -> Callable[[], None]:
    def work() -> None:
        with threads(number):
            step()

    return work


def _workers(scale: Scale) -> tuple[list[Row], bool]:
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
