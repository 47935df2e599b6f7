"""Terms are public numbers that respect the budget, by an accountant other than ours."""

import dataclasses
import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from fedpact.common.errors import InputError, PlanError
from fedpact.privacy.accounting import shared_noise
from fedpact.privacy.accounting.accountant import Budget, SampledGaussian
from fedpact.privacy.noise import calibrate
from fedpact.privacy.noise import with_noise as given_noise
from fedpact.privacy.terms import Terms

ONE = {"gradient": 1.0}
THREE = {"gradient": 1.0, "loss": 2.5, "below": 10.0}
COMMON = {
    "site": "a",
    "size": 5000.0,
    "clip": 0.1,
    "rate": 0.015,
    "sigmas": THREE,
    "steps": 300,
    "budget": Budget(2.0, 1e-5),
    "accountant": "rdp",
}


def sigma_of(terms):
    """σ_joint of all channels, as the specification has it."""
    return sum(sigma**-2 for sigma in terms.sigmas.values()) ** -0.5


def calibrated(**asked):
    return calibrate(Terms(**asked))


def with_noise(sigma, **asked):
    return given_noise(Terms(**asked), sigma)


def recount(terms, steps, kind):
    """ε after `steps` joint events, by dp_accounting's composition of what the terms describe."""
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    event = dp_accounting.PoissonSampledDpEvent(
        terms.rate, dp_accounting.GaussianDpEvent(sigma_of(terms))
    )
    accountants = {
        "pld": lambda: PLDAccountant(relation),
        "rdp": lambda: RdpAccountant(neighboring_relation=relation),
    }
    return min(
        make().compose(event, steps).get_epsilon(terms.budget.delta)
        for name, make in accountants.items()
        if kind in (name, "best")
    )


@pytest.mark.parametrize(
    ("rate", "steps", "budget", "channels", "accountant"),
    [
        (0.25, 40, Budget(1.0, 1e-6), THREE, "best"),
        (1.0, 10, Budget(4.0, 1e-4), THREE, "rdp"),
    ],
)
def test_calibrated_terms_keep_the_budget_and_spend_it(accountant, channels, rate, steps, budget):
    asked = {"rate": rate, "steps": steps, "budget": budget}
    terms = calibrated(**(COMMON | asked | {"sigmas": channels, "accountant": accountant}))
    assert terms.steps == steps
    # Both are upper bounds, from different grids; calibration stops within 0.02 % of the boundary.
    assert recount(terms, steps, accountant) <= budget.epsilon * (1 + 1e-4)
    assert recount(terms, steps, accountant) >= budget.epsilon * (1 - 1e-2)
    spent = terms.guarantee_after({terms.event: steps}).epsilon
    assert 0.99 * budget.epsilon <= spent <= budget.epsilon


def test_channels_share_the_noise_in_the_stated_ratios():
    terms = calibrated(**COMMON)
    assert terms.sigmas == {
        name: pytest.approx(ratio * terms.sigmas["gradient"], rel=1e-14)
        for name, ratio in THREE.items()
    }
    assert terms.event.q == 0.015
    assert terms.event.sigma == pytest.approx(sigma_of(terms), rel=1e-14)
    # One channel at σ_joint costs the same: the calibration is that of the joint event.
    alone = calibrated(**(COMMON | {"sigmas": ONE}))
    assert terms.event.sigma == pytest.approx(alone.event.sigma, rel=1e-14)
    assert terms.event.sigma >= alone.event.sigma


@pytest.mark.parametrize("spread", [1e-6, 1e-3, 1 / 3, 7.0, 1e6])
def test_rounding_never_lowers_the_joint_noise(spread):
    alone = calibrated(**(COMMON | {"sigmas": ONE})).event.sigma
    for ratio in (spread, spread * math.pi, spread / 7):
        terms = calibrated(**(COMMON | {"sigmas": {"gradient": 1.0, "loss": ratio}}))
        assert alone <= terms.event.sigma <= alone * (1 + 1e-12)


@pytest.mark.parametrize("accountant", ["best", "rdp"])
def test_given_noise_takes_as_many_steps_as_the_budget_allows(accountant):
    asked = COMMON | {"sigma": 1.1, "sigmas": ONE, "accountant": accountant}
    most = with_noise(**(asked | {"steps": 10**6}))
    assert most.sigmas == {"gradient": 1.1}
    assert recount(most, most.steps, accountant) <= 2.0 * (1 + 1e-4)
    # privacy.md: PLD allows 716 steps at (2, 1e-5), RDP by Mironov's looser conversion 314.
    assert most.steps == 716 if accountant == "best" else most.steps > 314
    for steps in (most.steps, most.steps + 1):
        assert with_noise(**(asked | {"steps": steps})).steps == min(steps, most.steps)


def test_given_noise_is_the_gradients():
    terms = with_noise(**COMMON, sigma=2.0)
    assert terms.sigmas == {"gradient": 2.0, "loss": 5.0, "below": 20.0}
    # The paper's pair: σ = 2 with σ_l = 5 on the same batch is σ_joint = 1.857.
    pair = with_noise(**(COMMON | {"sigmas": {"gradient": 1.0, "loss": 2.5}}), sigma=2.0)
    assert pair.event.q == 0.015
    assert pair.event.sigma == pytest.approx(1.857, abs=5e-4)


def test_noise_too_small_for_one_step_is_refused():
    with pytest.raises(PlanError, match=r"privacy.sigma is 0.01: .*ε = 2, δ = 1e-05"):
        with_noise(**COMMON, sigma=0.01)


TERMS = Terms("a", 40.0, 0.3, 0.5, {"gradient": 1.0}, 3, Budget(1.0, 1e-5), "best")


@pytest.mark.parametrize(
    "wrong",
    [{field: value} for field in ("size", "clip", "rate") for value in (0.0, -1.0, math.nan)]
    # A kernel sums with clips of 2^-40 and on, less what roundings may add.
    + [{"clip": c} for c in (1e-40, 2.0**-40, 1e40)]
    + [{"clips": (1.0, c)} for c in (0.0, math.nan, math.inf, 1e-40, 1e40)]
    + [{"size": math.inf}, {"clip": math.inf}, {"rate": 1.01}, {"steps": -1}, {"steps": 1.5}]
    + [{"sigmas": {"gradient": s}} for s in (-1.0, math.nan, math.inf)]
    + [{"sigmas": {}}, {"sigmas": {"gradient": 1.0, "loss": 0.0}}],
)
def test_terms_out_of_range_are_refused(wrong):
    with pytest.raises(InputError, match=rf"{next(iter(wrong))[:4]}.* is .*: expected"):
        dataclasses.replace(TERMS, **wrong)


def test_every_opening_is_reserved_with_the_batches():
    opened = dataclasses.replace(
        TERMS, steps=6, opening_rate=1.0, opening_sigmas={"gradient": 3.0}, openings=2
    )
    batch, opening = SampledGaussian(0.3, 1.0), SampledGaussian(1.0, 3.0)
    assert opened.history(6) == {batch: 6, opening: 2}
    assert opened.history(1) == {batch: 1, opening: 1}
    assert opened.history(1, openings=2) == {batch: 1, opening: 2}
    assert opened.steps_after({batch: 4, opening: 2}) == 2
    assert opened.releases == {"gradient": 1.0, "opening gradient": 3.0}


def test_shared_noise_is_that_of_h_shares_at_a_smaller_delta():
    """h shares of deviation σ have σ √h together; their rounding has a part of δ of its own."""
    shared = dataclasses.replace(TERMS, honest=4)
    assert shared.event == SampledGaussian(0.3, 2.0)
    assert shared.noise_variance == TERMS.noise_variance
    assert shared.delta == 1e-5 - shared_noise.ADDED_DELTA < shared.budget.delta
    # Calibrated, all shares together have the noise that a site needs alone, at that δ.
    asked = COMMON | {"sigmas": ONE}
    alone = calibrated(**asked).sigmas["gradient"]
    share = calibrated(**asked, honest=4).sigmas["gradient"]
    assert share == pytest.approx(alone / 2, rel=1e-3)


def test_terms_without_any_noise_name_no_event():
    for clip in (0.5, math.inf):
        exact = dataclasses.replace(TERMS, sigmas={"gradient": 0.0, "loss": 0.0}, clip=clip)
        with pytest.raises(InputError, match="sigma is 0"):
            _ = exact.event


@pytest.mark.parametrize("none", [{}, {"gradient": 0.0}])
def test_nothing_is_calibrated_without_any_noise(none):
    """Terms without noise describe an exact twin; scaled, they would stay so."""
    for found in (
        lambda: calibrated(**(COMMON | {"sigmas": none})),
        lambda: with_noise(**(COMMON | {"sigmas": none}), sigma=1.0),
    ):
        with pytest.raises(InputError, match="sigma"):
            found()


def test_epsilon_after_part_of_a_run_bounds_a_recount():
    terms = calibrated(**COMMON)
    costs = [terms.guarantee_after({terms.event: t}).epsilon for t in (0, 1, 150, 300)]
    assert costs == sorted(costs)
    assert costs[0] == 0
    assert recount(terms, 150, "rdp") <= costs[2] * (1 + 1e-4)


def test_epsilon_alone_is_that_of_a_sites_own_share():
    terms = calibrated(**COMMON | {"sigmas": ONE}, honest=4)
    for steps in (150, 300):
        found = terms.guarantee_after({terms.event: steps})
        assert found.alone >= recount(terms, steps, "pld") * (1 - 1e-4)
        assert found.alone > found.epsilon
