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


from_numpy = cast(Callable[[NDArray[Any]], Tensor], torch.from_numpy)  # pyright: ignore[reportUnknownMemberType]


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


def stream(*key: str | int) -> torch.Generator:
    """Return the generator that belongs to a key; other keys give independent streams.

    All of the generator's state comes from the key: manual_seed would keep 32 bits of it, and of
    a million streams a hundred pairs would be the same.
    """
    digest = hashlib.shake_256(json.dumps(key).encode()).digest(4 * _WORDS)
    words = torch.tensor(np.frombuffer(digest, "<u4").astype(np.int64))
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
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
        generator = stream(*self._key, step, "noise", purpose)
        return empty(size, like.dtype).normal_(generator=generator).to(like.device)
