"""Features on disk, beside the records: as secret as they are, and readable by their owner alone.

    NAME.features       SHA-256 of what follows and of the key, then safetensors: x, good

The key is a digest of the records, of what else their features follow from, and of the version that
computed them. What does not have it, other records', other settings', or a damaged file, is made
anew and replaced; a file that no cache begins like is somebody's, and stays as it is.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import Final

from safetensors.torch import load, save
from torch import Tensor

from fedpact.features.extract import Extractor, Found
from fedpact.files import PRIVATE, write_whole

SUFFIX: Final = ".features"
_DIGEST: Final = 32
_TABLE: Final = 512  # bytes that a table of two tensors is shorter than

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
    key = _key(x, extractor)
    found = _stored(cache, key, len(x), extractor.width)
    if found is None:
        found = extractor(x)
        block = save({"x": found.x, "good": found.good})
        try:
            _check_ours(cache)
            write_whole(cache, _seal(key, block), block)
        except OSError as error:
            _logger.warning("features are not cached, and computed again next time: %s", error)
    return found


def _stored(cache: Path, key: bytes, count: int, width: int) -> Found | None:
    try:
        if not cache.is_file():  # nor a pipe, which would be waited for
            return None
        block = cache.read_bytes()
        if _seal(key, block[_DIGEST:]) != block[:_DIGEST]:
            return None
        # As of a copy: what others may read is made private, or made anew where it cannot be.
        if cache.stat().st_mode & ~PRIVATE & 0o777:
            cache.chmod(PRIVATE)
    except OSError:
        return None
    held = load(block[_DIGEST:])
    found = Found(held["x"], held["good"])
    return found if found.x.shape == (count, width) else None


def _check_ours(cache: Path) -> None:
    """Raise OSError: the file is none that this module has written."""
    if not cache.exists():
        return
    if not (cache.is_file() and _begins_as_ours(cache)):
        raise FileExistsError(
            f"{cache} is there and is no cache of features; move it, so that they have their place"
        )


def _begins_as_ours(cache: Path) -> bool:
    """Whether a file is empty, or has behind a digest safetensors' table of x and good alone."""
    with cache.open("rb") as file:
        begins = file.read(_DIGEST + 8 + _TABLE)
    length = int.from_bytes(begins[_DIGEST : _DIGEST + 8], "little")
    try:
        table = json.loads(begins[_DIGEST + 8 : _DIGEST + 8 + length])
    except ValueError:
        return not begins
    return isinstance(table, dict) and table.keys() == {"x", "good"}


def _key(x: Tensor, extractor: Extractor) -> bytes:
    digest = hashlib.sha256(f"{extractor.key} {tuple(x.shape)} {x.dtype}".encode())
    digest.update(x.contiguous().numpy().tobytes())
    return digest.digest()


def _seal(key: bytes, block: bytes) -> bytes:
    return hashlib.sha256(key + block).digest()
