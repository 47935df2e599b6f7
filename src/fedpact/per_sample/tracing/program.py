"""A traced model together with one model's weights."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from fedpact.common.losses import Loss
from fedpact.common.params import FlatModel
from fedpact.per_sample.products import FILLED
from fedpact.per_sample.tracing import keyed_draws
from fedpact.per_sample.tracing.batch_rules import Where, kind_of
from fedpact.per_sample.tracing.batch_table import State
from fedpact.per_sample.tracing.export import WithLoss, trace_of
from fedpact.per_sample.tracing.replacements import DONE_AS

_Choice = Callable[[Node], Callable[..., Any]]


class Program:
    """A traced model with its loss, for records of the form of x, y [n, ...].

    batch: a fixed size, None for any. trained: the trained parameters' names in the model, by those
    of their placeholders. entered: the nodes that records enter. Raises Untraceable.
    """

    def __init__(
        self, model: FlatModel, loss: Loss, x: Tensor, y: Tensor, batch: int | None
    ) -> None:
        self._trace = trace = trace_of(WithLoss(model.module, loss), x, y, batch)
        whole = WithLoss(model.module, loss)
        self.nodes, self.result, self._inputs = trace.nodes, trace.result, trace.inputs
        self.entered = trace.entered
        own = {id(p): n for n, p in model.module.named_parameters() if n in model.own}
        every = whole.named_parameters(remove_duplicate=False)
        names = {name: own[id(p)] for name, p in every if id(p) in own}
        self.trained = {
            name: names[target]
            for name, (kind, target) in self._inputs.items()
            if kind == "parameter" and target in names
        }
        # Where the model holds each placeholder's tensor, which is read in every pass.
        self._held = {
            name: (vars(whole.get_submodule(path))[f"_{kind}s"], leaf)
            for name, (kind, target) in self._inputs.items()
            if kind in ("parameter", "buffer")
            for path, _, leaf in [target.rpartition(".")]
        }
        # A constant of a model's code is on the CPU, and would be copied in every pass.
        device = model.vector.device
        self._constants = {name: v.to(device) for name, v in trace.constants.items()}

    @property
    def states(self) -> dict[Node, State]:
        """Where every node has the batch; see batch_table. Raises Mixed."""
        return self._trace.states

    @property
    def draws(self) -> bool:
        """Whether a pass draws random numbers."""
        return any(map(draws, self.nodes))

    def placeholders_of(self, nodes: Iterable[Node]) -> dict[str, Tensor]:
        """Return the tensors of the placeholders among nodes that no record enters."""
        return {
            node.name: self.placeholder(node.name) for node in nodes if node.op == "placeholder"
        }

    def placeholder(self, name: str) -> Tensor:
        """Return the tensor of a placeholder other than records'."""
        kind, target = self._inputs[name]
        if kind == "constant":
            return self._constants[target]
        tensors, leaf = self._held[name]
        return tensors[leaf].detach()

    def values(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the placeholders' tensors, with the records x, y."""
        of = {"x": x.detach(), "y": y.detach()}
        return {
            name: of[target] if kind == "record" else self.placeholder(name)
            for name, (kind, target) in self._inputs.items()
        }

    def losses(
        self,
        x: Tensor,
        y: Tensor,
        weights: Mapping[str, Tensor],
        op_of: _Choice | None = None,
    ) -> Tensor:
        """The losses [B] at the weights, by the model's names. op_of: as of `evaluate_nodes`."""
        trained = {name: weights[own] for name, own in self.trained.items()}
        return evaluate_nodes(self.nodes, self.values(x, y) | trained, op_of)[self.result]


def evaluate_nodes(
    nodes: list[Node], values: Mapping[str, Tensor], op_of: _Choice | None = None
) -> dict[Node, Any]:
    """The values of nodes in order, from those of the placeholders among them.

    op_of: a node's function, by default its operation.
    """
    env: dict[Node, Any] = {}
    for node in nodes:
        if node.op == "placeholder":
            env[node] = values[node.name]
        else:
            args, kwargs = arguments(node, env)
            env[node] = (op_of or operation)(node)(*args, **kwargs)
    return env


def operation(node: Node, where: Where | None = None) -> Callable[..., Any]:
    """Return the function of a node: narrow products are filled up, draws are from the step's key.

    where: where the records are in the numbers that it draws.
    """
    found = DONE_AS.get(cast(Any, node.target)) or cast(Callable[..., Any], node.target)
    if (filled := FILLED.get(kind_of(node))) is not None and not node.kwargs:
        found = partial(filled, found)
    return keyed_draws.draw_by_key(found, where, node.name) if draws(node) else found


def arguments(node: Node, env: dict[Node, Any]) -> tuple[Any, Any]:
    """A node's arguments, by place and by name, with values for nodes."""
    return (
        torch.fx.map_arg(node.args, env.__getitem__),
        torch.fx.map_arg(node.kwargs, env.__getitem__),
    )


Reader = Callable[[dict[Node, Any]], tuple[Sequence[Any], dict[str, Any]]]


def reader(node: Node) -> Reader:
    """Return `arguments` for one node, five times faster if no list of it holds nodes."""
    kwargs, args = dict(node.kwargs), node.args
    direct = [a for a in args if isinstance(a, Node)]
    if len({*direct}) < len(node.all_input_nodes):
        return lambda env: arguments(node, env)
    # fx keeps lists in types of its own, which some operations are slow to take.
    constants = cast(tuple[Any, ...], torch.fx.map_arg(args, lambda n: n))
    return lambda env: ([env[a] if isinstance(a, Node) else a for a in constants], kwargs)


def draws(node: Node) -> bool:
    """Whether a node draws random numbers."""
    return keyed_draws.draws(node.target, node.args, node.kwargs)
