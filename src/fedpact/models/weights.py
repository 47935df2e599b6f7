"""Files of weights that a plan names: with their SHA-256, so that all parties have the same."""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors

from fedpact.errors import ModelError


def block_of(path: Path, setting: str) -> bytes:
    """Return a file's bytes. setting: what names it, for errors. Raises ModelError: unreadable."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(
            f"{setting}: {path} cannot be read ({error.strerror}): expected the file of "
            "weights at every party; check the path, which is relative to the directory of a "
            "deployment's party, else to the working directory"
        ) from None


def checked(path: Path, sha256: str | None, setting: str) -> bytes:
    """Return a file's bytes. Raises ModelError: unreadable, or not of this SHA-256."""
    block = block_of(path, setting)
    found = hashlib.sha256(block).hexdigest()
    if found != sha256:
        raise ModelError(
            f"{setting}: {path} has SHA-256 {found}: the plan names {sha256}; get the "
            "file that the parties agreed on"
        )
    return block


def tensors_of(path: Path, block: bytes) -> Mapping[str, Any]:
    """Return the tensors of a file of safetensors or torch, by name. Raises what reading does."""
    if path.suffix == ".safetensors":
        return load_tensors(block)
    # weights_only: a file of torch's may otherwise hold code, which would be carried out.
    return torch.load(io.BytesIO(block), map_location="cpu", weights_only=True)
