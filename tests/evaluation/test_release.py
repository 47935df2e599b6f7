"""A release as a deployment makes it: it costs what it was given, and its intervals hold."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from tests.recounted import gaussian_delta
from torch import nn

from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.common.randomness.secure import SecureDraws
from fedpact.common.randomness.seeded import seeded_generator
from fedpact.evaluation.held_out import EvaluationSettings, HeldOut, SumsForm
from fedpact.evaluation.intervals import Sums, estimate_figures, exact_figures
from fedpact.per_sample.kernel import PerSampleKernel

TRIES = 200
# A rate of 95 % is found to be below this once in 10^5, of 200 tries (normal approximation).
LEAST = 0.95 - 4.3 * math.sqrt(0.95 * 0.05 / TRIES)


def once_of(settings, rounds, spare=0):
    found = settings.terms(rounds, spare, "best")
    if found is None:
        raise ValueError("nothing is held out")
    return found


@pytest.mark.parametrize(("unit", "size"), [("record", 60), ("person", 600)])
def test_released_intervals_cover_at_the_stated_level(unit, size):
    """From held-out records to figures, with the noise of a deployment."""
    settings = EvaluationSettings(share=0.2, releases=["hits", "loss", "roc"], loss_bound=2.0)
    form, once = SumsForm(settings, ("no", "yes"), ("a", "b"), unit), once_of(settings, 1)
    x = torch.randn(size, 3, generator=seeded_generator("release"))
    y = (x[:, 0] > 0.3 * x[:, 1]).long()
    persons = torch.arange(size) // 3 if unit == "person" else None
    held = HeldOut(x, y, (x[:, 2] > 0).long(), persons)
    kernel = PerSampleKernel(FlatModel(nn.Linear(3, 2)), cross_entropy)
    sums = held.totals(form, kernel, torch.tensor([0.0, 0, 1, 1, 0, 0, 0, 0]))
    exact = {(f.name, f.about): f.value for f in exact_figures(plain(sums), form)}
    covered, charged, draws = Counter(), Counter(), SecureDraws()

    def charge(event, purpose):
        assert purpose == ("evaluation hits", "evaluation loss", "evaluation roc")
        charged[event] += 1

    noise = dict.fromkeys(sums, once.sigma)
    for _ in range(TRIES):
        released = once.release(charge, lambda: {c: s.clone() for c, s in sums.items()}, draws)
        noisy = Sums.add([plain(released)], noise)
        for figure in estimate_figures(noisy, form):
            key = figure.name, figure.about
            covered[key] += figure.low <= exact[key] <= figure.high
    assert charged == {once.event: TRIES}
    assert covered.keys() == exact.keys()
    for key, count in covered.items():
        assert count / TRIES > LEAST, key


def plain(sums):
    return {channel: total.tolist() for channel, total in sums.items()}


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
@pytest.mark.parametrize(("every", "spare"), [(0, 0), (3, 0), (1, 5)])
def test_all_evaluations_together_cost_what_they_were_given(epsilon, every, spare):
    """By the Gaussian mechanism's own formula (Balle and Wang, 2018), of n times m channels."""
    settings = EvaluationSettings(
        share=0.2, every=every, epsilon=epsilon, delta=1e-6, releases=["hits", "loss"]
    )
    once = once_of(settings, 10, spare)
    times = {0: 1, 3: 4, 1: 10}[every] + spare
    assert sum(once.history.values()) == once.times == times
    mu = math.sqrt(times * 2) / once.sigma
    assert 0.9e-6 < gaussian_delta(mu, epsilon) <= 1e-6


def test_half_the_noise_would_be_detected():
    """The coverage test above can fail: intervals for half the deviation do not hold."""
    rng, covered = np.random.default_rng(5), 0
    settings = EvaluationSettings(share=0.2, releases=["hits"])
    hits = np.array([30.0, 10, 20, 20])
    for _ in range(TRIES):
        noisy = Sums({"hits": hits + 4 * rng.standard_normal(4)}, {"hits": 2.0**2})
        figure = estimate_figures(noisy, SumsForm(settings, ("no", "yes")))[1]
        covered += figure.low <= 50 / 80 <= figure.high
    assert covered / TRIES < LEAST
