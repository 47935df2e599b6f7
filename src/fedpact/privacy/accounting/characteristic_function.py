"""ε of very many or very small releases, by an integral in place of a grid of losses.

The composed loss S = Σ L_k of Poisson-sampled Gaussians has the transform M(s) = E_P[e^(sS)], the
product of the releases' own, and for every c > 0

    δ(ε) = E_P[(1 - e^(ε-S))+] = 1/(2πi) ∫ e^(-sε) M(s) / (s (s+1)) ds    over Re s = c

(Alghamdi et al., "The saddle-point method in differential privacy", arXiv 2208.09595). A grid of
losses fails where one release's loss is small beside its largest values; here the error is relative
to M - 1, however small. With y = q (e^(z/σ - 1/(2σ²)) - 1) and z from N(0, 1), a release has
M(s) = E[(1+y)^(1+s)] where a record is removed, and E[(1+y)^(-s)] where it is added.

Why the answer is an upper bound, step by step; each δ is added to the one that is found:

Tails       Outcomes z beyond an interval count as lost where their losses are large, by their
            chance under P in all releases; where they are small, as having the loss at its end.
Smoothing   One plain Gaussian release with a small μ is composed with the history. More releases
            never cost less. It is chosen to add about 0.2 % of ε.
Trapezoids  The integral as a sum over u = kΔ, s = c + iu, is Σ_n e^(cnW) δ(ε + nW), W = 2π/Δ, by
            Poisson's summation formula: δ(ε) and aliases, none of which is negative.
Cut         |M(c + iu)| <= M(c) e^(-μ²u²/2), which bounds what lies beyond the last u.
Nodes       M(s) is found by the midpoint rule in z. The integrand is analytic for |Im z| < πσ, so
            its error is at most what `_error` bounds from the integrand beside the real line.
Rounding    By the usual bounds on sums and products, with room to spare.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedpact.privacy.accounting.gaussian import normal_cdf, special

FloatArray = NDArray[np.float64]
Term = tuple[float, float, int]  # q, σ, number of releases

_SMOOTHING: Final = 2e-3  # of ε, what the additional release costs
_TAILS: Final = 1e-4  # of δ
_NEGLIGIBLE: Final = 1e-9  # of the integrand, relative
_CUT: Final = 6.5  # μ times the largest u: exp(-6.5²/2) is below 1e-9
_MOST_NODES: Final = 2**16
_MOST_POINTS: Final = 2**18  # of the sum over u
_FAR: Final = 12.0  # an alias is below e^-12 of δ, about
_BEYOND: Final = 200.0  # how far an integrand is followed, deviations
_LOWER: Final = 8  # orders are tried, each 2^-½ of the one before
_GAIN: Final = 0.99  # until one finds no less than this of what is known
_NOTHING: Final = 2.0**-52 - 1.0  # of |M|² - 1: rounding alone may leave less
_LEAST_DELTA: Final = 1e-290
_BLOCK: Final = 1024
_HALF_LOG_2PI: Final = 0.5 * math.log(2 * math.pi)
_UNIT: Final = 2.0**-41  # a sum of a block's products is off by less, relative to its terms


def contour_epsilon(terms: Sequence[Term], delta: float) -> float:
    """Return an upper bound on the ε of all releases together at δ; inf where none is found.

    terms: (q, σ, count), q in (0, 1], 0.05 <= σ <= 1e100, count >= 1. Milliseconds to a second.
    """
    if delta < _LEAST_DELTA:
        return math.inf
    with np.errstate(all="ignore"):
        return max(_Order(terms, delta, removed).epsilon() for removed in (True, False))


class _Order:
    """A history in one order of its pairs: where a record is removed, or where it is added."""

    def __init__(self, terms: Sequence[Term], delta: float, removed: bool) -> None:
        self._plain = math.fsum(t / s**2 for q, s, t in terms if q == 1)
        count = sum(t for q, _, t in terms if q < 1)
        self._tails = min(_TAILS * delta, 1e-3 * _NEGLIGIBLE)
        share = self._tails / max(1, count)
        self._releases = [_Release(q, s, t, removed, share) for q, s, t in terms if q < 1]
        self._usable = delta - self._tails

    def epsilon(self) -> float:
        """Return ε at δ."""
        orders = self._orders()
        moments = np.array([self._plain * c * (c + 1) / 2 + self._about(c) for c in orders])
        # E_P[(1 - e^(ε-S))+] <= M(c) e^(-cε) max_y (1 - e^-y) e^(-cy)
        heights = moments - np.log1p(orders) - orders * np.log1p(1 / orders)
        heights -= math.log(self._usable)
        bounds = np.where(np.isfinite(heights), heights / orders, np.inf)
        proven, best = math.inf, int(np.argmin(bounds))
        most = float(bounds[best])
        if not most < math.inf:
            return math.inf
        # Each order is a bound. Of losses with heavy tails the one that the crude bound likes best
        # lies where M soon is infinite, and aliases weigh there.
        for place in range(best, max(0, best - _LOWER), -1):
            # Aliases: the one below by P <= 1, the one above by the bound of a larger order.
            c, larger = float(orders[place]), slice(place + 1, None)
            lower = (_FAR - math.log(self._usable)) / c
            above = (heights[larger] - orders[larger] * most / 2 + _FAR) / (orders[larger] - c)
            window = max(lower, float(above[np.isfinite(above)][:8].min(initial=8 * lower)))
            found = self._integrate(c, float(bounds[place]), window)
            if found > _GAIN * proven:
                return min(proven, found)
            proven = found
        return proven

    def _orders(self) -> FloatArray:
        """Return orders c around the one that serves a Gaussian of the same spread, and below."""
        spread = self._plain + sum(r.count * r.variance for r in self._releases)
        return math.sqrt(-2 * math.log(self._usable) / spread) * 2.0 ** (np.arange(-40, 7) / 2)

    def _about(self, c: float) -> float:
        return sum(r.count * r.about(c) for r in self._releases)

    def _integrate(self, c: float, most: float, window: float) -> float:
        proven, guess = math.inf, max(most, 1e-3 / c)
        for _ in range(4):
            # An additional N(μ²/2, μ²) adds μ² (c + 1)/2 to ε, about.
            smoothing = 2 * _SMOOTHING * guess / (c + 1)
            integral = _Integral(self._releases, self._plain, smoothing, c, window)
            found = integral.solve(self._usable, 2 * guess)
            proven = min(proven, found)
            # Where ε is far below the guess, the smoothing was too much.
            if found == 0 or not found < guess / 2:
                break
            guess = found
        return proven


class _Release:
    """Releases that are all alike, in one order: E[(1+y)^κ] with κ = 1 + s or -s."""

    def __init__(self, q: float, sigma: float, count: int, removed: bool, share: float) -> None:
        self.q, self.sigma, self.count, self.removed = q, sigma, count, removed
        exponent = sigma**-2
        self.variance = math.log1p(q**2 * math.expm1(exponent)) if exponent < 30 else 30.0
        # Where P leaves at most `share` of the largest losses; Φ(-x) <= exp(-x²/2)/2.
        reach = math.sqrt(max(1.0, -2 * math.log(share)))
        z: FloatArray = np.linspace(0.0, reach + 1 / sigma, 2000)
        self._start = float(z[np.argmax(self._beyond(z) <= share)])

    def _beyond(self, z: FloatArray) -> FloatArray:
        """Return P's mass of the outcomes whose losses are larger than that at distance z from 0.

        Where a record is removed these lie above z, where it is added below -z.
        """
        tail = special().ndtr(-z)
        if not self.removed:
            return tail
        return (1 - self.q) * tail + self.q * special().ndtr(1 / self.sigma - z)

    def loss(self, z: FloatArray) -> FloatArray:
        """Return log(1 + y)."""
        return np.log1p(self.q * np.expm1(z / self.sigma - 0.5 / self.sigma**2))

    def power(self, c: float) -> float:
        """Return Re κ."""
        return 1 + c if self.removed else -c

    def log_density(self, z: FloatArray, c: float) -> FloatArray:
        """Return the logarithm of the integrand at s = c."""
        return self.power(c) * self.loss(z) - z**2 / 2 - _HALF_LOG_2PI

    def interval(self, c: float) -> tuple[float, float] | None:
        """Return where to integrate; None where the integrand does not fall within reach.

        Both ends lie where it is negligible, the one with the large losses also beyond `_start`.
        """
        least = math.log(_NEGLIGIBLE / self.count)
        z = np.arange(0.0, _BEYOND, 0.05)
        starts = (0.0, self._start) if self.removed else (self._start, 0.0)
        ends = list[float]()
        for way, start in zip((-1, 1), starts, strict=True):
            fits = self.log_density(way * (start + z), c) <= least
            if not fits.any():
                return None
            ends.append(way * (start + float(z[np.argmax(fits)])))
        return ends[0], ends[1]

    def rest(self, low: float, high: float) -> tuple[float, float]:
        """Return P's mass beyond the end with the small losses, and the loss log(1+y) there."""
        end = low if self.removed else high
        mass = normal_cdf(-abs(end))
        if self.removed:
            mass = (1 - self.q) * mass + self.q * normal_cdf(end - 1 / self.sigma)
        return mass, float(self.loss(np.array([end]))[0])

    def about(self, c: float) -> float:
        """Return log E[(1+y)^κ] at s = c, nearly: to choose c by, not to prove anything."""
        interval = self.interval(c)
        if interval is None:
            return math.inf
        z = np.arange(*interval, 0.1 * min(1.0, self.sigma))
        density = np.exp(-(z**2) / 2 - _HALF_LOG_2PI) * (z[1] - z[0])
        return math.log1p(float(density @ np.expm1(self.power(c) * self.loss(z))))


@dataclass(frozen=True)
class _Nodes:
    """The midpoint rule for one kind of release: losses and tilted weights at the nodes.

    moment: E[(1+y)^κ] - 1 at s = c. size: E |L| there, what rounding is relative to. error: of
    every E[(1+y)^κ], Re s = c, |Im s| <= U.
    """

    losses: FloatArray
    weights: FloatArray
    moment: float
    size: float
    error: float

    @staticmethod
    def of(release: _Release, c: float, top: float) -> "_Nodes | None":
        """Return nodes for |Im s| <= top; None where there would be too many."""
        interval = release.interval(c)
        if interval is None:
            return None
        low, high = interval
        step, error = _step(release, c, top, low, high)
        number = math.ceil((high - low) / step) if step > 0 else _MOST_NODES + 1
        if number > _MOST_NODES:
            return None
        step = (high - low) / number
        z = low + (np.arange(number, dtype=np.float64) + 0.5) * step
        mass, loss = release.rest(low, high)
        sign = 1 if release.removed else -1
        losses = np.append(release.loss(z), loss)
        density = np.append(step * np.exp(-(z**2) / 2 - _HALF_LOG_2PI), mass)
        power = np.append(np.full(number, release.power(c)), sign * c)
        lifted = density * np.expm1(power * losses)
        weights = density * np.exp(power * losses)
        # z/σ - 1/(2σ²) is off by about 2^-52/σ².
        size = float(weights @ np.abs(losses)) + release.q / release.sigma**2
        error += _UNIT * (float(np.abs(lifted).sum()) + release.q / release.sigma**2)
        return _Nodes(sign * losses, weights, float(lifted.sum()), size, error)


def _step(release: _Release, c: float, top: float, low: float, high: float) -> tuple[float, float]:
    """Return the widest step of the midpoint rule whose error is negligible, and that error.

    The integrand f is analytic in |Im z| <= d = θσ for θ <= π/2, so that the rule over [a, b],
    whose ends are midpoints between nodes, is off by at most

        (∫ |f(x+id)| + |f(x-id)| dx) / (e^(2πd/h) - 1) + Σ_ends 2 ∫_0^d |f| e^(-2πy/h) dy

    With ω = q e^v / (1 - q + q e^v), v = z/σ - 1/(2σ²), at Im z = d: |φ| grows by e^(d²/2),
    |1+y|² = (1+y)² (1 - 4ω(1-ω) sin²(θ/2)), and |arg(1+y)| <= θ min(1, 2ω). Over a cell each
    factor is bounded by its largest value at the cell's ends.
    """
    edges: FloatArray = np.linspace(
        low, high, max(200, math.ceil((high - low) / min(0.05, release.sigma / 20)))
    )
    loss, power = release.loss(edges), release.power(c)
    omega = np.exp(edges / release.sigma - 0.5 / release.sigma**2 + math.log(release.q) - loss)
    bell = np.where(edges[:-1] * edges[1:] < 0, 0.0, np.minimum(edges[:-1] ** 2, edges[1:] ** 2))
    tilt = np.maximum(power * loss[:-1], power * loss[1:])
    cells = tilt - bell / 2 - _HALF_LOG_2PI + math.log(edges[1] - edges[0])
    turned, bent = np.minimum(1.0, 2 * omega[1:]), np.minimum(1.0, 4 * omega[1:])
    ends = np.exp(release.log_density(np.array([low, high]), c))
    best = (0.0, math.inf)
    for halvings in range(48):
        theta = math.pi / 2 * 2.0 ** (-halvings / 2)
        d = theta * release.sigma
        shrunk = -max(0.0, -power) / 2 * np.log1p(-bent * math.sin(theta / 2) ** 2)
        inside = float(special().logsumexp(cells + top * theta * turned + shrunk)) + d**2 / 2
        room = max(1.0, inside + math.log(4 * release.count / _NEGLIGIBLE))
        steps = [2 * math.pi * d / room]
        # At the ends |f| is to grow more slowly than e^(πy/h).
        steps.append(math.pi / (top * float(turned[-1]) / release.sigma + d / 2))
        step = min(steps)
        if step > best[0]:
            sides = 2 * step / math.pi * float(ends.sum()) * float(np.exp(shrunk.max()))
            turns = 2 * math.pi * d / step
            best = (step, 2 * float(np.exp(inside - turns)) / -math.expm1(-turns) + sides)
    return best


class _Integral:
    """The integral at one c, with all that it may lack: an upper bound on δ at every ε."""

    def __init__(
        self, releases: Sequence[_Release], plain: float, smoothing: float, c: float, window: float
    ) -> None:
        top = _CUT / math.sqrt(smoothing)
        self._side = math.ceil(math.sqrt(top * window / (2 * math.pi))) + 1
        self._found = self._side**2 <= _MOST_POINTS
        if not self._found:
            return
        self._c, self._step = c, 2 * math.pi / window
        nodes = [_Nodes.of(r, c, self._step * self._side**2) for r in releases]
        self._found = None not in nodes
        gaussian = plain + smoothing
        u = self._step * np.arange(self._side**2, dtype=np.float64).reshape(self._side, -1)
        real, turn = (c * (c + 1) - u**2) * gaussian / 2, (c + 0.5) * u * gaussian
        at_c, offset, slope = c * (c + 1) * gaussian / 2, 0.0, 0.0
        for release, node in zip(releases, nodes, strict=True):
            if node is None:
                return
            a, b = _moments(node, self._step, self._side)
            real += release.count / 2 * np.log1p(np.maximum(2 * a + a**2 + b**2, _NOTHING))
            turn += release.count * np.arctan2(b, 1 + a)
            at_c += release.count * math.log1p(node.moment)
            rounded = release.count / (1 + node.moment)
            offset += rounded * node.error
            slope += rounded * _UNIT * node.size
        below = 1j * u + c
        below = below * (below + 1)
        weights = np.full(u.shape, self._step / math.pi)
        weights[0, 0] /= 2
        self._values = weights * np.exp(real - at_c + 1j * turn) / below
        self._at_c, self._u = at_c, u
        # What the sum may be off by, relative to M(c) e^(-cε): rounding, and what is cut off.
        off = offset + slope * u + _UNIT * (1 + np.abs(real) + np.abs(turn))
        size = np.exp(-gaussian / 2 * u**2) / np.abs(below)
        self._off = float(np.sum(weights * size * np.expm1(off)))
        last = float(u[-1, -1])
        self._off += math.exp(-gaussian / 2 * last**2) / (math.pi * last)

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on δ at this ε."""
        rows = np.exp(-1j * epsilon * self._u[:, 0])
        columns = np.exp(-1j * epsilon * self._u[0])
        total = float((rows @ self._values @ columns).real)
        turned = _UNIT * epsilon * float(np.sum(np.abs(self._values) * self._u))
        return (total + self._off + turned) * float(np.exp(self._at_c - self._c * epsilon))

    def solve(self, delta: float, most: float) -> float:
        """Return an ε in [0, most] with δ(ε) <= delta, within 1e-6 of the least; inf if none is."""
        if not self._found:
            return math.inf
        if self.delta(0.0) <= delta:
            return 0.0
        if not self.delta(most) <= delta:
            return math.inf
        low, high = 0.0, most
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high


def _moments(nodes: _Nodes, step: float, side: int) -> tuple[FloatArray, FloatArray]:
    """Return real and imaginary part of E[(1+y)^κ] - 1 at s = c + iku, k = 0 .. side² - 1.

    [side, side]. With k = k1 side + k2 the factor e^(iuL) is a product of two, and the sum over
    nodes a product of matrices: e^(i(x+y)) - 1 = (e^ix - 1)(e^iy - 1) + (e^ix - 1) + (e^iy - 1).
    """
    total = np.zeros((side, side), dtype=np.complex128)
    for first in range(0, len(nodes.losses), _BLOCK):
        losses = nodes.losses[first : first + _BLOCK]
        weights = nodes.weights[first : first + _BLOCK]
        fine = _turn(np.outer(np.arange(side), step * losses))
        coarse = _turn(np.outer(np.arange(side), side * step * losses)) * weights
        total += coarse @ fine.T + coarse.sum(axis=1)[:, None] + (fine @ weights)[None, :]
    total += nodes.moment
    return total.real, total.imag


def _turn(angle: FloatArray) -> NDArray[np.complex128]:
    """Return e^(i angle) - 1."""
    return -2 * np.sin(angle / 2) ** 2 + 1j * np.sin(angle)
