"""Clipped sums of small chains of dense layers, of one site or of several at once.

A step of a small model is a few products of matrices and many operations on short vectors, which
torch takes three times as long to begin as numpy. So here torch multiplies and numpy does the rest;
on a GPU torch does both. The records of all sites stand side by side, as the columns of z [O, N]:
each site's columns are multiplied by its own weights, and all else is done for everybody in one go.
No column enters another's numbers, so what is summed for a site is what its records alone give.

For a chain of nn.Linear (or ScaledBias), ReLU, Tanh and Sigmoid behind at most a Flatten, with
cross_entropy. Norms are the kernel's ghost norms: of a layer ‖g_j x_jᵀ‖ = ‖g_j‖‖x_j‖.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from fedpact.losses import Loss, cross_entropy
from fedpact.params import FlatModel, at_hand
from fedpact.persample import columns
from fedpact.persample.chain import chain_of, flattens
from fedpact.persample.columns import Array, Bounds
from fedpact.persample.norms import LARGEST, LONGEST
from fedpact.persample.products import ALIKE, wanted
from fedpact.persample.share import FAR, IN_FLOAT32, balanced, unit_of
from fedpact.persample.weighting import SiteSum, weights_of

MOST: Final = 2**20
"""Of records times the layers' outputs in one pass, which holds a few numbers for each."""


class Dense:
    """Answers questions about models like `model`, which it only takes the form of."""

    def __init__(self, model: FlatModel, layers: list[nn.Module], flattens: bool) -> None:
        named = {id(p): name for name, p in model.module.named_parameters()}
        linears = [(i, m) for i, m in enumerate(layers) if isinstance(m, nn.Linear)]
        self._flattens = flattens
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
        if not layers or type(layers[0]) not in columns.LINEAR:
            return None
        linears = [m for m in layers if type(m) in columns.LINEAR]
        fitting = all(type(m) in columns.LINEAR or type(m) in columns.ACTIVATIONS for m in layers)
        # More than the model's size where a parameter is frozen, or stands in two places.
        held = sum(p.numel() for m in linears for p in m.parameters())
        # Of wider outputs a pass holds too few records, and more would take another way.
        narrow = sum(m.out_features for m in linears if isinstance(m, nn.Linear)) * ALIKE <= MOST
        whole = fitting and narrow and held == model.size
        return Dense(model, layers, flat) if whole else None

    def sum_of(self, asked: SiteSum, *, exact: bool = False) -> Tensor | None:
        """Return one question's sum [d], in several passes where one holds too few records.

        Never by another way because of their number: it would change every record's last bits.
        exact: in float64, of however few records.
        """
        count, most = asked.y.shape[0], MOST // self._width // ALIKE * ALIKE
        if count <= most:
            return self.sums([asked], exact=exact)[0]
        total = torch.zeros_like(asked.model.vector, dtype=torch.float64)
        for some in (slice(i, i + most) for i in range(0, count, most)):
            one = asked.part(some, asked.weights)
            found = self._sums([one], exact=True)[0] if self._fits(one) else None
            if found is None:
                return None
            total += found
        return total if exact else total.to(self._dtype)

    def sums(self, asked: Sequence[SiteSum], *, exact: bool = False) -> list[Tensor | None]:
        """Return each question's sum [d]; None where a site has to compute its own.

        That is where there is no record or too many for a pass, and where records are none of the
        model's. A record whose loss, norm or weight is not finite, or whose label is none of the
        model's, is left out; in a plain run that, too, is the site's to decide.
        """
        found: list[Tensor | None] = [None] * len(asked)
        for some in self._groups(asked):
            answers = self._sums([asked[i] for i in some], exact=exact)
            for i, answer in zip(some, answers, strict=True):
                found[i] = answer if answer is None or exact else answer.to(self._dtype)
        return found

    def _fits(self, one: SiteSum) -> bool:
        x, y = one.x, one.y
        fits = x.dtype == self._dtype and y.dtype == torch.int64 and x.device == self._device
        rows = x.dim() == 2 or (x.dim() > 2 and self._flattens)
        one_each = y.dim() == 1 and x.shape[0] == y.shape[0]
        return fits and rows and one_each and 0 < y.shape[0] * self._width <= MOST

    def _groups(self, asked: Sequence[SiteSum]) -> Iterator[list[int]]:
        """Yield the places of questions that can be answered, together no more than MOST."""
        group: list[int] = []
        size = 0
        for i, one in enumerate(asked):
            own = one.y.shape[0] * self._width
            if not self._fits(one):
                continue
            if size + own > MOST:
                yield group
                group, size = [], 0
            group.append(i)
            size += own
        if group:
            yield group

    def _sums(self, asked: list[SiteSum], *, exact: bool = False) -> Sequence[Tensor | None]:
        """The sums, in float64 where there are many records or it is asked for."""
        y = columns.side_by_side([columns.behind(one.y, ALIKE) for one in asked])
        strange = (y < 0) | (y >= self._classes)
        some_strange = not self._at_hand or strange.any()
        # A bad record may overflow or divide by 0: it is found by its loss and norm afterwards.
        with np.errstate(all="ignore"):
            made = self._forward(asked)
            # A record without a label of the model's is left out, and changes nothing for others.
            y = columns.where(strange, 0, y) if some_strange else y
            losses, g = columns.cross_entropy(made.values[-1], y)
            made.grads = self._backward(g, made)
            norms = self._squares(made) ** 0.5
            w = _weights(asked, losses, made)
            made.exact = [exact or one.y.shape[0] > IN_FLOAT32 for one in asked]
            c = columns.like(g, _coefficients(asked, w, norms, made))
            known = losses + norms if w is None else losses + norms + w
            # One maximum, which NaN fails, in place of three passes over every record.
            if some_strange or not norms.max() <= LONGEST:
                known = columns.where(strange | ~(norms <= LONGEST), math.nan, known)
            if not self._at_hand:
                c, made = _without_bad(asked, c, known, made)
            totals = _weighted(self._order, c, made)
            # Coefficients are in units of the clip, so that a small clip keeps its digits.
            totals = [t.mul_(unit_of(one.clip)) for t, one in zip(totals, asked, strict=True)]
        if not self._at_hand:
            return totals
        # A sum is finite only if its terms are.
        if math.isfinite(known.sum()):
            return totals
        each = zip(asked, totals, made.own, strict=True)
        w = np.ones_like(norms) if w is None else w
        return [self._of_good(one, total, w[own], known[own]) for one, total, own in each]

    def _of_good(self, one: SiteSum, total: Tensor, w: Array, known: Array) -> Tensor | None:
        """Return the total, or that of the records [n] with finite numbers alone."""
        good, fixed = columns.tensor(known).isfinite(), columns.tensor(w)
        if good.all():
            return total
        if one.plain:
            return None
        if not good.any():
            return torch.zeros_like(total)
        some = one.part(good, lambda _: fixed[good])
        return self._sums([some], exact=total.dtype == torch.float64)[0]

    def _forward(self, asked: list[SiteSum]) -> "_Pass":
        xs = [one.x if one.x.dim() == 2 else one.x.flatten(1) for one in asked]
        weights = [one.model.own for one in asked]
        bounds = list(pairwise(accumulate((wanted(x.shape[0], ALIKE) for x in xs), initial=0)))
        own = [
            slice(start, start + one.y.shape[0])
            for one, (start, _) in zip(asked, bounds, strict=True)
        ]
        # Records are columns from the first product on: what follows works along memory.
        values: list[Array] = [None]
        for i, kind in enumerate(self._kinds):
            x = values[-1]
            if kind is not nn.Linear:
                by_numpy, by_torch, _ = columns.ACTIVATIONS[kind]
                values.append(by_torch(x) if isinstance(x, Tensor) else by_numpy(x))
                continue
            reads = [part.t() for part in columns.cut(x, bounds)] if i else xs
            made: list[Array] = []
            for w, rows in zip(weights, reads, strict=True):
                # The records themselves lie row by row, as they were given; no copy turns them.
                product = columns.by_columns if i else columns.of_records
                z = columns.array(product(w[self._weight[i]], rows))
                if i in self._bias:
                    z += columns.array(w[self._bias[i]] * self._input[i])[:, None]
                made.append(z)
            values.append(columns.side_by_side(made))
        return _Pass(xs, weights, bounds, own, values, {})

    def _backward(self, g: Array, made: "_Pass") -> dict[int, Array]:
        found: dict[int, Array] = {}
        for i in reversed(range(len(self._kinds))):
            kind = self._kinds[i]
            if kind is not nn.Linear:
                g *= columns.ACTIVATIONS[kind][2](made.values[i + 1])
                continue
            found[i] = g
            # Nobody asks for the gradient at the records, which is a third of a small model's work.
            if i:
                pairs = zip(made.weights, columns.cut(g, made.bounds), strict=True)
                below = [
                    columns.by_columns(own[self._weight[i]].t(), part.t()) for own, part in pairs
                ]
                g = columns.side_by_side([columns.array(one) for one in below])
        return found

    def _squares(self, made: "_Pass") -> Array:
        """Return ‖g_j‖² [N], the sum of the layers' ‖∂ℓ_j/∂output‖² (‖x_j‖² + 1), in float64."""
        total: Array = 0
        for i, g in made.grads.items():
            read = made.values[i]
            pairs = zip(made.xs, made.bounds, strict=True)
            of_x = (columns.lengths(x, end - start) for x, (start, end) in pairs)
            each = [columns.squares(read)] if i else list(of_x)
            made.lengths[i] = columns.side_by_side(each)
            # A record's gradient of a linear layer is g xᵀ, so its length is ‖g‖ ‖x‖: no matrix.
            total += columns.squares(g) * (made.lengths[i] + self._input.get(i, 0.0) ** 2)
        return total


@dataclass(eq=False, slots=True)
class _Pass:
    """Records x [n, K] and weights of each site, and what was found.

    bounds: where each site's columns are, with those of zeros behind (products.padded); own: where
    its records' are. lengths: ‖·‖² [N] of what each linear layer reads. exact: which sites' sums
    are float64. values: what each layer reads, [K, N] but for the first, and the last one's output.
    grads: ∂ℓ_j/∂output [O, N] of every linear layer, by its place.
    """

    xs: list[Tensor]
    weights: list[dict[str, Tensor]]
    bounds: Bounds
    own: list[slice]
    values: list[Array]
    grads: dict[int, Array]
    lengths: dict[int, Array] = field(default_factory=dict[int, Array])
    exact: list[bool] = field(default_factory=list[bool])


def _weighted(order: list[tuple[int, float]], c: Array, made: _Pass) -> list[Tensor]:
    """Return each site's Σ_j c_j g_j [d]; the gradients are written over."""
    reads, grads = _scaled(made)
    inputs = {i: input for i, input in order if input}
    for i, g in made.grads.items():
        # What a bias reads is part of what its layer reads.
        each = columns.taken(c, g, made.lengths[i] + inputs.get(i, 0.0) ** 2)
        # A coefficient times a gradient may have no digits where the layer reads very long vectors.
        grads[i] = grads[i] * each if i in grads else g
        g *= each
    found: list[Tensor] = []
    for x, own, exact in zip(made.xs, made.own, made.exact, strict=True):
        parts: list[Array] = []
        for i, input in order:
            if input:
                parts.append(columns.added(made.grads[i][:, own], exact) * input)
                continue
            read = made.values[i][:, own] if i else x.t()
            read = reads[i][:, own] if i in reads else read
            product = columns.product(columns.tensor(grads[i][:, own]), columns.tensor(read), exact)
            parts.append(columns.array(product).reshape(-1))
        found.append(columns.tensor(columns.side_by_side(parts)))
    return found


def _scaled(made: _Pass) -> tuple[dict[int, Array], dict[int, Array]]:
    """What layers read, and their gradients, balanced, of layers where a record needs it."""
    reads: dict[int, Array] = {}
    grads: dict[int, Array] = {}
    for i, g in made.grads.items():
        # Not a number is not near either.
        if not isinstance(g, Tensor) and made.lengths[i].max() <= FAR:
            continue
        lengths = columns.tensor(made.lengths[i])
        read = made.values[i]
        if not i:
            each = [columns.tensor(columns.behind(x, ALIKE)).t() for x in made.xs]
            read = columns.side_by_side([columns.array(one) for one in each])
        of_g, of_u = balanced(columns.tensor(g).t(), columns.tensor(read).t(), lengths)
        reads[i], grads[i] = columns.array(of_u.t()), columns.array(of_g.t())
    return reads, grads


def _without_bad(
    asked: list[SiteSum], c: Tensor, known: Tensor, made: _Pass
) -> tuple[Tensor, _Pass]:
    """Return c and the pass with zeros for records that are not finite, in a private run.

    Whether or not there are any: the host would have to wait to know.
    """
    good = known.isfinite()
    for one, own in zip(asked, made.own, strict=True):
        if one.plain:
            good[own] = True
            # Those without a label of the model's spread, as without privacy.
            c[own] = c[own].where(known[own].isfinite(), torch.nan)
    rows = zip(made.xs, made.own, strict=True)
    clean = replace(
        made,
        xs=[x.where(good[own, None], 0) for x, own in rows],
        values=[None if v is None else v.where(good, 0) for v in made.values],
        grads={i: g.where(good, 0) for i, g in made.grads.items()},
        lengths={i: v.where(good, 0) for i, v in made.lengths.items()},
    )
    return c.where(good, 0), clean


def _weights(asked: list[SiteSum], losses: Array, made: _Pass) -> Array | None:
    """Return w [N], None where all are 1."""
    if all(one.weights is None for one in asked):
        return None
    w = columns.module(losses).ones_like(losses)
    for one, own in zip(asked, made.own, strict=True):
        if one.weights is not None:
            found = weights_of(one.weights, columns.tensor(losses[own])).clamp_min(0)
            w[own] = columns.array(found)
    return w


def _coefficients(asked: list[SiteSum], w: Array | None, norms: Array, made: _Pass) -> Array:
    """Return c = s min(w, C/‖g‖) [N], 0 for what is no record."""
    xp = columns.module(norms)
    c = xp.zeros_like(norms)
    for one, own in zip(asked, made.own, strict=True):
        limits = one.clip / norms[own]
        some = limits.clip(max=1) if w is None else xp.minimum(w[own], limits)
        # In units of the clip, see gradients.unit_of.
        c[own] = (some / unit_of(one.clip)).clip(max=LARGEST)
        if one.shares is not None:
            c[own] *= columns.array(one.shares)
    return c
