"""docs/notes/errata.md, N1 and N2: what NbAFL (arXiv 1911.00222) prints, against what holds."""

import math

import pytest
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr


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
    # The proof's step: the mean of the records' own optima moves by 2C/m only.
    alone = [max(-clip, min(clip, b)) for _, b in others]
    assert (sum(alone) + clip) / m - (sum(alone) - clip) / m == pytest.approx(2 * clip / m)


def exact_epsilon(sigma: float, delta: float) -> float:
    """The least ε of a Gaussian of sensitivity 1 at δ (Balle and Wang, arXiv 1805.06530)."""

    def off(eps: float) -> float:
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
