"""Secure noise beside torch.randn."""

from collections.abc import Callable

import torch

from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.timing import by_turns, milliseconds
from fedpact.common.randomness.secure import SecureDraws
from fedpact.common.randomness.seeded import SeededDraws

TITLE = "Noise"
ABOUT = (
    "Time relative to torch.randn(d), float32, which uses one thread. fedpact uses AES-256 in "
    "counter mode and Box-Muller: simulations in float32 from 32 bits per number; deployments "
    '("secure") in float64 with 52 bits each for radius and angle. "On the grid" includes '
    "rounding, adding to the sum and checking: the defence against floating-point attacks that a "
    "deployment uses. It replaces torch.randn and an addition, and a site runs it on all of its "
    "cores."
)
NAMES = ("noise",)

_FLOAT32 = {"goal": 0.5, "stretch": 0.4}
_TWO = {"goal": 0.9, "stretch": 0.7}  # float64 on two threads


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    del name
    torch.set_num_threads(1)
    rows: list[Row] = []
    busy = False
    for d in scale.of((582_026, 1_663_370, 13_000_000), (1000,)):
        found, disturbed = _rows(d, scale)
        rows += found
        busy |= disturbed
    return rows, busy


def _rows(d: int, scale: Scale) -> tuple[list[Row], bool]:
    total, like = torch.ones(d), torch.empty(0)
    seeded, secure = SeededDraws(0, "site", 1), SecureDraws()

    def on(threads: int) -> Callable[[], None]:
        def added() -> None:
            torch.set_num_threads(threads)
            secure.add_noise(total, 1.0, 0.1, 0, "gradient")
            torch.set_num_threads(1)

        return added

    works: dict[str, Callable[[], object]] = {
        "randn": lambda: torch.randn(d),
        "added": lambda: total.add(torch.randn(d), alpha=0.5),
        "seeded": lambda: seeded.gaussian(d, like, 0, "gradient"),
        "secure": lambda: secure.gaussian(d, like, 0, "gradient"),
        "grid": on(1),
        "grid on two": on(2),
    }
    turns = by_turns(works, scale.repetitions, threads=2)
    where = f"d = {d:,}"
    alone = milliseconds(turns.time("randn").median)
    rows = [
        Row(f"torch.randn, {where}", 1.0, note=alone),
        turns.row(f"a simulation's, {where}", "seeded", "randn", **_FLOAT32),
        turns.row(f"secure, {where}", "secure", "randn"),
    ]
    for title, name, marks in (("one thread", "grid", {}), ("two threads", "grid on two", _TWO)):
        start = f"secure on the grid, {title}"
        rows.append(turns.row(f"{start} / randn and addition, {where}", name, "added"))
        rows.append(turns.row(f"{start} / randn alone, {where}", name, "randn", **marks))
    return rows, turns.busy
