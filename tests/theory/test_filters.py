"""The Rényi filter: what it admits, what it never admits, and that the share of δ is needed."""

import math
import random

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedpact.errors import BudgetExhausted, InputError
from fedpact.theory import rdp
from fedpact.theory.accounting import Budget, SampledGaussian, epsilon, max_steps
from fedpact.theory.filters import RenyiFilter, default_orders, order_for

BUDGET = Budget(2.0, 1e-5)
ALI = SampledGaussian(0.015, 1.1)


def fill(site: RenyiFilter, event: SampledGaussian) -> int:
    count = 0
    while site.admits(event):
        site.charge(event)
        count += 1
    return count


@pytest.mark.parametrize(
    "event", [ALI, SampledGaussian(0.1, 2.25), SampledGaussian(1.0, 30.0)], ids=str
)
def test_one_fitting_order_admits_as_much_as_rdp_with_fixed_events(event):
    site = RenyiFilter(BUDGET, (order_for(BUDGET, event),))
    assert fill(site, event) == max_steps(event, BUDGET, "rdp")


def test_an_admitted_history_keeps_the_budget_by_the_plain_accountant():
    draw = random.Random(3)
    for orders in (None, (6.0,), (4.0, 9.0, 20.0)):
        site = RenyiFilter(BUDGET, orders)
        while True:
            event = SampledGaussian(10 ** draw.uniform(-2.5, 0), 10 ** draw.uniform(0, 1.5))
            if not site.admits(event):
                break
            site.charge(event)
        assert epsilon(site.history, BUDGET.delta, "rdp") <= BUDGET.epsilon
        assert 0 < site.spent() <= BUDGET.epsilon


def test_the_last_admitted_event_lies_within_a_limit_and_the_next_beyond_all():
    orders = (5.0, 8.0, 13.0)
    site = RenyiFilter(BUDGET, orders)
    count = fill(site, ALI)
    cost = rdp.renyi(ALI.q, ALI.sigma, orders)
    # Conversion at δ/3, the other way round: the ε that the accumulated RDP gives at each order.
    fits = [
        rdp.to_epsilon(steps * cost[i : i + 1], BUDGET.delta / 3, "balle", orders[i : i + 1]) <= 2
        for steps in (count, count + 1)
        for i in range(3)
    ]
    assert any(fits[:3])
    assert not any(fits[3:])
    with pytest.raises(BudgetExhausted, match=r"q = 0.015, σ = 1.1.*ε = 2, δ = 1e-05"):
        site.charge(ALI)
    # A refused charge costs nothing.
    assert site.history == {ALI: count}


def test_a_reopened_filter_goes_on_where_it_was():
    site = RenyiFilter(BUDGET)
    total = fill(site, ALI)
    again = RenyiFilter(BUDGET, charged={ALI: total - 10})
    assert fill(again, ALI) == 10
    assert again.spent() == site.spent()


def test_a_filter_that_has_charged_nothing_has_spent_nothing():
    assert RenyiFilter(BUDGET).spent() == 0.0
    assert all(order > 1 for order in default_orders(BUDGET))


def test_tails_of_two_orders_add_up_for_an_adaptive_analyst():
    # Why δ is shared. Under the bound of one order the tail weighs E[M; branch], M a martingale of
    # mean 1 that shifts a first Gaussian release (σ = 1) by α. An analyst who branches between
    # α = 3 and α = 9 by that release collects nearly both weights: far more than 1.
    threshold = brentq(lambda c: norm.cdf(c - 3) - norm.sf(c - 9), 0, 12)
    assert norm.cdf(threshold - 3) + norm.sf(threshold - 9) > 1.99


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: RenyiFilter(BUDGET, ()),
        lambda: RenyiFilter(BUDGET, (3.0, 3.0)),
        lambda: RenyiFilter(BUDGET, (1.01,)),
        lambda: RenyiFilter(BUDGET, (math.nan,)),
        lambda: RenyiFilter(BUDGET, (1.0,)),
        lambda: RenyiFilter(BUDGET, charged={ALI: -1}),
    ],
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(InputError):
        wrong()
