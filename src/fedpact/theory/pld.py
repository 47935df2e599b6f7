"""Privacy loss distributions of Poisson-sampled Gaussians: the tight accountant.

dp-accounting discretises the privacy loss pessimistically by connecting the dots (Doroshenko,
Ghazi, Kamath, Kumar, Manurangsi. arXiv 2207.04380) and composes by FFT; ε is the larger one of the
two directions, add and remove. This module chooses the grid, keeps memory bounded and takes the
rounding of the FFT off δ, so that the answer stays an upper bound. Where no grid that fits into
memory is fine enough, as for millions of releases at a tiny rate, the loss is composed by its
transform instead (theory.contour); plain Gaussians are one Gaussian (theory.gaussian). Each is an
upper bound for its own reasons, which its module gives.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol, cast

import numpy as np

from fedpact.theory import contour, gaussian

Term = tuple[float, float, int]  # q, σ, number of releases

# The grid is this much finer than the spread of one release's loss: then the variance it adds is
# below 1/1600 of what is there, and ε less than 0.1 % too large.
FINENESS: Final = 20.0
_LARGEST_SINGLE: Final = 2.0**16  # grid points of one release's distribution
_LARGEST_COMPOSED: Final = 2.0**20  # and of a composed one: 8 MiB
_BLOCK: Final = 4096
# Beyond these numbers squares vanish; what lies there is priced as if it lay here.
_LEAST_RATE: Final = 1e-60
_LARGEST_SIGMA: Final = 1e60
# Below this σ a batch with the record has a loss beyond 40 + log q but for a chance of 1e-14.
_LEAST_SIGMA: Final = 0.05
_MOST_ON_A_GRID: Final = 10**7
_GRIDS: Final = (1e-6, 1e9)  # no grid is tried for other σ


class _Distribution(Protocol):
    """What is used of dp-accounting's PrivacyLossDistribution."""

    def self_compose(self, num_times: int) -> "_Distribution": ...
    def compose(self, privacy_loss_distribution: "_Distribution") -> "_Distribution": ...
    def get_epsilon_for_delta(self, delta: float) -> float: ...
    def get_delta_for_epsilon(self, epsilon: float) -> float: ...


class _Library(Protocol):
    def from_gaussian_mechanism(
        self,
        standard_deviation: float,
        *,
        value_discretization_interval: float,
        sampling_prob: float,
    ) -> _Distribution: ...


def pld_epsilon(terms: Sequence[Term], delta: float) -> float:
    """Return an upper bound on the ε of all releases together at δ; inf where none is found.

    terms: (q, σ, count) with count >= 1, each event once. Milliseconds to a second.
    """
    if not terms:
        return 0.0
    if all(q == 1 for q, _, _ in terms):
        return _at_full_rate(terms, delta)
    if participation_probability(terms) <= delta:
        return 0.0
    terms = [round_up_term(*term) for term in terms]
    loud = [term for term in terms if term[1] >= _LEAST_SIGMA]
    found = _found(terms, delta)
    return found if len(loud) == len(terms) else min(found, _with_faint(terms, loud, delta))


def _at_full_rate(terms: Sequence[Term], delta: float) -> float:
    return gaussian.gaussian_epsilon(math.hypot(*(math.sqrt(t) / s for _, s, t in terms)), delta)


def _found(terms: Sequence[Term], delta: float) -> float:
    if not is_resolved(terms, delta) and all(s >= _LEAST_SIGMA for _, s, _ in terms):
        found = contour.contour_epsilon(terms, delta)
        if found < math.inf:
            return found
    if not _on_a_grid(terms):
        # ε grows with q.
        return _at_full_rate(terms, delta)
    usable = delta - fft_rounding(sum(t for *_, t in terms))
    if usable <= 0:
        return math.inf
    try:
        with np.errstate(all="ignore"):
            value = _composed(terms, grid_step(terms), usable)
    except (OverflowError, ValueError, MemoryError):
        return math.inf
    return value if value >= 0 else math.inf


def _with_faint(terms: Sequence[Term], loud: Sequence[Term], delta: float) -> float:
    """Return the bound where releases with hardly any noise count as having none at all.

    Noise is post-processing, so none at all costs no less. Without it a batch that has the record
    tells so: with probability 1 - Π (1-q)^t in all. Where it has not, a record that is added shows
    by the loss -Σ t log(1-q), and one that is removed by no more.
    """
    faint = [term for term in terms if term[1] < _LEAST_SIGMA]
    if any(q == 1 for q, *_ in faint):
        return math.inf
    loss = -math.fsum(t * math.log1p(-q) for q, _, t in faint)
    left = delta - participation_probability(faint)
    if not left > 0:
        return math.inf
    return (1 + 2.0**-45) * loss + pld_epsilon(loud, left)


def _on_a_grid(terms: Sequence[Term]) -> bool:
    few = sum(t for *_, t in terms) <= _MOST_ON_A_GRID
    return few and all(_GRIDS[0] <= s <= _GRIDS[1] for _, s, _ in terms)


def participation_probability(terms: Sequence[Term]) -> float:
    """Return the chance that a record is in any batch, rounded up: no δ has to be larger."""
    if any(q == 1 for q, *_ in terms):
        return 1.0
    return -math.expm1(math.fsum(t * math.log1p(-q) for q, _, t in terms)) * (1 + 2.0**-45)


def round_up_term(q: float, sigma: float, count: int) -> Term:
    """Return a term no cheaper than this one whose squares are numbers.

    ε grows with q and falls with σ.
    """
    return max(q, _LEAST_RATE), min(sigma, _LARGEST_SIGMA), count


def is_resolved(terms: Sequence[Term], delta: float, fineness: float = FINENESS) -> bool:
    """Return whether a grid serves: one fine beside a release's loss, and no rounding to speak of.

    Else theory.contour does. terms as `round_up_term`.
    """
    count = sum(t for *_, t in terms)
    if not _on_a_grid(terms) or fft_rounding(count) > 0.01 * delta:
        return False
    variance = sum(t * loss_spread(q, s) ** 2 for q, s, t in terms)
    return grid_step(terms, fineness) <= math.sqrt(variance / count) / fineness


def _composed(terms: Sequence[Term], interval: float, delta: float) -> float:
    total: _Distribution | None = None
    for q, sigma, count in terms:
        one = _single(q, sigma, interval)
        many = _repeated(one, count)
        total = many if total is None else total.compose(many)
    if total is None or float(total.get_delta_for_epsilon(0.0)) <= delta:
        return 0.0
    return float(total.get_epsilon_for_delta(delta))


def _repeated(one: _Distribution, count: int) -> _Distribution:
    """Compose in blocks: the library's bounds on a sum's tails are tight for few terms only."""
    if count == 1:
        return one
    if count <= _BLOCK:
        return one.self_compose(count)
    blocks, rest = divmod(count, _BLOCK)
    many = _repeated(one.self_compose(_BLOCK), blocks)
    return many.compose(_repeated(one, rest)) if rest else many


@lru_cache(maxsize=32)
def _single(q: float, sigma: float, interval: float) -> _Distribution:
    # It takes longer to import than all the rest of an answer, and RDP alone does without it.
    from dp_accounting.pld import (  # pyright: ignore[reportMissingTypeStubs]
        privacy_loss_distribution as library,
    )

    return cast(_Library, library).from_gaussian_mechanism(
        sigma, value_discretization_interval=interval, sampling_prob=q
    )


def fft_rounding(count: int) -> float:
    """Return what the rounding of the FFTs may add to or take from δ.

    The relative error of a transform's `count`-th power is about count + log2(size) units in the
    last place. Against the closed form at q = 1 the error stays a thousand times below this.
    """
    return (count + 64) * 2.0**-52


def grid_step(terms: Sequence[Term], fineness: float = FINENESS) -> float:
    """Return the grid's step: fine beside the loss of one release, coarser where memory ends."""
    count = sum(t for _, _, t in terms)
    variance = sum(t * loss_spread(q, s) ** 2 for q, s, t in terms)
    reach = max(_loss_range(q, s) for q, s, _ in terms)
    step = max(
        # The library takes differences of δ: each grid point gains about 2^-52 / step of mass, and
        # all points of all releases together are to gain less than 1.
        math.sqrt(count * reach * 2.0**-50),
        math.sqrt(variance / count) / fineness,
        reach / _LARGEST_SINGLE,
        (reach + 24 * math.sqrt(variance)) / _LARGEST_COMPOSED,
    )
    # Steps from a geometric grid, so that histories that differ little share distributions.
    return 2.0 ** (math.floor(8 * math.log2(step)) / 8)


def loss_spread(q: float, sigma: float) -> float:
    """Return the root of the Rényi divergence of order 2: for small losses, their deviation."""
    exponent = sigma**-2
    if exponent < 30:
        return math.sqrt(math.log1p(q**2 * math.expm1(exponent)))
    return math.sqrt(float(np.logaddexp(0.0, 2 * math.log(q) + exponent)))


def _loss_range(q: float, sigma: float) -> float:
    """Return the width of the losses within ten deviations of the noise."""
    rest = math.log1p(-q) if q < 1 else -math.inf
    high = float(np.logaddexp(rest, math.log(q) + 10 / sigma + 0.5 / sigma**2))
    low = float(np.logaddexp(rest, math.log(q) - 10 / sigma - 1.5 / sigma**2))
    return max(high - low, 10 * loss_spread(q, sigma))
