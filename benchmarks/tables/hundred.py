"""A round of a hundred sites of a small model beside pfl."""

import torch

from benchmarks import federation, pfl
from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.timing import Spread, milliseconds

TITLE = "A round of a hundred sites"
ABOUT = (
    "Logistic regression 784→10 (A), one step per site and round, batch 75. fedpact's time covers "
    "the whole round, on one worker, which fedpact chooses when steps are this short. " + pfl.ABOUT
)
NAMES = ("round-100A",)
_OURS = "fedpact"


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    del name
    torch.set_num_threads(1)
    model, sites, batch = scale.of("A", "tiny A"), scale.of(100, 3), scale.of(75, 3)
    # Rounds this short need more of them for a median.
    plan = federation.plan_of(model, sites, 0.05, scale.of(5, 1) * scale.rounds + 2)
    found, busy = pfl.beside(model, sites, batch, {_OURS: plan}, scale)
    took = f"{milliseconds(Spread.of(found[_OURS]).median)} a round"
    return [Row(_OURS, 1.0, note=took), pfl.row(found, _OURS, 1.2, 2, pfl.TITLE)], busy
