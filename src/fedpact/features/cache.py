"""Features on disk, beside the records: as secret as they are, and readable by their owner alone.

The key of NAME.features is a digest of the records, of what else their features follow from, and of
the version that computed them. What does not have it, other records', other settings', or a damaged
file, is made anew and replaced; a file that no cache begins like is somebody's, and stays as it is.
"""

import hashlib
import logging
from pathlib import Path
from typing import Final

from torch import Tensor

from fedpact.features import sealed
from fedpact.features.extract import Extractor, Found

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
    key = _key(x, extractor)
    held = sealed.load_tensors(cache, key)
    if held is not None and held["x"].shape == (len(x), extractor.width):
        return Found(held["x"], held["good"])
    found = extractor(x)
    try:
        sealed.store_tensors(cache, key, {"x": found.x, "good": found.good})
    except OSError as error:
        _logger.warning("features are not cached, and computed again next time: %s", error)
    return found


def _key(x: Tensor, extractor: Extractor) -> bytes:
    digest = hashlib.sha256(f"{extractor.key} {tuple(x.shape)} {x.dtype}".encode())
    digest.update(x.contiguous().numpy().tobytes())
    return digest.digest()
