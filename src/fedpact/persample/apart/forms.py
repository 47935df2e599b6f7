"""Operations that move numbers about: the same numbers in another form, order or choice."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from fedpact.persample.apart.places import (
    At,
    Mixed,
    Rule,
    State,
    Where,
    before,
    dims_of,
    multiple,
    only,
    option,
    records_in,
    shape_of,
)


def regrouped(node: Node, at: At) -> State:
    """The same numbers in the same order: the batch keeps what is in front of it and behind."""
    where, _ = records_in(node, at)
    source, result = shape_of(node.args[0]), shape_of(node)
    front = where.outer
    for size in source[: where.dim]:
        front *= cast(int, size)
    before = 1
    for dim, size in enumerate(result):
        times = multiple(size)
        if times is None:
            before *= cast(int, size)
            continue
        outer, rest = divmod(front, before) if before else (0, 1)
        inner, left = divmod(times, max(outer, 1))
        if rest or left or not outer:
            break
        return Where(dim, outer, inner)
    raise Mixed(f"operation {node.target} cuts through the batch")


def permuted(node: Node, at: At) -> State:
    """Dimensions in another order."""
    where, count = records_in(node, at)
    order = dims_of(node.args[1], count)
    return where._replace(dim=order.index(where.dim))


def swapped(node: Node, at: At) -> State:
    """Two dimensions swapped; the last two without any named."""
    where, count = records_in(node, at)
    given = node.args[1:3] if len(node.args) > 2 else (count - 2, count - 1)
    a, b = dims_of(given, count)
    return where._replace(dim={a: b, b: a}.get(where.dim, where.dim))


def reordered(node: Node, at: At) -> State:
    """Dimensions moved to other places."""
    where, count = records_in(node, at)
    source, target = (dims_of(node.args[i], count) for i in (1, 2))
    order = [d for d in range(count) if d not in source]
    for to, one in sorted(zip(target, source, strict=True)):
        order.insert(to, one)
    return where._replace(dim=order.index(where.dim))


def expanded(node: Node, at: At) -> State:
    """Repeated along dimensions that had one entry, or that are new."""
    where, count = records_in(node, at)
    dim = where.dim + len(shape_of(node)) - count
    if multiple(shape_of(node)[dim]) != where.outer * where.inner:
        raise Mixed(f"operation {node.target} repeats the batch")
    return where._replace(dim=dim)


def unsqueezed(node: Node, at: At) -> State:
    """A new dimension of one entry."""
    where, count = records_in(node, at)
    return where._replace(dim=where.dim + (dims_of(node.args[1], count + 1)[0] <= where.dim))


def squeezed(node: Node, at: At) -> State:
    """Without dimensions of one entry; the batch is none, though it may have one."""
    where, count = records_in(node, at)
    shape, dims = shape_of(node.args[0]), dims_of(node.args[1], count)
    if where.dim in dims:
        raise Mixed(f"operation {node.target} depends on the batch's size")
    gone = {d for d in dims if shape[d] == 1}
    return where._replace(dim=where.dim - sum(d < where.dim for d in gone))


def selected(node: Node, at: At) -> State:
    """One entry along a dimension, which goes."""
    where, count = records_in(node, at)
    only(node, at, 0)
    (dim,) = dims_of(node.args[1], count)
    if dim == where.dim:
        raise Mixed(f"operation {node.target} picks one record")
    return where._replace(dim=where.dim - (dim < where.dim))


def sliced(node: Node, at: At) -> State:
    """Some entries along a dimension."""
    where, count = records_in(node, at)
    (dim,) = dims_of(option(node, 1, "dim", 0), count)
    start, end, step = (option(node, i, n) for i, n in ((2, "start"), (3, "end"), (4, "step")))
    everything = start in (None, 0) and (end is None or end == 2**63 - 1) and step in (None, 1)
    if dim == where.dim and not (is_plain(start, end) and everything):
        raise Mixed(f"operation {node.target} picks some of the records")
    only(node, at, 0)
    return where


def is_plain(*values: Any) -> bool:
    """Whether no value is a node."""
    return not any(isinstance(v, Node) for v in values)


def parts(node: Node, at: At) -> State:
    """Split along a dimension: as many tensors as there are."""
    where, count = records_in(node, at)
    only(node, at, 0)
    (dim,) = dims_of(option(node, 2, "dim", 0), count)
    if dim == where.dim:
        raise Mixed(f"operation {node.target} splits the batch")
    return (where,) * len(node.meta["val"])


def unbound(node: Node, at: At) -> State:
    """Every entry along a dimension, as a tensor of its own."""
    where, count = records_in(node, at)
    (dim,) = dims_of(option(node, 1, "dim", 0), count)
    if dim == where.dim:
        raise Mixed(f"operation {node.target} splits the batch")
    return (where._replace(dim=where.dim - (dim < where.dim)),) * len(node.meta["val"])


def joined(new: bool) -> Rule:
    """Concatenated along a dimension, or stacked along a new one."""

    def rule(node: Node, at: At) -> State:
        tensors = cast(Sequence[Node], node.args[0])
        found = {at(t) for t in tensors}
        if len(found) != 1 or None in found:
            raise Mixed(f"operation {node.target} joins records with others' places")
        where = cast(Where, found.pop())
        (dim,) = dims_of(option(node, 1, "dim", 0), len(shape_of(tensors[0])) + new)
        if dim == where.dim and not new:
            raise Mixed(f"operation {node.target} joins batches")
        return where._replace(dim=where.dim + (new and dim <= where.dim))

    return rule


def repeated(node: Node, at: At) -> State:
    """Repeated along dimensions other than the batch."""
    where, count = records_in(node, at)
    times = list(cast(Sequence[Any], node.args[1]))
    dim = where.dim + max(0, len(times) - count)
    place = dim - (len(shape_of(node)) - len(times))
    if not is_plain(*times) or (place >= 0 and times[place] != 1):
        raise Mixed(f"operation {node.target} repeats the batch")
    return where._replace(dim=dim)


def gathered(node: Node, at: At) -> State:
    """Entries picked within each record by indices of its own."""
    where, count = records_in(node, at)
    if at(node.args[2]) != where or dims_of(node.args[1], count) == [where.dim]:
        raise Mixed(f"operation {node.target} reads along the batch")
    return where


def copied(node: Node, at: At) -> State:
    """The second's numbers in the first's form."""
    of_target, of_source = at(node.args[0]), at(node.args[1])
    if of_source is None:
        return of_target
    shape = shape_of(node)
    return of_source._replace(dim=of_source.dim + len(shape) - len(shape_of(node.args[1])))


def indexed(node: Node, at: At) -> State:
    """x[:, index], or table[x]: one index, along a dimension that is not the batch."""
    indices = list(cast(Sequence[Any], node.args[1]))
    places = [i for i, index in enumerate(indices) if index is not None]
    if len(places) == 1:
        (place,), where, of_index = places, at(node.args[0]), at(indices[places[0]])
        value = indices[place].meta["val"]
        if where is None and of_index is not None and value.dtype == torch.int64:
            return of_index._replace(dim=of_index.dim + place)
        if where is not None and of_index is None and where.dim != place:
            if value.dtype == torch.bool:
                raise Mixed(f"operation {node.target} picks by values")
            return where._replace(dim=where.dim + (value.dim() - 1) * (place < where.dim))
    raise Mixed(f"operation {node.target} reads along the batch")


def with_padding(node: Node, at: At) -> State:
    """Padded along the last dimensions."""
    return before(len(cast(Sequence[int], node.args[1])) // 2)(node, at)


def overwritten(node: Node, at: At) -> State:
    """x with other numbers along a dimension, at places that are the same for each record."""
    where, count = records_in(node, at)
    (dim,) = dims_of(option(node, 2, "dim", 0), count)
    everything = str(node.target) == "aten.slice_scatter.default" and len(node.args) < 3
    of_source = at(option(node, 1, "src"))
    gone = dim < where.dim and "select" in str(node.target)
    same = of_source is None or of_source == where._replace(dim=where.dim - gone)
    only(node, at, 0, 1)
    if (dim == where.dim and not everything) or not same:
        raise Mixed(f"operation {node.target} writes along the batch")
    return where


def contracted(node: Node, at: At) -> State:
    """einsum whose operands have the batch under one letter, which the result keeps."""
    equation = cast(str, node.args[0]).replace(" ", "")
    operands, arrow, result = equation.partition("->")
    tensors = cast(Sequence[Node], node.args[1])
    letters = operands.split(",")
    found = [(names, where) for names, t in zip(letters, tensors, strict=True) if (where := at(t))]
    batch = {(names[w.dim], w.outer, w.inner) for names, w in found if "." not in names}
    if not arrow or "." in equation or len(batch) != 1:
        raise Mixed(f"einsum {equation} is not known to keep records apart")
    letter, outer, inner = batch.pop()
    others = [names for names, t in zip(letters, tensors, strict=True) if at(t) is None]
    if letter not in result or any(letter in names for names in others):
        raise Mixed(f"einsum {equation} sums over the batch")
    return Where(result.index(letter), outer, inner)
