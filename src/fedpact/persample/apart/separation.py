"""Does a model keep the records of a batch apart? Without that, no clip bounds a record's share."""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import (
    _InstanceNorm as InstanceNorm,  # pyright: ignore[reportPrivateUsage]
)

from fedpact.errors import InputError, ModelError
from fedpact.params import FlatModel, check_unwritten, model_name
from fedpact.persample.bounds import SHORTEST

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


LARGE = 64
"""Records in the large batch of a trial."""

_MIXES = (
    "model {} mixes the records of a batch: {} differs from what its records give one by one. Look "
    "for means over the batch, for branches on values, and for a layer whose leading dimension is "
    "not the batch (batch_first=False)"
)
_OWN = (
    "model {} has a backward pass of its own in {} (torch.autograd.Function), which is not the "
    "derivative of what it computes: {} differs from what its records give one by one. Write it "
    "with operations alone; for a derivative of another function h(x) than f(x), as of a straight-"
    "through estimator, h(x) + (f(x) - h(x)).detach()"
)


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


class Tried(Protocol):
    """What is tried: a kernel's sums, beside what ordinary autograd says of single records."""

    @property
    def model(self) -> FlatModel:
        """The model."""
        ...

    def summed(self, x: Tensor, y: Tensor, clip: float, w: Tensor) -> Tensor:
        """Σ_j min(w_j, C/‖g_j‖) g_j [d] for weights w [B]."""
        ...

    def alone(self, x: Tensor, y: Tensor) -> Tensor:
        """The gradients [B, d], each of a batch of one."""
        ...

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """The losses [B] by the model itself, with what autograd recorded."""
        ...


def check_separation(
    tried: Tried, x: Tensor, y: Tensor, draws: Callable[[Tensor, Tensor], bool] | None = None
) -> None:
    """Raise ModelError unless sums over records x, y [B, ...] are those of each record alone.

    A second lock: that records are kept apart follows from the way that the kernel takes. It is
    tried on two batch sizes, as one alone may equal another dimension by accident, and on a large
    batch of records that are as given, larger, smaller, all alike and 0, and at other weights. Nor
    may the model write over the records, not even with what they are, and its outputs for a batch
    must be those for its records: a run is evaluated by them. draws: whether what is differentiated
    draws random numbers, be it for other records than these.
    """
    if len(x) < 3:
        raise InputError(f"verify was given {len(x)} records: expected at least 3, any will do")
    module, x = tried.model.module, x.clone()
    with _still(module):
        before, version = _state(module), x._version
        _contributions(tried, x, y, math.inf)
        _check_state(module, before)
        rows = tried.alone(x, y)
        check_unwritten(module, x, version)
        if not rows.isfinite().all():
            raise ModelError(
                f"model {model_name(module)} has outputs, a loss or a gradient that are not "
                "finite on the records that it is tried on: expected numbers, whatever a record "
                "holds; keep logarithms, roots and quotients from what may be 0 or less"
            )
        same = _norms(rows - tried.alone(x, y)) <= _TOLERANCE[rows.dtype] * _norms(rows)
        if (draws is not None and draws(x, y)) or not same.all():
            raise ModelError(
                f"model {model_name(module)} draws random numbers outside dropout layers: it "
                "cannot be checked; leave them out (clipping and noise regularise already)"
            )
        _check_outputs(module, x)
        for n in (len(x) - 1, len(x)):
            for clip in (math.inf, _telling_clip(_norms(rows))):
                if clip > 0:
                    found = _contributions(tried, x[:n], y[:n], clip)
                    if not (
                        _alike(found, rows[:n], clip)
                        or _alike(found, rows[:n], clip, _moved(tried, x, y)[:n])
                    ):
                        raise _mixing(tried, f"what a record adds to a batch of {n}", x[:n], y[:n])
        _check_large(tried, x, y)


def _contributions(tried: Tried, x: Tensor, y: Tensor, clip: float) -> Tensor:
    """What each record adds to the batch's sum, as rows [B, d]: sums with one weight not 0."""
    one = torch.eye(len(x), dtype=tried.model.vector.dtype, device=x.device)
    return torch.stack([tried.summed(x, y, clip, row) for row in one])


def _check_outputs(module: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        found = module(x.clone())
        each = torch.cat([module(x[j : j + 1].clone()) for j in range(len(x))])
    alike = found.shape == each.shape
    scale = float(each.abs().amax()) if each.numel() else 0.0
    if not (alike and float((found - each).abs().amax()) <= 10 * _TOLERANCE[each.dtype] * scale):
        raise ModelError(_MIXES.format(model_name(module), "what it returns for a record"))


def _check_large(tried: Tried, x: Tensor, y: Tensor) -> None:
    model = tried.model
    w = model.vector.clone()
    other = torch.randn(len(w), generator=torch.Generator().manual_seed(0)).to(w) * w.std(
        correction=0
    )
    kinds = [x, x[:1].expand_as(x), torch.zeros_like(x)]
    if x.is_floating_point():
        kinds += [1e3 * x, 1e-3 * x]
    try:
        for records in kinds:
            # Where it raises at a record, as at a word it does not know, a run leaves that one out.
            if records is x or _takes(tried, records, y):
                _compare_large(tried, records, y)
        model.load(w + 0.1 * other)
        _compare_large(tried, x, y)
    finally:
        model.load(w)


def _compare_large(tried: Tried, x: Tensor, y: Tensor) -> None:
    """A weighted sum over a batch of LARGE records, which are these over and over."""
    rows = tried.alone(x, y).double()
    norms = _norms(rows)
    rows = torch.where(norms.isfinite()[:, None], rows, 0)
    clip = _telling_clip(norms)
    chosen = torch.arange(LARGE, device=x.device) % len(x)
    w = torch.linspace(0.5, 1.5, LARGE, dtype=tried.model.vector.dtype, device=x.device)
    if not (SHORTEST <= clip < math.inf):
        return

    c = torch.minimum(w.double(), clip / norms[chosen]).where(norms[chosen].isfinite(), 0)
    found = tried.summed(x[chosen], y[chosen], clip, w).double()
    error = float(_norms((found - c @ rows[chosen])[None]))
    most = 100 * _TOLERANCE[w.dtype] * LARGE * clip
    if not error <= most and not error <= most + float(c @ _moved(tried, x, y)[chosen]):
        raise _mixing(tried, f"the sum over a batch of {LARGE}", x, y)


def _takes(tried: Tried, x: Tensor, y: Tensor) -> bool:
    """Whether the model's own code takes records x, y [B, ...]."""
    try:
        tried.losses(x, y)
    except Exception:
        return False
    return True


def _moved(tried: Tried, x: Tensor, y: Tensor) -> Tensor:
    """How far rounding may move the gradients [B] of records x, y [B, ...], each alone.

    A few times as far as they move with records that are a millionth of 1 away. It is hardly more
    than that but at a kink, as a ReLU's at 0, and there two gradients are right. Many a unit stands
    at one where a norm has divided rounding errors by their own deviation, as of an empty image.
    """
    found = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    if x.is_floating_point():
        rows, generator = tried.alone(x, y), torch.Generator().manual_seed(0)
        step = 1e-6 * max(float(x.abs().amax()), 1.0)
        for _ in range(8):
            beside = x + step * torch.randn(x.shape, generator=generator).to(x)
            found = torch.maximum(found, _norms(tried.alone(beside, y) - rows))
    return 3 * found


def _mixing(tried: Tried, what: str, x: Tensor, y: Tensor) -> ModelError:
    """The error for records x, y [B, ...] of which what is said differs from each alone."""
    name, own = model_name(tried.model.module), _own_derivatives(tried.losses(x, y))
    one = x[:1], y[:1]
    # In a batch of one there is nobody to mix with.
    if own and not _alike(_contributions(tried, *one, math.inf), tried.alone(*one), math.inf):
        return ModelError(_OWN.format(name, ", ".join(own), what))
    return ModelError(_MIXES.format(name, what))


def _own_derivatives(losses: Tensor) -> list[str]:
    """The names of the functions behind losses that bring a backward pass of their own.

    A trace holds what such a function computes, and that is differentiated; what it says of its
    derivative is in no trace.
    """
    found: dict[str, None] = {}
    left, seen = [losses.grad_fn], set[Any]()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            found[type(node).__name__.removesuffix("Backward")] = None
        left += [before for before, _ in node.next_functions]
    return list(found)


def _telling_clip(norms: Tensor) -> float:
    """A clip that about half of the records meet, of their gradients' norms [B].

    A record that is all but certain has a gradient of a few rounding errors, or of less than a clip
    may be: what the others' digits say nothing of is no scale.
    """
    longest = float(norms.where(norms.isfinite(), 0).amax())
    return max(0.5 * float(torch.median(norms)), 1e-3 * longest)


def _alike(found: Tensor, rows: Tensor, clip: float, moved: Tensor | float = 0.0) -> bool:
    """Whether what records add is their gradients, clipped, both [B, d]. moved: see _moved."""
    norms = _norms(rows)
    expected = rows * torch.clamp(clip / norms, max=1)[:, None]
    scale = torch.clamp(torch.maximum(norms, 1e-3 * torch.amax(norms)), max=clip)
    error = _norms(found - expected)
    # A gradient of 0 asks for 0; "not all good" refuses NaN as well.
    return bool((error <= _TOLERANCE[rows.dtype] * scale + moved).all())


def _norms(rows: Tensor) -> Tensor:
    return rows.double().square().sum(1).sqrt()


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in (*module.named_parameters(), *module.named_buffers())}


def _check_state(module: nn.Module, before: dict[str, Tensor]) -> None:
    after = _state(module)
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        # A tensor with a NaN equals nothing, so such a state is refused as changed.
        if old is None or new is None or not torch.equal(old, new):
            raise ModelError(
                f"model {model_name(module)} changes {name!r} in a forward pass: that would "
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
