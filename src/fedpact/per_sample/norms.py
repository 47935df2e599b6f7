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

LEAST = 2.0**-500
"""A lower bound of squared norms of float64 rows, whose squares may underflow."""

SMALL = 1e-24
"""Up to 10^8 squares that are each below 1e-38 are a millionth of this."""

NEAR = 2.0**-40
"""‖u‖² below which a coefficient times g may be no number; see most_of."""

LARGEST = 2.0**120
"""The most that a coefficient may be, alone and times its gradient."""

_norms = cast(Callable[..., Tensor], torch.linalg.vector_norm)  # pyright: ignore[reportUnknownMemberType]


def square_sums(rows: Tensor) -> Tensor:
    """Σ v² over each row of rows [n, ...], as [n] in float64, of float32 good to about 1e-6.

    torch's vector norm needs no memory, but adds number after number: over 1,663,370 of them
    it errs by 4e-5. So blocks of a row are summed by it, and the blocks, or odd lengths, pairwise.
    Squares below 1e-38 are lost to float32, so rows that may be made of such are summed again. One
    beyond float32 is infinite.
    """
    return exact([rough_squares(rows)], [rows])


def rough_squares(rows: Tensor) -> Tensor:
    """The same in the rows' own type, unless on a GPU: too small where squares are lost to it."""
    flat = rows if rows.dim() == 2 else flatten_rows(rows)
    if not on_cpu(flat):
        # Float64 costs a reduction there little, and nobody may ask whether it was needed.
        return _norms(flat, dim=1, dtype=torch.float64).square_()
    if flat.shape[1] <= BLOCK:
        return _norms(flat, dim=1).square_()
    if flat.shape[1] % BLOCK == 0 and flat.is_contiguous():
        blocks = _norms(flat.view(len(flat), -1, BLOCK), dim=2)
        return blocks.square_().sum(1)
    # Squares have to be stored, but torch adds what is stored pairwise.
    return (flat * flat).sum(1)


def exact(rough: list[Tensor], pieces: list[Tensor]) -> Tensor:
    """What square_sums finds of pieces of rows, one after another, from their rough squares."""
    # All pieces are looked at in one comparison: the ordinary batch has no row that is so short.
    found = concatenate(rough).double()
    if pieces and pieces[0].dtype == torch.float64:
        return found.clamp_min(LEAST)
    if not on_cpu(found) or not (found < SMALL).any():
        return found
    start = 0
    for rows in pieces:
        part = found[start : start + len(rows)]
        small = part < SMALL
        part[small] = _norms(flatten_rows(rows)[small], dim=1, dtype=torch.float64).square_()
        start += len(rows)
    return found


def concatenate(tensors: list[Tensor]) -> Tensor:
    """torch.cat without the copy that it makes of a single tensor."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def wide(tensor: Tensor) -> Tensor:
    """Convert a 16-bit tensor to float32, as its sums and squares would overflow."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def flatten_rows(rows: Tensor) -> Tensor:
    """Rows [n, ...] as [n, m]; unlike reshape(n, -1) also where n or m is 0."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def most_of(g: Tensor, lengths: Tensor) -> Tensor | None:
    """The largest coefficients [B] of g [B, O] beside u of ‖u_j‖² [B] that are taken, None for all.

    c_j ‖g_j‖ is at most C / ‖u_j‖, which overflows float32 if u_j is tiny. Less of such a record is
    added then.
    """
    near = lengths < NEAR
    if on_cpu(near) and not near.any():
        return None
    return torch.where(near, LARGEST / square_sums(g).sqrt(), torch.inf)


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
