"""Clipped sums of small sequences of dense layers, of one site or of several at once.

A step of a small model is a few products of matrices and many operations on short vectors, which
torch takes three times as long to begin as numpy. So here torch multiplies and numpy does the rest.
Slots stand side by side, as the columns of z [O, N]: each site's columns are multiplied by its own
weights, and all else is done for everybody in one go. No column enters another's numbers.

For a sequence of nn.Linear (or ScaledBias), ReLU, Tanh and Sigmoid behind at most a Flatten, with
cross_entropy, on a CPU. Norms are the kernel's ghost norms: of a layer ‖g_j x_jᵀ‖ = ‖g_j‖‖x_j‖.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from fedpact.common.losses import Loss, cross_entropy
from fedpact.common.params import FlatModel, from_numpy, on_cpu
from fedpact.per_sample.clipping import SiteSum, coefficients, weights_of
from fedpact.per_sample.layers import ScaledBias, flattens, sequence_of
from fedpact.per_sample.layout import Pass, Placement, laid_out, length_for, overhead
from fedpact.per_sample.norms import (
    BLOCK,
    CHUNK_BYTES,
    LARGEST,
    LEAST,
    LONGEST,
    NEAR,
    SMALL,
    square_sums,
)
from fedpact.per_sample.products import LARGE, linear
from fedpact.per_sample.share import FAR, IN_FLOAT32, PARTIAL_SUMS, balanced, together, unit_of

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


class Dense:
    """Answers questions about models like `model`, which it only takes the form of."""

    def __init__(self, model: FlatModel, layers: list[nn.Module], flattens: bool) -> None:
        named = {id(p): name for name, p in model.module.named_parameters()}
        linears = [(i, m) for i, m in enumerate(layers) if isinstance(m, nn.Linear)]
        self._module, self._flattens = model.module, flattens
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
        self._dtype = model.vector.dtype
        # About ten operations a layer, and ten more.
        operations = 10.0 * (len(layers) + 1) * _OVERHEAD / 8e-5
        self._overhead = overhead(operations, 6.0 * model.size, model.size)

    @staticmethod
    def of(model: FlatModel, loss: Loss) -> "Dense | None":
        """Return what answers for such models, None where the model is no such sequence.

        Nor on a GPU, which gains nothing from numpy.
        """
        chain = sequence_of(model.module)
        if chain is None or loss is not cross_entropy or not on_cpu(model.vector):
            return None
        flat = bool(chain) and flattens(chain[0])
        layers = chain[1:] if flat else chain
        kinds = [type(m) for m in layers]
        linear_kinds = {nn.Linear, ScaledBias}
        if not kinds or kinds[0] not in linear_kinds or {*kinds} - linear_kinds - {*_ACTIVATIONS}:
            return None
        # More than the model's size where a parameter is frozen, or stands in two places.
        held = sum(p.numel() for m in layers for p in m.parameters())
        # Of wider outputs a pass holds too few records, and more would take another way.
        width = sum(m.out_features for m in layers if isinstance(m, nn.Linear))
        return Dense(model, layers, flat) if width * 16 <= MOST and held == model.size else None

    @property
    def holds(self) -> bool:
        """Whether the modules are still no more than their layers: hooks may have been added."""
        return sequence_of(self._module) is not None

    def losses(self, model: FlatModel, one: Pass) -> Tensor:
        """Return the losses [P] of a pass, without gradient."""
        made = _Made([self._rows(one.x)], [model.own], [slice(0, len(one.y))])
        with np.errstate(all="ignore"):
            self._forward(made)
            return from_numpy(self._losses(made, one.y.numpy())[0])

    def norms(self, model: FlatModel, one: Pass) -> Tensor:
        """Return ‖g_j‖ [P] of a pass, in float64."""
        with np.errstate(all="ignore"):
            made = self._measure([(SiteSum(model, one.x, one.y, 1.0, None), one)])
        return from_numpy(made.norms)

    def length(self, expected: float, **how: bool) -> int:
        """Return P; see layout.length_for."""
        return length_for(expected, MOST // self._width, self._overhead, **how)

    def sum_of(self, asked: SiteSum, *, exact: bool = False) -> Tensor:
        """Return one question's sum [d], of records that fit. exact: in float64, however few."""
        layout = asked.layout
        length = layout.length or self.length(layout.expected)
        batch = len(asked.y)
        exact = exact or batch > IN_FLOAT32 or layout.passes(batch, length) > PARTIAL_SUMS
        total = torch.zeros_like(asked.model.vector, dtype=torch.float64 if exact else self._dtype)
        for one in laid_out(self._rows(asked.x), asked.y, length, layout):
            total += self._sums([(asked, one)], exact)[0]
        return total if exact else total.to(self._dtype)

    def sums(self, asked: Sequence[SiteSum]) -> list[Tensor | None]:
        """Return each question's sum [d], one pass each; None where a site has to compute its own.

        That is where there is no record or too many for a pass, where records are none of the
        model's, and of a plain run where a record is not finite. For simulations.
        """
        found: list[Tensor | None] = [None] * len(asked)
        for some in self._groups(asked):
            pairs = [(asked[i], self._whole(asked[i])) for i in some]
            exact = any(len(one.y) > IN_FLOAT32 for one, _ in pairs)
            for i, answer in zip(some, self._sums(pairs, exact), strict=True):
                spoilt = asked[i].plain and not math.isfinite(answer.sum())
                found[i] = None if spoilt else answer.to(self._dtype)
        return found

    def measured(self, asked: SiteSum) -> list[Tensor]:
        """Return whatever is computed of each slot of one pass, tensors [P, ...]."""
        (one,) = laid_out(self._rows(asked.x), asked.y, asked.layout.length, asked.layout)
        with np.errstate(all="ignore"):
            made = self._measure([(asked, one)])
        arrays = [made.losses, made.norms, *made.lengths.values(), *made.grads.values()]
        arrays += [v for v in made.values if v is not None]
        return [from_numpy(np.ascontiguousarray(v.T)) for v in arrays]

    def _whole(self, one: SiteSum) -> Pass:
        length = -(-len(one.y) // 8) * 8
        return next(laid_out(self._rows(one.x), one.y, length, Placement()))

    def _rows(self, x: Tensor) -> Tensor:
        return x if x.dim() == 2 else x.flatten(1)

    def fits(self, x: Tensor, y: Tensor) -> bool:
        """Whether x, y [B, ...] are records of the model's, at least one."""
        fits = x.dtype == self._dtype and y.dtype == torch.int64 and on_cpu(x)
        rows = x.dim() == 2 or (x.dim() > 2 and self._flattens)
        return fits and rows and y.dim() == 1 and x.shape[0] == y.shape[0] and len(y) > 0

    def _groups(self, asked: Sequence[SiteSum]) -> Iterator[list[int]]:
        """Yield the places of questions that can be answered, together no more than MOST."""
        group: list[int] = []
        size = 0
        for i, one in enumerate(asked):
            own = one.y.shape[0] * self._width
            if not self.fits(one.x, one.y) or own > MOST:
                continue
            if size + own > MOST:
                yield group
                group, size = [], 0
            group.append(i)
            size += own
        if group:
            yield group

    def _sums(self, asked: "list[tuple[SiteSum, Pass]]", exact: bool) -> list[Tensor]:
        """The sums, in float64 or the model's type."""
        # A bad record may overflow or divide by 0: it is found by its loss and norm afterwards.
        with np.errstate(all="ignore"):
            made = self._measure(asked)
            w = _weights(asked, made)
            c = np.empty_like(made.norms)
            for (one, slots), own in zip(asked, made.own, strict=True):
                share = None if one.shares is None else slots.placed(one.shares).numpy()
                of = None if w is None else from_numpy(w[own])
                norms = from_numpy(made.norms[own])
                c[own] = coefficients(one.clip, norms, of, None).numpy()
                if share is not None:
                    c[own] *= share
            known = made.losses + made.norms if w is None else made.losses + made.norms + w
            # A sum is finite only if its terms are.
            if not math.isfinite(known.sum()):
                made.keep(np.isfinite(known))
                c = np.where(np.isfinite(known), c, 0)
            for (one, slots), own in zip(asked, made.own, strict=True):
                if slots.occupied is not None:
                    c[own] *= slots.occupied.numpy()
                if one.plain and not np.isfinite(known[own][: slots.count]).all():
                    c[own] = math.nan
            return self._weighted(asked, c.astype(made.losses.dtype), made, exact)

    def _measure(self, asked: "list[tuple[SiteSum, Pass]]") -> "_Made":
        xs = [slots.x for _, slots in asked]
        bounds = pairwise(accumulate((len(x) for x in xs), initial=0))
        weights = [one.model.own for one, _ in asked]
        made = _Made(xs, weights, [slice(*b) for b in bounds])
        self._forward(made)
        y = np.concatenate([slots.y.numpy() for _, slots in asked])
        made.losses, g = self._losses(made, y)
        self._backward(g, made)
        made.norms = self._squares(made) ** 0.5
        made.norms = np.where(made.norms <= LONGEST, made.norms, math.inf)
        return made

    def _losses(self, made: "_Made", y: Array) -> tuple[Array, Array]:
        """Return the losses [N], and their gradient by the last outputs."""
        strange = (y < 0) | (y >= self._classes)
        if not strange.any():
            return _cross_entropy(made.values[-1], y)
        # A record without a label of the model's is left out, and changes nothing for others.
        losses, g = _cross_entropy(made.values[-1], np.where(strange, 0, y))
        return np.where(strange, math.nan, losses), g

    def _forward(self, made: "_Made") -> None:
        # Records are columns from the first product on: what follows works along memory.
        for i, kind in enumerate(self._kinds):
            z = made.values[-1]
            if kind is not nn.Linear:
                made.values.append(_ACTIVATIONS[kind][0](z))
                continue
            parts: list[Array] = []
            for weights, x, own in zip(made.weights, made.xs, made.own, strict=True):
                # The records themselves lie row by row, as they were given; no copy turns them.
                rows = from_numpy(z[:, own]).t() if i else x
                weight = weights[self._weight[i]]
                part = linear(weight, rows, large=weight.numel() >= LARGE).numpy()
                if i in self._bias:
                    part += (weights[self._bias[i]] * self._input[i]).numpy()[:, None]
                parts.append(part)
            made.values.append(_side_by_side(parts))

    def _backward(self, g: Array, made: "_Made") -> None:
        for i in reversed(range(len(self._kinds))):
            kind = self._kinds[i]
            if kind is not nn.Linear:
                g = g * _ACTIVATIONS[kind][1](made.values[i + 1])
                continue
            made.grads[i] = g
            # Input gradients are not needed, which would be a third of a small model's work.
            if i:
                parts: list[Array] = []
                for weights, own in zip(made.weights, made.own, strict=True):
                    weight, rows = weights[self._weight[i]].t(), from_numpy(g[:, own]).t()
                    parts.append(linear(weight, rows, large=weight.numel() >= LARGE).numpy())
                g = _side_by_side(parts)

    def _squares(self, made: "_Made") -> Array:
        """Return ‖g_j‖² [N], the sum of the layers' ‖∂ℓ_j/∂output‖² (‖x_j‖² + 1), in float64."""
        total: Array = 0
        for i, g in made.grads.items():
            read = made.values[i]
            made.lengths[i] = _squares(read) if i else _side_by_side([*map(_lengths, made.xs)])
            # A record's gradient of a linear layer is g xᵀ, so its length is ‖g‖ ‖x‖: no matrix.
            total += _squares(g) * (made.lengths[i] + self._input.get(i, 0.0) ** 2)
        return total

    def _weighted(
        self, asked: "list[tuple[SiteSum, Pass]]", c: Array, made: "_Made", exact: bool
    ) -> list[Tensor]:
        """Return each site's Σ_j c_j g_j [d]."""
        reads, grads = made.balanced()
        inputs = {i: input for i, input in self._order if input}
        biased: dict[int, Array] = {}
        for i, g in made.grads.items():
            # What a bias reads is part of what its layer reads.
            each = _taken(c, g, made.lengths[i] + inputs.get(i, 0.0) ** 2)
            biased[i] = g * each
            # A coefficient times a gradient may have no digits where a layer reads long vectors.
            grads[i] = grads[i] * each if i in grads else biased[i]
        found: list[Tensor] = []
        for (one, _), x, own in zip(asked, made.xs, made.own, strict=True):
            parts: list[Array] = []
            for i, input in self._order:
                if input:
                    terms = biased[i][:, own]
                    parts.append(terms.sum(1, dtype=np.float64 if exact else None) * input)
                    continue
                read = from_numpy(reads[i][:, own]) if i in reads else None
                if read is None:
                    read = from_numpy(made.values[i][:, own]) if i else x.t()
                product = _product(from_numpy(grads[i][:, own]), read, exact)
                parts.append(product.numpy().reshape(-1))
            # Coefficients are in units of the clip, so that a small clip keeps its digits.
            found.append(from_numpy(np.concatenate(parts)).mul_(unit_of(one.clip)))
        return found


@dataclass(eq=False, slots=True)
class _Made:
    """Slots x [P, K] and weights of each site, and what was found.

    own: where a site's columns are. lengths: ‖·‖² [N] of what each linear layer reads. values: what
    each layer reads, [K, N] but for the first, and the last one's output. grads: ∂ℓ_j/∂output
    [O, N] of every linear layer, by its place.
    """

    xs: list[Tensor]
    weights: list[dict[str, Tensor]]
    own: list[slice]
    values: list[Array] = field(default_factory=lambda: [None])
    grads: dict[int, Array] = field(default_factory=dict[int, Array])
    lengths: dict[int, Array] = field(default_factory=dict[int, Array])
    losses: Array = None
    norms: Array = None

    def keep(self, good: Array) -> None:
        """Set the numbers of other slots than good [N] to 0."""
        pairs = zip(self.xs, self.own, strict=True)
        self.xs = [x.where(from_numpy(good[own])[:, None], 0) for x, own in pairs]
        self.values = [None if v is None else np.where(good, v, 0) for v in self.values]
        self.grads = {i: np.where(good, v, 0) for i, v in self.grads.items()}
        self.lengths = {i: np.where(good, v, 0) for i, v in self.lengths.items()}

    def balanced(self) -> tuple[dict[int, Array], dict[int, Array]]:
        """What layers read, and their gradients, of layers where a record reads a long vector."""
        reads: dict[int, Array] = {}
        grads: dict[int, Array] = {}
        for i, g in self.grads.items():
            if self.lengths[i].max() <= FAR:
                continue
            read = from_numpy(self.values[i]).t() if i else torch.cat(self.xs)
            of_g, of_u = balanced(from_numpy(g).t(), read, from_numpy(self.lengths[i]))
            reads[i], grads[i] = of_u.t().numpy(), of_g.t().numpy()
        return reads, grads


def _weights(asked: list[tuple[SiteSum, Pass]], made: _Made) -> Array | None:
    """Return w [N], None where all are 1."""
    if all(one.weights is None for one, _ in asked):
        return None
    w = np.ones_like(made.losses)
    for (one, _), own in zip(asked, made.own, strict=True):
        if one.weights is not None:
            found = from_numpy(made.losses[own]), None if one.plain else from_numpy(made.norms[own])
            w[own] = weights_of(one.weights, *found).clamp_min(0).numpy()
    return w


def _side_by_side(parts: Sequence[Array]) -> Array:
    """Return parts [..., n] as one [..., N]."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts, -1)


def _squares(v: Array) -> Array:
    """Return Σ v² [N] of each column of v [K, N], in float64."""
    found = np.square(v, dtype=np.float64).sum(0)
    return found.clip(LEAST) if v.itemsize == 8 else found


def _lengths(x: Tensor) -> Array:
    """Return ‖x_j‖² of records x [P, K] in float64."""
    rows, found = x.numpy(), np.zeros(len(x))
    for start in range(0, rows.shape[1], BLOCK):
        some = rows[:, start : start + BLOCK]
        found += np.vecdot(some, some)
    small = found < SMALL
    if small.any():
        found[small] = square_sums(x[from_numpy(small)]).numpy()
    return found


def _taken(c: Array, g: Array, lengths: Array) -> Array:
    """c [N] of g [O, N] beside u of ‖u_j‖² [N], or less; see norms.most_of."""
    near = lengths < NEAR
    if not near.any():
        return c
    most = np.where(near, LARGEST / _squares(g) ** 0.5, math.inf)
    return np.minimum(c, most.astype(c.dtype))


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
    each = [linear(own[:, some], read[:, some], large=large) for some in together(count)]
    return each[0] if len(each) == 1 else torch.stack(each).sum(0)


def _cross_entropy(z: Array, y: Array) -> tuple[Array, Array]:
    """Return the losses [N] of outputs z [K, N], and their gradient."""
    places = np.arange(len(y))
    # Not in its place: an activation at the end still has to know what it gave.
    z = z - z.max(0)
    g = np.exp(z)
    total = g.sum(0)
    losses = np.log(total) - z[y, places]
    g /= total
    g[y, places] -= 1
    return losses, g
