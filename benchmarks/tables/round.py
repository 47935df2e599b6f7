"""A round of ten sites beside Opacus in a loop and in Flower, and beside pfl."""

import torch

from benchmarks import federation, flower, pfl
from benchmarks.problems import PROBLEMS
from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.timing import Spread, Turns, milliseconds
from fedpact.simulation.machine import available_cores

TITLE = "A round of ten sites"
ABOUT = (
    "One step per site and round, batch 75 (fedpact: Poisson batches of that mean). fedpact's time "
    "covers the whole round: sites on one worker per core, ledgers and checkpoint on the disk, "
    "messages encoded. The loop over Opacus makes each site's model private again in every round, "
    "as a client does, on all cores. Flower runs its simulation (Ray, one CPU per client) with the "
    "same client function, in a separate process. Times are relative to fedpact's round. "
    + pfl.ABOUT
)
NAMES = ("round-B", "round-A")

_LOOPS = {"hooks": "loop over Opacus, hooks", "ghost": "loop over Opacus, ghost"}
_FLOWER = {
    "hooks": ("Flower with Opacus, hooks", 18, 20),
    "ghost": ("Flower with Opacus, ghost", 4, 5),
    "idle": ("Flower with clients that do nothing", None, None),
}


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    model = scale.of(name.removeprefix("round-"), "tiny")
    sites, batch = scale.of(10, 2), scale.of(75, 3)
    torch.set_num_threads(available_cores())
    plan = federation.plan_of(model, sites, 0.05, scale.rounds + 2)
    data = federation.made_up(model, sites * 20 * batch)
    problem = PROBLEMS[model]
    loops = {m: federation.opacus_round(problem, sites, batch, m) for m in _LOOPS}
    turns = federation.rounds_by_turns(plan, data, loops)
    own = turns.time("fedpact")
    rows = [Row("fedpact", 1.0, note=f"{milliseconds(own.median)} a round")]
    for mode, title in _LOOPS.items():
        rows.append(turns.row(title, mode, "fedpact", larger_is_better=True))
    marked = name == "round-B"
    rows += [_flower(mode, model, sites, batch, turns, scale, marked) for mode in _FLOWER]
    if not marked:
        return rows, turns.busy
    found, busy = pfl.beside(model, sites, batch, {"fedpact": plan}, scale)
    rows.append(pfl.row(found, "fedpact", goal=1.2, stretch=1.5))
    return rows, turns.busy or busy


def _flower(
    mode: str, model: str, sites: int, batch: int, turns: Turns, scale: Scale, marked: bool
) -> Row:
    title, goal, stretch = _FLOWER[mode]
    missing = flower.missing()
    if missing or scale.tiny:
        return Row(title, None, note=missing or "not at this size")
    seconds = flower.rounds(mode, model, sites, batch, scale.rounds)
    found, own = Spread.of(seconds), turns.time("fedpact").median
    return Row(
        title,
        found.median / own,
        found.low / own,
        found.high / own,
        goal=goal if marked else None,
        stretch=stretch if marked else None,
        larger_is_better=True,
        note=f"{milliseconds(found.median)} a round; not by turns",
    )
