"""Operations that torch carries out without a look at what a record tells them to do.

Some read or write beyond their numbers, and end the process or meet another record; some go on for
as long as a record says, and some keep what they saw for the next. No record may be given to them.
"""

import math
from collections.abc import Iterable
from typing import Any

from torch.fx import Node

from fedpact.persample.apart.places import kind_of
from fedpact.persample.apart.quiet import by_argument

# Lengths and offsets that kernels of these take as they are.
_UNCHECKED = {
    "embedding_bag": ("offsets",),
    "embedding_bag_forward_only": ("offsets",),
    "segment_reduce": ("lengths", "indices", "offsets"),
}


def follow(nodes: Iterable[Node], records: Iterable[str]) -> set[Node]:
    """The nodes that records enter. records: the names of the placeholders that stand for them."""
    names, found = set(records), set[Node]()
    for node in nodes:
        if node.name in names or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def unsafe(nodes: Iterable[Node], entered: set[Node]) -> str | None:
    """What an operation does unseen with what a record tells it; None for nothing."""
    for node in nodes:
        kind = _kind(node)
        told = {argument.name: value for argument, value in by_argument(node)}
        if node in entered and "polynomial" in kind:
            return f"how long {node.target} takes would follow from a record"
        if any(told.get(name) in entered for name in _UNCHECKED.get(kind, ())):
            return f"{node.target} does not check what a record gives it"
        if _keeps_statistics(told):
            return f"{node.target} changes a tensor in place"
        if kind.startswith("weight_norm") and "v" in told and not _fits(**told):
            return f"{node.target} has weights and lengths that do not fit"
    return None


def _keeps_statistics(told: dict[str, Any]) -> bool:
    """Whether a normalisation updates running statistics, which its schema does not say."""
    if told.get("running_mean") is None and told.get("running_var") is None:
        return False
    names = ("training", "train", "use_input_stats")
    return next((told[name] for name in names if name in told), True) is not False


def own_tables(nodes: Iterable[Node], entered: set[Node]) -> list[Node]:
    """Look-ups in a table that is made of a record, which vmap puts into one behind the other."""
    return [n for n in nodes if _kind(n) == "embedding" and n.args[0] in entered]


def _kind(node: Node) -> str:
    """An operation's name; those that torch has for itself begin with an underscore."""
    return kind_of(node).lstrip("_")


def _fits(v: Node, g: Node, dim: int = 0, **_: Any) -> bool:
    return math.prod(g.meta["val"].shape) == v.meta["val"].shape[dim]
