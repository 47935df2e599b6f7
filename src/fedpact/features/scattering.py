"""Scattering-like maps: how strong edges of each width and direction are, and where.

After Mallat's scattering transform (Bruna, Mallat, Invariant scattering convolution networks, PAMI
2013; with differential privacy: Tramèr, Boneh, arXiv 2011.11660). With Gabor filters ψ of two
widths and 8 directions, |x ∗ ψ| (16 maps), of the narrow ones once more ||x ∗ ψ| ∗ ψ'| with the
wide ones (64 maps), and the blurred image: 81 maps of each channel, each averaged over a grid of
cells and divided by its length, so that faint textures count as much as strong outlines.
"""

import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

DIRECTIONS: Final = 8
MAPS: Final = 1 + 2 * DIRECTIONS + DIRECTIONS**2
_WIDTHS: Final = (0.8, 1.6)
_FAINT: Final = 0.02
"""A map's length counts as at least this part of the record's longest."""


class Scattering:
    """The maps of images [B, channels, height, width]: [B, channels · 81, cells, cells]."""

    def __init__(self, cells: int) -> None:
        self._cells = cells
        self._narrow, self._wide = (gabor(width) for width in _WIDTHS)
        self._blur = _gaussian(_WIDTHS[1])

    def __call__(self, x: Tensor) -> Tensor:
        """Return the maps, each of a record's own; no record has a part in another's."""
        batch, channels, height, width = x.shape
        each = x.reshape(batch * channels, 1, height, width)
        narrow, wide = _strength(each, self._narrow), _strength(each, self._wide)
        between = narrow.reshape(-1, 1, height, width)
        second = _strength(between, self._wide, stride=2)
        pooled = [
            self._pooled(_filtered(each, self._blur)),
            self._pooled(narrow),
            self._pooled(wide),
            self._pooled(second).reshape(len(each), -1, self._cells, self._cells),
        ]
        maps = torch.cat(pooled, 1).view(batch, channels * MAPS, self._cells, self._cells)
        length = maps.square().sum((2, 3), keepdim=True).sqrt()
        least = _FAINT * length.amax(1, keepdim=True)
        return maps / torch.maximum(length, least).clamp_min(1e-12)

    def _pooled(self, maps: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(maps, self._cells)


def gabor(width: float) -> Tensor:
    """Return Gabor filters [2 · 8, 1, k, k], real parts before imaginary ones, each of mean 0.

    exp(-‖u‖²/2σ²) (exp(i ⟨ξ, u⟩) - κ) with σ = `width` pixels, ‖ξ‖ = 3π / (5 σ) in 8 directions.
    """
    side = math.ceil(3 * width)
    place = torch.arange(-side, side + 1, dtype=torch.float64)
    down, across = torch.meshgrid(place, place, indexing="ij")
    hull = torch.exp(-(down**2 + across**2) / (2 * width**2))
    angles = torch.arange(DIRECTIONS, dtype=torch.float64).view(-1, 1, 1) * math.pi / DIRECTIONS
    phase = 0.6 * math.pi / width * (across * angles.cos() + down * angles.sin())
    waves = torch.cat([phase.cos(), phase.sin()])
    mean = (waves * hull).sum((1, 2), keepdim=True) / hull.sum()
    return ((waves - mean) * hull / hull.sum()).float()[:, None]


def _gaussian(width: float) -> Tensor:
    side = math.ceil(3 * width)
    place = torch.arange(-side, side + 1, dtype=torch.float64)
    line = torch.exp(-(place**2) / (2 * width**2))
    return (line[:, None] * line / line.sum() ** 2).float()[None, None]


def _filtered(x: Tensor, filters: Tensor, stride: int = 1) -> Tensor:
    side = filters.shape[-1] // 2
    return F.conv2d(F.pad(x, (side, side, side, side), mode="replicate"), filters, stride=stride)


def _strength(x: Tensor, filters: Tensor, stride: int = 1) -> Tensor:
    """|x ∗ ψ| of images [n, 1, h, w]: [n, 8, h, w]."""
    real, imaginary = _filtered(x, filters, stride).chunk(2, 1)
    return (real.square() + imaginary.square()).sqrt()
