"""Tracing: a model and its loss as a list of operations on tensors.

Both run once on fake tensors, which have shapes but no values, before any record is read. So no
branch on values can be taken and, with a symbolic batch size, none on its length. Later passes run
the trace, not the model's Python code. A trace contains names of weights instead of weights, so it
is shared by all models with the same code and shapes in this process.
"""

import logging
import operator
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from traceback import FrameSummary, extract_tb
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from fedpact.common.losses import Loss
from fedpact.common.params import refuse_writing
from fedpact.common.user_code import digest_of_form
from fedpact.per_sample.tracing.batch_rules import is_size, kind_of
from fedpact.per_sample.tracing.batch_table import State, states
from fedpact.per_sample.tracing.record_safety import by_argument, follow, unsafe
from fedpact.per_sample.tracing.replacements import STANDS_FOR, TRACED_AS
from fedpact.per_sample.tracing.trace_context import (
    WritableDropout,
    announce,
    state_kept,
    while_tracing,
)

_TRACING: Final = threading.RLock()  # torch's tracer is no more than one thread's at a time
_BATCH: Final = 3  # records in a made-up batch
_PATIENCE: Final = 15.0  # seconds of tracing until the log says so
_KEPT: Final = 64  # traces of this process
_SET_GRAD: Final = cast(Any, torch)._C._set_grad_enabled
_SLOW: Final = (
    "model %s is being traced, once, which takes long where Python goes over many positions: "
    "a layer that does so itself, as nn.LSTM does and nn.LSTMCell does not, takes no time"
)


class Untraceable(Exception):
    """A model cannot be traced, with the reason."""


@dataclass(frozen=True, eq=False)
class Trace:
    """A traced model and loss.

    inputs: the kind and name of each placeholder, such as ("parameter", "model.0.weight"),
    ("buffer", "model.mean"), ("constant", the placeholder's own name) or ("record", "x").
    """

    graph: Graph
    inputs: dict[str, tuple[str, str]]
    constants: dict[str, Tensor]

    @cached_property
    def result(self) -> Node:
        """The losses. Raises Untraceable: they follow from no operation."""
        *_, output = self.graph.nodes
        for result in output.all_input_nodes:
            return result
        raise Untraceable("its losses follow from no operation")

    @cached_property
    def nodes(self) -> list[Node]:
        """The placeholders, and what the losses follow from: a trace has no side effects."""
        *nodes, _ = self.graph.nodes
        needed = {self.result}
        for node in reversed(nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        return [node for node in nodes if node.op == "placeholder" or node in needed]

    @cached_property
    def records(self) -> set[str]:
        """The names of the placeholders of records."""
        return {name for name, (kind, _) in self.inputs.items() if kind == "record"}

    @cached_property
    def entered(self) -> set[Node]:
        """The nodes that depend on records."""
        return follow(self.nodes, self.records)

    @cached_property
    def states(self) -> dict[Node, State]:
        """The batch dimension of every node. Raises Mixed."""
        return states(self.nodes, self.records)


class WithLoss(nn.Module):
    """Losses [B] of records x, y, as one module."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = module, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The losses [B]."""
        losses = self.loss(self.model(x), y)
        vars(self)["after"] = self.tensors()
        return losses

    def find_replaced(self, given: Mapping[str, Tensor]) -> str | None:
        """The name of a tensor that differs from the given one."""
        now: dict[str, Tensor] = vars(self).pop("after")
        return next((n for n in {*now, *given} if now.get(n) is not given.get(n)), None)

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, or by their first name if they have several."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}


_traces: dict[object, Trace | str] = {}


def trace_of(whole: WithLoss, x: Tensor, y: Tensor, batch: int | None) -> Trace:
    """This process's trace for a model of this form, created if there is none yet."""
    if any(isinstance(m, torch.jit.ScriptModule) for m in whole.modules()):
        raise Untraceable(
            "it is TorchScript, which cannot be looked into; hand in the module it was made of"
        )
    with _TRACING:
        # A model without a digest is traced each time.
        digest = digest_of_form(whole.model, whole.loss)
        forms = [(v.shape[1:], v.dtype, v.device) for v in (x, y)]
        key = digest, *forms, batch, torch.get_default_dtype()
        found = None if digest is None else _traces.get(key)
        if found is None:
            try:
                found = _trace(whole, x, y, batch)
            except Untraceable as why:
                found = str(why)
            if digest is not None:
                _traces[key] = found
        while len(_traces) > _KEPT:
            del _traces[next(iter(_traces))]
    if isinstance(found, str):
        raise Untraceable(found)
    return found


def _trace(whole: WithLoss, x: Tensor, y: Tensor, batch: int | None) -> Trace:
    slow = announce(_SLOW, whole.model, _PATIENCE, logging.WARNING)
    with slow, while_tracing(whole.model, whole.loss), warnings.catch_warnings():
        # Torch's warnings about its tracer. Other threads' warnings may be lost meanwhile.
        warnings.simplefilter("ignore")
        trace = _record(whole, x, y, batch, functional=False)
        if any(map(_changes, trace.graph.nodes)):
            _check_writes(whole, trace)
            trace = _record(whole, x, y, batch, functional=True)
    _detach_without_grad(trace.graph)
    _pool_before_relu(trace.graph)
    _take_first_of_equal(trace.graph)
    for node in trace.nodes:
        node.target = cast(Any, STANDS_FOR.get(node.target, node.target))
        if _changes(node):
            raise Untraceable(f"{node.target} changes a tensor in place")
        if not _is_known(node):
            # Transformations of functions and the like would run other code.
            raise Untraceable(f"{node.target} is no operation on tensors")
    if (why := unsafe(trace.nodes, trace.entered)) is not None:
        raise Untraceable(why)
    return trace


def _record(whole: WithLoss, x: Tensor, y: Tensor, batch: int | None, *, functional: bool) -> Trace:
    """Run model and loss on synthetic records. functional: replace in-place operations.

    Raises Untraceable.
    """
    # Imported here: torch's tracer takes a second, which most commands do not need.
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental import _config as shapes
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    env = ShapeEnv()
    fake = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    fake.cache_enabled = False  # hardly any form comes up again, and caching takes a third longer

    def made_up(tensor: Tensor, first: DimDynamic = DimDynamic.STATIC) -> Tensor:
        dims = [first, *[DimDynamic.STATIC] * (tensor.dim() - 1)][: tensor.dim()]
        context = cast(Any, StatelessSymbolicContext)(dims)
        return fake.from_tensor(tensor, symbolic_context=context)

    def run(tensors: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        given = dict(zip(held, tensors, strict=True))
        with WritableDropout() if functional else nullcontext():
            losses = torch.func.functional_call(whole, given, (x, y))
        if (name := whole.find_replaced(given)) is not None:
            raise Untraceable(f"a pass changes {_own_name(name)}")
        return losses

    held = whole.tensors()
    weights = [made_up(tensor) for tensor in held.values()]
    # One symbolic size, for any batch of 2 or more.
    first = DimDynamic.STATIC if batch else DimDynamic.DUCK
    records = [made_up(v.new_zeros(batch or _BATCH, *v.shape[1:]), first) for v in (x, y)]
    mode = FunctionalTensorMode(pre_dispatch=True, export=True)
    traced = dispatch_functionalize(run, mode) if functional else run
    try:
        # With gradients, as in training: otherwise some layers use paths without them.
        # Makes torch prefer an implementation for any size to one for special sizes.
        any_size = cast(Any, shapes).patch(backed_size_oblivious=True)
        with any_size, enable_python_dispatcher(), fake, torch.enable_grad(), state_kept(whole):
            made = make_fx(
                traced,
                decomposition_table=TRACED_AS,
                tracing_mode="real",
                pre_dispatch=True,
                _allow_non_fake_inputs=True,
            )(weights, *records)
    except Untraceable:
        raise
    except Exception as error:
        raise Untraceable(_reason(error)) from error
    if env.guards:
        raise Untraceable(f"a branch on the length of the batch, {env.guards[0].expr}")
    if env.deferred_runtime_asserts:
        from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts

        insert_deferred_runtime_asserts(made, env, "trace")
    parameters = dict(whole.named_parameters())
    kinds = [("parameter" if name in parameters else "buffer", name) for name in held]
    return _with_constants(made, [*kinds, ("record", "x"), ("record", "y")], made_up)


def _with_constants(
    made: Any, kinds: list[tuple[str, str]], form: Callable[[Tensor], Tensor]
) -> Trace:
    """The graph with a placeholder for every tensor that is part of it."""
    graph: Graph = made.graph
    given = [node for node in graph.nodes if node.op == "placeholder"]
    inputs = {node.name: kind for node, kind in zip(given, kinds, strict=True)}
    constants: dict[str, Tensor] = {}
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        value = operator.attrgetter(str(node.target))(made)
        if not isinstance(value, Tensor):
            raise Untraceable(f"{node.target} is no operation on tensors")
        with graph.inserting_after(given[-1]):
            one = graph.placeholder(f"constant_{len(constants)}")
        # A copy: an untraced pass, such as an evaluation, may modify a global tensor.
        constants[one.name] = value.detach().clone()
        one.meta["val"] = form(constants[one.name])
        inputs[one.name] = "constant", one.name
        node.replace_all_uses_with(one)
        graph.erase_node(node)
    return Trace(graph, inputs, constants)


def _check_writes(whole: WithLoss, trace: Trace) -> None:
    """Check the in-place writes of a trace.

    Raises ModelError for a write to a record; Untraceable for a write to a tensor that outlives the
    pass, which would carry numbers between records, or one that autograd does not track.
    """
    roots: dict[Node, set[Node]] = {}
    without_grad, region = dict[Node, int](), 0
    for node in trace.graph.nodes:
        if node.target is _SET_GRAD:
            region = 0 if node.args[0] else len(roots) + 1
        found = {node}
        for argument, value in by_argument(node):
            if argument.alias_info is None:
                continue
            several = cast(list[Any], value if isinstance(value, (list, tuple)) else [value])
            behind = {root for v in several if isinstance(v, Node) for root in roots[v]}
            found |= behind
            for root in behind if argument.alias_info.is_write else ():
                kind, target = trace.inputs.get(root.name, ("", ""))
                if kind == "record":
                    refuse_writing(whole.model)
                if kind:
                    raise Untraceable(f"a pass changes {_own_name(target)}")
                if region and without_grad[root] != region:
                    raise Untraceable(
                        f"under torch.no_grad it writes to what was there before: {node.target}"
                    )
        if node.target is operator.getitem:
            found |= roots[node.args[0]]
        roots[node], without_grad[node] = found, region


def _detach_without_grad(graph: Graph) -> None:
    """Detach the results of regions under torch.no_grad, and remove their marks."""
    enabled = True
    inside: set[Node] = set()
    for node in list(graph.nodes):
        if node.target is _SET_GRAD:
            enabled = bool(node.args[0])
            graph.erase_node(node)
        elif not enabled and isinstance(node.meta.get("val"), Tensor):
            inside.add(node)
    for node in inside:
        users = [user for user in node.users if user not in inside]
        if users:
            with graph.inserting_after(node):
                made = graph.call_function(torch.ops.aten.detach.default, (node,))
            made.meta = dict(node.meta)
            for user in users:
                user.replace_input_with(node, made)


def _pool_before_relu(graph: Graph) -> None:
    """Move a ReLU after a max-pooling that is its only reader, where it has fewer numbers.

    Results and gradients are unchanged: a window's maximum is the same before and after a ReLU, or
    has no gradient. No window consists of padding: see record_safety.
    """
    for pool in list(graph.nodes):
        relu = pool.args[0] if str(pool.target) == "aten.max_pool2d.default" else None
        if not isinstance(relu, Node) or str(relu.target) != "aten.relu.default":
            continue
        if len(relu.users) == 1:
            pool.replace_input_with(relu, relu.args[0])
            with graph.inserting_after(pool):
                made = graph.call_function(cast(Any, relu.target))
            pool.replace_all_uses_with(made)
            made.args, made.meta = (pool,), dict(pool.meta)
            graph.erase_node(relu)


def _take_first_of_equal(graph: Graph) -> None:
    """Replace x.expand(B, ...)[:1] by x, of no batch: what a prompt is computed from."""
    for node in graph.nodes:
        if kind_of(node) != "slice" or node.args[1:] != (0, 0, 1):
            continue
        before = node.args[0]
        while kind_of(before) in ("to", "alias", "clone", "contiguous"):
            before = before.args[0]
        source = before.args[0] if kind_of(before) == "expand" else before
        form, same = (n.meta["val"] for n in (node, source))
        alike = str(form.shape) == str(same.shape) and form.dtype == same.dtype
        if source is not before and alike:
            node.replace_all_uses_with(source)


def _changes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _is_known(node: Node) -> bool:
    """Whether a node is an operation on tensors, or arithmetic of the batch's size."""
    if node.op != "call_function":
        return node.op == "placeholder"
    # A user's own operation may return a number.
    arithmetic = getattr(node.target, "__module__", "") in ("_operator", "math", "torch")
    ours = hasattr(node.target, "_schema") and str(node.target).startswith("aten.")
    return ours or (is_size(node) and arithmetic) or node.target is operator.getitem


def _own_name(name: str) -> str:
    return name.removeprefix("model.")


def _reason(error: Exception) -> str:
    """Return why there is no trace, with the model's line of code if it is in a file."""
    kind = type(error).__name__
    # The first line is the error; the others are advice for developers of the tracer.
    why = f"{kind}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
    if kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException"):
        why = "a branch on a value, or a number taken out of a tensor"
    if ".numpy() is not supported" in why:
        why = "numbers leave torch by .numpy(), so no gradient comes back"
    line = own_line(extract_tb(error.__traceback__))
    return f"{why} in {line}" if line else why


def own_line(lines: Iterable[FrameSummary]) -> str:
    """Return the last line of a traceback outside torch and this package; "" for none."""
    libraries = str(Path(torch.__path__[0])), str(Path(__file__).parents[2])
    own = [line for line in lines if not line.filename.startswith(libraries)]
    own = [line for line in own if Path(line.filename).is_file()]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}: {own[-1].line}" if own else ""
