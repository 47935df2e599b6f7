"""Means and mean squares of a site's columns, released once with noise: what scales them.

A record's columns u_1, ..., u_m are in [-1, 1], by their declared ranges. It adds u_j and
u_j² - 1/2 to 2 m sums, together one vector of length

    sqrt(Σ_j u_j² + (u_j² - 1/2)²) = sqrt(Σ_j u_j⁴ + 1/4) <= sqrt(5 m / 4) =: Δ

as u_j <= 1. So the 2 m sums with noise N(0, σ² Δ²) in each are one Gaussian event at q = 1 with
multiplier σ, under add/remove of one record. What is added is rounded to multiples of 2^-20, and
whole numbers below 2^53 add without error: nothing else moves a sum.

Divided by the declared N_i and weighted by N_i c_i, c_i <= 1 of what is much louder than others
(`site_weight`), the sites' releases are Σ c_i (sums + noise) / Σ c_i N_i. From there on all is
post-processing: mean μ_j, deviation sqrt(max(v_j - μ_j², s, 2^-16)) with v_j the mean square and s
the noise's own deviation, as what lies below it is noise. A deviation that came out too small would
blow the column up.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fedpact.common import check
from fedpact.common.errors import PolicyRefused
from fedpact.common.randomness.seeded import Draws
from fedpact.privacy.accounting.accountant import Accountant, Budget, SampledGaussian
from fedpact.privacy.accounting.calibration import smallest_scale
from fedpact.privacy.terms import FullDataRelease

ChargeOnce = Callable[[SampledGaussian, tuple[str, ...]], None]
"""Writes an event down, and what it is for."""

_UNIT: Final = 2.0**-20
_SLACK: Final = 1 + 2.0**-18
_LEAST_VARIANCE: Final = 2.0**-16
_CHANNEL: Final = "moments"
# How many times as loud as the least loud a site may be, and still count in full.
_LOUDER: Final = 3.0
# No part is smaller, so that a sum of them is no 0 where it is rounded.
_LEAST_PART: Final = 2.0**-20
# Of half a range: more than most columns differ by.
_LOUD: Final = 0.3

_logger = logging.getLogger("fedpact")


def most_moved(columns: int) -> float:
    """Return Δ of m columns.

    >>> round(most_moved(5), 4)
    2.5
    """
    return math.sqrt(1.25 * columns) * _SLACK


def release(
    columns: int, budget: Budget, accountant: Accountant, share: float, times: int
) -> FullDataRelease:
    """Return the event of m columns that takes a share of a budget. times: how many are reserved.

    1 / σ² adds up over Gaussian releases, and is what a budget has: with σ_1 the noise at which one
    release alone would cost all of (ε, δ), σ = σ_1 / sqrt(share). share: in (0, 1). Raises
    InputError.
    """
    least = smallest_scale(budget, {SampledGaussian(1.0, 1.0): 1}, accountant)
    sigma = least / math.sqrt(check.positive(share=share))
    return FullDataRelease(
        "columns", {_CHANNEL: most_moved(columns)}, sigma, times, budget, accountant
    )


def covers(of: FullDataRelease, columns: int) -> bool:
    """Whether the event is that of so many columns."""
    return columns > 0 and of.bounds.get(_CHANNEL) == most_moved(columns)


def deviation(of: FullDataRelease) -> float:
    """Return the noise's standard deviation in each sum."""
    return of.sigma * of.bounds[_CHANNEL]


class Means(NamedTuple):
    """What a site releases of its columns.

    means: its released sums over N_i, float64 [2 m]. noise: the standard deviation of the noise in
    each sum, 0 for none. size: N_i. The last two are public.
    """

    means: Tensor
    noise: float
    size: float


def site_weight(noise: float, quiet: float) -> float:
    """Return c_i in (0, 1]: how much of its N_i records a site's means count for.

    noise: the deviation in its sums; quiet: in those of the site with least. Of unlike budgets a
    careful site's noise would be everybody's scale; beyond three times the least it counts by the
    inverse of its variance, as means of least variance do. Sites of like budgets count by their
    records, whatever their sizes: noise in a sum does not depend on these.

    >>> site_weight(1.0, 1.0), site_weight(3.0, 1.0), site_weight(24.0, 1.0), site_weight(0.0, 0.0)
    (1.0, 1.0, 0.015625, 1.0)
    """
    if noise <= _LOUDER * quiet:
        return 1.0
    return max((_LOUDER * quiet / noise) ** 2, _LEAST_PART)


def mean_noise(sites: Iterable[tuple[FullDataRelease | None, float]]) -> float:
    """Return the standard deviation of noise in the mean of all sites: of each its event and N_i.

    In halves of a column's range; 0 where no site releases any.
    """
    each = [(deviation(of), size) for of, size in sites if of is not None]
    quiet = min((noise for noise, _ in each), default=0.0)
    parts = [(site_weight(noise, quiet), noise, size) for noise, size in each]
    whole = sum(c * n for c, _, n in parts)
    return math.hypot(*(c * noise for c, noise, _ in parts)) / whole if parts else 0.0


def advise_of_loud(origin: str, sites: Iterable[tuple[FullDataRelease | None, float]]) -> None:
    """Warn where noise moves released means by more than columns differ. origin: of the warning."""
    if (far := mean_noise(sites)) > _LOUD:
        _logger.warning(
            f"{origin}: noise moves the released mean of a column by {far:.2g} of half its range, "
            "more than columns differ, so what scales them is noise, and a model may do no better "
            'than chance: declare mean and deviation with scale = "standard", or scale = "range" '
            "alone; a larger ε, more records, fewer released columns or a larger "
            "privacy.column_share make noise less"
        )


def answer_columns(
    of: FullDataRelease | None, u: Tensor, size: float, charge: ChargeOnce | None, draws: Draws
) -> Means:
    """Return Oracle.columns of records u [n, m]; size: N_i. Raises PolicyRefused: no such release.

    Raises what `charge` raises.
    """
    # The bound is that of so many columns; the sums of more would be farther apart.
    if of is None or charge is None or not covers(of, u.shape[1]):
        raise PolicyRefused(
            f"what scales {u.shape[1]} columns was asked for: this run has {of} for the site"
        )
    found = of.release(charge, lambda: {_CHANNEL: sums(u)}, draws)[_CHANNEL]
    return Means(found / size, deviation(of), size)


def sums(u: Tensor) -> Tensor:
    """Return Σ u_j, then Σ (u_j² - 1/2), of records u [n, m]: float64 [2 m] on the CPU.

    What is beyond [-1, 1] counts as the nearer end, and what is no number as 0.
    """
    u = u.double().nan_to_num(0.0).clamp(-1, 1)
    u = (u / _UNIT).round()
    squares = ((u * _UNIT).square() - 0.5) / _UNIT
    return torch.cat([u.sum(0), squares.round().sum(0)]).cpu() * _UNIT


def constants(means: Tensor, noise: float) -> Tensor:
    """Return μ, then the deviations, float64 [2 m], from the released means [2 m] of `sums`.

    noise: the standard deviation of the means' noise; 0 for none.
    """
    mean, square = means.double().chunk(2)
    mean = mean.clamp(-1, 1)
    least = max(check.non_negative(noise=noise), _LEAST_VARIANCE)
    variance = (square + 0.5 - mean.square()).clamp(least, 1.0 if least < 1 else least)
    return torch.cat([mean, variance.sqrt()])


def scale_columns(x: Tensor, columns: Sequence[int], by: Tensor) -> Tensor:
    """Return records x [n, d] with (u - μ) / deviation in the place of these columns.

    by: what `constants` returned.
    """
    mean, deviation = by.to(x.device).double().chunk(2)
    at = torch.tensor(columns, device=x.device)
    found = x.clone()
    found[:, at] = ((x[:, at].double() - mean) / deviation).to(x.dtype)
    return found
