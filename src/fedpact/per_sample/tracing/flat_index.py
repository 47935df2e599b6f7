"""One row of each record, picked out of all records' rows by the record's number, or by a mask.

Of rows x [B, T, ...] models take x.view(B T, ...)[arange(B) T + n]: for n in [0, T) it is
x[arange(B), n], where an n outside can name no row of another record. That is put in its place. So
it is of x[mask] for mask [B, T], where the trace says that it has as many rows as there are
records: of a record by itself that is one, so one that has another number of them is made NaN.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from fedpact.per_sample.tracing.batch_rules import Mixed, Size, kind_of, multiple, shape_of

_aten = cast(Any, torch.ops.aten)


def pick_within_records(graph: Graph) -> None:
    """Put an index of record and row in the place of each index of flat rows."""
    for node in list(graph.nodes):
        if _picks_one(node):
            with graph.inserting_before(node):
                node.replace_all_uses_with(_picked_one(graph, *node.args))
        if (found := _flat_index(node)) is None:
            continue
        rows, number, shape, own, steps = found
        with graph.inserting_before(node):
            apart = _call(graph, _aten.reshape.default, rows, [-1, steps, *shape_of(rows)[1:]])
            # The batch's size is no number: -1 stands for it.
            number = _call(graph, _aten.reshape.default, number, _sizes(shape))
            picked = _call(graph, _aten.index.Tensor, apart, [number, own])
            made = _call(graph, _aten.reshape.default, picked, _sizes(shape_of(node)))
        node.replace_all_uses_with(made)


def _picks_one(node: Node) -> bool:
    """Whether a node is x[mask] with as many rows as there are records."""
    if str(node.target) != "aten.index.Tensor":
        return False
    x, index = cast(tuple[Node, Sequence[Any]], node.args)
    mask = index[0].meta["val"] if len(index) == 1 else torch.zeros(())
    if mask.dtype != torch.bool or mask.dim() != 2 or not x.meta["val"].is_floating_point():
        return False
    # As one symbol they are one size, whatever a record says.
    return str(shape_of(node)[0]) == str(mask.shape[0]) and _size(node) == 1


def _picked_one(graph: Graph, x: Any, index: Any) -> Node:
    (mask,) = index
    count = _call(graph, _aten.sum.dim_IntList, mask, [1])
    place = _call(graph, _aten.argmax.default, _call(graph, _aten.to.dtype, mask, torch.int64), 1)
    size = graph.call_function(_aten.sym_size.int, (mask, 0))
    size.meta = {"val": mask.meta["val"].shape[0]}
    number = graph.call_function(_aten.arange.default, (size,))
    number.meta = dict(place.meta)
    picked = _call(graph, _aten.index.Tensor, x, [number, place])
    once = _call(graph, _aten.eq.Scalar, count, 1)
    once = _call(graph, _aten.reshape.default, once, [-1, *[1] * (len(shape_of(picked)) - 1)])
    return _call(graph, _aten.where.ScalarOther, once, picked, math.nan)


def _flat_index(node: Node) -> tuple[Node, Node, list[Size], Node, int] | None:
    """(rows [B T, ...], numbers, their shape, n, T) where a node is rows[numbers · T + n]."""
    if str(node.target) == "aten.index_select.default" and node.args[1] == 0:
        index = node.args[2]
    elif str(node.target) == "aten.index.Tensor" and len(cast(Sequence[Any], node.args[1])) == 1:
        (index,) = cast(Sequence[Any], node.args[1])
    else:
        return None
    rows, total = cast(Node, node.args[0]), _behind_views(index)
    if str(total.target) != "aten.add.Tensor" or total.kwargs:
        return None
    for shown, own in (total.args[:2], total.args[1::-1]):
        product = _behind_views(shown)
        if str(getattr(product, "target", "")) != "aten.mul.Tensor" or not isinstance(own, Node):
            continue
        number, steps = product.args
        fits = isinstance(steps, int) and _size(rows) == steps and _counts(number)
        shapes = [shape_of(rows), shape_of(node), shape_of(shown)]
        # A mask or another type would say something else by itself than in the sum.
        if fits and own.meta["val"].dtype == torch.int64 and all(map(_alone, shapes)):
            return rows, cast(Node, number), shapes[2], own, cast(int, steps)
    return None


def _alone(shape: list[Size]) -> bool:
    """Whether the batch is in one dimension."""
    return sum(not isinstance(size, int) for size in shape) == 1


def _sizes(shape: list[Size]) -> list[int]:
    return [size if isinstance(size, int) else -1 for size in shape]


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    made = graph.call_function(target, args)
    made.meta = {"val": target(*torch.fx.map_arg(args, lambda n: n.meta["val"]))}
    return made


def _behind_views(node: Any) -> Any:
    """What a node shows in another form."""
    # x[:, None] is traced with a slice of everything.
    while isinstance(node, Node) and (
        kind_of(node) in ("view", "reshape", "flatten", "unsqueeze")
        or (kind_of(node) == "slice" and node.args[2:] == (0, sys.maxsize))
    ):
        node = node.args[0]
    return node


def _size(node: Node) -> int | None:
    """How many times the batch a tensor's first dimension has; None where it is none of it."""
    try:
        return multiple(shape_of(node)[0])
    except (Mixed, IndexError):
        return None


def _counts(node: Any) -> bool:
    """Whether a tensor is arange(B)."""
    base = _behind_views(node)
    return isinstance(base, Node) and kind_of(base) == "arange" and _size(base) == 1
