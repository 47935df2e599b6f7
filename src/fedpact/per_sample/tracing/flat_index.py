"""Rewrites the selection of one row per record, by the record's index or by a mask.

From rows x [B, T, ...] models take x.view(B T, ...)[arange(B) T + n]. For n in [0, T) this equals
x[arange(B), n], in which no other n reads a row of another record, so it is replaced by that. The
same is done for x[mask] with mask [B, T], if the trace says that it has as many rows as there are
records: a single record then selects one row, and a record that selects another number becomes NaN.
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
    """Replace each index of flat rows by indices of record and row."""
    for node in list(graph.nodes):
        if _picks_one(node):
            with graph.inserting_before(node):
                node.replace_all_uses_with(_pick_one(graph, *node.args))
        if (found := _flat_index(node)) is None:
            continue
        rows, number, shape, own, steps, more = found
        with graph.inserting_before(node):
            own = _call(graph, _aten.add.Tensor, own, more) if more else own
            apart = _call(graph, _aten.reshape.default, rows, [-1, steps, *shape_of(rows)[1:]])
            # The batch size is a symbol, so -1 is used for it.
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
    # With one symbol the sizes are equal for any records.
    return str(shape_of(node)[0]) == str(mask.shape[0]) and _size(node) == 1


def _pick_one(graph: Graph, x: Any, index: Any) -> Node:
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


def _flat_index(node: Node) -> tuple[Node, Node, list[Size], Node, int, int] | None:
    """(rows [B T, ...], numbers, their shape, n, T, k) if a node is rows[numbers · T + n + k]."""
    if str(node.target) == "aten.index_select.default" and node.args[1] == 0:
        index = node.args[2]
    elif str(node.target) == "aten.index.Tensor" and len(cast(Sequence[Any], node.args[1])) == 1:
        (index,) = cast(Sequence[Any], node.args[1])
    else:
        return None
    rows, total, more = cast(Node, node.args[0]), _behind_views(index), 0
    while kind_of(total) in ("add", "sub") and isinstance(total.args[1], int) and not total.kwargs:
        more += total.args[1] * (1 if kind_of(total) == "add" else -1)
        total = _behind_views(total.args[0])
    if str(total.target) != "aten.add.Tensor" or total.kwargs:
        return None
    for shown, own in (total.args[:2], total.args[1::-1]):
        product = _behind_views(shown)
        if str(getattr(product, "target", "")) != "aten.mul.Tensor" or not isinstance(own, Node):
            continue
        number, steps = product.args
        fits = isinstance(steps, int) and _size(rows) == steps and _counts(number)
        shapes = [shape_of(rows), shape_of(node), shape_of(shown)]
        # A mask or another type would have another meaning alone than in the sum.
        if fits and own.meta["val"].dtype == torch.int64 and all(map(_alone, shapes)):
            return rows, cast(Node, number), shapes[2], own, cast(int, steps), more
    return None


def _alone(shape: list[Size]) -> bool:
    """Whether exactly one dimension has the batch."""
    return sum(not isinstance(size, int) for size in shape) == 1


def _sizes(shape: list[Size]) -> list[int]:
    return [size if isinstance(size, int) else -1 for size in shape]


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    made = graph.call_function(target, args)
    made.meta = {"val": target(*torch.fx.map_arg(args, lambda n: n.meta["val"]))}
    return made


def _behind_views(node: Any) -> Any:
    """The node that a node is a view of."""
    # x[:, None] is traced with a slice of everything.
    while isinstance(node, Node) and (
        kind_of(node) in ("view", "reshape", "flatten", "unsqueeze")
        or (kind_of(node) == "slice" and node.args[2:] == (0, sys.maxsize))
    ):
        node = node.args[0]
    return node


def _size(node: Node) -> int | None:
    """The factor k of a first dimension k · B; None if it is not a multiple of the batch."""
    try:
        return multiple(shape_of(node)[0])
    except (Mixed, IndexError):
        return None


def _counts(node: Any) -> bool:
    """Whether a tensor is arange(B)."""
    base = _behind_views(node)
    return isinstance(base, Node) and kind_of(base) == "arange" and _size(base) == 1
