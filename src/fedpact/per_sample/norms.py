"""Norms of rows of numbers, in float64, with a relative error of at most 1e-5 for any length."""

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from fedpact.common.params import on_cpu

KEEP_BYTES = 64 * 2**20
"""Up to this size a layer's per-sample gradients are kept from the norms to the sum.

Making them again takes a product, and reading them back from memory a tenth of that.
"""

CHUNK_BYTES = 2 * 2**20
"""About what is worked on at a time, so that it stays in the cache."""

KEEP_BYTES_GPU, CHUNK_BYTES_GPU = 8 * 2**30, 2 * 2**30
"""The same on a GPU, which has no such cache, and whose memory is what limits a pass."""

BLOCK = 1024
"""So many squares torch may add one after another."""

LONGEST = 2.0**63
"""A gradient beyond counts as infinite: C over its norm could be a number that float32 rounds."""

_LEAST = {torch.float32: 1e-24, torch.float64: 2.0**-500}
"""By the type of rows, a lower bound of their squared norms, whose squares may underflow.

Up to 10^8 squares that are each below 1e-38 are a millionth of the first.
"""

_norms = cast(Callable[..., Tensor], torch.linalg.vector_norm)  # pyright: ignore[reportUnknownMemberType]


def square_sums(rows: Tensor) -> Tensor:
    """Σ v² over each row of rows [n, ...], as [n] in float64, of float32 good to about 1e-6.

    None is below `least_square` of the rows' type, and one beyond that type is infinite.
    """
    return rough_squares(rows).double().clamp_min(least_square(rows))


def least_square(rows: Tensor) -> float:
    """What a squared norm of such rows counts as at least: squares of less may underflow."""
    return _LEAST[rows.dtype]


def rough_squares(rows: Tensor) -> Tensor:
    """The same in the rows' own type: too small where squares are lost to it.

    torch's vector norm needs no memory, but adds number after number: over 1,663,370 of them
    it errs by 4e-5. So blocks of a row are summed by it, and the blocks, or odd lengths, pairwise.
    """
    flat = rows if rows.dim() == 2 else flatten_rows(rows)
    if not on_cpu(flat):
        # Float64 costs a reduction there little.
        return _norms(flat, dim=1, dtype=torch.float64).square_().to(flat.dtype)
    if flat.shape[1] <= BLOCK:
        return _norms(flat, dim=1).square_()
    if flat.shape[1] % BLOCK == 0 and flat.is_contiguous():
        blocks = _norms(flat.view(len(flat), -1, BLOCK), dim=2)
        return blocks.square_().sum(1)
    # Squares have to be stored, but torch adds what is stored pairwise.
    return (flat * flat).sum(1)


def wide(tensor: Tensor) -> Tensor:
    """Convert a 16-bit tensor to float32, as its sums and squares would overflow."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def flatten_rows(rows: Tensor) -> Tensor:
    """Rows [n, ...] as [n, m]; unlike reshape(n, -1) also where n or m is 0."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def keep_good(good: Tensor | None, rows: Tensor) -> Tensor:
    """Return rows [n, ...] with zeros for those that are not good [n]; None: all are."""
    if good is None:
        return rows
    return torch.where(good.view(-1, *[1] * (rows.dim() - 1)), rows, 0)


def chunk_bytes(like: Tensor) -> int:
    """About how many bytes to work on at a time."""
    return CHUNK_BYTES if on_cpu(like) else CHUNK_BYTES_GPU


def keep_bytes(like: Tensor) -> int:
    """Up to how many bytes a layer's per-sample gradients are kept from the norms to the sum."""
    return KEEP_BYTES if on_cpu(like) else KEEP_BYTES_GPU


def chunks(batch: int, size: int, like: Tensor, most: int) -> list[slice]:
    """Slices of a batch to work on at a time: a sample takes `size` bytes, a slice holds `most`."""
    return slices(batch, max(1, min(chunk_bytes(like) // max(1, size), most)))


def slices(batch: int, most: int) -> list[slice]:
    """A batch in slices of `most` records, the last of those that are left."""
    return [slice(i, min(i + most, batch)) for i in range(0, batch, most)]
