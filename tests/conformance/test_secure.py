"""Secure aggregation hands each algorithm everybody's mean in place of each reply: for every method
that a plan allows with it that has to give the same next state, and of the others it does not."""

import math
from dataclasses import replace

import pytest
import torch

from fedpact.algorithms import Summed
from fedpact.algorithms.wrappers.integers import weights
from fedpact.common.errors import PlanError
from fedpact.plan import Plan
from fedpact.privacy.oracle import UNIFORM, BatchAround, OracleWrapper
from fedpact.simulation.secure_aggregation.encoding import FixedPointMean

# Means in another order, in float64.
CLOSE = 1e-9


def allowed(tables):
    secure = {"secure_aggregation": {"threshold": 2}, "privacy": {"mode": "none"}}
    try:
        return bool(Plan.parse({**tables, **secure}).method)
    except PlanError:
        return False


def as_means(replies, summed):
    """The replies as `Secured` hands them on, without the encoding and the masks."""
    weighing = FixedPointMean(sum(reply.weight for reply in replies), summed, len(replies))
    weights = torch.tensor([weighing.weight(reply) for reply in replies], dtype=torch.float64)
    shares = weights / weights.sum()
    names, numbers = replies[0].vectors, replies[0].numbers
    vectors = {
        name: sum(p * r.vectors[name].double() for p, r in zip(shares, replies, strict=True))
        for name in names
    }
    means = {
        name: float(sum(p * r.numbers[name] for p, r in zip(shares, replies, strict=True)))
        for name in numbers
        if name not in summed.public
    }
    return [
        replace(reply, vectors=vectors, numbers={**reply.numbers, **means}) for reply in replies
    ]


def distance(one, other):
    """How far two states are apart; infinite where they are not made of the same."""
    if one.vectors.keys() != other.vectors.keys() or one.numbers.keys() != other.numbers.keys():
        return float("inf")
    vectors = [float((v - other.vectors[name]).abs().max()) for name, v in one.vectors.items()]
    numbers = [abs(float(n) - float(other.numbers[name])) for name, n in one.numbers.items()]
    return max([0.0, *vectors, *(n for n in numbers if n == n)])


def apart(case, made):
    """How far the next states are apart in two rounds: replies as they are, and as means.

    Two, so that what sites remember and what the state carries counts as well.
    """
    state, found = case.init(made.w), []
    summed = Summed() if case.facts.summed.why_not else case.facts.summed
    for number in (1, 2):
        replies = list(made.replies(case, state, number))
        begun = made.begin(state, number) if case.facts.controlled else state
        after = case.update(begun, iter(replies))
        found.append(distance(after, case.update(begun, iter(as_means(replies, summed)))))
        state = after
    return max(found)


def test_an_allowed_method_needs_the_mean_alone(case, federation):
    """And one that is refused needs more, in a private run or a plain one, or it is refused for
    nothing."""
    found = [apart(case, federation(private=private)) for private in (True, False)]
    if allowed(case.tables):
        assert max(found) <= CLOSE
    else:
        assert max(found) > 1e-6


class Releases(OracleWrapper):
    """An oracle that keeps the gradients that it has released."""

    def __init__(self, inner, kept):
        super().__init__(inner)
        self._kept = kept

    def batches(self, count, *channels):
        for batch in self._inner.batches(count, *channels):
            yield Release(batch, self._kept)


class Release(BatchAround):
    def __init__(self, inner, kept):
        super().__init__(inner)
        self._kept = kept

    def gradient(self, w, weighting=UNIFORM):
        self._kept.append(self._inner.gradient(w, weighting).clone())
        return self._kept[-1].clone()


def test_declared_sums_of_releases_are_such_sums(case, federation):
    """In the third round, when sites remember something: what was told plus Σ c_t g_t, where with
    the c of `weights` and at most T releases |c| is at least |c| there and Σ |c_t| at most √T
    times it. The width of masked words and their grid rest on it."""
    if not (case.facts.sums_releases and allowed(case.tables)):
        pytest.skip("its replies are not said to be such sums, or it is never masked")
    kept = []
    made = federation(private=True, around=lambda oracle: Releases(oracle, kept))
    state = made.run(case, 2)
    task = made.task(case, state, 3)
    told = weights(case, task)
    for site in made.sites:
        kept.clear()
        local = made.local(case, site, task)
        for name, vector in local.vectors.items():
            away = vector - task.vectors[name] if name in task.vectors else vector
            g = torch.stack(kept, 1)
            c = torch.linalg.lstsq(g, away[:, None], driver="gelsd").solution[:, 0]
            assert float((g @ c - away).abs().max()) <= CLOSE
            length, opened = told[name]
            assert opened == 0
            assert float(c.norm()) >= length * (1 - CLOSE)
            assert float(c.abs().sum()) <= math.sqrt(case.steps()) * length * (1 + CLOSE)
