"""Secure noise beside torch.randn."""

import torch

from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.timing import by_turns, milliseconds
from fedpact.privacy import grid
from fedpact.privacy.noise import SeededDraws
from fedpact.privacy.secure import SecureDraws

TITLE = "Noise"
ABOUT = (
    "Seconds beside torch.randn(d), float32, on one thread. Secure noise is AES-256 in counter "
    "mode and Box and Muller in float64 with 52 bits each for radius and angle; on the grid it is "
    "also rounded, added to the sum and checked, the floating-point defence that a deployment "
    "uses, and then compares with torch.randn and the addition."
)
NAMES = ("noise",)


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

    def gaussian(size: int, kind: torch.Tensor) -> torch.Tensor:
        return secure.gaussian(size, kind, 0, "gradient")

    works = {
        "randn": lambda: torch.randn(d),
        "added": lambda: total.add(torch.randn(d), alpha=0.5),
        "seeded": lambda: seeded.gaussian(d, like, 0, "gradient"),
        "secure": lambda: gaussian(d, like),
        "grid": lambda: grid.noisy(total, 1.0, 0.1, gaussian),
    }
    turns = by_turns(works, scale.repetitions)
    where = f"d = {d:,}"
    marks = {"goal": 0.8, "stretch": 0.5}
    alone = milliseconds(turns.time("randn").median)
    rows = [
        Row(f"torch.randn, {where}", 1.0, note=alone),
        turns.row(f"a simulation's, {where}", "seeded", "randn"),
        turns.row(f"secure, {where}", "secure", "randn", **marks),
        turns.row(f"secure on the grid / randn and addition, {where}", "grid", "added"),
        turns.row(f"secure on the grid / randn alone, {where}", "grid", "randn", **marks),
    ]
    return rows, turns.busy
