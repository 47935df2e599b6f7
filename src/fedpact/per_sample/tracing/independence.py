"""Checks that a model treats records independently: otherwise clipping bounds nothing."""

import logging
import math
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import (
    _InstanceNorm as InstanceNorm,  # pyright: ignore[reportPrivateUsage]
)

from fedpact.common.errors import InputError, ModelError
from fedpact.common.losses import Loss
from fedpact.common.params import FlatModel, check_unwritten, model_name
from fedpact.per_sample.clipping import SHORTEST
from fedpact.per_sample.tracing.keyed_draws import use_means, without_fused_draws
from fedpact.per_sample.tracing.trace_context import announce

# The difference between two summation orders, relative to a record's gradient.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
# The distance that represents rounding for a record whose gradient is at a kink.
_BESIDE = {torch.float32: 1e-6, torch.float64: 1e-12}
_MOST = 3  # of the given records are looked at one by one
_LARGE = 16  # records in a larger batch, which are those over and over
_PATIENCE = 3.0  # seconds until the log says what takes long
_SLOW = "model %s is tried on made-up records before the run, for about ten steps' time"

_MIXES = (
    "model {} mixes the records of a batch: {} differs from what its records give one by one. Look "
    "for means over the batch, for branches on values, and for a layer whose leading dimension is "
    "not the batch (batch_first=False). Where it mixes nothing, it may round, as in torch.autocast "
    '(take that out; precision = "bf16" of a run computes so), or have a torch.autograd.Function '
    "whose backward pass is not the derivative: for that of another function h(x) than f(x) write "
    "h(x) + (f(x) - h(x)).detach()"
)


def _uses_batch(layer: nn.Module) -> bool:
    kept = getattr(layer, "track_running_stats", True)
    return isinstance(layer, BatchNorm) and (layer.training or not kept)


def _keeps_statistics(layer: nn.Module) -> bool:
    return isinstance(layer, InstanceNorm) and layer.training and layer.track_running_stats


def _acts_by_batch(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Embedding | nn.EmbeddingBag) and (
        layer.max_norm is not None or bool(layer.scale_grad_by_freq)
    )


MIXING: Final[tuple[tuple[Callable[[nn.Module], bool], str], ...]] = (
    (
        _uses_batch,
        "BatchNorm mixes the records of a batch, so no record's share can be bounded ({}): "
        "fedpact.prepare(model, batch_norm='group') puts GroupNorm in its place, or freeze it at "
        "public statistics with .eval()",
    ),
    (
        _keeps_statistics,
        "InstanceNorm keeps statistics of the batch ({}): build it with track_running_stats=False",
    ),
    (
        _acts_by_batch,
        "embeddings with max_norm or scale_grad_by_freq act by what the whole batch holds ({}): "
        "build them without",
    ),
)
"""Tests of layers that mix the records of a batch, each with a remedy ({} is their names)."""


class Mixers:
    """The layers of a model that mix the records of a batch, or would in training mode."""

    def __init__(self, module: nn.Module) -> None:
        kinds = BatchNorm | InstanceNorm | nn.Embedding | nn.EmbeddingBag
        named = cast(Any, module).named_modules(remove_duplicate=False)
        self._found = [(path, m) for path, m in named if isinstance(m, kinds)]

    def check(self) -> None:
        """Raise ModelError if one of them mixes records now."""
        for path, layer in self._found:
            for mixes, told in MIXING:
                if mixes(layer):
                    raise ModelError(told.format(f"layer {path!r}"))


class _Tried(Protocol):
    model: FlatModel
    loss: Loss

    def summed(self, x: Tensor, y: Tensor, clip: float, w: Tensor) -> Tensor: ...

    def alone(self, x: Tensor, y: Tensor) -> Tensor: ...


def check_separation(tried: _Tried, x: Tensor, y: Tensor) -> None:
    """Compare sums with gradients of single records x, y [B, ...].

    This is a second check: independence already follows from the kernel's way, for any records and
    weights. It compares weighted sums over batches of two lengths, one of them clipped, in about
    the time of ten steps and the memory of a few vectors [d]. A pass may not change the model or
    write to the records, and its outputs for a batch must be those for single records. Random
    numbers are replaced by their means. Raises ModelError.
    """
    if len(x) < 3:
        raise InputError(f"verify was given {len(x)} records: expected at least 3, any will do")
    module, x, y = tried.model.module, x[:_MOST].clone(), y[:_MOST]
    slow = announce(_SLOW, module, _PATIENCE, logging.INFO)
    with slow, without_fused_draws(tried.model), use_means():
        before, version = _state(module), x._version
        tried.summed(x, y, math.inf, tried.model.vector.new_ones(len(x)))
        _check_state(module, before)
        del before
        tried.alone(x[:1], y[:1])
        check_unwritten(module, x, version)
        first, again = (_losses(tried, x[:1], y[:1]).detach().nan_to_num() for _ in range(2))
        if not torch.equal(first, again):
            raise ModelError(
                f"model {model_name(module)} gives the same records other losses the second time: "
                "it cannot be checked; draw numbers from torch's own generator, and keep nothing "
                "between passes"
            )
        norms = torch.tensor(
            [_norm(_one(tried, x, y, j)) for j in range(len(x))], dtype=torch.float64
        )
        if not norms.isfinite().all():
            raise ModelError(
                f"model {model_name(module)} has outputs, a loss or a gradient that are not finite "
                "on the records that it is tried on: expected numbers, whatever a record holds; "
                "keep logarithms, roots and quotients from what may be 0 or less"
            )
        _check_sum(tried, x, y, norms, len(x), math.inf)
        # About half of the norms are longer; a nearly certain record's gradient is rounding error.
        clip = max(0.5 * float(norms.median()), 1e-3 * float(norms.max()))
        if SHORTEST <= clip < math.inf:
            _check_sum(tried, x, y, norms, _LARGE, clip)
        _check_outputs(tried, x)


def _one(tried: _Tried, x: Tensor, y: Tensor, j: int) -> Tensor:
    return tried.alone(x[j : j + 1], y[j : j + 1])[0]


def _losses(tried: _Tried, x: Tensor, y: Tensor) -> Tensor:
    with torch.enable_grad():
        return tried.loss(tried.model.module(x.clone()), y)


def _check_outputs(tried: _Tried, x: Tensor) -> None:
    module = tried.model.module
    with torch.no_grad():
        found = module(x.clone())
        each = torch.cat([module(x[j : j + 1].clone()) for j in range(len(x))])
    alike = found.shape == each.shape
    scale = float(each.abs().amax()) if each.numel() else 0.0
    if not (alike and float((found - each).abs().amax()) <= 10 * _TOLERANCE[each.dtype] * scale):
        raise _mixing(tried, "what it returns for a record")


def _check_sum(tried: _Tried, x: Tensor, y: Tensor, norms: Tensor, count: int, clip: float) -> None:
    """Compare a clipped, weighted sum over so many records: the given ones, over and over.

    norms: ‖g_j‖ [B] in float64. All weights differ, so another's gradient in a record's place is
    seen. Two batch sizes are used, as one may happen to equal another dimension.
    """
    chosen = torch.arange(count) % len(x)
    w = torch.linspace(0.5, 1.5, count, dtype=torch.float64)
    c = torch.minimum(w, clip / norms[chosen])
    c = torch.zeros_like(norms).index_add_(0, chosen, c)
    rows = chosen.to(x.device)
    error = tried.summed(x[rows], y[rows], clip, w.to(tried.model.vector))
    for j in range(len(x)):
        error -= float(c[j]) * _one(tried, x, y, j)
    scale = float(c @ norms) if clip == math.inf else 100 * count * clip
    most, found = _TOLERANCE[error.dtype] * scale, _norm(error)
    # The negated comparison also refuses NaN.
    if not found <= most:
        moved = sum(float(c[j]) * _tolerance(tried, x, y, j) for j in range(len(x)))
        if not found <= most + moved:
            raise _mixing(tried, f"the sum over a batch of {count}")


def _tolerance(tried: _Tried, x: Tensor, y: Tensor, j: int) -> float:
    """The tolerance for rounding in the gradient of record j.

    It is three times the change for a record at a distance of 10^-6, in float32. It is large only
    at a kink, such as a ReLU's at 0, where two gradients are right. Many units are at a kink if a
    norm divides rounding errors by their own deviation, as for an empty image.
    """
    found = 0.0
    if x.is_floating_point():
        gradient, generator = _one(tried, x, y, j), torch.Generator().manual_seed(0)
        step = _BESIDE[gradient.dtype] * max(float(x.abs().amax()), 1.0)
        for _ in range(8):
            beside = x[j : j + 1] + step * torch.randn(x[:1].shape, generator=generator).to(x)
            found = max(found, _norm(_one(tried, beside, y[j : j + 1], 0) - gradient))
    return 3 * found


def _mixing(tried: _Tried, what: str) -> ModelError:
    return ModelError(_MIXES.format(model_name(tried.model.module), what))


def _norm(vector: Tensor) -> float:
    square = float(vector.dot(vector))
    if 1e-30 < square < 1e30:
        return math.sqrt(square)
    # A twentieth as fast, and with a range that holds any number's square.
    return float(cast(Any, torch.linalg).vector_norm(vector, dtype=torch.float64))


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in (*module.named_parameters(), *module.named_buffers())}


def _check_state(module: nn.Module, before: dict[str, Tensor]) -> None:
    after = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        # A tensor with NaN is unequal to itself, so such a state counts as changed.
        if old is None or new is None or not torch.equal(old, new):
            raise ModelError(
                f"model {model_name(module)} changes {name!r} in a forward pass: that would "
                "carry statistics of records around clipping and noise; use a module that does not"
            )
