"""Where a site's randomness comes from: which records a batch holds, and the Gaussian noise.

In a simulation every draw is a function of stable digests of seed, site, round, step and purpose,
so results depend neither on the number of workers nor on their order, and a release that is
computed again is the same release. Such draws can be foretold by whoever knows the seed: they
measure what a federation would do, they do not protect anybody. The run's report says so.
"""

import hashlib
import json
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from fedpact.draws.keystream import KeyStream, Parts, injection, normals, poisson
from fedpact.draws.shares import shared
from fedpact.params import from_numpy, on_cpu

DRAWS: Final = 4
"""Counts up when equal seeds come to give other draws; no run goes on across such a change."""


class Draws(Protocol):
    """The randomness of one site in one round.

    repeats: whether equal calls, in this process or another, return equal draws.
    """

    @property
    def repeats(self) -> bool:
        """Whether equal calls return equal draws."""
        ...

    def batch(self, records: int, rate: float, step: int) -> Tensor:
        """Return the indices of a Poisson batch: each of `records` with probability `rate`."""
        ...

    def places(self, count: int, slots: int, step: int) -> Tensor:
        """Return where the records of a batch stand: `count` different slots, drawn uniformly."""
        ...

    def gaussian(self, size: int, like: Tensor, step: int, purpose: str) -> Tensor:
        """Return `size` standard normal numbers, of the type and on the device of `like`."""
        ...

    def share(self, total: Tensor, unit: float, units: float, step: int, purpose: str) -> Tensor:
        """Return a sum [d] with a share of noise, rounded to a coarse grid; see draws.shares."""
        ...

    def add_noise(
        self, total: Tensor, sigma: float, sensitivity: float, step: int, purpose: str
    ) -> Tensor:
        """Return total [d] plus normal noise of σ times its sensitivity; total may be written over.

        The noise is that of `gaussian` for the same step and purpose, or lies on a grid.
        """
        ...


def empty(size: int, dtype: torch.dtype) -> Tensor:
    """Return a vector [size] on the CPU, float32 or float64, that is yet to be written.

    In numpy's memory, as numpy asks the system for huge pages: a new vector of 13 million numbers
    then costs a fifth of what torch.empty makes of it when it is first written.
    """
    return from_numpy(np.empty(size, np.float64 if dtype == torch.float64 else np.float32))


# torch.Generator.get_state(): 24 bytes of counters; the Mersenne Twister's 624 words of 32 bits,
# each in 8 bytes; what is left of earlier normal draws.
_WORDS: Final = 624
_FIRST: Final = 24
_BLANK: Final = torch.Generator().manual_seed(0).get_state()


def _digest(key: tuple[str | int, ...], length: int) -> bytes:
    return hashlib.shake_256(json.dumps(key).encode()).digest(length)


@lru_cache
def _digest_of(kind: str) -> bytes:
    return hashlib.sha256(kind.encode()).digest()[:8]


def _place(kind: str, step: int) -> bytes:
    return _digest_of(kind) + step.to_bytes(4, "big")


def seeded_generator(*key: str | int) -> torch.Generator:
    """Return the generator that belongs to a key; other keys give independent streams.

    All of the generator's state comes from the key: manual_seed would keep 32 bits of it, and of
    a million streams a hundred pairs would be the same.
    """
    words = from_numpy(np.frombuffer(_digest(key, 4 * _WORDS), "<u4").astype(np.int64))
    generator, state = torch.Generator(), _BLANK.clone()
    state[_FIRST : _FIRST + 8 * _WORDS].view(torch.int64).copy_(words)
    generator.set_state(state)
    return generator


class SeededDraws:
    """Reproducible draws for a simulation: everything follows from the seed.

    `around` is whatever further tells one request from another: site and round. All of a request's
    draws are of one key, each of a place of its own there. One thread at a time may use an object.
    """

    repeats = True

    def __init__(self, seed: int, *around: str | int) -> None:
        self._key = (seed, *around)
        self._stream = KeyStream(_digest(self._key, 32))

    def batch(self, records: int, rate: float, step: int) -> Tensor:
        """Return the indices of a Poisson batch: each of `records` with probability `rate`. Rate 1
        takes every record and draws nothing."""
        if rate == 1:
            return torch.arange(records)
        return poisson(self._stream.seek(_place("batch", step)), records, rate)

    def places(self, count: int, slots: int, step: int) -> Tensor:
        """Return where the records of a batch stand: `count` different slots, drawn uniformly."""
        return injection(self._stream.seek(_place("places", step)), count, slots)

    def noise_words(self, step: int, purpose: str) -> KeyStream:
        """Return what the noise is made of on a CPU; the next draw goes on elsewhere."""
        return self._stream.seek(_place("noise " + purpose, step))

    def gaussian(self, size: int, like: Tensor, step: int, purpose: str) -> Tensor:
        """Return `size` standard normal numbers, of the type and on the device of `like`."""
        if not on_cpu(like):
            generator = self._on(like.device, step, purpose)
            return like.new_empty(size).normal_(generator=generator)
        noise = empty(size, like.dtype)
        for part, z in self._parts(noise, step, purpose):
            noise[part] = z
        return noise

    def share(self, total: Tensor, unit: float, units: float, step: int, purpose: str) -> Tensor:
        """Return a sum [d] with a share of noise, rounded to a coarse grid; see draws.shares. The
        noise is that of `add_noise`, so that runs differ by rounding alone."""
        return shared(total, unit, units, self._parts(total, step, purpose))

    def add_noise(
        self, total: Tensor, sigma: float, sensitivity: float, step: int, purpose: str
    ) -> Tensor:
        """Return total [d] plus normal noise of σ times its sensitivity; total may be written over.
        Written to total itself, without a grid: whoever knows the seed needs none."""
        for part, z in self._parts(total, step, purpose):
            total[part].add_(z, alpha=sigma * sensitivity)
        return total

    def _parts(self, vector: Tensor, step: int, purpose: str) -> Parts:
        """Yield normal numbers for all of a vector [d], part by part."""
        if not on_cpu(vector):
            return iter([(slice(None), self.gaussian(len(vector), vector, step, purpose))])
        return normals(self.noise_words(step, purpose), len(vector), vector.dtype)

    def _on(self, device: torch.device, step: int, purpose: str) -> torch.Generator:
        """The device's own generator, whose whole seed is 64 bits: other noise than on a CPU."""
        digest = _digest((*self._key, step, "noise", purpose), 8)
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
