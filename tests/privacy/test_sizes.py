"""A site's released size: its noise, its cost, and that nothing but the size follows from it."""

import math
from collections import Counter

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy.stats import chi2, kstest
from tests.policies import ALLOWED

from fedpact.common.errors import InputError, PlanError, PolicyRefused
from fedpact.common.randomness.secure import SecureDraws
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import SampledGaussian
from fedpact.privacy.policy import Policy
from fedpact.privacy.terms import noisy_size

NOISY = {"sizes": "noisy"}


def seeded(seed):
    return SeededDraws(seed, "a", 0)


@pytest.mark.parametrize("draws", [seeded, lambda _: SecureDraws()], ids=["seeded", "secure"])
def test_the_noise_has_the_stated_deviation(draws):
    # Each of the checks fails a right sampler with probability below 1e-6.
    count, rate = 1500, 5e-7
    noise = np.array([noisy_size(1000, 10.0, draws(seed)) - 1000 for seed in range(count)])
    assert abs(noise.mean()) < 5.1 * 10 / math.sqrt(count)
    assert kstest(noise, "norm", args=(0, 10)).pvalue > 1e-6

    def accepts(sigma):
        square = float((noise**2).sum()) / sigma**2
        return chi2.ppf(rate, count) < square < chi2.isf(rate, count)

    assert accepts(10)
    assert not accepts(8)
    assert not accepts(12)


def test_one_record_moves_the_size_by_one_with_minimum_one():
    for seed in range(50):
        released = noisy_size(500, 7.0, seeded(seed))
        assert noisy_size(501, 7.0, seeded(seed)) - released == 1
        assert released == noisy_size(500, 7.0, seeded(seed))
        assert released * 2**10 == int(released * 2**10)
        assert noisy_size(0, 100.0, seeded(seed)) >= 1
    assert any(noisy_size(0, 100.0, seeded(seed)) == 1 for seed in range(50))
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="noise is"):
            noisy_size(5, wrong, seeded(0))


def recount(terms, steps):
    """ε of the size and the steps, by dp-accounting."""
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_accounting.GaussianDpEvent(terms.size_noise))
    training = dp_accounting.GaussianDpEvent(terms.event.sigma)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(terms.rate, training), steps)
    return accountant.get_epsilon(terms.budget.delta)


def test_size_and_training_together_spend_the_budget():
    plan = Plan.parse({"rounds": 20, "privacy": {"sizes": "noisy", "size_noise": 3.0}})
    (terms,) = plan.terms({"a": 100.0}).values()
    # Calibration stops within 0.02 % of the boundary; both sides are discretised upper bounds.
    assert 2 * (1 - 1e-2) < recount(terms, 20) <= 2 * (1 + 1e-4)
    assert terms.guarantee_after(terms.history(20)).epsilon <= 2
    (declared,) = Plan.parse({"rounds": 20}).terms({"a": 100.0}).values()
    assert terms.event.sigma > declared.event.sigma


def test_with_given_noise_the_size_takes_steps_away():
    asked = {"rounds": 10**5, "sampling_rate": 0.1, "privacy": {"sigma": 3.0, "accountant": "rdp"}}
    (declared,) = Plan.parse(asked).terms({"a": 1.0}).values()
    asked["privacy"] |= {**NOISY, "size_noise": 4.0}
    (terms,) = Plan.parse(asked).terms({"a": 1.0}).values()
    assert terms.steps < declared.steps
    assert recount(terms, terms.steps) <= 2 * (1 + 1e-4)
    assert terms.guarantee_after(terms.history(terms.steps + 1)).epsilon > 2


def test_nothing_that_is_accounted_for_follows_from_the_size():
    plan = Plan.parse({"privacy": NOISY})
    terms = [plan.terms({"a": size})["a"] for size in (1.0, 37.5, 1e6)]
    public = [(t.rate, t.sigmas, t.steps, t.history(t.steps)) for t in terms]
    assert public[0] == public[1] == public[2]
    with pytest.raises(PlanError, match=r"batch_size = 30.*depend on a release.*sampling_rate"):
        Plan.parse({"batch_size": 30, "privacy": NOISY})


def test_a_size_like_the_training_events_is_one_more_of_them():
    asked = {"sampling_rate": 1.0, "privacy": {"sigma": 10.0, "epsilon": 4.0} | NOISY}
    (terms,) = Plan.parse(asked | {"rounds": 3}).terms({"a": 9.0}).values()
    assert terms.history(3) == Counter({SampledGaussian(1.0, 10.0): 4})


def test_a_size_that_takes_the_whole_budget_is_refused():
    for sigma in ({}, {"sigma": 5.0}):
        asked = Plan.parse({"privacy": {"size_noise": 0.5} | NOISY | sigma})
        with pytest.raises(PlanError, match=r"size_noise is 0\.5.*alone costs ε = .*δ = 1e-05"):
            asked.terms({"a": 100.0})


def test_a_policy_has_to_allow_it():
    allowed = ALLOWED | {"releases": ["gradient", "size"]}
    terms = Plan.parse({"privacy": NOISY}).terms({"a": 100.0})["a"]
    Policy.parse(allowed).check_run("fedavg", terms, (0.0, 0.0))
    for change, told in (
        ({"releases": ["gradient"]}, "releases size are not allowed"),
        ({"smallest_sigma": 10.5}, "smallest_sigma"),
    ):
        with pytest.raises(PolicyRefused, match=told):
            Policy.parse(allowed | change).check_run("fedavg", terms, (0.0, 0.0))


def test_a_plain_run_has_exact_sizes():
    plan = Plan.parse({"privacy": {"mode": "none"} | NOISY})
    assert not plan.noisy_sizes
