"""From records to what is trained or evaluated on: scaled columns, or features.

The same stage serves simulations, deployed sites and the server's public test set. What a record
becomes follows from that record, the plan and the weights; no record makes it fail. Features are
computed once, whitened, and cached.

A record's features are bit-identical whatever the other records are: the maps get batches of one
size, filled up with zeros, and a factory's module gets one record at a time. So adding or removing
a record changes no other features, and protecting a record's features protects the record.

    x -> [0, 1], by the record's own extremes -> maps, with mirror the mean of both images'
      -> square roots -> unit length -> (· - mean) whitened by made images' mean and covariance
      -> unit length -> float16

Square roots raise weak responses relative to strong ones, as in Fisher vectors (Perronnin, Sánchez,
Mensink, ECCV 2010). Unit length bounds every record's gradient by a clip that is chosen without
looking at records.

A cache file is the SHA-256 of the key and the content, then safetensors. The key is a digest of
everything that determines the content, records included. A damaged cache, or one with another key,
is recomputed. The whitening depends on generated images only, so it is public, and cached for all
records.
"""

import hashlib
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor

from fedpact.common.errors import DataError, ModelError
from fedpact.common.files import write_whole
from fedpact.common.params import init_worker_thread
from fedpact.data.download import cache_dir
from fedpact.data.features.kinds import (
    FEATURE_KINDS,
    MADE,
    FeatureSettings,
    dead_leaves,
    generate_images,
)
from fedpact.data.features.user_module import Backbone, factory_of
from fedpact.data.schema import RecordForm, Scaling
from fedpact.per_sample.products import linear

_DIGEST: Final = hashlib.sha256().digest_size


def load_tensors(path: Path, key: bytes) -> dict[str, Tensor] | None:
    """Return the tensors stored under a key, None if there are none or they cannot be read."""
    try:
        block = path.read_bytes()
    except OSError:
        return None
    found = hashlib.sha256(key + block[_DIGEST:]).digest() == block[:_DIGEST]
    return load(block[_DIGEST:]) if found else None


def store_tensors(path: Path, key: bytes, tensors: Mapping[str, Tensor]) -> None:
    """Store tensors, readable by their owner only. Raises OSError: the file cannot be written."""
    block = save(dict(tensors))
    write_whole(path, hashlib.sha256(key + block).digest(), block)


_SHRINKAGE: Final = 0.4
_MOST: Final = 8192
VERSION: Final = 2
"""Version of this computation; increase it with every change of a record's features."""

_BATCH: Final = 64
_LOOKED_AT: Final = 256  # generated images, to check that features differ
_AT_ONCE: Final = 8
"""Images mapped at a time; the maps of more do not fit the processor's cache."""
_ROUNDED: Final = 1e-3
"""Tolerance for rows of unit length: machines differ by less, other weights by more."""
TELL_EVERY: Final = 10.0
"""Seconds between reports of progress to this machine's owner."""


Answer = tuple[float, ...]
"""The first features of a made-up record, which identify a user's module on any machine."""


def same_answer(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two answers are of the same code with the same weights, up to rounding."""
    return len(one) == len(other) and all(
        abs(a - b) <= _ROUNDED for a, b in zip(one, other, strict=True)
    )


@dataclass(frozen=True)
class Found:
    """Features x [n, p], float16, or scaled records x [n, ...]; good [n]: which records have any.

    A record has none, and a row of zeros, if its features are not finite or the factory's module
    raises an error.
    """

    x: Tensor
    good: Tensor


class Extractor:
    """Computes features of records of one shape. at: the base of a relative path of weights.

    Raises ModelError: records of an unsuitable shape, or a factory that fails.
    """

    def __init__(
        self, settings: FeatureSettings, shape: tuple[int, ...], seed: int, at: Path
    ) -> None:
        self._settings, self._shape = settings, shape
        self._seed = seed if settings.seed is None else settings.seed
        if settings.factory:
            self._backbone = Backbone(settings, shape, self._seed, at)
        else:
            self._image = _image_shape(settings, shape)
            kind = FEATURE_KINDS[settings.kind]
            self._maps = kind.make(settings, self._image, self._seed)
            self._twins = kind.twins(settings)

    @cached_property
    def width(self) -> int:
        """The number of features of a record, p."""
        if self._settings.factory:
            return self._backbone.width
        with torch.no_grad():
            return self._map(torch.zeros(1, *self._shape)).shape[1]

    @property
    def key(self) -> str:
        """A digest of everything except the records that determines features; it is public."""
        parts = (
            VERSION,
            torch.__version__,
            self._settings.model_dump(mode="json"),
            self._shape,
            self._seed,
            self._backbone.fingerprint if self._settings.factory else "",
        )
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def answer(self) -> Answer:
        """What identifies the user's module."""
        return self._backbone.answer

    def __call__(self, x: Tensor, cache: Path | None = None) -> Found:
        """Return the features of records x [n, *shape], float32 on the CPU.

        cache: the file that has them, or gets them; they are the same without, as all are rounded
        to float16. One that cannot be written is reported in this machine's log.
        """
        if cache is None:
            return self._compute(x)
        digest = hashlib.sha256(f"{self.key} {tuple(x.shape)} {x.dtype}".encode())
        digest.update(x.contiguous().numpy().tobytes())
        held = load_tensors(cache, digest.digest())
        if held is not None and held["x"].shape == (len(x), self.width):
            return Found(held["x"], held["good"])
        found = self._compute(x)
        try:
            store_tensors(cache, digest.digest(), {"x": found.x, "good": found.good})
        except OSError as error:
            _logger.warning("features are not cached, and computed again next time: %s", error)
        return found

    def _compute(self, x: Tensor) -> Found:
        found = torch.zeros(len(x), self.width, dtype=torch.float16)
        good = torch.ones(len(x), dtype=torch.bool)
        if self._settings.factory:
            size, parts = 1, map(self._alone, x.split(1) if len(x) else ())
        else:
            # Compute it once, not in every thread.
            _ = self._whitening if self._settings.whiten else self._tells
            size, parts = _BATCH, _by_threads(self._batch, x.split(_BATCH) if len(x) else ())
        told = _with_progress(parts, len(x), "records")
        for start, some in zip(range(0, len(x), size), told, strict=True):
            rows = slice(start, start + size)
            good[rows] = some.isfinite().all(1)
            found[rows] = torch.where(good[rows, None], some, 0).half()
        return Found(found, good)

    @torch.no_grad()
    def _alone(self, x: Tensor) -> Tensor:
        nothing = torch.full((1, self.width), torch.nan)
        try:
            found = self._backbone(x)
        except Exception:  # whatever a module may raise at a record
            return nothing
        return F.normalize(found[None]) if len(found) == self.width else nothing

    @torch.no_grad()
    def _batch(self, x: Tensor) -> Tensor:
        full = x.new_zeros(_BATCH, *self._shape)
        full[: len(x)] = x
        found = self._map_all(full)
        if self._settings.whiten:
            mean, whitening = self._whitening
            found = F.normalize(linear(found - mean, whitening))
        return found[: len(x)]

    @torch.no_grad()
    def _map_all(self, x: Tensor) -> Tensor:
        return torch.cat([self._map(some) for some in x.split(_AT_ONCE)])

    def _map(self, x: Tensor) -> Tensor:
        """Return the maps of records x [B, *shape] as unit rows [B, p]."""
        x = _scale(x.reshape(len(x), *self._image))
        maps = self._maps(x)
        if self._settings.mirror:
            twins = self._twins
            other = self._maps(x.flip(3)) if twins is None else maps[:, twins].flip(3)
            maps = (maps + other) / 2
            # The right half mirrors the left.
            maps = maps[..., : (maps.shape[3] + 1) // 2]
        return F.normalize(maps.flatten(1).clamp_min(0).sqrt())

    @cached_property
    def _whitening(self) -> tuple[Tensor, Tensor]:
        """The mean [p] of generated images' features, and their whitening [p, p], float32.

        The covariance is Σ + (ρ tr Σ / p) I with ρ = 0.4. The whitening is the inverse of its
        Cholesky factor, which is continuous in Σ, so machines with different rounding agree.
        """
        if self.width > _MOST:
            raise ModelError(
                f"features.kind = {self._settings.kind!r} finds {self.width} numbers in a record: "
                f"expected at most {_MOST} with whiten = true; lower cells or filters, or set "
                "whiten = false"
            )
        key, held = bytes.fromhex(self.key), None
        # Without a cache directory it is computed each time.
        with suppress(DataError):
            held = load_tensors(cache_dir() / "whitening" / self.key, key)
        if held is None:
            made = generate_images(MADE, self._image, self._seed)
            parts = _by_threads(self._map_all, (s for part in made for s in part.split(_BATCH)))
            found = torch.cat([*_with_progress(parts, MADE, "made images, to whiten by")])
            self._check_tells(found)
            held = _whitening(found.double())
            with suppress(DataError, OSError):
                store_tensors(cache_dir() / "whitening" / self.key, key, held)
        return held["mean"].clone(), held["whitens'"].clone().T

    @cached_property
    def _tells(self) -> bool:
        """True if features without whitening differ. Raises ModelError: they do not."""
        made = dead_leaves(MADE, self._image, self._seed, 0, _LOOKED_AT)
        self._check_tells(self._map_all(made))
        return True

    def _check_tells(self, found: Tensor) -> None:
        some = found[:_LOOKED_AT]
        if found.isfinite().all() and len(torch.unique(some, dim=0)) > len(some) / 2:
            return
        of = self._settings
        what = "larger images"
        if of.kind == "patches":
            what = f"a lower threshold than {of.threshold:g}, or larger images"
        raise ModelError(
            f"features.kind = {of.kind!r} finds the same in most made images of shape "
            f"{self._image}: expected {what}"
        )


@lru_cache(maxsize=2)
def extractor(settings: str, shape: tuple[int, ...], seed: int, at: Path, own: int) -> Extractor:
    """Return the extractor of a plan's features; filters and whitening are made once a process.

    settings: FeatureSettings as JSON, of a kind other than "none". seed: the plan's. own: the id of
    the factory that its kind names now, 0 for none.
    """
    del own  # part of the cache's key only
    return Extractor(FeatureSettings.model_validate_json(settings), shape, seed, at)


def _whitening(found: Tensor) -> dict[str, Tensor]:
    """Return the mean of features [n, p], float64, which are changed, and the whitening's T."""
    mean = found.mean(0)
    found -= mean
    covariance = found.T @ found / len(found)
    covariance.diagonal().add_(_SHRINKAGE / len(mean) * covariance.trace())
    factor = torch.linalg.cholesky(covariance)
    eye = torch.eye(len(mean), dtype=torch.float64)
    inverse = torch.linalg.solve_triangular(factor, eye, upper=False)
    # In the same memory layout, so that products with it round in the same way.
    return {"mean": mean.float(), "whitens'": inverse.float().T}


def _with_progress(parts: Iterable[Tensor], count: int, what: str) -> Iterator[Tensor]:
    told, done = time.monotonic(), 0
    for part in parts:
        done += len(part)
        if time.monotonic() - told >= TELL_EVERY:
            told = time.monotonic()
            print(f"features of {done:,} of {count:,} {what}", file=sys.stderr, flush=True)
        yield part


def _by_threads(work: Callable[[Tensor], Tensor], parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the result of `work` for each part, in order, computed by torch's number of threads.

    Each of them uses one torch thread: several would wait for each other on a busy machine, and
    rounding would depend on their number.
    """
    number, waiting = torch.get_num_threads(), deque[Future[Tensor]]()
    pool = ThreadPoolExecutor(number, "features", init_worker_thread)
    try:
        for part in parts:
            if len(waiting) == 2 * number:
                yield waiting.popleft().result()
            waiting.append(pool.submit(work, part))
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        # A worker's setting is inherited by later threads: restore it.
        torch.set_num_threads(number)


def _image_shape(settings: FeatureSettings, shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) not in (2, 3):
        raise ModelError(
            f"features.kind = {settings.kind!r} with records of shape {shape}: expected images, "
            "(height, width) or (channels, height, width); leave [features] out for other records, "
            "or name a 'package.module:factory' that takes them"
        )
    channels, height, width = shape if len(shape) == 3 else (1, *shape)
    return channels, height, width


def _scale(x: Tensor) -> Tensor:
    """Scale images [B, c, h, w], each from its minimum and maximum to 0 and 1."""
    # Halve first, so that the difference does not overflow.
    x = x / 2
    x = x - x.amin((1, 2, 3), keepdim=True)
    return x / x.amax((1, 2, 3), keepdim=True).clamp_min(1e-30)


SUFFIX: Final = ".features"

_logger = logging.getLogger("fedpact")


def beside(records: Path) -> Path:
    """Return the cache file for the features of a file's records."""
    return records.with_name(records.name + SUFFIX)


_SHOWN = 3
_NOTHING = RecordForm()


@dataclass(frozen=True)
class FeatureStage:
    """A plan's features. seed: the plan's. at: where a relative path of weights begins.

    form: what is declared of the records, which are scaled by it first.
    """

    settings: FeatureSettings
    seed: int
    at: Path = Path()
    form: RecordForm = _NOTHING

    @property
    def used(self) -> bool:
        """Whether the records are changed."""
        return self.settings.used or self._scaling(torch.empty(0)).used

    def names(self, record: Tensor, features: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that a table's become; () for features."""
        return () if self.settings.used else self._scaling(record, features).names

    def released(self, record: Tensor, features: Sequence[str]) -> tuple[int, ...]:
        """Return the places, in the result, of columns scaled by what sites release."""
        return () if self.settings.used else self._scaling(record, features).released

    def example(self, record: Tensor) -> Tensor:
        """Return zeros of the form that a record [*shape] becomes.

        Raises ModelError: records that these features are not made for.
        """
        if not self.settings.used:
            return self._scaling(record).example(record)
        return torch.zeros(self._extractor(record).width)

    def key(self, record: Tensor) -> str:
        """Return a public digest of all that features follow from, but for the records."""
        return self._extractor(record).key

    def answer(self, record: Tensor) -> Answer:
        """Return what identifies features of a user's own module; () for others."""
        return self._extractor(record).answer if self.settings.factory else ()

    def __call__(
        self,
        x: Tensor,
        example: Tensor,
        origin: str,
        kept: Path | None,
        features: Sequence[str] = (),
        known: Tensor | None = None,
    ) -> Found:
        """Return what replaces records x [n, *shape] on the CPU.

        example: a record [*shape]. origin: the records' file, for this machine's log alone. kept:
        where their features are cached, or None. features: a table's columns. known: bool [n], the
        records that are already left out, and reported elsewhere.
        """
        scaling = self._scaling(example, features)
        x = scaling(x)
        told = torch.zeros(len(x), dtype=torch.bool) if known is None else known
        good = torch.ones(len(x), dtype=torch.bool)
        if scaling.used:
            good = x.isfinite().flatten(1).all(1)
            x = torch.where(good.view(-1, *[1] * (x.dim() - 1)), x, 0)
            _warn(origin, good | told, "no finite numbers as they are scaled by [records]")
        if not self.settings.used:
            return Found(x, good)
        found = self._extractor(example)(x, kept)
        # Those without a scale are reported above.
        _warn(origin, found.good | ~good | told, f"no features of kind {self.settings.kind}")
        return Found(torch.where(good[:, None], found.x, 0).float(), good & found.good)

    def _scaling(self, record: Tensor, features: Sequence[str] = ()) -> Scaling:
        return Scaling.of(self.form, record.shape, features)

    def _extractor(self, record: Tensor) -> Extractor:
        """Return what makes the features of records of this form, once they are scaled."""
        record = self._scaling(record).example(record)
        if not record.is_floating_point():
            raise ModelError(
                f"features.kind = {self.settings.kind!r} with records of {record.dtype}: expected "
                "measurements; store them as float32, or leave [features] out for words"
            )
        # As it is by now: a notebook reloads the module that it is changing.
        own = id(factory_of(self.settings.kind)) if self.settings.factory else 0
        told, shape = self.settings.model_dump_json(), tuple(record.shape)
        return extractor(told, shape, self.seed, self.at.absolute(), own)


def _warn(origin: str, good: Tensor, what: str) -> None:
    bad = (~good).nonzero()[:, 0].tolist()
    if bad:
        _logger.warning(
            "%s: %d of %d records have %s and are left out: places %s (counted from 0)",
            *(origin, len(bad), len(good), what),
            ", ".join(map(str, bad[:_SHOWN])) + (", ..." if len(bad) > _SHOWN else ""),
        )
