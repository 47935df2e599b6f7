"""docs/notes/errata.md, F1 to F12: what FedFDP (arXiv 2402.16028) prints, against what holds."""

import math
import random

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import binom

from fedpact.per_sample.clipping import Fair
from fedpact.privacy.accounting import rdp
from fedpact.privacy.accounting.accountant import epsilon, joint

RATE, SIGMA, SIGMA_LOSS, DELTA = 0.05, 2.0, 5.0, 1e-5  # the paper's settings


def test_f1_the_printed_fair_clip_exceeds_the_clip():
    lam, mean_loss, loss, norm, clip = 0.6, 2.0, 0.01, 1.0, 0.1
    printed = min(1 + lam * (loss - mean_loss), clip / norm)  # (15)
    assert abs(printed * norm) == pytest.approx(0.194)  # almost twice C = 0.1
    ours = Fair(lam, mean_loss)(torch.tensor([loss]))
    assert float(ours) == 0.0
    assert min(float(ours), clip / norm) * norm <= clip


def test_f2_equation_8_omits_the_weights_of_its_derivation():
    # F_i = (w - c_i)²/2, so that Δ_i = F_i - F is exact at the same w.
    p, centre, lam, w, h = (0.9, 0.1), (0.0, 2.0), 0.5, 0.7, 1e-5

    def losses(w):
        each = [(w - c) ** 2 / 2 for c in centre]
        return each, sum(a * b for a, b in zip(p, each, strict=True))

    def objective(w, weights):
        each, mean = losses(w)
        spread = sum(a * (b - mean) ** 2 for a, b in zip(weights, each, strict=True))
        return mean + lam / 2 * spread

    def slope(weights):
        return (objective(w + h, weights) - objective(w - h, weights)) / (2 * h)

    each, mean = losses(w)
    step = sum(  # Σ p_i (1 + λ Δ_i) ∇F_i, what (10) and (11) descend along
        a * (1 + lam * (b - mean)) * (w - c) for a, b, c in zip(p, each, centre, strict=True)
    )
    assert slope(p) == pytest.approx(step, rel=1e-8)
    assert abs(slope((1.0, 1.0)) - step) > 0.1 * abs(step)  # (8)


def exact_epsilon(q, sigma, delta):
    """The least ε of one sampled Gaussian at δ, by the closed form of both directions."""

    def delta_at(eps):
        found = 0.0
        for sign in (1, -1):
            level = math.exp(sign * eps) - 1 + q
            if level > 0:
                x = sigma**2 * math.log(level / q) + 0.5
                plain, moved = ndtr(-sign * x / sigma), ndtr(-sign * (x - 1) / sigma)
                mixed = (1 - q) * plain + q * moved
                upper, lower = (mixed, plain) if sign == 1 else (plain, mixed)
                found = max(found, upper - math.exp(eps) * lower)
        return float(found)

    return brentq(lambda e: delta_at(e) - delta, 0.0, 60.0)


def claimed(q, sigmas, steps, delta):
    """(27): separately amplified Rényi costs, added; over many orders, in the paper's favour."""
    total = steps * sum(rdp.renyi(q, sigma) for sigma in sigmas)
    return rdp.to_epsilon(total, delta, "balle")


def test_f3_adding_amplified_costs_is_not_a_bound():
    # Gradient and loss of one Poisson batch; the record's parts are as long as allowed. This is
    # one sampled Gaussian with σ_joint, and its exact ε lies above what (27) claims.
    q, sigma = 0.05, 0.6
    both = joint(q, [sigma, sigma]).sigma
    assert both == pytest.approx(sigma / math.sqrt(2))
    assert claimed(q, (sigma, sigma), 1, DELTA) == pytest.approx(5.12, abs=0.01)
    assert exact_epsilon(q, both, DELTA) == pytest.approx(7.52, abs=0.01)


def test_f3_at_every_order_the_joint_divergence_is_larger():
    # At order 2: A = 1 + q² (e^(1/σ²) - 1), exactly; e^(a+b) - 1 > (e^a - 1) + (e^b - 1).
    growth = [math.expm1(1 / s**2) for s in (SIGMA, SIGMA_LOSS)]
    both = math.expm1(1 / SIGMA**2 + 1 / SIGMA_LOSS**2)
    separate = sum(math.log1p(RATE**2 * g) for g in growth)
    assert math.log1p(RATE**2 * both) > 1.03 * separate
    orders = tuple(float(a) for a in range(2, 65))
    sigma = joint(RATE, [SIGMA, SIGMA_LOSS]).sigma
    added = rdp.renyi(RATE, SIGMA, orders) + rdp.renyi(RATE, SIGMA_LOSS, orders)
    assert np.all(rdp.renyi(RATE, sigma, orders) > added)


def test_f3_the_printed_setting_is_not_refuted():
    # There the conversion's slack is larger than the error: the claim stands, its proof does not.
    event = joint(RATE, [SIGMA, SIGMA_LOSS])
    assert epsilon({event: 600}, DELTA) < claimed(RATE, (SIGMA, SIGMA_LOSS), 600, DELTA)


def test_f4_the_batch_size_can_be_read_off_the_noise():
    # Records with zero gradient: what is sent is σ C N(0, I_d) / |B|. With the CNN's d the noise's
    # deviation is known to 1e-3, and |B| = 75 and 76 differ by 1.3 %: 14 deviations.
    d, size = 582_026, 75
    generator = torch.Generator().manual_seed(7)
    sent = SIGMA * 0.1 * torch.randn(d, generator=generator, dtype=torch.float64) / size
    assert round(SIGMA * 0.1 / float(sent.square().mean().sqrt())) == size
    assert 1 / math.sqrt(2 * d) < (1 - 75 / 76) / 14


def test_f4_batch_sizes_cost_more_than_is_claimed_for_everything():
    # n or n + 1 records, much noise, T rounds: the sum of the sizes is binomial. What it gives
    # away is a lower bound, and it exceeds the δ claimed at the claimed ε.
    n, steps, sigma = 100, 600, 40.0
    claim = rdp.to_epsilon(steps * rdp.renyi(RATE, sigma), DELTA, "balle")
    k = np.arange(steps * (n + 1) + 1)
    with_it, without = binom.pmf(k, steps * (n + 1), RATE), binom.pmf(k, steps * n, RATE)
    delta = float(np.maximum(with_it - math.exp(claim) * without, 0).sum())
    assert claim < 0.2
    assert delta > 1000 * DELTA


def test_f5_the_printed_costs_lack_the_logarithm():
    # (25) and (26) at order 2; A_2 = 1 + q² (e^(1/σ²) - 1) by the sum's three terms.
    moment = sum(
        math.comb(2, k) * (1 - RATE) ** (2 - k) * RATE**k * math.exp((k * k - k) / (2 * SIGMA**2))
        for k in range(3)
    )
    assert moment == pytest.approx(1 + RATE**2 * math.expm1(1 / SIGMA**2))
    assert math.log(moment) == pytest.approx(float(rdp.renyi(RATE, SIGMA, (2.0,))[0]), rel=1e-9)
    assert 600 * moment > 600  # the printed cost, where 600 log A_2 is 0.43
    assert 600 * math.log(moment) < 0.43


def test_f6_the_mean_as_bound_only_falls():
    # Losses with the exponential law of mean 1: E[min(C, ℓ)] = 1 - e^(-C) < C, without noise.
    bound = 2.5
    for _ in range(600):
        smaller = -math.expm1(-bound)
        assert smaller < bound
        bound = smaller
    assert bound < 0.004  # and F~ with it, where the mean loss is 1


def convergence(t, a, c, start, factor=1.0):
    """(18) with L = μ = 1: (1/2t)(factor A/(2 C_t - 1) + Δ1)."""
    return (factor * a / (2 * c - 1) + start) / (2 * t)


def test_f7_the_convergence_bound_lost_a_factor_of_four():
    # One record, F = w²/2, w_1 = 1, C = 1 (nothing is clipped: C_t = 1), σ = 2, λ = 0, Γ = 0.
    # One step with η = 2/(μ t), t = 1: w_2 = w_1 - 2 (w_1 + 2 z). E by Gauss-Hermite, exact here.
    nodes, weights = np.polynomial.hermite_e.hermegauss(4)
    after = 1 - 2 * (1 + 2 * nodes)
    loss = float((weights * after**2 / 2).sum() / weights.sum())
    a = 1 + 3 + 2 * 2.0**2  # G = 1, B = 1, d = 1
    assert loss == pytest.approx(8.5)
    assert convergence(2, a, 1.0, 1.0) == 3.25
    assert convergence(2, a, 1.0, 1.0, factor=4) == 12.25


def test_f8_no_such_bound_holds_where_clipping_moves_optimum():
    # One site, losses (w - x)²/2 for x = 0, 0, 0, 4: the optimum is 1. With C = 2 and full batches
    # w = 2/3 does not move, and stays a loss of 1/18 away; (18) goes to 0.
    records, clip, w = (0.0, 0.0, 0.0, 4.0), 2.0, 2 / 3
    gradients = [w - x for x in records]
    factors = [min(1.0, clip / abs(g)) for g in gradients]
    assert sum(f * g for f, g in zip(factors, gradients, strict=True)) == pytest.approx(0)
    gap = sum(((w - x) ** 2 - (1 - x) ** 2) / 2 for x in records) / 4
    assert gap == pytest.approx(1 / 18)
    c, largest = sum(factors) / 4, max(abs(g) for g in gradients)
    a = largest**2 * (c**3 + 3 * c**2)
    assert 2 * c - 1 > 0
    for factor in (1, 4):
        assert convergence(2000, a, c, (1 - w) ** 2, factor) < gap


def test_f8_the_induction_starts_with_a_negative_coefficient():
    # Step 3 of the proof puts v/t for Δ_t in (1 - μ β C_t / t) Δ_t; with β = 2/μ and t = 1 the
    # coefficient is 1 - 2 C_t, and Δ_1 <= v only bounds the product from below.
    c, a, start = 1.0, 1.0, 0.5
    v = max(4 * a / (2 * c - 1), start)
    assert (1 - 2 * c) * start + 4 * a > v / 2
    # And Σ p_i (F* - F_i(w*)), which the proof calls Γ, is 0: F_i = (w -+ 1)²/2, so w* = 0.
    optimum = [(0 - 1) ** 2 / 2, (0 + 1) ** 2 / 2]
    assert sum(sum(optimum) / 2 - f for f in optimum) == 0
    assert sum(optimum) / 2 - 0 == 0.5  # Γ = F* - Σ p_i F_i*


def coefficients(g, q0, q1, gap, noise, start, smooth, convex2):
    """a1..a5 of (19), with `convex2` in the places where μ² belongs."""
    return (
        g**2 * q1**3,
        6 * g**2 * q1**2,
        9 * g**2 * q1 + 2 * smooth * gap * q1 + 2 * convex2 * q0 * start,
        4 * g**2 + 2 * smooth * gap + noise + convex2 * start,
        2 * q0,
    )


def ratio(lam, a):
    """F(λ) of (19)."""
    return (a[0] * lam**3 + a[1] * lam**2 + a[2] * lam + a[3]) / (a[4] * lam + 1)


def test_f9_equation_19_is_not_18_rearranged():
    g, q0, q1, gap, noise, start, smooth, mu, steps, lam = (
        1.5,
        0.1,
        0.8,
        0.3,
        0.7,
        2.0,
        3.0,
        0.4,
        50,
        0.6,
    )
    c = 1 + q1 * lam
    a = g**2 * c**3 + 3 * g**2 * c**2 + 2 * smooth * gap * c + noise
    direct = smooth / (2 * steps) * (a / (mu**2 * (2 * (1 + q0 * lam) - 1)) + start)
    known = (g, q0, q1, gap, noise, start, smooth)
    right = smooth / (2 * mu**2 * steps) * ratio(lam, coefficients(*known, mu**2))
    printed = smooth / (2 * mu * steps) * ratio(lam, coefficients(*known, 1.0))
    assert right == pytest.approx(direct)
    assert abs(printed / direct - 1) > 0.5


def test_f10_the_best_fairness_weight_of_the_theorem_is_zero():
    draw = random.Random(5)
    for _ in range(500):
        positive = [10 ** draw.uniform(-2, 2) for _ in range(7)]
        g, q1, gap, noise, start, smooth, mu2 = positive
        q0 = -(10 ** draw.uniform(-2, 2))
        for convex2 in (mu2, 1.0):  # with μ², and as printed
            a = coefficients(g, q0, q1, gap, noise, start, smooth, convex2)
            assert a[2] - a[3] * a[4] > 0  # G(0), so F'(0) > 0
            # G' = 2 (a5 λ + 1)(3 a1 λ + a2) > 0 as far as the bound has a meaning.
            inside = np.linspace(0, -0.999 / a[4], 50)
            assert np.all(np.diff([ratio(lam, a) for lam in inside]) > 0)


def test_f10_q0_is_never_positive():
    # F is a mean of the losses, so the smallest Δ_j = ℓ_j - F is at most 0.
    losses = np.array([0.5, 0.7, 3.0])
    assert (losses - losses.mean()).min() < 0


def test_f10_a_positive_weight_needs_what_the_theorem_excludes():
    # With a5 > 0 and a3 < a4 a5 there is a λ* > 0: the formula is right, its premise is not.
    a = coefficients(1.0, 5.0, 6.0, 0.0, 1000.0, 0.0, 1.0, 1.0)
    assert a[2] < a[3] * a[4]
    assert min(np.linspace(0, 10, 2001), key=lambda lam: ratio(lam, a)) > 0.1


def test_f11_the_printed_budget_has_no_single_reading():
    orders = rdp.PAPER_ORDERS
    gradient = rdp.renyi(RATE, SIGMA, orders)
    assert rdp.to_epsilon(600 * gradient, DELTA, "mironov", orders) == pytest.approx(
        3.5176, abs=1e-4
    )
    assert rdp.to_epsilon(778 * gradient, DELTA, "balle", orders) == pytest.approx(3.52, abs=0.005)
    assert claimed(RATE, (SIGMA, SIGMA_LOSS), 880, 1e-4) == pytest.approx(3.525, abs=1e-3)
    # Both channels, on the same batch, T = 600: by Mironov, by Balle, by PLD.
    event = joint(RATE, [SIGMA, SIGMA_LOSS])
    assert epsilon({event: 600}, DELTA, "rdp", "mironov") == pytest.approx(3.86, abs=0.005)
    whole = rdp.renyi(RATE, event.sigma, orders)
    assert rdp.to_epsilon(600 * whole, DELTA, "balle", orders) == pytest.approx(3.38, abs=0.005)
    assert epsilon({event: 600}, DELTA, "pld") == pytest.approx(3.09, abs=0.01)


def test_f12_printed_spread_means_losses_near_100000():
    # Ψ = Σ p_i (F_i - F)² <= max F_i², as losses are positive: Ψ = 1.1e11 needs a site whose
    # mean loss is above 3e5, in a table that gives the same model 93.40 % accuracy.
    rng = np.random.default_rng(3)
    for _ in range(200):
        p, f = rng.dirichlet(np.ones(10)), rng.exponential(1e3, 10)
        assert (p * (f - (p * f).sum()) ** 2).sum() <= f.max() ** 2
    assert math.sqrt(1.1e11) > 3e5
