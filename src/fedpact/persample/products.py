"""Products of matrices whose rows are records, each multiplied as if the others were not there.

Also what that takes: passes of a form that does not follow from the number of records (`padded`),
and rows that begin where all of them are multiplied by the same code (`aligned`).
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LARGE = 2**15
"""From so many weights on it pays to ask oneDNN."""

ALIKE = 32 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 16
"""Passes have a multiple of so many records, or more: see padded.

torch computes functions of as many numbers in one go, and of those left over by other code.
"""

_AT_ONCE = 64
"""So many numbers, or fewer, a processor makes a function of in one go."""

_Product = Callable[[Tensor, Tensor, Tensor | None, str, list[object], str], Tensor]


def padded(rows: Tensor, multiple: int = ALIKE) -> Tensor:
    """Rows [n, ...] with zeros behind, so that their number is a multiple, and at least two.

    A product gives a row other last bits where the number of rows is another, for its edges are
    multiplied by other code; at a kink of the model that may be another gradient. So that one
    record more changes no other's numbers, all rows are multiplied as those in the middle are.
    """
    count, all_rows = rows.shape[0], wanted(rows.shape[0], multiple)
    if all_rows == count:
        return lying(rows)
    more = rows.new_empty(all_rows, *rows.shape[1:])
    more[:count] = rows
    more[count:] = 0
    return more


def lying(rows: Tensor) -> Tensor:
    """The rows as a copy of them lies in memory, which a batch of another size may be."""
    if rows.is_contiguous() and rows.data_ptr() % 64 == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def stepped(x: Tensor) -> Tensor:
    """x [..., M, K], or a copy where its rows or columns do not follow each other by 16 bytes.

    As those of a part do not: x[:, :8] of ten columns has rows that begin at 0, 40, 80 bytes.
    """
    if x.dim() < 2:
        return x
    lies = [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1 and step != 1]
    even = 1 in x.stride()[-2:] and not any(step * x.element_size() % 16 for step in lies)
    return x if even else x.clone(memory_format=torch.contiguous_format)


def aligned(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] and weight [O, K] for x weightᵀ, with zeros so that rows begin at 16 bytes.

    Elsewhere a row is multiplied by other code, so its last bits would follow from its place.
    """
    more = -x.shape[-1] % 4
    return (F.pad(x, (0, more)), F.pad(weight, (0, more))) if more else (stepped(x), weight)


def each_begun(g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """g [B, T, O] and u [B, T, K], with zeros behind T so that each matrix begins at 16 bytes."""
    steps = g.shape[1]
    if any(steps * t.shape[2] % 4 for t in (g, u)):
        more = (0, 0, 0, -steps % 4)
        return F.pad(g, more), F.pad(u, more)
    return stepped(g), stepped(u)


def evenly(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    product: Callable[..., Tensor] = F.linear,
) -> Tensor:
    """x Wᵀ + b with rows that begin at 16 bytes, forward and back, those of the result, too.

    See aligned. product: what multiplies; `linear` is faster where there is no gradient.
    """
    out, more = weight.shape[0], -weight.shape[0] % 4
    if not more:
        return product(*aligned(x, weight), bias)
    x, weight = aligned(x, F.pad(weight, (0, 0, 0, more)))
    return product(x, weight, None if bias is None else F.pad(bias, (0, more)))[..., :out]


def evenly_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a b for a [..., M, K] and b [..., K, N] or [K], with matrices and rows alike."""
    if b.dim() < 2:
        return torch.matmul(*aligned(a, b)) if a.dim() > 1 else torch.matmul(a, b)
    width, out = b.shape[-2:]
    if width % 4 == 0 and out % 4 == 0:
        return torch.matmul(stepped(a), stepped(b))
    a, b = F.pad(a, (0, -width % 4)), F.pad(b, (0, -out % 4, 0, -width % 4))
    return torch.matmul(a, b)[..., :out]


def evenly_addmm(
    bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """beta bias + alpha a b; see evenly_matmul."""
    return torch.add(bias * beta, evenly_matmul(a, b), alpha=alpha)


class Evenly(TorchDispatchMode):
    """Within, all products that operations come down to are made by evenly_matmul."""

    @staticmethod
    def replaces(func: Any) -> bool:
        """Whether it makes this one otherwise."""
        return func in _EVENLY

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return (_EVENLY.get(func) or func)(*args, **(kwargs or {}))


_aten = cast(Any, torch.ops.aten)
_EVENLY: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default, _aten.mv.default), evenly_matmul),
    **dict.fromkeys(
        (_aten.addmm.default, _aten.baddbmm.default, _aten.addmv.default), evenly_addmm
    ),
}


def filled(tensor: Tensor, dim: int, parts: int = 1) -> Tensor:
    """The tensor with zeros behind each of so many equal parts of a dimension; see aligned."""
    before, size, after = tensor.shape[:dim], tensor.shape[dim] // parts, tensor.shape[dim + 1 :]
    if size % 4 == 0:
        return tensor
    each = tensor.reshape(*before, parts, size, *after)
    zeros = tensor.new_zeros(*before, parts, -size % 4, *after)
    return torch.cat([each, zeros], dim + 1).flatten(dim, dim + 1)


def convolved(
    convolution: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *settings: Any,
    transposed: bool = False,
) -> Tensor:
    """The convolution of x [n, C, ...], in float64 with images that begin at 16 bytes.

    There it is a product for each image, read and written where those begin; of float32 oneDNN
    makes it. settings: as torch's functions have them, plain or transposed; groups is the fourth.
    """
    if x.dtype != torch.float64:
        return convolution(x, weight, bias, *settings)
    groups = settings[3] if len(settings) > 3 else 1
    each = weight.shape[1] if transposed else weight.shape[0] // groups
    more = None if bias is None else filled(bias, 0, groups)
    weight = filled(filled(weight, 0, groups), 1)
    found = convolution(filled(x, 1, groups), weight, more, *settings)
    return first_of_groups(found, groups, each)


def first_of_groups(x: Tensor, groups: int, each: int) -> Tensor:
    """x [n, C, ...] without what stands behind so many channels of each group."""
    parts = x.view(len(x), groups, -1, *x.shape[2:])
    return parts[:, :, :each].flatten(1, 2).contiguous()


def cut(rows: Tensor, size: int, parts: int = 1) -> Tensor:
    """Rows without what `filled` puts behind their parts, each of so many numbers."""
    if rows.shape[-1] == parts * size:
        return rows
    return rows.reshape(*rows.shape[:-1], parts, -1)[..., :size].flatten(-2)


def of_each(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return a function of each number of x, the last few of which would be other code's."""
    more = -x.numel() % _AT_ONCE
    by_pixel = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    x = x if by_pixel else x.contiguous()
    if not more:
        return function(x)
    filled = x.new_zeros(x.numel() + more)
    # In the order that they have in memory, which is by pixel or by channel.
    filled[: x.numel()].as_strided(x.shape, x.stride()).copy_(x)
    return function(filled)[: x.numel()].as_strided(x.shape, x.stride())


def wanted(count: int, multiple: int) -> int:
    """How many rows `padded` makes of so many."""
    return max(2, -(-count // multiple) * multiple)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, large: bool | None = None
) -> Tensor:
    """x Wᵀ + b for x [..., K], W [O, K] in any layout, b [O]; without gradient.

    torch multiplies float32 matrices by MKL (or OpenBLAS), which on some processors runs at half
    the speed of oneDNN, torch's library for convolutions. oneDNN's product is reached by an
    operation that torch keeps for its own compiler; it is used where it is there and gives what it
    should.
    """
    fits = x.dtype == torch.float32 and x.dim() == 2 and x.device.type == "cpu"
    # Not by the number of records: one more must not change what the others are multiplied by.
    large = weight.numel() >= LARGE if large is None else large
    if _onednn is not None and fits and large:
        return _onednn(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def _probe() -> _Product | None:
    x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4).t()
    try:
        product = cast(_Product, cast(Any, torch.ops).mkldnn._linear_pointwise.default)
        good = torch.equal(product(x, weight, None, "none", [], ""), x @ weight.t())
    except (AttributeError, RuntimeError, TypeError):
        return None
    return product if good else None


_onednn = _probe()
