"""Where a site's randomness comes from: which records a batch holds, and the Gaussian noise.

In a simulation every draw is a function of a stable digest of (seed, site, round, step, purpose),
so results depend neither on the number of workers nor on their order, and a release that is
computed again is the same release. Such draws can be foretold by whoever knows the seed: they
measure what a federation would do, they do not protect anybody. The run's report says so.
"""

import hashlib
import json
from typing import Protocol

import torch
from torch import Tensor


class Draws(Protocol):
    """The randomness of one site in one round."""

    def batch(self, records: int, rate: float, step: int) -> Tensor:
        """Return the indices of a Poisson batch: each of `records` with probability `rate`."""
        ...

    def gaussian(self, size: int, like: Tensor, step: int, purpose: str) -> Tensor:
        """Return `size` standard normal numbers, of the type and on the device of `like`."""
        ...


def stream(*key: str | int) -> torch.Generator:
    """Return the generator that belongs to a key; other keys give independent streams."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


class SeededDraws:
    """Reproducible draws for a simulation: everything follows from the seed.

    `around` is whatever further tells one request from another: site and round.
    """

    def __init__(self, seed: int, *around: str | int) -> None:
        self._key = (seed, *around)

    def batch(self, records: int, rate: float, step: int) -> Tensor:
        """See Draws. Rate 1 takes every record and draws nothing."""
        if rate == 1:
            return torch.arange(records)
        # float64: the uniform numbers of float32 are multiples of 2^-24, which would round the
        # rate up, past the one that is accounted for.
        uniform = torch.rand(
            records, generator=stream(*self._key, step, "batch"), dtype=torch.float64
        )
        return torch.nonzero(uniform < rate).squeeze(1)

    def gaussian(self, size: int, like: Tensor, step: int, purpose: str) -> Tensor:
        """See Draws."""
        noise = torch.randn(
            size, generator=stream(*self._key, step, "noise", purpose), dtype=like.dtype
        )
        return noise.to(like.device)
