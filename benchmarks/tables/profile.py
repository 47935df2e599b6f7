"""What a run spends its time on: the kernel's share."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import federation
from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.steps import PerSampleKernel
from fedpact.common.messages import RoundRecord
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.data.dataset import Dataset
from fedpact.plan import Plan
from fedpact.simulation.simulate import simulate

TITLE = "Profile"
ABOUT = (
    "Where a run spends its processor time, from the first round to the last, with one worker: "
    "the shares of the kernel (clipped sums) and of the noise. The rest is sampling, ledgers, "
    "messages, aggregation, ε and checkpoints. The built-in default is logistic regression on "
    "1,437 small digits; the other run has ten sites of model B, batch 75, one step per round."
)
NAMES = ("profile",)


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    del name
    torch.set_num_threads(1)
    model, batch, sites = scale.of("B", "tiny"), scale.of(75, 3), scale.of(10, 2)
    cnn = federation.plan_of(model, sites, 0.05, scale.rounds + 2, 1)
    asked = [f"rounds={scale.of(40, 2)}", "run.workers=1", "compression.kind=none"]
    default = Plan.read(None, asked)
    rows: list[Row] = []
    for title, plan, data in (
        ("embedded default", default, None),
        ("ten sites, CNN", cnn, federation.made_up(model, sites * 20 * batch)),
    ):
        kernel, noise = shares(plan, data)
        marks: dict[str, Any] = {"goal": 0.87, "stretch": 0.92} if plan is cnn else {}
        rows.append(Row(f"{title}: kernel", kernel, unit="", larger_is_better=True, **marks))
        rows.append(Row(f"{title}: noise", noise, unit=""))
    return rows, False


def shares(plan: Plan, data: Dataset | None) -> tuple[float, float]:
    """Return which shares of a run's processor time its kernel and its noise take."""
    ends: list[tuple[float, float, float]] = []
    with (
        _timed(PerSampleKernel, "clipped_sum") as kernel,
        _timed(SeededDraws, "add_noise") as noise,
        tempfile.TemporaryDirectory() as place,
    ):

        def on_round(record: RoundRecord) -> None:
            del record
            ends.append((time.process_time(), sum(kernel), sum(noise)))

        simulate(plan, Path(place) / "run", data=data, on_round=on_round)
    whole, *parts = (last - first for first, last in zip(ends[0], ends[-1], strict=True))
    return parts[0] / whole, parts[1] / whole


@contextmanager
def _timed(kind: type, name: str) -> Iterator[list[float]]:
    """Yield a list that gets the processor time of each call of a method meanwhile."""
    method: Callable[..., Any] = getattr(kind, name)
    took: list[float] = []

    def timed(*given: Any, **named: Any) -> Any:
        started = time.thread_time()
        try:
            return method(*given, **named)
        finally:
            took.append(time.thread_time() - started)

    setattr(kind, name, timed)
    try:
        yield took
    finally:
        setattr(kind, name, method)
