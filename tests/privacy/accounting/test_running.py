"""ε while a history grows: sound by closed forms and lower bounds, tight beside PLD, and quick."""

import math
import random
import time

import mpmath
import pytest
from dp_accounting.pld import privacy_loss_distribution
from tests.spread import spread

from fedpact.common.errors import InputError
from fedpact.privacy.accounting import accountant as accounting
from fedpact.privacy.accounting import pld, rdp
from fedpact.privacy.accounting.accountant import (
    RunningEpsilon,
    SampledGaussian,
    epsilon,
    quick_epsilon,
)

# From the papers' setting to a tiny and a full rate, a loud and a faint noise.
EVENTS = [
    (0.015, 1.1),
    (0.1, 2.25),
    (0.001, 0.8),
    (0.05, 2.0),
    (0.01, 0.5),
    (0.5, 20.0),
    (1.0, 40.0),
]


def running_epsilon(history, delta, planned, accountant="best"):
    return RunningEpsilon(planned, delta, accountant)(history)


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
            (found,) = pld.epsilons([((q, sigma, 1),)], delta)
            assert found >= 0
            if found < math.inf:
                finite += 1
                assert delta_of_one(q, sigma, found) <= delta * (1 + 1e-12), (q, sigma, delta)
    assert finite > 6


def test_gaussians_compose_as_their_closed_form():
    # t releases with σ at q = 1 are one with σ/√t (Balle, Wang 2018, Theorem 8).
    draw = random.Random(6)
    for _ in range(100):
        sigma, count = 10 ** draw.uniform(0, 3), round(10 ** draw.uniform(0, 4))
        (found,) = pld.epsilons([((1.0, sigma, count),)], 1e-6)
        with mpmath.workdps(30):
            mu = mpmath.sqrt(count) / mpmath.mpf(sigma)

            def delta(e, mu=mu):
                return mpmath.ncdf(mu / 2 - e / mu) - mpmath.exp(e) * mpmath.ncdf(-mu / 2 - e / mu)

            if found < 200:
                assert delta(mpmath.mpf(found)) <= 1e-6
            if 0.1 < found < 200:
                # And no more than 1.5 % above the exact ε.
                assert delta(mpmath.mpf(found) / mpmath.mpf("1.015")) > 1e-6


@pytest.mark.parametrize(("q", "sigma"), [EVENTS[0], EVENTS[4], EVENTS[6]])
def test_compositions_are_between_optimistic_and_pessimistic(q, sigma):
    counts = (1, 7, 60, 2000)
    found = pld.epsilons([((q, sigma, t),) for t in counts], 1e-5)
    optimistic = privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        sampling_prob=q,
        value_discretization_interval=pld.grid_step([(q, sigma, 1)]),
        pessimistic_estimate=False,
    )
    for count, bound in zip(counts, found, strict=True):
        least = optimistic.self_compose(count).get_epsilon_for_delta(1e-5) if count > 1 else 0.0
        assert least <= bound <= 1.015 * pld.pld_epsilon([(q, sigma, count)], 1e-5) + 1e-9


def test_rounding_of_transforms_is_charged_to_delta():
    """Of a δ that is no larger than that nothing is left to bound an ε with."""
    term, rounded = (0.1, 2.0, 1000), 8 * pld.fft_rounding(1000)
    assert pld._by_grid([[term]], [term], rounded, 4.0) == [math.inf]
    assert pld._by_grid([[term]], [term], 3 * rounded, 4.0)[0] < math.inf


def test_unlike_releases_compose():
    terms = ((0.02, 1.0, 300), (0.3, 6.0, 40), (1.0, 10.0, 1))
    (found,) = pld.epsilons([terms], 1e-5)
    assert pld.pld_epsilon(terms, 1e-5) * 0.999 <= found <= 1.015 * pld.pld_epsilon(terms, 1e-5)


@pytest.mark.parametrize(
    ("q", "sigma", "accountant"), [(0.015, 1.1, "pld"), (0.1, 2.25, "rdp"), (0.05, 2.0, "best")]
)
def test_2000_rounds_are_monotone_and_near_the_accountant(q, sigma, accountant):
    event = SampledGaussian(q, sigma)
    planned = {event: 2000}
    report = [running_epsilon({event: t}, 1e-5, planned, accountant) for t in range(2001)]
    assert report == sorted(report)
    assert report[0] == 0.0
    assert report[2000] == epsilon(planned, 1e-5, accountant)
    # 2^(1/16) times as many events, ε at most proportional to them, and 1.5 % of the grid.
    for t in (1, 17, 333, 1999):
        exact = epsilon({event: t}, 1e-5, accountant)
        assert exact * 0.999 <= report[t] <= 1.06 * exact


def test_the_number_is_by_the_accountant_that_was_asked_for():
    ali = SampledGaussian(0.015, 1.1)
    apart = [running_epsilon({ali: 50}, 1e-5, {ali: 2000}, a) for a in ("pld", "rdp", "best")]
    assert apart[0] == apart[2] < apart[1] == epsilon({ali: 50}, 1e-5, "rdp")
    assert apart[0] >= pld.pld_epsilon([(0.015, 1.1, 50)], 1e-5) * 0.999
    assert math.isfinite(running_epsilon({ali: 50}, 1e-30, {ali: 2000}))


def test_a_released_size_is_charged_with_the_training():
    size, event = SampledGaussian(1.0, 10.0), SampledGaussian(0.1, 2.0)
    planned = {size: 1, event: 300}
    report = [running_epsilon({size: 1, event: t}, 1e-5, planned) for t in range(301)]
    assert report == sorted(report)
    assert report[0] >= epsilon({size: 1}, 1e-5)
    assert report[300] == epsilon(planned, 1e-5)
    for t in (1, 20, 290):
        exact = epsilon({size: 1, event: t}, 1e-5, "pld")
        assert exact * 0.999 <= report[t] <= 1.06 * exact


def test_events_outside_the_plan_are_priced_separately():
    event, other = SampledGaussian(0.015, 1.1), SampledGaussian(0.2, 3.0)
    for planned in ({event: 300}, {}):
        for history in ({event: 400}, {event: 10, other: 1}, {other: 1}):
            assert running_epsilon(history, 1e-5, planned) == epsilon(history, 1e-5)


@pytest.mark.parametrize(("q", "sigma"), EVENTS[:2])
def test_two_thousand_reports_are_quick_from_cold_caches(q, sigma):
    # Of CPU. 15 to 50 ms where it was written; a run of 2,000 rounds takes 12 s at the least. What
    # the plan's end costs is known before the run, from its calibration.
    event = SampledGaussian(q, sigma)
    for cache in (accounting._on_the_way, accounting._epsilon, rdp._renyi):
        cache.cache_clear()
    epsilon({event: 2000}, 1e-5)
    start = time.process_time()
    after = RunningEpsilon({event: 2000}, 1e-5)
    for t in range(1, 2001):
        after({event: t})
    assert time.process_time() - start < 0.3


def test_extremes_give_a_bound_or_inf_but_never_nan():
    for q in (1e-12, 0.5, 1 - 1e-12, 1.0):
        for sigma in (1e-9, 1.0, 1e9):
            for delta in (1e-300, 1e-9, 0.999999):
                for value in pld.epsilons([((q, sigma, t),) for t in (1, 1000)], delta):
                    assert value >= 0, (q, sigma, delta)
    assert pld.epsilons([], 1e-5) == []


@pytest.mark.parametrize(
    "wrong",
    [
        lambda event: running_epsilon({event: 1}, math.nan, {event: 2}),
        lambda event: running_epsilon({event: 1}, 1e-5, {event: math.nan}),
        lambda event: running_epsilon({event: 1}, 1e-5, {event: 2}, "gdp"),
        lambda event: running_epsilon({event: -1}, 1e-5, {event: 2}),
    ],
)
def test_invalid_input_is_refused(wrong):
    with pytest.raises(InputError):
        wrong(SampledGaussian(0.1, 1.0))


@pytest.mark.parametrize(("event", "delta"), spread(EVENTS[:5:2], [1e-5, 1e-8], one_in=2))
def test_two_accountants_of_different_hands_agree_on_one_grid(event, delta):
    # dp-accounting's distributions and ours connect the same dots, and compose in different ways.
    q, sigma = event
    for count in (1, 317):
        by_hand = quick_epsilon({SampledGaussian(q, sigma): count}, delta, "pld")
        assert by_hand == pytest.approx(pld.pld_epsilon([(q, sigma, count)], delta), rel=1e-4)


def test_the_quick_one_keeps_to_the_accountant():
    history = {SampledGaussian(0.015, 1.1): 300, SampledGaussian(1.0, 20.0): 1}
    assert quick_epsilon(history, 1e-5, "rdp") == epsilon(history, 1e-5, "rdp")
    assert quick_epsilon(history, 1e-5, "rdp", "mironov") > quick_epsilon(history, 1e-5, "rdp")
    assert quick_epsilon(history, 1e-5) == quick_epsilon(history, 1e-5, "pld")
    assert quick_epsilon({}, 1e-5) == 0.0
    assert math.isfinite(quick_epsilon(history, 1e-30))
