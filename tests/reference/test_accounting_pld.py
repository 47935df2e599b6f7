"""ε by privacy loss distributions against closed forms, lower bounds and dp-accounting."""

import functools
import math
import subprocess
import sys

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld import privacy_loss_distribution as library
from scipy import fft, stats
from scipy.optimize import brentq
from scipy.special import ndtr
from tests.recounted import gaussian_delta

from fedpact.privacy.accounting import calibration, gaussian, group_privacy, pld
from fedpact.privacy.accounting.accountant import Budget


def exact_epsilon(delta_at, delta, top):
    return brentq(lambda e: delta_at(e) - delta, 0.0, top, xtol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
@pytest.mark.parametrize(
    "releases", [[(0.5, 1)], [(1.0, 4)], [(20.0, 1000)], [(3.0, 2), (7.0, 5)]], ids=str
)
def test_plain_gaussians_are_within_0_1_percent_of_exact(releases, delta):
    mu = math.sqrt(sum(t / s**2 for s, t in releases))
    exact = exact_epsilon(lambda e: gaussian_delta(mu, e), delta, mu**2 / 2 + 8 * mu)
    got = pld.pld_epsilon([(1.0, s, t) for s, t in releases], delta)
    assert exact <= got <= exact * 1.001


@pytest.mark.parametrize(("sigma", "count"), [(3.0, 10), (20.0, 1000), (100.0, 12305)])
def test_compositions_are_above_their_closed_form_by_little(sigma, count):
    # Release by release, which `pld_epsilon` spares plain Gaussians: their δ is known exactly.
    mu = math.sqrt(count) / sigma
    for z in (1.0, 3.0, 4.5, 5.5, 6.5, 7.2):
        exact = mu * z + mu**2 / 2
        delta = gaussian_delta(mu, exact)
        found = pld._by_grid([(1.0, sigma, count)], delta)
        assert gaussian_delta(mu, found) <= delta
        assert found <= 1.003 * exact


@pytest.mark.parametrize(("sigma", "count"), [(0.5, 10_000), (1.0, 100_000)])
def test_losses_in_the_thousands_cost_no_less_than_exact(sigma, count):
    """Masses that are tilted as much are no floats without the tilt."""
    exact = gaussian.gaussian_epsilon(math.sqrt(count) / sigma, 1e-9)
    assert 10_000 < exact <= pld._by_grid([(1.0, sigma, count)], 1e-9) <= 1.003 * exact


@pytest.mark.parametrize("delta", [1e-5, 1e-20])
@pytest.mark.parametrize("module", [pld, group_privacy])
def test_rounding_of_transforms_is_charged_to_delta(monkeypatch, module, delta):
    def epsilon():
        terms = ((0.1, 2.0, 1000),)
        if module is pld:
            return pld.pld_epsilon(terms, delta)
        return group_privacy._epsilon.__wrapped__(terms, delta, 2)

    found, convolve = epsilon(), pld.convolve

    def rounds_more(*arguments):
        composed, lost = convolve(*arguments)
        return composed, 1e5 * lost

    monkeypatch.setattr(pld, "convolve", rounds_more)
    assert (1 + 1e-6) * found < epsilon() < math.inf


def sum_of(*masses):
    """Masses of sums by transforms with eleven more bits."""
    wave = 1
    for mass, count in masses:
        wave = wave * pld._power(fft.rfft(mass.astype(np.longdouble), SIZE), count)
    return fft.irfft(wave, SIZE)


SIZE = 2**16 * 15
SPREAD = stats.binom.pmf(range(401), 400, 0.5)
CONCENTRATED = stats.poisson.pmf(range(40), 1e-4)


@pytest.mark.parametrize(
    "masses",
    [
        [(SPREAD, 1)],
        [(SPREAD, 2_000)],
        [(CONCENTRATED, 10**8)],
        [(CONCENTRATED, 10**4), (SPREAD, 300)],
        [(np.array([1.0]), 10**6)],
    ],
    ids=["one", "spread", "concentrated", "both", "constant"],
)
def test_transforms_round_by_no_more_than_is_charged(masses):
    masses = [(mass / mass.sum(), count) for mass, count in masses]
    found, lost = pld.convolve(*zip(*masses, strict=True), SIZE, np.float64)
    assert np.linalg.norm((found - sum_of(*masses)).astype(float)) <= lost


@pytest.mark.parametrize(
    ("q", "sigma", "delta"),
    [(0.015, 1.1, 1e-5), (0.5, 0.7, 1e-6), (1e-3, 0.6, 1e-6), (0.9, 3.0, 1e-8)],
)
def test_sampled_release_is_within_0_1_percent_of_exact(q, sigma, delta):
    def delta_at(epsilon):
        """The larger δ of the two directions, from the loss's inverse in x."""
        both = []
        for sign in (1, -1):
            level = math.exp(sign * epsilon) - 1 + q
            if level <= 0:
                continue
            x = sigma**2 * math.log(level / q) + 0.5
            plain, moved = ndtr(-sign * x / sigma), ndtr(-sign * (x - 1) / sigma)
            mixed = (1 - q) * plain + q * moved
            upper, lower = (mixed, plain) if sign == 1 else (plain, mixed)
            both.append(upper - math.exp(epsilon) * lower)
        return float(max(both))

    exact = exact_epsilon(delta_at, delta, 60.0)
    assert exact <= pld.pld_epsilon([(q, sigma, 1)], delta) <= exact * 1.001


CASES = [
    ([(0.015, 1.1, 716)], 1e-5),
    ([(0.1, 2.25, 100)], 1e-5),
    ([(0.05, 2.0, 300), (0.05, 1.857, 300)], 1e-5),
    ([(1.0, 5.0, 10), (0.01, 1.0, 500)], 1e-6),
]
EXTREME = [
    # In every run the same releases are priced by another accountant: test_accounting_extremes.
    pytest.param([(1e-3, 0.6, 10_000)], 1e-4, marks=pytest.mark.slow),
    pytest.param([(1e-4, 0.5, 1000)], 1e-6, marks=pytest.mark.slow),
    ([(0.5, 0.3, 3)], 1e-5),
]


@pytest.mark.parametrize(("terms", "delta"), CASES, ids=str)
def test_agrees_with_dp_accounting(terms, delta):
    theirs = PLDAccountant(value_discretization_interval=5e-4)
    for q, sigma, count in terms:
        event = PoissonSampledDpEvent(q, GaussianDpEvent(sigma))
        theirs.compose(SelfComposedDpEvent(event, count))
    assert pld.pld_epsilon(terms, delta) == pytest.approx(theirs.get_epsilon(delta), rel=2e-3)


@pytest.mark.parametrize(("terms", "delta"), CASES + EXTREME, ids=str)
def test_never_below_the_optimistic_estimate(terms, delta):
    # The library's optimistic rounding gives a lower bound on the true ε at any step.
    step = pld.grid_step(terms)
    parts = []
    for q, sigma, count in terms:
        one = library.from_gaussian_mechanism(
            sigma,
            sampling_prob=q,
            value_discretization_interval=step,
            pessimistic_estimate=False,
            use_connect_dots=False,
        )
        parts.append(one.self_compose(count))
    composed = functools.reduce(lambda a, b: a.compose(b), parts)
    assert pld.pld_epsilon(terms, delta) >= composed.get_epsilon_for_delta(delta) > 0


@pytest.mark.parametrize(("q", "sigma", "count"), [(1e-4, 50.0, 10**6), (1e-3, 30.0, 10**5)])
def test_many_small_releases_approach_their_central_limit(q, sigma, count):
    # Bu, Dong, Long, Su 2020: Gaussian DP with μ = q sqrt(T (e^(1/σ²) - 1)) in the limit.
    mu = q * math.sqrt(count * math.expm1(sigma**-2))
    limit = exact_epsilon(lambda e: gaussian_delta(mu, e), 1e-5, mu**2 / 2 + 8 * mu)
    assert pld.pld_epsilon([(q, sigma, count)], 1e-5) == pytest.approx(limit, rel=0.01)


@pytest.mark.parametrize(
    ("usual", "loud", "delta"),
    [
        ((0.01, 1.0, 1000), (1e-9, 0.06, 1000), 1e-5),
        ((0.02, 10.0, 200_000), (1e-9, 0.1, 10**5), 1e-3),
    ],
)
def test_a_rare_loud_release_costs_its_probability(usual, loud, delta):
    """Where no batch of it has the record, it has a loss of its rates' sum at most."""
    _, _, count = loud
    chance = loud[0] * count
    found = pld._by_grid([usual, loud], delta)
    assert pld._by_grid([usual], delta) <= found
    assert found <= 1.001 * (pld._by_grid([usual], delta - chance) + chance)


@pytest.mark.slow
@pytest.mark.parametrize(("q", "sigma", "count", "delta"), [(2.4e-6, 0.55, 2400, 6e-8)])
def test_rare_releases_agree_with_dp_accounting(q, sigma, count, delta):
    """Nearly all losses are small there, and ε is one large one's."""
    theirs = PLDAccountant(value_discretization_interval=1e-4)
    event = PoissonSampledDpEvent(q, GaussianDpEvent(sigma))
    theirs.compose(SelfComposedDpEvent(event, count))
    assert pld._by_grid([(q, sigma, count)], delta) <= 1.01 * theirs.get_epsilon(delta)


def test_what_a_child_imports_is_not_imported_here():
    """The answer is the same to the last bit, and an error of the search is raised here."""
    asked = """
import sys
from fedpact.common.errors import BudgetExhausted
from fedpact.privacy.accounting import accountant, calibration
from fedpact.privacy.accounting.apart import in_a_child
with in_a_child():
    budget = accountant.Budget(2.0, 1e-5)
    sigma = calibration.smallest_sigma(budget, 0.5, 60)
    print(*sorted({"scipy"} & set(sys.modules)))
    print(repr(sigma), accountant.epsilon({accountant.SampledGaussian(0.5, sigma): 60}, 1e-5))
    try:
        calibration.smallest_sigma(budget, 0.5, 61, spent={accountant.SampledGaussian(1.0, 0.1): 1})
    except BudgetExhausted as error:
        print(" ".join(str(error).split()))
print(*sorted({"scipy.stats", "scipy.optimize", "torch"} & set(sys.modules)))
"""
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    before, first, error, loaded = told.stdout.splitlines()
    sigma, epsilon = map(float, first.split())
    assert (before, loaded) == ("", "")
    assert "ε = 2, δ = 1e-05" in error
    assert sigma == calibration.smallest_sigma(Budget(2.0, 1e-5), 0.5, 60)
    assert epsilon == pld.pld_epsilon([(0.5, sigma, 60)], 1e-5)
