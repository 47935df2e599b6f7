"""Random patches: how much of each small pattern is in each quarter of an image.

Coates, Ng, The importance of encoding versus training with sparse coding and vector quantization,
ICML 2011: patches are freed of their mean and contrast, whitened, and held against filters that are
themselves patches; what exceeds a threshold, on either side, is averaged over a grid of cells. Here
filters and whitening come from made images, half of the filters as drawn and half mirrored.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpact.draws.seeded import seeded_generator
from fedpact.errors import ModelError
from fedpact.features.made import generate_images

_IMAGES: Final = 1000
_FLAT: Final = 0.03
"""A patch's contrast counts as at least this; images are in [0, 1]."""
_LEAST: Final = 0.01
"""What is added to the variances of patches before they are whitened, of their mean."""


class Patches:
    """The maps of images [B, channels, height, width]: [B, 2 · filters, cells, cells]."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        seed: int,
        cells: int,
        filters: int,
        size: int,
        threshold: float,
    ) -> None:
        self._cells, self._size, self._threshold = cells, size, threshold
        draws = seeded_generator("patches", seed, *shape, size)
        places = (shape[1] - size + 1) * (shape[2] - size + 1)
        place = torch.randint(places, (_IMAGES, 20), generator=draws)
        some = _at(shape, seed, size, place)
        some = some[some.std(1, correction=0) > _FLAT]
        if len(some) < (filters + 1) // 2:
            raise ModelError(
                f"features.filters is {filters} of size {size} with records of shape {shape}: made "
                f"images have {len(some)} patches that are not flat, so expected at most "
                f"{2 * len(some)}; lower filters, or raise size"
            )
        some = _contrast(some).double()
        covariance = some.T @ some / len(some)
        # Mirrored, made images are as likely: then whitening a mirrored patch mirrors it, and of
        # two filters that mirror each other each finds in an image what the other finds mirrored.
        across = torch.arange(covariance.shape[0]).view(-1, size).flip(1).flatten()
        covariance = (covariance + covariance[across][:, across]) / 2
        values, vectors = torch.linalg.eigh(covariance)
        values = values.clamp_min(0)
        whitening = vectors / (values + _LEAST * values.mean()).sqrt() @ vectors.T
        chosen = some[torch.randperm(len(some), generator=draws)[: (filters + 1) // 2]] @ whitening
        chosen = F.normalize(chosen)
        mirrored = chosen.view(-1, shape[0], size, size).flip(3).flatten(1)
        bank = torch.cat([chosen, mirrored])[:filters]
        # One product: of a patch without its mean, whitened, and held against the filters.
        found = bank @ whitening
        found -= found.mean(1, keepdim=True)
        self._bank = found.float().view(-1, shape[0], size, size).contiguous()
        self._box = torch.full((1, *self._bank.shape[1:]), 1 / found.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        """Return the maps, each of a record's own; no record has a part in another's."""
        variance = F.conv2d(x.square(), self._box) - F.conv2d(x, self._box).square()
        found = F.conv2d(x, self._bank).div_(variance.clamp_min_(_FLAT**2).sqrt_())
        above = self._pooled((found - self._threshold).relu_())
        below = self._pooled(found.neg_().sub_(self._threshold).relu_())
        return torch.cat([above, below], 1)

    def _pooled(self, maps: Tensor) -> Tensor:
        """The mean of each cell; rows first, whole ones at a time, which is most of it."""
        height, cells = maps.shape[2], self._cells
        ends = [(i * height // cells, -(-(i + 1) * height // cells)) for i in range(cells)]
        rows = [maps[:, :, start:stop].mean(2) for start, stop in ends]
        return F.adaptive_avg_pool2d(torch.stack(rows, 2), cells)


def _at(shape: tuple[int, int, int], seed: int, size: int, place: Tensor) -> Tensor:
    """Return the patches of made images at places [n, m], as rows [n m, channels size²]."""
    made = (image for part in generate_images(len(place), shape, seed) for image in part.split(8))
    rows = list[Tensor]()
    for images, at in zip(made, place.split(8), strict=True):
        found = F.unfold(images, size).transpose(1, 2)
        rows.append(found.gather(1, at[..., None].expand(-1, -1, found.shape[2])).flatten(0, 1))
    return torch.cat(rows)


def _contrast(patches: Tensor) -> Tensor:
    """Patches [..., k] without their mean and contrast."""
    centred = patches - patches.mean(-1, keepdim=True)
    deviation = centred.square().mean(-1, keepdim=True).sqrt()
    return centred / deviation.clamp_min(_FLAT)
