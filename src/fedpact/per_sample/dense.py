"""Clipped sums of small sequences of dense layers.

A step of a small model is a few matrix products and many operations on short vectors, which take
torch three times as long to start as numpy. So torch multiplies and numpy does the rest. Slots are
the columns of z [O, P], and no column depends on another.

For a sequence of nn.Linear (or ScaledBias), ReLU, Tanh and Sigmoid after an optional Flatten, with
cross_entropy, on a CPU. Norms are the kernel's ghost norms: of a layer ‖g_j x_jᵀ‖ = ‖g_j‖‖x_j‖.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from fedpact.common.losses import Loss, cross_entropy
from fedpact.common.params import FlatModel, from_numpy, on_cpu
from fedpact.per_sample.gradients import TOGETHER, Measured
from fedpact.per_sample.layers import ScaledBias, sequence_of
from fedpact.per_sample.layout import length_for, overhead
from fedpact.per_sample.norms import (
    BLOCK,
    CHUNK_BYTES,
    LONGEST,
    least_square,
    slices,
)
from fedpact.per_sample.products import LARGE, linear

MOST: Final = 2**20
"""Of slots times the layers' outputs in one pass, which holds a few numbers for each."""

_OVERHEAD: Final = 1.5e-6
"""Seconds that numpy takes to begin an operation."""

Array = Any  # numpy's arrays; a gradient of float64 beside float32 ones has no simpler type

_Curve = Callable[[Array], Array]

# The function in numpy, and the derivative from the function's value.
_ACTIVATIONS: Final[dict[type[nn.Module], tuple[_Curve, _Curve]]] = {
    nn.ReLU: (lambda z: np.maximum(z, 0), lambda y: y > 0),
    nn.Tanh: (np.tanh, lambda y: 1 - y * y),
    nn.Sigmoid: (lambda z: 1 / (1 + np.exp(-z)), lambda y: y * (1 - y)),
}


@dataclass(eq=False, slots=True)
class _Found:
    """What is found of a pass's slots x [P, K].

    values: what each layer reads, [K, P] but for the first, which reads x, and the last one's
    output. grads: ∂ℓ_j/∂output [O, P] of every linear layer, by its place.
    """

    x: Tensor
    values: list[Array] = field(default_factory=lambda: [None])
    grads: dict[int, Array] = field(default_factory=dict[int, Array])
    losses: Array = None
    norms: Array = None

    def keep(self, good: Array) -> None:
        """Set the numbers of other slots than good [P] to 0."""
        self.x = self.x.where(from_numpy(good)[:, None], 0)
        self.values = [None if v is None else np.where(good, v, 0) for v in self.values]
        self.grads = {i: np.where(good, v, 0) for i, v in self.grads.items()}

    def read(self, i: int) -> Tensor:
        """What layer i reads, [K, P]."""
        return from_numpy(self.values[i]) if i else self.x.t()


class Dense:
    """Sums over records at the weights of one model."""

    def __init__(self, model: FlatModel, layers: list[nn.Module], flattens: bool) -> None:
        named = {id(p): name for name, p in model.module.named_parameters()}
        linears = [(i, m) for i, m in enumerate(layers) if isinstance(m, nn.Linear)]
        self._model, self._flattens = model, flattens
        self._kinds = [nn.Linear if isinstance(m, nn.Linear) else type(m) for m in layers]
        self._weight = {i: named[id(m.weight)] for i, m in linears}
        biases = {i: named.get(id(m.bias)) for i, m in linears}
        self._bias = {i: name for i, name in biases.items() if name is not None}
        # The model's parameters in order: of which layer, and a bias' input, 0 of a weight.
        self._input = {i: float(getattr(m, "input", 1.0)) for i, m in linears if i in self._bias}
        places = {name: (i, self._input[i]) for i, name in self._bias.items()}
        places |= {name: (i, 0.0) for i, name in self._weight.items()}
        self._order = [places[name] for name in model.own]
        self._width = sum(m.out_features for _, m in linears)
        self._classes = linears[-1][1].out_features
        self._dtype, self._least = model.vector.dtype, least_square(model.vector)
        # About ten operations a layer, and ten more.
        operations = 10.0 * (len(layers) + 1) * _OVERHEAD / 8e-5
        self._overhead = overhead(operations, 6.0 * model.size, model.size)

    @staticmethod
    def of(model: FlatModel, loss: Loss) -> "Dense | None":
        """Return the sums of a model; None if it is no such sequence, or on a GPU."""
        chain = sequence_of(model.module)
        if chain is None or loss is not cross_entropy or not on_cpu(model.vector):
            return None
        first = chain[0] if chain else None
        flat = type(first) is nn.Flatten and (first.start_dim, first.end_dim) == (1, -1)
        layers = chain[1:] if flat else chain
        kinds = [type(m) for m in layers]
        linear_kinds = {nn.Linear, ScaledBias}
        if not kinds or kinds[0] not in linear_kinds or {*kinds} - linear_kinds - {*_ACTIVATIONS}:
            return None
        # More than the model's size if a parameter is frozen or used twice.
        held = sum(p.numel() for m in layers for p in m.parameters())
        # With wider outputs a pass would hold too few records.
        width = sum(m.out_features for m in layers if isinstance(m, nn.Linear))
        return Dense(model, layers, flat) if width * 16 <= MOST and held == model.size else None

    @property
    def holds(self) -> bool:
        """Whether the model is still such a sequence: hooks may have been added."""
        return sequence_of(self._model.module) is not None

    def fits(self, x: Tensor, y: Tensor) -> bool:
        """Whether x, y [B, ...] have the form of the model's records, at least one."""
        fits = x.dtype == self._dtype and y.dtype == torch.int64 and on_cpu(x)
        rows = x.dim() == 2 or (x.dim() > 2 and self._flattens)
        return fits and rows and y.dim() == 1 and x.shape[0] == y.shape[0] and y.shape[0] > 0

    def length(self, expected: float, **how: bool) -> int:
        """Return P; see layout.length_for."""
        return length_for(expected, MOST // self._width, self._overhead, **how)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the losses [P] of records x, y [P, ...], without gradient."""
        found = _Found(x.flatten(1))
        with np.errstate(all="ignore"):
            self._forward(found)
            return from_numpy(self._losses(found, y.numpy())[0])

    def gradients(self, x: Tensor, y: Tensor) -> Measured:
        """Measure the gradients of records x, y [P, ...] that fit."""
        with np.errstate(all="ignore"):
            found = self._measure(x.flatten(1), y)

        def add(c: Tensor, good: Tensor | None, total: Tensor) -> None:
            if good is not None:
                found.keep(good.numpy())
            coefficients = c.numpy().astype(found.losses.dtype, copy=False)
            with np.errstate(all="ignore"):
                total.add_(self._weighted_sum(found, coefficients, c.dtype == torch.float64))

        def factors() -> list[Tensor]:
            arrays = [found.norms, *found.grads.values()]
            arrays += [v for v in found.values if v is not None]
            return [from_numpy(np.ascontiguousarray(v.T)) for v in arrays]

        return Measured(from_numpy(found.losses), from_numpy(found.norms), add, factors)

    def _measure(self, x: Tensor, y: Tensor) -> _Found:
        found = _Found(x)
        self._forward(found)
        found.losses, g = self._losses(found, y.numpy())
        self._backward(g, found)
        norms = self._squares(found) ** 0.5
        found.norms = np.where(norms <= LONGEST, norms, math.inf)
        return found

    def _forward(self, found: _Found) -> None:
        weights = self._model.own
        # Records are columns from the first product on: what follows works along memory.
        for i, kind in enumerate(self._kinds):
            z = found.values[-1]
            if kind is not nn.Linear:
                found.values.append(_ACTIVATIONS[kind][0](z))
                continue
            # The records are stored row by row; they are not transposed.
            rows, weight = found.x if not i else from_numpy(z).t(), weights[self._weight[i]]
            made = linear(weight, rows, large=weight.numel() >= LARGE).numpy()
            if i in self._bias:
                made += (weights[self._bias[i]] * self._input[i]).numpy()[:, None]
            found.values.append(made)

    def _losses(self, found: _Found, y: Array) -> tuple[Array, Array]:
        """Return the losses [P], and their gradient by the last outputs."""
        strange = (y < 0) | (y >= self._classes)
        if not strange.any():
            return _cross_entropy(found.values[-1], y)
        # A record whose label is out of range is left out, and does not affect others.
        losses, g = _cross_entropy(found.values[-1], np.where(strange, 0, y))
        return np.where(strange, math.nan, losses), g

    def _backward(self, g: Array, found: _Found) -> None:
        for i in reversed(range(len(self._kinds))):
            kind = self._kinds[i]
            if kind is not nn.Linear:
                g = g * _ACTIVATIONS[kind][1](found.values[i + 1])
                continue
            found.grads[i] = g
            # Input gradients are not needed, which would be a third of a small model's work.
            if i:
                weight = self._model.own[self._weight[i]].t()
                g = linear(weight, from_numpy(g).t(), large=weight.numel() >= LARGE).numpy()

    def _squares(self, found: _Found) -> Array:
        """Return ‖g_j‖² [P], the sum of the layers' ‖∂ℓ_j/∂output‖² (‖x_j‖² + 1), in float64."""
        total: Array = 0
        for i, g in found.grads.items():
            read = np.maximum(_squares(found.values[i]) if i else _lengths(found.x), self._least)
            # A record's gradient of a linear layer is g xᵀ, so its length is ‖g‖ ‖x‖: no matrix.
            own = np.maximum(_squares(g), self._least)
            total += own * (read + self._input.get(i, 0.0) ** 2)
        return total

    def _weighted_sum(self, found: _Found, c: Array, exact: bool) -> Tensor:
        """Return Σ_j c_j g_j [d]."""
        parts: dict[tuple[int, bool], Array] = {}
        for i, g in found.grads.items():
            read, input = found.read(i), self._input.get(i, 0.0)
            scaled = g * c
            if input:
                # A bias reads a constant of its layer's input.
                parts[i, True] = scaled.sum(1, dtype=np.float64 if exact else None) * input
            parts[i, False] = _product(from_numpy(scaled), read, exact).numpy().reshape(-1)
        return from_numpy(np.concatenate([parts[i, input > 0] for i, input in self._order]))


def _squares(v: Array) -> Array:
    """Return Σ v² [P] of each column of v [K, P], in float64; infinite beyond v's own type."""
    return np.square(v).sum(0, dtype=np.float64)


def _lengths(x: Tensor) -> Array:
    """Return ‖x_j‖² of records x [P, K] in float64."""
    rows, found = x.numpy(), np.zeros(len(x))
    for start in range(0, rows.shape[1], BLOCK):
        some = rows[:, start : start + BLOCK]
        found += np.vecdot(some, some)
    return found


def _product(own: Tensor, read: Tensor, exact: bool) -> Tensor:
    """own readᵀ for own [O, P], read [K, P]: float32 adds no more records than slack allows."""
    count = own.shape[1]
    if exact:
        # No more is copied at a time than stays in the cache.
        step = max(1, CHUNK_BYTES // max(1, 8 * read.shape[0]))
        total = own.new_zeros(own.shape[0], read.shape[0], dtype=torch.float64)
        for start in range(0, count, step):
            some = slice(start, start + step)
            total.addmm_(own[:, some].double(), read[:, some].double().t())
        return total
    large = own.shape[0] * read.numel() >= 64 * LARGE
    each = [linear(own[:, some], read[:, some], large=large) for some in slices(count, TOGETHER)]
    return each[0] if len(each) == 1 else torch.stack(each).sum(0)


def _cross_entropy(z: Array, y: Array) -> tuple[Array, Array]:
    """Return the losses [P] of outputs z [K, P], and their gradient."""
    places = np.arange(len(y))
    # Not in its place: an activation at the end still has to know what it gave.
    z = z - z.max(0)
    g = np.exp(z)
    total = g.sum(0)
    losses = np.log(total) - z[y, places]
    g /= total
    g[y, places] -= 1
    return losses, g
