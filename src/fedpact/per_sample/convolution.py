"""Per-sample gradients of a convolution's weight: Σ_t g_jt u_jtᵀ, u_jt the patch at position t.

There are several ways to compute them, each the fastest in some cases (see PatchOrder):

by pixel        Patches are one strided copy of channels-last images, [n, T, kernel·C], and are
                multiplied with g in one product for all records and groups.
by channel      With few channels, patches are laid out by channel, as rows would be short.
by torch        A batch of n convolutions is one convolution with n groups and n weights. On a CPU
                this is fastest if a record has more positions than a patch has numbers.
few positions   Patches and g are those of a linear layer with few positions; see gradients.Outer.
before a pool   Only one entry of each pooling window passes a gradient back, so g is zero except at
                one position in four or more, and Σ_t g_t u_tᵀ is a sum over those positions: for
                each output channel a weighted sum of rows of a table, torch's embedding_bag. A row
                of the table is a row of the patch, kernel width times channels, which is contiguous
                in a channels-last image; each row of the kernel is one such sum.

A transposed convolution is a convolution's gradient, so its weight has the gradients of that
convolution with x and g exchanged.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpact.common.params import on_cpu
from fedpact.per_sample import norms
from fedpact.per_sample.gradients import TOGETHER, Outer, Part, Share, is_few
from fedpact.per_sample.products import differ, products

PatchOrder = Literal["pixel", "channel", "torch"]

_GROUPS = 16
"""With more groups at a time torch's routine falls out of the cache."""

_SHORT = 8
"""Fewer channels make rows that are shorter than a processor's vectors."""

_backward = cast(Callable[..., tuple[Any, Any, Any]], torch.ops.aten.convolution_backward.default)


@dataclass(frozen=True)
class Geometry:
    """The geometry of a convolution with one to three dimensions.

    kernel, stride, dilation: one number per dimension. pad: the same, before and after each.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pad: tuple[int, ...]
    groups: int

    @staticmethod
    def by(kernel: tuple[int, ...], settings: list[Any]) -> "Geometry":
        """From an operation's kernel sizes, and torch's stride, padding, dilation and groups."""
        stride, padding, dilation, groups = settings
        stride, pad, dilation = (_each(v, len(kernel)) for v in (stride, padding, dilation))
        return Geometry(tuple(kernel), stride, dilation, pad, groups)

    def over_several(self) -> "Geometry":
        """The same of several images, along a first dimension of theirs."""
        first = (1,)
        kernel, stride, dilation = (first + v for v in (self.kernel, self.stride, self.dilation))
        return Geometry(kernel, stride, dilation, (0, *self.pad), self.groups)

    def positions(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """The number of positions along each dimension of an input of this size."""
        sides = [2 * p for p in self.pad]
        read = [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]
        each = zip(size, sides, read, self.stride, strict=True)
        return tuple((n + more - one) // step + 1 for n, more, one, step in each)

    def weight_rows(self, x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
        """Gradients [n, |weight|] from x [n, C, ...] and g [n, O, ...], by torch's routine."""
        n, shape = len(x), (len(x) * weight.shape[0], *weight.shape[1:])
        # One record of n · C channels in n groups: no group's weight reads another record.
        x, g = (t.reshape(1, -1, *t.shape[2:]) for t in (x, g))
        # The routine uses only the shape of the weights, so one number is expanded.
        weights = weight.new_empty(1).expand(shape)
        none = [0] * len(self.kernel)
        lists = list(self.stride), list(self.pad), list(self.dilation)
        settings = *lists, False, none, n * self.groups
        found = _backward(g, x, weights, None, *settings, [False, True, False])
        return cast(Tensor, found[1]).view(n, -1)

    def weight_rows_by_channel(self, x: Tensor, g: Tensor) -> Tensor:
        """The same, with patches laid out by channel."""
        x = self.pad_input(x).contiguous()
        n, channels = x.shape[:2]
        shape = (n, channels, *self.kernel, *g.shape[2:])
        columns = x.as_strided(
            shape, (*x.stride()[:2], *self._strides(x.stride()[2:], kernel_first=True))
        )
        columns = columns.reshape(n * self.groups, -1, g[0, 0].numel())
        g = g.reshape(n * self.groups, -1, columns.shape[2])
        if differ(columns, g.mT):
            # There are more columns to copy than numbers in g.
            return products(g, columns.mT).reshape(n, -1)
        # g is usually channels-last, so its matrix needs no copy.
        return (columns @ g.mT).mT.reshape(n, -1)

    def weight_rows_by_pixel(self, x: Tensor, g: Tensor) -> Tensor:
        """The same by pixel, as [n, O, kernel, C]."""
        columns = self.patches(x, g.shape[2:])
        g = g.reshape(len(columns), -1, columns.shape[1])
        return products(g, columns).reshape(len(x), -1)

    def patches(self, x: Tensor, positions: tuple[int, ...]) -> Tensor:
        """The patches of x [n, C, ...], as [n · groups, T, kernel · C / groups]."""
        x = self.pad_input(x).movedim(1, -1).contiguous()
        each = x.shape[-1] // self.groups
        shape = (len(x), self.groups, *positions, *self.kernel, each)
        # Patches overlap: a strided view contains each number several times without copying.
        strides = (x.stride(0), each, *self._strides(x.stride()[1:-1]), 1)
        columns = x.as_strided(shape, strides)
        return columns.reshape(len(x) * self.groups, math.prod(positions), -1)

    def pad_input(self, x: Tensor) -> Tensor:
        """The padded input."""
        sides = [p for p in reversed(self.pad) for _ in range(2)]
        return F.pad(x, sides) if any(sides) else x

    def _strides(self, row: tuple[int, ...], *, kernel_first: bool = False) -> tuple[int, ...]:
        """Memory strides of positions and kernel, from those of the input's dimensions."""
        positions = tuple(s * r for s, r in zip(self.stride, row, strict=True))
        kernel = tuple(d * r for d, r in zip(self.dilation, row, strict=True))
        return kernel + positions if kernel_first else positions + kernel


def layout_of(groups: int, weight: Tensor, positions: int, *, cpu: bool) -> PatchOrder:
    """The fastest way to compute gradients of weight [O, C / groups, ...]."""
    channels = weight.shape[1]
    if not cpu:
        # Not torch's routine, which launches a GPU kernel for each group.
        return "channel" if channels < _SHORT else "pixel"
    # torch's routine works on one channel per group or on whole vectors of channels.
    if channels % _SHORT == 0 and 4 * positions <= weight[0].numel():
        return "pixel"
    few = channels % _SHORT > 0 or weight[0].numel() == channels
    return "channel" if groups == 1 and few else "torch"


class Convolved(Share):
    """A weight's gradients from x [B, C, ...] and g [B, O, ...], with one to three dimensions.

    layout: the way to compute them, by default the fastest.
    """

    def __init__(
        self,
        geometry: Geometry,
        weight: Tensor,
        x: Tensor,
        g: Tensor,
        layout: PatchOrder | None = None,
    ) -> None:
        self._geometry, self._weight = geometry, weight.detach()
        self.x, self.g = x, g
        self._positions = math.prod(g.shape[2:])
        self._layout: PatchOrder = layout or layout_of(
            geometry.groups, weight, self._positions, cpu=on_cpu(g)
        )
        # All patches of the records of one chunk should fit into the cache.
        patches = self._positions * weight[0].numel() * geometry.groups
        one = max(1, norms.chunk_bytes(g) // max(1, patches * g.element_size()))
        most = _GROUPS if self._layout == "torch" else one
        super().__init__(len(x), weight.numel(), g, most)

    def quick_rows(self, chunk: slice) -> Tensor:
        """See Share."""
        x, g = self.x[chunk], self.g[chunk]
        if self._layout == "pixel":
            return self._geometry.weight_rows_by_pixel(x, g)
        if self._layout == "channel":
            return self._geometry.weight_rows_by_channel(x, g)
        return self._geometry.weight_rows(x, g, self._weight)

    def arrange(self, total: Tensor) -> Tensor:
        """See Share."""
        if self._layout != "pixel":
            return total
        out, channels, *kernel = self._weight.shape
        return total.view(*total.shape[:-1], out, *kernel, channels).movedim(-1, -1 - len(kernel))

    def special(self) -> Part | None:
        """See Share: for few positions as in `Outer`."""
        length, read = self._positions, self._weight[0].numel()
        few = length == 1 or is_few(self.g, length, self.size, read)
        if self._geometry.groups > 1 or not few:
            return None
        out, channels = self._weight.shape[:2]
        # Channels are last in patches, and second in the weight, to which the product is added.
        u = self._geometry.patches(self.x, self.g.shape[2:])
        u = u.view(*u.shape[:2], -1, channels).mT.flatten(2)
        part = Outer(self.g.flatten(2).mT, u).special()
        if part is None:
            return None

        def add(c: Tensor, good: Tensor | None, view: Tensor) -> None:
            part.add(c, good, view.view(out, -1))

        return Part(part.squares, add)


_WIDE = 64
"""From how many numbers a row on: shorter ones cost more to find than to add."""

Pooled = tuple[Tensor, Tensor]
"""(g at the windows' maxima [B, O, ...], their places in the convolution's output, h·w)."""


def sparse(geometry: Geometry, weight: Tensor, grad: Tensor, pooled: Pooled | None) -> bool:
    """Whether `grad` is sparse enough, and the convolution suitable, for the way before a pool.

    Only on CPUs, where embedding_bag is faster than a product; not measured on GPUs.
    """
    if pooled is None or not on_cpu(grad):
        return False
    simple = geometry.stride == geometry.dilation == (1, 1)
    wide = geometry.kernel[1] * weight.shape[1] >= _WIDE
    return simple and geometry.groups == 1 and wide and grad.numel() >= 4 * pooled[0].numel()


class Pooled2d(Convolved):
    """A weight's gradients [O, h, w, C] from x [B, C, H, W] and the pooling's gradient."""

    def __init__(
        self, geometry: Geometry, weight: Tensor, x: Tensor, g: Tensor, pooled: Pooled
    ) -> None:
        super().__init__(geometry, weight, x, g, "pixel")
        values, index = pooled
        batch, out = values.shape[:2]
        self._values = values.reshape(batch, out, 1, -1)
        self._index = index.int().reshape(batch, out, 1, -1)
        self.most = TOGETHER  # no patches are made

    def quick_rows(self, chunk: slice) -> Tensor:
        """See Share."""
        values, index = self._values[chunk], self._index[chunk]
        n, places = len(values), values.shape[3]
        kernel, columns = self._geometry.kernel[0], self.g.shape[3]
        table = self._table(self.x[chunk], columns)
        # Each kernel row is offset by some table rows; each record has its own part of the table.
        down = torch.arange(0, kernel * columns, columns, dtype=torch.int32, device=index.device)
        first = torch.arange(n, dtype=torch.int32, device=index.device) * (len(table) // n)
        rows = (index + (first[:, None] + down)[:, None, :, None]).reshape(-1, places)
        weights = values.expand(-1, -1, kernel, -1).reshape(-1, places)
        return F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights).view(n, -1)

    def _table(self, x: Tensor, columns: int) -> Tensor:
        """Every kernel row of the padded images, [n·height·columns, kernel width · C]."""
        x = self._geometry.pad_input(x).permute(0, 2, 3, 1).contiguous()
        n, height, width, channels = x.shape
        row = width * channels
        shape = (n, height, columns, self._geometry.kernel[1] * channels)
        return x.as_strided(shape, (height * row, row, channels, 1)).reshape(-1, shape[3])


def pixelwise(x: Tensor) -> Tensor:
    """Images [n, C, H, W] in channels-last memory format."""
    _, channels, height, width = x.shape
    if channels == 1:
        # Both layouts have the same memory; these strides make torch use the intended one.
        return x.contiguous().as_strided(x.shape, (height * width, 1, width, 1))
    return x.contiguous(memory_format=torch.channels_last)


def _each(value: Any, dimensions: int) -> tuple[int, ...]:
    """One number per dimension, from a list or a single number."""
    found = list(cast(list[int], value)) if isinstance(value, (list, tuple)) else [cast(int, value)]
    return tuple(found * dimensions if len(found) == 1 else found)
