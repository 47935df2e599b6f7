"""What a module adds to a batch: per-sample squared norms, and its share of Σ_j c_j g_j.

Norms are Σ (v * v) over chunks: torch sums pairwise, so a float32 norm is good to about 1e-7.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

KEEP_BYTES = 128 * 2**20
"""Up to this size a layer's per-sample gradients are kept from the norms to the sum."""

CHUNK_BYTES = 5 * 2**20
"""About what is worked on at a time, so that it stays in the cache: patches and their products."""

Views = Mapping[str, Tensor]


@dataclass(frozen=True)
class Part:
    """A module's share: squares [B] is ‖g_j‖²; write(c [B], views) sets each view to Σ_j c_j g_j.

    views go by the module's own parameter names; they hold zeros and are the module's alone.
    """

    squares: Tensor
    write: Callable[[Tensor, Views], None]


def square_sums(rows: Tensor) -> Tensor:
    """Σ v² over each row of rows [n, ...], as [n]."""
    flat = flattened(rows)
    return (flat * flat).sum(1)


def flattened(rows: Tensor) -> Tensor:
    """Rows [n, ...] as [n, m]; unlike reshape(n, -1) also where n or m is 0."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def joined(tensors: list[Tensor], dim: int) -> Tensor:
    """torch.cat without the copy that it makes of a single tensor."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def kept(gradients: Views) -> Part:
    """The Part of per-sample gradients [B, ...] at hand, by parameter name."""

    def write(c: Tensor, views: Views) -> None:
        for name, rows in gradients.items():
            torch.mv(flattened(rows).t(), c, out=views[name].view(-1))

    return Part(torch.stack([square_sums(rows) for rows in gradients.values()]).sum(0), write)


def together(parts: list[Part]) -> Part:
    """One Part of several, whose parameters differ."""

    def write(c: Tensor, views: Views) -> None:
        for part in parts:
            part.write(c, views)

    return Part(torch.stack([part.squares for part in parts]).sum(0), write)


@dataclass(frozen=True)
class Outer:
    """G_j = Σ_t g_jt u_jtᵀ [R, O, K] for each of B samples.

    A sample has R rows (the groups of a convolution): g [B·R, O, T]; patches(i, j) gives the rows
    of samples i..j as [(j - i)·R, T, K]. weight: from [R, O, K] to the parameter's shape.
    """

    grads: Tensor
    patches: Callable[[int, int], Tensor]
    rows: int
    width: int
    weight: Callable[[Tensor], Tensor]

    @property
    def batch(self) -> int:
        """B."""
        return len(self.grads) // self.rows

    def chunks(self, numbers: int) -> list[tuple[int, int]]:
        """Ranges of samples to work on at a time, where a row takes so many numbers."""
        step = max(1, CHUNK_BYTES // max(1, numbers * self.rows * self.grads.element_size()))
        return [(i, min(i + step, self.batch)) for i in range(0, self.batch, step)]

    def part(self) -> Part:
        """The cheapest of the three ways."""
        _, out, length = self.grads.shape
        # Multiplications a row: T²(K + O), twice as dear in float64, against T·K·O.
        if 2 * length * (self.width + out) < self.width * out:
            return Part(self.gram_squares(), self.write_product)
        size = self.grads.shape[0] * out * self.width * self.grads.element_size()
        if size > KEEP_BYTES:
            return Part(self.chunked_squares(), self.write_product)
        return self.kept_part()

    def gram_squares(self) -> Tensor:
        """‖G_j‖² = Σ_tt' (u_t·u_t')(g_t·g_t'), in float64 as the terms may cancel.

        Never below what rounding leaves in the sum itself: a gradient that cancels to nothing
        must not be weighted as if it were nothing.
        """
        found: list[Tensor] = []
        _, out, length = self.grads.shape
        for i, j in self.chunks(2 * length * (self.width + out + length)):
            u = self.patches(i, j).double()
            g = self.grads[i * self.rows : j * self.rows].double()
            uu, gg = u @ u.mT, g.mT @ g
            lengths = (uu.diagonal(0, 1, 2) * gg.diagonal(0, 1, 2)).sqrt().sum(1)
            floor = (torch.finfo(self.grads.dtype).eps * lengths).square()
            found.append(torch.maximum((uu * gg).sum((1, 2)), floor))
        return torch.cat(found).view(self.batch, self.rows).sum(1)

    def chunked_squares(self) -> Tensor:
        """‖G_j‖² from gradients that are not kept."""
        found: list[Tensor] = []
        _, out, length = self.grads.shape
        for i, j in self.chunks((length + out) * self.width):
            gradient = self.grads[i * self.rows : j * self.rows] @ self.patches(i, j)
            found.append(square_sums(gradient.view(j - i, -1)))
        return torch.cat(found)

    def kept_part(self) -> Part:
        """Norms and sum from per-sample gradients that are computed once."""
        _, out, length = self.grads.shape
        gradients = self.grads.new_empty(self.batch * self.rows, out, self.width)
        squares = self.grads.new_empty(self.batch)
        for i, j in self.chunks(length * self.width):
            rows = slice(i * self.rows, j * self.rows)
            torch.bmm(self.grads[rows], self.patches(i, j), out=gradients[rows])
            squares[i:j] = square_sums(gradients[rows].view(j - i, -1))
        flat = gradients.view(self.batch, -1)

        def write(c: Tensor, views: Views) -> None:
            views["weight"].copy_(self.weight((c @ flat).view(self.rows, out, self.width)))

        return Part(squares, write)

    def write_product(self, c: Tensor, views: Views) -> None:
        """Set the weight to Σ_j c_j G_j = Σ_jt (c_j g_jt) u_jtᵀ, as one product of matrices."""
        _, out, length = self.grads.shape
        total = self.grads.new_zeros(self.rows, out, self.width)
        scaled = self.grads.view(self.batch, self.rows, out, length) * c.view(-1, 1, 1, 1)
        for i, j in self.chunks(length * self.width):
            g = scaled[i:j].permute(1, 2, 0, 3).reshape(self.rows, out, -1)
            u = self.patches(i, j).view(j - i, self.rows, length, self.width)
            total.baddbmm_(g, u.transpose(0, 1).reshape(self.rows, -1, self.width))
        views["weight"].copy_(self.weight(total))
