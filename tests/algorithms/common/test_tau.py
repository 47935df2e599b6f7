"""The choice of τ: the identities of h and G, and the argmin against mpmath by brute force."""

import math
import random
from itertools import pairwise

import mpmath as mp
import numpy as np
import pytest

from fedpact.algorithms.common.tau_control import (
    Drift,
    allowed_iterations,
    best_tau,
    even_split,
    gradient_spread,
    tau_by_kappa,
)

EVEN = 1e12  # a κ at which the bracket is η to all digits that matter here


def drawn(rng):
    rate, rho, beta, s = (10 ** rng.uniform(-3, 1) for _ in range(4))
    return Drift(rate, rho, beta, s)


def exact_h(drift, tau):
    """(11) as it is written, in 60 digits."""
    with mp.workdps(60):
        eta, beta, s = map(mp.mpf, (drift.learning_rate, drift.smoothness, drift.spread))
        return s / beta * ((1 + eta * beta) ** tau - 1) - eta * s * tau


def exact_g(drift, kappa, total, tau):
    with mp.workdps(60):
        lost = mp.mpf(drift.lipschitz) * exact_h(drift, tau) / (tau * mp.mpf(kappa))
        bracket = mp.mpf(drift.learning_rate) - lost
        return 1 / (total * bracket) + mp.sqrt(3) / 3 if bracket > 0 else mp.inf


# ---------------------------------------------------------------- h


def test_h_is_zero_at_one_and_grows_faster_than_its_argument():
    rng = random.Random(1)
    for _ in range(50):
        h = drawn(rng).h(30)
        assert h[0] == 0
        assert np.all(h[1:] > 0)
        assert np.all(np.diff(h / np.arange(1, 31)) > 0)


@pytest.mark.parametrize("beta", [1e-18, 1e-9, 1e-3, 1.0, 40.0])
def test_h_keeps_its_digits_where_the_printed_form_cancels(beta):
    drift = Drift(0.5, 1.0, beta, 2.0)
    for tau in (2, 7, 100):
        assert drift.h(tau)[-1] == pytest.approx(float(exact_h(drift, tau)), rel=1e-12)


def test_h_vanishes_with_the_smoothness_and_with_the_spread():
    assert np.all(Drift(0.5, 1.0, 0.0, 2.0).h(50) == 0)
    assert np.all(Drift(0.5, 1.0, 1e300, 0.0).h(50) == 0)
    # To first order in β, h = η² s β τ(τ-1)/2.
    assert Drift(0.5, 1.0, 1e-12, 2.0).h(10)[-1] == pytest.approx(0.25 * 2e-12 * 45, rel=1e-9)


def test_an_h_beyond_float64_is_infeasible_and_not_an_error():
    drift = Drift(1.0, 1.0, 1e200, 1.0)
    assert drift.h(5)[-1] == math.inf
    assert best_tau(drift, 1e300, allowed_iterations(1000, 10), 100) in (1, 2)
    assert tau_by_kappa(drift, allowed_iterations(1000, 10), 100)[-1] == (1, 0.0)


def test_the_spread_is_the_divergence_and_the_noise():
    # Lemma 3: E‖N(0, s² I_d)‖ <= s sqrt(d), which the paper doubles.
    assert gradient_spread(0.3, 4, 0.25) == pytest.approx(0.3 + 2 * 2 * 0.25)
    assert gradient_spread(0.3, 4, 0.0) == 0.3


# ---------------------------------------------------------------- the argmin


def test_large_kappa_splits_evenly_and_small_kappa_gives_1():
    rng = random.Random(4)
    for _ in range(50):
        drift, left, rounds = drawn(rng), rng.randrange(1, 900), rng.randrange(10, 500)
        most = rng.randrange(1, 101)
        total = allowed_iterations(left, rounds)
        # T(τ) decides alone once ρh/(τκ) is below η/R_c.
        kappa = 1 + 10 * left * float(drift.cost(100).max()) / drift.learning_rate
        if kappa < 1e200:
            assert best_tau(drift, kappa, total, most) == even_split(total, most)
        assert best_tau(drift, float(drift.cost(2)[-1]) * 1e-9, total, most) == 1


@pytest.mark.parametrize(("left", "rounds"), [(1585, 317), (177, 158), (10, 3), (7, 7), (5, 9)])
def test_the_even_split_is_the_rounded_up_quotient(left, rounds):
    for most in (1, 2, 4, 100):
        assert even_split(allowed_iterations(left, rounds), most) == min(
            math.ceil(left / rounds), most
        )
        assert best_tau(
            Drift(0.5, 1, 0.1, 1), EVEN, allowed_iterations(left, rounds), most
        ) == even_split(allowed_iterations(left, rounds), most)


def test_nothing_left_gives_one():
    for total in (allowed_iterations(0, 10), allowed_iterations(10, 0)):
        assert best_tau(Drift(0.5, 1, 0.1, 1), 1.0, total, 100) == 1
        assert even_split(total, 100) == 1
        assert tau_by_kappa(Drift(0.5, 1, 0.1, 1), total, 100) == [(1, 0.0)]


def test_brute_force_over_g_in_sixty_digits():
    rng = random.Random(6)
    seen = set()
    for _ in range(40):
        drift, kappa = drawn(rng), 10 ** rng.uniform(-2, 5)
        total, most = (
            allowed_iterations(rng.randrange(50, 2000), rng.randrange(5, 200)),
            rng.randrange(2, 60),
        )
        values = {t: exact_g(drift, kappa, total(t), t) for t in range(1, most + 1)}
        tau = best_tau(drift, kappa, total, most)
        assert values[tau] == min(values.values())
        seen.add(tau)
    assert len(seen) > 5  # the draw reaches many of them


def test_rounds_may_cost_more_with_more_local_iterations():
    # 100 s; a round takes 1 s and 0.1 s an iteration: τ · 100/(1 + τ/10) is 500 at τ = 10.
    total = allowed_iterations(500, lambda tau: 100 / (1 + tau / 10))
    assert even_split(total, 100) == 10
    assert best_tau(Drift(0.5, 1, 0.1, 1), EVEN, total, 100) == 10


# ---------------------------------------------------------------- κ


def test_the_sensitivity_is_exact():
    # Between two of its κ, and just beside each, best_tau gives the τ it says.
    rng = random.Random(7)
    for _ in range(30):
        drift, most = drawn(rng), rng.randrange(2, 101)
        total = allowed_iterations(rng.randrange(50, 2000), rng.randrange(5, 200))
        found = tau_by_kappa(drift, total, most)
        taus, edges = [tau for tau, _ in found], [k for _, k in found]
        assert taus == sorted(set(taus), reverse=True)
        assert edges == sorted(edges, reverse=True)
        assert (taus[0], taus[-1], edges[-1]) == (even_split(total, most), 1, 0.0)
        for (tau, edge), (smaller, _) in pairwise(found):
            if 1e-290 < edge < 1e290:
                assert best_tau(drift, edge * (1 + 1e-6), total, most) == tau
                assert best_tau(drift, edge * (1 - 1e-6), total, most) == smaller
