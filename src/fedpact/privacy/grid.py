"""A noisy sum that floating-point arithmetic cannot betray: on a grid, where addition is exact.

The attack (Mironov 2012; on Gaussian noise and DP-SGD: Jin, McMurtry, Rubinstein, Ohrimenko, arXiv
2112.05307): σ C z has few of the floating-point numbers as values, and sum + σ C z others than
another sum's. One coordinate that only one of two sums can explain tells them apart, whatever ε.
Averaging several normal numbers (Holohan & Braghin 2021) hides z, but σ C z and the sum are
rounded as before, so the gaps stay (Haney et al., arXiv 2207.13793). So both are rounded, to
multiples of one spacing Λ, and added exactly, as whole numbers:

    release = Λ (round(s / Λ) + round(ν z / Λ)),   ν = σ (Δ + Λ sqrt(d)),   Λ sqrt(d) <= 2^-10 Δ

The sum s [d] has sensitivity Δ; on the grid it has at most Δ + Λ sqrt(d), as rounding moves a
coordinate by at most Λ/2. A sum on the grid commutes with rounding, so the release is exactly what
rounding makes of (grid sum + ν z): post-processing of a Gaussian mechanism with multiplier σ.
That is the proof, up to z itself: 117 bits stand behind each pair, and its relative error of 1e-15
moves the probability of a value by 1e-7 of itself or less, for sqrt(d) σ up to 1e4. It costs
0.1 % more noise.

Not covered: errors of the float32 sum s itself (the clip's slack bounds each record's share, not
the rounding of the others), and how long anything takes.
"""

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from fedpact.check import positive

_COARSENESS: Final = 2.0**-10
# Numbers that are worked on at once: they stay in the cache.
_CHUNK: Final = 1 << 15


def spacing(sensitivity: float, size: int) -> float:
    """Return Λ: the largest power of 2 with Λ sqrt(size) <= 2^-10 sensitivity.

    >>> spacing(1.0, 1)
    0.0009765625
    """
    limit = positive(sensitivity=sensitivity) * _COARSENESS / math.sqrt(max(1, size))
    return math.ldexp(1.0, math.frexp(limit)[1] - 1)


def noisy(
    total: Tensor, sigma: float, sensitivity: float, gaussian: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Return total [d] plus normal noise of σ times its sensitivity, added on the grid.

    gaussian(size, like) returns standard normal numbers, here float64. The result has the total's
    type: rounding it to that type uses nothing but the release.
    Raises InputError: sigma or sensitivity is not a finite number > 0.
    """
    step = spacing(sensitivity, total.numel())
    scale = positive(sigma=sigma) * (sensitivity + step * math.sqrt(total.numel()))
    like = torch.empty(0, dtype=torch.float64, device=total.device)
    noise = gaussian(total.numel(), like)
    release = torch.empty_like(total)
    for start in range(0, total.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        # Powers of 2 scale without error, and whole numbers below 2^53 add without one.
        whole = noise[part].mul_(scale).mul_(1 / step).round_()
        release[part] = whole.add_((total[part].double() * (1 / step)).round_()).mul_(step)
    return release
