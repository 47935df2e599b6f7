"""Replacements of some of torch's operations, with torch's arguments and results."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from string import ascii_letters
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpact.common.errors import ModelError
from fedpact.per_sample.convolution import Geometry
from fedpact.per_sample.recurrent import RECURRENT, gru_step
from fedpact.per_sample.tracing.batch_rules import names

_aten = cast(Any, torch.ops.aten)

# What a step makes of the linear layers of x and of h, and of the state that h is from.
_Step = Callable[[Tensor, Tensor, Any], Any]


def _cell(step: _Step, hidden: Callable[[Any], Tensor] = lambda state: state) -> Callable[..., Any]:
    """A recurrent cell as linear layers, whose gradients are summed over all steps at once."""

    def cell(
        x: Tensor,
        state: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        return step(F.linear(x, w_ih, b_ih), F.linear(hidden(state), w_hh, b_hh), state)

    return cell


def _lstm(of_x: Tensor, of_h: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    i, f, g, o = (of_x + of_h).chunk(4, 1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _take_along(x: Tensor, index: Tensor, dim: int | None = None) -> Tensor:
    """take_along_dim; torch's can be traced only for one batch size."""
    if dim is None:
        return x.flatten().gather(0, index.flatten())
    sizes = [
        i if d == dim % x.dim() else s
        for d, (s, i) in enumerate(zip(x.shape, index.shape, strict=True))
    ]
    return x.gather(dim, index.expand(sizes))


def _copy(into: Tensor, source: Tensor, *_: Any) -> Tensor:
    """torch's copy has no derivative."""
    return source.expand(into.shape).to(into.dtype)


def _to_type_of(x: Tensor, like: Tensor, *_: Any) -> Tensor:
    return x.to(like.device, like.dtype)


def _to_shape_of(x: Tensor, like: Tensor) -> Tensor:
    return x.reshape(like.shape)


def _expand_to(x: Tensor, like: Tensor, **_: Any) -> Tensor:
    return x.expand(like.shape)


def _spell_out(equation: str, tensors: Sequence[Tensor], **_: Any) -> Any:
    """An einsum with a letter for each dimension in the place of dots, and with its result."""
    terms, arrow, out = equation.replace(" ", "").partition("->")
    if arrow and "." not in equation:
        return NotImplemented
    if not arrow:
        once = sorted(c for c in {*terms} - {*".,"} if terms.count(c) == 1)
        out = "".join(["..." * ("." in terms), *once])
    each = terms.split(",")
    more = [t.dim() - len(e) + 3 if "." in e else 0 for e, t in zip(each, tensors, strict=True)]
    free = "".join(c for c in ascii_letters if c not in equation)[: max(more)]
    # Dimensions in the place of dots are broadcast, the last ones together.
    spelt = [e.replace("...", free[len(free) - n :]) for e, n in zip(each, more, strict=True)]
    return torch.einsum(f"{','.join(spelt)}->{out.replace('...', free)}", list(tensors))


def _add(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta c + alpha a b; c is not looked at where beta is 0."""
    c = c if beta == 1 else c * beta if beta else torch.zeros_like(c)
    return torch.add(c, a @ b, alpha=alpha)


def _bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Σ_kl x_k W_nkl y_l + b, as two products."""
    matrices = (x @ weight.transpose(0, 1).flatten(1)).reshape(*x.shape[:-1], len(weight), -1)
    out = (matrices @ y.unsqueeze(-1)).sum(-1)
    return out if bias is None else out + bias


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention with a learnt mask, as products whose rules are known."""
    if mask is None or not mask.requires_grad or causal or enable_gqa:
        return NotImplemented
    scores = q * (q.shape[-1] ** -0.5 if scale is None else scale) @ k.transpose(-2, -1) + mask
    return torch.dropout(scores.softmax(-1), dropout, dropout > 0) @ v


def _sort(x: Tensor, *args: Any, stable: bool | None = None, **named: Any) -> Any:  # noqa: ARG001
    """Sorting along the batch: unchanged, as for a single record, with the records' own indices.

    So rows that a model sorts by length, and restores afterwards, stay in place.
    """
    dim = next((a for a in args if type(a) is int), named.get("dim", -1))
    if x.dim() != 1 or dim not in (0, -1) or not isinstance(x.shape[0], torch.SymInt):
        return NotImplemented
    return x, torch.arange(x.shape[0], device=x.device)


_EMBEDDING_BAG: Final = inspect.signature(F.embedding_bag)


def embedding_bag(*args: Any, **named: Any) -> Any:
    """Bags of as many indices each, [B, T], as rows that are looked up and then combined."""
    given = _EMBEDDING_BAG.bind(*args, **named)
    given.apply_defaults()
    index, weight, _, longest, _, by_frequency, mode, _, factors, _, padding = given.args
    if index.dim() != 2 or longest is not None or by_frequency:
        return NotImplemented
    rows = F.embedding(index, weight)
    rows = rows if factors is None else rows * factors.unsqueeze(2)
    gone = torch.zeros_like(index, dtype=torch.bool).unsqueeze(2)
    if padding is not None:
        gone = (index == padding % len(weight)).unsqueeze(2)
    count = (~gone).sum(1)
    if mode == "max":
        return torch.where(count > 0, rows.masked_fill(gone, -torch.inf).max(1).values, 0)
    total = rows.masked_fill(gone, 0).sum(1)
    return total / count.clamp_min(1) if mode == "mean" else total


def _order(*args: Any, **named: Any) -> Any:
    """The same for argsort."""
    found = _sort(*args, **named)
    return found if found is NotImplemented else found[1]


def _put(x: Tensor, indices: Sequence[Any], value: Tensor, accumulate: bool = False) -> Any:
    """x[mask] = number, as a choice for each entry."""
    (mask, *more) = indices
    if more or mask is None or mask.dtype != torch.bool or value.dim() or accumulate:
        return NotImplemented
    return torch.where(mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim())), value, x)


def _write_pairs(op: Any, x: Tensor, part: Tensor, dim: int = 0, *place: Any, **named: Any) -> Any:
    """A write into complex numbers, as pairs of real ones: torch's has no derivative there."""
    if not x.is_complex():
        return NotImplemented
    pairs = op(torch.view_as_real(x), torch.view_as_real(part), dim % x.dim(), *place, **named)
    return torch.view_as_complex(pairs)


def _frozen_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    _: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """BatchNorm by its running statistics, in which torch's tracer has taken it apart."""
    sizes = 1, -1, *[1] * (x.dim() - 2)
    out = (x - mean.view(sizes)) * (variance + eps).rsqrt().view(sizes)
    out = out if weight is None else out * weight.view(sizes)
    return out if bias is None else out + bias.view(sizes), x.new_zeros(0), x.new_zeros(0)


# These are traced as custom operators that know the shape of the result: torch would find it by
# computing, possibly in a loop over all positions.
_library: Any = torch.library.Library("fedpact", "FRAGMENT")


def _recurrent(x: Tensor, hx: Any, *settings: Any, **_: Any) -> tuple[Tensor, ...]:
    """Results for input x [B, T, K] or [T, B, K] and first states hx [layers, B, H]."""
    states: list[Tensor] = [*hx] if isinstance(hx, (list, tuple)) else [hx]
    directions = 2 if settings[-2] else 1
    out = x.new_empty((*x.shape[:-1], directions * states[0].shape[-1]))
    return out, *(torch.empty_like(state) for state in states)


def _normalise(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _pad_by_name(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: str = "valid",
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Any:
    """A convolution that is padded as "same" or "valid" says, by numbers."""
    dims = x.dim() - 2
    spans = [dilation[d % len(dilation)] * (k - 1) for d, k in enumerate(weight.shape[2:])]
    more = [span % 2 for span in spans] if padding == "same" else [0] * dims
    sides = [span // 2 for span in spans] if padding == "same" else [0] * dims
    if any(more):
        x = F.pad(x, [side for one in reversed(more) for side in (0, one)])
    run: Any = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    return run(x, weight, bias, stride, sides, dilation, groups)


def _convolve(x: Tensor, weight: Tensor, _: Any = None, *settings: Any) -> Tensor:
    """A convolution: on one thread torch chooses an algorithm by whether a batch has 16 records."""
    if x.dim() != weight.dim():
        raise ValueError("a convolution of one record, without a batch")
    geometry = Geometry.by(weight.shape[2:], [*settings, *[1, 0, 1, 1][len(settings) :]])
    return x.new_empty((x.shape[0], weight.shape[0], *geometry.positions(x.shape[2:])))


_COMPOSED: Final = names(
    "absolute arccos arcsin arcsinh arctan arctan2 arctanh clip diff divide fft_fftshift "
    "fft_ifftshift fix greater greater_equal hsplit less less_equal linalg_matrix_norm "
    "linalg_vecdot multiply negative not_equal pairwise_distance subtract tensordot trapezoid "
    "trapz true_divide vsplit"
)
"""Operations that torch makes of others, which the table knows."""

_SHAPES: Final[dict[Any, Callable[..., Any]]] = {
    **dict.fromkeys((_aten.conv1d.default, _aten.conv2d.default), _convolve),
    **dict.fromkeys(RECURRENT, _recurrent),
    **dict.fromkeys((_aten.group_norm.default, _aten.layer_norm.default), _normalise),
}


def _stand_in(op: Any, suffix: str = "", more: str = "") -> Any:
    name, _, arguments = str(op._schema).removeprefix("aten::").partition("(")
    name = name.partition(".")[0] + suffix
    _library.define(f"{name}({arguments.replace(') ->', f'{more}) ->', 1)}")
    cast(Any, torch.library).register_fake(f"fedpact::{name}", _SHAPES[op], lib=_library)
    return getattr(cast(Any, torch.ops).fedpact, name).default


TRACED_AS: Final[dict[Any, Callable[..., Any]]] = {
    _aten.lstm_cell.default: _cell(_lstm, lambda state: state[0]),
    _aten.gru_cell.default: _cell(gru_step),
    _aten.rnn_tanh_cell.default: _cell(lambda of_x, of_h, _: torch.tanh(of_x + of_h)),
    _aten.rnn_relu_cell.default: _cell(lambda of_x, of_h, _: torch.relu(of_x + of_h)),
    _aten.take_along_dim.default: _take_along,
    _aten.copy.default: _copy,
    _aten.einsum.default: _spell_out,
    _aten.bilinear.default: _bilinear,
    **dict.fromkeys((_aten.addmm.default, _aten.baddbmm.default), _add),
    # Of the second tensor they read the form alone, not the records.
    _aten.type_as.default: _to_type_of,
    _aten.to.other: _to_type_of,
    _aten.view_as.default: _to_shape_of,
    _aten.reshape_as.default: _to_shape_of,
    _aten.expand_as.default: _expand_to,
    _aten.scaled_dot_product_attention.default: _attention,
    _aten.index_put.default: _put,
    **{
        op: partial(_write_pairs, op)
        for op in (_aten.slice_scatter.default, _aten.select_scatter.default)
    },
    _aten._native_batch_norm_legit_no_training.default: _frozen_batch_norm,
    **dict.fromkeys(
        (_aten.conv1d.padding, _aten.conv2d.padding, _aten.conv3d.padding), _pad_by_name
    ),
    _aten.max.other: torch.maximum,
    _aten.min.other: torch.minimum,
    **{
        op: op.decompose
        for several in (getattr(_aten, name) for name in _COMPOSED)
        for op in (getattr(several, name) for name in several.overloads())
        if not op._schema.is_mutable
    },
    **dict.fromkeys((_aten.sort.default, _aten.sort.stable), _sort),
    **dict.fromkeys((_aten.argsort.default, _aten.argsort.stable), _order),
    **{op: _stand_in(op) for op in _SHAPES},
}
"""By torch's operation: what is called in its place while a model is traced."""

_with_lengths = {op: _stand_in(op, "_with_lengths", ", *, Tensor lengths") for op in RECURRENT}

WITH_LENGTHS: Final = {str(op).split(".")[1]: ours for op, ours in _with_lengths.items()}
"""By torch's name for a recurrence: the same over records [B, T, K] with `lengths` [B] of steps."""

STANDS_FOR: Final = {
    ours: op for op, ours in (*TRACED_AS.items(), *_with_lengths.items()) if op in _SHAPES
}
"""Operators of our own in a trace: the operations of torch's that they stand for."""


def _quotient(a: Tensor, b: Any, *, rounding_mode: str | None) -> Tensor:
    """Division; torch's truncated division of the smallest integer by -1 ends the process."""
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


def _sample(x: Tensor, grid: Tensor, *settings: Any) -> Tensor:
    """x [B, C, ...] at the points of grid [B, ..., D], NaN where a point is NaN or far too large.

    torch's may read out of bounds there.
    """
    most = torch.finfo(grid.dtype).max / (4 * max(x.shape[2:]))
    good = (grid.abs() <= most).all(-1)
    found = torch.grid_sampler(x, torch.where(good.unsqueeze(-1), grid, 0), *settings)
    return torch.where(good.unsqueeze(1), found, torch.nan)


def _fill_with(make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """An uninitialised tensor, filled so that it contains no earlier data."""
    made = make(*args, **kwargs)
    return made.fill_(torch.nan if made.is_floating_point() or made.is_complex() else 0)


def _by_lengths(op: Any, *args: Any, lengths: Tensor | None = None) -> Any:
    """A recurrence of torch; with lengths (of one record) only over that many steps."""
    if lengths is None:
        return op(*args)
    if lengths.numel() != 1:
        raise ModelError(
            f"{lengths.numel()} packed sequences a record, with records as the inner dimension: "
            "fold them with the records first, as x.reshape(-1, T, K) does of x [records, "
            "sequences, T, K]"
        )
    x, steps = args[0], int(lengths)
    out, *last = op(x[:, :steps], *args[1:])
    return F.pad(out, (0, 0, 0, x.shape[1] - steps)), *last


DONE_AS: Final[dict[Any, Callable[..., Any]]] = {
    # A traced view may be impossible for the same numbers in another memory layout.
    _aten.view.default: _aten.reshape.default,
    **{op: partial(_by_lengths, op) for op in RECURRENT},
    **dict.fromkeys((_aten.div.Tensor_mode, _aten.div.Scalar_mode), _quotient),
    **dict.fromkeys(
        (
            _aten.grid_sampler.default,
            _aten.grid_sampler_2d.default,
            _aten.grid_sampler_3d.default,
        ),
        _sample,
    ),
    **{
        make: partial(_fill_with, make)
        for make in (
            _aten.empty.memory_format,
            _aten.empty_like.default,
            _aten.empty_permuted.default,
            _aten.empty_strided.default,
            _aten.new_empty.default,
            _aten.new_empty_strided.default,
        )
    },
}
"""By torch's operation in a trace: what is done in its place when the trace runs."""
