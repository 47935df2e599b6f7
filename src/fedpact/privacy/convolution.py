"""Per-sample gradients of a convolution's weight: Σ_t g_jt u_jtᵀ, u_jt the patch at position t.

A batch of n convolutions with one weight is one convolution with n groups and n weights. The
gradient of those weights is the per-sample gradient, by torch's own routine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpact.privacy.parts import Outer, Sizes, Views, joined

Conv = nn.Conv1d | nn.Conv2d

_backward = cast(Callable[..., tuple[Any, Any, Any]], torch.ops.aten.convolution_backward)


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
        x = F.pad(x, self.pad, mode=self.mode)
        x = x.reshape(-1, x.shape[1] // self.groups, *x.shape[2:])
        return F.unfold(x, self.kernel, self.dilation, 0, self.stride).mT

    def _padded(self, x: Tensor) -> tuple[Tensor, list[int]]:
        """The input, and the zeros that torch is to add to it."""
        if self.plain:
            return x, [self.pad[2], self.pad[0]]
        return F.pad(x, self.pad, mode=self.mode), [0, 0]


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
        # oneDNN has fast grouped kernels for one channel a group and for whole vectors of them.
        self.most = 16 if channels == 1 or channels % 8 == 0 else 1

    def factors(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """See Outer."""
        u = joined([self._geometry.patches(x[chunk]) for x, _ in self._pairs], 1)
        grads = [g[chunk].reshape(len(u), self.sizes.out, -1) for _, g in self._pairs]
        return joined(grads, 2), u

    def gradients(self, chunk: slice) -> Tensor:
        """See Outer."""
        return reduce(
            torch.add,
            (self._geometry.weight_rows(x[chunk], g[chunk], self._weight) for x, g in self._pairs),
        )

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
