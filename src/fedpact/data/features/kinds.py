"""The [features] table of a plan, and the kinds of features that replace records before training.

The table is public, the same at every party, and part of the plan. A kind makes maps of images from
settings, a record's shape and a seed alone.

Dead leaves are made images: discs and bars of power-law sizes and random colours, each laid over
those before it (after Lee, Mumford, Huang, Occlusion models for natural images, IJCV 2001). Edges
and corners occur in them as in photographs, so they say how features of images vary.

Patches (Coates, Ng, The importance of encoding versus training with sparse coding and vector
quantization, ICML 2011) are freed of their mean and contrast, whitened, and held against filters
that are themselves patches; what exceeds a threshold, on either side, is averaged over a grid of
cells. Filters and whitening come from made images, half of the filters as drawn and half mirrored.

Scattering (Bruna, Mallat, Invariant scattering convolution networks, PAMI 2013; with differential
privacy: Tramèr, Boneh, arXiv 2011.11660): with Gabor filters ψ of two widths and 8 directions,
|x ∗ ψ| (16 maps), of the narrow ones once more ||x ∗ ψ| ∗ ψ'| with the wide ones (64 maps), and the
blurred image: 81 maps of each channel, averaged over a grid of cells and divided by their length,
so that faint textures count as much as strong outlines.

A record's maps do not depend on the records beside it. Scaling, whitening and unit length, the same
for all kinds, are in extract.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, Self

import torch
import torch.nn.functional as F
from pydantic import AfterValidator, BaseModel, Field, model_validator
from torch import Tensor

from fedpact.common.configuration import FROZEN, check_kinds
from fedpact.common.errors import InputError, ModelError
from fedpact.common.randomness.seeded import seeded_generator
from fedpact.common.run_settings import JoinedText
from fedpact.common.user_code import lower_digest

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

    The same for a seed, whatever start and stop; nobody writes to them. shape: (channels, height,
    width). Sizes r have a density in proportion to r^-3 between 1 pixel and half the shorter side.
    """
    channels, height, width = shape
    (ground, number, leaves), some = _draw(count, shape, seed), slice(start, stop)
    rows = torch.arange(height, dtype=torch.float32).view(1, -1, 1)
    columns = torch.arange(width, dtype=torch.float32).view(1, 1, -1)
    images = ground[some].expand(stop - start, channels, height, width).clone()
    for k, leaf in enumerate(leaves):
        radius, y, x, cos, sin, round_, colour = (part[some] for part in leaf)
        down, across = rows - y, columns - x
        along = across * cos + down * sin
        beside = down * cos - across * sin
        disc = along**2 + beside**2 <= radius**2
        bar = (along.abs() <= 2 * radius) & (beside.abs() <= radius / 2)
        inside = torch.where(round_, disc, bar)
        inside &= (k < number[some]).view(-1, 1, 1)
        images = torch.where(inside[:, None], colour, images)
    return images


@lru_cache(maxsize=2)
def _draw(
    count: int, shape: tuple[int, int, int], seed: int
) -> tuple[Tensor, Tensor, list[tuple[Tensor, ...]]]:
    """Return what draws the images: their ground colours, numbers of leaves [count], and leaves.

    A leaf: radius, y, x, cosine, sine, whether it is a disc, all [count, 1, 1], and its colour.
    """
    channels, height, width = shape
    draws = seeded_generator("dead leaves", seed, *shape)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=draws)

    def colours() -> Tensor:
        own = 0.2 * (uniform(count, channels, 1, 1) - 0.5) if channels > 1 else 0.0
        return (uniform(count, 1, 1, 1) + own).clamp(0, 1)

    def leaf() -> tuple[Tensor, ...]:
        # The inverse of the distribution function of r^-3 on [1, longest].
        radius = (1 - uniform(count, 1, 1) * (1 - longest**-2.0)) ** -0.5
        y, x = uniform(count, 1, 1) * height, uniform(count, 1, 1) * width
        angle = uniform(count, 1, 1) * math.pi
        round_ = uniform(count, 1, 1) < 0.5
        return radius, y, x, angle.cos(), angle.sin(), round_, colours()

    longest = min(height, width) / 2
    ground, leaves = colours(), (uniform(count) * _MOST).floor() + 1
    return ground, leaves, [leaf() for _ in range(_MOST)]


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
        some = some - some.mean(1, keepdim=True)
        contrast = some.square().mean(1, keepdim=True).sqrt()
        some = (some / contrast.clamp_min(_FLAT)).double()
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
        above = self._pool((found - self._threshold).relu_())
        below = self._pool(found.neg_().sub_(self._threshold).relu_())
        return torch.cat([above, below], 1)

    def _pool(self, maps: Tensor) -> Tensor:
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
            self._pool(_filter(each, self._blur)),
            self._pool(narrow),
            self._pool(wide),
            self._pool(second).reshape(len(each), -1, self._cells, self._cells),
        ]
        maps = torch.cat(pooled, 1).view(batch, channels * MAPS, self._cells, self._cells)
        length = maps.square().sum((2, 3), keepdim=True).sqrt()
        least = _FAINT * length.amax(1, keepdim=True)
        return maps / torch.maximum(length, least).clamp_min(1e-12)

    def _pool(self, maps: Tensor) -> Tensor:
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


def _filter(x: Tensor, filters: Tensor, stride: int = 1) -> Tensor:
    side = filters.shape[-1] // 2
    return F.conv2d(F.pad(x, (side, side, side, side), mode="replicate"), filters, stride=stride)


def _strength(x: Tensor, filters: Tensor, stride: int = 1) -> Tensor:
    """|x ∗ ψ| of images [n, 1, h, w]: [n, 8, h, w]."""
    real, imaginary = _filter(x, filters, stride).chunk(2, 1)
    return (real.square() + imaginary.square()).sqrt()


Shape = tuple[int, ...]
Maps = Callable[[Tensor], Tensor]
"""Records [B, channels, height, width] in [0, 1] -> numbers >= 0, [B, maps, rows, columns]."""


@dataclass(frozen=True)
class FeatureKind:
    """A way to compute features.

    make: (settings, shape (channels, height, width), seed) -> maps. own: the settings that only
    this kind, and others that name them, use. twins: of settings, for each map the place of the one
    that finds the same in a mirrored image, at the mirrored place; None if there are none.
    """

    make: Callable[[Any, tuple[int, int, int], int], Maps]
    own: tuple[str, ...] = ()
    twins: Callable[[Any], Tensor | None] = lambda _: None


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
    patches = settings.kind == "patches"
    if most < 1:
        least = settings.size if patches else 2
        raise ModelError(
            f"features.kind = {settings.kind!r} with images of shape {shape}: expected at least "
            f"{least} x {least} pixels{f', as size = {least}; lower size' * patches}"
        )
    cells = min(default, most) if settings.cells is None else settings.cells
    if not 1 <= cells <= most:
        raise ModelError(
            f"features.kind = {settings.kind!r} with cells = {cells}: an image of shape {shape} "
            f"has places for {most} x {most} at most; lower cells"
            + f", or size = {settings.size}"
            * patches
        )
    return cells


FEATURE_KINDS: Final[dict[str, FeatureKind]] = {
    "scattering": FeatureKind(
        lambda s, shape, _: Scattering(_cells(s, 5, min(shape[1:]) // 2, shape)), own=("cells",)
    ),
    "patches": FeatureKind(
        _patches, own=("cells", "filters", "size", "threshold"), twins=_patches_twins
    ),
}


_OWN: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_FACTORY: Final = "package.module:factory"
_OF_KINDS: Final = ("whiten", "mirror", "seed")
_OF_FACTORIES: Final = ("weights", "sha256", "trained_on", "seed")
_SMALLEST_IMAGE: Final = 8


def _check_kind(kind: str) -> str:
    if kind != "none" and kind not in FEATURE_KINDS and not _OWN.fullmatch(kind):
        raise ValueError(
            f"{kind!r} is no kind of features: expected one of none, {', '.join(FEATURE_KINDS)}, "
            "or your own as 'package.module:factory'"
        )
    return kind


class FeatureSettings(BaseModel):
    """What replaces each record before training. See the module.

    A setting that the kind does not use is refused.
    """

    model_config = FROZEN
    kind: Annotated[str, AfterValidator(_check_kind)] = "none"
    """"none" trains on the records as they are; "scattering", "patches", or your own as
    package.module:factory."""
    cells: int | None = Field(default=None, ge=1, le=64)
    """c of the grid of c x c that maps are averaged over, by default 5 for scattering and 2 for
    patches."""
    filters: int = Field(default=320, ge=2, le=10_000)
    """Of patches, how many."""
    size: int = Field(default=6, ge=2, le=64)
    """Of patches, how many pixels wide."""
    threshold: float = Field(default=0.25, ge=0)
    """Of patches, what a filter's answer has to exceed to count."""
    mirror: bool = False
    """The mean of a record's features and its mirror image's, for images that mean the same
    mirrored, as clothes do and digits do not."""
    whiten: bool = True
    """Whether features are decorrelated by the covariance that they have on made images."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """What made images follow from, by default the plan's."""
    weights: str | None = None
    """The file (.safetensors) with the weights of a module of your own."""
    sha256: Annotated[str | None, AfterValidator(lower_digest)] = None
    """Of that file, in hexadecimal."""
    trained_on: JoinedText | None = None
    """What those weights were chosen by; without it no ε is stated."""

    @property
    def used(self) -> bool:
        """Whether features replace the records."""
        return self.kind != "none"

    @property
    def factory(self) -> bool:
        """Whether the kind is a user's own module."""
        return self.used and self.kind not in FEATURE_KINDS

    @property
    def why_unstated(self) -> str:
        """Why no ε can be stated with these features; "" where it can."""
        if not self.factory or self.trained_on is not None:
            return ""
        return (
            f"features.kind = {self.kind!r} without features.trained_on: weights that were chosen "
            "by a site's records release them before anything is charged, so no ε can be stated; "
            'say what they were trained on (trained_on = "ImageNet-1k", or "nothing: drawn from a '
            'seed")'
        )

    @property
    def uncovered(self) -> str:
        """What ε does not cover of these features, "" for nothing."""
        if not self.factory:
            return ""
        what = "What the features' weights were trained on, which counts as public"
        return f"{what}: {self.trained_on}."

    def describe(self) -> str:
        """Return in a sentence what replaces the records; "" for nothing."""
        if not self.used:
            return ""
        of = "filters and whitening from made images: no record takes part"
        if self.factory:
            of = f"weights trained on: {self.trained_on or 'not said'}"
        return f"Features in place of the records, each of one record alone: {self.kind}; {of}."

    @model_validator(mode="after")
    def _fits_the_kind(self) -> Self:
        own = ("kind", *_settings_of(self.kind))
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in own and value != field.default:
                kinds = [kind for kind in (*FEATURE_KINDS, _FACTORY) if name in _settings_of(kind)]
                of = " and ".join(kinds)
                raise ValueError(
                    f"{name} is {value!r} with kind = {self.kind!r}: it is a setting of {of}; "
                    "leave it out or change the kind"
                )
        if (self.weights is None) != (self.sha256 is None):
            raise ValueError(
                f"weights = {self.weights!r} with sha256 = {self.sha256!r}: a file counts with its "
                "SHA-256 alone, so that all parties have the same; give both (sha256sum FILE)"
            )
        return self


def _settings_of(kind: str) -> tuple[str, ...]:
    if kind == "none":
        return ()
    return (*_OF_KINDS, *FEATURE_KINDS[kind].own) if kind in FEATURE_KINDS else _OF_FACTORIES


SETTINGS_OF_NO_KIND: Final = ("kind", *_OF_KINDS, *_OF_FACTORIES)
"""The settings that no kind has as its own."""
check_kinds(FEATURE_KINDS, FeatureSettings, SETTINGS_OF_NO_KIND)


def suggest_features(shape: tuple[int, ...], mirror: bool | None) -> dict[str, Any]:
    """Return the [features] table for records of this shape; none for tables.

    mirror: whether mirrored images mean the same; None: yes for colour images. Raises InputError:
    it is given, and the records are not images.
    """
    if len(shape) not in (2, 3) or min(shape[-2:]) < _SMALLEST_IMAGE:
        if mirror is not None:
            raise InputError(
                f"mirror is {mirror} for records of shape {shape}, which get no features: expected "
                f"images of {_SMALLEST_IMAGE} x {_SMALLEST_IMAGE} or more; leave it out"
            )
        return {}
    channels = shape[0] if len(shape) == 3 else 1
    mirrored = channels > 1 if mirror is None else mirror
    if channels > 1:
        return {"kind": "patches", "filters": 640, "mirror": mirrored, "seed": 0}
    return {"kind": "scattering", "mirror": mirrored, "seed": 0}
