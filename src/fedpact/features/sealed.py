"""Tensors on disk under a key: what has another key, or is damaged, counts as not there.

SHA-256 of the key and of what follows, then safetensors
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from safetensors.torch import load, save
from torch import Tensor

from fedpact.files import PRIVATE, write_whole

_DIGEST: Final = 32
_TABLE: Final = 512  # bytes that a table of two tensors is shorter than


def load_tensors(path: Path, key: bytes) -> dict[str, Tensor] | None:
    """Return what is stored under a key, None if that is nothing or cannot be read."""
    try:
        if not path.is_file():  # nor a pipe, which would be waited for
            return None
        block = path.read_bytes()
        if _seal(key, block[_DIGEST:]) != block[:_DIGEST]:
            return None
        # As of a copy: what others may read is made private, or made anew where it cannot be.
        if path.stat().st_mode & ~PRIVATE & 0o777:
            path.chmod(PRIVATE)
    except OSError:
        return None
    return load(block[_DIGEST:])


def store_tensors(path: Path, key: bytes, tensors: Mapping[str, Tensor]) -> None:
    """Store tensors, readable by their owner alone. Raises OSError: it cannot be written.

    So it does where another file has the place: of whom that is, is not known.
    """
    if path.exists() and not (path.is_file() and _begins_as_ours(path, tensors.keys())):
        raise FileExistsError(
            f"{path} is there and is no cache of features; move it, so that they have their place"
        )
    block = save(dict(tensors))
    write_whole(path, _seal(key, block), block)


def _begins_as_ours(path: Path, names: Collection[str]) -> bool:
    """Whether a file is empty, or has behind a digest safetensors' table of these names alone."""
    with path.open("rb") as file:
        begins = file.read(_DIGEST + 8 + _TABLE)
    length = int.from_bytes(begins[_DIGEST : _DIGEST + 8], "little")
    try:
        table = json.loads(begins[_DIGEST + 8 : _DIGEST + 8 + length])
    except ValueError:
        return not begins
    return isinstance(table, dict) and table.keys() == set(names)


def _seal(key: bytes, block: bytes) -> bytes:
    return hashlib.sha256(key + block).digest()
