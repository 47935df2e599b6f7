"""Where a tensor of a traced model has the batch, and what rules about that are made of.

A batch may share its dimension with others, as in [B·heads, T, E] or [T·B, E]: see Where.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Node

Size = int | torch.SymInt


class Mixed(Exception):
    """An operation is not known to keep records apart."""


class Where(NamedTuple):
    """Where a tensor has the batch: its dimension `dim` has outer · B · inner entries."""

    dim: int
    outer: int = 1
    inner: int = 1


State = Where | None | tuple["State", ...]
"""Where a node's tensor has the batch; None where it does not depend on records; or several."""

At = Callable[[Any], Where | None]
Rule = Callable[[Node, At], State]


def is_size(node: Node) -> bool:
    """Whether a node is a number that follows from the batch's size."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def shape_of(node: Any) -> list[Size]:
    """The shape of a node's tensor, with symbols where the batch is."""
    return list(node.meta["val"].shape)


def multiple(size: Size) -> int | None:
    """How many times the batch a size is; None for a number. Raises Mixed for anything else."""
    if isinstance(size, int):
        return None
    expression: Any = cast(Any, size).node.expr
    if expression.is_number:
        return None
    symbols: list[Any] = list(expression.free_symbols)
    factor: Any = expression / symbols[0]
    if len(symbols) > 1 or not factor.is_Integer:
        raise Mixed(f"a dimension of {expression} entries is no multiple of the batch")
    return int(factor)


def option(node: Node, place: int, name: str, default: Any = None) -> Any:
    """An argument, given by its place or by its name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def records_in(node: Node, at: At, place: int = 0) -> tuple[Where, int]:
    """The input's place and number of dimensions. Raises Mixed where it has no records."""
    where = at(node.args[place])
    if where is None:
        raise Mixed(f"operation {node.target} has records elsewhere than in its input")
    return where, len(shape_of(node.args[place]))


def dims_of(dims: Any, count: int) -> list[int]:
    """Dimensions of a tensor of so many as 0, 1, ...; all of them where none is named."""
    given: list[Any] = [dims] if isinstance(dims, int) else list(dims or range(count))
    if not all(isinstance(d, int) for d in given):
        raise Mixed("a dimension is not a number")
    return [d % max(count, 1) for d in given]


def only(node: Node, at: At, *places: int) -> None:
    """Raise Mixed where records are in other arguments than those at the places."""
    given = {id(node.args[i]) for i in places if i < len(node.args)}
    for other in node.all_input_nodes:
        if id(other) not in given and (at(other) is not None or is_size(other)):
            raise Mixed(f"operation {node.target} has records in other arguments than its input")


def pointwise(node: Node, at: At) -> State:
    """Each number from those at the same place, with broadcasting."""
    found: set[Where] = set()
    for arg in node.all_input_nodes:
        if is_size(arg):
            raise Mixed(f"operation {node.target} depends on the batch's size")
        where = at(arg)
        if where is not None:
            found.add(where._replace(dim=where.dim - len(shape_of(arg))))
    return from_the_end(node, found)


def from_the_end(node: Node, found: set[Where], value: Any = None) -> Where:
    """The place that all operands agree on, counted from the last dimension."""
    if len(found) != 1:
        raise Mixed(f"operation {node.target} pairs records with others' places")
    where = found.pop()
    shape = (node.meta["val"] if value is None else value).shape
    return where._replace(dim=len(shape) + where.dim)


def unreduced(place: int) -> Rule:
    """A loss of each pair of numbers, where the argument at the place says: no reduction."""

    def rule(node: Node, at: At) -> State:
        if option(node, place, "reduction", 1) != 0:
            raise Mixed(f"operation {node.target} reduces over the batch")
        return pointwise(node, at)

    return rule


def along(place: int, name: str = "dim", default: Any = -1, several: int = 0) -> Rule:
    """Something along one dimension, or more, that stay where they are; `several` results."""

    def rule(node: Node, at: At) -> State:
        where, count = records_in(node, at)
        only(node, at, 0)
        if where.dim in dims_of(option(node, place, name, default), count):
            raise Mixed(f"operation {node.target} runs along the batch")
        return (where,) * several if several else where

    return rule


def reduced(place: int, keep: int, name: str = "dim", several: int = 0) -> Rule:
    """A reduction over dimensions, which go unless they are kept; `several` results."""

    def rule(node: Node, at: At) -> State:
        where, count = records_in(node, at)
        only(node, at, 0)
        dims = dims_of(option(node, place, name), count)
        if where.dim in dims:
            raise Mixed(f"operation {node.target} reduces over the batch")
        if not option(node, keep, "keepdim", False):
            where = where._replace(dim=where.dim - sum(d < where.dim for d in set(dims)))
        return (where,) * several if several else where

    return rule


def before(last: int, several: int = 0) -> Rule:
    """Something within the last dimensions: `last` of them, which the batch must not be among."""

    def rule(node: Node, at: At) -> State:
        where, count = records_in(node, at)
        only(node, at, 0)
        if where.dim >= count - last:
            raise Mixed(f"operation {node.target} runs along the batch")
        return (where,) * several if several else where

    return rule


def batched(dimensions: int) -> Rule:
    """[B, C, ...] of so many dimensions: a convolution, or statistics of each record."""

    def rule(node: Node, at: At) -> State:
        where, count = records_in(node, at)
        only(node, at, 0)
        if where != Where(0) or (count != dimensions if dimensions > 0 else count < -dimensions):
            raise Mixed(f"operation {node.target} has no batch in front of its channels")
        return where

    return rule


def is_size_arg(arg: Any) -> bool:
    """Whether an argument is a number that follows from the batch's size."""
    return isinstance(arg, Node) and is_size(arg)


def kind_of(node: Node) -> str:
    """An operation's name without its library and overload, as "linear"."""
    parts = str(node.target).split(".")
    return parts[1] if len(parts) == 3 and parts[0] == "aten" else ""


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())
