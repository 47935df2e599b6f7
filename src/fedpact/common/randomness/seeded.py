"""Seeded randomness: batches, noise, the sites of a round, and shares of noise.

Sites of a round: let u_1, ..., u_m be 64-bit words (little-endian) of SHAKE-256 of the JSON text
[seed, "participants", t]. For i = 1, ..., m, the name at position i of the K sorted names is
swapped with that at position i + (u_i mod (K - i + 1)); the first m then take part in round t. All
sets of m are equally likely, up to K / 2^64, and everyone with the plan can repeat the draw.

Shares of noise: privacy.accounting.shared_noise has their value, alone or with other sites' shares.
Their coarse grid is also the defence against floating-point attacks: sum and noise are float64, so
a value is rounded differently from a real number only within 1e-9 of a half, for sums of up to 2^22
units (2^-26 for up to 2^27), which changes its probability by the same relative amount.

In a simulation every random number is a function of stable digests of seed, site, round, step and
purpose, so results do not depend on the number or order of workers, and a repeated release is the
same release. Anyone who knows the seed can predict them: a simulation measures what a federation
would do and protects nobody. The run's report says so.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from fedpact.common.check import positive
from fedpact.common.errors import PlanError
from fedpact.common.params import copy_to_device, from_numpy, on_cpu
from fedpact.common.randomness.keystream import (
    KeyStream,
    Parts,
    normals,
    poisson,
    positions,
)


def size_of_round(each: int | None, sites: int) -> int:
    """Return how many of `sites` sites a round asks. each: m, None for all. Raises PlanError."""
    if each is not None and each > sites:
        raise PlanError(
            f"sites_per_round is {each} with {sites} sites: expected at most as many as there are; "
            "leave it out for all of them"
        )
    return sites if each is None else each


@dataclass(frozen=True)
class Participants:
    """Which sites take part in which round. seed: the plan's. sites: all K names. each: m or None.

    Raises PlanError: m > K.
    """

    seed: int
    sites: tuple[str, ...]
    each: int | None = None

    def __post_init__(self) -> None:
        size_of_round(self.each, len(self.sites))

    @property
    def partial(self) -> bool:
        """Whether some sites are left out of each round."""
        return self.each is not None and self.each < len(self.sites)

    def of(self, number: int) -> tuple[str, ...]:
        """Return the sorted names of the sites of a round; all sites take part in round 0."""
        if self.each is None or not self.partial or number == 0:
            return tuple(sorted(self.sites))
        if number not in self._known:
            self._known[number] = self._draw(number, self.each)
        return self._known[number]

    def rounds(self, last: int) -> Counter[str]:
        """Return T_i: in how many of the rounds 1, ..., last each site takes part."""
        if not self.partial:
            return Counter(dict.fromkeys(self.sites, last))
        return Counter(site for number in range(1, last + 1) for site in self.of(number))

    def last_of(self, site: str, last: int) -> int:
        """Return the last of the rounds 1, ..., last that a site takes part in, 0 for none."""
        return next((number for number in range(last, 0, -1) if site in self.of(number)), 0)

    def newcomers(self, last: int) -> int:
        """Return how often in rounds 2, ..., last a site had no part in the one before."""
        drawn = (set(self.of(number)) for number in range(1, last + 1))
        return sum(len(now - before) for before, now in pairwise(drawn))

    def describe(self) -> str:
        """Return the line of a privacy statement, "" if all sites take part in every round.

        It has no numbers, which would reveal the number of sites to a model card's readers.
        """
        if not self.partial:
            return ""
        return (
            "Some of the sites take part in each round, sampled by the plan's seed and the round's "
            "number. A site's ε covers the rounds that it takes part in, which it knows and "
            "reserves before the run. There is no amplification by sampling of sites, as anyone "
            "with the plan, such as the server, knows who takes part."
        )

    @cached_property
    def _known(self) -> dict[int, tuple[str, ...]]:
        return {}

    def _draw(self, number: int, each: int) -> tuple[str, ...]:
        text = json.dumps([self.seed, "participants", number])
        words = np.frombuffer(hashlib.shake_256(text.encode()).digest(8 * each), "<u8")
        names, count = sorted(self.sites), len(self.sites)
        for place, word in enumerate(words.tolist()):
            other = place + word % (count - place)
            names[place], names[other] = names[other], names[place]
        return tuple(sorted(names[:each]))


def round_shares(total: Tensor, unit: float, units: float, noise: Tensor) -> Tensor:
    """Return floor(s/unit + ν z + 1/2) for a sum s [d], float64 [d] where z is.

    unit: of the grid, in units of the sum. units: ν, the noise's deviation on the grid. noise: z
    [d], standard normal, float64, which may be written over.
    Raises InputError: unit or units is not a finite number > 0.
    """
    whole = noise.mul_(positive(units=units))
    whole.add_(total.detach().double() / positive(unit=unit))
    return whole.add_(0.5).floor_()


def round_to_shares(total: Tensor, unit: float, units: float, parts: Parts) -> Tensor:
    """Return the same, int64 [d], for noise that comes in parts, of float32 or float64."""
    whole = torch.empty_like(total, dtype=torch.int64)
    for part, z in parts:
        whole[part] = round_shares(total[part], unit, units, z.double())
    return whole


DRAWS: Final = 5
"""Counts up when equal seeds come to give other draws; no run goes on across such a change."""


def empty(size: int, dtype: torch.dtype) -> Tensor:
    """Return a vector [size] on the CPU, float32 or float64, that is yet to be written.

    In numpy's memory, as numpy asks the system for huge pages: a new vector of 13 million numbers
    then costs a fifth of what torch.empty makes of it when it is first written.
    """
    return from_numpy(np.empty(size, np.float64 if dtype == torch.float64 else np.float32))


class Draws(ABC):
    """The randomness of one site in one round. Draws of another step or purpose are independent."""

    repeats: ClassVar[bool]
    """Whether equal calls, in this process or another, return equal draws."""

    @abstractmethod
    def _words(self, kind: str, step: int) -> KeyStream:
        """Return the words that a kind of draw is made of in a step."""

    @abstractmethod
    def _parts(self, vector: Tensor, step: int, purpose: str) -> Parts:
        """Yield standard normal numbers for all of a vector [d], part by part, on its device."""

    @abstractmethod
    def add_noise(
        self, total: Tensor, sigma: float, sensitivity: float, step: int, purpose: str
    ) -> Tensor:
        """Return total [d] plus normal noise of σ times its sensitivity; total may be written over.

        The noise is that of `gaussian` for the same step and purpose, or lies on a grid.
        """

    def batch(self, records: int, rate: float, step: int) -> Tensor:
        """Return the indices of a Poisson batch: each of `records` with probability `rate`. Rate 1
        takes every record and draws nothing."""
        if rate == 1:
            return torch.arange(records)
        return poisson(self._words("batch", step), records, rate)

    def positions(self, count: int, slots: int, step: int) -> Tensor:
        """Return a slot below `slots` for each of `count` records, drawn independently."""
        return positions(self._words("positions", step), count, slots)

    def number(self, step: int) -> int:
        """Return a whole number below 2^64, which a model's own random numbers are drawn by."""
        return int(self._words("number", step).words(1)[0])

    def gaussian(self, size: int, like: Tensor, step: int, purpose: str) -> Tensor:
        """Return `size` standard normal numbers, of the type and on the device of `like`."""
        noise = empty(size, like.dtype)
        for part, z in self._parts(noise, step, purpose):
            noise[part] = z
        return copy_to_device(noise, like.device)

    def share(self, total: Tensor, unit: float, units: float, step: int, purpose: str) -> Tensor:
        """Return a sum [d] with a share of noise, rounded to a coarse grid; see `round_shares`."""
        return round_to_shares(total, unit, units, self._parts(total, step, purpose))


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


class SeededDraws(Draws):
    """Reproducible draws for a simulation: everything follows from the seed.

    `around` is whatever further tells one request from another: site and round. All of a request's
    draws are of one key, each of a place of its own there. One thread at a time may use an object.
    """

    repeats = True

    def __init__(self, seed: int, *around: str | int) -> None:
        self._key = (seed, *around)
        self._stream = KeyStream(_digest(self._key, 32))

    def _words(self, kind: str, step: int) -> KeyStream:
        return self._stream.seek(_digest_of(kind) + step.to_bytes(4, "big"))

    def gaussian(self, size: int, like: Tensor, step: int, purpose: str) -> Tensor:
        """Return `size` standard normal numbers, of the type and on the device of `like`."""
        if on_cpu(like):
            return super().gaussian(size, like, step, purpose)
        # A device's own generator, whose whole seed is 64 bits, gives other noise than a CPU.
        digest = _digest((*self._key, step, "noise", purpose), 8)
        seed = int.from_bytes(digest, "little") >> 1
        own = torch.Generator(like.device).manual_seed(seed)
        return like.new_empty(size).normal_(generator=own)

    def add_noise(
        self, total: Tensor, sigma: float, sensitivity: float, step: int, purpose: str
    ) -> Tensor:
        """Return total [d] plus normal noise of σ times its sensitivity; total may be written over.
        Written to total itself, without a grid: whoever knows the seed needs none."""
        for part, z in self._parts(total, step, purpose):
            total[part].add_(z, alpha=sigma * sensitivity)
        return total

    def _parts(self, vector: Tensor, step: int, purpose: str) -> Parts:
        if not on_cpu(vector):
            return iter([(slice(None), self.gaussian(len(vector), vector, step, purpose))])
        return normals(self._words("noise " + purpose, step), len(vector), vector.dtype)
