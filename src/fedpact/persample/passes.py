"""Book-keeping: norms and weighted sums of per-sample gradients, from one pass over a batch.

One forward and one backward pass of the activations record every layer's input and output gradient:
by a plan where the model is a chain of layers (compiled), else by autograd (tape). The layers'
rules turn them into norms and sums (cover, layers), and what has no rule is replayed (fallback).
A short step of a small chain of dense layers is summed in one go (dense).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from fedpact.errors import ModelError
from fedpact.losses import Loss
from fedpact.params import FlatModel, at_hand
from fedpact.persample import norms
from fedpact.persample.chain import Plan
from fedpact.persample.dense import Dense, Sum
from fedpact.persample.difference import difference, held
from fedpact.persample.fallback import Random, Whole
from fedpact.persample.layers import Layer
from fedpact.persample.norms import LONGEST, Part, chosen
from fedpact.persample.owners import Cover, NotAUnit, Owner
from fedpact.persample.stages import Unfit
from fedpact.persample.tape import Call, Recorded, record, requiring_grad


@dataclass(frozen=True)
class Measured:
    """One pass over n records: losses [n], ‖g_j‖ [n]; add(c [n], total [d]) adds Σ_j c_j g_j."""

    losses: Tensor
    norms: Tensor
    add: Callable[[Tensor, Tensor], None]


_FEW = 32

# A module's share of a pass: (its parameter names -> the model's, its Part).
_Share = tuple[dict[str, str], Part]


class BookKeeping:
    """Measures batches; call it without gradient.

    Raises ModelError where a model or a loss does not keep records apart.
    """

    def __init__(self, model: FlatModel, loss: Loss) -> None:
        _keep_memory()
        self._model, self._loss = model, loss
        self.cover = Cover(model)
        self.plan = Plan.of(model, self.cover.owners)
        # A card gains nothing from numpy, and the passes are written for it.
        self.dense = Dense.of(model, loss) if at_hand(model.vector) else None
        self._whole = Whole(model, loss)
        self._random = False
        self._trainable = trainable(model)
        self._places = model.own
        convolutions = [m for m in model.module.modules() if isinstance(m, nn.Conv2d)]
        self._channels_last = bool(convolutions)
        self._instance = max([m.weight.nbytes for m in convolutions], default=0)

    def at_once(self, asked: Sum) -> Tensor | None:
        """Return what is asked for [d], None where it takes the passes that the others make."""
        if self.dense is None or self.plan is None or not self.plan.holds:
            return None
        return self.dense.sums([asked])[0]

    def gradients(self, x: Tensor, y: Tensor) -> Iterator[tuple[slice, Measured]]:
        """Measure g_j = ∇ℓ_j at the model's weights, slice by slice of the batch."""
        every = self._parts(x.shape[0])
        for rows in every:
            if not self._random:
                try:
                    some = (x, y) if len(every) == 1 else (x[rows], y[rows])
                    losses, calls = self._pass(*some)
                    yield rows, self._measured(losses, self._shares(calls))
                    continue
                except Random:
                    self._random = True
            for inner in slices(rows, self._whole.step):
                losses, found = self._whole.rows(x[inner], y[inner])
                yield inner, self._measured(losses, [self._whole.share(found)])

    def differences(
        self, x: Tensor, y: Tensor, w: Tensor, anchor: Tensor
    ) -> Iterator[tuple[slice, Measured]]:
        """Measure g_j = ∇ℓ_j(w) - ∇ℓ_j(anchor), w and anchor [d]; leaves the model at w.

        The losses are those at w, and not finite where one of the two is not.
        """
        layers = [(owner, owner.layer) for owner in self.cover.owners if owner.layer]
        if len(layers) == len(self.cover.owners):
            for rows in self._parts(len(x)):
                yield rows, self._apart(layers, x[rows], y[rows], w, anchor)
            return
        # A unit is replayed at the weights it was recorded at; two points would take two replays
        # with two sets of weights, so the model is differentiated as a whole instead.
        for rows in slices(slice(0, len(x)), self._whole.step):
            self._model.load(anchor)
            below, before = self._whole.rows(x[rows], y[rows])
            self._model.load(w)
            above, after = self._whole.rows(x[rows], y[rows])
            found = {name: after[name] - before[name] for name in after}
            yield rows, self._measured(_both(above, below), [self._whole.share(found)])

    def _apart(
        self, layers: list[tuple[Owner, Layer]], x: Tensor, y: Tensor, w: Tensor, anchor: Tensor
    ) -> Measured:
        self._model.load(anchor)
        below, before = self._pass(x, y)
        before = [[held(call, self._model.vector) for call in made] for made in before]
        self._model.load(w)
        above, after = self._pass(x, y)
        shares: list[_Share] = []
        for owner, layer in layers:
            both = after.pop(0), before.pop(0)
            if any(both):
                part = difference(owner.module, layer.rule, frozenset(owner.names), both)
                shares.append((owner.names, part))
        return self._measured(_both(above, below), shares)

    def _parts(self, batch: int) -> list[slice]:
        """So many records at once that the largest convolution's gradients can be kept."""
        most = norms.KEEP_BYTES // max(1, self._instance)
        # A few records at a time would cost more than making their gradients twice.
        return slices(slice(0, batch), most if most >= _FEW else batch)

    def _pass(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[list[Call]]]:
        """Losses [B], and each owner's calls with their output gradients."""
        losses, calls = self._by_plan_or_tape(x, y)
        if at_hand(x):
            return losses, calls
        return without_bad(losses, calls, [owner.layer is not None for owner in self.cover.owners])

    def _by_plan_or_tape(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[list[Call]]]:
        if self.plan is not None and self.plan.holds:
            try:
                by_pixel = _by_pixel(x) if self._images(x) else x
                losses, calls = self.plan.run(by_pixel, y, self._loss)
                return one_each(losses, x.shape[0]), calls
            except Unfit:
                self.plan = None
        while True:
            try:
                losses, calls = self._taped(x, y)
                return losses, [
                    _checked(o, made) for o, made in zip(self.cover.owners, calls, strict=True)
                ]
            except NotAUnit as found:
                self.cover.promote(found.owner)

    def _taped(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[list[Call]]]:
        entries = [
            Recorded(o.module, partial(o.accept, len(x)), fresh=o.layer is not None)
            for o in self.cover.owners
        ]
        with requiring_grad(self._trainable, False):
            losses, calls = record(
                entries, lambda: one_each(self._loss(self._output(x), y), len(x))
            )
            if losses.requires_grad:
                torch.autograd.backward(losses, torch.ones_like(losses))
        return losses.detach(), calls

    def _images(self, x: Tensor) -> bool:
        return self._channels_last and x.dim() == 4

    def _output(self, x: Tensor) -> Tensor:
        """The model's output, the images laid out by pixel if it can: pooling is 9 times faster."""
        if self._images(x):
            try:
                return self._model.module(_by_pixel(x))
            except RuntimeError:
                # Most likely a view of x that this layout does not allow; else it comes again.
                self._channels_last = False
        return self._model.module(x)

    def _shares(self, calls: list[list[Call]]) -> list[_Share]:
        shares: list[_Share] = []
        for owner in self.cover.owners:
            # Let go of each layer's calls: a rule holds what it still needs.
            made = calls.pop(0)
            if made:
                shares.append((owner.names, owner.measure(made)))
        return shares

    def _view(self, total: Tensor, name: str) -> Tensor:
        """What a parameter is of the model's vector, of another: model.views in one operation."""
        place = self._places[name]
        return total.as_strided(place.shape, place.stride(), place.storage_offset())

    def _measured(self, losses: Tensor, shares: list[_Share]) -> Measured:
        def add(c: Tensor, total: Tensor) -> None:
            for names, part in shares:
                part.write(c, {local: self._view(total, name) for local, name in names.items()})

        squares = [part.squares for _, part in shares]
        if not squares:
            return Measured(losses, torch.zeros_like(losses), add)
        total = squares[0] if len(squares) == 1 else torch.stack(squares).sum(0)
        norms = torch.where(total > LONGEST**2, torch.inf, total).sqrt_()
        return Measured(losses, norms.to(losses.dtype), add)


def _checked(owner: Owner, calls: list[Call]) -> list[Call]:
    """The calls that a loss depends on. Raises ModelError where an input was changed in place."""
    live = [call for call in calls if call.grad is not None]
    for call in live:
        call.check(owner.path)
    return live


@cache
def _keep_memory() -> None:
    """Have the C library keep freed memory for the next step, which asks for the same again.

    glibc takes each tensor of some MiB from the system and gives it back, at the price of zeroing
    its pages, until it has seen one of 32 MiB or less freed; then it keeps what is smaller. This
    one is never written to, so it costs nothing.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def _by_pixel(x: Tensor) -> Tensor:
    _, channels, height, width = x.shape
    if channels == 1:
        # Both layouts are the same memory; by these strides torch takes it for the one we want.
        return x.contiguous().as_strided(x.shape, (height * width, 1, width, 1))
    return x.contiguous(memory_format=torch.channels_last)


def without_bad(
    losses: Tensor, calls: list[list[Call]], of_layer: list[bool]
) -> tuple[Tensor, list[list[Call]]]:
    """Return the losses [n] and calls of a pass, layers' calls 0 for records that are not finite.

    Nor may ‖x_j‖‖g_j‖ of a layer's input and output gradient be beyond the root of the largest
    number: no number of the layer's gradient is then beyond it, so that all of them times 0 are 0.
    Where a module has no rule its gradients are cleaned when they are made (parts.kept).
    """
    good = losses.isfinite()
    for call in (call for made, one in zip(calls, of_layer, strict=True) if one for call in made):
        size = _squares(call.grad) if call.grad is not None else torch.ones_like(losses)
        if call.input.is_floating_point():
            size = size * _squares(call.input)
        good = good & size.isfinite()
    cleaned = [
        [_cleaned(call, good) for call in made] if one else made
        for made, one in zip(calls, of_layer, strict=True)
    ]
    return torch.where(good, losses, torch.nan), cleaned


def _squares(rows: Tensor) -> Tensor:
    return rows.square().flatten(1).sum(1)


def _cleaned(call: Call, good: Tensor) -> Call:
    x = chosen(good, call.input) if call.input.is_floating_point() else call.input
    return Call((x,), {}, None if call.grad is None else chosen(good, call.grad))


def _both(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below.isfinite(), above, below)


def slices(rows: slice, most: int) -> list[slice]:
    """Rows in slices of nearly equal length, at most `most`."""
    length = rows.stop - rows.start
    count = -(-length // max(1, most))
    ends = [rows.start + i * length // count for i in range(count + 1)]
    return [slice(i, j) for i, j in pairwise(ends)]


def trainable(model: FlatModel) -> list[nn.Parameter]:
    """The model's trainable parameters in the order of its vector."""
    named = dict(model.module.named_parameters())
    return [named[name] for name, _ in model.views(model.vector)]


def one_each(losses: Tensor, batch: int) -> Tensor:
    """Return losses [batch]. Raises ModelError for another shape."""
    if losses.shape != (batch,):
        raise ModelError(
            f"the losses of {batch} records have shape {tuple(losses.shape)}: expected ({batch},), "
            "one a record; use a loss that does not reduce over the batch, as fedpact.losses has"
        )
    return losses
