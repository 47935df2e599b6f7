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
That is the proof, up to z itself, a float64 that is off by 5e-16 of its pair's length r at most.
That moves both ends of the interval that is rounded to a value, and so the value's probability: by
1.5e-8 r of itself or less for sqrt(d) σ up to 1e4, up and down from value to value. Behind every
pair stand 104 random bits, and more where r > 4, so that the tail has no end. The grid costs 0.1 %
more noise. Zero is released with one sign, whatever was added to make it, as -0.0 would be a number
of its own.

Not covered: errors of the float32 sum s itself (the clip's slack bounds each record's share, not
the rounding of the others), and how long anything takes.
"""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fedpact.check import positive
from fedpact.draws.keystream import CHUNK
from fedpact.draws.seeded import empty
from fedpact.errors import InputError, PrivacyError
from fedpact.params import on_cpu, sent

_COARSENESS: Final = 2.0**-10
# Of a smaller Λ 1/Λ is infinite, and times 0 no number: whether a sum is 0 would be seen.
_FINEST: Final = 2.0**-1022

Gaussian = Callable[[int, Tensor], Tensor]
"""(size, like) -> `size` standard normal numbers of the type of `like`, new ones at every call.

They may be written over, by whoever asked for them and by the thread's next call.
"""


def spacing(sensitivity: float, size: int) -> float:
    """Return Λ: the largest power of 2 with Λ sqrt(size) <= 2^-10 sensitivity.

    >>> spacing(1.0, 1)
    0.0009765625
    """
    limit = positive(sensitivity=sensitivity) * _COARSENESS / math.sqrt(max(1, size))
    if limit < _FINEST:
        raise InputError(
            f"sensitivity is {sensitivity!r}: expected a number whose share for {size} coordinates "
            "has a reciprocal, as 2^-100 to 2^100 have; scale loss or weights"
        )
    return math.ldexp(1.0, math.frexp(limit)[1] - 1)


def noisy(total: Tensor, sigma: float, sensitivity: float, gaussian: Gaussian) -> Tensor:
    """Return total [d] plus normal noise of σ times its sensitivity, added on the grid.

    gaussian is called for part after part, on as many threads as torch may use, for float64 numbers
    on the CPU. The result has the total's type and device: rounding it to that type uses nothing
    but the release.
    Raises InputError: sigma or sensitivity is not a finite number > 0. PrivacyError: gaussian
    returns the same numbers twice.
    """
    step = spacing(sensitivity, total.numel())
    scale = positive(sigma=sigma) * (sensitivity + step * math.sqrt(total.numel())) / step
    sums = total.detach()
    if on_cpu(sums):
        return _added(sums, step, scale, gaussian)
    # The noise goes to a GPU, which need not be waited for.
    noise = _added(torch.zeros(len(sums), dtype=torch.float64), step, scale, gaussian)
    release = (sums.double() * (1 / step)).round_().mul_(step)
    return release.add_(sent(noise, sums.device)).add_(0.0).to(sums.dtype)


def _added(sums: Tensor, step: float, scale: float, gaussian: Gaussian) -> Tensor:
    """Return step (round(s / step) + round(scale z)) for sums s [d] on the CPU."""
    release = empty(len(sums), sums.dtype)
    source, target = sums.numpy(), release.numpy()
    like = torch.empty(0, dtype=torch.float64)

    def add(starts: Sequence[int]) -> list[float]:
        room, firsts = np.empty(size), list[float]()
        for start in starts:
            part = slice(start, start + size)
            whole = room[: len(source[part])]
            noise = gaussian(len(whole), like).numpy()
            firsts.append(float(noise[0]))
            # Powers of 2 scale without error, and whole numbers below 2^53 add without one.
            np.copyto(whole, source[part])
            whole *= 1 / step
            np.rint(whole, out=whole)
            noise *= scale
            whole += np.rint(noise, out=noise)
            # Where both are -0.0 so is their sum, which a positive sum would not have given.
            whole += 0.0
            whole *= step
            np.copyto(target[part], whole, casting="same_kind")
        return firsts

    size, shares = _shares(len(source))
    # The caller takes a share itself: of two threads that wake at once, the system often puts both
    # on one core.
    others = [_pool(len(shares) - 1).submit(add, share) for share in shares[1:]]
    firsts = add(shares[0]) + [first for other in others for first in other.result()]
    if len(set(firsts)) < len(firsts):
        raise PrivacyError(
            f"the noise for {len(sums)} coordinates repeats itself: expected draws that are "
            "new at every call, as draws.secure.SecureDraws are; a simulation's need no grid"
        )
    return release


def _shares(length: int) -> tuple[int, list[range]]:
    """Return the size of a part, and where each thread's parts begin: as many for each of them."""
    least = max(1, math.ceil(length / CHUNK))
    threads = min(torch.get_num_threads(), least)
    size = max(1, math.ceil(length / (threads * math.ceil(least / threads))))
    return size, [range(0, length, size)[i::threads] for i in range(threads)]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return threads that stay: each of them has a key and room that it would have to get anew."""
    return ThreadPoolExecutor(threads, "noise")


if hasattr(os, "register_at_fork"):
    # Threads do not live on in a fork.
    os.register_at_fork(after_in_child=_pool.cache_clear)
