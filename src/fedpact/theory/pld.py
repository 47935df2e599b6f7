"""Privacy loss distributions of Poisson-sampled Gaussians: the tight accountant.

dp-accounting discretises the privacy loss pessimistically by connecting the dots (Doroshenko,
Ghazi, Kamath, Kumar, Manurangsi. arXiv 2207.04380) and composes by FFT; ε is the larger one of the
two directions, add and remove. This module chooses the grid, keeps memory bounded and takes the
rounding of the FFT off δ, so that the answer stays an upper bound.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol, cast

import numpy as np

Term = tuple[float, float, int]  # q, σ, number of releases

# The grid is this much finer than the spread of one release's loss: then the variance it adds is
# below 1/1600 of what is there, and ε less than 0.1 % too large.
FINENESS: Final = 20.0
_LARGEST_SINGLE: Final = 2.0**16  # grid points of one release's distribution
_LARGEST_COMPOSED: Final = 2.0**20  # and of a composed one: 8 MiB
_BLOCK: Final = 4096
MOST_RELEASES: Final = 10**7  # beyond it epsilon answers inf; RDP serves there


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


def epsilon(terms: Sequence[Term], delta: float) -> float:
    """Return an upper bound on the ε of all releases together at δ; inf where none is found.

    terms: (q, σ, count) with count >= 1, each event once. Milliseconds to a second.
    """
    if not terms:
        return 0.0
    count = sum(t for _, _, t in terms)
    usable = delta - rounding(count)
    if count > MOST_RELEASES or usable <= 0:
        return math.inf
    if all(q == 1 for q, _, _ in terms):
        # Gaussians compose to one Gaussian, exactly.
        sigma = sum(t / s**2 for _, s, t in terms) ** -0.5
        terms = ((1.0, sigma, 1),)
    interval = grid_step(terms)
    try:
        with np.errstate(all="ignore"):
            value = _composed(terms, interval, usable)
    except (OverflowError, ValueError):
        return math.inf
    return value if value >= 0 else math.inf


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


def rounding(count: int) -> float:
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
