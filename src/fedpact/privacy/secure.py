"""Randomness for a deployment: nobody can foretell it, and no two calls draw the same.

Bits are AES-256's in counter mode: what GCM (NIST SP 800-38D) makes of zeros, as processors do
that fastest. Each thread of each object has a key of the operating system's of its own, and a new
one after 8 GiB or a fork; an object can be neither copied nor pickled. So no stretch of a key
stream is used twice. (A snapshot of a running virtual machine that is started twice would: make
none of a site in a run.)

Batches compare whole multiples of 2^-53 with the rate: a record is in with probability
floor(2^53 q) 2^-53, at most q. Noise is Box and Muller's, in float64 for either type:

    r = sqrt(-2 ln U),  z = r cos Θ and r sin Θ,   U = (2k + 1) 2^-53 for one of 2^52 whole k
    with t = tan(Θ/2):  cos Θ = 2/(1 + t²) - 1,  sin Θ = t · 2/(1 + t²),   2^52 equal steps of Θ

U is never 0 or 1, so no number is infinite; |z| <= 8.58, beyond which a normal number lies with
probability 1e-17. 32 bits would end at 6.7: with a million coordinates and a thousand releases
a normal number beyond that is a matter of course, and its absence would cost part of δ.

Floating-point attacks (Mironov 2012) are `grid`'s to defend against; it needs the float64.
"""

import math
import os
import secrets
import threading
from typing import Final, NoReturn

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from fedpact.privacy import grid
from fedpact.privacy.noise import empty, from_numpy

# Numbers that are worked on at once: with their intermediate results they stay in the cache.
CHUNK: Final = 1 << 15
# Of one key, in words: 8 GiB, where GCM's counter would end at 64.
_KEY_LASTS: Final = 1 << 30
# The upper 12 bits of a float64 in [1, 2); the others are then uniform there.
_ONE: Final = np.uint64(0x3FF0_0000_0000_0000)
# numpy's own logarithm and tangent of float64 are vectorised with AVX-512 only, torch's always.
_NUMPY_IS_FAST: Final = torch.backends.cpu.get_cpu_capability() == "AVX512"

_Words = NDArray[np.uint64]
_Floats = NDArray[np.float64]

_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class KeyStream:
    """Uniform words of 64 bits that never come again, for one thread."""

    def __init__(self) -> None:
        self._zeros = memoryview(bytes(8 * CHUNK))
        # The cipher wants room for one more block than it writes.
        self._bytes = bytearray(8 * CHUNK + 16)
        self._words = np.frombuffer(self._bytes, dtype=np.uint64, count=CHUNK)
        self._rekey()

    def _rekey(self) -> None:
        # The key is used once, so any fixed nonce will do.
        cipher = Cipher(algorithms.AES(secrets.token_bytes(32)), modes.GCM(bytes(12)))
        self._encryptor, self._left = cipher.encryptor(), _KEY_LASTS
        self._process = (os.getpid(), _forks)

    def words(self, count: int) -> _Words:
        """Return uint64 [count], count <= 2^15: a view that the next call writes over."""
        if count > self._left or self._process != (os.getpid(), _forks):
            self._rekey()
        self._left -= count
        self._encryptor.update_into(self._zeros[: 8 * count], self._bytes)
        return self._words[:count]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key stream is never copied: its copy would draw the same noise again")


class _OfThread(threading.local):
    """What each thread has for itself: a key stream, and room for intermediate results."""

    def __init__(self) -> None:
        self.stream = KeyStream()
        self.room = np.empty((2, CHUNK // 2))


class SecureDraws:
    """See noise.Draws: draws for a deployment. Threads may share an object."""

    repeats = False

    def __init__(self) -> None:
        self._own = _OfThread()

    def __reduce__(self) -> NoReturn:
        raise TypeError("SecureDraws are never copied: make new ones, with a key of their own")

    def batch(self, records: int, rate: float, step: int) -> Tensor:
        """See Draws. Rate 1 takes every record and draws nothing."""
        del step
        if rate == 1:
            return torch.arange(records)
        # 2^53 rate is exact, and so is comparing it with whole numbers up to 2^53.
        limit = np.uint64(math.floor(math.ldexp(rate, 53)))
        chosen = [np.empty(0, dtype=np.int64)]
        for start in range(0, records, CHUNK):
            words = self._own.stream.words(min(CHUNK, records - start))
            chosen.append(np.flatnonzero(np.right_shift(words, 11, out=words) < limit) + start)
        return from_numpy(np.concatenate(chosen))

    def gaussian(self, size: int, like: Tensor, step: int, purpose: str) -> Tensor:
        """See Draws."""
        del step, purpose
        noise = empty(size, like.dtype)
        numbers = noise.numpy()
        own = self._own
        for start in range(0, size, CHUNK):
            part = numbers[start : start + CHUNK]
            z = _box_muller(own.stream.words(len(part) + len(part) % 2), own.room)
            np.copyto(part, z[: len(part)], casting="same_kind")
        return noise.to(like.device)

    def add_noise(
        self, total: Tensor, sigma: float, sensitivity: float, step: int, purpose: str
    ) -> Tensor:
        """See Draws. On the grid."""

        def gaussian(size: int, like: Tensor) -> Tensor:
            return self.gaussian(size, like, step, purpose)

        return grid.noisy(total, sigma, sensitivity, gaussian)


def _box_muller(words: _Words, room: _Floats) -> _Floats:
    """Return standard normal numbers [n] in the place of uniform words [n], n even.

    room: float64 [2, n / 2] or more, whose content does not matter.
    """
    np.right_shift(words, 12, out=words)
    np.bitwise_or(words, _ONE, out=words)
    z = words.view(np.float64)
    half = len(z) // 2
    first, second = z[:half], z[half:]
    r, twice = room[:, :half]
    first -= 1 - 2.0**-53
    _log(first)
    first *= -2
    np.sqrt(first, out=r)
    second -= 1.5
    second *= math.pi
    _tan(second)
    np.multiply(second, second, out=twice)
    twice += 1
    np.divide(r, twice, out=twice)
    twice += twice
    second *= twice
    np.subtract(twice, r, out=first)
    return z


def _log(x: _Floats) -> None:
    if _NUMPY_IS_FAST:
        np.log(x, out=x)
    else:
        from_numpy(x).log_()


def _tan(x: _Floats) -> None:
    if _NUMPY_IS_FAST:
        np.tan(x, out=x)
    else:
        from_numpy(x).tan_()
