"""pfl's simulation of a round: FedAvg, one process, no privacy in the clients.

pfl 0.6 wants a dp-accounting that is older than fedpact's, so it has an environment of its own,
whose Python is named by FEDPACT_BENCH_PFL. Its rounds are by `pfl_child`.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks import federation
from benchmarks.problems import PROBLEMS, RATE
from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.timing import Others, Spread, milliseconds
from fedpact.plan import Plan
from fedpact.simulation.machine import available_cores

TITLE = "pfl, no privacy in the clients"
ABOUT = (
    "pfl averages the same model over as many users, one step of 75 records each, one user after "
    "another in one process. Its clients neither clip nor add noise, a user's batch is the same in "
    "every round and already in memory, and nothing is written to the disk. It runs with all cores "
    "as intra-op threads, torch's default, and with one thread, which is better for small models "
    "and busy machines; the faster counts. Runs of fedpact and pfl alternate, three of each; its "
    "row is the ratio of their median rounds."
)
_VARIABLE = "FEDPACT_BENCH_PFL"
_WARM = 2  # rounds that are not counted, pfl's evaluation among them
_VERSIONS = (
    'from importlib.metadata import version as v; print(f\'pfl {v("pfl")}, torch {v("torch")}\')'
)
# What simulation.machine.keep_freed_memory asks of the C library, as its environment variables.
_KEEP = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**62),
    "MALLOC_TOP_PAD_": str(2**26),
    "MALLOC_ARENA_MAX": "1",
}


def missing() -> str:
    """Return what has to be installed and set first, or nothing."""
    release = torch.__version__.partition("+")[0]
    do = (
        f"set {_VARIABLE} to the Python of an environment of its own: python -m venv pflenv; "
        f"pflenv/bin/pip install pfl==0.6.0 torch=={release}; "
        f"export {_VARIABLE}=$PWD/pflenv/bin/python"
    )
    python = os.environ.get(_VARIABLE, "")
    if not python:
        return do
    try:
        versions()
    except (OSError, RuntimeError):
        return f"{_VARIABLE} = {python}: no Python with pfl and torch; {do}"
    return ""


def versions() -> str:
    """Return pfl's version and its torch's. Raises OSError, RuntimeError: no such Python."""
    return _python("-c", _VERSIONS).strip()


def rounds(model: str, sites: int, batch: int, count: int, threads: int) -> list[float]:
    """Return the seconds of each of `count` rounds, after two that are not counted.

    threads: intra-op threads of the one process.
    """
    problem = PROBLEMS[model]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "request.pt"
        users = [problem.records(batch, site) for site in range(sites)]
        torch.save({"layers": problem.module(), "users": users, "learning_rate": RATE}, path)
        child = Path(__file__).with_name("pfl_child.py")
        said = _python(str(child), str(path), str(threads), str(count + _WARM))
    return json.loads(said.splitlines()[-1])[_WARM:]


def beside(
    model: str, sites: int, batch: int, plans: Mapping[str, Plan], scale: Scale
) -> tuple[dict[str, list[float]], bool]:
    """Return the median round in seconds, run by run, of each plan and of pfl; and busy.

    Runs alternate. pfl's are called by their number of threads, "1" and "2" on two cores; without
    pfl there are none.
    """
    data = federation.made_up(model, sites * 20 * batch)
    threads = [] if missing() else sorted({1, available_cores()})
    found: dict[str, list[float]] = {name: [] for name in (*plans, *map(str, threads))}
    busy = False
    for _ in range(scale.of(3, 1)):
        for name, plan in plans.items():
            turns = federation.rounds_by_turns(plan, data, {})
            found[name].append(turns.time("fedpact").median)
            busy |= turns.busy
        for number in threads:
            watch = Others()
            seconds = rounds(model, sites, batch, scale.rounds, number)
            found[str(number)].append(Spread.of(seconds).median)
            busy |= not watch.undisturbed
    return found, busy


def row(
    found: Mapping[str, list[float]], to: str, goal: float, stretch: float, title: str = TITLE
) -> Row:
    """Return how many times as long as a plan's round pfl's takes; found: what `beside` found."""
    medians = {name: Spread.of(runs).median for name, runs in found.items() if name.isdecimal()}
    if not medians:
        return Row(title, None, goal=goal, stretch=stretch, larger_is_better=True, note=missing())
    best = min(medians, key=lambda name: medians[name])
    pairs = zip(found[best], found[to], strict=True)
    ratio = Spread.of([theirs / own for theirs, own in pairs])
    times = [f"threads = {name}: {milliseconds(took)}" for name, took in medians.items()]
    own = milliseconds(Spread.of(found[to]).median)
    return Row(
        title,
        ratio.median,
        ratio.low,
        ratio.high,
        goal=goal,
        stretch=stretch,
        larger_is_better=True,
        note=f"{', '.join(times)}, fedpact: {own} a round; {versions()}",
    )


def _python(*arguments: str) -> str:
    """Return what pfl's Python prints; -I, so that `import pfl` there is not this module."""
    command = [os.environ[_VARIABLE], "-I", "-W", "ignore", *arguments]
    environment = {**os.environ, **_KEEP, "PFL_PYTORCH_DEVICE": "cpu"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout
