"""Matrix products by the faster of torch's libraries, and by the same code in every slot."""

from collections.abc import Callable
from functools import cache
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpact.common.params import on_cpu

LARGE = 2**15
"""From so many weights on it pays to ask oneDNN."""

_REGISTER = 16
"""How many numbers of a product are computed at a time, at most."""

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


def filled_linear(
    do: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Run a product of input [..., K], weight [O, K], if narrow with K filled up."""
    if on_cpu(input) and weight.dim() == 2 and _is_narrow(_together(weight.t()), *weight.shape):
        rest = (0, -weight.shape[1] % _REGISTER)
        input, weight = F.pad(input, rest), F.pad(weight, rest).contiguous()
    return do(input, weight, bias)


def filled_matrices(do: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Run a product of a [..., M, K] and b [..., K, N] with M, K and N filled up, if it is narrow.

    So rows and matrices begin alike, also in the products of the backward pass.
    """
    if min(a.dim(), b.dim()) < 2 or not on_cpu(a):
        return do(a, b)
    rows, columns = a.shape[-2], b.shape[-1]
    if not _is_narrow(_together(b), rows, *b.shape[-2:]):
        return do(a, b)
    a, b = (F.pad(v, (0, -v.shape[-1] % 4, 0, -v.shape[-2] % 4)) for v in (a, b))
    return do(a, b)[..., :rows, :columns]


def filled_attention(
    do: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> Tensor:
    """Run attention of heads [..., T, E] with E filled up, which it multiplies as `products`."""
    width, columns = q.shape[-1], v.shape[-1]
    if width % 4 == columns % 4 == 0 or not on_cpu(q):
        return do(q, k, v, *others)
    q, k, v = (F.pad(h, (0, -h.shape[-1] % 4)) for h in (q, k, v))
    return do(q, k, v, *others, scale=width**-0.5)[..., :columns]


FILLED: Final = {
    "linear": filled_linear,
    "scaled_dot_product_attention": filled_attention,
    **dict.fromkeys(["mm", "bmm", "matmul"], filled_matrices),
}
"""How to run products whose code may follow from where in memory a row or a matrix begins.

MKL without AVX-512 has such code for up to 11 rows or columns, unless 4 divides how many numbers
lie together in the second matrix, or how many rows each of several first ones has.
"""


def products(a: Tensor, b: Tensor) -> Tensor:
    """a b [n, M, N] of matrices a [n, M, K] and b [n, K, N], all by the same code."""
    rows = a.shape[1]
    return torch.bmm(F.pad(a, (0, 0, 0, -rows % 4)), b)[:, :rows] if differ(a, b) else a @ b


def differ(a: Tensor, b: Tensor) -> bool:
    """Whether the code of such a product may follow from where its matrices begin; see FILLED."""
    rows = a.shape[1]
    return rows % 4 > 0 and on_cpu(a) and _is_narrow(_together(b), rows, b.shape[2])


def _together(b: Tensor) -> int:
    """How many numbers of a matrix lie together: those of a row or, turned, of a column."""
    return b.shape[-1 if b.stride(-1) == 1 else -2]


def _is_narrow(together: int, *sizes: int) -> bool:
    return together % 4 > 0 and min(sizes) <= _REGISTER


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
