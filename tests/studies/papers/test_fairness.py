"""FedFDP's bound and its best λ: (18) by hand, the theorem, brute force, the roots of the cubic."""

import dataclasses
import math
import random

import mpmath as mp
import numpy as np
import pytest

from fedpact.common.errors import InputError
from fedpact.studies.papers.fedfdp import Slopes, best_weight, bound, noise_term

PLAIN = Slopes(
    gradient_bound=1.0,
    smoothness=1.0,
    convexity=1.0,
    gap=0.0,
    noise=1000.0,
    least_difference=5.0,
    most_difference=6.0,
    start=0.0,
)


def drawn(rng, q0):
    g, gap, noise, start, above = (10 ** rng.uniform(-2, 2) for _ in range(5))
    smooth = 10 ** rng.uniform(-1, 1)
    return Slopes(
        gradient_bound=g,
        smoothness=smooth,
        convexity=smooth * rng.uniform(0.01, 1),
        gap=gap,
        noise=noise * rng.choice([0, 1, 1e3]),
        least_difference=q0,
        most_difference=max(q0, 0) + above,
        start=start,
    )


def test_the_bound_is_the_corrected_18():
    # P = (L/2T)(A/(μ²(2C - 1)) + Δ1) with C_t = 1 + Q1 λ in A and 1 + Q0 λ in 2C_t - 1, by hand.
    rng = random.Random(1)
    for _ in range(100):
        b, lam, steps = drawn(rng, rng.uniform(-0.5, 2)), rng.uniform(0, 0.9), 37
        high, low = 1 + b.most_difference * lam, 1 + b.least_difference * lam
        g2 = b.gradient_bound**2
        a = g2 * high**3 + 3 * g2 * high**2 + 2 * b.smoothness * b.gap * high + b.noise
        direct = b.smoothness / (2 * steps) * (a / (b.convexity**2 * (2 * low - 1)) + b.start)
        assert bound(b, lam, steps) == pytest.approx(direct)


def test_best_weight_is_0_if_a_loss_is_below_the_mean():
    rng = random.Random(2)
    for _ in range(500):
        b = drawn(rng, -(10 ** rng.uniform(-3, 3)) * rng.choice([0, 1]))
        assert b.slope >= 0
        assert best_weight(b) == 0
        # F does grow as far as it has a meaning.
        end = -1 / b.a[4] if b.a[4] < 0 else 100.0
        values = [bound(b, float(lam), 1) for lam in np.linspace(0, 0.999 * end, 60)]
        assert np.all(np.diff(values) >= -1e-12 * np.abs(values[1:]))


def test_positive_exactly_if_a3_is_below_a4_a5():
    rng = random.Random(4)
    seen = set()
    for _ in range(400):
        b = drawn(rng, 10 ** rng.uniform(-2, 2))
        _, _, a3, a4, a5 = (mp.mpf(a) for a in b.a)
        if abs(a3 - a4 * a5) > 1e-9 * a3:
            assert (best_weight(b) > 0) == (a3 < a4 * a5)
            seen.add(best_weight(b) > 0)
    assert seen == {True, False}


def test_the_root_is_that_of_the_cubic_and_the_minimum():
    rng = random.Random(5)
    found = 0
    while found < 50:
        b = drawn(rng, 10 ** rng.uniform(-1, 2))
        lam = best_weight(b)
        if lam == 0:
            continue
        found += 1
        a1, a2, a3, a4, a5 = (mp.mpf(a) for a in b.a)
        with mp.workdps(40):
            cubic = [2 * a1 * a5, 3 * a1 + a2 * a5, 2 * a2, a3 - a4 * a5]
            roots = mp.polyroots(cubic, maxsteps=200, extraprec=400)
        positive = [float(r.real) for r in map(mp.mpc, roots) if abs(r.imag) < 1e-25 and r.real > 0]
        assert positive == [pytest.approx(lam, rel=1e-7)]
        grid = lam * np.concatenate([np.linspace(0, 2, 401), np.geomspace(2, 100, 100)])
        assert bound(b, lam, 1) <= min(bound(b, float(x), 1) for x in grid) * (1 + 1e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: dataclasses.replace(PLAIN, convexity=1.5),
        lambda: dataclasses.replace(PLAIN, noise=math.nan),
        lambda: dataclasses.replace(PLAIN, least_difference=7.0),
        lambda: noise_term(1.0, 1.0, 3, 0.0),
        lambda: bound(PLAIN, -0.1, 1),
        lambda: bound(dataclasses.replace(PLAIN, least_difference=-1.0), 0.5, 1),
        lambda: bound(PLAIN, 0.1, 0),
    ],
)
def test_invalid_input_is_refused(wrong):
    with pytest.raises(InputError):
        wrong()
