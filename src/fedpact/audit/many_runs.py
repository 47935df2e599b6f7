"""The audit from many short runs: are the site's releases those with one more record, or without?

The attacker is the one that (ε, δ) speaks of. It knows all other records, chooses them and the
model, and puts the questions that the algorithm puts. Each run asks the oracle `events` times.
Pilot runs choose the attack, its weights and its thresholds; the runs that count are others, so
Clopper and Pearson's bounds hold.

A statistic of a release:   <release, u>, u the canary's own direction    its contribution
                            log ‖release‖                                what scales with the batch
                            the number itself, where it is one           loss, count

ε is bounded from below at the plan's δ and at larger ones: a mechanism that is (ε(δ), δ)-private by
its accountant is so for every δ, and wrong noise shows at a large δ with the fewest runs.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor

from fedpact.audit.bounds import Counts, many_runs_epsilon, many_runs_power
from fedpact.audit.noise_level import NoiseLevel, Tested, noise_alone, noise_levels, noise_tests
from fedpact.audit.sampling import sampling_tests
from fedpact.audit.target import Target, draw_mislabelled, simulate_rounds
from fedpact.check import count
from fedpact.draws.seeded import SeededDraws, seeded_generator
from fedpact.errors import InputError
from fedpact.losses import cross_entropy
from fedpact.persample.kernel import PlainKernel
from fedpact.persample.weighting import UNIFORM, Fair
from fedpact.privacy.oracle import Records

_CHANNELS = ("gradient", "loss", "below")
_DELTAS = (0.05, 0.1)
_PILOT = 100
_RUNS = 500
_EVENTS = 40
# Of C: so long a canary's gradient is before it is clipped, if its record can be made so.
_LENGTH = 10.0
_SCALES = (1.0, 10.0, 100.0, 1000.0)


@dataclass(frozen=True)
class LowerBound:
    """ε at one δ: the lower bound, what the accountant states, and the counts it comes from.

    power: the bound that the best attack would show, by the expected counts, were all as claimed.
    """

    delta: float
    epsilon: float
    claimed: float
    counts: Counts
    power: float

    @property
    def passed(self) -> bool:
        """Whether the claim stands."""
        return self.epsilon <= self.claimed


@dataclass(frozen=True)
class ManyRuns:
    """What the runs show: `events` joint events each, by the attack that the pilot chose."""

    attack: str
    events: int
    bounds: tuple[LowerBound, ...]
    noise: tuple[NoiseLevel, ...]
    tests: tuple[Tested, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every claim stands."""
        return all(part.passed for part in (*self.bounds, *self.noise, *self.tests))


@dataclass(frozen=True)
class Attack:
    """Records to hide one more in, and what to ask. query, direction: by channel."""

    name: str
    records: Records
    canary: Records
    queries: dict[str, tuple[Any, ...]]
    directions: dict[str, Tensor]

    def play(self, target: Target, present: bool, events: int, key: tuple[str | int, ...]) -> Any:
        """Return one run's statistics, means over its events."""
        records = self.records
        if present:
            # Anywhere among the others: a batch of always the first records has it or has it not.
            generator = seeded_generator(target.plan.seed, "audit", self.name, "place", *key)
            at = int(torch.randint(len(records.y) + 1, (), generator=generator))
            k = target.canary_records
            x, y = (part.repeat_interleave(k, 0) for part in (self.canary.x, self.canary.y))
            records = records.join(x, y, at, together=True)
        draws = SeededDraws(target.plan.seed, "audit", self.name, present, *key)
        oracle, rows = target.oracle(records, draws), list[list[float]]()
        for batch in oracle.batches(events, *self.queries):
            row = list[float]()
            for channel, query in self.queries.items():
                answer = torch.as_tensor(getattr(batch, channel)(*query)).reshape(-1).double()
                row.append(float(answer @ self.directions[channel]))
                if len(answer) > 1:
                    row.append(math.log(max(float(answer.norm()), 1e-300)))
            rows.append(row)
        return np.mean(rows, axis=0)


def attackable(target: Target) -> bool:
    """Whether many_runs knows all that the site's batches release."""
    return not target.terms.openings and set(target.terms.sigmas) <= set(_CHANNELS)


def many_runs(
    target: Target, runs: int = _RUNS, confidence: float = 0.95, events: int = _EVENTS
) -> ManyRuns:
    """Audit with `runs` runs with the canary and as many without, of at most `events` events.

    Where the clip follows the round, all events are the last round's: multipliers do not change.
    """
    count(runs=runs)
    if not attackable(target):
        raise InputError(
            f"algorithm {target.plan.algorithm!r} releases {', '.join(target.terms.releases)}: the "
            f"many-runs attack knows {', '.join(_CHANNELS)} of batches that are all alike; audit "
            "it with --method one-run or membership"
        )
    target = target.at(target.rounds)
    events = min(events, target.terms.steps)
    pilots = [(attack, _Rule.learn(target, attack, events)) for attack in attacks(target)]
    attack, rule = max(pilots, key=lambda pilot: pilot[1].separation)
    with_it, without = (
        np.array([rule.score(attack.play(target, p, events, ("run", r))) for r in range(runs)])
        for p in (True, False)
    )
    deltas = (target.terms.budget.delta, *_DELTAS)
    each = 1 - (1 - confidence) / len(deltas)
    bounds = list[LowerBound]()
    for delta in deltas:
        at = rule.threshold(runs, delta, each)
        counts = Counts(int((with_it > at).sum()), runs, int((without > at).sum()), runs)
        found = many_runs_epsilon(counts, delta, each)
        claimed = target.claimed(events, delta)
        power = many_runs_power(claimed, delta, runs, each)
        bounds.append(LowerBound(delta, found, claimed, counts, power))
    alone = noise_alone(target, attack.queries)
    noise = noise_levels(target, attack.queries, alone)
    tests = (*noise_tests(target, attack.queries, alone), *sampling_tests(target, attack.queries))
    return ManyRuns(attack.name, events, tuple(bounds), noise, tests)


@dataclass(frozen=True)
class _Rule:
    """How to score a run, from pilot runs: weights, and mean and deviation with and without."""

    weights: Any
    mean_with: float
    mean_without: float
    deviation_with: float
    deviation_without: float

    @staticmethod
    def learn(target: Target, attack: Attack, events: int) -> "_Rule":
        with_it, without = (
            np.array([attack.play(target, p, events, ("pilot", r)) for r in range(_PILOT)])
            for p in (True, False)
        )
        apart = with_it.mean(0) - without.mean(0)
        spread = with_it.var(0) + without.var(0)
        # What may differ by chance alone is left out, as it would only add noise. The first, the
        # canary's own direction, is what should differ.
        clear = apart**2 > 16 * spread / _PILOT
        weights = np.where(clear, apart / (spread + 1e-300), 0.0)
        if not clear.any():
            weights[0] = 1.0
        a, b = with_it @ weights, without @ weights
        return _Rule(weights, a.mean(), b.mean(), a.std() + 1e-12, b.std() + 1e-12)

    @property
    def separation(self) -> float:
        """How many standard deviations lie between the two kinds of runs."""
        apart = self.mean_with - self.mean_without
        return apart / math.hypot(self.deviation_with, self.deviation_without)

    def score(self, statistics: Any) -> float:
        """Return a number that is larger with the canary."""
        return float(statistics @ self.weights)

    def threshold(self, runs: int, delta: float, confidence: float) -> float:
        """Return the score above which the bound should be largest, were the scores normal."""
        low = min(self.mean_without, self.mean_with) - 2 * self.deviation_without
        high = max(self.mean_without, self.mean_with) + 4 * self.deviation_without

        def expected(at: float) -> float:
            p1 = float(ndtr((self.mean_with - at) / self.deviation_with))
            p0 = float(ndtr((self.mean_without - at) / self.deviation_without))
            counts = Counts(round(p1 * runs), runs, round(p0 * runs), runs)
            # Where no bound is to be had, the place where the two differ most.
            return many_runs_epsilon(counts, delta, confidence) or p1 - p0 - 1

        return max(np.linspace(low, high, 61).tolist(), key=expected)


def attacks(target: Target) -> list[Attack]:
    """Return the attacks to try: the canary among all the site's records, and beside one alone."""
    *_, asked = simulate_rounds(target, target.records, min(2, target.rounds), "questions")
    first = [a for a in asked if a.batch == asked[0].batch]
    alone = None if target.records.persons is None else torch.zeros(1, dtype=torch.int64)
    one = Records(target.records.x[:1], target.records.y[:1], persons=alone)
    queries = {a.channel: a.query for a in first}
    canary, directions = _canary(target, queries)
    return [
        Attack("all records", target.records, canary, queries, directions),
        Attack("one record", one, canary, queries, directions),
    ]


def _canary(
    target: Target, queries: dict[str, tuple[Any, ...]]
) -> tuple[Records, dict[str, Tensor]]:
    """A crafted record with a long gradient, and its unit direction by channel."""
    w = next(q for query in queries.values() for q in query if isinstance(q, Tensor))
    canary = _worst_record(target, w)
    directions = dict[str, Tensor]()
    for channel, query in queries.items():
        # A weight of 0 has no direction: the unweighted one is as good.
        plain = tuple(UNIFORM if isinstance(q, Fair) else q for q in query)
        answer = target.answer(canary, channel, plain).double()
        directions[channel] = answer / answer.norm() if len(answer) > 1 else torch.ones_like(answer)
    return canary, directions


def _worst_record(target: Target, w: Tensor) -> Records:
    """The site's first record turned over and scaled up until its gradient is far longer than C.

    With its own label it pulls against the record itself, where that leaves it a gradient, and else
    with the label that the model thinks least likely. Tokens cannot be scaled: mislabelled as is.
    """
    if not target.records.x.is_floating_point():
        return draw_mislabelled(target, 1)
    x, y, model = target.records.x[:1], target.records.y[:1], target.kernel.model
    model.load(w)
    found = list[tuple[float, Records]]()
    for scale in _SCALES:
        with torch.no_grad():
            least = model.module(-scale * x).view(-1, target.classes).mean(0, True).argmin(1)
        for label in (y, least):
            made = Records(-scale * x, label)
            length = float(PlainKernel(model, cross_entropy).weighted_sum(made.x, made.y).norm())
            if length >= _LENGTH * target.terms.clip:
                return made
            found.append((length, made))
    return max(found, key=lambda pair: pair[0])[1]
