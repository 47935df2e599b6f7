"""Numbers of several sites side by side: columns [..., N], numpy's on a CPU and torch's on a GPU.

numpy begins an operation on a short vector in a third of the time that torch takes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from fedpact.params import at_hand, from_numpy
from fedpact.persample.norms import (
    BLOCK,
    CHUNK_BYTES,
    LARGEST,
    LEAST,
    NEAR,
    SMALL,
    square_sums,
)
from fedpact.persample.products import ALIKE, LARGE, evenly, linear, padded, wanted
from fedpact.persample.share import TOGETHER, together

# numpy's or torch's: the two agree in every function that is used of them.
Array = Any

COLUMNS: Final = 128
"""Every product has so many columns."""

Bounds = Sequence[tuple[int, int]]
"""Where each site's columns begin and end."""


_Curve = Callable[[Array], Array]

# The function in numpy and in torch, and the derivative from the function's value.
ACTIVATIONS: Final[dict[type[nn.Module], tuple[_Curve, _Curve, _Curve]]] = {
    nn.ReLU: (lambda z: np.maximum(z, 0), torch.relu, lambda y: y > 0),
    nn.Tanh: (np.tanh, torch.tanh, lambda y: 1 - y * y),
    nn.Sigmoid: (lambda z: 1 / (1 + np.exp(-z)), torch.sigmoid, lambda y: y * (1 - y)),
}


class ScaledBias(nn.Linear):
    """y = W u + s b: a linear layer whose bias is a weight of an input of s > 0 in place of 1."""

    input = 1.0

    @staticmethod
    def of(in_features: int, out_features: int, scale: float) -> "ScaledBias":
        """Return a layer with s = scale, drawn as nn.Linear's are."""
        layer = ScaledBias(in_features, out_features)
        layer.input = scale
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Map [B, ..., in] to [B, ..., out]."""
        return nn.functional.linear(input, self.weight, self.bias * self.input)


LINEAR: Final = (nn.Linear, ScaledBias)
"""The layers whose gradient is g uᵀ, and g times its input of a bias."""


def array(tensor: Tensor) -> Array:
    """Return the same numbers, as numpy's on a CPU."""
    return tensor.numpy() if at_hand(tensor) else tensor


def tensor(array: Array) -> Tensor:
    """Return the same numbers as torch's."""
    return array if isinstance(array, Tensor) else from_numpy(array)


def module(array: Array) -> Any:
    """Return what computes with them, numpy or torch."""
    return torch if isinstance(array, Tensor) else np


def like(z: Array, v: Array) -> Array:
    """Return v as numbers of z's type."""
    return v.to(z.dtype) if isinstance(v, Tensor) else v.astype(z.dtype)


def behind(rows: Tensor, multiple: int) -> Array:
    """Return rows [n, ...] with zeros behind, as products.padded does, in numpy on a CPU."""
    if not at_hand(rows):
        return padded(rows, multiple)
    given = rows.numpy()
    more = wanted(len(given), multiple) - len(given)
    if not more:
        return given
    return np.concatenate((given, np.zeros((more, *given.shape[1:]), given.dtype)))


def double(v: Array) -> Array:
    """Return v as float64."""
    return v.double() if isinstance(v, Tensor) else v.astype(np.float64)


def where(condition: Array, value: float, other: Array) -> Array:
    """Return the other array with the value where the condition holds."""
    return (
        other.where(~condition, value)
        if isinstance(other, Tensor)
        else np.where(condition, value, other)
    )


def cut(array: Array, bounds: Bounds) -> list[Tensor]:
    """Return each site's columns."""
    if len(bounds) == 1:
        return [tensor(array)]
    # Copies: among others' columns a product's last bits would follow from how many those are.
    return [tensor(array[..., start:end]).contiguous() for start, end in bounds]


def side_by_side(parts: Sequence[Array]) -> Array:
    """Return parts [..., n] as one [..., N]."""
    return parts[0] if len(parts) == 1 else module(parts[0]).concatenate(parts, -1)


def squares(v: Array) -> Array:
    """Return Σ v² [N] of each column of v [K, N], in float64."""
    if isinstance(v, Tensor):
        found = v.double().square().sum(0)
    else:
        found = np.square(v, dtype=np.float64).sum(0)
    return found.clip(LEAST) if v.itemsize == 8 else found


def taken(c: Array, g: Array, lengths: Array) -> Array:
    """c [N] of g [O, N] beside u of ‖u_j‖² [N], or less; see norms.most_of."""
    near = lengths < NEAR
    if not isinstance(c, Tensor) and not near.any():
        return c
    most = where(~near, math.inf, LARGEST / squares(g) ** 0.5)
    return module(c).minimum(c, like(c, most))


def lengths(x: Tensor, columns: int) -> Array:
    """Return ‖x_j‖² of records x [n, K] in float64, and zeros behind, [columns]."""
    count = x.shape[0]
    if not at_hand(x):
        return padded(square_sums(x), columns)
    found = np.zeros(columns)
    rows = x.numpy()
    for start in range(0, rows.shape[1], BLOCK):
        some = rows[:, start : start + BLOCK]
        found[:count] += np.vecdot(some, some)
    small = found[:count] < SMALL
    if small.any():
        # These alone: the others' lengths must not follow from who is beside them.
        found[:count][small] = array(square_sums(x[tensor(small)]))
    return found


def by_columns(weight: Tensor, rows: Tensor) -> Tensor:
    """weight rowsᵀ [O, n] for rows [n, K], each product of exactly COLUMNS contiguous rows.

    The number and the memory layout both matter: on processors with AMX, products with other
    numbers of columns, and with a transposed view instead of its copy, take other code.
    """
    blocks = [_product(weight, rows[i : i + COLUMNS]) for i in range(0, len(rows), COLUMNS)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)


def _product(weight: Tensor, rows: Tensor) -> Tensor:
    block = padded(rows, COLUMNS)
    if weight.dtype == torch.float64:
        # There the last columns of a product are other code's; rows are not.
        found = evenly(block, weight).contiguous().t()
    else:
        found = linear(weight, block, large=weight.numel() >= LARGE)
    return found[:, : len(rows)]


def of_records(weight: Tensor, x: Tensor) -> Tensor:
    """The same for records x [n, K], with columns of zeros up to a multiple of ALIKE."""
    found = by_columns(weight, x)
    return torch.nn.functional.pad(found, (0, wanted(len(x), ALIKE) - len(x)))


def added(own: Array, exact: bool) -> Array:
    """Σ_j of columns [O, n]."""
    return own.sum(1) if not exact else double(own).sum(1)


def product(own: Tensor, read: Tensor, exact: bool) -> Tensor:
    """own readᵀ for own [O, n], read [K, n]: float32 adds no more records than slack allows."""
    large = own.shape[0] * read.numel() >= 64 * LARGE
    if exact:
        return _in_float64(own, read)
    if own.shape[1] <= TOGETHER:
        return linear(own, read, large=large)
    total = own.new_zeros(own.shape[0], read.shape[0])
    for some in together(own.shape[1]):
        total += linear(own[:, some], read[:, some], large=large)
    return total


def _in_float64(own: Tensor, read: Tensor) -> Tensor:
    """own readᵀ; on a CPU no more is copied at a time than stays in the cache."""
    count = own.shape[1]
    step = max(1, CHUNK_BYTES // max(1, 8 * read.shape[0])) if at_hand(own) else max(1, count)
    total = own.new_zeros(own.shape[0], read.shape[0], dtype=torch.float64)
    for start in range(0, count, step):
        some = slice(start, start + step)
        total.addmm_(own[:, some].double(), read[:, some].double().t())
    return total


def cross_entropy(z: Array, y: Array) -> tuple[Array, Array]:
    """Return the losses [N] of outputs z [K, N], and their gradient."""
    xp = module(z)
    places = torch.arange(len(y), device=z.device) if isinstance(z, Tensor) else np.arange(len(y))
    # Not in its place: an activation at the end still has to know what it gave.
    z = z - xp.amax(z, 0)
    g = xp.exp(z)
    total = g.sum(0)
    losses = xp.log(total) - z[y, places]
    g /= total
    g[y, places] -= 1
    return losses, g
