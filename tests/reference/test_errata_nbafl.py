"""docs/notes/errata.md, N1 to N3: what NbAFL and Adap DP-FL print, against what holds."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr
from scipy.stats import chi2, ncx2


def test_n1_one_record_moves_a_trained_model_by_twice_the_clip():
    """F = Σ a_j (w - b_j)²/(2 m): the optimum is Σ a_j b_j / Σ a_j, clipped to [-C, C]."""
    clip, m = 1.0, 100

    def trained(records):
        w = sum(a * b for a, b in records) / sum(a for a, _ in records)
        return w / max(1.0, abs(w) / clip)

    others = [(1.0, -2.0)] * (m - 1)
    moved = trained([*others, (1e6, 2.0)]) - trained([*others, (1.0, -2.0)])
    assert moved == pytest.approx(2 * clip, rel=1e-3)
    assert moved > 90 * (2 * clip / m)
    # So do fifty steps of descent from where they begin, of one step size for both.
    w = {}
    for last in ((1e6, 2.0), (1.0, -2.0)):
        at, records = -clip, [*others, last]
        for _ in range(50):
            at -= m / (m - 1 + 1e6) * sum(a * (at - b) for a, b in records) / m
        w[last] = at / max(1.0, abs(at) / clip)
    assert w[1e6, 2.0] - w[1.0, -2.0] == pytest.approx(2 * clip)
    # The proof's step: the mean of the records' own optima moves by 2C/m only.
    alone = [max(-clip, min(clip, b)) for _, b in others]
    assert (sum(alone) + clip) / m - (sum(alone) - clip) / m == pytest.approx(2 * clip / m)


def exact_epsilon(sigma, delta):
    """The least ε of a Gaussian of sensitivity 1 at δ (Balle and Wang, arXiv 1805.06530)."""

    def off(eps):
        second = math.exp(eps + float(log_ndtr(-1 / (2 * sigma) - eps * sigma)))
        return float(ndtr(1 / (2 * sigma) - eps * sigma)) - second - delta

    return float(brentq(off, 0.0, 1 / sigma**2 + 20 / sigma))


def test_n2_the_noise_of_large_epsilons_does_not_give_them():
    """σ_U = c L Δ/ε with c = √(2 ln(1.25/δ)) is a theorem for ε < 1; at L = 1, δ = 0.01."""
    delta = 0.01
    c = math.sqrt(2 * math.log(1.25 / delta))
    assert exact_epsilon(c / 0.9, delta) < 0.9
    assert exact_epsilon(c / 50, delta) == pytest.approx(166, abs=1)
    assert exact_epsilon(c / 100, delta) > 5 * 100
    # L exposures are one of σ/√L: from L = 25 on the printed ε has room to spare.
    assert exact_epsilon(c * 25 / 50 / math.sqrt(25), delta) < 50 / 3


def test_n3_noise_by_private_validation_losses_shows_a_record():
    """Whether the mean loss has fallen below 1 decides between σ = 4 and 2, and the noise shows."""
    delta, d, n = 1e-5, 1000, 100
    fell = [(0.9 * (n - 1) + last) / n < 1.0 for last in (0.9, 90.0)]
    assert fell == [True, False]
    # x = g + σ z, ‖g‖ <= 1: how likely ‖x‖² <= 9 d is with σ = 2 at least, with 4 at most.
    small = float(ncx2.cdf(9 * d / 4, d, 1 / 4))
    large = float(chi2.cdf(9 * d / 16, d))
    stated = exact_epsilon(2.0, delta)
    assert small - math.exp(stated) * large > 0.99 > 1000 * delta


def test_n3_an_epsilon_that_is_read_off_afterwards_is_exceeded():
    """σ is halved at will, and who sees the releases chooses after which the run ends.

    Each read-off ε is exact: one that is fixed before is exceeded by δ, no more.
    """
    delta, paths = 0.01, 100_000
    sigmas = 10.0 * 0.5 ** np.arange(8)
    z = np.random.default_rng(0).standard_normal((paths, len(sigmas)))
    loss = np.cumsum(0.5 / sigmas**2 + z / sigmas, axis=1)
    told = [exact_epsilon(1 / math.sqrt(s), delta) for s in np.cumsum(sigmas**-2.0)]
    beyond = loss - np.array(told)
    # δ is the mean of 1 - exp(ε - loss), where that is positive.
    fixed = np.maximum(0.0, -np.expm1(-beyond)).mean(0)
    assert fixed == pytest.approx(delta, rel=0.15)
    first = np.argmax(beyond > 0.5, axis=1)
    ended = np.take_along_axis(beyond, first[:, None], axis=1)[:, 0]
    assert np.maximum(0.0, -np.expm1(-ended)).mean() > 2 * delta
