"""The way "graph": a traced model whose operations are known to treat records independently.

Model and loss are traced with a symbolic batch size (export). The table of independent operations
(batch_table) shows that a batched pass maps each record separately. One backward pass gives the
gradients of the outputs of all operations with parameters, and rules turn these into shares
(rules).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from fedpact.common.losses import Loss
from fedpact.common.params import FlatModel, autocast
from fedpact.per_sample import norms, recurrent
from fedpact.per_sample.gradients import Made, Mapped, Outer, Share, sum_of
from fedpact.per_sample.layout import overhead
from fedpact.per_sample.norms import wide
from fedpact.per_sample.registers import LANES, fill_up, row_of, widths
from fedpact.per_sample.rules import Call, Place, of_arguments, results_of, shares_of
from fedpact.per_sample.tracing.batch_rules import Mixed, Where, is_size, kind_of, shape_of
from fedpact.per_sample.tracing.batch_table import State
from fedpact.per_sample.tracing.keyed_draws import draw_by_key
from fedpact.per_sample.tracing.program import (
    Program,
    Reader,
    arguments,
    draws,
    evaluate_nodes,
    operation,
    reader,
)
from fedpact.per_sample.tracing.trace_context import for_vmap

Shares = dict[str, list[Share]]

_aten = cast(Any, torch.ops.aten)
_max_pool = cast(Callable[..., tuple[Tensor, Tensor]], _aten.max_pool2d_with_indices.default)


@dataclass(frozen=True, eq=False)
class _Use:
    """An operation with parameters among its arguments.

    sources: by the argument's position, a parameter's placeholder or the node of a function of
    several.
    """

    sources: dict[Place, Node]
    places: dict[Place, Where]
    out: list[Where]


@dataclass(eq=False)
class _Step:
    """One operation. last: the nodes whose values are not needed after it.

    pools: whether it is a max-pooling that is the only reader of a convolution with parameters.
    """

    node: Node
    do: Callable[..., Any]
    read: Reader
    last: list[Node]
    use: _Use | None
    pools: bool


def _tap(step: _Step, use: _Use, args: Any, kwargs: Any, batch: int) -> tuple[Any, Call]:
    """Run a step whose results' gradients are requested."""
    recurs = step.node.target in recurrent.RECURRENT
    if recurs:
        # It records its gradients in the backward pass, so its input must require grad.
        x = cast(Tensor, args[0])
        args = (x if x.requires_grad else x.detach().requires_grad_(), *args[1:])
    op, wanted = cast(Any, step.node.target), [*use.sources]
    call = Call(op, list(args), dict(kwargs), use.places, use.out, wanted, batch)
    if recurs:
        recorded = call.recorded = []

        def told(place: int, g: Tensor, u: Tensor | None) -> None:
            recorded.append((place, g, u))

        kwargs = {**kwargs, "record": told}
    found: Any = step.do(*args, **kwargs)
    several: list[Tensor] = results_of(found)
    # Parameters are constants here, so nothing before the first tap requires a gradient.
    for one in several:
        if (one.is_floating_point() or one.is_complex()) and not one.requires_grad:
            one.requires_grad_()
    call.grads = list(several)
    return tuple(several) if isinstance(found, (tuple, list)) else several[0], call


class Graph:
    """A traced model whose operations are known to treat records independently.

    draws: whether passes draw random numbers. cost: bytes of a record's gradients and activations,
    and a pass's overhead in records. multiple: P has to be one of it. Raises Untraceable; Mixed for
    an unknown operation.
    """

    def __init__(self, model: FlatModel, loss: Loss, x: Tensor, y: Tensor) -> None:
        self._model = model
        self._program = program = Program(model, loss, x, y, None)
        self._states = program.states
        if self._states[program.result] != Where(0) or len(shape_of(program.result)) != 1:
            raise Mixed("the losses are not one a record")
        self._trained = program.trained
        self._weights = self._weight_nodes(program.nodes)
        self._steps = self._compile(program.nodes)
        self._functions = self._function_nodes()
        self.draws = program.draws
        self.cost = self._cost(model)
        # The rows of the others are filled up.
        rests = (s.node for s in self._steps if s.use or row_of(s.node, self._states) is None)
        self.multiple = self._multiple(rests)

    def _cost(self, model: FlatModel) -> tuple[int, int, float]:
        # A rough estimate, from which the length of passes is chosen.
        recurrent_steps = [s.node for s in self._steps if s.node.target in recurrent.RECURRENT]
        values = [s.node for s in self._steps if isinstance(self._states.get(s.node), Where)]
        numbers, operations = sum(map(_numbers, values)), float(len(values))
        flops = 6.0 * sum(map(_products, self._steps))
        for node in recurrent_steps:
            # Its time steps run one after another, whatever the number of records.
            length = shape_of(node.args[0])[1 if node.args[-1] else 0]
            layers = cast(int, node.args[4]) * (2 if node.args[7] else 1)
            operations += 8.0 * layers * (length if isinstance(length, int) else 1)
        element = model.vector.element_size()
        # A recurrence frees its gradients step by step.
        held = 0 if recurrent_steps else element
        instance = held * sum(map(_instance, self._steps))
        return instance, held * numbers, overhead(operations, flops, model.size, numbers)

    def _multiple(self, nodes: Iterable[Node]) -> int:
        """Return a P of which multiples leave no rest, so that the same code computes all slots."""
        nodes = list(nodes)
        found = [width for node in nodes for width in widths(node, self._states)]
        # A step of a recurrence is elementwise in its states.
        recurrences = (node for node in nodes if node.target in recurrent.RECURRENT)
        states = [node.args[1] for node in recurrences]
        states = [one for of in states for one in (of if isinstance(of, list | tuple) else [of])]
        found += [_last(cast(Node, one)) for one in states]
        return max((LANES // math.gcd(LANES, width) for width in found), default=1)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """The losses [B] of records x, y [B, ...], without gradient."""
        with torch.no_grad(), autocast(self._model):
            return wide(self._forward(x, y, None, held=False))

    def run(self, x: Tensor, y: Tensor, *, held: bool = False) -> tuple[Tensor, Shares]:
        """Losses [B] of records x, y [B, ...], and shares by the parameters' names.

        held: the shares stay valid after a change of the weights.
        """
        calls: dict[Node, Call] = {}
        with torch.enable_grad(), autocast(self._model):
            losses = wide(self._forward(x, y, calls, held))
        _backward(losses, list(calls.values()))
        uses = [(use, calls[s.node]) for s in self._steps if (use := s.use) and s.node in calls]
        del calls
        return losses.detach(), self._shares(uses)

    def _forward(self, x: Tensor, y: Tensor, calls: dict[Node, Call] | None, held: bool) -> Tensor:
        values = self._program.values(x, y)
        # Shares may contain views of the weights, which the next point overwrites.
        if held:
            values = {name: v.clone() for name, v in values.items()}
        env: dict[Node, Any] = {}
        for step in self._steps:
            node = step.node
            if node.op == "placeholder":
                env[node] = values[node.name]
            else:
                args, kwargs = step.read(env)
                if calls is not None and step.use is not None:
                    env[node], calls[node] = _tap(step, step.use, args, kwargs, len(x))
                elif calls is not None and step.pools:
                    # Its gradient and the indices of its maxima give all nonzero entries of the
                    # convolution's gradient.
                    call = calls[cast(Node, node.args[0])]
                    call.pooled = env[node], _ = _max_pool(*args, **kwargs)
                else:
                    env[node] = step.do(*args, **kwargs)
            for one in step.last:
                del env[one]
        return cast(Tensor, env[self._program.result])

    def _shares(self, calls: list[tuple[_Use, Call]]) -> Shares:
        values = self._compute_functions()
        found: Shares = {}
        left: dict[Node, list[Share]] = {}
        # A call is freed before the next one's shares are made.
        while calls:
            use, call = calls.pop()
            for place, share in _shares_of(call).items():
                if place in use.sources:
                    # In the order of the uses, in which differences pair them.
                    for name, one in self._pass_on(use.sources[place], share, values, left):
                        found.setdefault(name, []).insert(0, one)
        for node, one in _pull(left, values, self._functions):
            found.setdefault(self._trained[node.name], []).append(one)
        return found

    def _compute_functions(self) -> dict[Node, Any]:
        """The values of functions of parameters, computed once more for their gradients."""
        given = self._program.placeholders_of(self._functions)
        with torch.enable_grad():
            own = {at: given[at].clone().requires_grad_() for at in given if at in self._trained}
            return evaluate_nodes(list(self._functions), given | own)

    def _pass_on(
        self, node: Node, share: Share, values: dict[Node, Any], left: dict[Node, list[Share]]
    ) -> Iterator[tuple[str, Share]]:
        """The shares of the parameters from which a node is computed, from its own share.

        left: where the shares of nodes go whose operation has no rule.
        """
        if node.op == "placeholder":
            yield self._trained[node.name], share
            return
        weighted = {i: n for i, n in _flat(node) if n in self._weights}
        found = None
        if not node.kwargs:
            found = of_arguments(share, str(node.target), arguments(node, values)[0])
        if found is None or not weighted.keys() <= found.keys():
            left.setdefault(node, []).insert(0, share)
            return
        for i, one in weighted.items():
            yield from self._pass_on(one, found[i], values, left)

    def _function_nodes(self) -> dict[Node, list[Node]]:
        """The nodes that compute functions of parameters, in order.

        Each with the placeholders of the trained parameters that it follows from.
        """
        used = (step.use.sources.values() for step in self._steps if step.use)
        needed = {n for some in used for n in some if n.op != "placeholder"}
        for node in reversed(self._program.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        found: dict[Node, list[Node]] = {}
        for node in self._program.nodes:
            if node in needed:
                inputs = [one for before in node.all_input_nodes for one in found[before]]
                found[node] = [node] if node.name in self._trained else [*dict.fromkeys(inputs)]
        return found

    def _weight_nodes(self, nodes: list[Node]) -> set[Node]:
        """Nodes that depend on trained parameters and on no record."""
        found: set[Node] = set()
        for node in nodes:
            inside = self._states[node] is None and not is_size(node)
            before = any(one in found for one in node.all_input_nodes)
            if node.name in self._trained or (inside and before):
                found.add(node)
        return found

    def _compile(self, nodes: list[Node]) -> list[_Step]:
        steps: list[_Step] = []
        needed = {self._program.result}
        # Backwards: the first reader found is the last one in the order of execution.
        for node in reversed(nodes):
            if node.op == "call_function" and node not in needed:
                # Unused, and no operation of the table has side effects.
                continue
            inputs = node.all_input_nodes
            last = [n for n in inputs if n not in needed]
            needed.update(inputs)
            use = self._use(node) if node.op == "call_function" else None
            if node not in needed:
                last.append(node)
            do = _done(node, self._states[node])
            row = row_of(node, self._states) if use is None else None
            if row is not None:
                do = partial(fill_up, do, row, 1)
            steps.insert(0, _Step(node, do, reader(node), last, use, self._pools(node)))
        return steps

    def _pools(self, node: Node) -> bool:
        before = node.args[0] if kind_of(node) == "max_pool2d" else None
        if not isinstance(before, Node) or kind_of(before) != "conv2d" or len(before.users) > 1:
            return False
        if self._states[before] != Where(0):
            return False
        return any(n in self._weights for n in before.all_input_nodes)

    def _use(self, node: Node) -> _Use | None:
        state = self._states[node]
        if state is None or not any(n in self._weights for n in node.all_input_nodes):
            return None
        positional(node)
        args = _flat(node)
        sources = {place: arg for place, arg in args if arg in self._weights}
        if draws(node) and node.target not in recurrent.RECURRENT:
            raise Mixed(f"operation {node.target} draws random numbers for a parameter")
        places = {place: w for place, arg in args if isinstance(w := self._states[arg], Where)}
        out = [state] if isinstance(state, Where) else list(cast(tuple[Where, ...], state))
        return _Use(sources, places, out)


def _done(node: Node, state: State) -> Callable[..., Any]:
    """Return the function of a node. A recurrence always runs in the differentiable form."""
    if node.target not in recurrent.RECURRENT:
        while isinstance(state, tuple) and not isinstance(state, Where):
            state = state[0]
        return operation(node, state)

    def ignored(*_: object) -> None:
        """Record nothing."""

    def run(*args: Any, record: recurrent.Record = ignored, **kwargs: Any) -> Any:
        return recurrent.run(node.target, args, record, **kwargs)

    # Its dropout works on steps in front of records, which is where its states have them.
    return draw_by_key(run, cast(tuple[Where, ...], state)[1]) if draws(node) else run


def _shares_of(call: Call) -> dict[Place, Share]:
    if call.op in recurrent.RECURRENT:

        def apart(steps: Tensor) -> Tensor:
            return call.positions(call.per_record(steps, call.out[1]._replace(dim=0)))

        return {
            (2, i): Made(apart(g).sum(1)) if u is None else Outer(apart(g), apart(u))
            for i, g, u in call.recorded
        }
    if all(g is None for g in call.grads):
        return {}
    return shares_of(call)


def _backward(losses: Tensor, calls: list[Call]) -> None:
    """Replace the tapped tensors by their gradients."""
    if not losses.requires_grad:
        for call in calls:
            call.grads = [None for _ in call.grads]
        return
    taps = [(c, i, t) for c in calls for i, t in enumerate(c.grads) if t is not None]
    taps = [(c, i, t) for c, i, t in taps if t.requires_grad]
    pooled = [(c, *c.pooled) for c in calls if c.pooled is not None]
    for call in calls:
        call.grads, call.pooled = [None for _ in call.grads], None
    # A recurrence records its gradients in its backward pass, so those of its inputs are requested.
    starts = [c.args[0] for c in calls if c.op in recurrent.RECURRENT]
    wanted = [*(t for _, _, t in taps), *(y for _, y, _ in pooled), *starts]
    found = cast(
        tuple[Tensor | None, ...],
        torch.autograd.grad(losses, wanted, torch.ones_like(losses), allow_unused=True),
    )
    for (call, i, _), grad in zip(taps, found, strict=False):
        call.grads[i] = None if grad is None else wide(grad)
    for (call, _, index), grad in zip(pooled, found[len(taps) :], strict=False):
        call.pooled = None if grad is None else (wide(grad), index)


def _flat(node: Node) -> "list[tuple[Place, Node]]":
    """The nodes among a node's arguments, with their positions."""
    found: list[tuple[Place, Node]] = []
    for i, arg in enumerate(node.args):
        if isinstance(arg, Node):
            found.append((i, arg))
        elif isinstance(arg, (list, tuple)):
            found += [((i, j), one) for j, one in enumerate(arg) if isinstance(one, Node)]
    return found


def positional(node: Node) -> None:
    """Turn keyword arguments into positional ones where possible."""
    schema = cast(Any, node.target)._schema
    args, kwargs = list(node.args), dict(node.kwargs)
    placed = {a.name for a in schema.arguments if not a.kwarg_only}
    for argument in schema.arguments[len(args) :]:
        if argument.kwarg_only or not kwargs.keys() & placed:
            break
        args.append(kwargs.pop(argument.name, argument.default_value))
    node.args, node.kwargs = tuple(args), kwargs


def _pull(
    left: dict[Node, list[Share]], values: dict[Node, Any], needed: dict[Node, list[Node]]
) -> Iterator[tuple[Node, Share]]:
    """Shares of parameters, by their placeholders, from those of functions of parameters.

    By autograd, batched over records: of all functions at once where that fits into memory, as a
    call takes long to begin. needed: the placeholders of the parameters that a function follows
    from.
    """

    def pulled(nodes: list[Node], weights: list[Node], rows: list[Tensor]) -> list[Tensor]:
        outputs, inputs = ([values[one] for one in some] for some in (nodes, weights))
        grads = [r.view(len(r), *v.shape) for r, v in zip(rows, outputs, strict=True)]
        with for_vmap():
            found = torch.autograd.grad(
                outputs, inputs, grads, retain_graph=True, is_grads_batched=True, allow_unused=True
            )
        of = zip(cast(tuple[Tensor | None, ...], found), inputs, strict=True)
        none = rows[0].new_zeros
        return [
            none(len(rows[0]), w.numel()) if v is None else v.reshape(len(v), -1) for v, w in of
        ]

    def by_chunk(node: Node, weight: Node) -> Share:
        def function(rows: Tensor) -> Tensor:
            return pulled([node], [weight], [rows])[0]

        return Mapped(shares[node], function, values[weight].numel())

    shares = {node: sum_of(some) for node, some in left.items() if values[node].requires_grad}
    weights = [*dict.fromkeys(one for node in shares for one in needed[node])]
    size = sum(s.nbytes + sum(values[w].nbytes for w in needed[n]) for n, s in shares.items())
    if shares and size * (one := next(iter(shares.values()))).batch > norms.keep_bytes(one.like):
        yield from ((w, by_chunk(node, w)) for node in shares for w in needed[node])
    elif shares:
        rows = [share.rows(slice(0, share.batch)) for share in shares.values()]
        yield from zip(weights, map(Made, pulled([*shares], weights, rows)), strict=True)


def _products(step: _Step) -> float:
    """The approximate number of multiplications of a use of parameters per record."""
    if step.use is None or kind_of(step.node) == "embedding":
        return 0.0
    weights = [cast(list[int], shape_of(source)) for source in step.use.sources.values()]
    if step.node.target in recurrent.RECURRENT:
        shape = shape_of(step.node.args[0])
        steps = math.prod(size for size in shape[:-1] if isinstance(size, int))
        return float(steps * sum(math.prod(w) for w in weights))
    return float(_numbers(step.node) * sum(math.prod(w[1:]) for w in weights if len(w) > 1))


def _instance(step: _Step) -> int:
    """The approximate number of per-sample gradient entries of a use per record."""
    if step.use is None:
        return 0
    name = kind_of(step.node)
    if name == "embedding":
        return _numbers(step.node)
    if name in ("linear", "mm", "matmul") and _numbers(step.node) == _last(step.node):
        return 0
    return sum(map(_numbers, step.use.sources.values()))


def _numbers(node: Node) -> int:
    value = node.meta["val"]
    shape = shape_of(node if isinstance(value, Tensor) else node.args[0])
    return math.prod(size for size in shape if isinstance(size, int))


def _last(node: Node) -> int:
    size = shape_of(node)[-1]
    return size if isinstance(size, int) else 1
