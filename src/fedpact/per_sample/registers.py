"""Whole registers, so that the same code computes every slot of a pass.

Numbers at the end of a tensor, or of a thread's share of it, that do not fill a processor's
registers are computed by other code, which may round otherwise. So where a result may depend on the
code, the numbers of all records are one row, and it is filled up; else P has to be a multiple that
leaves no rest. Under vmap the numbers of each record are such a row.
"""

import math
from collections.abc import Callable
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from fedpact.common.params import on_cpu
from fedpact.per_sample.tracing.batch_rules import Where, kind_of, shape_of
from fedpact.per_sample.tracing.batch_table import State
from fedpact.per_sample.tracing.program import draws
from fedpact.per_sample.tracing.record_safety import by_argument

LANES: Final = 64
"""A multiple of how many numbers are computed at a time: two registers of 512 bits, of 16 each."""

_SHARED, _SHARE = 2**14, 2**15
"""From so many numbers on torch's threads may share an operation, with about so many or more each.

Some operations are divided among all threads from 2^14 numbers on.
"""

_EXACT: Final = frozenset(
    {
        *("add", "sub", "mul", "div", "neg", "abs", "sqrt", "square", "reciprocal", "sign"),
        *("relu", "leaky_relu", "threshold", "hardtanh", "maximum", "minimum", "where", "clone"),
        *("clamp", "clamp_min", "clamp_max", "masked_fill", "floor", "ceil", "round", "trunc"),
        *("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "logical_and", "logical_or"),
        *("logical_not", "bitwise_and", "bitwise_or", "bitwise_not"),
    }
)
"""Elementwise operations with one right result, which any code gives."""

_UNTAGGED: Final = frozenset(
    {
        *("binary_cross_entropy_with_logits", "soft_margin_loss", "hardswish", "log_sigmoid"),
        *("log_sigmoid_forward", "kl_div", "glu", "rsub", "logcumsumexp", "hardsigmoid", "polar"),
    }
)
"""Elementwise operations that torch does not mark as such."""

_MOVES: Final = frozenset(
    {
        *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "t"),
        *("unsqueeze", "squeeze", "slice", "select", "split", "chunk", "unbind", "cat"),
        *("stack", "contiguous", "detach", "alias", "to", "index", "index_select"),
        *("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "embedding"),
    }
)
"""Operations that only move numbers, and products."""


def common_multiple(numbers: int) -> int:
    """Return a multiple of the numbers of threads among which such an operation may be divided."""
    threads = torch.get_num_threads()
    return 1 if numbers <= _SHARED else math.lcm(threads, min(threads, -(-numbers // _SHARE)))


def _whole_row(numbers: int, slots: int) -> int:
    """Return a multiple of which rows are whole registers in each thread's share of the numbers."""
    threads = common_multiple(numbers)
    return LANES * threads // math.gcd(threads, slots)


def fill_up(do: Callable[..., Tensor], start: int, slots: int, *args: Any, **kwargs: Any) -> Tensor:
    """Run an operation with its rows, the numbers from dimension `start` on, in whole registers.

    So they are in each thread's share. slots: how many such operations vmap runs at a time, or 1.
    """
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if not on_cpu(tensors[0]):
        return do(*args, **kwargs)
    shape: tuple[int, ...] = tensors[0].shape
    if len(tensors) > 1:
        shape = cast(Any, torch).broadcast_shapes(*(t.shape for t in tensors))
    own, count = shape[start:], len(shape)
    size = math.prod(own)
    row, others = size, slots * math.prod(shape[:start])
    while row % (whole := _whole_row(others * row, slots)):
        row += -row % whole
    # Numbers need not lie together: then a share has to end where a record does.
    if row == size and not slots * math.prod(own[:1]) % common_multiple(others * row):
        return do(*args, **kwargs)

    def filled(arg: Any) -> Any:
        if not isinstance(arg, Tensor) or (slots == 1 and not arg.dim()):
            return arg
        front = ((1,) * (count - arg.dim()) + arg.shape)[:start]
        rows = arg.expand((*front, *own)).reshape(*front, *[1] * (len(own) - 1), size)
        return F.pad(rows, (0, row - size))

    named = {name: filled(arg) for name, arg in kwargs.items()}
    found = do(*map(filled, args), **named)[..., :size]
    return found.reshape((*found.shape[: found.dim() - max(len(own), 1)], *own))


def row_of(node: Node, states: dict[Node, State]) -> int | None:
    """Return the dimension from which on an operation's numbers are those of one row, or None.

    It is the batch's, of elementwise operations and of those along dimensions in front of it.
    """
    own = states[node]
    moves = node.op != "call_function" or kind_of(node) in _MOVES
    if moves or draws(node) or not isinstance(own, Where):
        return None
    unsaid = -1 if kind_of(node) == "glu" else None
    dims = {argument.name: value for argument, value in by_argument(node)}.get("dim", unsaid)
    if dims is None:
        return own.dim if rounds(node) else None
    (x, *others), where = node.all_input_nodes, states[node.all_input_nodes[0]]
    if others or not isinstance(where, Where):
        return None
    several = cast(list[int], dims if isinstance(dims, list | tuple) else [dims])
    inside = [d for d in several if d % len(shape_of(x)) >= where.dim]
    return None if inside or not several else where.dim


def widths(node: Node, states: dict[Node, State]) -> list[int]:
    """Return how many numbers of a record lie together where slots may be computed by other code.

    In elementwise operations that round, and in all that goes along other dimensions than the
    batch, or whose gradients do, as those of what is repeated in front of the batch.
    """
    if node.op != "call_function" or kind_of(node) in _MOVES:
        return []
    # What does not depend on records is the same for all slots.
    near = [(n, s) for n in (node, *node.all_input_nodes) if isinstance(s := states.get(n), Where)]
    fronts = {math.prod(shape_of(n)[: s.dim]) for n, s in near}
    if kind_of(node) in _EXACT and len(fronts) == 1:
        return []
    found = [numbers_behind(n, s) for n, s in near if s.dim or s.outer > 1]
    own = states.get(node)
    return [*found, numbers_behind(node, own)] if own is not None and rounds(node) else found


def _is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _has_gradient(node: Node) -> bool:
    """Whether an operation's result is floating-point or complex."""
    found = node.meta.get("val")
    return not isinstance(found, Tensor) or found.is_floating_point() or found.is_complex()


def takes_rows(node: Node) -> bool:
    """Whether an operation on the numbers of a record may be computed on them as one row."""
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    tensors = [v for v in values if isinstance(v, Tensor)]
    alike = len(tensors) == len(values) and len({v.dtype for v in tensors[1:]}) == 1
    if not alike or not rounds(node) or not _is_pointwise(node):
        return False
    return not draws(node) and not cast(Any, node.target)._schema.is_mutable


def rounds(node: Node) -> bool:
    """Whether an elementwise operation's result may depend on the code that computes it."""
    if not _is_pointwise(node):
        return kind_of(node) in _UNTAGGED
    # With a factor, a sum may be rounded once or twice; the length of a complex number is none.
    if not _has_gradient(node):
        return False
    values = (n.meta.get("val") for n in (node, *node.all_input_nodes))
    if any(isinstance(v, Tensor) and v.is_complex() for v in values):
        return True
    return bool(node.kwargs.get("alpha", 1) != 1) or kind_of(node) not in _EXACT


def numbers_behind(node: Node, state: State) -> int:
    """Return how many numbers of a record lie behind the batch's dimension."""
    if not isinstance(state, Where) or not isinstance(node.meta["val"], Tensor):
        return 1  # of several results, the strictest
    behind = shape_of(node)[state.dim + 1 :]
    return state.inner * math.prod(size for size in behind if isinstance(size, int))
