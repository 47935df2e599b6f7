"""Find everything in a model that prevents private training, and fix what can be fixed.

    prepared = fedpact.prepare(model, batch_norm="group")
    fedpact.run(prepared.model, data, ...)

Changes that leave the results the same are made without asking. BatchNorm, which mixes the records
of a batch, is replaced on request.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.utils import parametrize

from fedpact.common.errors import InputError
from fedpact.common.format import list_some
from fedpact.models.hugging_face import with_named_inputs
from fedpact.models.watched_pass import find_in_pass
from fedpact.models.zoo import replace_batchnorm
from fedpact.per_sample.tracing.independence import MIXING

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
    if _mixes_by_group(model):
        yield (
            "experts are computed by grouped_mm, for all records at once: fedpact.prepare(model) or"
            " model.set_experts_implementation('batched_mm')"
        )
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
    if getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()
        yield "gradient checkpointing is off"
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if kind not in (None, "eager", "sdpa") and hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("sdpa")
        yield f"attention by torch's own kernel in place of {kind}"
    if _mixes_by_group(model):
        model.set_experts_implementation("batched_mm")
        yield "experts are computed by batched products instead of grouped_mm"


def _mixes_by_group(model: nn.Module) -> bool:
    kind = getattr(getattr(model, "config", None), "_experts_implementation", None)
    return kind == "grouped_mm"


def _list_names(model: nn.Module, holds: Callable[[nn.Module], bool]) -> list[str]:
    return [name or type(model).__name__ for name, layer in model.named_modules() if holds(layer)]
