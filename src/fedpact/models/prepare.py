"""Find everything in a model that prevents private training, and fix what can be fixed.

    prepared = fedpact.prepare(model, batch_norm="group")
    fedpact.run(prepared.model, data, ...)

Changes that leave the results the same are made without asking. BatchNorm, which mixes the records
of a batch, is replaced on request.

A pass over made-up records is observed, operation by operation. Operations that mix records are
found with a record of NaN, which must not spread to other records. The tracer can handle some of
what is found, so these findings are only added to the error of a certain obstacle.
"""

import copy
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_stack
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from fedpact.common.errors import InputError, ModelError
from fedpact.common.format import list_some
from fedpact.common.losses import cross_entropy
from fedpact.common.params import keeping_modes
from fedpact.common.randomness.seeded import seeded_generator
from fedpact.models.hugging_face import with_named_inputs
from fedpact.models.zoo import replace_batchnorm
from fedpact.per_sample.tracing.export import own_line
from fedpact.per_sample.tracing.independence import MIXING
from fedpact.per_sample.tracing.trace_context import state_kept, while_tracing

_FEW: Final = 3


@dataclass(frozen=True)
class Prepared:
    """A prepared model. done: what was changed. left: remaining obstacles with their remedies."""

    model: nn.Module
    done: tuple[str, ...]
    left: tuple[str, ...]

    def __str__(self) -> str:
        """Return done and left as lines."""
        done = [f"done: {one}" for one in self.done] or ["nothing had to be done"]
        return "\n".join([*done, *(f"left: {one}" for one in self.left)])


def prepare(
    model: nn.Module,
    *,
    batch_norm: Literal["group"] | None = None,
    records: Tensor | None = None,
) -> Prepared:
    """Return a copy of a model that is ready for private training, as far as possible.

    Without asking it only makes changes that leave the result the same: no writing in place,
    float32, no checkpointing, and attention or experts that can be traced. batch_norm: "group"
    replaces each BatchNorm by a GroupNorm. records: a few [B, ...], for their shape and type; with
    them the lines of a forward pass are listed, too. Raises InputError: another batch_norm.
    """
    if batch_norm not in (None, "group"):
        raise InputError(f"batch_norm is {batch_norm!r}: expected 'group', or leave it out")
    model = copy.deepcopy(model)
    done = list(_change_alike(model))
    if batch_norm and (names := _list_names(model, lambda layer: isinstance(layer, BatchNorm))):
        model = replace_batchnorm(model)
        done.append(f"GroupNorm in place of BatchNorm: {list_some(names, _FEW)}")
    left = list(find_obstacles(model))
    if records is not None:
        left += find_in_pass(with_named_inputs(copy.deepcopy(model), records[0]), records[0])
    return Prepared(model, tuple(done), tuple(left))


def find_obstacles(model: nn.Module) -> Iterator[str]:
    """Yield what prevents private training of a model, each with its remedy."""
    for holds, told in _OBSTACLES:
        if names := _list_names(model, holds):
            yield told.format(list_some(names, _FEW))
    others = {
        str(p.dtype)
        for p in model.parameters()
        if p.requires_grad and p.dtype not in (torch.float32, torch.float64)
    }
    if complexes := sorted(kind for kind in others if "complex" in kind):
        yield (
            f"weights are {', '.join(complexes)}: hold real numbers [..., 2] in their place, as "
            "nn.Parameter(torch.view_as_real(w)), and take torch.view_as_complex of them in forward"
        )
    if others := others.difference(complexes):
        yield (
            f"weights are {', '.join(sorted(others))}: make them float32, as fedpact.prepare(model)"
            " or model.float() do"
        )
    held = (*model.named_parameters(), *model.named_buffers())
    if names := [name for name, tensor in held if tensor.layout != torch.strided]:
        yield f"tensors are sparse ({list_some(names, _FEW)}): make them dense, as by .to_dense()"
    if names := [name for name, tensor in held if tensor.is_meta]:
        few = list_some(names, _FEW)
        yield f"tensors have a form and no values ({few}): build them on a device"
    if names := list(_in_lists(model)):
        yield (
            "layers in a list or dict of Python are not the model's, so they are neither trained "
            f"nor stored ({list_some(names, _FEW)}): hold them in nn.ModuleList or nn.ModuleDict, "
            "or give a teacher, which the run need not store, a name that begins with _"
        )
    if not any(p.requires_grad for p in model.parameters()):
        yield "no weight is trained: set requires_grad on at least one"


def join_obstacles(found: list[str]) -> str:
    """Return obstacles as the part of an error after "cannot be trained"."""
    if len(found) == 1:
        return f": {found[0]}"
    told = "".join(f"\n{number}. {one}" for number, one in enumerate(found, 1))
    return f", for {len(found)} reasons, each with what to do:{told}"


def _in_lists(model: nn.Module) -> Iterator[str]:
    """Yield attributes that hold layers with weights where torch does not look for them.

    A name that begins with _ may do so on purpose, as for a teacher.
    """
    known = {*model.modules()}
    for name, layer in model.named_modules():
        for key, held in vars(layer).items():
            parts: Any = held.values() if isinstance(held, dict) else held
            if key.startswith("_") or not isinstance(held, list | tuple | dict):
                continue
            layers = (one for one in parts if isinstance(one, nn.Module) and one not in known)
            if any([*one.parameters()] for one in layers):
                yield f"{name}.{key}".removeprefix(".")


def _mixes_by_group(layer: nn.Module) -> bool:
    kind = getattr(getattr(layer, "config", None), "_experts_implementation", None)
    return kind == "grouped_mm" and hasattr(layer, "set_experts_implementation")


def _iterates(layer: nn.Module) -> bool:
    """Whether a layer has a spectral norm, as a hook or a parametrisation."""
    hooks: list[Any] = list(cast(Any, layer)._forward_pre_hooks.values())
    parametrized: Any = layer if parametrize.is_parametrized(layer) else None
    parts = () if parametrized is None else parametrized.parametrizations.values()
    every = [*hooks, *(one for several in cast(Any, parts) for one in several)]
    return any("SpectralNorm" in type(one).__name__ for one in every) and layer.training


def _skips_layers(layer: nn.Module) -> bool:
    return any(
        isinstance(rate := getattr(of, name, 0.0), float) and rate > 0
        for of in (
            layer,
            getattr(layer, "config", None) if "coder" in type(layer).__name__ else None,
        )
        for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
    )


def _masks_spans(layer: nn.Module) -> bool:
    """Whether it is a model that hides parts of a recording in training (SpecAugment)."""
    config: Any = getattr(layer, "config", None)
    rates = [getattr(config, f"mask_{axis}_prob", 0) for axis in ("time", "feature")]
    masks = hasattr(layer, "_mask_hidden_states") or hasattr(layer, "_mask_input_features")
    return masks and any(rates) and bool(getattr(config, "apply_spec_augment", True))


_OBSTACLES: Final[tuple[tuple[Callable[[nn.Module], bool], str], ...]] = (
    *MIXING,
    (
        _mixes_by_group,
        "experts are computed by grouped_mm, for all records at once ({}): fedpact.prepare(model) "
        "or set_experts_implementation('batched_mm')",
    ),
    (
        _iterates,
        "spectral norm changes a vector of its own in every pass ({}): "
        "torch.nn.utils.remove_spectral_norm(layer), or of a parametrisation "
        "parametrize.remove_parametrizations(layer, 'weight')",
    ),
    (
        _skips_layers,
        "whole layers are skipped by chance for the batch at once ({}): set config.layerdrop = "
        "config.encoder_layerdrop = config.decoder_layerdrop = 0.0 before the model is built",
    ),
    (
        _masks_spans,
        "parts of recordings are hidden by numpy's random numbers for the batch at once ({}): set "
        "config.apply_spec_augment = False before the model is built",
    ),
    (
        lambda layer: any(kind.__name__ == "LycorisLayer" for kind in type(layer).__mro__),
        "whether an adapter acts is drawn for the batch at once, as LoHa's and LoKr's layers do "
        "({}): choose another kind, as peft.LoraConfig",
    ),
)
"""Tests of layers that prevent private training, each with a remedy ({} is their names)."""


def _change_alike(model: Any) -> Iterator[str]:
    """Make the changes that leave a model's results the same, and say which."""
    if names := _list_names(model, lambda layer: getattr(layer, "inplace", False) is True):
        for layer in model.modules():
            if getattr(layer, "inplace", False) is True:
                cast(Any, layer).inplace = False
        yield f"inplace = False: {list_some(names, _FEW)}"
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()):
        model.float()
        yield "weights of half precision are float32"
    # A model of transformers may be part of another; its parts share its configuration.
    for part in model.modules():
        if getattr(part, "is_gradient_checkpointing", False):
            part.gradient_checkpointing_disable()
            yield "gradient checkpointing is off"
        kind = getattr(getattr(part, "config", None), "_attn_implementation", None)
        if kind not in (None, "eager", "sdpa") and hasattr(part, "set_attn_implementation"):
            part.set_attn_implementation("sdpa")
            yield f"attention by torch's own kernel in place of {kind}"
        if _mixes_by_group(part):
            part.set_experts_implementation("batched_mm")
            yield "experts are computed by batched products instead of grouped_mm"


def _list_names(model: nn.Module, holds: Callable[[nn.Module], bool]) -> list[str]:
    return [name or type(model).__name__ for name, layer in model.named_modules() if holds(layer)]


_RECORDS: Final = 13  # hardly another dimension of a model is as long
_LINES: Final = 4
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
            more = f" and {len(lines) - _LINES} more" * (len(lines) > _LINES)
            yield f"{what} ({'; '.join(lines[:_LINES])}{more}): {remedy}"


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
