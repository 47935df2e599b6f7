"""The per-sample gradient kernel: Σ_j c_j g_j with c_j = min(w_j, C/‖g_j‖), in one backward pass.

Book-keeping with ghost norms (Bu, Wang, Zha, Karypis, arXiv 2210.00038): one forward and one
backward pass of the activations record every layer's input and output gradient (tape); from them
come the norms layer by layer, then the coefficients c, then the weighted sum (layers, fallback).

What a caller may rely on:
* no record adds more than C to the sum, whatever the weights: ‖c_j g_j‖ <= C (1 + 1e-5) in float32;
* a record whose loss, weight or gradient norm is not finite adds exactly 0 and disturbs no other;
* both hold for models that keep records apart; `verify` finds out whether a model does.

A kernel changes its module's flags while it works, so it serves one thread: give each its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedpact import check
from fedpact.errors import ModelError
from fedpact.losses import Loss
from fedpact.params import FlatModel
from fedpact.privacy.cover import Cover, NotAUnit
from fedpact.privacy.fallback import Random, Whole
from fedpact.privacy.parts import Part
from fedpact.privacy.separation import Mixers, check_separation
from fedpact.privacy.tape import Recorded, gradients, record, requiring_grad

Weights = Callable[[Tensor], Tensor]
"""Losses [B] -> weights [B], each from its own record's loss alone."""

# The weights of the samples in a slice of the batch, from their losses.
_Weigh = Callable[[Tensor, slice], Tensor]


@dataclass(frozen=True)
class _Measured:
    """Losses [B] of one pass, and what each module adds: (its parameter names, its Part)."""

    losses: Tensor
    shares: list[tuple[dict[str, str], Part]]

    def norms(self) -> Tensor:
        """‖g_j‖ [B]; the layers' shares are summed in float64."""
        squares = torch.zeros_like(self.losses, dtype=torch.float64)
        for _, part in self.shares:
            squares += part.squares
        return squares.sqrt().to(self.losses.dtype)


class PerSampleKernel:
    """Clipped sums of per-sample gradients of one model.

    Raises ModelError: a layer that mixes the records of a batch (BatchNorm in training mode), or
    weights that are neither float32 nor float64, whose norms would be too coarse to clip by.
    """

    def __init__(self, model: FlatModel, loss: Loss) -> None:
        self.model, self._loss = model, loss
        check_precision(model)
        self._mixers = Mixers(model.module)
        self._mixers.check()
        self._cover = Cover(model)
        self._whole: Whole | None = None
        self._trainable = _trainable(model)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """The per-sample losses [B] at the model's weights, without gradient."""
        return _losses(self.model, self._loss, x, y)

    def clipped_sum(
        self, x: Tensor, y: Tensor, clip: float, weights: Weights | None = None
    ) -> Tensor:
        """Σ_j c_j g_j [d] over the batch x, y [B, ...], with c_j = min(w_j, C/‖g_j‖).

        clip: C > 0; infinity gives c_j = w_j. weights: losses [B] -> w [B], clamped to >= 0, ones
        by default; w_j must depend on ℓ_j alone, else one record changes the others' shares.
        An empty batch gives zeros. Raises InputError for another clip, and ModelError where the
        model or the loss is found not to keep records apart.
        """
        if clip != math.inf:
            check.positive(clip=clip)

        def weigh(losses: Tensor, _: slice) -> Tensor:
            return _weights(weights, losses)

        return self._sum(x.detach(), y, clip, weigh)

    def verify(self, x: Tensor, y: Tensor) -> None:
        """Check on 3 or more synthetic records that the model keeps the records of a batch apart.

        What each record adds to a batch's sum must be its gradient alone, computed by ordinary
        autograd on a batch of one, with and without clipping. Raises ModelError otherwise, or
        where a forward pass changes the model's buffers. Dropout layers are held still meanwhile.
        """
        self._mixers.check()
        check_separation(self.model.module, self._contributions, self._alone, x.detach(), y)

    def _contributions(self, x: Tensor, y: Tensor, clip: float) -> Tensor:
        """What each record adds to the batch's sum, as rows [B, d]: sums with one weight not 0."""
        one = torch.eye(len(x), dtype=self.model.vector.dtype, device=x.device)
        rows = [self._sum(x, y, clip, partial(_fixed, row)) for row in one]
        return torch.stack(rows)

    def _alone(self, x: Tensor, y: Tensor) -> Tensor:
        """The per-sample gradients [B, d] by ordinary autograd, one record at a time."""
        rows: list[Tensor] = []
        with requiring_grad(self._trainable) as parameters:
            for j in range(len(x)):
                loss = self._loss(self.model.module(x[j : j + 1]), y[j : j + 1])
                rows.append(_flat(gradients(loss.sum(), parameters)))
        return torch.stack(rows)

    def _sum(self, x: Tensor, y: Tensor, clip: float, weigh: _Weigh) -> Tensor:
        batch = len(x)
        if batch == 0:
            return torch.zeros_like(self.model.vector)
        self._mixers.check()
        if self._whole is None:
            try:
                return self._weighted(self._measure(x, y), x, y, clip, weigh, slice(batch))
            except Random:
                self._whole = Whole(self.model, self._loss)
        total = torch.zeros_like(self.model.vector)
        for i in range(0, batch, self._whole.step):
            rows = slice(i, min(i + self._whole.step, batch))
            losses, part = self._whole.measure(x[rows], y[rows])
            measured = _Measured(losses, [({n: n for n in self._whole.names}, part)])
            total += self._weighted(measured, x, y, clip, weigh, rows)
        return total

    def _measure(self, x: Tensor, y: Tensor) -> _Measured:
        """One forward and one backward pass, and the modules' squared norms."""
        while True:
            owners = self._cover.owners
            entries = [
                Recorded(o.module, partial(o.accept, len(x)), fresh=o.layer is not None)
                for o in owners
            ]
            try:
                with requiring_grad(self._trainable, False):
                    losses, calls = record(
                        entries, lambda: _checked(self._loss(self.model.module(x), y), len(x))
                    )
                    if losses.requires_grad:
                        torch.autograd.backward(losses, torch.ones_like(losses))
                break
            except NotAUnit as found:
                self._cover.promote(found.owner)
        shares: list[tuple[dict[str, str], Part]] = []
        with torch.no_grad():
            for owner, made in zip(owners, calls, strict=True):
                live = [call for call in made if call.grad is not None]
                for call in live:
                    call.check(owner.path)
                if live:
                    shares.append((owner.names, owner.measure(live)))
                made.clear()
        return _Measured(losses.detach(), shares)

    def _weighted(
        self, measured: _Measured, x: Tensor, y: Tensor, clip: float, weigh: _Weigh, rows: slice
    ) -> Tensor:
        """Σ c_j g_j over the samples `rows` of x, y, of which `measured` tells."""
        norms = measured.norms()
        w = weigh(measured.losses, rows).clamp_min(0)
        good = measured.losses.isfinite() & norms.isfinite() & w.isfinite()
        if not good.all():
            # 0 times infinity is no number, so the others are summed without the bad ones.
            return self._sum(x[rows][good], y[rows][good], clip, partial(_fixed, w[good]))
        c = torch.minimum(w, clip / norms)
        total = torch.zeros_like(self.model.vector)
        views = dict(self.model.views(total))
        with torch.no_grad():
            for names, part in measured.shares:
                part.write(c, {local: views[name] for local, name in names.items()})
        return total


class PlainKernel:
    """The same sums without clipping, by ordinary autograd: what a run without privacy uses.

    Raises ModelError for BatchNorm as the private kernel does: its sums are not over records.
    """

    def __init__(self, model: FlatModel, loss: Loss) -> None:
        self.model, self._loss = model, loss
        self._mixers = Mixers(model.module)
        self._mixers.check()
        self._trainable = _trainable(model)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """The per-sample losses [B] at the model's weights, without gradient."""
        return _losses(self.model, self._loss, x, y)

    def weighted_sum(self, x: Tensor, y: Tensor, weights: Weights | None = None) -> Tensor:
        """Σ_j w_j g_j [d]; the weights are clamped to >= 0 and constants of the gradient.

        Equals PerSampleKernel.clipped_sum at C = ∞ up to rounding, wherever all is finite.
        """
        if len(x) == 0:
            return torch.zeros_like(self.model.vector)
        self._mixers.check()
        with requiring_grad(self._trainable) as parameters:
            losses = _checked(self._loss(self.model.module(x.detach()), y), len(x))
            w = _weights(weights, losses.detach()).clamp_min(0)
            return _flat(gradients((w * losses).sum(), parameters))


def check_precision(model: FlatModel) -> None:
    """Raise ModelError for weights too coarse to clip by."""
    if model.vector.dtype not in (torch.float32, torch.float64):
        raise ModelError(
            f"the model's weights are {model.vector.dtype}: expected float32 or float64, "
            "whose norms are exact enough to clip by; convert it with .float()"
        )


def _trainable(model: FlatModel) -> list[nn.Parameter]:
    """The model's trainable parameters in the order of its vector."""
    named = dict(model.module.named_parameters())
    return [named[name] for name, _ in model.views(model.vector)]


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _fixed(w: Tensor, _: Tensor, rows: slice) -> Tensor:
    return w[rows]


def _weights(weights: Weights | None, losses: Tensor) -> Tensor:
    if weights is None:
        return torch.ones_like(losses)
    w = weights(losses).detach()
    if w.shape != losses.shape:
        raise ModelError(
            f"the weights have shape {tuple(w.shape)} for {len(losses)} losses: expected one each"
        )
    return w


def _losses(model: FlatModel, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    if len(x) == 0:
        return model.vector.new_zeros(0)
    with torch.no_grad():
        return _checked(loss(model.module(x), y), len(x))


def _checked(losses: Tensor, batch: int) -> Tensor:
    if losses.shape != (batch,):
        raise ModelError(
            f"the losses of {batch} records have shape {tuple(losses.shape)}: expected ({batch},), "
            "one a record; use a loss that does not reduce over the batch, as fedpact.losses has"
        )
    return losses
