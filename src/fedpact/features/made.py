"""Images that are nobody's: dead leaves, made from a seed.

Discs and bars of power-law sizes and of random colours, each laid over those before it (after Lee,
Mumford, Huang, Occlusion models for natural images, IJCV 2001). Edges, corners and flat parts occur
in them as in photographs, at all sizes, so they say how features of images vary; no record and no
photograph takes part.
"""

import math
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from fedpact.draws.seeded import stream

MADE: Final = 4000
"""So many images say how features vary."""

_MOST: Final = 48
"""Leaves of an image at most; each image has its own number, on a ground of one colour."""


@lru_cache(maxsize=2)
def dead_leaves(count: int, shape: tuple[int, int, int], seed: int) -> Tensor:
    """Return images [count, channels, height, width], float32 in [0, 1], the same for a seed.

    shape: (channels, height, width). Sizes r have a density in proportion to r^-3 between 1 pixel
    and half the shorter side; a colour is a grey with a smaller deviation of each channel. Filters
    and whitening share them, so they are kept; nobody writes to them.
    """
    channels, height, width = shape
    draws = stream("dead leaves", seed, *shape)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=draws)

    def colours() -> Tensor:
        own = 0.2 * (uniform(count, channels, 1, 1) - 0.5) if channels > 1 else 0.0
        return (uniform(count, 1, 1, 1) + own).clamp(0, 1)

    rows = torch.arange(height, dtype=torch.float32).view(1, -1, 1)
    columns = torch.arange(width, dtype=torch.float32).view(1, 1, -1)
    images = colours().expand(count, channels, height, width).clone()
    leaves = (uniform(count) * _MOST).floor() + 1
    longest = min(height, width) / 2
    for leaf in range(_MOST):
        # The inverse of the distribution function of r^-3 on [1, longest].
        radius = (1 - uniform(count, 1, 1) * (1 - longest**-2.0)) ** -0.5
        down = rows - uniform(count, 1, 1) * height
        across = columns - uniform(count, 1, 1) * width
        angle = uniform(count, 1, 1) * math.pi
        along = across * angle.cos() + down * angle.sin()
        beside = down * angle.cos() - across * angle.sin()
        disc = along**2 + beside**2 <= radius**2
        bar = (along.abs() <= 2 * radius) & (beside.abs() <= radius / 2)
        inside = torch.where(uniform(count, 1, 1) < 0.5, disc, bar)
        inside &= (leaf < leaves).view(-1, 1, 1)
        images = torch.where(inside[:, None], colours(), images)
    return images
