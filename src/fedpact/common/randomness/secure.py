"""Cryptographically secure random numbers, and Gaussian noise on a grid.

The attack (Mironov 2012; on Gaussian noise and DP-SGD: Jin, McMurtry, Rubinstein, Ohrimenko, arXiv
2112.05307): σ C z takes only some floating-point values, so sum + σ C z and another sum's noisy
value have different possible values. One coordinate that only one of two sums can produce
distinguishes them, whatever ε. Averaging several normal numbers (Holohan & Braghin 2021) hides z,
but σ C z and the sum are still rounded, so gaps remain (Haney et al., arXiv 2207.13793). Therefore
both are rounded to multiples of a spacing Λ, and added exactly, as integers:

    release = Λ (round(s / Λ) + round(ν z / Λ)),   ν = σ (Δ + Λ sqrt(d)),   Λ sqrt(d) <= 2^-10 Δ

The sum s [d] has sensitivity Δ, and at most Δ + Λ sqrt(d) on the grid, as rounding changes a
coordinate by at most Λ/2. Adding a multiple of Λ commutes with rounding, so the release equals
(grid sum + ν z) rounded: post-processing of a Gaussian mechanism with multiplier σ. The proof is
exact up to z itself, a float64 with an error of at most 5e-16 of its pair's length r. This shifts
the ends of the interval that is rounded to a value, and changes the value's probability by a
relative 1.5e-8 r or less for sqrt(d) σ up to 1e4. Every pair has 104 random bits, and more if
r > 4, so the tail is unbounded. The grid costs 0.1 % more noise. Zero is always released with a
positive sign, as -0.0 would be a distinguishable value.

Not covered: errors of the float32 sum s itself (the clip's slack bounds each record's part, not the
rounding of the others), and timing.

Each thread of each object has its own key from the operating system, and a new one after 8 GiB or a
fork; objects can be neither copied nor pickled. So no part of a key stream is used twice. (It would
be, if a snapshot of a running virtual machine were started twice: never do this during a run.)

Noise is drawn in float64 for either type, with its full tail (see keystream), which the grid needs.
Noise for long vectors is drawn by as many threads as torch may use in the calling thread.
"""

import math
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final, NoReturn

import numpy as np
import torch
from torch import Tensor

from fedpact.common.check import positive
from fedpact.common.errors import InputError, PrivacyError
from fedpact.common.params import copy_to_device, on_cpu
from fedpact.common.randomness.keystream import CHUNK, KeyStream, Parts, Words, normals
from fedpact.common.randomness.seeded import Draws, empty

_COARSENESS: Final = 2.0**-10
# For a smaller Λ, 1/Λ is infinite, and 0 times it is NaN, which would reveal that a sum is 0.
_FINEST: Final = 2.0**-1022

Gaussian = Callable[[int, Tensor], Tensor]
"""(size, like) -> `size` new standard normal numbers of the type of `like`.

The caller may overwrite them, and the thread's next call does.
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

    gaussian is called for chunks, on as many threads as torch may use, for float64 numbers on the
    CPU. The result has the total's type and device; rounding to that type is post-processing.
    Raises InputError: sigma or sensitivity is not a finite number > 0. PrivacyError: gaussian
    returns the same numbers twice.
    """
    step = spacing(sensitivity, total.numel())
    scale = positive(sigma=sigma) * (sensitivity + step * math.sqrt(total.numel())) / step
    sums = total.detach()
    if on_cpu(sums):
        return _add(sums, step, scale, gaussian)
    # The noise goes to a GPU, which need not be waited for.
    noise = _add(torch.zeros(len(sums), dtype=torch.float64), step, scale, gaussian)
    release = (sums.double() * (1 / step)).round_().mul_(step)
    return release.add_(copy_to_device(noise, sums.device)).add_(0.0).to(sums.dtype)


def _add(sums: Tensor, step: float, scale: float, gaussian: Gaussian) -> Tensor:
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
            # -0.0 + -0.0 is -0.0; adding 0.0 makes every zero positive.
            whole += 0.0
            whole *= step
            np.copyto(target[part], whole, casting="same_kind")
        return firsts

    size, shares = _shares(len(source))
    # The caller does a share itself: two threads that wake at once often land on one core.
    others = [_pool(len(shares) - 1).submit(add, share) for share in shares[1:]]
    firsts = add(shares[0]) + [first for other in others for first in other.result()]
    if len(set(firsts)) < len(firsts):
        raise PrivacyError(
            f"the noise for {len(sums)} coordinates repeats itself: expected new random numbers at "
            "every call, as from SecureDraws"
        )
    return release


def _shares(length: int) -> tuple[int, list[range]]:
    """Return the size of a chunk, and where the chunks of each thread begin."""
    least = max(1, math.ceil(length / CHUNK))
    threads = min(torch.get_num_threads(), least)
    size = max(1, math.ceil(length / (threads * math.ceil(least / threads))))
    return size, [range(0, length, size)[i::threads] for i in range(threads)]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return a lasting pool, as every new thread would need a key and memory."""
    return ThreadPoolExecutor(threads, "noise")


# Words per key: 8 GiB, an eighth of what the counter allows.
_KEY_LASTS: Final = 1 << 30

_forks = 0


def _start_child() -> None:
    global _forks
    _forks += 1
    # Threads do not survive a fork.
    _pool.cache_clear()


os.register_at_fork(after_in_child=_start_child)


class FreshStream(KeyStream):
    """Uniform words of 64 bits, each used once, for one thread."""

    def __init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        self.rekey(secrets.token_bytes(32))
        self._left, self._process = _KEY_LASTS, (os.getpid(), _forks)

    def words(self, count: int) -> Words:
        """Return uint64 [count], count <= CHUNK, to be written over by whoever asked."""
        if count > self._left or self._process != (os.getpid(), _forks):
            self._renew()
        self._left -= count
        return super().words(count)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key stream is never copied: its copy would draw the same noise again")


def _further(count: int) -> Words:
    """Return `count` random words, in other memory than the stream's last words."""
    return np.frombuffer(bytearray(secrets.token_bytes(8 * count)), dtype=np.uint64)


class _OfThread(threading.local):
    """Each thread's own stream."""

    def __init__(self) -> None:
        self.stream = FreshStream()


class SecureDraws(Draws):
    """Random numbers for a deployment, new at every call. Threads may share an object."""

    repeats = False

    def __init__(self) -> None:
        self._own = _OfThread()

    def __reduce__(self) -> NoReturn:
        raise TypeError("SecureDraws are never copied: create a new object, with its own key")

    def _words(self, kind: str, step: int) -> FreshStream:
        del kind, step
        return self._own.stream

    def add_noise(
        self, total: Tensor, sigma: float, sensitivity: float, step: int, purpose: str
    ) -> Tensor:
        """Return total [d] plus normal noise of σ times its sensitivity, on the grid; total may be
        overwritten."""
        del step, purpose
        return noisy(total, sigma, sensitivity, self._part)

    def _part(self, size: int, like: Tensor) -> Tensor:
        """Return at most CHUNK numbers of `gaussian`."""
        del like
        return next(normals(self._own.stream, size, torch.float64, _further))[1]

    def _parts(self, vector: Tensor, step: int, purpose: str) -> Parts:
        del step, purpose
        parts = normals(self._own.stream, len(vector), torch.float64, _further)
        return ((part, copy_to_device(z, vector.device)) for part, z in parts)
