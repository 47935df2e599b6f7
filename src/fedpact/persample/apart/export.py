"""Tracing: a model and its loss as a list of operations on tensors.

Both run once, on made-up records that have a form and no values, before any record is read. A
branch on values cannot be taken; nor, where the batch has no fixed size, one on its length. The
state of Python is frozen: what runs afterwards is what was traced. A trace holds names of weights
and not weights, so one serves every model of the same code and form in this process.
"""

import logging
import operator
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from traceback import FrameSummary, extract_tb
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch._export.utils import (
    _compiling_state_context,  # pyright: ignore[reportPrivateUsage]
)
from torch.fx import Graph, Node
from torch.nn.modules import transformer
from torch.nn.modules.transformer import (
    _detect_is_causal_mask,  # pyright: ignore[reportPrivateUsage]
)

from fedpact.losses import Loss
from fedpact.own.digests import digest_of_form
from fedpact.params import FlatModel, model_name, refuse_writing
from fedpact.persample.apart.places import State, is_size
from fedpact.persample.apart.replacements import DONE_AS, STANDS_FOR, TRACED_AS
from fedpact.persample.apart.separable import states
from fedpact.persample.apart.unsafe import by_argument, follow, unsafe

_TRACING: Final = threading.RLock()  # torch's tracer is no more than one thread's at a time
_BATCH: Final = 3  # records in a made-up batch
_PATIENCE: Final = 15.0  # seconds of tracing until the log says so
_KEPT: Final = 64  # traces of this process
_SET_GRAD: Final = cast(Any, torch)._C._set_grad_enabled
_logger = logging.getLogger("fedpact")


class Untraceable(Exception):
    """A model cannot be traced, with the reason."""


@dataclass(frozen=True, eq=False)
class _Trace:
    """A traced model and loss.

    inputs: of each placeholder, what it is and whose, as ("parameter", "model.0.weight"),
    ("buffer", "model.mean"), ("constant", the placeholder's own name) or ("record", "x").
    """

    nodes: list[Node]
    result: Node
    inputs: dict[str, tuple[str, str]]
    constants: dict[str, Tensor]

    @cached_property
    def records(self) -> set[str]:
        return {name for name, (kind, _) in self.inputs.items() if kind == "record"}

    @cached_property
    def entered(self) -> set[Node]:
        return follow(self.nodes, self.records)

    @cached_property
    def states(self) -> dict[Node, State]:
        return states(self.nodes, self.records)


class Program:
    """A traced model with its loss, for records of the form of x, y [n, ...].

    batch: a fixed size, None for any. inputs: of each placeholder, what it is and whose, as
    ("parameter", "model.0.weight") or ("record", "x"). names: the trained parameters' names in the
    model, by those that inputs have. entered: the nodes that records enter. Raises Untraceable.
    """

    def __init__(
        self, model: FlatModel, loss: Loss, x: Tensor, y: Tensor, batch: int | None
    ) -> None:
        self._trace = trace = _traced(_WithLoss(model.module, loss), x, y, batch)
        whole = _WithLoss(model.module, loss)
        self._held = {"parameter": whole.get_parameter, "buffer": whole.get_buffer}
        trained = {id(p): n for n, p in model.module.named_parameters() if n in model.own}
        every = whole.named_parameters(remove_duplicate=False)
        self.names = {name: trained[id(p)] for name, p in every if id(p) in trained}
        self.nodes, self.result, self.inputs = trace.nodes, trace.result, trace.inputs
        self.entered = trace.entered

    @property
    def states(self) -> dict[Node, State]:
        """Where every node has the batch; see separable. Raises Mixed."""
        return self._trace.states

    @property
    def draws(self) -> bool:
        """Whether a pass draws random numbers."""
        return any(map(draws, self.nodes))

    def given(self, name: str) -> Tensor:
        """What a placeholder that holds no records stands for now."""
        kind, target = self.inputs[name]
        if kind == "constant":
            return self._trace.constants[target]
        return self._held[kind](target).detach()

    def values(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """What the placeholders stand for with the records x, y."""
        of = {"x": x.detach(), "y": y.detach()}
        return {
            name: of[target] if kind == "record" else self.given(name)
            for name, (kind, target) in self.inputs.items()
        }

    def losses(self, x: Tensor, y: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """The losses [B] at the weights, by the model's names."""
        values = self.values(x, y)
        for name, (kind, target) in self.inputs.items():
            if kind == "parameter" and target in self.names:
                values[name] = weights[self.names[target]]
        return evaluated(self.nodes, values)[self.result]


# ---------------------------------------------------------------- what runs


def evaluated(nodes: list[Node], values: Mapping[str, Tensor]) -> dict[Node, Any]:
    """The values of nodes in order, from those of the placeholders among them."""
    env: dict[Node, Any] = {}
    for node in nodes:
        if node.op == "placeholder":
            env[node] = values[node.name]
        else:
            args, kwargs = arguments(node, env)
            env[node] = operation(node)(*args, **kwargs)
    return env


def operation(node: Node) -> Callable[..., Any]:
    """What is done for a node."""
    return DONE_AS.get(cast(Any, node.target)) or cast(Callable[..., Any], node.target)


def arguments(node: Node, env: dict[Node, Any]) -> tuple[Any, Any]:
    """A node's arguments, by place and by name, with values for nodes."""
    return (
        torch.fx.map_arg(node.args, env.__getitem__),
        torch.fx.map_arg(node.kwargs, env.__getitem__),
    )


def draws(node: Node) -> bool:
    """Whether a node draws random numbers; what is told to drop at a rate of 0 does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    options = {a.name: a.default_value for a in cast(Any, node.target)._schema.arguments}
    options |= {argument.name: value for argument, value in by_argument(node)}
    rate = next((options[name] for name in ("p", "dropout", "dropout_p") if name in options), 1)
    return rate != 0 and options.get("train", True) is not False


# ---------------------------------------------------------------- tracing


class _WithLoss(nn.Module):
    """Losses [B] of records x, y, as one module."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = module, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = self.loss(self.model(x), y)
        vars(self)["after"] = self.tensors()
        return losses

    def replaced(self, given: Mapping[str, Tensor]) -> str | None:
        """The name of a tensor that is another than what was given."""
        now: dict[str, Tensor] = vars(self).pop("after")
        return next((n for n in {*now, *given} if now.get(n) is not given.get(n)), None)

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, one that has several by its first."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}


_traces: dict[object, _Trace | str] = {}


def _traced(whole: _WithLoss, x: Tensor, y: Tensor, batch: int | None) -> _Trace:
    """The trace of this process for a model of this form, made if there is none yet."""
    if any(isinstance(m, torch.jit.ScriptModule) for m in whole.modules()):
        raise Untraceable(
            "it is TorchScript, which cannot be looked into; hand in the module it was made of"
        )
    with _TRACING:
        # Of what lasts: what cannot be told by looking at it is traced each time.
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


def _trace(whole: _WithLoss, x: Tensor, y: Tensor, batch: int | None) -> _Trace:
    with _announced(whole.model), _while_tracing(whole), warnings.catch_warnings():
        # Of torch about itself. Other threads may lose a warning meanwhile, and nothing else.
        warnings.simplefilter("ignore")
        recorded = _recorded(whole, x, y, batch, functional=False)
        if any(map(_changes, recorded.graph.nodes)):
            _check_writes(whole, recorded)
            recorded = _recorded(whole, x, y, batch, functional=True)
    graph = recorded.graph
    _detach_without_grad(graph)
    *nodes, output = graph.nodes
    (result,) = output.all_input_nodes or (None,)
    if result is None:
        raise Untraceable("its losses follow from no operation")
    # Nothing in a trace writes, so what no result depends on is neither run nor looked at.
    needed = {result}
    for node in reversed(nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    nodes = [node for node in nodes if node.op == "placeholder" or node in needed]
    for node in nodes:
        node.target = STANDS_FOR.get(node.target, node.target)
        if _changes(node):
            raise Untraceable(f"{node.target} changes a tensor in place")
        if not _known(node):
            # Transformations of functions and the like, which would run code of their own.
            raise Untraceable(f"{node.target} is no operation on tensors")
    trace = _Trace(nodes, result, recorded.inputs, recorded.constants)
    if (why := unsafe(nodes, trace.entered)) is not None:
        raise Untraceable(why)
    return trace


@dataclass(frozen=True)
class _Recorded:
    """A graph as torch recorded it; inputs and constants as of _Trace."""

    graph: Graph
    inputs: dict[str, tuple[str, str]]
    constants: dict[str, Tensor]


def _recorded(
    whole: _WithLoss, x: Tensor, y: Tensor, batch: int | None, *, functional: bool
) -> _Recorded:
    """Run model and loss on made-up records. functional: write nothing in place.

    Raises Untraceable.
    """
    # Here, as torch's tracer takes a second to import, which most commands do without.
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
    fake.cache_enabled = False  # of forms, of which hardly any comes up again: a third of the time

    def made_up(tensor: Tensor, first: DimDynamic = DimDynamic.STATIC) -> Tensor:
        dims = [first, *[DimDynamic.STATIC] * (tensor.dim() - 1)][: tensor.dim()]
        context = cast(Any, StatelessSymbolicContext)(dims)
        return fake.from_tensor(tensor, symbolic_context=context)

    def run(tensors: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        given = dict(zip(held, tensors, strict=True))
        losses = torch.func.functional_call(whole, given, (x, y))
        if (name := whole.replaced(given)) is not None:
            raise Untraceable(f"a pass changes {_own_name(name)}")
        return losses

    held = whole.tensors()
    weights = [made_up(tensor) for tensor in held.values()]
    # Of one size, which is any size from 2 on.
    first = DimDynamic.STATIC if batch else DimDynamic.DUCK
    records = [made_up(v.new_zeros(batch or _BATCH, *v.shape[1:]), first) for v in (x, y)]
    mode = FunctionalTensorMode(pre_dispatch=True, export=True)
    traced = dispatch_functionalize(run, mode) if functional else run
    try:
        # As in training: without gradients some layers take ways that have none.
        # Where torch has a way for any size beside one for some sizes, it takes the first.
        any_size = cast(Any, shapes).patch(backed_size_oblivious=True)
        with any_size, enable_python_dispatcher(), fake, torch.enable_grad(), _state_of(whole):
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
    return _with_constants(made, [*_kinds(whole, held), ("record", "x"), ("record", "y")], made_up)


def _kinds(whole: _WithLoss, held: Iterable[str]) -> Iterator[tuple[str, str]]:
    parameters = dict(whole.named_parameters())
    for name in held:
        yield ("parameter" if name in parameters else "buffer"), name


def _with_constants(
    made: Any, kinds: list[tuple[str, str]], form: Callable[[Tensor], Tensor]
) -> _Recorded:
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
        # As it was: a pass that is not traced, as an evaluation, may write over a global tensor.
        constants[one.name] = value.detach().clone()
        one.meta["val"] = form(constants[one.name])
        inputs[one.name] = "constant", one.name
        node.replace_all_uses_with(one)
        graph.erase_node(node)
    return _Recorded(graph, inputs, constants)


def _check_writes(whole: _WithLoss, recorded: _Recorded) -> None:
    """Look at what a trace writes to in place.

    Raises ModelError where it is a record; Untraceable where it outlasts the pass, so that what one
    record leaves would meet the next, or where gradients would not see it.
    """
    roots: dict[Node, set[Node]] = {}
    without_grad, region = dict[Node, int](), 0
    for node in recorded.graph.nodes:
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
                kind, target = recorded.inputs.get(root.name, ("", ""))
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
    """Detach what leaves a part under torch.no_grad, and take its marks out of the graph."""
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


def _changes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _known(node: Node) -> bool:
    """Whether a node is an operation on tensors, or arithmetic of the batch's size."""
    if node.op != "call_function":
        return node.op == "placeholder"
    # An operation of a user's own may give a number as well.
    arithmetic = getattr(node.target, "__module__", "") in ("_operator", "math", "torch")
    ours = hasattr(node.target, "_schema") and str(node.target).startswith("aten.")
    return ours or (is_size(node) and arithmetic) or node.target is operator.getitem


def _own_name(name: str) -> str:
    return name.removeprefix("model.")


def _reason(error: Exception) -> str:
    """Return why there is no trace, and at which line of whose model, where a file has it."""
    kind = type(error).__name__
    # The first line says what; the others advise whoever develops models for this tracer.
    why = f"{kind}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
    if kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException"):
        why = "a branch on a value, or a number taken out of a tensor"
    return why + _place(extract_tb(error.__traceback__))


def _place(lines: Iterable[FrameSummary]) -> str:
    """The last line of a traceback that is neither torch's nor ours."""
    libraries = str(Path(torch.__path__[0])), str(Path(__file__).parents[2])
    own = [line for line in lines if not line.filename.startswith(libraries)]
    own = [line for line in own if Path(line.filename).is_file()]
    return (
        f" in {Path(own[-1].filename).name}, line {own[-1].lineno}: {own[-1].line}" if own else ""
    )


# ---------------------------------------------------------------- around a trace


@contextmanager
def _announced(module: nn.Module) -> Generator[None]:
    """Say what goes on where it takes long, as of a loop over many positions."""
    words = (
        "model %s is being traced, once, which takes long where Python goes over many positions: "
        "a layer that does so itself, as nn.LSTM does and nn.LSTMCell does not, takes no time"
    )
    timer = threading.Timer(_PATIENCE, _logger.warning, (words, model_name(module)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _state_of(whole: nn.Module) -> Generator[None]:
    """Have modules as they were afterwards: what a trace writes on them has no values."""
    inner = ("_parameters", "_buffers", "_modules")
    states = [vars(m) for m in whole.modules()]
    states += [state[name] for state in states for name in inner]
    before = [dict(state) for state in states]
    try:
        yield
    finally:
        for state, held in zip(states, before, strict=True):
            state.clear()
            state.update(held)


@contextmanager
def _while_tracing(whole: _WithLoss) -> Generator[None]:
    """Let models find a tracer at work, `len(x)` be any number, and masks not be looked into.

    Many models ask torch.compiler.is_compiling() before they look at values. Python's own len has
    to give a number, so a model that calls it would be traced for batches of one size alone: within
    the files of the model it is x.shape[0]. torch's transformers look whether a mask is the causal
    one, for which there is a faster way to the same; a branch on its values would end the trace.
    """
    functions = [vars(m).get("forward", type(m).forward) for m in whole.model.modules()]
    scopes = [getattr(f, "__globals__", {}) for f in (*functions, whole.loss)]
    own = {id(s): s for s in scopes if s and not str(s.get("__name__")).startswith("torch.")}
    changed = [s for s in own.values() if "len" not in s]
    name, thread = _detect_is_causal_mask.__name__, threading.get_ident()

    def causal(mask: Any, is_causal: bool | None = None, *size: Any, **named: Any) -> bool:
        if threading.get_ident() == thread:
            return is_causal is True
        return _detect_is_causal_mask(mask, is_causal, *size, **named)

    try:
        for scope in changed:
            scope["len"] = _size
        setattr(transformer, name, causal)
        with _compiling_state_context():
            yield
    finally:
        for scope in changed:
            del scope["len"]
        setattr(transformer, name, _detect_is_causal_mask)


def _size(of: Any) -> Any:
    size = of.shape[0] if isinstance(of, Tensor) and of.dim() else None
    return size if isinstance(size, torch.SymInt) else len(of)
