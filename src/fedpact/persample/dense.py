"""Clipped sums of small chains of dense layers, of one site or of several at once.

A step of a small model is a few products of matrices and many operations on short vectors, which
torch takes three times as long to begin as numpy. So here torch multiplies and numpy does the rest;
on a card torch does both. The records of all sites stand side by side, as the columns of z [O, N]:
each site's columns are multiplied by its own weights, and all else is done for everybody in one go.
No column enters another's numbers, so what is summed for a site is what its records alone give.

For a chain of nn.Linear, ReLU, Tanh and Sigmoid behind at most a Flatten, with cross_entropy. Norms
are the kernel's ghost norms: of a layer ‖g_j x_jᵀ‖ = ‖g_j‖‖x_j‖.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from fedpact.losses import Loss, cross_entropy
from fedpact.params import FlatModel, at_hand
from fedpact.persample import columns
from fedpact.persample.chain import chain_of, flattens, linear
from fedpact.persample.columns import Array, Bounds
from fedpact.persample.gradients import FAR, IN_FLOAT32, TOGETHER, balanced, together
from fedpact.persample.norms import LONGEST
from fedpact.persample.weighting import Weights, weights_of

MOST: Final = 2**20
"""Of records times the layers' outputs in one pass, which holds a few numbers for each."""

_Curve = Callable[[Array], Array]

# The function in numpy and in torch, and the derivative from the function's value.
_ACTIVATIONS: Final[dict[type[nn.Module], tuple[_Curve, _Curve, _Curve]]] = {
    nn.ReLU: (lambda z: np.maximum(z, 0), torch.relu, lambda y: y > 0),
    nn.Tanh: (np.tanh, torch.tanh, lambda y: 1 - y * y),
    nn.Sigmoid: (lambda z: 1 / (1 + np.exp(-z)), torch.sigmoid, lambda y: y * (1 - y)),
}


@dataclass(eq=False, slots=True)
class Sum:
    """One site's question: Σ_j c_j g_j at the model's weights over x, y [n, ...].

    c_j = min(w_j, C/‖g_j‖) with C = clip; infinity for c_j = w_j. See PerSampleKernel. plain: what
    is not finite is not left out but spreads, as without privacy.
    """

    model: FlatModel
    x: Tensor
    y: Tensor
    clip: float
    weights: Weights | None
    plain: bool = False


class Dense:
    """Answers questions about models like `model`, which it only takes the form of."""

    def __init__(self, model: FlatModel, layers: list[nn.Module], flattens: bool) -> None:
        named = {id(p): name for name, p in model.module.named_parameters()}
        linears = [(i, m) for i, m in enumerate(layers) if isinstance(m, nn.Linear)]
        self._flattens = flattens
        self._kinds = [type(m) for m in layers]
        self._weight = {i: named[id(m.weight)] for i, m in linears}
        biases = {i: named.get(id(m.bias)) for i, m in linears}
        self._bias = {i: name for i, name in biases.items() if name is not None}
        # The model's parameters in order: of which layer, and whether a weight.
        places = {name: (i, False) for i, name in self._bias.items()}
        places |= {name: (i, True) for i, name in self._weight.items()}
        self._order = [places[name] for name in model.own]
        self._width = sum(m.out_features for _, m in linears)
        self._classes = linears[-1][1].out_features
        self._dtype, self._device = model.vector.dtype, model.vector.device
        self._at_hand = at_hand(model.vector)

    @staticmethod
    def of(model: FlatModel, loss: Loss) -> "Dense | None":
        """Return what answers for such models, None where the model is no such chain."""
        chain = chain_of(model.module)
        if chain is None or loss is not cross_entropy:
            return None
        flat = bool(chain) and flattens(chain[0])
        layers = chain[1:] if flat else chain
        if not layers or type(layers[0]) is not nn.Linear:
            return None
        linears = [m for m in layers if type(m) is nn.Linear]
        fitting = all(type(m) is nn.Linear or type(m) in _ACTIVATIONS for m in layers)
        # More than the model's size where a parameter is frozen, or stands in two places.
        held = sum(p.numel() for m in linears for p in m.parameters())
        return Dense(model, layers, flat) if fitting and held == model.size else None

    def sums(self, asked: Sequence[Sum]) -> list[Tensor | None]:
        """Return each question's sum [d]; None where a site has to compute its own.

        That is where there is no record or too many for a pass, and where records or labels are
        none of the model's. A record whose loss, norm or weight is not finite is left out; in a
        plain run that, too, is the site's to decide.
        """
        found: list[Tensor | None] = [None] * len(asked)
        for some in self._groups(asked):
            answers = self._sums([asked[i] for i in some])
            for i, answer in zip(some, answers, strict=True):
                found[i] = answer
        return found

    def _groups(self, asked: Sequence[Sum]) -> Iterator[list[int]]:
        """Yield the places of questions that can be answered, together no more than MOST."""
        group: list[int] = []
        size = 0
        for i, one in enumerate(asked):
            x, y = one.x, one.y
            own = y.shape[0] * self._width
            fits = x.dtype == self._dtype and y.dtype == torch.int64 and x.device == self._device
            rows = x.dim() == 2 or (x.dim() > 2 and self._flattens)
            one_each = y.dim() == 1 and x.shape[0] == y.shape[0]
            if not (fits and rows and one_each and 0 < own <= MOST):
                continue
            if size + own > MOST:
                yield group
                group, size = [], 0
            group.append(i)
            size += own
        if group:
            yield group

    def _sums(self, asked: list[Sum]) -> Sequence[Tensor | None]:
        y = columns.side_by_side([columns.array(one.y) for one in asked])
        strange = (y < 0) | (y >= self._classes)
        if self._at_hand and strange.any():
            # Somebody's: each is asked anew, by the kernel that knows what to say of it.
            return [None] * len(asked)
        with np.errstate(all="ignore"):
            made = self._forward(asked)
            y = y if self._at_hand else y.where(~strange, 0)
            losses, g = _cross_entropy(made.values[-1], y)
            made.grads = self._backward(g, made)
            squares, longest = self._squares(made)
            if self._at_hand and not longest <= FAR:
                # Beyond, a coefficient times a gradient may have no digits: see gradients.balanced.
                return [None] * len(asked)
            norms = squares**0.5
            w = _weights(asked, losses, made.bounds)
            c = columns.like(g, _coefficients(asked, w, norms, made.bounds))
            known = losses + norms if w is None else losses + norms + w
            if not self._at_hand:
                known = known.where(norms <= LONGEST, torch.inf)
                return _weighted(self._order, *_without_bad(asked, c, known, strange, made))
            totals = _weighted(self._order, c, made)
        # A sum is finite only if its terms are.
        if norms.max() <= LONGEST and math.isfinite(known.sum()):
            return totals
        known = np.where(norms <= LONGEST, known, np.inf)
        each = zip(asked, totals, made.bounds, strict=True)
        w = np.ones_like(norms) if w is None else w
        return [self._of_good(one, total, w[i:j], known[i:j]) for one, total, (i, j) in each]

    def _of_good(self, one: Sum, total: Tensor, w: Array, known: Array) -> Tensor | None:
        """Return the total, or that of the records [n] with finite numbers alone."""
        good, fixed = columns.tensor(known).isfinite(), columns.tensor(w)
        if good.all():
            return total
        if one.plain:
            return None
        if not good.any():
            return torch.zeros_like(total)
        some = Sum(one.model, one.x[good], one.y[good], one.clip, lambda _: fixed[good])
        return self.sums([some])[0]

    def _forward(self, asked: list[Sum]) -> "_Pass":
        xs = [one.x if one.x.dim() == 2 else one.x.flatten(1) for one in asked]
        weights = [one.model.own for one in asked]
        bounds = list(pairwise(accumulate((x.shape[0] for x in xs), initial=0)))
        values: list[Array] = [None]
        for i, kind in enumerate(self._kinds):
            x = values[-1]
            if kind is not nn.Linear:
                by_numpy, by_torch, _ = _ACTIVATIONS[kind]
                values.append(by_torch(x) if isinstance(x, Tensor) else by_numpy(x))
                continue
            reads = [part.t() for part in columns.cut(x, bounds)] if i else xs
            made: list[Array] = []
            for own, rows in zip(weights, reads, strict=True):
                z = columns.array(linear(own[self._weight[i]], rows))
                if i in self._bias:
                    z += columns.array(own[self._bias[i]])[:, None]
                made.append(z)
            values.append(columns.side_by_side(made))
        return _Pass(xs, weights, bounds, values, {})

    def _backward(self, g: Array, made: "_Pass") -> dict[int, Array]:
        found: dict[int, Array] = {}
        for i in reversed(range(len(self._kinds))):
            kind = self._kinds[i]
            if kind is not nn.Linear:
                g *= _ACTIVATIONS[kind][2](made.values[i + 1])
                continue
            found[i] = g
            if i:
                pairs = zip(made.weights, columns.cut(g, made.bounds), strict=True)
                below = [linear(own[self._weight[i]].t(), part.t()) for own, part in pairs]
                g = columns.side_by_side([columns.array(one) for one in below])
        return found

    def _squares(self, made: "_Pass") -> tuple[Array, float]:
        """Return ‖g_j‖² [N], the sum of the layers' ‖∂ℓ_j/∂output‖² (‖x_j‖² + 1), in float64.

        And the largest ‖x_j‖², of what is finite, where it may be looked at.
        """
        total: Array = 0
        longest = 0.0
        for i, g in made.grads.items():
            read = made.values[i]
            each = [columns.squares(read)] if i else [columns.lengths(x) for x in made.xs]
            lengths = columns.side_by_side(each)
            if self._at_hand:
                longest = max(longest, float(np.where(np.isfinite(lengths), lengths, 0).max()))
            total = total + columns.squares(g) * (lengths + 1 if i in self._bias else lengths)
        return total, longest


@dataclass(eq=False, slots=True)
class _Pass:
    """Records x [n, K] and weights of each site, where its columns are, and what was found.

    values: what each layer reads, [K, N] but for the first, and the last one's output. grads:
    ∂ℓ_j/∂output [O, N] of every linear layer, by its place.
    """

    xs: list[Tensor]
    weights: list[dict[str, Tensor]]
    bounds: Bounds
    values: list[Array]
    grads: dict[int, Array]


def _weighted(order: list[tuple[int, bool]], c: Array, made: _Pass) -> list[Tensor]:
    """Return each site's Σ_j c_j g_j [d]; the gradients are written over."""
    for g in made.grads.values():
        g *= c
    found: list[Tensor] = []
    for x, (start, end) in zip(made.xs, made.bounds, strict=True):
        parts: list[Array] = []
        for i, weight in order:
            own = made.grads[i][:, start:end]
            if not weight:
                parts.append(_added(own))
                continue
            read = columns.tensor(made.values[i][:, start:end]) if i else x.t()
            parts.append(columns.array(_product(columns.tensor(own), read)).reshape(-1))
        found.append(columns.tensor(columns.side_by_side(parts)))
    return found


def _added(own: Array) -> Array:
    """Σ_j of columns [O, n], in float64 where they are many."""
    if own.shape[1] <= IN_FLOAT32:
        return own.sum(1)
    many = own.double() if isinstance(own, Tensor) else own.astype(np.float64)
    return columns.like(own, many.sum(1))


def _product(own: Tensor, read: Tensor) -> Tensor:
    """own readᵀ for own [O, n], read [K, n]: float32 adds no more records than slack allows."""
    if not at_hand(own):
        g, u = balanced(own.t(), read.t(), read.double().square().sum(0))
        own, read = g.t(), u.t()
    batch = own.shape[1]
    if batch <= TOGETHER:
        return linear(own, read)
    if batch > IN_FLOAT32:
        return linear(own.double(), read.double()).to(own.dtype)
    total = own.new_zeros(own.shape[0], read.shape[0])
    for some in together(batch):
        total += linear(own[:, some], read[:, some])
    return total


def _without_bad(
    asked: list[Sum], c: Tensor, known: Tensor, strange: Tensor, made: _Pass
) -> tuple[Tensor, _Pass]:
    """Return c and the pass with zeros for records that are not finite, in a private run.

    Whether or not there are any: the host would have to wait to know.
    """
    c, good = c.where(~strange, torch.nan), known.isfinite() & ~strange
    for one, (start, end) in zip(asked, made.bounds, strict=True):
        if one.plain:
            good[start:end] = True
    rows = zip(made.xs, made.bounds, strict=True)
    clean = _Pass(
        [x.where(good[start:end, None], 0) for x, (start, end) in rows],
        made.weights,
        made.bounds,
        [None if v is None else v.where(good, 0) for v in made.values],
        {i: g.where(good, 0) for i, g in made.grads.items()},
    )
    return c.where(good, 0), clean


def _weights(asked: list[Sum], losses: Array, bounds: Bounds) -> Array | None:
    """Return w [N], None where all are 1."""
    if all(one.weights is None for one in asked):
        return None
    w = columns.module(losses).ones_like(losses)
    for one, (start, end) in zip(asked, bounds, strict=True):
        if one.weights is not None:
            found = weights_of(one.weights, columns.tensor(losses[start:end])).clamp_min(0)
            w[start:end] = columns.array(found)
    return w


def _coefficients(asked: list[Sum], w: Array | None, norms: Array, bounds: Bounds) -> Array:
    """Return c = min(w, C/‖g‖) [N]."""
    each = zip(asked, bounds, strict=True)
    limits = columns.side_by_side([one.clip / norms[start:end] for one, (start, end) in each])
    return limits.clip(max=1) if w is None else columns.module(norms).minimum(w, limits)


def _cross_entropy(z: Array, y: Array) -> tuple[Array, Array]:
    """Return the losses [N] of outputs z [K, N], and their gradient."""
    xp = columns.module(z)
    places = torch.arange(len(y), device=z.device) if isinstance(z, Tensor) else np.arange(len(y))
    # Not in its place: an activation at the end still has to know what it gave.
    z = z - xp.amax(z, 0)
    g = xp.exp(z)
    total = g.sum(0)
    losses = xp.log(total) - z[y, places]
    g /= total
    g[y, places] -= 1
    return losses, g
