"""The per-sample gradient kernel: Σ_j c_j g_j with c_j = min(w_j, C/‖g_j‖), in one backward pass.

Book-keeping with ghost norms (Bu, Wang, Zha, Karypis, arXiv 2210.00038): one forward and one
backward pass of the activations leave every use of a parameter with its input and the gradient of
its output; from them come norms, then the coefficients c, then the weighted sum (passes).

What a caller may rely on:
* no record adds more than C to the sum, whatever the weights: ‖c_j g_j‖ <= C (1 + 1e-5) in float32;
* a record whose loss, weight or gradient norm is not finite adds exactly 0 and disturbs no other; a
  norm beyond 2^63 counts as infinite, as C over it could be a number that float32 rounds;
* both hold for every model: each way that a pass may take keeps records apart by construction
  (passes), and a model that takes none of them is refused. `verify` tries it all the same.

A kernel changes its module's flags while it works, so it serves one thread: give each its own.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor, nn

from fedpact.errors import ModelError
from fedpact.losses import Loss
from fedpact.params import FlatModel, all_digits, at_hand, one_thread
from fedpact.persample.apart.independence import Mixers, check_separation
from fedpact.persample.bounds import Clip, check_clip, within
from fedpact.persample.convolution import pixelwise
from fedpact.persample.passes import Measured, Passes, Team, by_pixel, one_each, slices, trainable
from fedpact.persample.share import IN_FLOAT32, unit_of
from fedpact.persample.weighting import SiteSum, Weights, weights_of

# The weights of the samples in a slice of the batch, from their losses.
_Weigh = Callable[[Tensor, slice], Tensor]

# What is summed: records x, y [B, ...] -> slices of the batch, and what was measured of each; a
# third argument says which slices.
_Measure = Callable[..., Iterable[tuple[slice, Measured]]]


class PerSampleKernel:
    """Clipped sums of per-sample gradients of one model.

    Raises ModelError: a layer that mixes the records of a batch (BatchNorm in training mode), or
    weights that are neither float32 nor float64, whose norms would be too coarse to clip by.
    """

    def __init__(self, model: FlatModel, loss: Loss) -> None:
        self.model, self.loss = model, loss
        check_precision(model)
        self._mixers = Mixers(model.module)
        self._mixers.check()
        self._passes = Passes(model, loss)
        self._team = Team(self._passes)
        self._trainable = trainable(model)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """The per-sample losses [B] at the model's weights, without gradient."""
        if len(x) == 0:
            return self.model.vector.new_zeros(0)
        with all_digits(self.model.vector), one_thread(), torch.no_grad():
            return self._passes.losses(*_recorded(x, y))

    def clipped_sum(
        self,
        x: Tensor,
        y: Tensor,
        clip: float,
        weights: Weights | None = None,
        most: int | None = None,
        shares: Tensor | None = None,
    ) -> Tensor:
        """Σ_j c_j g_j [d] over the batch x, y [B, ...], with c_j = s_j min(w_j, C/‖g_j‖).

        clip: C > 0; infinity gives c_j = w_j. weights: losses [n] -> w [n], clamped to >= 0, ones
        by default. They are asked for slice by slice of the batch, and w_j must depend on ℓ_j
        alone, else one record changes the others' shares. most: given where B is larger: the sum is
        then shortened to most C, which keeps `slack(most)` for any B; see bounds. shares: s_j in
        (0, 1], float64 [B], ones by default: record j then adds at most s_j C, and so records whose
        shares add up to 1 add at most C together.
        An empty batch gives zeros. Raises InputError for another clip, and ModelError where the
        model or the loss is found not to keep records apart.
        """
        check_clip("clip", clip)
        with all_digits(self.model.vector):
            x, y = _recorded(x, y)
            with one_thread():
                total = self._passes.at_once(
                    SiteSum(self.model, x, y, clip, weights, shares=shares), exact=most is not None
                )
            if total is not None:
                return within(total, clip, most).to(self.model.vector.dtype)
            weigh = None if weights is None else partial(_asked, weights)
            return self._sum(None, x, y, clip, weigh, most, shares)

    def clipped_difference(
        self,
        x: Tensor,
        y: Tensor,
        w: Tensor,
        anchor: Tensor,
        bound: float,
        most: int | None = None,
        shares: Tensor | None = None,
    ) -> Tensor:
        """Σ_j c_j d_j [d] with d_j = ∇ℓ_j(w) - ∇ℓ_j(anchor), c_j = s_j min(1, bound/‖d_j‖).

        w, anchor: [d]; the model is left at w. bound: > 0, or infinity. Each difference is clipped
        as a whole, by the norm of the difference itself, so the promises of clipped_sum hold
        however near w is to the anchor. Dropout layers draw anew at either point.
        most, shares: as of clipped_sum.
        Raises InputError for another bound, and ModelError as clipped_sum does.
        """
        check_clip("bound", bound)
        # The model's own vector changes while the other point is loaded.
        w, anchor = (_apart(v, self.model.vector) for v in (w, anchor))

        def measure(x: Tensor, y: Tensor) -> Iterable[tuple[slice, Measured]]:
            return self._passes.differences(x, y, w, anchor)

        with all_digits(self.model.vector):
            total = self._sum(measure, *_recorded(x, y), bound, None, most, shares)
            self.model.load(w)
        return total

    def verify(self, x: Tensor, y: Tensor) -> None:
        """Check on 3 or more synthetic records that the model keeps the records of a batch apart.

        What each record adds to a batch's sum must be its gradient alone, computed by ordinary
        autograd on a batch of one, with and without clipping; see independence. Raises ModelError
        otherwise, where a forward pass changes the model's buffers, and where neither the model
        nor a single record can be differentiated. Dropout layers are held still meanwhile.
        """
        self._mixers.check()
        with all_digits(self.model.vector):
            x, y = _recorded(x, y)
            check_separation(_Way(self, self._by_passes), x, y, self._passes.draws)
            if self._passes.dense is not None:
                check_separation(_Way(self, self._at_once), x, y)

    def way(self, x: Tensor, y: Tensor) -> str:
        """How records of the form of x, y [B, ...] are kept apart: "chain", "graph" or "records".

        By a chain of known layers; by a trace of operations that are known to; or by giving each
        record to the model alone. See passes.
        """
        with all_digits(self.model.vector):
            return self._passes.way(*_recorded(x, y))

    def _by_passes(self, x: Tensor, y: Tensor, clip: float, weigh: _Weigh | None) -> Tensor:
        return self._sum(None, x, y, clip, weigh)

    def _at_once(self, x: Tensor, y: Tensor, clip: float, weigh: _Weigh) -> Tensor:
        asked = SiteSum(self.model, x, y, clip, lambda losses: weigh(losses, slice(None)))
        total = self._passes.at_once(asked)
        return self._by_passes(x, y, clip, weigh) if total is None else total

    def alone(self, x: Tensor, y: Tensor) -> Tensor:
        """The per-sample gradients [B, d] by ordinary autograd, one record at a time."""
        rows: list[Tensor] = []
        with _requiring_grad(self._trainable) as parameters:
            for j in range(len(x)):
                loss = self.loss(self.model.module(x[j : j + 1]), y[j : j + 1])
                rows.append(_gradient(loss.sum(), parameters))
        return torch.stack(rows)

    def _sum(
        self,
        measure: _Measure | None,
        x: Tensor,
        y: Tensor,
        clip: float,
        weigh: _Weigh | None,
        most: int | None = None,
        shares: Tensor | None = None,
    ) -> Tensor:
        """The sum [d] of what `measure` finds, by default gradients at the model's weights.

        To be called within all_digits. See `slack` for what float32 may add to it.
        """
        vector, batch = self.model.vector, x.shape[0]
        if batch == 0:
            return torch.zeros_like(vector)
        self._mixers.check()
        exact = most is not None or batch > IN_FLOAT32 or self._passes.cut_small(x, y)
        total = torch.zeros_like(vector, dtype=torch.float64 if exact else vector.dtype)
        # torch's own threads share work out by the number of records, and what one of them has of
        # another form is other code's: one record more would change the others' last bits. So ours
        # take blocks of records that are as long whatever the batch.
        number, bound = torch.get_num_threads(), Clip(clip, unit_of(clip), shares)
        with one_thread(), torch.no_grad():
            blocks = self._passes.blocks(x, y) if number > 1 and measure is None else []
            # One block, too: what a thread is told of itself, as of denormals, holds for that one,
            # and one record more would move all others to another.
            if not blocks:
                self._add(total, measure or self._passes.gradients, x, y, bound, weigh)
            else:

                def part(passes: Passes, block: slice) -> Tensor:
                    found = torch.zeros_like(total)
                    with torch.no_grad():
                        self._add(found, passes.gradients, x, y, bound, weigh, [block])
                    return found

                for one in self._team.over(number, blocks, part):
                    total += one
        return within(total.mul_(unit_of(clip)), clip, most).to(vector.dtype)

    def _add(
        self,
        total: Tensor,
        measure: _Measure,
        x: Tensor,
        y: Tensor,
        clip: Clip,
        weigh: _Weigh | None,
        every: list[slice] | None = None,
    ) -> None:
        for rows, measured in measure(x, y) if every is None else measure(x, y, every):
            w = None if weigh is None else weigh(measured.losses, rows).clamp_min(0)
            good = measured.finite(w) if at_hand(x) else None
            if good is None:
                c = clip.coefficients(measured.losses, measured.norms, w, rows)
                measured.add(c.to(total.dtype), total)
            elif good.any():
                # 0 times infinity is no number, so the others are summed without the bad ones.
                again = None if w is None else partial(_fixed, w[good])
                self._add(total, measure, x[rows][good], y[rows][good], clip.of(rows, good), again)
            # Let go of it before the next slice is measured.
            del measured


@dataclass(frozen=True)
class _Way:
    """One of a kernel's ways to sum, as it is tried."""

    kernel: PerSampleKernel
    take: Callable[[Tensor, Tensor, float, _Weigh], Tensor]

    @property
    def model(self) -> FlatModel:
        return self.kernel.model

    def summed(self, x: Tensor, y: Tensor, clip: float, w: Tensor) -> Tensor:
        return self.take(x, y, clip, partial(_fixed, w))

    def alone(self, x: Tensor, y: Tensor) -> Tensor:
        return self.kernel.alone(x, y)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.kernel.loss(self.kernel.model.module(x.clone()), y)


class PlainKernel:
    """The same sums without clipping, by ordinary autograd: what a run without privacy uses.

    Raises ModelError for BatchNorm as the private kernel does: its sums are not over records.
    """

    def __init__(self, model: FlatModel, loss: Loss) -> None:
        self.model, self.loss = model, loss
        self._mixers = Mixers(model.module)
        self._mixers.check()
        self._trainable = trainable(model)
        self._images = by_pixel(model.module)
        # A CPU's caches do not hold what convolutions leave of more records.
        large = at_hand(model.vector) and any(p.dim() > 2 for p in self._trainable)
        self._length = 128 if large else 1024

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """The per-sample losses [B] at the model's weights, without gradient."""
        if len(x) == 0:
            return self.model.vector.new_zeros(0)
        with torch.no_grad():
            return self._each(x, y)

    def weighted_sum(self, x: Tensor, y: Tensor, weights: Weights | None = None) -> Tensor:
        """Σ_j w_j g_j [d]; the weights are clamped to >= 0 and constants of the gradient.

        They are asked for slice by slice, and w_j must depend on ℓ_j alone.
        Equals PerSampleKernel.clipped_sum at C = ∞ up to rounding, wherever all is finite.
        """
        if len(x) == 0:
            return torch.zeros_like(self.model.vector)
        each = slices(len(x), self._length)
        return reduce(Tensor.add_, (self._summed(x[r], y[r], weights)[1] for r in each))

    def difference(
        self, x: Tensor, y: Tensor, w: Tensor, anchor: Tensor, weights: Weights | None = None
    ) -> Tensor:
        """Σ_j w_j (∇ℓ_j(w) - ∇ℓ_j(anchor)) [d] for w, anchor [d]; the model is left at w."""
        w, anchor = (_apart(v, self.model.vector) for v in (w, anchor))
        self.model.load(anchor)
        before = self.weighted_sum(x, y, weights)
        self.model.load(w)
        return self.weighted_sum(x, y, weights) - before

    def mean_over(self, x: Tensor, y: Tensor, w: Tensor) -> tuple[float, Tensor]:
        """Return the mean loss of the records x, y [n, ...] at w [d], and its gradient [d].

        Without records both are 0. The model is left at w.
        """
        self.model.load(w)
        loss, gradient = 0.0, w.new_zeros(len(w))
        for rows in slices(len(x), self._length):
            # A copy, as in every batch: a model may write over its input.
            losses, one = self._summed(x[rows].clone(), y[rows], None)
            loss += float(losses.double().sum())
            gradient += one
        count = max(len(y), 1)
        return loss / count, gradient / count

    def _summed(self, x: Tensor, y: Tensor, weights: Weights | None) -> tuple[Tensor, Tensor]:
        """The losses [B > 0], and the weighted sum of their gradients [d]."""
        self._mixers.check()
        with _requiring_grad(self._trainable) as parameters:
            losses = self._each(x.detach(), y)
            w = weights_of(weights, losses.detach()).clamp_min(0)
            return losses.detach(), _gradient((w * losses).sum(), parameters)

    def _each(self, x: Tensor, y: Tensor) -> Tensor:
        given = pixelwise(x) if self._images and x.dim() == 4 else x
        return one_each(self.loss(self.model.module(given), y), len(x))


def check_precision(model: FlatModel) -> None:
    """Raise ModelError for weights too coarse to clip by."""
    if model.vector.dtype not in (torch.float32, torch.float64):
        raise ModelError(
            f"the model's weights are {model.vector.dtype}: expected float32 or float64, "
            "whose norms are exact enough to clip by; convert it with .float()"
        )


@contextmanager
def _requiring_grad(parameters: Iterable[nn.Parameter]) -> Generator[list[nn.Parameter]]:
    """Let autograd record, and the parameters require grad; all is as before afterwards."""
    held = list(parameters)
    before = [p.requires_grad for p in held]
    try:
        for p in held:
            p.requires_grad_(True)
        with torch.enable_grad():
            yield held
    finally:
        for p, earlier in zip(held, before, strict=True):
            p.requires_grad_(earlier)


def _gradient(output: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    """∂output/∂parameters [d] by one backward pass, zeros for a parameter that output ignores."""
    if not output.requires_grad:
        return torch.cat([torch.zeros_like(p).reshape(-1) for p in parameters])
    found = torch.autograd.grad(output, parameters, allow_unused=True, materialize_grads=True)
    # Gradients of an embedding may hold the rows that were read, and no others.
    return torch.cat([(t.to_dense() if t.is_sparse else t).reshape(-1) for t in found])


def _apart(v: Tensor, vector: Tensor) -> Tensor:
    same = v.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
    return v.clone() if same else v


def _recorded(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The records as autograd may use them: it refuses what was made in inference mode."""
    return x.clone() if x.is_inference() else x.detach(), y.clone() if y.is_inference() else y


def _fixed(w: Tensor, _: Tensor, rows: slice) -> Tensor:
    return w[rows]


def _asked(weights: Weights, losses: Tensor, _: slice) -> Tensor:
    return weights_of(weights, losses)
