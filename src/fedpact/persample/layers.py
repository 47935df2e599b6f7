"""Per-sample gradients by layer: squared norms, and weighted sums, from what the tape recorded.

For every layer the gradient of sample j is linear in the recorded output gradient. A rule turns the
calls of its layer into a Part: the squared norms ‖g_j‖² [B], and a way to write Σ_j c_j g_j.

Linear and convolution   G_j = Σ_t g_jt u_jtᵀ over positions t; u is the input, or its patches;
                         parts.Outer has three ways to ‖G_j‖² and takes the cheapest.
Embedding                G_j sums g_jt over the positions that hold the same index.
LayerNorm, GroupNorm     weight: Σ_t g_jt ⊙ x̂_jt; bias: Σ_t g_jt.

Sources: Goodfellow, arXiv 1510.01799 (one position); Li, Tramèr, Liang, Hashimoto, arXiv 2110.05679
(ghost norm); Bu, Wang, Zha, Karypis, arXiv 2210.00038 (book-keeping).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpact.params import at_hand
from fedpact.persample.convolution import Conv, Convolution
from fedpact.persample.norms import Outer, Part, Sizes, Views, joined, kept, square_sums, together
from fedpact.persample.pooled import PooledConvolution, applies
from fedpact.persample.tape import Call

Rule = Callable[[nn.Module, list[Call], frozenset[str]], Part]
"""(module, its calls, its trainable parameters' names) -> its Part."""


def _grad(call: Call) -> Tensor:
    return cast(Tensor, call.grad)


def _positions(tensors: list[Tensor]) -> Tensor:
    """[B, ..., N] of each call as [B, T, N], one call's positions after another's."""
    batch, width = tensors[0].shape[0], tensors[0].shape[-1]
    return joined([t.reshape(batch, -1, width) for t in tensors], 1)


# Linear and convolution


def _with_bias(weight: Part | None, bias: Tensor | None) -> Part:
    """Add a bias's per-sample gradients [B, O]."""
    parts = [] if weight is None else [weight]
    return together(parts if bias is None else [*parts, kept({"bias": bias})])


def linear(module: nn.Module, calls: list[Call], names: frozenset[str]) -> Part:  # noqa: ARG001
    """nn.Linear on [B, ..., K]."""
    if len(calls) == 1 and calls[0].input.dim() == 2:
        return _linear_once(calls[0].input, _grad(calls[0]), names)
    x, g = _positions([c.input for c in calls]), _positions([_grad(c) for c in calls])
    return _with_bias(
        _Positions(x, g).part() if "weight" in names else None,
        g.sum(1) if "bias" in names else None,
    )


def _linear_once(x: Tensor, g: Tensor, names: frozenset[str]) -> Part:
    """One position a sample: G_j = g_j x_jᵀ, so ‖G_j‖ = ‖g_j‖‖x_j‖, and the sum is one product."""
    factor = square_sums(x) if "weight" in names else g.new_zeros(len(g), dtype=torch.float64)
    if "bias" in names:
        factor += 1

    def write(c: Tensor, views: Views) -> None:
        scaled = g * c[:, None]
        if "weight" in names:
            views["weight"].addmm_(scaled.t(), x)
        if "bias" in names:
            views["bias"].addmv_(g.t(), c)

    return Part(square_sums(g) * factor, write)


class _Positions(Outer):
    """A linear layer's weight, from x [B, T, K] and g [B, T, O]."""

    def __init__(self, x: Tensor, g: Tensor) -> None:
        self._x, self._g = x, g
        (batch, length, width), out = x.shape, g.shape[2]
        self.sizes = Sizes(batch, 1, length, out, width, g.element_size())

    def factors(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """See Outer."""
        return self._g[chunk].mT, self._x[chunk]

    def gradients(self, chunk: slice) -> Tensor:
        """See Outer."""
        return (self._g[chunk].mT @ self._x[chunk]).flatten(1)

    def write_sum(self, c: Tensor, views: Views) -> None:
        """See Outer."""
        scaled = (self._g * c[:, None, None]).reshape(-1, self.sizes.out)
        views["weight"].addmm_(scaled.t(), self._x.reshape(-1, self.sizes.width))


def convolution(module: nn.Module, calls: list[Call], names: frozenset[str]) -> Part:
    """nn.Conv1d and nn.Conv2d on [B, C, ...]."""
    inputs, grads = [c.input for c in calls], [_grad(c) for c in calls]
    bias = torch.stack([g.flatten(2).sum(2) for g in grads]).sum(0) if "bias" in names else None
    if "weight" not in names:
        return _with_bias(None, bias)
    conv = cast(Conv, module)
    if len(calls) == 1 and calls[0].pooled and applies(conv, grads[0], calls[0].pooled):
        outer = PooledConvolution(conv, inputs[0], grads[0], calls[0].pooled)
        return _with_bias(outer.part(), bias)
    return _with_bias(Convolution(conv, inputs, grads).part(), bias)


# Embedding


def embedding(module: nn.Module, calls: list[Call], names: frozenset[str]) -> Part:  # noqa: ARG001
    """nn.Embedding on indices [B, ...]; the row of padding_idx has no gradient."""
    table = cast(nn.Embedding, module)
    batch = len(calls[0].input)
    index = torch.cat([c.input.reshape(batch, -1) for c in calls], 1).long()
    g = _positions([_grad(c) for c in calls])
    if not at_hand(g):
        return _by_pairs(index, g, table.padding_idx)
    sample = torch.arange(batch, device=index.device)[:, None].expand_as(index)
    real = torch.ones_like(index, dtype=torch.bool)
    if table.padding_idx is not None:
        real = index != table.padding_idx
    # One row for each pair (sample, index) that occurs: B times the whole table is never built.
    keys = sample[real] * table.num_embeddings + index[real]
    unique = cast(Callable[..., tuple[Tensor, Tensor]], torch.unique)  # pyright: ignore[reportUnknownMemberType]
    pairs, place = unique(keys, return_inverse=True)
    rows = g.new_zeros(len(pairs), table.embedding_dim).index_add_(0, place, g[real])
    owner, entry = pairs // table.num_embeddings, pairs % table.num_embeddings
    squares = g.new_zeros(batch, dtype=torch.float64)
    squares.index_add_(0, owner, square_sums(rows))

    def write(c: Tensor, views: Views) -> None:
        views["weight"].index_add_(0, entry, rows * c[owner, None])

    return Part(squares, write)


def _by_pairs(index: Tensor, g: Tensor, padding: int | None) -> Part:
    """The same for index [B, T] and g [B, T, E] without asking which indices there are.

    ‖G_j‖² sums g_jt·g_js over positions of one index, in float64 as the terms may cancel; never
    below what rounding leaves, see Outer.
    """
    if padding is not None:
        g = torch.where((index != padding)[:, :, None], g, 0)
    exact = g.double()
    same = index[:, :, None] == index[:, None, :]
    least = torch.finfo(g.dtype).eps * exact.square().sum(2).sqrt().sum(1)
    squares = torch.maximum((exact @ exact.mT * same).sum((1, 2)), least.square())

    def write(c: Tensor, views: Views) -> None:
        scaled = (g * c[:, None, None]).flatten(0, 1)
        views["weight"].index_add_(0, index.flatten(), scaled)

    return Part(squares, write)


# Normalisation


def _affine(grads: list[Tensor], normal: list[Tensor], names: frozenset[str]) -> Part:
    """Weight and bias of y = weight ⊙ x̂ + bias from g, x̂ [B, T, N], one pair a call."""
    found: dict[str, Tensor] = {}
    if "weight" in names:
        found["weight"] = torch.stack(
            [(g * x).sum(1) for g, x in zip(grads, normal, strict=True)]
        ).sum(0)
    if "bias" in names:
        found["bias"] = torch.stack([g.sum(1) for g in grads]).sum(0)
    return kept(found)


def layer_norm(module: nn.Module, calls: list[Call], names: frozenset[str]) -> Part:
    """nn.LayerNorm on [B, ..., *normalized_shape]."""
    norm = cast(nn.LayerNorm, module)
    shape = [len(calls[0].input), -1, int(torch.Size(norm.normalized_shape).numel())]
    normal = [F.layer_norm(c.input, norm.normalized_shape, eps=norm.eps) for c in calls]
    return _affine(
        [_grad(c).reshape(shape) for c in calls], [x.reshape(shape) for x in normal], names
    )


def group_norm(module: nn.Module, calls: list[Call], names: frozenset[str]) -> Part:
    """nn.GroupNorm on [B, C, ...]."""
    norm = cast(nn.GroupNorm, module)
    shape = [len(calls[0].input), norm.num_channels, -1]
    normal = [F.group_norm(c.input, norm.num_groups, eps=norm.eps) for c in calls]
    return _affine(
        [_grad(c).reshape(shape).mT for c in calls], [x.reshape(shape).mT for x in normal], names
    )


@dataclass(frozen=True)
class Layer:
    """A rule, and the fewest dimensions of an input that has a leading batch dimension."""

    rule: Rule
    dimensions: Callable[[nn.Module], int]


def layer_of(module: nn.Module) -> Layer | None:
    """The rule that computes this module's per-sample gradients, or None: then by the fallback.

    Only the very types below: a subclass, a parametrisation or a replaced forward computes
    something else.
    """
    if "forward" in vars(module):
        return None
    if not {n for n, _ in module.named_parameters()} <= {"weight", "bias"}:
        return None
    return _LAYERS.get(type(module))


_LAYERS: dict[type[nn.Module], Layer] = {
    nn.Linear: Layer(linear, lambda _: 2),
    nn.Conv1d: Layer(convolution, lambda _: 3),
    nn.Conv2d: Layer(convolution, lambda _: 4),
    nn.Embedding: Layer(embedding, lambda _: 1),
    nn.LayerNorm: Layer(layer_norm, lambda m: 1 + len(cast(nn.LayerNorm, m).normalized_shape)),
    nn.GroupNorm: Layer(group_norm, lambda _: 2),
}
