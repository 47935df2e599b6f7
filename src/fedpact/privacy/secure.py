"""Randomness for a deployment: nobody can foretell it, and no two calls draw the same.

Bits come from AES-256 in counter mode, which costs a tenth of the arithmetic done on them, under a
key of the operating system's that belongs to one object alone. A fork takes a new key, and an
object can be neither copied nor pickled, so no stretch of a key stream is used twice. (A snapshot
of a running virtual machine that is started twice would: make none of a site in a run.)

Batches compare whole multiples of 2^-53 with the rate: a record is in with probability
floor(2^53 q) 2^-53, at most q. Noise is Box and Muller's, in float64 for either type:

    r = sqrt(-2 ln U),  z = r cos Θ and r sin Θ,   U in {1, ..., 2^53} 2^-53,  Θ in [-π, π]

U is never 0, so no number is infinite; |z| <= 8.58, beyond which a normal number lies with
probability 1e-17. 32 bits would end at 6.7: with a million coordinates and a thousand releases
a normal number beyond that is a matter of course, and its absence would cost part of δ.

Floating-point attacks (Mironov 2012) are `grid`'s to defend against; it needs the float64.
"""

import math
import os
import secrets
import threading
from typing import Final, NoReturn

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

# Words of 64 bits that are drawn at once: with their intermediate results they stay in the cache.
_CHUNK: Final = 1 << 15
_BITS: Final = 53
_MASK: Final = (1 << _BITS) - 1

_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class KeyStream:
    """Uniform words of 64 bits that never come again. Not safe for threads: its user locks."""

    def __init__(self) -> None:
        self._zeros = memoryview(bytes(8 * _CHUNK))
        # The cipher wants room for one more block than it writes.
        self._bytes = bytearray(8 * _CHUNK + 16)
        self._words = torch.frombuffer(self._bytes, dtype=torch.int64, count=_CHUNK)
        self._rekey()

    def _rekey(self) -> None:
        # The key is used once, so the counter may start at 0.
        cipher = Cipher(algorithms.AES(secrets.token_bytes(32)), modes.CTR(bytes(16)))
        self._encryptor = cipher.encryptor()
        self._process = (os.getpid(), _forks)

    def words(self, count: int) -> Tensor:
        """Return int64 [count], count <= 2^15: a view that the next call writes over."""
        if self._process != (os.getpid(), _forks):
            self._rekey()
        self._encryptor.update_into(self._zeros[: 8 * count], self._bytes)
        return self._words[:count]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key stream is never copied: its copy would draw the same noise again")


class SecureDraws:
    """See noise.Draws: draws for a deployment. Threads may share an object."""

    repeats = False

    def __init__(self) -> None:
        self._stream, self._lock = KeyStream(), threading.Lock()

    def __reduce__(self) -> NoReturn:
        raise TypeError("SecureDraws are never copied: make new ones, with a key of their own")

    def batch(self, records: int, rate: float, step: int) -> Tensor:
        """See Draws. Rate 1 takes every record and draws nothing."""
        del step
        if rate == 1:
            return torch.arange(records)
        # 2^53 rate is exact, and so is comparing it with whole numbers up to 2^53.
        limit = math.floor(math.ldexp(rate, _BITS))
        chosen = [torch.empty(0, dtype=torch.int64)]
        with self._lock:
            for start in range(0, records, _CHUNK):
                words = self._stream.words(min(_CHUNK, records - start))
                taken = (words & _MASK) < limit
                chosen.append(torch.nonzero(taken).squeeze(1) + start)
        return torch.cat(chosen)

    def gaussian(self, size: int, like: Tensor, step: int, purpose: str) -> Tensor:
        """See Draws."""
        del step, purpose
        noise = torch.empty(size, dtype=like.dtype)
        with self._lock:
            for start in range(0, size, _CHUNK):
                part = noise[start : start + _CHUNK]
                _box_muller(self._stream.words(len(part) + len(part) % 2), part)
        return noise.to(like.device)


def _box_muller(words: Tensor, out: Tensor) -> None:
    """Write standard normal numbers to out [n] from uniform words [n, or n + 1 if n is odd]."""
    half = len(words) // 2
    uniform = words[:half].bitwise_and_(_MASK).double().add_(1).mul_(2.0**-_BITS)
    radius = uniform.log_().mul_(-2).sqrt_()
    angle = words[half:].double().mul_(math.pi * 2.0**-63)
    out[:half] = torch.cos(angle).mul_(radius)
    out[half:] = angle.sin_().mul_(radius)[: len(out) - half]
