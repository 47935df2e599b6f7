"""Where a site's randomness comes from: which records a batch holds, and the Gaussian noise.

In a simulation every draw is a function of a stable digest of (seed, site, round, step, purpose),
so results depend neither on the number of workers nor on their order, and a release that is
computed again is the same release. Such draws can be foretold by whoever knows the seed: they
measure what a federation would do, they do not protect anybody. The run's report says so.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Draws(Protocol):
    """The randomness of one site in one round.

    repeats: whether equal calls, in this process or another, return equal draws.
    """

    @property
    def repeats(self) -> bool:
        """See above."""
        ...

    def batch(self, records: int, rate: float, step: int) -> Tensor:
        """Return the indices of a Poisson batch: each of `records` with probability `rate`."""
        ...

    def gaussian(self, size: int, like: Tensor, step: int, purpose: str) -> Tensor:
        """Return `size` standard normal numbers, of the type and on the device of `like`."""
        ...

    def add_noise(
        self, total: Tensor, sigma: float, sensitivity: float, step: int, purpose: str
    ) -> Tensor:
        """Return total [d] plus normal noise of σ times its sensitivity; total may be written over.

        The noise is that of `gaussian` for the same step and purpose, or lies on a grid.
        """
        ...


from_numpy = cast(Callable[[NDArray[Any]], Tensor], torch.from_numpy)  # pyright: ignore[reportUnknownMemberType]


def empty(size: int, dtype: torch.dtype) -> Tensor:
    """Return a vector [size] on the CPU, float32 or float64, that is yet to be written.

    In numpy's memory, as numpy asks the system for huge pages: a new vector of 13 million numbers
    then costs a fifth of what torch.empty makes of it when it is first written.
    """
    return from_numpy(np.empty(size, np.float64 if dtype == torch.float64 else np.float32))


# Numbers that are drawn and added at once: they stay in the cache. torch draws normal numbers in
# groups of 16, the last of them anew where it is not full, so each part but the last is of whole
# groups and the last of no less than one: then parts are what one draw of all would be.
_CHUNK: Final = 1 << 14
_GROUP: Final = 16

# torch.Generator.get_state(): 24 bytes of counters; the Mersenne Twister's 624 words of 32 bits,
# each in 8 bytes; what is left of earlier normal draws.
_WORDS: Final = 624
_FIRST: Final = 24
_BLANK: Final = torch.Generator().manual_seed(0).get_state()


def _digest(key: tuple[str | int, ...], length: int) -> bytes:
    return hashlib.shake_256(json.dumps(key).encode()).digest(length)


def stream(*key: str | int) -> torch.Generator:
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

    `around` is whatever further tells one request from another: site and round.
    """

    repeats = True

    def __init__(self, seed: int, *around: str | int) -> None:
        self._key = (seed, *around)

    def batch(self, records: int, rate: float, step: int) -> Tensor:
        """See Draws. Rate 1 takes every record and draws nothing."""
        if rate == 1:
            return torch.arange(records)
        # Multiples of 2^-53 in [0, 1), and 1 minus them in (0, 1]: at most `rate` with probability
        # floor(2^53 rate) 2^-53, never above the rate that is accounted for.
        uniform = torch.rand(
            records, generator=stream(*self._key, step, "batch"), dtype=torch.float64
        )
        return torch.nonzero(1 - uniform <= rate).squeeze(1)

    def gaussian(self, size: int, like: Tensor, step: int, purpose: str) -> Tensor:
        """See Draws."""
        if like.device.type != "cpu":
            generator = self._on(like.device, step, purpose)
            return like.new_empty(size).normal_(generator=generator)
        return empty(size, like.dtype).normal_(generator=self._noise(step, purpose))

    def add_noise(
        self, total: Tensor, sigma: float, sensitivity: float, step: int, purpose: str
    ) -> Tensor:
        """See Draws. Written to total itself, without a grid: whoever knows the seed needs none."""
        if total.device.type != "cpu":
            noise = self.gaussian(total.numel(), total, step, purpose)
            return total.add_(noise, alpha=sigma * sensitivity)
        generator, part = self._noise(step, purpose), empty(_CHUNK + _GROUP, total.dtype)
        start, size = 0, total.numel()
        while start < size:
            end = size if size - start <= len(part) else start + _CHUNK
            noise = part[: end - start].normal_(generator=generator)
            total[start:end].add_(noise, alpha=sigma * sensitivity)
            start = end
        return total

    def _on(self, device: torch.device, step: int, purpose: str) -> torch.Generator:
        """The device's own generator, whose whole seed is 64 bits: other noise than `_noise`."""
        digest = _digest((*self._key, step, "noise", purpose), 8)
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)

    def _noise(self, step: int, purpose: str) -> torch.Generator:
        return stream(*self._key, step, "noise", purpose)
