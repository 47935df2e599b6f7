"""What a module adds to a batch: per-sample squared norms, and its share of Σ_j c_j g_j.

A float32 norm must be good to 1e-5, however many numbers it is of and whatever their size: see
square_sums. Squares are float64 throughout.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fedpact.params import at_hand

KEEP_BYTES = 20 * 2**20
"""Up to this size a layer's per-sample gradients are kept from the norms to the sum.

Longer batches are measured in slices: larger tensors are slower to get than to use.
"""

CHUNK_BYTES = 2 * 2**20
"""About what is worked on at a time, so that it stays in the cache."""

BLOCK = 1024
"""So many squares torch may add one after another."""

LONGEST = 2.0**63
"""A gradient beyond counts as infinite: C over its norm could be a number that float32 rounds."""

SMALL = 1e-28
"""Up to 10^8 squares that are each below 1e-38 are a millionth of this."""

_norms = cast(Callable[..., Tensor], torch.linalg.vector_norm)  # pyright: ignore[reportUnknownMemberType]

Views = Mapping[str, Tensor]


@dataclass(frozen=True)
class Part:
    """A module's share: squares [B] is ‖g_j‖²; write(c [B], views) adds Σ_j c_j g_j to the views.

    Squares are in float64. views go by the module's own parameter names and are the module's alone.
    """

    squares: Tensor
    write: Callable[[Tensor, Views], None]


def square_sums(rows: Tensor) -> Tensor:
    """Σ v² over each row of rows [n, ...], as [n] in float64, of float32 good to about 1e-6.

    torch's vector norm needs no memory, but adds number after number: over 1,663,370 of them
    it errs by 4e-5. So blocks of a row are summed by it, and the blocks, or odd lengths, pairwise.
    Squares below 1e-38 are lost to float32, so rows that may be made of such are summed again. One
    beyond float32 is infinite.
    """
    return exact([rough_squares(rows)], [rows])


def rough_squares(rows: Tensor) -> Tensor:
    """The same in the rows' own type, unless on a card: too small where squares are lost to it."""
    flat = rows if rows.dim() == 2 else flattened(rows)
    if not at_hand(flat):
        return _norms(flat, dim=1, dtype=torch.float64).square_()
    if flat.shape[1] <= BLOCK:
        return _norms(flat, dim=1).square_()
    if flat.shape[1] % BLOCK == 0 and flat.is_contiguous():
        blocks = _norms(flat.view(len(flat), -1, BLOCK), dim=2)
        return blocks.square_().sum(1)
    return (flat * flat).sum(1)


def exact(rough: list[Tensor], pieces: list[Tensor]) -> Tensor:
    """What square_sums finds of pieces of rows, one after another, from their rough squares."""
    found = joined(rough, 0).double()
    if not at_hand(found) or not (found < SMALL).any():
        return found
    start = 0
    for rows in pieces:
        part = found[start : start + len(rows)]
        small = part < SMALL
        part[small] = _norms(flattened(rows)[small], dim=1, dtype=torch.float64).square_()
        start += len(rows)
    return found


def flattened(rows: Tensor) -> Tensor:
    """Rows [n, ...] as [n, m]; unlike reshape(n, -1) also where n or m is 0."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def chosen(good: Tensor, rows: Tensor) -> Tensor:
    """Return rows [n, ...] with zeros for those that are not good [n]."""
    return torch.where(good.view(-1, *[1] * (rows.dim() - 1)), rows, 0)


def joined(tensors: list[Tensor], dim: int) -> Tensor:
    """torch.cat without the copy that it makes of a single tensor."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def chunks(batch: int, size: int, most: int | None = None) -> list[slice]:
    """Slices of a batch to work on at a time: a sample takes `size` bytes, a slice holds `most`."""
    step = max(1, min(CHUNK_BYTES // max(1, size), most or batch))
    return [slice(i, min(i + step, batch)) for i in range(0, batch, step)]


def kept(gradients: Views) -> Part:
    """The Part of instantiated per-sample gradients [B, ...], by parameter name.

    On a card those that are not finite are set to 0; their squares still tell.
    """
    squares = torch.stack([square_sums(rows) for rows in gradients.values()]).sum(0)
    if not at_hand(squares):
        good = squares.isfinite()
        gradients = {name: chosen(good, rows) for name, rows in gradients.items()}

    def write(c: Tensor, views: Views) -> None:
        for name, rows in gradients.items():
            views[name].add_((c @ flattened(rows)).view_as(views[name]))

    return Part(squares, write)


def together(parts: list[Part]) -> Part:
    """One Part of several, whose parameters differ."""

    def write(c: Tensor, views: Views) -> None:
        for part in parts:
            part.write(c, views)

    return Part(torch.stack([part.squares for part in parts]).sum(0), write)


@dataclass(frozen=True)
class Sizes:
    """Of a weight whose gradient is Σ_t g_t u_tᵀ in each of `rows` blocks.

    batch: B; length: positions t; out, width: of g_t and u_t. element: bytes of a number.
    """

    batch: int
    rows: int
    length: int
    out: int
    width: int
    element: int

    @property
    def gram_is_cheaper(self) -> bool:
        """Multiplications a block: T²(K + O), twice as dear in float64, against T·K·O."""
        return 2 * self.length * (self.width + self.out) < self.width * self.out

    @property
    def gradient(self) -> int:
        """Bytes of one per-sample gradient."""
        return self.rows * self.out * self.width * self.element

    @property
    def grams(self) -> int:
        """Bytes that the Gram matrices of one sample take, with their factors."""
        return 2 * self.rows * self.length * (self.width + self.out + self.length) * self.element


class Outer(ABC):
    """A weight whose per-sample gradients are sums of outer products."""

    sizes: Sizes
    most: int | None = None
    """The most samples to instantiate at a time."""

    @abstractmethod
    def factors(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """(g [n·rows, O, T], u [n·rows, T, K]) of the samples in the chunk."""

    @abstractmethod
    def gradients(self, chunk: slice) -> Tensor:
        """Their per-sample gradients [n, |weight|]."""

    def arranged(self, total: Tensor) -> Tensor:
        """A sum [|weight|] of per-sample gradients, as the weight's numbers in their order."""
        return total

    @abstractmethod
    def write_sum(self, c: Tensor, views: Views) -> None:
        """Add Σ_j c_j G_j to views["weight"] without instantiating any G_j."""

    def part(self) -> Part:
        """The cheapest of three ways: Gram matrices, gradients that are kept, or made twice."""
        sizes = self.sizes
        if sizes.gram_is_cheaper:
            found = [self._gram_squares(chunk) for chunk in chunks(sizes.batch, sizes.grams)]
            return Part(torch.cat(found), self.write_sum)
        pieces = chunks(sizes.batch, sizes.gradient, self.most)
        if sizes.batch * sizes.gradient > KEEP_BYTES:
            found = [square_sums(self.gradients(chunk)) for chunk in pieces]
            return Part(torch.cat(found), self.write_sum)
        return self._kept(pieces)

    def _kept(self, pieces: list[slice]) -> Part:
        rows: list[Tensor] = []
        squares: list[Tensor] = []
        for chunk in pieces:
            rows.append(self.gradients(chunk))
            # While they are in the cache.
            squares.append(rough_squares(rows[-1]))

        def write(c: Tensor, views: Views) -> None:
            total = rows[0].new_zeros(rows[0].shape[1])
            for chunk, found in zip(pieces, rows, strict=True):
                total.addmv_(found.t(), c[chunk])
            views["weight"].add_(self.arranged(total).view_as(views["weight"]))

        return Part(exact(squares, rows), write)

    def _gram_squares(self, chunk: slice) -> Tensor:
        """‖G_j‖² = Σ_tt' (u_t·u_t')(g_t·g_t'), in float64 as the terms may cancel.

        Never below what rounding leaves in the sum itself: a gradient that cancels to nothing
        must not be weighted as if it were nothing.
        """
        g, u = self.factors(chunk)
        eps, u, g = torch.finfo(g.dtype).eps, u.double(), g.double()
        uu, gg = u @ u.mT, g.mT @ g
        lengths = (uu.diagonal(0, 1, 2) * gg.diagonal(0, 1, 2)).sqrt().sum(1)
        squares = torch.maximum((uu * gg).sum((1, 2)), (eps * lengths).square())
        return squares.view(-1, self.sizes.rows).sum(1)
