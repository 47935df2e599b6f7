"""Random search and successive halving over a plan's keys, with what trying costs.

Random search draws points from ranges and compares them as in a sweep. Successive halving
(Jamieson, Talwalkar, arXiv 1502.07943) gives all points few rounds, keeps the best 1/F of them,
gives these F times as many rounds, and so on up to the plan's rounds. Every rung trains from the
start with noise for its own rounds, so the privacy costs of all runs add up.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedpact.common import check
from fedpact.common.configuration import value_of
from fedpact.common.errors import PlanError
from fedpact.common.randomness.seeded import seeded_generator
from fedpact.plan import Plan
from fedpact.report.run_summary import RunSummary
from fedpact.report.tuning_cost import TuningCost, count_tuning_cost
from fedpact.studies.compare import Compared, compare, private_runs


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
    plans: Mapping[str, Plan], texts: Sequence[str], count: int
) -> list[dict[str, Any]]:
    """Return `count` points within the ranges `KEY=LOW:HIGH`; none without ranges.

    They depend on the first plan's seed only. Raises PlanError, as read_ranges does.
    """
    ranges, seed = read_ranges(texts), next(iter(plans.values())).seed
    return [
        {key: one.draw(seeded_generator(seed, "search", i, key)) for key, one in ranges.items()}
        for i in range(check.count(draws=count) if ranges else 0)
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
    sweep: Mapping[str, Sequence[Any]] | None = None,
    **how: Any,
) -> Compared:
    """Compare every plan at every point; return the last rung's comparison, in out/rung-N.

    halving: F, or 1 for random search, whose only rung is `out`. counted: the last rung states the
    cost of all rungs together. sweep: instead of points. how: passed to compare.compare.
    Raises PlanError: points and a sweep, or halving without points.
    """
    if not points and halving == 1:
        return compare(plans, seeds, out, counted=counted, sweep=sweep, **how)
    if not points or sweep:
        raise PlanError("--halving goes with --draw, and --draw without --sweep")
    best, tried, found = list(points), dict[str, Mapping[int, RunSummary]](), list[Compared]()
    rounds = max(plan.rounds for plan in plans.values())
    steps = rungs(rounds, len(points), halving)
    for number, (length, count) in enumerate(steps, start=1):
        if found:
            best = _best(found[-1], best)[:count]
        of = {
            name: Plan.parse({**plan.document(), "rounds": max(1, plan.rounds * length // rounds)})
            for name, plan in plans.items()
        }
        folder = out if len(steps) == 1 else out / f"rung-{number}"
        found.append(compare(of, seeds, folder, points=best, **how))
        ended = private_runs(found[-1])
        if counted and halving > 1:
            _check_alike(ended.values())
        tried |= {f"{folder.name}/{name}": runs for name, runs in ended.items()}
    if counted and sum(map(len, tried.values())) > 1:
        costs = count_tuning_cost(tried)
        return replace(found[-1], counted=[*map(_of_all, costs)] if halving > 1 else costs)
    return found[-1]


def _of_all(cost: TuningCost) -> TuningCost:
    """Return the cost of halving, without a claim about the winner alone: none is proven."""
    alone = cost.alone and replace(cost.alone, winner={})
    return replace(cost, found=replace(cost.found, winner={}), alone=alone)


def _check_alike(runs: Iterable[Mapping[int, RunSummary]]) -> None:
    """Raise PlanError unless all runs of a rung release the same events.

    Otherwise the total would depend on which points are kept; equal events add up by adaptive
    composition.
    """
    each = [
        {site: (one.rate, one.steps, one.sigmas) for site, one in run.site_privacy.items()}
        for by_seed in runs
        for run in by_seed.values()
    ]
    if any(one != each[0] for one in each):
        raise PlanError(
            "--halving with --counted, and the points release different events: the total cost "
            "would depend on which are kept; draw keys that do not change noise or steps, such as "
            "settings.learning_rate, or leave one of the two options out"
        )


def _best(found: Compared, points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the points, best first: by the mean accuracy, or else loss, of their best plan."""

    def score(point: Mapping[str, Any]) -> float:
        each = [e for e in found.entries if found.points[e.name].values == dict(point)]
        accurate = [s.mean for e in each if (s := e.spread(lambda run: run.accuracy))]
        losses = [s.mean for e in each if (s := e.spread(lambda run: run.loss))]
        known = [x for x in accurate or [-loss for loss in losses] if math.isfinite(x)]
        return max(known, default=-math.inf)

    return sorted(points, key=score, reverse=True)
