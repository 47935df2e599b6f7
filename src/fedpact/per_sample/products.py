"""Matrix products by the faster of torch's libraries."""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

LARGE = 2**15
"""From so many weights on it pays to ask oneDNN."""

_Product = Callable[[Tensor, Tensor, Tensor | None, str, list[object], str], Tensor]


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, large: bool | None = None
) -> Tensor:
    """x Wᵀ + b for x [..., K], W [O, K] in any layout, b [O]; without gradient.

    torch multiplies float32 matrices by MKL (or OpenBLAS), which on some processors runs at half
    the speed of oneDNN, torch's library for convolutions. oneDNN's product is available through an
    operation of torch's compiler; it is used if it exists and its result was checked.
    """
    fits = x.dtype == torch.float32 and x.dim() == 2 and x.device.type == "cpu"
    large = weight.numel() >= LARGE if large is None else large
    if fits and large and (onednn := _onednn()) is not None:
        return onednn(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


@cache
def _onednn() -> _Product | None:
    # Not on import: it takes 10 MB, and a server trains nothing.
    x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4).t()
    try:
        product = cast(_Product, cast(Any, torch.ops).mkldnn._linear_pointwise.default)
        good = torch.equal(product(x, weight, None, "none", [], ""), x @ weight.t())
    except (AttributeError, RuntimeError, TypeError):
        return None
    return product if good else None
