"""ε while a history grows: near the accountant's, and never below it; and one release's."""

import math
import random

import mpmath
import pytest

from fedpact.privacy.accounting import accountant as accounting
from fedpact.privacy.accounting import pld
from fedpact.privacy.accounting.accountant import SampledGaussian, epsilon, epsilon_on_the_way


def delta_of_one(q, sigma, e):
    """δ(ε) of one release, the larger of both directions, by its two integrals in closed form."""
    q, sigma, e = mpmath.mpf(q), mpmath.mpf(sigma), mpmath.mpf(e)

    def outcome(loss):
        excess = mpmath.exp(loss) - (1 - q)
        return sigma**2 * (mpmath.log(excess) - mpmath.log(q)) + 0.5 if excess > 0 else -mpmath.inf

    def above(x, mean):
        return mpmath.erfc((x - mean) / sigma / mpmath.sqrt(2)) / 2

    def mixed(tail, x):
        return (1 - q) * tail(x, 0) + q * tail(x, 1)

    def below(x, mean):
        return above(-x, -mean)

    x, y = outcome(e), outcome(-e)
    removed = mixed(above, x) - mpmath.exp(e) * above(x, 0)
    added = 0 if y == -mpmath.inf else below(y, 0) - mpmath.exp(e) * mixed(below, y)
    return max(removed, added)


def test_one_release_costs_no_less_than_its_closed_form():
    draw = random.Random(5)
    finite = 0
    with mpmath.workdps(40):
        for _ in range(12):
            q = draw.choice([1.0, 1 - 1e-9, 1e-10, min(1.0, 10 ** draw.uniform(-6, 0.3))])
            sigma, delta = 10 ** draw.uniform(-1.5, 3), 10 ** draw.uniform(-11, -1)
            found = pld._by_grid([(q, sigma, 1)], delta)
            assert found >= 0
            if found < math.inf:
                finite += 1
                assert delta_of_one(q, sigma, found) <= delta * (1 + 1e-12), (q, sigma, delta)
    assert finite > 6


@pytest.mark.parametrize(
    ("q", "sigma", "accountant"), [(0.015, 1.1, "pld"), (0.1, 2.25, "rdp"), (0.05, 2.0, "best")]
)
def test_reports_are_monotone_and_near_the_accountant(q, sigma, accountant):
    event = SampledGaussian(q, sigma)
    planned = {event: 2000}
    report = [epsilon_on_the_way({event: t}, planned, 1e-5, accountant) for t in range(0, 2001, 5)]
    assert report == sorted(report)
    assert report[0] == 0.0
    assert report[-1] == epsilon(planned, 1e-5, accountant)
    # 2^(1/16) times as many events, ε at most proportional to them, and 1.5 % of the grid.
    for t in (1, 17, 333, 1999):
        exact = epsilon({event: t}, 1e-5, accountant)
        found = epsilon_on_the_way({event: t}, planned, 1e-5, accountant)
        assert exact <= found <= 1.06 * exact


def test_the_number_is_by_the_accountant_that_was_asked_for():
    ali = SampledGaussian(0.015, 1.1)
    apart = [epsilon_on_the_way({ali: 50}, {ali: 2000}, 1e-5, a) for a in ("pld", "rdp", "best")]
    assert apart[0] == apart[2] < apart[1] == epsilon({ali: 50}, 1e-5, "rdp")
    assert apart[0] >= epsilon({ali: 50}, 1e-5, "pld")
    assert math.isfinite(epsilon_on_the_way({ali: 50}, {ali: 2000}, 1e-30))


def test_a_released_size_is_charged_with_the_training():
    size, event = SampledGaussian(1.0, 10.0), SampledGaussian(0.1, 2.0)
    planned = {size: 1, event: 300}
    report = [epsilon_on_the_way({size: 1, event: t}, planned, 1e-5) for t in range(301)]
    assert report == sorted(report)
    assert report[0] >= epsilon({size: 1}, 1e-5)
    assert report[300] == epsilon(planned, 1e-5)
    for t in (1, 20, 290):
        exact = epsilon({size: 1, event: t}, 1e-5, "pld")
        assert exact <= report[t] <= 1.06 * exact


def test_events_outside_the_plan_are_priced_separately():
    event, other = SampledGaussian(0.015, 1.1), SampledGaussian(0.2, 3.0)
    for planned in ({event: 300}, {}):
        for history in ({event: 400}, {event: 10, other: 1}, {other: 1}):
            assert epsilon_on_the_way(history, planned, 1e-5) == epsilon(history, 1e-5)


def test_thousands_of_reports_are_few_questions():
    event = SampledGaussian(0.015, 1.1)
    accounting._epsilon.cache_clear()
    for t in range(1, 2001):
        epsilon_on_the_way({event: t}, {event: 2000}, 1e-5)
    assert accounting._epsilon.cache_info().misses < 180
