"""The accountants: the specification's values, order relations, refusals and cheap reports."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedpact.common.errors import InputError
from fedpact.privacy.accounting import accountant as accounting
from fedpact.privacy.accounting.accountant import (
    Budget,
    SampledGaussian,
    epsilon,
    joint,
    max_steps,
    round_rate_up,
)

ALI = SampledGaussian(0.015, 1.1)
FEDFDP = SampledGaussian(0.05, 2.0)
NAN = math.nan


def test_ali_dpfl_budgets_by_rdp_as_in_the_paper():
    precise = {79: 1.5504, 177: 1.7551, 317: 2.0050, 598: 2.5024, 1123: 3.2554}
    for steps, expected in precise.items():
        found = epsilon({ALI: steps}, 1e-5, "rdp", "mironov")
        assert found == pytest.approx(expected, abs=6e-5)
    others = {122: 1.65, 231: 1.85, 457: 2.25, 775: 2.75, 1585: 3.75}
    for steps, printed in others.items():
        found = epsilon({ALI: steps}, 1e-5, "rdp", "mironov")
        assert found == pytest.approx(printed, abs=0.06)


@pytest.mark.parametrize(("target", "by_rdp", "by_pld"), [(1.55, 78, 422), (3.75, 1537, 2408)])
def test_largest_step_counts_of_both_accountants(target, by_rdp, by_pld):
    budget = Budget(target, 1e-5)
    assert max_steps(ALI, budget, "rdp", "mironov") == by_rdp
    assert max_steps(ALI, budget, "pld") == pytest.approx(by_pld, rel=0.01)


def test_fedfdp_values():
    assert epsilon({FEDFDP: 600}, 1e-5, "rdp", "mironov") == pytest.approx(3.5176, abs=6e-5)
    assert epsilon({FEDFDP: 778}, 1e-5, "rdp", "balle") == pytest.approx(3.52, abs=0.015)
    both = joint(0.05, [2.0, 5.0])
    assert both.sigma == pytest.approx(1.857, abs=5e-4)
    assert epsilon({both: 600}, 1e-5, "rdp", "mironov") == pytest.approx(3.86, abs=5e-3)
    assert epsilon({both: 600}, 1e-5, "rdp", "balle") == pytest.approx(3.38, abs=0.015)
    assert epsilon({both: 600}, 1e-5, "pld") == pytest.approx(3.09, abs=5e-3)


def test_full_batch_channels_equal_their_composition():
    # At q = 1 sharing a batch changes nothing: joint() must agree with composing the channels.
    together = {joint(1.0, [2.0, 5.0, 9.0]): 3}
    apart = {SampledGaussian(1.0, s): 3 for s in (2.0, 5.0, 9.0)}
    for accountant in ("pld", "rdp"):
        assert epsilon(together, 1e-5, accountant) == pytest.approx(
            epsilon(apart, 1e-5, accountant)
        )


def test_adding_amplified_channels_bounds_no_joint_release():
    # Two channels on one batch against two batches: the joint event costs more.
    same_batch = epsilon({joint(0.01, [1.0, 1.0]): 100}, 1e-5)
    two_batches = epsilon({SampledGaussian(0.01, 1.0): 200}, 1e-5)
    assert same_batch > 1.1 * two_batches


def test_an_empty_history_costs_nothing():
    assert epsilon({}, 1e-5) == 0.0
    assert epsilon({ALI: 0}, 1e-5, "pld") == 0.0


def test_best_is_the_smaller_bound():
    for history in ({FEDFDP: 50, ALI: 10}, {SampledGaussian(1e-6, 1.0): 10**6}):
        each = [epsilon(history, 1e-6, a) for a in ("pld", "rdp")]
        assert epsilon(history, 1e-6) == min(each)


@settings(max_examples=4, deadline=None)
@given(
    q=st.floats(1e-3, 0.95),
    sigma=st.floats(0.4, 30.0),
    steps=st.integers(1, 3000),
    delta=st.sampled_from([1e-9, 1e-5, 1e-2]),
    accountant=st.sampled_from(["pld", "rdp", "best"]),
)
def test_epsilon_is_monotone_in_steps_rate_delta_and_sigma(q, sigma, steps, delta, accountant):
    def cost(q=q, sigma=sigma, steps=steps, delta=delta):
        return epsilon({SampledGaussian(q, sigma): steps}, delta, accountant)

    base = cost()
    higher = [cost(steps=math.ceil(steps * 1.03)), cost(q=q * 1.03)]
    lower = [cost(sigma=sigma * 1.03), cost(delta=delta * 1.5)]
    if accountant == "pld":
        # Far beyond any use (ε in the hundreds) no grid fits and the answer is inf: a bound, but
        # one without an order.
        assume(base < 100 or math.inf not in (base, *higher, *lower))
    assert base >= 0
    assert min(higher) >= base
    assert max(lower) <= base


def test_order_and_absent_events_do_not_matter():
    a, b = SampledGaussian(0.02, 1.0), SampledGaussian(0.3, 5.0)
    first = epsilon({a: 30, b: 7, ALI: 0}, 1e-5)
    accounting._epsilon.cache_clear()
    assert first == epsilon({b: 7, a: 30}, 1e-5)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_extremes_give_a_bound_or_inf_but_never_nan(accountant):
    for q in (1e-12, 1 - 1e-12, 1.0):
        for sigma in (1e-9, 1.0, 1e9):
            for delta in (1e-300, 0.999999):
                value = epsilon({SampledGaussian(q, sigma): 3}, delta, accountant)
                assert value >= 0, (q, sigma, delta)
    assert math.isfinite(epsilon({ALI: 100}, 1e-30))
    # Below what a grid resolves, too, and then tighter than RDP.
    assert epsilon({ALI: 100}, 1e-30, "pld") < epsilon({ALI: 100}, 1e-30, "rdp")


@pytest.mark.parametrize("accountant", ["pld", "rdp", "best"])
@pytest.mark.parametrize("epsilon_target", [0.3, 7.5])
def test_max_steps_is_exact_at_the_boundary(accountant, epsilon_target):
    event, budget = SampledGaussian(0.03, 1.3), Budget(epsilon_target, 1e-6)
    steps = max_steps(event, budget, accountant)
    assert epsilon({event: steps}, 1e-6, accountant) <= epsilon_target
    assert epsilon({event: steps + 1}, 1e-6, accountant) > epsilon_target


def test_max_steps_counts_spent_events():
    budget = Budget(2.0, 1e-5)
    left = max_steps(ALI, budget, spent={FEDFDP: 50})
    assert (
        epsilon({FEDFDP: 50, ALI: left}, 1e-5) <= 2.0 < epsilon({FEDFDP: 50, ALI: left + 1}, 1e-5)
    )
    assert max_steps(ALI, budget, spent={ALI: 16}) == max_steps(ALI, budget) - 16
    assert max_steps(ALI, budget, spent={SampledGaussian(1.0, 1.0): 1}) == 0
    assert max_steps(SampledGaussian(1.0, 0.05), budget) == 0


@given(st.floats(1e-6, 1.0))
def test_rates_are_rounded_up_to_a_coarse_grid(q):
    up = round_rate_up(q)
    assert q <= up <= 1
    assert up <= q * 2 ** (1 / 8) * (1 + 1e-9)
    assert round_rate_up(up) == up


def test_a_thousand_sizes_share_few_rates():
    assert len({round_rate_up(32 / n) for n in range(37, 1351)}) <= 43


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SampledGaussian(NAN, 1.0),
        lambda: SampledGaussian(0.0, 1.0),
        lambda: SampledGaussian(1.1, 1.0),
        lambda: SampledGaussian(0.5, NAN),
        lambda: SampledGaussian(0.5, 0.0),
        lambda: SampledGaussian(0.5, math.inf),
        lambda: Budget(NAN, 1e-5),
        lambda: Budget(0.0, 1e-5),
        lambda: Budget(1.0, NAN),
        lambda: Budget(1.0, 0.0),
        lambda: Budget(1.0, 1.0),
        lambda: joint(0.5, []),
        lambda: joint(0.5, [1.0, NAN]),
        lambda: epsilon({ALI: 1}, NAN),
        lambda: epsilon({ALI: 1}, 0.0),
        lambda: epsilon({ALI: -1}, 1e-5),
        lambda: epsilon({ALI: NAN}, 1e-5),
        lambda: epsilon({ALI: 1.5}, 1e-5),
        lambda: epsilon({ALI: 1}, 1e-5, "gdp"),
        lambda: epsilon({ALI: 1}, 1e-5, "rdp", "classic"),
        lambda: round_rate_up(NAN),
        lambda: round_rate_up(0.0),
    ],
)
def test_invalid_input_is_refused(wrong):
    with pytest.raises(InputError):
        wrong()
