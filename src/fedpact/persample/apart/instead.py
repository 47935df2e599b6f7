"""What is done instead of some operations of a trace: the same, in a way that can always be done.

Where torch's own would take a record's rows by other code than another's; see products.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpact.persample.products import (
    convolved,
    evenly,
    evenly_addmm,
    evenly_matmul,
    stepped,
)


def _copied(into: Tensor, source: Tensor) -> Tensor:
    return source.expand_as(into).to(into.dtype)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *others: Any, scale: float | None = None, **more: Any
) -> Tensor:
    """torch's attention of q, k [..., T, d] and v [..., T, e], with rows that begin at 16 bytes."""
    width, out = q.shape[-1], v.shape[-1]
    scale = width**-0.5 if scale is None else scale
    q, k, v = (stepped(F.pad(t, (0, -t.shape[-1] % 4))) for t in (q, k, v))
    found = F.scaled_dot_product_attention(q, k, v, *others, scale=scale, **more)
    return found[..., :out]


def _bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W_o yᵀ + b for x [..., K], y [..., L], W [O, K, L]; torch's multiplies uneven matrices."""
    out, width, other = weight.shape
    of_x = evenly_matmul(x, weight.movedim(1, 0).reshape(width, -1))
    pairs = of_x.reshape(*of_x.shape[:-1], out, other) * y.unsqueeze(-2)
    found = torch.sum(pairs, -1)
    return found if bias is None else found + bias


def _quotient(a: Tensor, b: Any, *, rounding_mode: str | None) -> Tensor:
    """Division; of whole numbers the least by -1, cut to a whole number, would end the process."""
    parts = a.is_floating_point() or (
        b.is_floating_point() if isinstance(b, Tensor) else isinstance(b, float)
    )
    if rounding_mode != "trunc" or parts or not a.dtype.is_signed:
        return torch.div(a, b, rounding_mode=rounding_mode)
    if not isinstance(b, Tensor):
        return -a if b == -1 else torch.div(a, b, rounding_mode="trunc")
    minus = b == -1
    found = torch.div(a, torch.where(minus, 1, b), rounding_mode="trunc")
    return torch.where(minus, -found, found)


def _sampled(x: Tensor, grid: Tensor, *settings: Any) -> Tensor:
    """x [B, C, ...] at the points of grid [B, ..., D], NaN where a point is none, or far too far.

    Torch's may read anywhere for those: it makes infinity of the largest numbers, and none of that.
    """
    most = torch.finfo(grid.dtype).max / (4 * max(x.shape[2:]))
    good = (grid.abs() <= most).all(-1)
    found = torch.grid_sampler(x, torch.where(good.unsqueeze(-1), grid, 0), *settings)
    return torch.where(good.unsqueeze(1), found, torch.nan)


def _filled(make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """What is yet to be written, with nothing of what lay in its memory before."""
    made = make(*args, **kwargs)
    return made.fill_(torch.nan if made.is_floating_point() or made.is_complex() else 0)


_aten = cast(Any, torch.ops.aten)
_transposed = partial(convolved, transposed=True)
INSTEAD: dict[Any, Callable[..., Any]] = {
    # torch may have traced a view that another layout of the same numbers has not,
    _aten.view.default: _aten.reshape.default,
    _aten.linear.default: evenly,
    # Products whose rows, or matrices, would begin elsewhere than others'.
    **dict.fromkeys(
        (
            _aten.matmul.default,
            _aten.linalg_matmul.default,
            _aten.mm.default,
            _aten.bmm.default,
            _aten.mv.default,
        ),
        evenly_matmul,
    ),
    _aten.addmm.default: evenly_addmm,
    _aten.conv1d.default: partial(convolved, F.conv1d),
    _aten.conv2d.default: partial(convolved, F.conv2d),
    _aten.conv3d.default: partial(convolved, F.conv3d),
    _aten.conv1d.padding: partial(convolved, F.conv1d),
    _aten.conv2d.padding: partial(convolved, F.conv2d),
    _aten.conv3d.padding: partial(convolved, F.conv3d),
    _aten.conv_transpose1d.default: partial(_transposed, F.conv_transpose1d),
    _aten.conv_transpose2d.input: partial(_transposed, F.conv_transpose2d),
    _aten.conv_transpose3d.input: partial(_transposed, F.conv_transpose3d),
    _aten.bilinear.default: _bilinear,
    _aten.scaled_dot_product_attention.default: _attention,
    **{
        overload: _quotient
        for kind in (_aten.div, _aten.divide)
        for overload in (kind.Tensor_mode, kind.Scalar_mode)
    },
    **dict.fromkeys(
        (
            _aten.grid_sampler.default,
            _aten.grid_sampler_2d.default,
            _aten.grid_sampler_3d.default,
        ),
        _sampled,
    ),
    **{
        make: partial(_filled, make)
        for make in (
            _aten.empty.memory_format,
            _aten.empty_like.default,
            _aten.empty_permuted.default,
            _aten.empty_strided.default,
            _aten.new_empty.default,
            _aten.new_empty_strided.default,
        )
    },
    # and a copy has no derivative.
    _aten.copy.default: _copied,
}
