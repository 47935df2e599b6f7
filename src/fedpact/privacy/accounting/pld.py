"""Privacy loss distributions: ε of a whole history of releases, on a grid of losses.

One release is a pair of distributions, (1-q) N(0, σ²) + q N(1, σ²) and N(0, σ²), in either order
(Zhu, Dong, Wang 2022). With L = log(P/Q) its privacy loss, δ(ε) = E_P[(1 - e^(ε-L))+]. ε is the
larger one of both orders.

Grid     The outcomes with losses between neighbours a < b of a grid, of mass p under P and r under
         Q, are moved onto a and b so that both masses stay: p_a + p_b = p, p_a e^-a + p_b e^-b = r.
         This spreads e^-L around its mean, and (1 - e^(ε-L))+ is convex in the e^-L of each
         release: δ(ε) can only grow. (It is to connect the dots: Doroshenko, Ghazi, Kamath, Kumar,
         Manurangsi, arXiv 2207.04380.)
Compose  Losses add, so distributions convolve: here as powers of one Fourier transform. What the
         transforms round is at most a proven part of all mass (`convolve`). Where that is much
         beside δ, masses are multiplied by e^(cL) before, and δ(ε) is their sum with e^(-cL), so
         that most mass lies near ε: then it is that part of e^(-cε) E[e^(cL)] only, about δ.
         Either way it is taken off δ.
Window   A loss above the transform's window would come back at its lower end, and be too cheap. How
         likely that is has Chernoff's bound; it is taken off δ, too. Whatever else comes back at
         another place only adds to δ(ε).

Plain Gaussians are one Gaussian (privacy.accounting.gaussian).
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedpact.privacy.accounting import gaussian

FloatArray = NDArray[np.float64]
Term = tuple[float, float, int]  # q, σ, number of releases

# The grid is this much finer than the spread of one release's loss: the variance it adds is then
# below 1/1600 of the loss's, and ε less than 0.1 % too large.
FINENESS: Final = 20.0
_LARGEST_COMPOSED: Final = 2.0**21  # grid points, as wanted: 16 MiB
# Beyond these numbers squares underflow or overflow; values there are priced as these.
_LEAST_RATE: Final = 1e-60
_LARGEST_SIGMA: Final = 1e60
_MOST: Final = 10**9
_LEAST_DELTA: Final = 1e-290
_SIGMAS: Final = (0.05, 1e9)  # with less noise, losses are in the hundreds
OUTSIDE: Final = 2.0**-20
"""Of δ: what may lie outside the window, and what beyond the grid."""
_LARGEST: Final = 2**22  # points of a grid
_UNIT: Final = 2.0**-53
_ROUNDED: Final = 1e-3  # of δ: where transforms may round more, masses are tilted
_PLACED: Final = 2.0**-48  # of itself, and of 1: by how much a loss may be off on the grid
_OF_NORM, _OF_SUM = 16, 10  # units in the last place, see `convolve`
_TRIED: Final = 6
_STRONG: Final = 16.0  # of a tilt times the longest loss: then longer floats take less tilt
_BLOCK: Final = 512.0  # e to the power of as much is a float
_DIGITS: Final = 2.0**-46  # to which the normal distribution function is exact, and more


def pld_epsilon(terms: Sequence[Term], delta: float) -> float:
    """Return an upper bound on the ε of all releases together at δ; inf where none is found.

    terms: (q, σ, count) with count >= 1, each event once. Takes milliseconds, or seconds
    where δ is that of rare large losses, as with q T below 1 and small σ.
    """
    if not terms:
        return 0.0
    if all(q == 1 for q, _, _ in terms):
        return _at_full_rate(terms, delta)
    if participation_probability(terms) <= delta:
        return 0.0
    terms = [round_up_term(*term) for term in terms]
    # ε grows with q.
    return min(_by_grid(terms, delta), _at_full_rate(terms, delta))


def _at_full_rate(terms: Sequence[Term], delta: float) -> float:
    return gaussian.gaussian_epsilon(math.hypot(*(math.sqrt(t) / s for _, s, t in terms)), delta)


def _by_grid(terms: Sequence[Term], delta: float) -> float:
    counts = [t for *_, t in terms]
    count, outside = sum(counts), OUTSIDE * delta
    if (
        count > _MOST
        or delta < _LEAST_DELTA
        or not all(_SIGMAS[0] <= s <= _SIGMAS[1] for _, s, _ in terms)
    ):
        return math.inf
    # Φ(-z) <= exp(-z²/2) / 2
    reach = math.sqrt(max(1.0, -2 * math.log(2 * outside / count)))
    with np.errstate(all="ignore"):
        step, spread = grid_step(terms), math.sqrt(_variance(terms))
        pairs = [_release(q, s, step, reach) for q, s, _ in terms]
        return max(
            compose([pair[i] for pair in pairs], counts, step, spread, outside, delta - outside)
            for i in (0, 1)
        )


def participation_probability(terms: Sequence[Term]) -> float:
    """Return the probability that a record is in any batch, rounded up: δ need not exceed it."""
    if any(q == 1 for q, *_ in terms):
        return 1.0
    return -math.expm1(math.fsum(t * math.log1p(-q) for q, _, t in terms)) * (1 + 2.0**-45)


def round_up_term(q: float, sigma: float, count: int) -> Term:
    """Return a term that costs no less and whose squares are finite.

    ε increases in q and decreases in σ.
    """
    return max(q, _LEAST_RATE), min(sigma, _LARGEST_SIGMA), count


def grid_step(terms: Sequence[Term]) -> float:
    """Return the grid's step: fine relative to one release's loss, coarser if memory requires."""
    count, variance = sum(t for _, _, t in terms), _variance(terms)
    reach = max(_loss_range(q, s) for q, s, _ in terms)
    return step_within(math.sqrt(variance / count) / FINENESS, reach, math.sqrt(variance))


def _variance(terms: Sequence[Term]) -> float:
    """Return about the variance of all losses together."""
    return sum(t * loss_spread(q, s) ** 2 for q, s, t in terms)


def step_within(wanted: float, reach: float, spread: float) -> float:
    """Return the grid's step nearest to `wanted` that memory allows.

    reach: the width of one release's losses. spread: the deviation of those of all together.
    """
    step = max(wanted, (reach + 24 * spread) / _LARGEST_COMPOSED)
    # Steps from a geometric grid, so that histories that differ little share distributions.
    return 2.0 ** (math.floor(8 * math.log2(step)) / 8)


def loss_spread(q: float, sigma: float) -> float:
    """Return about the deviation of one release's loss where a record is removed."""
    x = np.linspace(-10.0, 10.0 + 1 / sigma, 2000)
    exponent = x / sigma - 0.5 / sigma**2
    ratio = q * np.expm1(exponent)
    loss = np.log1p(ratio) if q < 1 else exponent
    weights = np.exp(-x * x / 2) * (1 + ratio)
    weights /= weights.sum()
    return math.sqrt(float(weights @ (loss - weights @ loss) ** 2))


def _loss_range(q: float, sigma: float) -> float:
    """Return the width of the losses within ten deviations of the noise."""
    rest = math.log1p(-q) if q < 1 else -math.inf
    high = float(np.logaddexp(rest, math.log(q) + 10 / sigma + 0.5 / sigma**2))
    low = float(np.logaddexp(rest, math.log(q) - 10 / sigma - 1.5 / sigma**2))
    return max(high - low, 10 * loss_spread(q, sigma))


@dataclass(frozen=True)
class LossMasses:
    """Masses of the losses low, low + 1, ... (times the grid's step), and of an infinite one."""

    low: int
    mass: FloatArray
    infinite: float


def _release(q: float, sigma: float, step: float, reach: float) -> tuple[LossMasses, LossMasses]:
    """Return the losses of one release: where a record is removed, and where it is added."""

    def loss(x: float) -> float:
        rest = math.log1p(-q) if q < 1 else -math.inf
        return float(np.logaddexp(rest, math.log(q) + (2 * x - 1) / (2 * sigma**2)))

    first, last = ends(loss(-reach * sigma), loss(1 + reach * sigma), step)
    # Beyond 709 e^loss overflows: the mass beyond the grid would not count as infinite.
    if last - first > _LARGEST or last * step > 709:
        nothing = LossMasses(0, np.ones(1), math.inf)
        return nothing, nothing
    grid = np.arange(first, last + 1, dtype=np.float64) * step
    # The outcomes with these losses; none has a loss below log(1 - q).
    excess = np.where(grid < -1, np.exp(grid) - (1 - q), np.expm1(grid) + q)
    at = sigma * (np.log(np.maximum(excess, 0.0)) - math.log(q)) + 0.5 / sigma
    without = cell_masses(at)
    with_it = (1 - q) * without + q * cell_masses(at - 1 / sigma)
    removed = connect_dots(with_it, without, grid, first)
    return removed, connect_dots(without[:, ::-1], with_it[:, ::-1], -grid[::-1], -last)


def ends(low: float, high: float, step: float) -> tuple[int, int]:
    """Return a grid's first and last point, in steps, around losses from low to high.

    With noise enough all losses are one number; a grid has two.
    """
    first = math.floor(low / step)
    return first, max(math.ceil(high / step), first + 1)


def cell_masses(at: FloatArray) -> FloatArray:
    """Return N(0, 1)'s mass in each cell between neighbours of `at`, below its first and above its
    last, and the mass beyond the cell on the side from which its own was taken: [2, len(at) + 1].
    """
    edges = np.concatenate([[-np.inf], at, [np.inf]])
    left = edges[1:] <= 0
    wide = gaussian.special().ndtr(np.where(left, edges[1:], -edges[:-1]))
    narrow = gaussian.special().ndtr(np.where(left, edges[:-1], -edges[1:]))
    return np.stack([wide - narrow, wide])


def connect_dots(p: FloatArray, r: FloatArray, grid: FloatArray, first: int) -> LossMasses:
    """Return the losses log(P/Q) with all mass moved onto the grid.

    p, r: `cell_masses` under P and Q, in the order of losses. What lies below the grid goes to its
    first point.
    """
    (under_p, tail_p), (under_q, tail_q) = p[:, 1:-1], r[:, 1:-1]
    step, grown = grid[1] - grid[0], np.exp(grid[:-1])
    lost = _DIGITS * (tail_p + tail_q * grown)
    upper = np.clip((under_p - under_q * grown + lost) / -np.expm1(-step), 0.0, under_p)
    mass = np.zeros(len(grid))
    mass[1:] = upper
    mass[:-1] += under_p - upper
    mass[0] += p[0, 0]
    return LossMasses(first, mass, float(p[0, -1]))


def compose(
    releases: Sequence[LossMasses],
    counts: Sequence[int],
    step: float,
    spread: float,
    outside: float,
    delta: float,
) -> float:
    """Return ε at δ after so many of each release, for one order of their pairs; inf if too wide.

    releases: of each kind the losses of one, on a grid of this step. spread: about the deviation of
    the losses of all of them together. outside: the mass that the window may leave out, which has
    been taken off δ.
    """
    # Above the rounding of what follows.
    room = 0.01 - math.log(outside)
    longest = _longest(releases, step)
    # About the best order of a sum near normal, and of one that is a single loss beside many small.
    usual, single = math.sqrt(2 * room) / spread, room / longest
    octaves = math.log2(max(1.0, usual / single))
    orders = 4 * usual * 2.0 ** (np.arange(-14 - 2 * math.ceil(octaves), 1) / 2)
    ups, downs = (_growth(releases, counts, step, way * orders) for way in (1, -1))
    # P[L > b] <= E e^(λL) e^(-λb); an order that cannot be computed says nothing.
    high, low = (
        float(np.nanmin((np.maximum(growth, 0.0) + room) / orders / step, initial=np.inf))
        for growth in (ups, downs)
    )
    width = max(high + low + 1, *(len(r.mass) for r in releases))
    # "not (good)": a window without an end is NaN or inf.
    if not (width <= _LARGEST and all(r.infinite < 1 for r in releases)):
        return math.inf
    size = gaussian.fast_length(math.ceil(width))
    losses = np.arange(math.floor(-low) + size, dtype=np.float64) * step
    # E (1 - e^(ε-L))+ <= E e^(cL) e^(-cε) max_y (1 - e^-y) e^(-cy): ε is somewhat below this.
    heights = ups - np.log1p(orders) - orders * np.log1p(1 / orders) - math.log(delta)
    near = float(np.nanmin(heights / orders))
    # About which part of δ is rounded.
    tilts = np.append(0.0, orders)
    rounded = np.exp(np.append(0.0, ups) - tilts * near) / np.sqrt(1 + tilts * step * size)
    rounded *= sum(counts) * _OF_NORM * _UNIT * math.log2(size) * math.sqrt(size) / delta
    enough, kind = np.flatnonzero(rounded <= _ROUNDED), np.float64
    if not enough.size or tilts[enough[0]] * longest > _STRONG:
        rounded, kind = rounded * (np.finfo(np.longdouble).eps / 2 / _UNIT), np.longdouble
        enough = np.flatnonzero(rounded <= _ROUNDED)
    first = int(enough[0] if enough.size else min(np.nanargmin(rounded) + 1, len(tilts) - 1))
    # The more tilt, the more of the masses lies above the window, and comes back at its lower end.
    # Each order gives a bound; less tilt is tried as long as it gains.
    found = math.inf
    for order in tilts[first::-1][:_TRIED]:
        before, c = found, float(order)
        found = min(found, _tilted(releases, counts, step, size, losses, c, delta, kind))
        if found > 0.999 * before:
            break
    return found


def _longest(releases: Sequence[LossMasses], step: float) -> float:
    """Return what no finite loss of one release exceeds in size."""
    return step * max(abs(r.low) + len(r.mass) for r in releases)


def _tilted(
    releases: Sequence[LossMasses],
    counts: Sequence[int],
    step: float,
    size: int,
    losses: FloatArray,
    order: float,
    delta: float,
    kind: type[np.floating[Any]],
) -> float:
    """Return ε at δ, composed with masses times e^(cL) of order c; see `compose`.

    size, kind: of the transform. losses: at the points of its window from 0 up, as losses below 0
    cost nothing at any ε >= 0.
    """
    masses, growth = list[FloatArray](), 0.0
    for release, count in zip(releases, counts, strict=True):
        mass = release.mass * np.exp(order * step * (release.low + np.arange(len(release.mass))))
        growth += count * math.log(total := float(mass.sum()))
        masses.append(mass / total)
    composed, lost = convolve(masses, counts, size, kind)
    # The transform holds a loss k at k - Σ t low, modulo its size.
    composed = np.roll(composed, sum(t * r.low for t, r in zip(counts, releases, strict=True)))
    infinite = math.fsum(t * r.infinite for t, r in zip(counts, releases, strict=True))
    longest = _longest(releases, step)
    found = _solve(
        np.maximum(composed[: len(losses)], 0.0),
        losses,
        delta - infinite,
        order=order,
        growth=growth + 2.0**-40 * (1 + abs(growth)),  # above the rounding of exponents
        # By Cauchy's inequality, as E (1 - e^(ε-L))+ is linear in the masses.
        slack=lost * float(np.linalg.norm(np.expm1(-losses) * np.exp(-order * losses))),
        part=_UNIT * sum(counts) * (8 + 4 * order * longest),
    )
    return found + sum(counts) * _PLACED * (1 + longest)


def convolve(
    masses: Sequence[FloatArray], counts: Sequence[int], size: int, kind: type[np.floating[Any]]
) -> tuple[FloatArray, float]:
    """Return the sum's masses, modulo size, of so many of each, whose masses sum to 1.

    And how far they may be off, as an l2 norm. kind: the floats to transform. A transform of n =
    size numbers is off by less than 16 log2(n) units of its own norm (Higham 2002, Theorem 24.2,
    has 7 for factors of 2; those of 3 and 5 take less than 11). And each of its numbers is off by
    less than 10 log2(n) units of the sum of all masses, which is less where few have most: on the
    way to it a mass is multiplied and added to others in as many steps (9 units for every factor of
    3, where numbers may be 1.4 times as large, are the most). As no number of a transform is above
    1, a power of one is off by no more than `count` times that, and by 3 units for every product.
    """
    wave: NDArray[Any] = np.ones(1)
    levels = math.log2(size)
    lost = _OF_NORM * levels
    for mass, count in zip(masses, counts, strict=True):
        wave = wave * _power(np.fft.rfft(mass.astype(kind), size), count)
        norm = float(np.linalg.norm(mass))
        lost += count * (min(_OF_NORM * norm, _OF_SUM) * levels + 4 * norm)
    # As computed: there are machines, and versions of numpy, without longer floats.
    lost *= float(np.finfo(wave.dtype).eps) / 2
    # What is off may be above 1, by √n of it at most, and so may be its powers.
    off = 1.1 * lost * math.exp(math.sqrt(size) * lost)
    return np.fft.irfft(wave, size).astype(np.float64), off


def _growth(
    releases: Sequence[LossMasses], counts: Sequence[int], step: float, orders: FloatArray
) -> FloatArray:
    """Return log E e^(λL) of all losses together for every order λ, √2 times the one before."""
    total = np.zeros(len(orders))
    for release, count in zip(releases, counts, strict=True):
        losses = (release.low + np.arange(len(release.mass))) * step
        for i in (0, 1):
            grown = np.exp(orders[i] * losses)
            for k in range(i, len(orders), 2):
                # Above what doublings, each of which doubles what was rounded, and the sum round.
                rounded = 2.0 ** (k // 2 - 50) + _UNIT * len(losses)
                total[k] += count * (np.log(grown @ release.mass) + rounded)
                # The next but one is twice this order.
                np.square(grown, out=grown)
    return total


def _power(wave: NDArray[Any], count: int) -> NDArray[Any]:
    """Return wave^count by squaring, much faster than the general power."""
    result: NDArray[Any] = np.ones(1)
    while count:
        if count & 1:
            result = result * wave
        count >>= 1
        wave = wave * wave if count else wave
    return result


def _solve(
    mass: FloatArray,
    losses: FloatArray,
    delta: float,
    *,
    order: float,
    growth: float,
    slack: float,
    part: float,
) -> float:
    """Return the least ε >= 0 with Σ mass e^(growth - c loss) (1 - e^(ε - loss))+ <= δ, order c.

    losses: from 0 up. part: by which part a mass may be too small. slack: what may be missing of
    Σ mass e^(c (ε - loss)) (1 - e^(ε - loss))+ at any ε.
    """
    # All sums are those of masses e^(c (ε - loss)): without tilt they would be no floats. So is δ.
    above, shrunk = (_discounted(mass, losses, rate) for rate in (order, order + 1))
    # Above the rounding of these sums, and of their exponents.
    part += _UNIT * (len(losses) + 2 * _BLOCK + 8 * (order + 1) * losses[-1])
    above, shrunk = (1 + part) * above + slack, (1 - part) * shrunk
    with np.errstate(all="ignore"):
        room = np.exp(math.log(delta) - growth + order * losses) if delta > 0 else 0 * losses
    within = np.flatnonzero(above - shrunk <= room)
    if not within.size:
        return math.inf
    # δ(ε) at this point is small enough, and at the one before it was not; so was its slack.
    i = int(within[0])
    missing = slack * np.expm1(order * (losses[i] - losses[max(i - 1, 0)]))
    left = float(above[i] + missing - room[i])
    ratio = float(np.divide(left, shrunk[i])) if i > 0 and left > 0 else 0.0
    found = float(losses[i]) + math.log(ratio) if ratio > 0 else -math.inf
    return min(found, float(losses[i])) if found >= 0 else float(losses[i])


def _discounted(mass: FloatArray, losses: FloatArray, rate: float) -> FloatArray:
    """Return Σ_{j >= i} mass_j e^(-rate (loss_j - loss_i)) at every i.

    By blocks that floats can hold.
    """
    found, above, scaled = np.empty_like(mass), 0.0, rate * losses
    blocks = int((scaled[-1] - scaled[0]) // _BLOCK) + 1
    begins = {bisect.bisect_left(scaled, scaled[0] + _BLOCK * i) for i in range(blocks)}
    for end, first in itertools.pairwise(sorted({*begins, len(losses)}, reverse=True)):
        here = scaled[first:end] - scaled[end - 1]
        summed = np.cumsum((mass[first:end] * np.exp(-here))[::-1])[::-1]
        found[first:end] = np.exp(here) * (summed + above)
        if first:
            above = float(found[first]) * math.exp(scaled[first - 1] - scaled[first])
    return found
