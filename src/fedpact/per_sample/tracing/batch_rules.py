"""Rules that show that an operation treats records independently, and follow the batch dimension.

A rule receives an operation of a trace. It raises Mixed unless each record's part of the result
depends only on the same record's part of the arguments, and returns how records are arranged in the
batch dimension of the result. Which dimension that is follows from the result's shape, in which the
batch size is a symbol. batch_table lists the operations' names.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Node

Size = int | torch.SymInt


class Mixed(Exception):
    """An operation is not known to treat records independently."""


class Where(NamedTuple):
    """A tensor's batch dimension: dimension `dim` has outer · B · inner entries."""

    dim: int
    outer: int = 1
    inner: int = 1


class RecordNumber(Where):
    """The same for a tensor that contains only the record's index in the batch."""


At = Callable[[Any], Where | None]
Rule = Callable[[Node, At], Where]


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def kind_of(node: Node) -> str:
    """An operation's name without library and overload, such as "linear"."""
    parts = str(node.target).split(".")
    return parts[1] if len(parts) == 3 and parts[0] == "aten" else ""


def is_size(arg: Any) -> bool:
    """Whether an argument is a number that depends on the batch size."""
    kinds = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(arg, Node) and isinstance(arg.meta.get("val"), kinds)


def shape_of(node: Any) -> list[Size]:
    """The shape of a node's tensor, with a symbol for the batch size."""
    return list(node.meta["val"].shape)


def multiple(size: Size) -> int | None:
    """The factor k of a size k · B; None for a plain number. Raises Mixed for anything else."""
    if isinstance(size, int):
        return None
    expression: Any = cast(Any, size).node.expr
    if expression.is_number:
        return None
    # The batch size is the only symbol of a trace, except for values that depend on a record.
    symbols: list[Any] = list(expression.free_symbols)
    factor: Any = expression / symbols[0]
    if len(symbols) > 1 or not factor.is_Integer:
        raise Mixed(f"a dimension of {expression} entries is no multiple of the batch")
    return int(factor)


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """An argument by position or name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _dims(dims: Any, count: int) -> list[int]:
    """Dimensions as numbers from 0, for a tensor with `count` of them; all if none is given."""
    several: list[Any] = [dims] if isinstance(dims, int) else list(dims or range(count))
    if not all(isinstance(d, int) for d in several):
        raise Mixed("a dimension is not a number")
    return [d % max(count, 1) for d in several]


def _records_in(node: Node, at: At, place: int = 0) -> tuple[Where, int]:
    """The input's batch dimension and number of dimensions. Raises Mixed if it has no records."""
    where = at(node.args[place])
    if where is None:
        raise Mixed(f"operation {node.target} has records elsewhere than in its input")
    return where, len(shape_of(node.args[place]))


def _only(node: Node, at: At, *places: int) -> None:
    """Raise Mixed if arguments at other positions have records or depend on their number."""
    known = {id(node.args[i]) for i in places if i < len(node.args)}
    for other in node.all_input_nodes:
        if id(other) not in known and (at(other) is not None or is_size(other)):
            raise Mixed(f"operation {node.target} has records in other arguments than its input")


def _align(node: Node, at: At, args: Iterable[Any]) -> Where:
    """The common batch dimension of arguments, counted from the last one, -1."""
    found: set[Where] = set()
    for arg in args:
        if is_size(arg):
            raise Mixed(f"operation {node.target} depends on the batch's size")
        if isinstance(arg, Node) and (where := at(arg)) is not None:
            # Counted from the last, as broadcasting puts dimensions in front.
            found.add(where._replace(dim=where.dim - len(shape_of(arg))))
    if len(found) != 1:
        raise Mixed(f"operation {node.target} pairs records with others' places")
    return found.pop()


def pointwise(node: Node, at: At) -> Where:
    """Elementwise, with broadcasting."""
    return _align(node, at, node.all_input_nodes)


def unreduced(place: int) -> Rule:
    """An elementwise loss, if the argument at `place` says that it is not reduced."""

    def rule(node: Node, at: At) -> Where:
        if argument(node, place, "reduction", 1) != 0:
            raise Mixed(f"operation {node.target} reduces over the batch")
        return pointwise(node, at)

    return rule


def move(node: Node, at: At) -> Where:
    """The same numbers, some of them, or repeated: the shape shows the effect on the batch."""
    where, count = _records_in(node, at)
    if kind_of(node) == "squeeze" and where.dim in _dims(node.args[1], count):
        raise Mixed(f"operation {node.target} depends on the batch's size")
    return where


def choose(node: Node, at: At) -> Where:
    """The same, at positions that do not depend on the batch size."""
    _only(node, at, 0)
    return move(node, at)


def _outside(dims: Callable[[Node, int], Iterable[int]]) -> Rule:
    """An operation along dims(node, n) of n dimensions, none of which has the batch."""

    def rule(node: Node, at: At) -> Where:
        where, count = _records_in(node, at)
        _only(node, at, 0)
        if where.dim in dims(node, count):
            raise Mixed(f"operation {node.target} runs along the batch")
        return where

    return rule


def along(place: int, name: str = "dim", default: Any = -1) -> Rule:
    """An operation along the dimensions of an argument."""
    return _outside(lambda node, count: _dims(argument(node, place, name, default), count))


def within(last: int) -> Rule:
    """An operation within the `last` last dimensions."""
    return _outside(lambda _, count: range(count - last, count))


def in_front(least: int, most: int = 99) -> Rule:
    """Input [N, C, ...] of `least` to `most` dimensions, whose N parts are treated one by one."""

    def rule(node: Node, at: At) -> Where:
        where, count = _records_in(node, at)
        _only(node, at, 0)
        if where.dim != 0 or not least <= count <= most:
            raise Mixed(f"operation {node.target} has no batch in front of its channels")
        return where

    return rule


def regroup(node: Node, at: At) -> Where:
    """A reshape: the batch keeps the numbers before and after it."""
    where, _ = _records_in(node, at)
    # A reshape keeps the order, so the count of numbers before a record's must not change.
    front, before = where.outer, 1
    for size in shape_of(node.args[0])[: where.dim]:
        front *= cast(int, size)
    for dim, size in enumerate(shape_of(node)):
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


def join_batches(node: Node, at: At) -> Where:
    """Concatenation of tensors with the same batch dimension."""
    # torch ignores a tensor of shape [0], with which a cache begins.
    tensors = [t for t in cast(Sequence[Node], node.args[0]) if shape_of(t) != [0]]
    found = {at(t) for t in tensors}
    new = kind_of(node) == "stack"
    where = found.pop()
    if found or where is None:
        raise Mixed(f"operation {node.target} joins records with others' places")
    (dim,) = _dims(argument(node, 1, "dim", 0), len(shape_of(tensors[0])) + new)
    if dim == where.dim and not new:
        raise Mixed(f"operation {node.target} joins batches")
    return where


def index(node: Node, at: At) -> Where:
    """x[:, index], table[x], and x[arange(B), i, ...], which picks in each record by its own i."""
    x = at(node.args[0])
    indices = list(cast(Sequence[Any], node.args[1]))
    by_place = {place: one for place, one in enumerate(indices) if one is not None}
    entered = [one for one in by_place.values() if at(one) is not None]
    if any(one.meta["val"].dtype == torch.bool for one in by_place.values()):
        raise Mixed(f"operation {node.target} picks by values")
    if x is None and len(by_place) == 1 and entered:
        return cast(Where, at(entered[0]))
    if x is not None and not entered and x.dim not in by_place:
        return x
    if x == (x and Where(x.dim)) and isinstance(x and at(by_place.get(x.dim)), RecordNumber):
        return _align(node, at, entered)
    raise Mixed(f"operation {node.target} reads along the batch")


def select(node: Node, at: At) -> Where:
    """index_select within each record, or of records by their own indices."""
    where, _ = _records_in(node, at)
    if node.args[1] == where.dim and isinstance(at(node.args[2]), RecordNumber):
        return where
    return along(1)(node, at)


def overwritten(node: Node, at: At) -> Where:
    """x with numbers replaced along a dimension, at the same positions in each record."""
    where, count = _records_in(node, at)
    (dim,) = _dims(argument(node, 2, "dim", 0), count)
    span = [argument(node, k, name) for k, name in ((3, "start"), (4, "end"), (5, "step"))]
    everything = kind_of(node) == "slice_scatter" and (
        span[0] in (None, 0) and span[1] in (None, sys.maxsize) and span[2] in (None, 1)
    )
    source = at(argument(node, 1, "src"))
    gone = dim < where.dim and kind_of(node) == "select_scatter"
    _only(node, at, 0, 1)
    if (dim == where.dim and not everything) or (
        source is not None and source != where._replace(dim=where.dim - gone)
    ):
        raise Mixed(f"operation {node.target} writes along the batch")
    return where


def scatter_within(node: Node, at: At) -> Where:
    """Numbers picked, set or added within each record, along a dimension other than the batch.

    The index must have the batch's length, or it would reach only the first records; index_add has
    one index for all records.
    """
    where, count = _records_in(node, at)
    by_record = (3,) if kind_of(node) == "index_add" else (2, 3)
    _only(node, at, 0, *by_record)
    beside = [at(arg) for arg in node.args[by_record[0] : 4] if isinstance(arg, Node)]
    if any(place != where for place in beside) or _dims(node.args[1], count) == [where.dim]:
        raise Mixed(f"operation {node.target} writes along the batch")
    return where


def contract(node: Node, at: At) -> Where:
    """einsum with the batch under one letter in all operands and in the result."""
    equation = cast(str, node.args[0]).replace(" ", "")
    operands, _, result = equation.partition("->")
    tensors = cast(Sequence[Node], node.args[1])
    batch: set[tuple[str, int, int]] = set()
    others = ""
    for letters, tensor in zip(operands.split(","), tensors, strict=True):
        where = at(tensor)
        if where is None:
            others += letters
        else:
            batch.add((letters[where.dim], where.outer, where.inner))
    if "." in equation or len(batch) != 1:
        raise Mixed(f"einsum {equation} is not known to keep records apart")
    letter, outer, inner = batch.pop()
    if letter not in result or letter in others:
        raise Mixed(f"einsum {equation} sums over the batch")
    return Where(result.index(letter), outer, inner)


def matmul(node: Node, at: At) -> Where:
    """Matrix products in the last two dimensions; a vector has only one."""
    a, b = node.args[:2]
    where = _align(node, at, [x for x in (a, b) if at(x) is not None][:1])
    both = at(a) is not None and at(b) is not None
    if both:
        where = _align(node, at, (a, b))
    along = -1 if at(a) is not None else -min(2, len(shape_of(b)))
    if where.dim == along or (both and where.dim >= -2):
        raise Mixed(f"operation {node.target} sums over the batch")
    return where


def of_matrices(node: Node, at: At) -> Where:
    """Attention, or distances, of [..., T, E]: the batch is before the last two dimensions."""
    where = _align(node, at, node.all_input_nodes)
    if where.dim >= -2:
        raise Mixed(f"operation {node.target} compares records")
    return where


def sample(node: Node, at: At) -> Where:
    """Images [N, C, ...] at points [N, ..., D] of their own."""
    where, _ = _records_in(node, at)
    if where.dim != 0 or at(node.args[1]) != where:
        raise Mixed(f"operation {node.target} looks at others' images")
    return where


def pad(node: Node, at: At) -> Where:
    """Padding of the last dimensions; by 0 it leaves one as it is."""
    sides = enumerate(cast(Sequence[Any], node.args[1]))
    return within(max((i // 2 + 1 for i, size in sides if size != 0), default=0))(node, at)


def layer_norm(node: Node, at: At) -> Where:
    """Normalised over the last dimensions."""
    return within(len(cast(Sequence[int], node.args[1])))(node, at)


def frozen_norm(node: Node, at: At) -> Where:
    """Batch norm with stored statistics; those of a batch would mix its records."""
    if node.args[5]:
        raise Mixed(f"operation {node.target} uses the batch's statistics")
    return in_front(2)(node, at)


def instance_norm(node: Node, at: At) -> Where:
    """Normalised over each channel of each record."""
    if not node.args[5] or node.args[3] is not None:
        raise Mixed(f"operation {node.target} uses or keeps statistics")
    return in_front(3)(node, at)


def embedding(node: Node, at: At) -> Where:
    """Rows of a table by integers of records, or the places of their numbers in a sorted one."""
    _only(node, at, 1)
    return _records_in(node, at, 1)[0]


def one_hot(node: Node, at: At) -> Where:
    """One-hot vectors [..., K] of integers [...]; a K taken from the largest integer would mix."""
    classes = argument(node, 1, "num_classes", -1)
    if not isinstance(classes, int) or classes < 1:
        raise Mixed(f"operation {node.target} looks for the largest number of the batch")
    return _records_in(node, at)[0]


def classes(node: Node, at: At) -> Where:
    """Cross-entropy of logits [N, K, ...] and classes [N, ...], one loss each."""
    where, count = _records_in(node, at)
    _only(node, at, 0, 1)
    by_index = len(shape_of(node.args[1])) == count - 1
    if argument(node, 3, "reduction", 1) != 0 or count < 2 or where.dim != 0 or not by_index:
        raise Mixed(f"operation {node.target} reduces over the batch")
    if at(node.args[1]) != where:
        raise Mixed(f"operation {node.target} pairs records with others' classes")
    return where


def recurrent(node: Node, at: At) -> Where:
    """(output, last states): outputs [B, T, H] or [T, B, H], states [layers, B, H]."""
    where, count = _records_in(node, at)
    hidden = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    lengths = node.kwargs.get("lengths")
    others = [n for n in node.all_input_nodes if n not in (node.args[0], *hidden, lengths)]
    right = where.dim == (0 if node.args[-1] else 1) and count == 3
    # Several sequences of a record are rows of the batch, each with its own state and length.
    right &= at(lengths) in (None, where._replace(dim=0))
    if not right or any(at(h) not in (None, where._replace(dim=1)) for h in hidden):
        raise Mixed(f"operation {node.target} has its batch elsewhere")
    if any(map(at, others)):
        raise Mixed(f"operation {node.target} has its batch elsewhere")
    if len({shape_of(h)[-1] for h in hidden}) > 1:
        raise Mixed(f"operation {node.target} projects its states")
    return where
