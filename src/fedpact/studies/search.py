"""Random search and successive halving over a plan's keys, with what trying costs.

Random search draws points from ranges and tries each with each plan. Successive halving (Jamieson,
Talwalkar, arXiv 1502.07943) gives all points few rounds, keeps each plan's best 1/F of them, gives
these F times as many rounds, and so on up to the plan's rounds. Every rung trains from the start
with noise for its own rounds, so the privacy costs of all runs add up.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import torch

from fedpact.common import check
from fedpact.common.configuration import value_of
from fedpact.common.errors import PlanError
from fedpact.common.randomness.seeded import seeded_generator
from fedpact.plan import Plan
from fedpact.report.run_summary import RunSummary
from fedpact.report.tuning_cost import TuningCost, count_tuning_cost, reserved_events
from fedpact.studies.compare import (
    Compared,
    check_countable,
    check_held_out,
    compare,
    private_runs,
    store,
)
from fedpact.studies.sweep import change, has_key, no_setting

VALIDATION: Final = 0.2
"""partition.validation of trials whose plan does not set it."""


@dataclass(frozen=True)
class SearchRange:
    """The range of a key, sampled uniformly on the logarithm if low > 0. whole: integers only."""

    low: float
    high: float
    whole: bool

    def draw(self, generator: torch.Generator) -> float | int:
        """Return a value."""
        share = float(torch.rand(1, generator=generator, dtype=torch.float64))
        high = self.high + self.whole  # so that the last integer has its share, too
        if self.low > 0:
            found = self.low * (high / self.low) ** share
        else:
            found = self.low + (high - self.low) * share
        return min(math.floor(found), int(self.high)) if self.whole else float(f"{found:.4g}")


def read_ranges(texts: Sequence[str]) -> dict[str, SearchRange]:
    """Return key -> range from `KEY=LOW:HIGH`. Raises PlanError: another form or repeated key."""
    found = dict[str, SearchRange]()
    for text in texts:
        key, _, bounds = text.partition("=")
        ends = [value_of(end.strip()) for end in bounds.split(":")]
        good = len(ends) == 2 and all(type(end) in (int, float) for end in ends)
        if not (key.strip() and good and ends[0] < ends[1] < math.inf and key.strip() not in found):
            raise PlanError(
                f"--draw {text!r}: expected KEY=LOW:HIGH once a key, as in "
                "settings.learning_rate=0.1:10"
            )
        found[key.strip()] = SearchRange(*ends, whole=all(type(end) is int for end in ends))
    return found


def draw_points(
    plans: Mapping[str, Plan], texts: Sequence[str], count: int | None
) -> list[dict[str, Any]]:
    """Return `count` points, by default 8, within the ranges `KEY=LOW:HIGH`; none without ranges.

    They depend on the first plan's seed only. Raises PlanError, as read_ranges does, or for a
    setting that no plan has, or a count without ranges.
    """
    if count is not None and not texts:
        raise PlanError(
            f"--draws is {count} without --draw: expected ranges to draw from; add one, as --draw "
            "settings.learning_rate=0.1:10, or leave --draws out"
        )
    ranges, seed = read_ranges(texts), next(iter(plans.values())).seed
    for key in ranges:
        if key == "partition.validation":
            raise PlanError(f"--draw {key}: trials set it themselves; draw another key")
        if not any(has_key(plan, key) for plan in plans.values()):
            names = [plan.algorithm for plan in plans.values()]
            raise PlanError(f"--draw {key}: it is {no_setting(names)}")
    return [
        {key: one.draw(seeded_generator(seed, "search", i, key)) for key, one in ranges.items()}
        for i in range(check.count(draws=8 if count is None else count) if ranges else 0)
    ]


def rungs(rounds: int, points: int, factor: int) -> list[tuple[int, int]]:
    """Return (rounds, points) of each rung; the last has all rounds. factor: 1 for one rung.

    >>> rungs(27, 9, 3)
    [(3, 9), (9, 3), (27, 1)]
    """
    count = 1
    while factor > 1 and min(points, rounds) >= factor**count:
        count += 1
    return [(rounds // factor ** (count - 1 - i), points // factor**i) for i in range(count)]


def search(
    plans: Mapping[str, Plan],
    points: Sequence[Mapping[str, Any]],
    seeds: int,
    out: Path,
    *,
    halving: int = 1,
    counted: bool = False,
    joining: bool = False,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    stop: Callable[[], bool] = lambda: False,
    **how: Any,
) -> Compared:
    """Choose a point for every plan by itself; return the comparison of the plans at these points.

    Points are chosen on validation records (partition.validation, by default a fifth of the
    training records), in out/trials. The plans at the chosen points train on all training records,
    in `out`, and are evaluated once. Stopped before that, it returns the last trials.

    halving: F, or 1 for random search, which trains every point for all rounds. counted: also state
    the cost of all runs, trials included. sweep: instead of points. how: passed to compare.compare.
    Raises PlanError: points and a sweep, halving without points, or no trial of a plan has ended.
    """
    check.count(halving=halving)
    how |= {"stop": stop}
    if not points and halving == 1:
        return compare(plans, seeds, out, counted=counted, joining=joining, sweep=sweep, **how)
    if not points or sweep:
        raise PlanError("--halving goes with --draw, and --draw without --sweep")
    if halving > 1 and "rounds" in points[0]:
        raise PlanError("--halving with --draw rounds: both set the rounds; leave one of them out")
    for name, plan in plans.items():
        if plan.budget.early:
            raise PlanError(
                f"{name}: --draw with a [budget] that may end a run early: a trial's length would "
                "follow from its validation records; leave patience and accuracy out"
            )
    if joining:
        check_held_out(plans)
    if counted:
        check_countable(plans, range(max(2, seeds)))
    best = {name: _keep_known(plan, points) for name, plan in plans.items()}
    tried = dict[str, Mapping[int, RunSummary]]()
    rounds = max(plan.rounds for plan in plans.values())
    steps = rungs(rounds, len(points), halving)
    for number, (length, count) in enumerate(steps, start=1):
        best = {name: of[:count] for name, of in best.items()}
        trials = {
            name: change(
                plan,
                {
                    "partition.validation": plan.partition.validation or VALIDATION,
                    "rounds": max(1, plan.rounds * length // rounds),
                },
            )
            for name, plan in plans.items()
            if len(best[name]) > 1  # else there is no choice
        }
        if not trials:
            break
        folder = out / "trials" / (f"rung-{number}" if halving > 1 else "")
        found = compare(trials, seeds, folder, points=best, **how)
        if stop():
            return found
        _check_whole(found)
        ended = private_runs(found)
        for name in trials if counted else ():
            of = [entry.name for entry in found.entries if entry.base == name and entry.private]
            _check_alike(ended[entry] for entry in of)
        tried |= {f"{folder.name}/{name}": runs for name, runs in ended.items()}
        best |= {name: _rank(found, name) for name in trials}
    chosen = {name: dict(of[0]) for name, of in best.items()}
    final = {
        n: change(plan, {"partition.validation": 0.0, **chosen[n]}) for n, plan in plans.items()
    }
    found = compare(final, seeds, out, joining=joining, **how)
    # Every seed's last run was chosen by trials of all seeds, so only the sum of all runs holds.
    costs = count_tuning_cost(tried | private_runs(found))[-1:] if counted else ()
    chosen = {name: of for name, of in chosen.items() if len(points) > 1 and of}
    return store(replace(found, chosen=chosen, counted=[*map(_of_all, costs)]))


def _keep_known(plan: Plan, points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the points, each once, without settings that the plan's algorithm does not have."""
    own = [{key: value for key, value in one.items() if has_key(plan, key)} for one in points]
    return [one for i, one in enumerate(own) if one not in own[:i]]


def _of_all(cost: TuningCost) -> TuningCost:
    """Return the cost of a search, without a claim about the winner alone: none is proven."""
    alone = cost.alone and replace(cost.alone, winner=None)
    return replace(cost, found=replace(cost.found, winner=None), alone=alone)


def _check_alike(runs: Iterable[Mapping[int, RunSummary]]) -> None:
    """Raise PlanError unless all trials of a plan with one seed reserve the same events.

    Otherwise the total would depend on which points are kept; equal events add up by adaptive
    composition.
    """
    known = dict[int, object]()
    each = [(seed, reserved_events(run)) for by_seed in runs for seed, run in by_seed.items()]
    if any(known.setdefault(seed, events) != events for seed, events in each):
        raise PlanError(
            "--draw with --counted, and the points release different events: the total cost "
            "would depend on which are kept; draw keys that do not change noise or steps, such as "
            "settings.learning_rate, or leave one of the two options out"
        )


def _check_whole(found: Compared) -> None:
    """Raise PlanError if a trial failed: what it released would not be counted, nor it chosen."""
    for entry in found.entries:
        for seed, why in entry.missing.items():
            raise PlanError(
                f"the trial {entry.name} with seed {seed} has not ended: {why}; the same command "
                "goes on with it. If it fails again, draw from a range without this point"
            )


def _rank(found: Compared, name: str) -> list[Mapping[str, Any]]:
    """Return a plan's points, best first: by the mean accuracy over seeds, or else by the loss."""
    scores = list[tuple[float, Mapping[str, Any]]]()
    for entry in found.entries:
        accuracy, loss = map(entry.spread, ("accuracy", "loss"))
        score = accuracy.mean if accuracy else -loss.mean if loss else math.nan
        if entry.base == name and math.isfinite(score):
            scores.append((score, entry.point.values))
    if not scores:
        raise PlanError(
            f"{name}: no trial has a finite accuracy or loss on validation records, so no point "
            f"can be chosen; {found.folder / 'comparison.html'} shows all trials"
        )
    return [point for _, point in sorted(scores, key=itemgetter(0), reverse=True)]
