"""A round of a hundred sites of a small model beside pfl."""

import torch

from benchmarks import federation, pfl
from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.timing import Spread, milliseconds

TITLE = "A round of a hundred sites"
ABOUT = (
    "Logistic regression 784→10 (A), one step a site and round, batch 75. fedpact's round is the "
    "whole of it, on one worker, as fedpact chooses where steps are this short: sites one by one, "
    "and 16 in lockstep (`run.stacked = 16`). " + pfl.ABOUT
)
NAMES = ("round-100A",)
_ALONE, _STACKED = "fedpact, sites one by one", "fedpact, run.stacked = 16"


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    del name
    torch.set_num_threads(1)
    model, sites, batch = scale.of("A", "tiny A"), scale.of(100, 3), scale.of(75, 3)
    # Rounds this short need more of them for a median.
    rounds = scale.of(5, 1) * scale.rounds
    plans = {
        title: federation.plan_of(model, sites, 0.05, rounds + 2, stacked=stacked)
        for title, stacked in ((_ALONE, 1), (_STACKED, scale.of(16, 2)))
    }
    found, busy = pfl.beside(model, sites, batch, plans, scale)
    pairs = zip(found[_STACKED], found[_ALONE], strict=True)
    ratio = Spread.of([stacked / alone for stacked, alone in pairs])
    took = {title: f"{milliseconds(Spread.of(found[title]).median)} a round" for title in plans}
    rows = [
        Row(_ALONE, 1.0, note=took[_ALONE]),
        Row(_STACKED, ratio.median, ratio.low, ratio.high, note=took[_STACKED]),
    ]
    for title in plans:
        rows.append(pfl.row(found, title, 1.2, 2, f"{pfl.TITLE} / {title}"))
    return rows, busy
