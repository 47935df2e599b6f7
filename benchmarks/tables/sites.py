"""From ten sites to a thousand."""

import statistics

import torch

from benchmarks import child, federation
from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.tables.memory import resident
from benchmarks.timing import milliseconds

TITLE = "From 10 to 1,000 sites"
ABOUT = (
    "Model B, one step of 8 expected records per site and round, 16,000 records over all sites "
    "together, one worker per core, each run in a separate process, for 400 steps or two rounds, "
    "the median of five. Peak memory is what the run adds to data and imports, relative to 10 "
    "sites; time is per round and site, relative to 10 sites."
)
NAMES = ("sites",)

_MOST = 1000
# With the most sites, of memory and of time.
_MARKS = {"goal": 1.0, "stretch": 1.0}, {"goal": 1.0, "stretch": 0.85}


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    del name
    rows: list[Row] = []
    first: list[float] | None = None
    for sites in scale.of((10, 100, _MOST), (2,)):
        model, rounds = scale.of("B", "tiny"), scale.of(max(2, 400 // sites), 1)
        ask = a_run if scale.tiny else lambda *given: child.call(a_run, *given)
        found = [ask(model, sites, scale.of(16_000, 20), rounds) for _ in range(scale.of(5, 1))]
        mib, seconds = (statistics.median(each) for each in zip(*found, strict=True))
        first = first or [mib, seconds]
        memory, each = mib / first[0], seconds / first[1]
        of_memory, of_time = _MARKS if sites == _MOST else ({}, {})
        rows += [
            Row(f"memory, {sites:,} sites", memory, note=f"{mib:.0f} MiB", **of_memory),
            Row(f"time a site, {sites:,} sites", each, note=milliseconds(seconds), **of_time),
        ]
    return rows, False


def a_run(model: str, sites: int, records: int, rounds: int) -> list[float]:
    """Return the MiB that a run adds at most, and its seconds a site and round."""
    torch.set_num_threads(1)
    data = federation.made_up(model, records)
    plan = federation.plan_of(model, sites, min(1.0, 8 * sites / records), rounds + 2)
    before = resident()
    turns = federation.rounds_by_turns(plan, data, {})
    return [max(resident() - before, 0.001), turns.time("fedpact").median / sites]
