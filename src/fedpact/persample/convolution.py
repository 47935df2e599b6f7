"""Per-sample gradients of a convolution's weight: Σ_t g_jt u_jtᵀ, u_jt the patch at position t.

Three ways to instantiate them, each the fastest where it applies:

many channels   A batch of n convolutions with one weight is one convolution with n groups and n
                weights, whose gradient is the per-sample gradient, by torch's own routine.
few channels    Patches are small: they are laid out and multiplied with g.
before a pool   Max-pooling leaves g one number a window: only the rows u_jt that it takes are
                summed (pooled).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpact.persample import norms
from fedpact.persample.norms import Outer, Sizes, Views, joined

Conv = nn.Conv1d | nn.Conv2d

# With more groups at a time torch's routine falls out of the cache.
_GROUPS = 16

_backward = cast(Callable[..., tuple[Any, Any, Any]], torch.ops.aten.convolution_backward.default)


@dataclass(frozen=True)
class Geometry:
    """How a Conv1d or Conv2d reads its input, as a Conv2d (a Conv1d has height 1).

    pad: left, right, top, bottom, as torch.nn.functional.pad takes it.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    pad: tuple[int, int, int, int]
    mode: str
    groups: int

    @staticmethod
    def of(conv: Conv) -> "Geometry":
        """Read a module's settings."""
        kernel, stride, dilation = (
            _pair(v, 1) for v in (conv.kernel_size, conv.stride, conv.dilation)
        )
        return Geometry(
            kernel=kernel,
            stride=stride,
            dilation=dilation,
            pad=_padding(conv.padding, kernel, dilation),
            mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode,
            groups=conv.groups,
        )

    @property
    def plain(self) -> bool:
        """Whether torch's convolution pads by itself: with zeros, and alike on both sides."""
        left, right, top, bottom = self.pad
        return self.mode == "constant" and left == right and top == bottom

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution of x [n, C, H, W], where `plain` holds."""
        padding = (self.pad[2], self.pad[0])
        return F.conv2d(x, weight, bias, self.stride, padding, self.dilation, self.groups)

    def weight_rows(self, x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
        """Per-sample gradients [n, |weight|] from x [n, C, H, W] and g [n, O, h, w]."""
        n, shape = len(x), (len(x) * weight.shape[0], *weight.shape[1:])
        x, padding = self._padded(x)
        x, g = (t.reshape(1, -1, *t.shape[2:]) for t in (x, g))
        return self.gradient(g, x, weight.new_empty(1).expand(shape), padding, n, 1).view(n, -1)

    def weight_rows_by_patches(self, x: Tensor, g: Tensor) -> Tensor:
        """The same for one group."""
        x = self.padded(x).contiguous()
        n, channels, height, width = x.shape
        (down, along), (dh, dw) = self.stride, self.dilation
        shape = (n, channels, *self.kernel, *g.shape[2:])
        area = height * width
        steps = (channels * area, area, dh * width, dw, down * width, along)
        columns = x.as_strided(shape, steps).reshape(n, -1, g[0, 0].numel())
        # g is laid out by pixel as a rule: so its matrix is as it lies in memory.
        return (columns @ g.flatten(2).mT).mT.reshape(n, -1)

    def weight_sum(self, x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
        """Σ_j of the per-sample gradients, in the weight's shape with height 1 for a Conv1d."""
        x, padding = self._padded(x)
        return self.gradient(g, x, weight, padding, 1, 1)

    def input_grad(self, x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
        """∂/∂x, where `plain` holds."""
        return self.gradient(g, x, weight, [self.pad[2], self.pad[0]], 1, 0)

    def gradient(
        self, g: Tensor, x: Tensor, weight: Tensor, padding: list[int], samples: int, which: int
    ) -> Tensor:
        """∂/∂x (which = 0) or ∂/∂weight (1) of a convolution with samples * groups groups."""
        mask = [which == 0, which == 1, False]
        arguments = (list(self.stride), padding, list(self.dilation), False, [0, 0])
        found = _backward(g, x, weight, None, *arguments, samples * self.groups, mask)
        return cast(Tensor, found[which])

    def patches(self, x: Tensor) -> Tensor:
        """The patches of x [n, C, H, W] as [n·groups, T, K], K over (channel, h, w)."""
        x = self.padded(x)
        x = x.reshape(-1, x.shape[1] // self.groups, *x.shape[2:])
        return F.unfold(x, self.kernel, self.dilation, 0, self.stride).mT

    def _padded(self, x: Tensor) -> tuple[Tensor, list[int]]:
        """The input, and the zeros that torch is to add to it."""
        if self.plain:
            return x, [self.pad[2], self.pad[0]]
        return self.padded(x), [0, 0]

    def padded(self, x: Tensor) -> Tensor:
        """The input with its border."""
        return F.pad(x, self.pad, mode=self.mode) if any(self.pad) else x


class Convolution(Outer):
    """A weight's gradients from x [B, C, H, W] and g [B, O, h, w], one pair for each call."""

    def __init__(self, conv: Conv, inputs: list[Tensor], grads: list[Tensor]) -> None:
        self._geometry = Geometry.of(conv)
        self._weight = images(conv.weight.detach())
        self._pairs = list(zip(map(images, inputs), map(images, grads), strict=True))
        channels, groups = self._weight.shape[1], self._geometry.groups
        self.sizes = Sizes(
            batch=len(inputs[0]),
            rows=groups,
            length=sum(g[0, 0].numel() for _, g in self._pairs),
            out=len(self._weight) // groups,
            width=self._weight[0].numel(),
            element=self._weight.element_size(),
        )
        # torch's routines for groups work on one channel a group or on whole vectors of channels.
        self._few = channels % 8 > 0 and groups == 1
        columns = self.sizes.length * self.sizes.width * self.sizes.element
        self.most = norms.CHUNK_BYTES // columns if self._few else _GROUPS

    def factors(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """See Outer."""
        u = joined([self._geometry.patches(x[chunk]) for x, _ in self._pairs], 1)
        grads = [g[chunk].reshape(len(u), self.sizes.out, -1) for _, g in self._pairs]
        return joined(grads, 2), u

    def gradients(self, chunk: slice) -> Tensor:
        """See Outer."""
        return reduce(torch.add, (self._rows(x[chunk], g[chunk]) for x, g in self._pairs))

    def _rows(self, x: Tensor, g: Tensor) -> Tensor:
        if self._few:
            return self._geometry.weight_rows_by_patches(x, g)
        return self._geometry.weight_rows(x, g, self._weight)

    def write_sum(self, c: Tensor, views: Views) -> None:
        """See Outer."""
        total = views["weight"]
        for x, g in self._pairs:
            scaled = g * c.view(-1, 1, 1, 1)
            total += self._geometry.weight_sum(x, scaled, self._weight).view(total.shape)


def images(x: Tensor) -> Tensor:
    """[n, C, L] as images [n, C, 1, L] of height 1; others as they are."""
    return x.unsqueeze(2) if x.dim() == 3 else x


def _pair(value: object, default: int) -> tuple[int, int]:
    found = cast(tuple[int, ...], value)
    return (default, found[0]) if len(found) == 1 else (found[0], found[1])


def _padding(
    padding: str | tuple[int, ...], kernel: tuple[int, int], dilation: tuple[int, int]
) -> tuple[int, int, int, int]:
    if padding == "valid":
        return 0, 0, 0, 0
    if padding == "same":
        down, along = ((k - 1) * d for k, d in zip(kernel, dilation, strict=True))
        return along // 2, along - along // 2, down // 2, down - down // 2
    down, along = _pair(padding, 0)
    return along, along, down, down
