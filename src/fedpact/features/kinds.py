"""The kinds of features: one entry of FEATURE_KINDS each. docs/extending.md adds one.

A kind makes maps from public numbers alone: settings, the shape of a record, a seed. Maps take a
batch of records and give each its own, whatever stands beside it. What is the same for all kinds,
that records are given in one form, whitened, and cut to unit length, is done in extract.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fedpact.errors import ModelError
from fedpact.features.patches import Patches
from fedpact.features.scattering import Scattering

Shape = tuple[int, ...]
Maps = Callable[[Tensor], Tensor]
"""Records [B, channels, height, width] in [0, 1] -> what each holds, [B, maps, rows, columns].

Numbers >= 0, of which extract takes the square roots.
Rows and columns are places in the image, from top left.
"""


@dataclass(frozen=True)
class FeatureKind:
    """A way to compute features.

    make: of settings, shape (channels, height, width) and a seed, it returns maps. own: the
    settings that matter here and in the kinds that name them too. twins: of settings, for each map
    the place of the one that finds in an image what it finds in the mirrored one, at the mirrored
    place; None where there are none, and mirrored images have maps of their own.
    """

    make: Callable[[Any, tuple[int, int, int], int], Maps]
    own: tuple[str, ...] = ()
    twins: Callable[[Any], Tensor | None] = lambda _: None


def _scattering(settings: Any, shape: tuple[int, int, int], seed: int) -> Maps:
    del seed
    return Scattering(_cells(settings, 5, min(shape[1:]) // 2, shape))


def _patches(settings: Any, shape: tuple[int, int, int], seed: int) -> Maps:
    places = min(shape[1:]) - settings.size + 1
    cells = _cells(settings, 2, places, shape)
    return Patches(shape, seed, cells, settings.filters, settings.size, settings.threshold)


def _patches_twins(settings: Any) -> Tensor | None:
    """The second half of the filters is the first one mirrored, if there are as many."""
    if settings.filters % 2:
        return None
    twins = torch.arange(settings.filters).roll(settings.filters // 2)
    return torch.cat([twins, twins + settings.filters])


def _cells(settings: Any, default: int, most: int, shape: Shape) -> int:
    if most < 1:
        least = settings.size if settings.kind == "patches" else 2
        raise ModelError(
            f"features.kind = {settings.kind!r} with images of shape {shape}: expected at least "
            f"{least} x {least} pixels"
            + (f", as size = {least}; lower size" if settings.kind == "patches" else "")
            + (
                "; if channels stand last, hand in numpy.moveaxis(x, -1, 1)"
                * (shape[-1] <= 4 < shape[0])
            )
        )
    cells = min(default, most) if settings.cells is None else settings.cells
    if not 1 <= cells <= most:
        raise ModelError(
            f"features.kind = {settings.kind!r} with cells = {cells}: an image of shape {shape} "
            f"has places for {most} x {most} at most; lower cells"
            + (f", or size = {settings.size}" if settings.kind == "patches" else "")
        )
    return cells


FEATURE_KINDS: Final[dict[str, FeatureKind]] = {
    "scattering": FeatureKind(_scattering, own=("cells",)),
    "patches": FeatureKind(
        _patches, own=("cells", "filters", "size", "threshold"), twins=_patches_twins
    ),
}
