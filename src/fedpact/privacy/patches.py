"""A convolution is a linear layer on patches of its input; here the patches are laid out."""

from dataclasses import dataclass
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Geometry:
    """How a Conv1d or Conv2d reads its input, as a Conv2d (a Conv1d has height 1).

    channels: of one group. pad: left, right, top, bottom.
    """

    channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    pad: tuple[int, int, int, int]
    mode: str
    groups: int

    @staticmethod
    def of(conv: nn.Conv1d | nn.Conv2d) -> "Geometry":
        """Read a module's settings."""
        kernel, stride, dilation = (
            _pair(v, 1) for v in (conv.kernel_size, conv.stride, conv.dilation)
        )
        return Geometry(
            channels=conv.in_channels // conv.groups,
            kernel=kernel,
            stride=stride,
            dilation=dilation,
            pad=_padding(conv.padding, kernel, dilation),
            mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode,
            groups=conv.groups,
        )

    @property
    def width(self) -> int:
        """K, the length of a patch: kernel area times channels."""
        return self.kernel[0] * self.kernel[1] * self.channels

    def channels_inside(self, across: int) -> bool:
        """Whether patches are copied fastest by channel: `across` is the output's width.

        What runs contiguously is a kernel row of channels, or else a row of outputs.
        """
        return self.kernel[1] * self.channels >= across

    def weight(self, total: Tensor, inside: bool) -> Tensor:
        """From [..., O, K], K as `unfold` orders it, to Conv2d.weight's [O, channels, h, w]."""
        if inside:
            return total.reshape(-1, *self.kernel, self.channels).permute(0, 3, 1, 2)
        return total.reshape(-1, self.channels, *self.kernel)

    def unfold(self, x: Tensor, inside: bool, workspace: Tensor) -> Tensor:
        """The patches of x [b, C, ...] as [b·groups, T, K], in the workspace where it is needed.

        One strided view, copied once. inside: K runs over (h, w, channel), else (channel, h, w).
        """
        x = x.unsqueeze(2) if x.dim() == 3 else x
        x = x.reshape(-1, self.channels, *x.shape[2:])
        if any(self.pad):
            x = F.pad(x, self.pad, mode=self.mode)
        n, c, height, width = x.shape
        (kh, kw), (sh, sw), (dh, dw) = self.kernel, self.stride, self.dilation
        rows = (height - dh * (kh - 1) - 1) // sh + 1
        columns = (width - dw * (kw - 1) - 1) // sw + 1
        if inside:
            x = x.permute(0, 2, 3, 1).contiguous()
            down, along = width * c, c
            view = x.as_strided(
                (n, rows, columns, kh, kw, c),
                (height * down, sh * down, sw * along, dh * down, dw * along, 1),
            )
            return _copied(view, workspace).view(n, rows * columns, self.width)
        x = x.contiguous()
        area = height * width
        view = x.as_strided(
            (n, c, kh, kw, rows, columns), (c * area, area, dh * width, dw, sh * width, sw)
        )
        return _copied(view, workspace).view(n, self.width, rows * columns).mT


def _copied(view: Tensor, workspace: Tensor) -> Tensor:
    # One buffer for all chunks: memory that the allocator hands out anew is paged in anew.
    if workspace.numel() < view.numel():
        workspace.resize_(view.numel())
    return workspace[: view.numel()].view(view.shape).copy_(view)


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
