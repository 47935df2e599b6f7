"""Randomness for a deployment: nobody can foretell it, and no two calls draw the same.

Each thread of each object has a key of the operating system's of its own, and a new one after 8 GiB
or a fork; an object can be neither copied nor pickled. So no stretch of a key stream is used twice.
(A snapshot of a running virtual machine that is started twice would: make none of a site in a run.)

Noise is drawn in float64 for either type, with all of its tail (keystream says why);
floating-point attacks (Mironov 2012) are `grid`'s to defend against, and it needs the float64.
Noise for long vectors is drawn by as many threads as torch may use where it is asked for.
"""

import os
import secrets
import threading
from typing import Final, NoReturn

import numpy as np
import torch
from torch import Tensor

from fedpact.draws import grid
from fedpact.draws.keystream import KeyStream, Parts, Words, injection, normals, poisson
from fedpact.draws.seeded import empty
from fedpact.draws.shares import shared
from fedpact.params import sent

# Of one key, in words: 8 GiB, an eighth of what there is from a place on.
_KEY_LASTS: Final = 1 << 30

_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class FreshStream(KeyStream):
    """Uniform words of 64 bits that never come again, for one thread."""

    def __init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        self.rekey(secrets.token_bytes(32))
        self._left, self._process = _KEY_LASTS, (os.getpid(), _forks)

    def words(self, count: int, at: int = 0) -> Words:
        """Return uint64 [count], count <= CHUNK, to be written over by whoever asked."""
        if count > self._left or self._process != (os.getpid(), _forks):
            self._renew()
        self._left -= count
        return super().words(count, at)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key stream is never copied: its copy would draw the same noise again")


def _further(count: int) -> Words:
    """Return `count` random words: the stream's own would be written over what it has just
    given."""
    return np.frombuffer(bytearray(secrets.token_bytes(8 * count)), dtype=np.uint64)


class _OfThread(threading.local):
    """What each thread has for itself."""

    def __init__(self) -> None:
        self.stream = FreshStream()


class SecureDraws:
    """Draws for a deployment. Threads may share an object."""

    repeats = False

    def __init__(self) -> None:
        self._own = _OfThread()

    def __reduce__(self) -> NoReturn:
        raise TypeError("SecureDraws are never copied: make new ones, with a key of their own")

    def batch(self, records: int, rate: float, step: int) -> Tensor:
        """Return the indices of a Poisson batch: each of `records` with probability `rate`. Rate 1
        takes every record and draws nothing."""
        del step
        if rate == 1:
            return torch.arange(records)
        return poisson(self._own.stream, records, rate)

    def places(self, count: int, slots: int, step: int) -> Tensor:
        """Return where the records of a batch stand: `count` different slots, drawn uniformly."""
        del step
        return injection(self._own.stream, count, slots)

    def gaussian(self, size: int, like: Tensor, step: int, purpose: str) -> Tensor:
        """Return `size` standard normal numbers, of the type and on the device of `like`."""
        del step, purpose
        noise = empty(size, like.dtype)
        for part, z in self._parts(size):
            noise[part] = z
        return sent(noise, like.device)

    def share(self, total: Tensor, unit: float, units: float, step: int, purpose: str) -> Tensor:
        """Return a sum [d] with a share of noise, rounded to a coarse grid; see draws.shares."""
        del step, purpose
        parts = self._parts(len(total))
        return shared(total, unit, units, ((part, sent(z, total.device)) for part, z in parts))

    def add_noise(
        self, total: Tensor, sigma: float, sensitivity: float, step: int, purpose: str
    ) -> Tensor:
        """Return total [d] plus normal noise of σ times its sensitivity; total may be written over.
        On the grid."""

        del step, purpose
        return grid.noisy(total, sigma, sensitivity, self._part)

    def _part(self, size: int, like: Tensor) -> Tensor:
        """Return at most CHUNK numbers of `gaussian`."""
        del like
        return next(self._parts(size))[1]

    def _parts(self, size: int) -> Parts:
        return normals(self._own.stream, size, torch.float64, _further)
