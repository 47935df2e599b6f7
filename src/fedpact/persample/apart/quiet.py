"""What stands under torch.no_grad in a trace, which torch puts into a graph of its own.

There nobody would see what it draws, mixes or changes: it is put among the other operations, its
results detached, which is what torch.no_grad does to them.
"""

import operator
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

_UNDER = cast(Any, torch.ops).higher_order.wrap_with_set_grad_enabled


class Untraceable(Exception):
    """A model cannot be traced, with the reason."""


def put_in_place(program: Any) -> None:
    """Put what stands under torch.no_grad in a traced program among the others.

    Raises Untraceable where it writes to what stood before: what one record leaves in a buffer
    would meet the next, and of a value that has a gradient nobody would know it afterwards.
    """
    graph: Graph = program.graph
    parts: list[Any] = [n for n in graph.nodes if n.target is _UNDER]
    for node in parts:
        enabled, inner, *given = node.args
        body: Graph = getattr(program.graph_module, inner.target).graph
        if (writes := _writes_before(body)) is not None:
            raise Untraceable(f"under torch.no_grad it writes to what was there before: {writes}")
        named = [n for n in body.nodes if n.op == "placeholder"]
        with graph.inserting_before(node):
            made: Any = graph.graph_copy(body, dict(zip(named, given, strict=True)))
            found = [one if enabled else _detached(graph, one) for one in made]
        for user in list(node.users):
            one: Node = found[user.args[1]]
            user.replace_all_uses_with(one)
            program.graph_signature.replace_all_uses(user.name, one.name)
            graph.erase_node(user)
        graph.erase_node(node)
        graph.erase_node(inner)
    graph.lint()


def by_argument(node: Node) -> list[tuple[Any, Any]]:
    """The arguments of an operation, as its schema has them, with what they are; none of others."""
    schema = getattr(node.target, "_schema", None)
    arguments: list[Any] = [] if schema is None else schema.arguments
    told = dict(zip([a.name for a in arguments], node.args, strict=False)) | node.kwargs
    return [(a, told[a.name]) for a in arguments if a.name in told]


def _writes_before(graph: Graph) -> str | None:
    """The operation that writes to what a graph is given, or to a view of it."""
    given = {n for n in graph.nodes if n.op == "placeholder"}
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0] in given:
            given.add(node)
        for argument, value in by_argument(node):
            # What neither is written to nor seen through the result has none.
            alias = argument.alias_info
            several = cast(list[Any], value if isinstance(value, (list, tuple)) else [value])
            if alias is None or not any(isinstance(v, Node) and v in given for v in several):
                continue
            if alias.is_write:
                return str(node.target)
            given.add(node)
    return None


def _detached(graph: Graph, node: Node) -> Node:
    if not isinstance(node.meta.get("val"), Tensor):
        return node
    made = graph.call_function(torch.ops.aten.detach.default, (node,))
    made.meta = dict(node.meta)
    return made
