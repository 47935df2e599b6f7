"""Files of weights that a plan names: with their SHA-256, so that all parties have the same."""

import hashlib
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors

from fedpact.common.errors import ModelError


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


def read_checked(path: Path, sha256: str | None, setting: str) -> bytes:
    """Return a file's bytes. Raises ModelError: unreadable, or not of this SHA-256."""
    block = block_of(path, setting)
    found = hashlib.sha256(block).hexdigest()
    if found != sha256:
        raise ModelError(
            f"{setting}: {path} has SHA-256 {found}: the plan names {sha256}; get the "
            "file that the parties agreed on"
        )
    return block


def tensors_of(path: Path, block: bytes, setting: str) -> Mapping[str, Any]:
    """Return the tensors of a file of safetensors or torch, by name. Raises ModelError: it is none.

    setting: what names the file, for errors.
    """
    try:
        if path.suffix == ".safetensors":
            return load_tensors(block)
        # weights_only: a file of torch's may otherwise hold code, which would be carried out.
        return torch.load(io.BytesIO(block), map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own text is of other settings than a user's
        raise ModelError(
            f"{setting}: {path} cannot be read as weights ({type(error).__name__}): expected a "
            "state_dict, as safetensors.torch.save_file (NAME.safetensors) or torch.save writes "
            "it, without code of other classes"
        ) from error


def lower_digest(sha256: str | None) -> str | None:
    """Return a SHA-256 in lower case. Raises ValueError: it is none."""
    if sha256 is None or re.fullmatch(r"[0-9a-f]{64}", sha256.lower()):
        return sha256 and sha256.lower()
    raise ValueError(
        f"{sha256!r} is no SHA-256: expected 64 hexadecimal digits, as `sha256sum FILE` prints them"
    )
