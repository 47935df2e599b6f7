"""docs/notes/errata.md, L1 to L7: "Trade-offs between privacy, utility, and communication"
(arXiv 2102.04737), against what holds. All logarithms are natural unless a test says otherwise.
"""

import math
from itertools import product

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import binom
from tests.recounted import gaussian_delta

from fedpact.privacy.accounting.accountant import SampledGaussian, epsilon

RATE, DELTA = 1e-3, 1e-4  # the paper's settings
DIMENSION, USERS, GRADIENT = 1e4, 100, 5.0


def proposed(eps, delta, steps, q, log=math.log):
    """(10) without its O(·): the least σ_k²."""
    correction = log(2 * log(1 / delta)) + 1 - log(eps)
    bracket = 2 / eps**2 * log(1 / delta) + 1 / eps - 2 / eps**2 * correction
    return 4 * q**2 / (1 - q) * steps * bracket


def moments(eps, delta, steps, q, log=math.log):
    """MA of Table 1 without its O(·)."""
    return 4 * q**2 / (1 - q) * steps * (2 / eps**2 * log(1 / delta) + 1 / eps)


def optimal(eps, delta, steps, q, log=math.log):
    """AC2 of Table 1."""
    return 4 * q**2 / (1 - q) * 8 * steps * log(math.e + eps / delta) / eps**2


def advanced(eps, delta, steps, q, log=math.log):
    """AC1, with (13) put right; `log` in the last formula only."""
    rest = 1e-5
    each = brentq(
        lambda e: math.sqrt(2 * steps * math.log(1 / rest)) * e + steps * e * math.expm1(e) - eps,
        1e-12,
        1.0,
    )
    each_delta = (delta - rest) / steps
    return 4 * q**2 / (1 - q) * 2 * log(1.25 / each_delta) / each**2


def conditions_hold(variance, eps, delta, q):
    """(8) and (9)."""
    sigma = math.sqrt(variance)
    least = 2 * math.log(1 / delta) * max(delta, 1 / (variance * math.log(1 / (q * sigma))))
    return q < 1 / (16 * sigma) and sigma >= 1 and eps > least


def delta_of_counting(q, multiplier, steps, eps, level):
    """A lower bound on δ at ε: how often of T times a release lies above a level, both laws.

    A record that turns the clipped mean round moves the release by its whole sensitivity, so the
    mechanism is the sampled Gaussian itself: N(0, s²) against (1 - q) N(0, s²) + q N(1, s²).
    """
    without = ndtr(-level / multiplier)
    with_it = (1 - q) * without + q * ndtr(-(level - 1) / multiplier)
    k = np.arange(int(steps * with_it + 12 * math.sqrt(steps * with_it) + 50))
    terms = binom.pmf(k, steps, with_it) - math.exp(eps) * binom.pmf(k, steps, without)
    return float(np.maximum(terms, 0).sum())


def test_l1_the_proposed_bound_is_unsound_inside_its_conditions():
    eps, steps = 2.0, 100_000
    variance = proposed(eps, DELTA, steps, RATE)
    assert math.sqrt(variance) == pytest.approx(1.183, abs=5e-4)
    assert conditions_hold(variance, eps, DELTA, RATE)
    # Sensitivity 2 C, deviation σ C: the multiplier is σ/2.
    multiplier = math.sqrt(variance) / 2
    assert delta_of_counting(RATE, multiplier, steps, eps, 1.6) > 50 * DELTA
    assert delta_of_counting(RATE, multiplier, steps, 3.0, 1.65) > DELTA  # so ε > 3
    assert epsilon({SampledGaussian(RATE, multiplier): steps}, DELTA) < 5.52  # at most this


def test_l1_moments_accountant_without_remainder_is_unsound():
    eps, steps = 3.0, 109_173
    variance = moments(eps, DELTA, steps, RATE)
    assert math.sqrt(variance) == pytest.approx(1.02, abs=1e-3)
    assert conditions_hold(variance, eps, DELTA, RATE)
    assert delta_of_counting(RATE, math.sqrt(variance) / 2, steps, eps, 1.65) > 200 * DELTA


def test_l1_what_was_dropped_is_not_small():
    # (20) puts 4/σ² for e^(4/σ²) - 1.
    assert math.expm1(4 / 1.183**2) > 5 * (4 / 1.183**2)


def test_l1_the_bracket_can_be_negative():
    assert proposed(0.05, 1e-2, 1000, RATE) < 0  # a negative variance


def test_l2_equation_13_is_not_the_gaussian_mechanism():
    eps, delta = 0.1, 1e-5  # without the factor for sampling and sensitivity, which is 1 here
    printed = math.sqrt(2 / eps * math.log(4 / (5 * delta)))
    right = math.sqrt(2 * math.log(1.25 / delta)) / eps
    assert (printed, right) == (pytest.approx(15.03, abs=0.01), pytest.approx(48.45, abs=0.01))
    assert gaussian_delta(1 / printed, eps) > 100 * delta
    assert gaussian_delta(1 / right, eps) < delta


def test_l3_utility_bound_fails_where_clipping_moves_optimum():
    # λ = μ = 1: losses (w - x)²/2; three quarters of the users have x = 0, one quarter x = 4. The
    # optimum is 1. With C = 1 <= G the clipped mean is 0 at w = 1/3, where it stays.
    w, clip, users = 1 / 3, 1.0, ((0.75, 0.0), (0.25, 4.0))
    clipped = sum(p * (w - x) / max(1, abs(w - x) / clip) for p, x in users)
    assert clipped == pytest.approx(0)
    gap = sum(p * ((w - x) ** 2 - (1 - x) ** 2) / 2 for p, x in users)
    largest = max(abs(w - x) for _, x in users)
    assert gap == pytest.approx(2 / 9)
    assert clip <= largest
    assert (1 - w) ** 2 <= 4 * largest**2  # the proof's starting condition
    # (11) without noise, from T = 122 on; what it claims grows without end.
    assert all(steps / (2 * largest**2) > 1 / gap for steps in (122, 1000, 10**6))


def test_l3_the_utility_bound_fails_with_noise_as_well():
    # The same users, 100 of them with σ_k = 1 and d = 1, so that d σ² = 1/100: 50 runs of T steps
    # η_t = G/(C λ t). The largest gradient met is checked to be at most G.
    rng, steps, largest = np.random.default_rng(11), 20_000, 8.0
    w = np.full(50, 1 / 3)
    for t in range(1, steps + 1):
        assert np.abs(w).max() <= largest
        assert np.abs(w - 4).max() <= largest
        clipped = 0.75 * np.clip(w, -1, 1) + 0.25 * np.clip(w - 4, -1, 1)
        w = w - largest / t * (clipped + 0.1 * rng.standard_normal(50))
    # E[loss] - optimum = E[(w - 1)²]/2: 0.22, where (11) allows 2 G²/T = 0.0064. The standard
    # error is below 0.01, so chance cannot explain it.
    gaps = (w - 1) ** 2 / 2
    assert gaps.std() / math.sqrt(50) < 0.01
    assert gaps.mean() > 20 * 2 * largest**2 / steps


def test_l3_the_step_of_the_proof_that_fails():
    # (25) bounds one user's inner product by the global gap, and by 0, from below.
    w, optimum, x = 1 / 3, 1.0, 0.0
    assert (w - x) * (w - optimum) < 0
    # (32) multiplies by C/G: right for a positive product only.
    w, x, clip, largest = 0.5, 0.0, 1.0, 5.0
    product_of = (w - x) * (w - optimum)  # not clipped: |w - x| < C
    assert product_of < clip / largest * product_of


def noise_entropy(variance, d, clip):
    """(48)."""
    return d / 2 * math.log(2 * math.pi * math.e * clip**2 * variance)


def rate_bound(variance, d, clip):
    """(12), in nats."""
    return d * math.log(2 * math.pi * math.e * clip**2 * math.sqrt(variance) / math.sqrt(d))


def entropy_of_sum(clip, sigma):
    """h(X + Z) by integration: X uniform on [-C, C], Z normal with deviation C σ, d = 1."""
    s = clip * sigma

    def density(y):
        return float(ndtr((y + clip) / s) - ndtr((y - clip) / s)) / (2 * clip)

    def integrand(y):
        p = density(y)
        return -p * math.log(p) if p > 0 else 0.0

    reach = clip + 9 * s
    return quad(integrand, -reach, reach, points=[-clip, 0, clip], limit=200)[0]


def test_l4_the_rate_bound_is_below_the_entropy_of_the_noise():
    # h(X + Z) >= h(Z) for independent X and Z. At the paper's d and C, whatever σ:
    for variance in (1.0, 19.95, 3906.25):
        difference = rate_bound(variance, DIMENSION, 1) - noise_entropy(variance, DIMENSION, 1)
        expected = DIMENSION / 2 * math.log(2 * math.pi * math.e / DIMENSION)
        assert difference == pytest.approx(expected)
        assert difference < -31_000  # nats


@pytest.mark.parametrize(("clip", "sigma"), [(0.1, 1.0), (0.1, 0.3), (0.2, 5.0)])
def test_l4_an_entropy_that_exceeds_the_printed_bound(clip, sigma):
    entropy = entropy_of_sum(clip, sigma)
    assert rate_bound(sigma**2, 1, clip) < noise_entropy(sigma**2, 1, clip) < entropy
    # The bound by the largest entropy of a given variance holds.
    assert entropy < noise_entropy(sigma**2 + 1, 1, clip)


def test_l4_summand_entropies_do_not_bound_the_sums():
    # Two uniform laws on [0, 1/10]: h = log(1/10) each; the sum's triangular law has
    # h = 1/2 + log(1/10) > 2 log(1/10).
    a = 0.1
    entropy, _ = quad(lambda y: -(p := (a - abs(y - a)) / a**2) * math.log(p), 0, 2 * a, points=[a])
    assert entropy == pytest.approx(0.5 + math.log(a))
    assert entropy > 2 * math.log(a)


def utility(variance, steps):
    """(11) for K equal users, λ = μ = C = 1, as the paper evaluates it."""
    return steps / GRADIENT**2 * min(0.5, 1 / (1 + DIMENSION * variance / USERS))


def test_l5_printed_example_mixes_rounds_and_logarithms():
    few, many, eps = 7e3, 7e4, 0.3
    settings = (eps, DELTA, few, RATE)
    assert utility(proposed(*settings, math.log10), many) == pytest.approx(25.83, abs=0.01)
    assert utility(moments(*settings, math.log10), many) == pytest.approx(10.79, abs=0.005)
    assert utility(optimal(*settings, math.log), many) == pytest.approx(1.40, abs=0.005)
    assert utility(advanced(*settings, math.log10), many) == pytest.approx(0.24, abs=0.005)
    # With natural logarithms and the printed T = 7e4 in both places:
    settings = (eps, DELTA, many, RATE)
    assert utility(proposed(*settings), many) == pytest.approx(1.06, abs=0.005)
    assert utility(moments(*settings), many) == pytest.approx(0.48, abs=0.005)
    assert utility(optimal(*settings), many) == pytest.approx(0.14, abs=0.005)
    assert utility(advanced(*settings), many) == pytest.approx(0.0092, abs=1e-4)


def test_l5_the_values_at_the_largest_noise_are_right():
    ceiling = (1 / (16 * RATE)) ** 2
    assert ceiling == 3906.25
    assert utility(ceiling, 7e4) == pytest.approx(0.0072, abs=5e-5)
    assert utility(ceiling, 7e5) == pytest.approx(0.0717, abs=5e-5)


def test_l6_no_reading_of_12_gives_the_printed_rates():
    printed = {proposed: 5.81e3, moments: 6.44e3, advanced: 9.26e3, optimal: 7.91e3}
    for rounds, inner, outer in product((7e3, 7e4), (math.log, math.log10), (1, 2, 10)):
        base = 1.0 if outer == 1 else math.log(outer)  # nats, bits, digits
        found = {
            method: rate_bound(method(0.3, DELTA, rounds, RATE, inner), DIMENSION, 1) / base
            for method in printed
        }
        near = [abs(found[m] / printed[m] - 1) < 0.05 for m in printed]
        assert sum(near) <= 1
    at_ceiling = rate_bound(3906.25, DIMENSION, 1) / math.log(2)
    assert at_ceiling == pytest.approx(34_160, abs=5)  # bits; printed 9.69e3


def test_l7_the_realised_batch_sizes_are_not_public():
    # (3) weights by |J_k|, which the server has to be told. One record more, q = 1/2, one round:
    # with no other record the size 1 has probability 1/2 against 0, so δ >= 1/2 for every ε.
    with_it, without = binom.pmf(1, 1, 0.5), binom.pmf(1, 0, 0.5)
    assert with_it - math.exp(50) * without == 0.5
