"""Features of records: computed once, whitened, and cached.

A record's features are the same bits whatever other records there are: the maps get batches of one
size, filled up with zeros, and a factory's module gets each record alone. So one record more or
less changes no other's features, and protecting a record's features protects the record.

    x -> [0, 1], by the record's own extremes -> maps, with mirror the mean of both images'
      -> square roots -> unit length -> (· - mean) whitened by made images' mean and covariance
      -> unit length -> float16

Square roots make faint answers count beside strong ones, as in Fisher vectors (Perronnin, Sánchez,
Mensink, ECCV 2010): 0.6 points on Fashion-MNIST. Unit length keeps every record's gradient within a
clip that is chosen without looking.

A cache is _MAGIC, the SHA-256 of a key and of the rest, then safetensors. The key of NAME.features
is a digest of the records and of all else that their features follow from. A damaged cache, or one
with another key, is made anew; a file that begins otherwise is not ours and stays as it is. What
whitens follows from made images alone, so it is public, and cached for all records.
"""

import hashlib
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from fedpact.common.files import PRIVATE, write_whole
from fedpact.common.params import init_worker_thread
from fedpact.data.download import cache_dir
from fedpact.data.features.kinds import FEATURE_KINDS, MADE, dead_leaves, generate_images
from fedpact.data.features.settings import FeatureSettings
from fedpact.data.features.user_module import Backbone
from fedpact.per_sample.products import linear

_MAGIC: Final = b"fedpact features\n"
_BODY: Final = len(_MAGIC) + 32


def load_tensors(path: Path, key: bytes) -> dict[str, Tensor] | None:
    """Return what is stored under a key, None if that is nothing or cannot be read."""
    try:
        if not path.is_file():  # nor a pipe, which would be waited for
            return None
        block = path.read_bytes()
        if _start(key, block[_BODY:]) != block[:_BODY]:
            return None
        # As of a copy: what others may read is made private, or made anew where it cannot be.
        if path.stat().st_mode & ~PRIVATE & 0o777:
            path.chmod(PRIVATE)
    except OSError:
        return None
    return load(block[_BODY:])


def store_tensors(path: Path, key: bytes, tensors: Mapping[str, Tensor]) -> None:
    """Store tensors, readable by their owner alone. Raises OSError: it cannot be written.

    So it does where the file is not a cache.
    """
    if path.exists() and not (path.is_file() and (path.read_bytes() or _MAGIC).startswith(_MAGIC)):
        raise FileExistsError(f"{path} is no cache of features; move it to make room for one")
    block = save(dict(tensors))
    write_whole(path, _start(key, block), block)


def _start(key: bytes, block: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key + block).digest()


_SHRINKAGE: Final = 0.4
_MOST: Final = 8192


def whitening(key: str, kind: str, p: int, made: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean [p] of made images' features and what whitens them [p, p], float32.

    Covariance Σ + (ρ tr Σ / p) I with ρ = 0.4; what whitens is the inverse of its Cholesky factor,
    which follows continuously from Σ, so machines that round in other ways agree.

    key: what they follow from, as a digest. made: returns made images' features [n, p].
    Raises ModelError: there are too many features for that.
    """
    if p > _MOST:
        raise ModelError(
            f"features.kind = {kind!r} finds {p} numbers in a record: expected at most {_MOST} "
            "with whiten = true; lower cells or filters, or set whiten = false"
        )
    of, held = bytes.fromhex(key), None
    # Without a directory to keep it in, as where nobody is at home, it is made each time.
    with suppress(DataError):
        held = load_tensors(cache_dir() / "whitening" / key, of)
    if held is None:
        found = made().double()
        mean = found.mean(0)
        found -= mean
        covariance = found.T @ found / len(found)
        ridge = _SHRINKAGE / p * covariance.trace()
        covariance.diagonal().add_(ridge)
        factor = torch.linalg.cholesky(covariance)
        eye = torch.eye(p, dtype=torch.float64)
        inverse = torch.linalg.solve_triangular(factor, eye, upper=False)
        # As it lies in memory, so that products with it round as they did.
        held = {"mean": mean.float(), "whitens'": inverse.float().T}
        with suppress(DataError, OSError):
            store_tensors(cache_dir() / "whitening" / key, of, held)
    return held["mean"].clone(), held["whitens'"].clone().T


VERSION: Final = 2
"""Of what is computed here: one more wherever a record's features become others."""

_BATCH: Final = 64
_LOOKED_AT: Final = 256  # made images, by which features are found to differ
_AT_ONCE: Final = 8
"""So many images have their maps at a time: those of more leave the processor's cache."""
_ROUNDED: Final = 1e-3
"""Of rows of unit length: machines differ by less, weights that were drawn anew by more."""
TELL_EVERY: Final = 10.0
"""Seconds: so often this machine's owner is told how far it is."""


@dataclass(frozen=True)
class MadeBy:
    """What tells features of somebody's own from others, on any machine.

    source: the SHA-256 of the factory's file. answer: how what it makes of a made-up record begins.
    """

    source: str = ""
    answer: tuple[float, ...] = ()

    def is_as(self, other: "MadeBy") -> bool:
        """Whether both are the same code with the same weights, but for how machines round."""
        near = len(self.answer) == len(other.answer) and all(
            abs(a - b) <= _ROUNDED for a, b in zip(self.answer, other.answer, strict=True)
        )
        return self.source == other.source and near


@dataclass(frozen=True)
class Found:
    """What stands in place of records, x [n, ...], and which have any, bool [n]: the others' are 0.

    Features are float16 [n, p]. A record has none where they are not finite, or where an operation
    of a factory's module raises at it.
    """

    x: Tensor
    good: Tensor


class Extractor:
    """Computes features of records of one shape. at: where a relative path of weights begins.

    Raises ModelError: records that these features are not made for, or a factory that fails.
    """

    def __init__(
        self, settings: FeatureSettings, shape: tuple[int, ...], seed: int, at: Path
    ) -> None:
        if torch.get_default_dtype() != torch.float32:
            raise ModelError(
                f"torch's default type is {torch.get_default_dtype()}: features are of float32; "
                "call torch.set_default_dtype(torch.float32) before"
            )
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
        """How many numbers a record's features are, p."""
        if self._settings.factory:
            return self._backbone.width
        with torch.no_grad():
            return self._mapped(torch.zeros(1, *self._shape)).shape[1]

    @property
    def key(self) -> str:
        """What features follow from besides the records, as a digest; all of it is public."""
        parts = (
            VERSION,
            torch.__version__,
            self._settings.model_dump(mode="json"),
            self._shape,
            self._seed,
            self._backbone.source if self._settings.factory else "",
            self._backbone.fingerprint if self._settings.factory else "",
        )
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def made_by(self) -> MadeBy:
        """What code of one's own made them; of the built-in kinds nothing."""
        own = self._settings.factory
        return MadeBy(self._backbone.source, self._backbone.answer) if own else MadeBy()

    def __call__(self, x: Tensor) -> Found:
        """Return the features of records x [n, *shape], float32 on the CPU."""
        found = torch.zeros(len(x), self.width, dtype=torch.float16)
        good = torch.ones(len(x), dtype=torch.bool)
        if not self._settings.factory:
            # Once, not by every thread.
            _ = self._whitening if self._settings.whiten else self._tells
        size = 1 if self._settings.factory else _BATCH
        parts = _told(self._each(x), len(x), "records")
        for start, some in zip(range(0, len(x), size), parts, strict=True):
            rows = slice(start, start + size)
            good[rows] = some.isfinite().all(1)
            found[rows] = torch.where(good[rows, None], some, 0).half()
        return Found(found, good)

    def _each(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the features [b, p], float32, of one part of the records after another."""
        if self._settings.factory:
            yield from map(self._alone, x.split(1) if len(x) else ())
        else:
            yield from _by_threads(self._batch, x.split(_BATCH) if len(x) else ())

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
        found = self._mapped_all(full)
        if self._settings.whiten:
            mean, whitening = self._whitening
            found = F.normalize(linear(found - mean, whitening))
        return found[: len(x)]

    @torch.no_grad()
    def _mapped_all(self, x: Tensor) -> Tensor:
        return torch.cat([self._mapped(some) for some in x.split(_AT_ONCE)])

    def _mapped(self, x: Tensor) -> Tensor:
        """Unit rows [B, p] of what the maps find in records x [B, *shape]."""
        x = _scaled(x.reshape(len(x), *self._image))
        maps = self._maps(x)
        if self._settings.mirror:
            twins = self._twins
            other = self._maps(x.flip(3)) if twins is None else maps[:, twins].flip(3)
            maps = (maps + other) / 2
            # What is right of the middle is the left's twin.
            maps = maps[..., : (maps.shape[3] + 1) // 2]
        return F.normalize(maps.flatten(1).clamp_min(0).sqrt())

    @cached_property
    def _whitening(self) -> tuple[Tensor, Tensor]:
        return whitening(self.key, self._settings.kind, self.width, self._made)

    def _made(self) -> Tensor:
        """Return made images' features [MADE, p]."""
        made = generate_images(MADE, self._image, self._seed)
        parts = (some for part in made for some in part.split(_BATCH))
        found = list(_told(_by_threads(self._mapped_all, parts), MADE, "made images, to whiten by"))
        self._check_tells(whole := torch.cat(found))
        return whole

    @cached_property
    def _tells(self) -> bool:
        """Whether features that are not whitened differ. Raises ModelError: they do not."""
        made = dead_leaves(MADE, self._image, self._seed, 0, _LOOKED_AT)
        self._check_tells(self._mapped_all(made))
        return True

    def _check_tells(self, found: Tensor) -> None:
        """Raise ModelError: of made images' features [n, p] most agree."""
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
def extractor(
    settings: str, shape: tuple[int, ...], seed: int, at: Path, own: int = 0
) -> Extractor:
    """Return the extractor of a plan's features; filters and whitening are made once a process.

    settings: FeatureSettings as JSON, of a kind that is not "none". seed: the plan's. own: which
    factory its kind names at this moment, 0 where it names none.
    """
    del own  # another one, another extractor
    return Extractor(FeatureSettings.model_validate_json(settings), shape, seed, at)


def _told(parts: Iterable[Tensor], count: int, what: str) -> Iterator[Tensor]:
    """Yield parts of features as they come, and tell this machine's owner how far that is."""
    told, done = time.monotonic(), 0
    for part in parts:
        done += len(part)
        if time.monotonic() - told >= TELL_EVERY:
            told = time.monotonic()
            print(f"features of {done:,} of {count:,} {what}", file=sys.stderr, flush=True)
        yield part


def _by_threads(work: Callable[[Tensor], Tensor], parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield what `work` makes of each part, in order, by as many threads as torch may use.

    Each has one of torch's: those of one operation wait for each other wherever something else is
    at work on a core, and what it rounds would follow from how many there are.
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
        # What one thread is told is what threads that begin later are told.
        torch.set_num_threads(number)


def _image_shape(settings: FeatureSettings, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (channels, height, width)."""
    if len(shape) not in (2, 3):
        raise ModelError(
            f"features.kind = {settings.kind!r} with records of shape {shape}: expected images, "
            "(height, width) or (channels, height, width); leave [features] out for other records, "
            "or name a 'package.module:factory' that takes them"
        )
    channels, height, width = shape if len(shape) == 3 else (1, *shape)
    return channels, height, width


def _scaled(x: Tensor) -> Tensor:
    """Images [B, c, h, w] with each one's smallest number at 0 and its largest at 1."""
    # Halves, as the difference of two large numbers may be none.
    x = x / 2
    x = x - x.amin((1, 2, 3), keepdim=True)
    return x / x.amax((1, 2, 3), keepdim=True).clamp_min(1e-30)


SUFFIX: Final = ".features"

_logger = logging.getLogger("fedpact")


def beside(records: Path) -> Path:
    """Return where the features of a file's records are cached."""
    return records.with_name(records.name + SUFFIX)


def features(x: Tensor, extractor: Extractor, cache: Path | None) -> Found:
    """Return the features of records x [n, ...], from the cache where they are there.

    cache: its file, or None for none. The numbers are the same, with and without it: all of them
    are rounded to float16. A cache that cannot be written, or whose place another file has, is told
    of in this machine's log.
    """
    if cache is None:
        return extractor(x)
    digest = hashlib.sha256(f"{extractor.key} {tuple(x.shape)} {x.dtype}".encode())
    digest.update(x.contiguous().numpy().tobytes())
    key = digest.digest()
    held = load_tensors(cache, key)
    if held is not None and held["x"].shape == (len(x), extractor.width):
        return Found(held["x"], held["good"])
    found = extractor(x)
    try:
        store_tensors(cache, key, {"x": found.x, "good": found.good})
    except OSError as error:
        _logger.warning("features are not cached, and computed again next time: %s", error)
    return found
