"""docs/notes/errata.md, A1 to A11: what ALI-DPFL (arXiv 2308.10457) prints, against what holds.

Every formula is evaluated here from its printed form; nothing is copied from an output.
"""

import math
from functools import cache

import mpmath as mp
import pytest
from scipy.integrate import quad

ETA, BATCH, SIGMA, CLIP = 0.5, 75, 1.1, 0.1  # the paper's settings
RATE, DELTA = 0.015, 1e-5


def drift(x, s, beta, eta=ETA):
    """h(x) with one and the same s = ξ + 2 sqrt(d) σ C / B in both terms."""
    return s / beta * ((eta * beta + 1) ** x - 1) - eta * s * x


def test_a1_the_printed_h_of_one_iteration_is_not_zero():
    xi, beta, d = 1.0, 2.0, 4
    noise = 2 * math.sqrt(d) * SIGMA * CLIP

    def printed(x):
        grown = (xi + noise / BATCH) / beta * ((ETA * beta + 1) ** x - 1)
        return grown - ETA * (xi + noise) / BATCH * x

    assert printed(0) == 0
    assert printed(1) == pytest.approx(ETA * xi * (1 - 1 / BATCH))  # 0.493, said to be 0
    assert drift(1, xi + noise / BATCH, beta) == pytest.approx(0, abs=1e-12)


def test_a2_one_iteration_has_a_distance_though_h_is_zero():
    # One client, F = 0 (convex, and Lipschitz and smooth with any ρ, β): after one iteration both
    # sequences have moved by their own noise only. E|N(0, s²)| by integration.
    s = ETA * SIGMA * CLIP * math.sqrt(1 / BATCH**2 + 1)  # (6) with 1/B, (8) without
    density = 1 / (s * math.sqrt(2 * math.pi))
    distance, _ = quad(lambda x: 2 * x * density * math.exp(-((x / s) ** 2) / 2), 0, 12 * s)
    bound = drift(1, 2 * SIGMA * CLIP / BATCH, beta=1.0)
    assert bound == pytest.approx(0, abs=1e-15)
    assert distance == pytest.approx(s * math.sqrt(2 / math.pi))
    assert distance > 0.04


def mean_norm(d):
    """E‖N(0, I_d)‖, the mean of the chi distribution."""
    return math.sqrt(2) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))


def test_a3_lemma_3_uses_algorithm_1s_noise():
    d = 100
    lemma = 2 * math.sqrt(d) * SIGMA * CLIP / BATCH
    assert mean_norm(d) * SIGMA * CLIP > 30 * lemma  # g~ = g + N(0, σ²C²), above (6)
    assert mean_norm(d) * SIGMA * CLIP / BATCH <= lemma / 2  # with 1/B, 1 does where 2 stands


def test_a4_lemma_7_needs_the_squared_distance():
    # F(x) = β x²/2: θ = F(x), one step x -> (1 - ηβ) x.
    beta, eta, x = 1.0, 0.1, 10.0
    theta, after = beta * x**2 / 2, beta * ((1 - eta * beta) * x) ** 2 / 2
    gain = 1 / after - 1 / theta
    factor = eta * (1 - beta * eta / 2)
    assert gain < factor / x  # ω of Theorem 2
    assert gain >= factor / x**2  # ω of Lemma 7


def best_tau(total, kappa=100.0, most=60):
    """The argmin of G for iterations T = total(τ): the argmax of T (η - ρ h(τ)/(τ κ))."""
    bracket = {t: ETA - drift(t, s=1.0, beta=0.1) / (t * kappa) for t in range(1, most + 1)}
    return max((t for t in bracket if bracket[t] > 0), key=lambda t: total(t) * bracket[t])


def test_a5_trade_off_needs_iterations_that_depend_on_tau():
    allowed, rounds = 1585, 317
    assert best_tau(lambda tau: allowed) == 1
    assert best_tau(lambda tau: min(allowed, tau * rounds)) == 5  # both budgets spent
    assert best_tau(lambda tau: min(allowed, tau * allowed)) == 1  # R_s = R_c
    # The first column called R_s = R_c has 158 rounds and 177 iterations: 2 is allowed.
    assert best_tau(lambda tau: min(177, tau * 158)) == 2


def test_a6_jensen_runs_the_other_way():
    values = (0.1, 0.9)  # of F(w(T)) - F(w*), with probability 1/2 each
    third = sum(v**3 for v in values) / 2
    assert 1 / third == pytest.approx(2.7397, abs=1e-4)
    assert sum(v**-3 for v in values) / 2 == pytest.approx(500.69, abs=0.01)
    # (37) needs 1/E[X³] > E[1/X]; that fails as well.
    assert 1 / third < sum(1 / v for v in values) / 2


def test_a7_x_and_its_cube_differ_by_less():
    largest = max(x / 10**5 - (x / 10**5) ** 3 for x in range(10**5))
    assert largest == pytest.approx(2 * math.sqrt(3) / 9, abs=1e-9)
    assert largest < math.sqrt(3) / 3 == pytest.approx(1 / math.sqrt(3))  # where it is reached


@cache
def moment(order, q=RATE, sigma=SIGMA):
    """A_α for a whole order, by its finite sum (17); it exceeds float64 for large orders."""
    return mp.fsum(
        mp.binomial(order, k)
        * (1 - mp.mpf(q)) ** (order - k)
        * mp.mpf(q) ** k
        * mp.exp(mp.mpf(k * k - k) / (2 * sigma**2))
        for k in range(order + 1)
    )


def mironov(steps, *, logarithm=True):
    """The least ε over the paper's orders 2..64, by (14), with the logarithm or as printed."""
    cost = mp.log if logarithm else mp.mpf
    return min(float((steps * cost(moment(a)) - mp.log(DELTA)) / (a - 1)) for a in range(2, 65))


PRINTED = {
    79: 1.55,
    122: 1.65,
    177: 1.75,
    231: 1.85,
    317: 2.0,
    457: 2.25,
    598: 2.5,
    775: 2.75,
    1123: 3.25,
    1585: 3.75,
}


def test_a8_equations_14_and_18_lack_the_logarithm():
    # As printed every iteration costs at least 1/(α - 1), as A_α >= 1.
    assert mironov(317, logarithm=False) > 317 / 63
    assert mironov(317) == pytest.approx(2.00, abs=0.006)
    # (16), the definition, by integration.
    ratio = lambda z: 1 - RATE + RATE * mp.exp((2 * z - 1) / (2 * SIGMA**2))  # noqa: E731
    exact = mp.quad(lambda z: mp.npdf(z, 0, SIGMA) * ratio(z) ** 5, [-9, 0, 5, 16])
    assert float(moment(5)) == pytest.approx(float(exact), rel=1e-9)


def test_a9_all_ten_printed_budgets_are_exceeded():
    excess = {steps: mironov(steps) - epsilon for steps, epsilon in PRINTED.items()}
    last = excess.pop(1585)
    assert all(0 < value < 0.01 for value in excess.values())
    assert 3.75 + last == pytest.approx(3.806, abs=5e-4)


def test_a10_the_last_round_can_exceed_the_budget():
    # Algorithm 2 asks p_b < P_b before a round, and the round has τ* iterations.
    budget, tau, steps = 1.55, 9, 0
    while steps == 0 or mironov(steps) < budget:
        steps += tau
    allowed = max(t for t in range(60, 100) if mironov(t) <= budget)
    assert steps > allowed
    assert mironov(steps) > budget


def smoothness_sent(curvatures, w_i, w):
    """β_i of a site with F_i(w) = mean of a_j w²/2, as Algorithm 2 sends it."""
    a = sum(curvatures) / len(curvatures)
    return abs(a * w_i - a * w) / abs(w_i - w)


def test_a11_the_estimates_are_exact_numbers_of_the_records():
    # One more record, another β_i, with probability 1: no ε and no δ < 1 bounds that.
    sites = [1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 5.0]
    without, with_it = (smoothness_sent(records, w_i=0.3, w=0.1) for records in sites)
    assert without == pytest.approx(1.0)
    assert with_it == pytest.approx(2.0)
    # Line 4 asks for them where w_i and w are the same vector: 0/0.
    with pytest.raises(ZeroDivisionError):
        smoothness_sent(sites[0], w_i=0.1, w=0.1)
