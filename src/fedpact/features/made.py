"""Images that are nobody's: dead leaves, made from a seed.

Discs and bars of power-law sizes and of random colours, each laid over those before it (after Lee,
Mumford, Huang, Occlusion models for natural images, IJCV 2001). Edges, corners and flat parts occur
in them as in photographs, at all sizes, so they say how features of images vary; no record and no
photograph takes part.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fedpact.draws.seeded import seeded_generator

MADE: Final = 4000
"""So many images say how features vary."""

_MOST: Final = 48
"""Leaves of an image at most; each image has its own number, on a ground of one colour."""
_AT_ONCE: Final = 2**24
"""So many numbers of images are made at a time, or those of eight images."""


def generate_images(count: int, shape: tuple[int, int, int], seed: int) -> Iterator[Tensor]:
    """Yield the first of MADE images [n, channels, height, width], in parts, n a multiple of 8.

    count: how many, a multiple of 8. See dead_leaves.
    """
    size = max(8, _AT_ONCE // math.prod(shape) // 8 * 8)
    for start in range(0, count, size):
        # The whole of small images is one part, which filters and whitening share.
        part = dead_leaves(MADE, shape, seed, start, min(start + size, MADE))
        yield part[: count - start]


@lru_cache(maxsize=2)
def dead_leaves(
    count: int, shape: tuple[int, int, int], seed: int, start: int, stop: int
) -> Tensor:
    """Return images [stop - start, channels, height, width], float32 in [0, 1], of `count`.

    The same for a seed, whatever start and stop. shape: (channels, height, width). Sizes r have a
    density in proportion to r^-3 between 1 pixel and half the shorter side; a colour is a grey with
    a smaller deviation of each channel. They are kept; nobody writes to them.
    """
    channels, height, width = shape
    drawn, some = _drawn(count, shape, seed), slice(start, stop)
    rows = torch.arange(height, dtype=torch.float32).view(1, -1, 1)
    columns = torch.arange(width, dtype=torch.float32).view(1, 1, -1)
    images = drawn.ground[some].expand(stop - start, channels, height, width).clone()
    for k, leaf in enumerate(drawn.leaves):
        radius, y, x, cos, sin, round_, colour = (part[some] for part in leaf)
        down, across = rows - y, columns - x
        along = across * cos + down * sin
        beside = down * cos - across * sin
        disc = along**2 + beside**2 <= radius**2
        bar = (along.abs() <= 2 * radius) & (beside.abs() <= radius / 2)
        inside = torch.where(round_, disc, bar)
        inside &= (k < drawn.number[some]).view(-1, 1, 1)
        images = torch.where(inside[:, None], colour, images)
    return images


class _Leaf(NamedTuple):
    """What draws one leaf of each image, all [n, 1, 1], colour [n, 1 or channels, 1, 1]."""

    radius: Tensor
    y: Tensor
    x: Tensor
    cos: Tensor
    sin: Tensor
    round_: Tensor
    colour: Tensor


class _Drawn(NamedTuple):
    """What draws n images. ground: its colours. number: how many leaves each has, [n]."""

    ground: Tensor
    number: Tensor
    leaves: list[_Leaf]


@lru_cache(maxsize=2)
def _drawn(count: int, shape: tuple[int, int, int], seed: int) -> _Drawn:
    channels, height, width = shape
    draws = seeded_generator("dead leaves", seed, *shape)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=draws)

    def colours() -> Tensor:
        own = 0.2 * (uniform(count, channels, 1, 1) - 0.5) if channels > 1 else 0.0
        return (uniform(count, 1, 1, 1) + own).clamp(0, 1)

    def leaf() -> _Leaf:
        # The inverse of the distribution function of r^-3 on [1, longest].
        radius = (1 - uniform(count, 1, 1) * (1 - longest**-2.0)) ** -0.5
        y, x = uniform(count, 1, 1) * height, uniform(count, 1, 1) * width
        angle = uniform(count, 1, 1) * math.pi
        round_ = uniform(count, 1, 1) < 0.5
        return _Leaf(radius, y, x, angle.cos(), angle.sin(), round_, colours())

    longest = min(height, width) / 2
    ground, leaves = colours(), (uniform(count) * _MOST).floor() + 1
    return _Drawn(ground, leaves, [leaf() for _ in range(_MOST)])
