"""Tests of noise and sampling: each break is found on five seeds of five, the right one passes.

Draws are seeded, so nothing here fails by chance; with other seeds the right mechanism fails in
0.1 % for the noise's level, 0.1 % for its tests and 0.1 % for the sampling's.
"""

import dataclasses
import math

import pytest
import torch
from scipy import stats
from tests.studies.audit.conftest import scaled_noise

from fedpact.common.randomness.seeded import round_shares, seeded_generator
from fedpact.studies.audit.noise import (
    noise_levels,
    noise_over,
    noise_tests,
    queries_of,
    sampling_tests,
)
from fedpact.studies.audit.one_run import curve_p_value, make_loss_bound, refutes
from fedpact.studies.audit.target import private_oracle

# All five with -m slow.
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]


class Draws:
    """Right draws, of which a test changes one kind."""

    repeats = True

    def __init__(self, inner):
        self.inner = inner

    def batch(self, records, rate, step):
        return self.inner.batch(records, rate, step)

    def gaussian(self, size, like, step, purpose):
        return self.inner.gaussian(size, like, step, purpose)

    def add_noise(self, total, sigma, sensitivity, step, purpose):
        return total + sigma * sensitivity * self.gaussian(len(total), total, step, purpose)

    def share(self, total, unit, units, step, purpose):
        noise = self.gaussian(len(total), total, step, purpose).double()
        return round_shares(total, unit, units, noise).long()


class SameAtEveryStep(Draws):
    def gaussian(self, size, like, step, purpose):
        return self.inner.gaussian(size, like, 0, purpose)


class SameInEveryRequest(Draws):
    def gaussian(self, size, like, step, purpose):
        return torch.randn(
            size, generator=seeded_generator("fixed", step, purpose), dtype=like.dtype
        )


class SameAsTheStepBefore(Draws):
    def gaussian(self, size, like, step, purpose):
        return self.inner.gaussian(size, like, step // 2, purpose)


class EverySecondStepWithout(Draws):
    def gaussian(self, size, like, step, purpose):
        return super().gaussian(size, like, step, purpose) * (step % 2)


class Uniform(Draws):
    def gaussian(self, size, like, step, purpose):
        u = torch.special.ndtr(super().gaussian(size, like, step, purpose).double())
        return ((2 * u - 1) * math.sqrt(3)).to(like.dtype)


class OneCoordinateWithout(Draws):
    def gaussian(self, size, like, step, purpose):
        made = super().gaussian(size, like, step, purpose)
        made[size // 2] = 0
        return made


class FirstRecords(Draws):
    def batch(self, records, rate, step):
        return torch.arange(round(rate * records))


class FixedSize(Draws):
    def batch(self, records, rate, step):
        generator = seeded_generator("fixed size", *self.inner._key, step)
        return torch.randperm(records, generator=generator)[: round(rate * records)].sort().values


class Epochs(Draws):
    """Without replacement: a new order once all records were in a batch."""

    def batch(self, records, rate, step):
        size = max(1, round(rate * records))
        epoch, place = divmod(step, records // size)
        order = torch.randperm(
            records, generator=seeded_generator("epoch", *self.inner._key, epoch)
        )
        return order[place * size : (place + 1) * size].sort().values


class DoubledRate(Draws):
    def batch(self, records, rate, step):
        return self.inner.batch(records, min(1.0, 2 * rate), step)


class WholeSet(Draws):
    def batch(self, records, rate, step):
        return torch.arange(records)


class SameBatch(Draws):
    def batch(self, records, rate, step):
        return self.inner.batch(records, rate, 0)


def by_draws(kind):
    return lambda r, k, t, d: private_oracle(r, k, t, kind(d))


def quiet_with_records(records, kernel, terms, draws):
    return scaled_noise(0.7 if len(records.y) else 1.0)(records, kernel, terms, draws)


def slow(*kinds):
    return [pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


NOISE = [SameAsTheStepBefore, Uniform, OneCoordinateWithout]
NOISE += slow(SameAtEveryStep, SameInEveryRequest, EverySecondStepWithout)
SAMPLING = [FixedSize, DoubledRate, *slow(FirstRecords, Epochs, WholeSet, SameBatch)]


@pytest.fixture(scope="module")
def target(audited):
    return audited.target("sampling_rate=0.25")


@pytest.fixture(scope="module")
def queries(target):
    return queries_of(target)


def noise_checks(target, queries):
    alone = noise_over(target, queries, target.no_records)
    return [*noise_levels(target, alone), *noise_tests(target, queries, alone)]


def seeded(target, seed, make=private_oracle):
    plan = target.plan.model_copy(update={"seed": seed})
    return dataclasses.replace(target, plan=plan, make=make)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_right_mechanism_passes(seed, target, queries):
    one = seeded(target, seed)
    found = [*noise_checks(one, queries), *sampling_tests(one, queries)]
    assert len(found) > 20
    assert not [test for test in found if not test.passed]


@pytest.mark.slow
def test_right_noise_on_a_grid_is_normal_as_often_as_is_said(target, queries):
    """Of 6 p-values 4 or more are below 0.05 with probability 9e-5; as it was, most were."""
    assert target.terms.units
    small = [
        test.bound
        for seed in range(100, 106)
        for test in noise_checks(seeded(target, seed), queries)[1:]
        if "it is normal" in test.found
    ]
    for one in (small[0::2], small[1::2]):
        assert len(one) == 6
        assert sum(p < 0.05 for p in one) < 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("sampling_rate=0.05", "rounds=30"),
        ("algorithm=fedfdp", "settings.fairness_weight=0.6", "sampling_rate=0.5"),
    ],
)
def test_correct_mechanism_passes_at_other_rates_and_weights(overrides, audited):
    other = audited.target(*overrides)
    asked = queries_of(other)
    found = [*noise_checks(other, asked), *sampling_tests(other, asked)]
    assert not [test for test in found if not test.passed]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", NOISE)
def test_wrong_noise_is_found(kind, seed, target, queries):
    broken = seeded(target, seed, by_draws(kind))
    assert not all(test.passed for test in noise_checks(broken, queries))


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_that_depends_on_the_records_is_found(seed, target, queries):
    broken = seeded(target, seed, quiet_with_records)
    alone = noise_over(broken, queries, broken.no_records)
    assert not all(test.passed for test in noise_tests(broken, queries, alone))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", SAMPLING)
def test_wrong_batches_are_found(kind, seed, target, queries):
    found = sampling_tests(seeded(target, seed, by_draws(kind)), queries)
    assert not all(test.passed for test in found), found


def test_sampling_is_tested_under_a_large_clip_too(audited):
    """No record's gradient is near the clip: the sums are smaller, and so is the noise on them."""
    large = audited.target("sampling_rate=0.25", "privacy.clip=100.0")
    asked = queries_of(large)
    right, wrong = (
        sampling_tests(one, asked) for one in (large, seeded(large, 0, by_draws(FirstRecords)))
    )
    assert len(right) > 5
    assert all(test.passed for test in right), right
    assert not all(test.passed for test in wrong), wrong


@pytest.mark.parametrize("seed", SEEDS)
def test_halved_noise_is_found(seed, audited, target, queries):
    broken = seeded(target, seed, audited.broken["noise halved"])
    assert not all(
        level.passed
        for level in noise_levels(broken, noise_over(broken, queries, broken.no_records))
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mistake", ["clip not applied", "realised batch size"])
def test_the_sum_of_a_batch_is_tested_too(seed, mistake, audited, target, queries):
    found = sampling_tests(seeded(target, seed, audited.broken[mistake]), queries)
    assert not all(test.passed for test in found), found


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
@pytest.mark.parametrize(("canaries", "guesses"), [(200, 200), (400, 80)])
def test_a_true_curve_is_refuted_as_often_as_allowed(epsilon, canaries, guesses):
    """Randomised response at (ε, 0) guesses right with e^ε/(1 + e^ε): the error, summed exactly."""
    lost = make_loss_bound([(epsilon, 0.0)])
    law = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
    least = next((v for v in range(guesses + 1) if refutes(lost, canaries, guesses, v, 0.05)), None)
    if least is not None:
        assert law.sf(least - 1) <= 0.05


def test_a_wrong_curve_is_refuted_and_says_more_than_one_point():
    # 1,000 canaries, a Gaussian with μ = 1: the surest 20 % are right at 90 %.
    right = [(1.0, 0.0)]
    assert curve_p_value(make_loss_bound(right), 1000, 200, 180) < 0.01
    assert curve_p_value(make_loss_bound([(6.0, 0.0)]), 1000, 200, 180) > 0.5
    assert curve_p_value(make_loss_bound([(math.inf, 0.5)]), 100, 100, 100) == 1.0
