"""The grid of losses, step by step: moved onto it, composed, and solved for ε."""

import math

import numpy as np
import pytest

from fedpact.privacy.accounting import pld
from fedpact.privacy.accounting.pld import LossMasses


def binomial_delta(release, count, step, e):
    """δ(ε) of so many releases that have two losses, and an infinite one, by all their sums."""
    (low, high), found = release.mass.tolist(), count * release.infinite
    for k in range(count + 1):
        loss = step * (count * release.low + k)
        found += math.comb(count, k) * low ** (count - k) * high**k * max(0, -math.expm1(e - loss))
    return found


OUTSIDE = 2.0**-20


def compose(releases, counts, spread, delta):
    """`pld.compose` with the mass that its window may leave out taken off δ, as its callers do."""
    with np.errstate(all="ignore"):
        return pld.compose(releases, counts, 0.25, spread, OUTSIDE * delta, (1 - OUTSIDE) * delta)


@pytest.mark.parametrize("high", [0.3, 1e-3])
@pytest.mark.parametrize(
    ("count", "delta", "infinite"), [(7, 1e-3, 0.0), (200, 1e-15, 0.0), (200, 1e-3, 0.4e-3)]
)
def test_composed_losses_are_those_of_all_their_sums(count, high, delta, infinite):
    """Tilted where δ is small, and with nearly half of δ for infinite losses."""
    infinite /= count
    release = LossMasses(0, np.array([1 - high - infinite, high]), infinite)
    found = compose([release], [count], 0.25 * math.sqrt(count * high), delta)
    assert binomial_delta(release, count, 0.25, found) <= delta
    assert binomial_delta(release, count, 0.25, 0.999 * found) > delta


def test_two_kinds_of_losses_cost_no_less_than_both():
    """A release of another kind that is the same one twice: as if there were one kind."""
    release = LossMasses(0, np.array([0.9, 0.1]), 0.0)
    twice = LossMasses(0, np.convolve(release.mass, release.mass), 0.0)
    for delta in (1e-4, 1e-15):
        found = compose([release, twice], [20, 15], 0.6, delta)
        assert binomial_delta(release, 50, 0.25, found) <= delta
        assert binomial_delta(release, 50, 0.25, 0.999 * found) > delta


def test_losses_are_moved_so_that_both_masses_stay():
    grid = np.arange(-8, 9) * 0.5
    at = np.sort(np.random.default_rng(1).normal(size=17))
    p = pld.cell_masses(at)
    # Within a cell no ratio is beyond those at its ends.
    share = np.random.default_rng(2).uniform(size=16)
    r = np.array(p)
    r[0, 1:-1] *= share * np.exp(-grid[:-1]) + (1 - share) * np.exp(-grid[1:])
    moved = pld.connect_dots(p, r, grid, -8)
    assert moved.mass.sum() + moved.infinite == pytest.approx(1, abs=1e-14)
    below = p[0, 0] * math.exp(-grid[0])
    kept = r[0, 1:-1].sum() + below
    assert kept * (1 - 1e-9) <= moved.mass @ np.exp(-grid) <= kept
    assert moved.infinite == p[0, -1]


def test_what_may_lie_outside_is_taken_off_delta(monkeypatch):
    term = (0.1, 2.0, 100)
    half = pld.pld_epsilon([term], 0.5e-5)
    monkeypatch.setattr(pld, "OUTSIDE", 0.5)
    assert pld.pld_epsilon([term], 1e-5) >= 0.9999 * half


def test_slack_between_points_is_that_of_the_point_before():
    """It falls in ε, and at ε it is at most that; the next point's would be too little."""
    losses, mass = np.arange(4.0), np.array([0.0, 0.0, 0.0, 8.0])
    # Of this order all halves from one point to the next: 8 becomes 1, and 0.4 becomes 0.2.
    found = pld._solve(mass, losses, 0.9, order=math.log(2), growth=0.0, slack=0.4, part=0.0)
    assert 1 < found < 2
    assert -math.expm1(found - 3) + 0.2 == pytest.approx(0.9)


def test_slack_costs_as_much_where_there_is_no_mass():
    with np.errstate(all="ignore"):
        found = pld._solve(
            np.zeros(4), np.arange(4.0), 0.1, order=math.log(2), growth=0.0, slack=0.4, part=0.0
        )
    assert found == pytest.approx(2)


@pytest.mark.parametrize("where", [0, 2, 3])
def test_nan_never_makes_epsilon_small(where):
    mass = np.array([0.0, 0.0, 0.5, 0.5])
    mass[where] = math.nan
    found = pld._solve(mass, np.arange(4.0), 1e-5, order=0.0, growth=0.0, slack=0.0, part=0.0)
    assert found > where or found == math.inf


def test_losses_beyond_what_floats_hold_are_infinite():
    """e^710 is no float: what lies beyond such a last point has to count as infinite, or more."""
    sigma, reach, step = 0.05, 1.7, 0.25
    x = 1 + reach * sigma
    while (2 * x - 1) / (2 * sigma**2) < 709.9:
        reach += 0.001
        x = 1 + reach * sigma
    with np.errstate(all="ignore"):
        removed, added = pld._release(1.0, sigma, step, reach)
    assert removed.infinite > 0.9 * math.erfc(reach / math.sqrt(2)) / 2
    assert added.infinite >= 0


def test_a_loud_release_among_many_quiet_ones_keeps_its_cost():
    loud = (1.0, 0.1930942859638431, 294)
    quiet = [(1.8453311191366327e-07, 556.3812491180197, 78891), (0.00114, 4.446, 35167)]
    delta = 6.709382656859754e-09
    assert pld.pld_epsilon([loud, *quiet], delta) >= pld.pld_epsilon([loud], delta)


@pytest.mark.parametrize("term", [(0.3, 0.5, 10_000), (0.1, 0.3, 30_000), (0.1, 0.7, 300_000)])
def test_a_smaller_delta_never_costs_less(term):
    """Also where ε is in the thousands, and rounding that is amplified beyond any float."""
    found = [pld.pld_epsilon([term], delta) for delta in (1e-5, 1e-9, 1e-11)]
    assert found == sorted(found)
