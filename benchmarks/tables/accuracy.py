"""Time to accuracy: the wall-clock time to 80 % on Fashion-MNIST at ε = 2."""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import federation, flower
from benchmarks.problems import PROBLEMS
from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.timing import Others
from fedpact.common.messages import RoundRecord
from fedpact.plan import Plan
from fedpact.simulation.machine import available_cores
from fedpact.simulation.simulate import simulate

TITLE = "Time to accuracy"
ABOUT = (
    "Fashion-MNIST over ten sites by Dirichlet(1.0), as in experiments/spine: the papers' CNN "
    "without padding, DP-FedAvg with one step per round, (ε, δ) = (2, 1e-5) per record and site "
    "(add/remove one record, PLD), σ calibrated to all 300 planned rounds. fedpact's row is the "
    "time from the first round until the model first classifies 80 % of the test images "
    "correctly. It is evaluated every tenth round, which does not count. The peers compute the "
    "same (clip, noise, batch size, step), so they need the same number of rounds; a peer's row "
    "is its time per round, measured over a few rounds, times that number. Data from "
    "$FEDPACT_DATA."
)
NAMES = ("accuracy",)

_TARGET = 0.8
_RATE, _SITES = 0.05, 10
_BATCH = 270  # expected: a twentieth of 5,400 records, which a site has in the mean
_MARKS = {"hooks": (10, 15), "ghost": (3.5, 5)}


def plan_of(data: str, rounds: int) -> Plan:
    """Return what is run."""
    raw: dict[str, Any] = {
        "data": data,
        "model": "cnn",
        "rounds": rounds,
        "sites": _SITES,
        "sampling_rate": _RATE,
        "settings": {"learning_rate": 30.0},
        "partition": {"kind": "dirichlet", "beta": 1.0, "held_out": 0.1},
        "privacy": {"epsilon": 2.0, "delta": 1e-5, "clip": 0.1},
        "run": {"evaluate_every": 10},
    }
    return Plan.parse(raw)


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    del name
    torch.set_num_threads(available_cores())
    if scale.tiny:
        raw = {"rounds": 2, "privacy": {"accountant": "rdp"}, "run": {"evaluate_every": 1}}
        return [_own(*_until(Plan.parse(raw), 0.0))], False
    if not os.environ.get("FEDPACT_DATA"):
        return [Row("fedpact", None, unit="s", note="no data: set FEDPACT_DATA")], False
    others = Others()
    rounds, seconds, accuracy = _until(plan_of("fashion_mnist", 300), _TARGET)
    rows = [_own(rounds, seconds, accuracy)]
    if rounds:
        for mode in _MARKS:
            rows += [_loop(mode, rounds, seconds, scale), _flower(mode, rounds, seconds, scale)]
    return rows, not others.undisturbed


def _until(plan: Plan, target: float) -> tuple[int, float, float]:
    """Return (rounds, seconds, accuracy) when the target is first seen; 0 rounds if it never is."""
    seconds, seen = 0.0, list[RoundRecord]()
    resumed = time.perf_counter()

    def on_round(record: RoundRecord) -> None:
        nonlocal seconds, resumed
        if record.round:
            # The round, its looking taken out: evaluated rounds count as those before them.
            rounds = [r.seconds for r in seen if r.accuracy is None] or [record.seconds]
            took = time.perf_counter() - resumed
            seconds += took if record.accuracy is None else min(took, sum(rounds) / len(rounds))
            seen.append(record)
        resumed = time.perf_counter()

    def reached() -> bool:
        return bool(seen and seen[-1].accuracy is not None and seen[-1].accuracy >= target)

    with tempfile.TemporaryDirectory() as folder:
        simulate(plan, Path(folder) / "run", on_round=on_round, stop=reached)
    last = [record for record in seen if record.accuracy is not None][-1]
    best = last.accuracy or 0.0
    return (last.round if best >= target else 0), seconds, best


def _own(rounds: int, seconds: float, accuracy: float) -> Row:
    if not rounds:
        return Row("fedpact", None, unit="s", note=f"not reached: {accuracy:.1%}")
    return Row("fedpact", seconds, unit="s", note=f"{accuracy:.1%} after {rounds} rounds")


def _loop(mode: str, rounds: int, own: float, scale: Scale) -> Row:
    a_round = federation.opacus_round(PROBLEMS["Bnp"], _SITES, _BATCH, mode)
    a_round()
    times: list[float] = []
    for _ in range(max(2, scale.rounds // 2)):
        started = time.perf_counter()
        a_round()
        times.append(time.perf_counter() - started)
    return _peer(f"loop over Opacus, {mode} / fedpact", times, rounds, own)


def _flower(mode: str, rounds: int, own: float, scale: Scale) -> Row:
    title = f"Flower with Opacus, {mode} / fedpact"
    missing = flower.missing()
    if missing:
        return Row(title, None, note=missing)
    times = flower.rounds(mode, "Bnp", _SITES, _BATCH, max(2, scale.rounds // 2))
    return _peer(title, times, rounds, own, *_MARKS[mode])


def _peer(
    title: str,
    times: list[float],
    rounds: int,
    own: float,
    goal: float | None = None,
    stretch: float | None = None,
) -> Row:
    each = sorted(times)[len(times) // 2]
    note = f"{each:.3g} s a round, {rounds * each:.0f} s in all"
    marks = {"goal": goal, "stretch": stretch, "larger_is_better": True}
    return Row(title, rounds * each / own, note=note, **marks)  # type: ignore[arg-type]
