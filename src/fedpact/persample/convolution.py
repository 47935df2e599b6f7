"""Per-sample gradients of a convolution's weight: Σ_t g_jt u_jtᵀ, u_jt the patch at position t.

Four ways to make them, each the fastest where it applies:

many channels   Patches are laid out as they lie in an image stored by pixel, a row of the kernel
                at a time, and multiplied with g. Where a record has more positions than a patch
                has numbers, torch's own routine is faster, for a batch of n convolutions is one
                convolution with n groups and n weights.
few channels    Patches are small: they are laid out by channel and multiplied with g.
before a pool   Only one number of each pooling window passes a gradient back, so g is zero but for
                one position in four or more, and Σ_t g_t u_tᵀ is a sum over those positions: for
                each output channel a weighted sum of rows of a table, torch's embedding_bag. A row
                of the table is a row of the patch, kernel width times channels, which lies together
                in an image stored by pixel; the rows of the kernel are as many sums over it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpact.params import at_hand
from fedpact.persample import norms
from fedpact.persample.products import convolved, filled, first_of_groups
from fedpact.persample.share import Share, same

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

    @staticmethod
    def by(kernel: tuple[int, ...], settings: list[Any]) -> "Geometry":
        """Of an operation: kernel sizes; stride, padding, dilation and groups as torch has them."""
        stride, padding, dilation, groups = settings
        size = _pair(kernel, 1)
        spread = _pair(dilation, 1)
        pad = _padding(padding, size, spread)
        return Geometry(size, _pair(stride, 1), spread, pad, "constant", groups)

    @property
    def plain(self) -> bool:
        """Whether torch's convolution pads by itself: with zeros, and alike on both sides."""
        left, right, top, bottom = self.pad
        return self.mode == "constant" and left == right and top == bottom

    @property
    def even(self) -> bool:
        """Whether two images or more are convolved by the same code, however many they are.

        torch takes other code below 16 of them for single pixels. Of kernels that move in steps,
        are spread or grouped, or of one row, nothing is claimed.
        """
        simple = self.stride == self.dilation == (1, 1) and self.groups == 1
        return simple and min(self.kernel) > 1

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution of x [n, C, H, W], where `plain` holds."""
        padding = (self.pad[2], self.pad[0])
        settings = self.stride, padding, self.dilation, self.groups
        return convolved(F.conv2d, x, weight, bias, *settings)

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
        g = g.flatten(2)
        outputs, positions = g.shape[1:]
        columns = x.as_strided(shape, steps).reshape(n, -1, positions)
        # Each record's matrices begin at 16 bytes, as the first one's do: zeros are put behind.
        behind, below = -positions % 4, -outputs % 4 if columns.shape[1] % 4 else 0
        if behind or below:
            columns, g = F.pad(columns, (0, behind)), F.pad(g, (0, behind, 0, below))
        # g is laid out by pixel as a rule: so its matrix is as it lies in memory.
        return (columns @ g.mT).mT[:, :outputs].reshape(n, -1)

    def weight_rows_by_pixel(self, x: Tensor, g: Tensor, out: Tensor | None) -> Tensor:
        """The same for one group, as [n, O, h, w, C]; written to `out` if there is one."""
        x = self.padded(x).permute(0, 2, 3, 1).contiguous()
        n, height, width, channels = x.shape
        (down, along), (dh, dw) = self.stride, self.dilation
        row = width * channels
        kernel = (self.kernel[0], self.kernel[1], channels)
        steps = (height * row, down * row, along * channels, dh * row, dw * channels, 1)
        columns = x.as_strided((n, *g.shape[2:], *kernel), steps)
        columns = columns.reshape(n, g[0, 0].numel(), -1)
        if out is not None:
            out = out.view(n, g.shape[1], columns.shape[2])
        return torch.bmm(g.flatten(2), columns, out=out).view(n, -1)

    def input_grad(self, x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
        """∂/∂x, where `plain` holds."""
        padding = [self.pad[2], self.pad[0]]
        if g.dtype != torch.float64:
            return self.gradient(g, x, weight, padding, 1, 0)
        each, weight = weight.shape[1], filled(filled(weight, 0, self.groups), 1)
        g, x = filled(g, 1, self.groups), filled(x, 1, self.groups)
        return first_of_groups(self.gradient(g, x, weight, padding, 1, 0), self.groups, each)

    def gradient(
        self, g: Tensor, x: Tensor, weight: Tensor, padding: list[int], samples: int, which: int
    ) -> Tensor:
        """∂/∂x (which = 0) or ∂/∂weight (1) of a convolution with samples * groups groups."""
        mask = [which == 0, which == 1, False]
        arguments = (list(self.stride), padding, list(self.dilation), False, [0, 0])
        found = _backward(g, x, weight, None, *arguments, samples * self.groups, mask)
        return cast(Tensor, found[which])

    def _padded(self, x: Tensor) -> tuple[Tensor, list[int]]:
        """The input, and the zeros that torch is to add to it."""
        if self.plain:
            return x, [self.pad[2], self.pad[0]]
        return self.padded(x), [0, 0]

    def padded(self, x: Tensor) -> Tensor:
        """The input with its border."""
        return F.pad(x, self.pad, mode=self.mode) if any(self.pad) else x


class Convolved(Share):
    """A weight's gradients from x [B, C, H, W] and g [B, O, h, w]; [B, C, L] and [B, O, l] too."""

    def __init__(self, geometry: Geometry, weight: Tensor, x: Tensor, g: Tensor) -> None:
        self._geometry, self._weight = geometry, images(weight.detach())
        self.x, self.g = images(x), images(g)
        self.batch, self.size = len(x), weight.numel()
        self.element = g.element_size()
        positions, patch = self.g[0, 0].numel(), self._weight[0].numel()
        alone = geometry.groups == 1
        # torch's routines for groups work on one channel a group or on whole vectors of channels.
        self._few = alone and self._weight.shape[1] % 8 > 0
        self._by_pixel = alone and not self._few and 2 * positions <= patch
        # Where images do not begin at 16 bytes each is multiplied by itself, as the first one is;
        # few channels are copied, and zeros put behind them.
        odd = self.size % 4 > 0 or any(t[0].numel() % 4 for t in (self.x, self.g))
        self._odd = odd and not self._few
        one = max(1, norms.CHUNK_BYTES // (positions * patch * self.element))
        self.most = one if self._few or self._by_pixel else _GROUPS

    @property
    def like(self) -> Tensor:
        """See Share."""
        return self.g

    def rows(self, chunk: slice) -> Tensor:
        """See Share."""
        rows = self.quick_rows(chunk, None)
        return self.arranged(rows).flatten(1) if self._by_pixel else rows

    def quick_rows(self, chunk: slice, out: Tensor | None) -> Tensor:
        """See Share."""
        if chunk.stop - chunk.start == 1 < self.batch:
            # One image by itself is convolved by other code than two are.
            start = max(chunk.start - 1, 0)
            return self.quick_rows(slice(start, start + 2), None)[chunk.start - start :][:1]
        x, g = self.x[chunk], self.g[chunk]
        if self._odd:
            each = [slice(j, j + 1) for j in range(len(x))]
            return torch.cat([self._made(x[j].clone(), g[j].clone(), None) for j in each])
        return self._made(x, g, out)

    def _made(self, x: Tensor, g: Tensor, out: Tensor | None) -> Tensor:
        if self._by_pixel:
            return self._geometry.weight_rows_by_pixel(x, g, out)
        if self._few:
            return self._geometry.weight_rows_by_patches(x, g)
        return self._geometry.weight_rows(x, g, self._weight)

    def arranged(self, total: Tensor) -> Tensor:
        """See Share."""
        if not self._by_pixel:
            return total
        out, channels, *kernel = self._weight.shape
        return total.view(*total.shape[:-1], out, *kernel, channels).movedim(-1, -3)

    def minus(self, other: Share) -> list[Share]:
        """See Share, and Outer."""
        one = cast(Convolved, other)
        first = Convolved(self._geometry, self._weight, self.x, self.g - one.g)
        if same(self.x, one.x):
            return [first]
        return [first, Convolved(self._geometry, self._weight, self.x - one.x, one.g)]

    def pairs(self, other: Share) -> bool:
        """See Share."""
        return isinstance(other, Convolved) and other.x.shape == self.x.shape

    def negative(self) -> Share:
        """See Share."""
        return Convolved(self._geometry, self._weight, self.x, -self.g)


_WIDE = 64
"""From how many numbers a row on: shorter ones cost more to find than to add."""

Pooled = tuple[Tensor, Tensor]
"""(g at the windows' maxima [B, O, ...], their places in the convolution's output, h·w)."""


def sparse(geometry: Geometry, weight: Tensor, grad: Tensor, pooled: Pooled | None) -> bool:
    """Whether the gradient `grad` is sparse enough, and the convolution of the kind meant here.

    On CPUs, where embedding_bag is a routine of its own and faster than a product; untried on GPUs.
    """
    if pooled is None or not at_hand(grad):
        return False
    simple = geometry.plain and geometry.stride == geometry.dilation == (1, 1)
    wide = geometry.kernel[1] * weight.shape[1] >= _WIDE
    return simple and geometry.groups == 1 and wide and grad.numel() >= 4 * pooled[0].numel()


class Pooled2d(Convolved):
    """A weight's gradients [O, h, w, C] from x [B, C, H, W] and what the pooling passed back."""

    def __init__(
        self, geometry: Geometry, weight: Tensor, x: Tensor, g: Tensor, pooled: Pooled
    ) -> None:
        super().__init__(geometry, weight, x, g)
        values, index = pooled
        batch, out = values.shape[:2]
        self._values = values.reshape(batch, out, 1, -1)
        self._index = index.int().reshape(batch, out, 1, -1)
        self.most, self._by_pixel = None, True

    def quick_rows(self, chunk: slice, out: Tensor | None) -> Tensor:  # noqa: ARG002
        """See Share."""
        values, index = self._values[chunk], self._index[chunk]
        n, places = len(values), values.shape[3]
        kernel, columns = self._geometry.kernel[0], self.g.shape[3]
        table = self._table(self.x[chunk], columns)
        # A row of the kernel reads the table so many rows further down; a sample, its own part.
        down = torch.arange(0, kernel * columns, columns, dtype=torch.int32, device=index.device)
        first = torch.arange(n, dtype=torch.int32, device=index.device) * (len(table) // n)
        rows = (index + (first[:, None] + down)[:, None, :, None]).reshape(-1, places)
        weights = values.expand(-1, -1, kernel, -1).reshape(-1, places)
        return F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights).view(n, -1)

    def _table(self, x: Tensor, columns: int) -> Tensor:
        """Every kernel row of the padded images, [n·height·columns, kernel width · C]."""
        x = self._geometry.padded(x).permute(0, 2, 3, 1).contiguous()
        n, height, width, channels = x.shape
        row = width * channels
        shape = (n, height, columns, self._geometry.kernel[1] * channels)
        return x.as_strided(shape, (height * row, row, channels, 1)).reshape(-1, shape[3])


def images(x: Tensor) -> Tensor:
    """[n, C, L] as images [n, C, 1, L] of height 1; others as they are."""
    return x.unsqueeze(2) if x.dim() == 3 else x


def pixelwise(x: Tensor) -> Tensor:
    """Images [n, C, H, W], the channels of a pixel side by side in memory."""
    _, channels, height, width = x.shape
    if channels == 1:
        # Both layouts are the same memory; by these strides torch takes it for the one we want.
        return x.contiguous().as_strided(x.shape, (height * width, 1, width, 1))
    return x.contiguous(memory_format=torch.channels_last)


def _pair(value: object, default: int) -> tuple[int, int]:
    """(height, width) of two numbers; of one, those of a Conv1d, whose height is the default."""
    found = tuple(cast(list[int], value))
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
