"""What is done instead of some operations of a trace, in a way that is always possible."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor


def _copied(into: Tensor, source: Tensor) -> Tensor:
    return source.expand_as(into).to(into.dtype)


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
INSTEAD: dict[Any, Callable[..., Any]] = {
    # torch may have traced a view that another layout of the same numbers has not,
    _aten.view.default: _aten.reshape.default,
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
