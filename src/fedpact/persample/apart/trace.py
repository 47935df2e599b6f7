"""Tracing: a model and its loss as a list of operations on tensors.

torch.export runs both on made-up records that have a form and no values. It refuses a branch on
values or, where the batch has no fixed size, on its length, and freezes Python's state: what runs
afterwards is what was traced.
"""

import copy
import importlib
import io
import logging
import operator
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from pathlib import Path
from traceback import extract_tb
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fedpact.losses import Loss
from fedpact.params import FlatModel, model_name, refuse_writing
from fedpact.persample.apart.cells import CELLS
from fedpact.persample.apart.instead import INSTEAD
from fedpact.persample.apart.places import is_size
from fedpact.persample.apart.quiet import Untraceable, by_argument, put_in_place
from fedpact.persample.apart.seen import masks_unseen, sizes_by_len
from fedpact.persample.apart.unsafe import follow, unsafe

# torch's tracer is no more than one thread's at a time.
_TRACING = threading.Lock()
_MADE_UP = 3
_PATIENCE = 15.0  # seconds of tracing, until who waits is told
_logger = logging.getLogger("fedpact")


class _WithLoss(nn.Module):
    """Losses [B] of records x, y, as one module."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = module, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.model(x), y)


def _exported(module: nn.Module, loss: Loss, x: Tensor, y: Tensor, batch: int | None) -> Any:
    """The exported program of module and loss for records of the form of x, y [n, ...].

    batch: a fixed size, None for any. Raises Untraceable.
    """
    size = batch or _MADE_UP
    if any(isinstance(m, torch.jit.ScriptModule) for m in module.modules()):
        raise Untraceable(
            "it is TorchScript, which cannot be looked into; hand in the module it was made of"
        )
    forms = [v.new_zeros((size, *v.shape[1:])) for v in (x, y)]
    any_size = torch.export.Dim("batch", min=2)
    dynamic = None if batch else ({0: any_size}, {0: any_size})
    # What a module writes on itself while it is traced has no values, and is forgotten.
    held = [(vars(m), dict(vars(m))) for m in module.modules()]
    with (
        _TRACING,
        _quiet(),
        _kept(batch),
        sizes_by_len(module, loss),
        masks_unseen(),
        warnings.catch_warnings(),
    ):
        # Of torch about itself. Other threads may lose a warning meanwhile, and nothing else.
        warnings.simplefilter("ignore")
        try:
            # As in training: without gradients some layers take ways that have none.
            with torch.enable_grad():
                program = torch.export.export(
                    _WithLoss(module, loss), tuple(forms), dynamic_shapes=dynamic, strict=False
                )
            put_in_place(program)
            nodes = program.graph.nodes
            cells = {n.target: CELLS[n.target] for n in nodes if n.target in CELLS}
            if cells or any(_changes(node) for node in nodes):
                program = cast(Any, program).run_decompositions(cells)
                _form_anew(program)
        except Untraceable:
            raise
        except Exception as error:
            raise Untraceable(_reason(error)) from error
        finally:
            for state, before in held:
                state.clear()
                state.update(before)
    signature = program.graph_signature
    if signature.user_inputs_to_mutate:
        refuse_writing(module)
    kinds = ("buffers_to_mutate", "parameters_to_mutate")
    changed = [name for kind in kinds for name in getattr(signature, kind, {}).values()]
    if changed:
        raise Untraceable(f"a pass changes {', '.join(map(_own_name, changed))}")
    left = [str(n.target) for n in program.graph.nodes if _changes(n)]
    if left:
        raise Untraceable(f"{left[0]} changes a tensor in place")
    return program


def _reason(error: Exception) -> str:
    """Return why there is no trace, and at which line of whose model, where a file has it."""
    kind = type(error).__name__
    # The first line says what; the others advise whoever develops models for this tracer.
    why = f"{kind}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
    if kind == "GuardOnDataDependentSymNode":
        why = "a branch on a value, or a number taken out of a tensor"
    libraries = str(Path(torch.__path__[0])), str(Path(__file__).parents[2])
    lines = [line for line in extract_tb(error.__traceback__) if Path(line.filename).is_file()]
    own = [line for line in lines if not line.filename.startswith(libraries)]
    if not own:
        return why
    return f"{why} in {Path(own[-1].filename).name}, line {own[-1].lineno}: {own[-1].line}"


def _form_anew(program: Any) -> None:
    """Work out the forms of all values once more: decomposed, torch has some of them wrong."""
    given = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"]
    forms = FakeTensorProp(program.graph_module, given[0].fake_mode)
    forms.propagate_dont_convert_inputs(*given)


@contextmanager
def _told(module: nn.Module) -> Generator[None]:
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


def _kept(batch: int | None) -> AbstractContextManager[Any]:
    """Have torch keep the forms that operations gave only where sizes are numbers.

    The form of a batch of any size is of its own trace, where hardly any comes up again: to keep
    them was a third of the time.
    """
    config = importlib.import_module("torch._dynamo.config")
    return cast(Any, config).patch(fake_tensor_cache_enabled=batch is not None)


class _Others(io.TextIOBase):
    """Standard error, but for what this thread writes there: others may have to say something."""

    def __init__(self) -> None:
        self._own, self._kept = threading.get_ident(), sys.stderr

    def write(self, text: str, /) -> int:
        return len(text) if threading.get_ident() == self._own else self._kept.write(text)


class _quiet:
    """Without what the tracer tells whoever develops models for it, and prints of its trace."""

    _LOGGERS = ("torch.export", "torch.fx", "torch._dynamo", "torch._export", "torch._subclasses")

    def __enter__(self) -> None:
        self._printed = redirect_stderr(_Others())
        self._printed.__enter__()
        self._before = [(n, logging.getLogger(n).level) for n in self._LOGGERS]
        for name, _ in self._before:
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def __exit__(self, *_: object) -> None:
        self._printed.__exit__(None, None, None)
        for name, level in self._before:
            logging.getLogger(name).setLevel(level)


def _changes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _own_name(name: str) -> str:
    return name.removeprefix("model.")


class Program:
    """A traced model with its loss, for records of the form of x, y [n, ...].

    batch: a fixed size, None for any. inputs: of each placeholder, what it is and whose, as
    ("parameter", its name behind "model." or "loss.") or ("record", "x"). names: the trained
    parameters' names, by any of the names that inputs have for them. entered: the nodes that
    records enter. Raises Untraceable.
    """

    def __init__(
        self, model: FlatModel, loss: Loss, x: Tensor, y: Tensor, batch: int | None
    ) -> None:
        with _told(model.module):
            program = _exported(model.module, loss, x, y, batch)
        self._whole = _WithLoss(model.module, loss)
        # As they were: a pass that is not traced, as an evaluation, may write over a global tensor.
        self._constants = copy.deepcopy(program.constants)
        of_parameter = {id(p): n for n, p in model.module.named_parameters() if n in model.own}
        every = model.module.named_parameters(remove_duplicate=False)
        self.names = {f"model.{n}": of_parameter[id(p)] for n, p in every if id(p) in of_parameter}
        self.nodes: list[Node] = list(program.graph.nodes)
        self.result = cast(Any, self.nodes.pop().args[0])[0]
        strange = [str(n.target) for n in self.nodes if not _known(n)]
        if strange:
            # Transformations of functions and the like, which would run code of their own.
            raise Untraceable(f"{strange[0]} is no operation on tensors")
        self.inputs = _inputs(program)
        records = [name for name, (kind, _) in self.inputs.items() if kind == "record"]
        self.entered = follow(self.nodes, records)
        if (told := unsafe(self.nodes, self.entered)) is not None:
            raise Untraceable(told)

    def given(self, name: str) -> Tensor:
        """What a placeholder that holds no records stands for now."""
        kind, target = self.inputs[name]
        if kind == "parameter":
            return self._whole.get_parameter(target).detach()
        return self._whole.get_buffer(target) if kind == "buffer" else self._constants[target]

    def values(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """What the placeholders stand for with the records x, y."""
        of = {"x": x.detach(), "y": y.detach()}
        return {
            name: of[target] if kind == "record" else self.given(name)
            for name, (kind, target) in self.inputs.items()
        }

    @property
    def draws(self) -> bool:
        """Whether a pass draws random numbers."""
        return any(map(draws, self.nodes))

    def losses(self, x: Tensor, y: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """The losses [B] at the weights, by the model's names."""
        values = self.values(x, y)
        for name, (kind, target) in self.inputs.items():
            if kind == "parameter" and target in self.names:
                values[name] = weights[self.names[target]]
        return evaluated(self.nodes, values)[self.result]


def draws(node: Node) -> bool:
    """Whether a node draws random numbers; what is told to drop at a rate of 0 does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    told = {one.name: one.default_value for one in cast(Any, node.target)._schema.arguments}
    told |= {one.name: value for one, value in by_argument(node)}
    rate = next((told[name] for name in ("p", "dropout", "dropout_p") if name in told), 1)
    return rate != 0 and told.get("train", True) is not False


def _known(node: Node) -> bool:
    """Whether a node is an operation on tensors, or arithmetic of the batch's size."""
    if node.op != "call_function":
        return node.op in ("placeholder", "get_attr")
    # An operation of a user's own may give a number as well.
    arithmetic = getattr(node.target, "__module__", "") in ("_operator", "math", "torch")
    sized = is_size(node) and arithmetic
    own = hasattr(node.target, "_schema") and str(node.target).startswith("aten.")
    return own or sized or node.target is operator.getitem or node.target in INSTEAD


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
    """What a node does; of some operations the same, in a way that can always be done."""
    if node.op == "get_attr":
        held = operator.attrgetter(str(node.target))(node.graph.owning_module)
        return lambda: held
    return INSTEAD.get(cast(Any, node.target)) or cast(Callable[..., Any], node.target)


def arguments(node: Node, env: dict[Node, Any]) -> tuple[Any, Any]:
    """A node's arguments, by place and by name, with values for nodes."""
    return (
        torch.fx.map_arg(node.args, env.__getitem__),
        torch.fx.map_arg(node.kwargs, env.__getitem__),
    )


def _inputs(program: Any) -> dict[str, tuple[str, str]]:
    kinds = torch.export.graph_signature.InputKind
    names = {kinds.PARAMETER: "parameter", kinds.BUFFER: "buffer"}
    found: dict[str, tuple[str, str]] = {}
    records = iter("xy")
    for spec in program.graph_signature.input_specs:
        if spec.kind == kinds.USER_INPUT:
            found[spec.arg.name] = "record", next(records)
        elif spec.kind in names:
            found[spec.arg.name] = names[spec.kind], spec.target
        else:
            found[spec.arg.name] = "constant", spec.target
    return found
