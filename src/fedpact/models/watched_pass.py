"""Find the lines of a forward pass that may prevent private training.

A pass over made-up records is observed, operation by operation. Operations that mix records are
found with a record of NaN, which must not spread to other records. The tracer can handle some of
what is found, so these findings are only added to the error of a certain obstacle.
"""

import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from traceback import extract_stack
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedpact.common.errors import ModelError
from fedpact.common.losses import cross_entropy
from fedpact.common.params import keeping_modes
from fedpact.common.randomness.seeded import seeded_generator
from fedpact.per_sample.tracing.export import own_line
from fedpact.per_sample.tracing.trace_context import state_kept, while_tracing

_RECORDS: Final = 13  # hardly another dimension of a model is as long
_FEW: Final = 4
_BRANCH: Final = "a branch follows from values"
_NUMBER: Final = "a number leaves its tensor"
_STATE: Final = "a pass changes the model's own state"
_MIXED: Final = "records of a batch meet"
_ROUNDED: Final = "numbers are rounded by torch.autocast"
_REMEDIES: Final = {
    _BRANCH: "torch.where(condition, a, b) chooses for each record",
    _NUMBER: "compute with the tensor itself, a number for each record, as x.amax(1)",
    _STATE: "take that out, or find it from public records before and freeze it",
    _MIXED: "take means, sorts and the like within a record, from dimension 1 on",
    _ROUNDED: 'take it out; precision = "bf16" of a run computes so, and is checked for it',
}
_TAKEN: Final = {"__int__", "__float__", "__index__", "item", "tolist", "numpy", "__array__"}
_OF_LAYERS: Final = ("batch_norm", "instance_norm")


def find_in_pass(module: nn.Module, record: Tensor) -> Iterator[str]:
    """Yield what in a training pass may prevent private training, with its lines and a remedy.

    record: only its shape and type are used. The module is left unchanged.
    """
    x = torch.zeros(_RECORDS, *record.shape, dtype=record.dtype)
    draws = seeded_generator("watched pass")
    x = x.normal_(generator=draws) if x.is_floating_point() else x.random_(2, generator=draws) + 1
    found = dict[str, list[str]]()
    for marked in (False, True):
        for what, line in _watch(module, x.clone(), marked=marked):
            lines = found.setdefault(what, [])
            if line not in lines:
                lines.append(line)
    for what, remedy in _REMEDIES.items():
        if lines := found.get(what):
            more = f" and {len(lines) - _FEW} more" * (len(lines) > _FEW)
            yield f"{what} ({'; '.join(lines[:_FEW])}{more}): {remedy}"


def with_lines(error: ModelError, module: nn.Module, record: Tensor) -> ModelError:
    """Return an error with the findings of `find_in_pass` added."""
    seen, first = list(find_in_pass(module, record)), str(error)
    told = "".join(f"\n{number}. {one}" for number, one in enumerate(seen, 1))
    for line in re.findall(r"([^\s(]+, line \d+: .*?)(?:; | and \d+ more|\): )", told):
        # Each line is named once, with its remedy.
        first = first.replace(f" in {line})", ")")
    whose = "; where a line is a library's own, choose another of its models"
    also = f"\nLines of a pass to look at, each with what to do{whose}:{told}" if seen else ""
    return ModelError(first + also)


def _watch(module: nn.Module, x: Tensor, *, marked: bool) -> list[tuple[str, str]]:
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    held = {n: v.detach().clone().requires_grad_(v.requires_grad) for n, v in held.items()}
    if marked and x.is_floating_point():
        x[0] = torch.nan
    watch = _Watch(held.values(), x, marked=marked)
    with torch.random.fork_rng(devices=[]), keeping_modes(module), state_kept(module):
        module.train()
        for layer in module.modules():
            # BatchNorm is reported as a layer; training, it would hide all later findings.
            layer.training &= not hasattr(layer, "track_running_stats")
        try:
            with while_tracing(module, cross_entropy), watch:
                torch.func.functional_call(module, held, (x,))
        except Exception:  # the findings before it are reported
            pass
    return watch.notes


class _Watch(TorchFunctionMode):
    """Collect findings. state: a model's tensors. x: records [B, ...]. marked: x[0] is NaN."""

    def __init__(self, state: Collection[Tensor], x: Tensor, *, marked: bool) -> None:
        super().__init__()
        self.notes: list[tuple[str, str]] = []
        # Values that depend on records or weights; kept alive, so that ids stay unique.
        self._known = {id(v): v for v in (x, *(v for v in state if v.requires_grad))}
        self._spoiled = dict[int, Tensor]()
        self._state = {v.untyped_storage().data_ptr() for v in state}
        self._marked, self._waiting = marked, marked and not x.is_floating_point()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """See TorchFunctionMode."""
        del types
        named = kwargs or {}
        given = list(_tensors((args, named)))
        versions = [0 if v.is_inference() else v._version for v in given]
        found = func(*args, **named)
        name = getattr(func, "__name__", "")
        follows = any(id(v) in self._known for v in given)
        if follows and (name in _TAKEN or name == "__bool__"):
            self._note(_BRANCH if name == "__bool__" else _NUMBER)
        for v, version in zip(given, versions, strict=True):
            changed = not v.is_inference() and v._version != version
            if changed and v.untyped_storage().data_ptr() in self._state:
                self._note(_STATE, layers=False)
        if torch.is_autocast_enabled("cpu"):
            self._note(_ROUNDED)
        if follows:
            made = list(_tensors(found))
            self._known.update((id(v), v) for v in made)
            if self._marked:
                self._look(name, given, made)
        return found

    def _look(self, name: str, given: list[Tensor], made: list[Tensor]) -> None:
        """Note an operation that spreads the first record's NaN to another record."""
        for v in made:
            whole = not all(g.is_floating_point() for g in given)
            if self._waiting and whole and v.is_floating_point() and v.shape[:1] == (_RECORDS,):
                with torch.no_grad():
                    v[0] = torch.nan
                self._waiting = False
            if not v.is_floating_point():
                continue
            lost = v.isnan()
            # If the batch is not the first dimension: a sum over it makes everything NaN.
            leading = v.shape[:1] == (_RECORDS,)
            if not bool(lost[1:].any() if leading else lost.all() and v.numel()):
                continue
            layer = any(kind in name for kind in _OF_LAYERS)
            if not layer and not any(id(g) in self._spoiled for g in given):
                self._note(_MIXED)
            self._spoiled[id(v)] = v

    def _note(self, what: str, *, layers: bool = True) -> None:
        """Note the current line of the user's code. layers: also if a layer of torch runs."""
        stack = [frame for frame in extract_stack() if frame.filename != __file__]
        if layers or not stack[-1].filename.startswith(str(Path(torch.__path__[0]))):
            line = own_line(stack)
            self.notes += [(what, line)] if line else []


def _tensors(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, list | tuple | dict):
        parts = cast(Any, thing)
        for part in parts.values() if isinstance(thing, dict) else parts:
            yield from _tensors(part)
