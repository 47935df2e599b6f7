"""Sums over all records, once: what they cost, when they are charged, and their noise."""

import math

import pytest
import torch
from tests.recounted import gaussian_delta

from fedpact.common.errors import InputError
from fedpact.common.randomness.secure import SecureDraws
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.privacy.accounting.accountant import Budget, SampledGaussian
from fedpact.privacy.terms import FullDataRelease

BOUNDS = {"hits": 1.0, "loss": 3.0, "roc": 1.0}


def free(*_):
    """Charge nothing."""


@pytest.mark.parametrize("times", [1, 7])
@pytest.mark.parametrize("budget", [Budget(0.5, 1e-5), Budget(2.0, 1e-6)])
def test_it_costs_the_given_budget(times, budget):
    """By the closed form: m channels with σ and n releases are one Gaussian with μ = √(mn) / σ."""
    found = FullDataRelease.within("evaluation", BOUNDS, times, budget)
    mu = math.sqrt(3 * times) / found.sigma
    assert gaussian_delta(mu, budget.epsilon) <= budget.delta
    assert gaussian_delta(1.01 * mu, budget.epsilon) > budget.delta
    assert found.history == {found.event: times}
    assert found.event.q == 1.0


def test_it_is_charged_before_a_record_is_read():
    order = []

    def sums():
        order.append("read")
        return {"hits": torch.zeros(2, dtype=torch.float64)}

    def charge(event, purpose):
        order.append((event, purpose))

    once = FullDataRelease("evaluation", {"hits": 1.0}, 5.0, 1, Budget(1.0, 1e-5))
    once.release(charge, sums, SeededDraws(0))
    assert order == [(SampledGaussian(1.0, 5.0), ("evaluation hits",)), "read"]

    def refuse(*_):
        raise InputError("no")

    with pytest.raises(InputError):
        once.release(refuse, sums, SeededDraws(0))
    assert order[2:] == []


@pytest.mark.parametrize("draws", [SeededDraws(3), SecureDraws()])
def test_each_channel_has_its_own_noise_and_unit(draws):
    """Of 40,000 numbers the deviation is within 1.5 %: outside once in 10^5 runs (χ²)."""
    once = FullDataRelease("evaluation", {"a": 1.0, "b": 3.0}, 2.0, 1, Budget(1.0, 1e-5))
    zeros = {name: torch.zeros(40_000, dtype=torch.float64) for name in once.bounds}
    found = once.release(free, lambda: zeros, draws)
    assert found["a"].std() == pytest.approx(2.0, rel=0.016)
    assert found["b"].std() == pytest.approx(6.0, rel=0.016)
    # Independent: 4.4 deviations of a correlation of 40,000 pairs, once in 10^5 runs.
    assert abs(float(torch.corrcoef(torch.stack([found["a"], found["b"]]))[0, 1])) < 0.022


@pytest.mark.parametrize("wrong", [{"sigma": 0.0}, {"sigma": math.nan}, {"times": 0}])
def test_invalid_terms_are_refused(wrong):
    fields = {"name": "evaluation", "bounds": BOUNDS, "sigma": 1.0, "times": 1}
    with pytest.raises(InputError):
        FullDataRelease(**{**fields, "budget": Budget(1.0, 1e-5), **wrong})  # pyright: ignore[reportArgumentType]
    for bounds in ({}, {"hits": math.nan}):
        with pytest.raises(InputError):
            FullDataRelease("evaluation", bounds, 1.0, 1, Budget(1.0, 1e-5))
