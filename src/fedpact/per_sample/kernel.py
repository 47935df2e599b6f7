"""The per-sample gradient kernel: Σ_j c_j g_j with c_j = min(w_j, C/‖g_j‖), in one backward pass.

Book-keeping with ghost norms (Bu, Wang, Zha, Karypis, arXiv 2210.00038): one forward and one
backward pass through the activations give the input and the output's gradient of every use of a
parameter. From these come the norms, then the coefficients c, then the weighted sum (passes).

Guarantees:
* no record adds more than C to the sum, whatever the weights: ‖c_j g_j‖ <= C (1 + 1e-5) in float32;
* a record whose loss, weight or gradient norm is not finite adds exactly 0 and affects no other
  record; a norm above 2^63 counts as infinite;
* both hold for every model: each way through a model keeps records apart by construction (passes),
  and a model for which there is no way is refused. `verify` checks it in addition.

A kernel changes its module's flags while it works, so each thread needs its own kernel.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from functools import partial, reduce

import torch
from torch import Tensor, nn

from fedpact.common.errors import ModelError
from fedpact.common.losses import Loss
from fedpact.common.params import (
    FlatModel,
    all_digits,
    autocast,
    copy_to_device,
    fewer_digits,
    model_name,
    on_cpu,
)
from fedpact.per_sample.clipping import (
    Weights,
    check_clip,
    coefficients,
    mask_slots,
    weights_of,
    within,
)
from fedpact.per_sample.convolution import pixelwise
from fedpact.per_sample.gradients import Measured
from fedpact.per_sample.layers import by_pixel
from fedpact.per_sample.layout import (
    COMPACT,
    EXPECTED,
    Placement,
    align,
    collect,
    is_invariant,
)
from fedpact.per_sample.norms import slices, wide
from fedpact.per_sample.passes import Captures, Passes, one_each, trainable
from fedpact.per_sample.tracing.independence import Mixers, check_separation
from fedpact.per_sample.tracing.keyed_draws import (
    KeyedDraws,
    PassNumbers,
    Seed,
    without_fused_draws,
)


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
        self._captures = Captures(model_name(model.module), model.vector.device)
        self._trainable = trainable(model)
        self._layouts: dict[object, Placement] = {}

    def seed(self, seed: Seed) -> None:
        """Draw random numbers, as of dropout, from this seed from now on.

        A record's numbers follow from the seed and that record alone.
        """
        self._passes.seed = seed

    def draws(self, x: Tensor, y: Tensor) -> bool:
        """Whether passes over records of the form of x, y [B, ...] draw random numbers."""
        with all_digits(self.model.vector):
            return self._passes.draws(*_for_autograd(x, y))

    def losses(self, x: Tensor, y: Tensor, layout: Placement | None = None) -> Tensor:
        """The per-sample losses [B] at the model's weights, without gradient."""
        measure = self._passes.losses
        return self._each(lambda x, y: one_each(measure(x, y), len(y)), x, y, layout)

    def norms(self, x: Tensor, y: Tensor, layout: Placement | None = None) -> Tensor:
        """The lengths ‖g_j‖ [B] of the per-sample gradients at the model's weights, in float64."""
        return self._each(self._passes.norms, x, y, layout)

    def _each(
        self,
        of: Callable[[Tensor, Tensor], Tensor],
        x: Tensor,
        y: Tensor,
        layout: Placement | None,
    ) -> Tensor:
        if len(x) == 0:
            return self.model.vector.new_zeros(0)
        with all_digits(self.model.vector), torch.no_grad():
            x, y = _for_autograd(x, y)
            layout = layout or self._choose_layout(x, y, public=True)
            parts = [of(one.x, one.y) for one in self._passes.over(x, y, layout)]
            return collect(parts, len(x), layout)

    def clipped_sum(
        self,
        x: Tensor,
        y: Tensor,
        clip: float,
        weights: Weights | None = None,
        most: int | None = None,
        shares: Tensor | None = None,
        layout: Placement | None = None,
        gamma: float | None = None,
    ) -> Tensor:
        """Σ_j c_j g_j [d] over the batch x, y [B, ...], with c_j = s_j min(w_j, C/‖g_j‖).

        clip: C > 0; infinity gives c_j = w_j. weights: losses [n] -> w [n], clamped to >= 0, ones
        by default; called once for each pass. w_j must depend on record j alone. gamma: γ > 0 of
        automatic clipping (AUTO-S: Bu, Wang, Zha, Karypis, arXiv 2206.07136), which replaces w_j by
        w_j C/(‖g_j‖ + γ). most: if given, the sum is shortened to most C, so that `slack(most)`
        holds for any B; see clipping.within. shares: s_j in (0, 1], float64 [B], ones by default:
        record j adds at most s_j C, and records whose shares add up to 1 add at most C together.
        layout: the records' slots and the length of passes; in a run it follows from public numbers
        and secret draws alone. By default the length suits the first batch of this form, and
        records are placed compactly if `invariant` allows it on this machine; otherwise each record
        has a separate pass.
        An empty batch gives zeros. Raises InputError for another clip, and ModelError where the
        model or the loss is found not to keep records apart.
        """
        check_clip("clip", clip)
        with all_digits(self.model.vector):
            self._mixers.check()
            x, y = _for_autograd(x, y)
            layout = layout or self._choose_layout(x, y)
            of = self._passes.gradients
            return self._sum(of, x, y, clip, weights, most, shares, layout, gamma=gamma)

    def clipped_difference(
        self,
        x: Tensor,
        y: Tensor,
        w: Tensor,
        anchor: Tensor,
        bound: float,
        most: int | None = None,
        shares: Tensor | None = None,
        layout: Placement | None = None,
    ) -> Tensor:
        """Σ_j c_j d_j [d] with d_j = ∇ℓ_j(w) - ∇ℓ_j(anchor), c_j = s_j min(1, bound/‖d_j‖).

        w, anchor: [d]; the model is left at w. bound: > 0, or infinity. Each difference is clipped
        as a whole, by the norm of the difference itself, so the promises of clipped_sum hold
        however near w is to the anchor. Random numbers, as dropout's, are the same at both.
        most, shares, layout: as of clipped_sum.
        Raises InputError for another bound, and ModelError as clipped_sum does.
        """
        check_clip("bound", bound)
        # The model's own vector changes while the other point is loaded.
        w, anchor = (_copy_apart(v, self.model.vector) for v in (w, anchor))
        with all_digits(self.model.vector):
            self._mixers.check()
            x, y = _for_autograd(x, y)
            layout = self._choose_layout(x, y, layout, differences=True)
            measure, points = self._passes.differences, (w, anchor)
            total = self._sum(measure, x, y, bound, None, most, shares, layout, points)
            self.model.load(w)
        return total

    def scattered_length(self, x: Tensor, y: Tensor, expected: float) -> int:
        """Return P for scattered batches of `expected` records of the form of x, y [n, ...]."""
        with all_digits(self.model.vector):
            return self._passes.length(*_for_autograd(x, y), expected, scattered=True)

    def invariant(self, x: Tensor, y: Tensor, expected: float = EXPECTED) -> bool:
        """Whether a record's numbers have the same bits in every slot of a pass, on this machine.

        x, y: synthetic records [n, ...], which are repeated to fill passes for batches of
        `expected`. Losses, norms and the factors of every gradient are compared in other slots and
        next to other records, zeros or infinities.
        """
        with all_digits(self.model.vector), torch.no_grad():
            x, y = _for_autograd(x, y)
            return self._invariant(x, y, self._passes.length(x, y, expected))

    def _invariant(self, x: Tensor, y: Tensor, length: int, *, traced: bool = False) -> bool:
        if length == 1:
            return True
        dense = not traced and self._passes.at_once(x, y) is not None
        if not dense and length % self._passes.multiple(x, y):
            return False

        def measure(x: Tensor, y: Tensor) -> list[Tensor]:
            found = self._passes.gradients(align(x), align(y), traced=traced)
            return [v.clone() for v in (found.losses, *found.factors())]

        with torch.no_grad():
            blank = self._passes.blank(x, y)
            beside = [blank]
            if x.is_floating_point() and self._passes.takes(blank + torch.inf, y):
                beside.append(blank + torch.inf)
            return is_invariant(measure, x, y, length, beside)

    def verify(self, x: Tensor, y: Tensor) -> None:
        """Check on 3 or more synthetic records that the model keeps the records of a batch apart.

        What each record adds to a batch's sum must be its gradient as ordinary autograd computes
        it for a batch of one, with and without clipping; see independence. Random numbers, as of
        dropout, are replaced by their means. Raises ModelError if it is not, if a forward pass
        changes the model's buffers, and if no way differentiates the model.
        """
        self._mixers.check()
        precision = self.model.precision
        try:
            self.model.precision = "float32"  # the comparison needs all digits
            with all_digits(self.model.vector):
                check_separation(self, *_for_autograd(x, y))
        finally:
            self.model.precision = precision

    def summed(self, x: Tensor, y: Tensor, clip: float, w: Tensor) -> Tensor:
        """Σ_j min(w_j, C/‖g_j‖) g_j [d] over x, y [B, ...] for weights w [B]."""
        length = self._passes.length(x, y, EXPECTED)
        # Weights are asked for once a pass, in order.
        each = iter(nn.functional.pad(w, (0, -len(w) % length)).view(-1, length))
        layout = Placement(length=length)
        return self._sum(self._passes.gradients, x, y, clip, lambda _: next(each), layout=layout)

    def way(self, x: Tensor, y: Tensor) -> str:
        """Return the way of records of the form of x, y [B, ...]: "dense", "graph" or "records".

        See passes.
        """
        with all_digits(self.model.vector):
            return self._passes.way(*_for_autograd(x, y))

    def _choose_layout(
        self,
        x: Tensor,
        y: Tensor,
        layout: Placement | None = None,
        *,
        differences: bool = False,
        public: bool = False,
    ) -> Placement:
        """Return the layout for a call without one, chosen at the first batch of this form.

        public: whether P must not follow from that batch's number of records, as where counts of
        records are released.
        Synthetic records show whether it may be compact. Differences of a dense model are traced,
        which `invariant` does not cover, so they are checked at their first batch of a form.
        """
        traced = differences and self._passes.at_once(x, y) is not None
        if len(x) == 0 or (layout and (layout.places is not None or not traced)):
            return layout or COMPACT
        length = layout and layout.length
        if layout and not length:
            length = self._passes.length(x, y, layout.expected, traced=traced)
        key = length, traced, public, self._passes.form(x, y)
        if key not in self._layouts:
            expected, of = EXPECTED if public else len(x), self._passes.length
            length = length or of(x, y, expected, traced=traced, exact=not public)
            self._layouts[key] = self._try(x, y, length, traced=traced)
        return self._layouts[key]

    def _try(self, x: Tensor, y: Tensor, length: int, *, traced: bool = False) -> Placement:
        """Return compact passes of this length if the check of invariance passes, else of one."""
        generator = torch.Generator().manual_seed(0)
        shape = (8, *x.shape[1:])
        if x.is_floating_point():
            made_up = torch.randn(shape, generator=generator, dtype=torch.float64).to(x)
        else:
            made_up = torch.randint(2, shape, generator=generator).to(x)
        try:
            for j, one in enumerate(made_up):
                drawn = (v for v in (one, one + 1) if self._passes.takes(v, y))
                made_up[j] = next(drawn, self._passes.blank(x, y))
            labels = y.new_zeros(8, *y.shape[1:])
            good = self._invariant(made_up, labels, length, traced=traced)
        except Exception:  # whatever a model may raise at made-up records
            good = False
        return Placement(length=length if good else 1)

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
        measure: Callable[..., Measured],
        x: Tensor,
        y: Tensor,
        clip: float,
        weights: Weights | None,
        most: int | None = None,
        shares: Tensor | None = None,
        layout: Placement = COMPACT,
        points: tuple[Tensor, ...] = (),
        gamma: float | None = None,
    ) -> Tensor:
        """Sum [d] what `measure` finds of records and points; see `slack`."""
        vector, batch = self.model.vector, x.shape[0]
        if batch == 0:
            return torch.zeros_like(vector)
        length = layout.length or self._passes.length(x, y, layout.expected)
        exact = most is not None or layout.in_float64(batch, length)
        total = torch.zeros_like(vector, dtype=torch.float64 if exact else vector.dtype)
        # A replayed graph would draw the same random numbers again.
        if self._captures.active and not self._passes.draws(x, y):
            measure = partial(self._captures.measured, self._passes.state(), measure)
        with torch.no_grad():
            for one in self._passes.over(x, y, layout, length):
                found = measure(one.x, one.y, *points)
                w = None if weights is None else weights_of(weights, found.losses).clamp_min(0)
                share = None if shares is None else one.place(copy_to_device(shares, x.device))
                c = coefficients(clip, found.norms, w, share, gamma)
                c, good = mask_slots(c, found.losses, found.norms, w, one.occupied)
                found.add(c.to(total.dtype), good, total)
                # Free it before the next pass is measured.
                del found
        return within(total, clip, most).to(vector.dtype)


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
        # The activations of convolutions for more records do not fit into a CPU's caches.
        large = on_cpu(model.vector) and any(p.dim() > 2 for p in self._trainable)
        self._length = 128 if large else 1024
        self._seed: Seed = lambda: 0
        self._draws = True  # until a pass has drawn none

    def seed(self, seed: Seed) -> None:
        """Draw random numbers, as of dropout, from this seed from now on."""
        self._seed = seed

    def losses(self, x: Tensor, y: Tensor, layout: Placement | None = None) -> Tensor:
        """The per-sample losses [B] at the model's weights, without gradient; layout: ignored."""
        del layout
        if len(x) == 0:
            return self.model.vector.new_zeros(0)
        with torch.no_grad():
            return self._each(x, y)

    def weighted_sum(
        self, x: Tensor, y: Tensor, weights: Weights | None = None, shares: Tensor | None = None
    ) -> Tensor:
        """Σ_j s_j w_j g_j [d]; the weights are clamped to >= 0 and constants of the gradient.

        They are called once for each slice, and w_j must depend on ℓ_j alone. shares: s_j [B], ones
        by default.
        Equals PerSampleKernel.clipped_sum at C = ∞ up to rounding, wherever all is finite.
        """
        if len(x) == 0:
            return torch.zeros_like(self.model.vector)
        parts = (
            self._sum_gradients(
                x[r], y[r], weights, r.start, None if shares is None else shares[r]
            )[1]
            for r in slices(len(x), self._length)
        )
        return reduce(Tensor.add_, parts)

    def difference(
        self, x: Tensor, y: Tensor, w: Tensor, anchor: Tensor, shares: Tensor | None = None
    ) -> Tensor:
        """Σ_j s_j (∇ℓ_j(w) - ∇ℓ_j(anchor)) [d] for w, anchor [d]; the model is left at w."""
        w, anchor = (_copy_apart(v, self.model.vector) for v in (w, anchor))
        self.model.load(anchor)
        before = self.weighted_sum(x, y, shares=shares)
        self.model.load(w)
        return self.weighted_sum(x, y, shares=shares) - before

    def mean_over(self, x: Tensor, y: Tensor, w: Tensor) -> tuple[float, Tensor]:
        """Return the mean loss of the records x, y [n, ...] at w [d], and its gradient [d].

        Without records both are 0. The model is left at w.
        """
        self.model.load(w)
        loss, gradient = 0.0, w.new_zeros(len(w))
        for rows in slices(len(x), self._length):
            # A copy, as in every batch: a model may write over its input.
            losses, one = self._sum_gradients(x[rows].clone(), y[rows], None, rows.start)
            loss += float(losses.double().sum())
            gradient += one
        count = max(len(y), 1)
        return loss / count, gradient / count

    def _sum_gradients(
        self,
        x: Tensor,
        y: Tensor,
        weights: Weights | None,
        place: int,
        shares: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The losses [B > 0], and the weighted sum of their gradients [d]."""
        self._mixers.check()
        with _requiring_grad(self._trainable) as parameters:
            losses = self._each(x.detach(), y, place)
            w = weights_of(weights, losses.detach()).clamp_min(0)
            w = w if shares is None else w * copy_to_device(shares, w.device).to(w.dtype)
            return losses.detach(), _gradient((w * losses).sum(), parameters)

    def _each(self, x: Tensor, y: Tensor, place: int = 0) -> Tensor:
        """The losses [B]. place: the slice's among the batch's, by which it draws its numbers."""
        given = pixelwise(x) if self._images and x.dim() == 4 else x
        with fewer_digits(self.model), autocast(self.model):
            numbers = PassNumbers.of(self._seed, place) if self._draws else None
            seen = without_fused_draws(self.model) if numbers else nullcontext()
            with seen, KeyedDraws(numbers) if numbers else nullcontext() as mode:
                losses = wide(self.loss(self.model.module(given), y))
            self._draws = mode is not None and mode.used
            return one_each(losses, len(x))


def check_precision(model: FlatModel) -> None:
    """Raise ModelError for weights too coarse to clip by."""
    if model.vector.dtype not in (torch.float32, torch.float64):
        raise ModelError(
            f"the model's weights are {model.vector.dtype}: expected float32 or float64, "
            "whose norms are exact enough to clip by; convert it with .float(), and hold complex "
            "weights as pairs, which torch.view_as_complex makes complex again in forward"
        )
    if model.precision != "float32" and model.vector.dtype != torch.float32:
        raise ModelError(
            f"precision is {model.precision!r} and the model's weights are {model.vector.dtype}: "
            "expected float32, which is what is computed less exactly; convert it with .float()"
        )


@contextmanager
def _requiring_grad(parameters: Iterable[nn.Parameter]) -> Generator[list[nn.Parameter]]:
    """Enable autograd for the parameters, and restore their flags afterwards."""
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


def _copy_apart(v: Tensor, vector: Tensor) -> Tensor:
    same = v.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
    return v.clone() if same else v


def _for_autograd(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return records that autograd accepts: it refuses tensors made in inference mode."""
    return x.clone() if x.is_inference() else x.detach(), y.clone() if y.is_inference() else y
