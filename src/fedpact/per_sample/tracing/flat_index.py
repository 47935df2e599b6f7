"""Rows picked out of all records' rows, put one behind the other, by the record's number.

Of rows x [B, T, ...] models take x.view(B T, ...)[arange(B) T + n]: for n in [0, T) it is
x[arange(B), n], where an n outside can name no row of another record. That is put in its place.
"""

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
