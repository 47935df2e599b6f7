"""Does a model keep the records of a batch apart? Without that, no clip bounds a record's share."""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import (
    _InstanceNorm as InstanceNorm,  # pyright: ignore[reportPrivateUsage]
)

from fedpact.errors import InputError, ModelError
from fedpact.params import check_unwritten
from fedpact.persample.norms import square_sums

_DROPOUT = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
# Relative to a record's gradient: what two orders of the same sums may differ by.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


class Mixers:
    """The layers of a model that mix the records of a batch, or would if they were set to train.

    Raises ModelError for an embedding whose weights or gradients depend on the batch's indices.
    """

    def __init__(self, module: nn.Module) -> None:
        self._found: list[tuple[str, BatchNorm | InstanceNorm]] = []
        for path, m in _named_modules(module):
            if isinstance(m, BatchNorm | InstanceNorm):
                self._found.append((path, m))
            if isinstance(m, nn.Embedding | nn.EmbeddingBag) and (
                m.max_norm is not None or m.scale_grad_by_freq
            ):
                raise ModelError(
                    f"layer {path!r} has max_norm = {m.max_norm}, scale_grad_by_freq = "
                    f"{m.scale_grad_by_freq}: both act by what the whole batch holds, past "
                    "clipping and noise; build the embedding without them"
                )

    def check(self) -> None:
        """Raise ModelError where one of them would use or collect a batch's statistics."""
        for path, layer in self._found:
            tracked = layer.track_running_stats
            if (layer.training and tracked) or (isinstance(layer, BatchNorm) and not tracked):
                raise ModelError(
                    f"layer {path!r} is a {type(layer).__name__} that uses or keeps statistics of "
                    "the whole batch, so no record's share can be bounded: replace it, for example "
                    "model = fedpact.models.normalise.replace_batchnorm(model), or freeze it at "
                    "public statistics with .eval()"
                )


def _named_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every (path, module), a module that stands at several paths once for each."""
    return list(cast(Any, root).named_modules(remove_duplicate=False))


def check_separation(
    module: nn.Module,
    contributions: Callable[[Tensor, Tensor, float], Tensor],
    alone: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
) -> None:
    """Raise ModelError unless contributions(x, y, C) are alone(x, y) [B, d], clipped to C.

    Two batch sizes, as one alone may equal another dimension by accident. Nor may the model write
    over the records, not even with what they are.
    """
    if len(x) < 3:
        raise InputError(f"verify was given {len(x)} records: expected at least 3, any will do")
    sizes, x = (len(x) - 1, len(x)), x.clone()
    with _still(module):
        before, version = _state(module), x._version
        for n in sizes:
            contributions(x[:n], y[:n], math.inf)
        _check_state(module, before)
        rows = alone(x, y)
        check_unwritten(module, x, version)
        if not rows.isfinite().all():
            raise InputError("verify was given records whose gradient is not finite: use others")
        if not (_norms(rows - alone(x, y)) <= _TOLERANCE[rows.dtype] * _norms(rows)).all():
            raise ModelError(
                f"model {type(module).__name__} draws random numbers outside dropout layers: it "
                "cannot be checked; use nn.Dropout modules in place of functional dropout"
            )
        for n in sizes:
            for clip in (math.inf, 0.5 * float(torch.median(_norms(rows)))):
                if clip > 0:
                    _compare(module, contributions(x[:n], y[:n], clip), rows[:n], clip)


def _compare(module: nn.Module, found: Tensor, rows: Tensor, clip: float) -> None:
    norms = _norms(rows)
    expected = rows * torch.clamp(clip / norms, max=1)[:, None]
    scale = torch.clamp(torch.maximum(norms, 1e-3 * torch.amax(norms)), max=clip)
    error = _norms(found - expected)
    # A gradient of 0 asks for 0; "not all good" refuses NaN as well.
    if not (error <= _TOLERANCE[rows.dtype] * scale).all():
        worst = float(torch.amax(error / scale))
        raise ModelError(
            f"model {type(module).__name__} mixes the records of a batch: what a record adds to a "
            f"batch of {len(rows)} differs from its own gradient by {worst:.1e} of its length. "
            "Therefore no record's share can be bounded. Look for means over the batch, for a "
            "layer whose leading dimension is not the batch (batch_first=False), and for a "
            "parameter that is used outside the module that holds it"
        )


def _norms(rows: Tensor) -> Tensor:
    return square_sums(rows).sqrt()


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in (*module.named_parameters(), *module.named_buffers())}


def _check_state(module: nn.Module, before: dict[str, Tensor]) -> None:
    after = _state(module)
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        # A tensor with a NaN equals nothing, so such a state is refused as changed.
        if old is None or new is None or not torch.equal(old, new):
            raise ModelError(
                f"model {type(module).__name__} changes {name!r} in a forward pass: that would "
                "carry statistics of records around clipping and noise; use a module that does not"
            )


@contextmanager
def _still(module: nn.Module) -> Generator[None]:
    """Switch dropout off, and nothing else."""
    layers = [m for m in module.modules() if isinstance(m, _DROPOUT) and m.training]
    inner = [m for m in module.modules() if isinstance(m, nn.RNNBase | nn.MultiheadAttention)]
    rates = [m.dropout for m in inner]
    try:
        for m in layers:
            m.training = False
        for m in inner:
            m.dropout = 0.0
        yield
    finally:
        for m in layers:
            m.training = True
        for m, rate in zip(inner, rates, strict=True):
            m.dropout = rate
