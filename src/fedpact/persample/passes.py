"""Passes over a batch: losses, norms of per-sample gradients, and a way to add them up.

A model takes the first of these ways that takes it. Each keeps records apart by construction:

dense    a small chain of dense layers, summed in one go (dense)
chain    a chain of known layers, by hand (chain)
graph    operations that are known to keep records apart, as they were traced (graph)
records  each record by itself (alone)
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor, nn

from fedpact.errors import ModelError
from fedpact.losses import Loss, is_ours
from fedpact.params import FlatModel, at_hand, begin_alone
from fedpact.persample import norms
from fedpact.persample.alone import Alone
from fedpact.persample.apart.batch_rules import Mixed
from fedpact.persample.apart.export import Untraceable
from fedpact.persample.chain import Chain, chain_of
from fedpact.persample.convolution import pixelwise
from fedpact.persample.dense import Dense, SiteSum
from fedpact.persample.gradients import difference, part
from fedpact.persample.graph import Graph
from fedpact.persample.norms import LONGEST
from fedpact.persample.products import ALIKE, lying, padded, wanted
from fedpact.persample.share import Share, Space

_MOST: Final = 1024
"""So many records at most in one pass."""

_BLOCK: Final = {True: 128, False: 32}
"""So many records a thread measures at a time, where several do: of a chain, and of a graph.

With half of it most chains are no sooner done than by one thread; a graph's passes are longer.
"""

_WORTHWHILE: Final = 5_000
"""From so many parameters on: a pass of a smaller model is mostly Python's, which takes turns."""


WAYS: Final = {
    "chain": "The model is a chain of layers each of which is known to map records one by one.",
    "graph": "The model was traced, without a branch on values or on the batch's length and "
    "without state, into operations each of which is known to keep the records of a batch apart; "
    "what runs is what was traced.",
    "records": "The model is given each record by itself, as a batch of one.",
}
"""How each way keeps the records of a batch apart, as a privacy statement says it."""


@dataclass(frozen=True)
class Measured:
    """One pass over n records: losses [n], ‖g_j‖ [n] in float64.

    add(c [n], total [d]) adds Σ_j c_j g_j, in the type that both have.
    """

    losses: Tensor
    norms: Tensor
    add: Callable[[Tensor, Tensor], None]

    def finite(self, w: Tensor | None) -> Tensor | None:
        """Which records [n] are finite in loss, norm and weight w [n]; None where all of them are.

        For the host: on a GPU it would have to wait.
        """
        known = [self.losses, self.norms] + ([] if w is None else [w])
        # A sum is finite only if its terms are; it may overflow as well, so the rest is looked at.
        if math.isfinite(sum(float(t.sum()) for t in known)):
            return None
        good = torch.stack(known).isfinite().all(0)
        return None if good.all() else good


Shares = dict[str, list[Share]]
_Way = Graph | Alone
_Summed = Callable[["Passes", slice], Tensor]


class Passes:
    """Measures batches; call it without gradient.

    Raises ModelError where neither model and loss as a whole nor single records can be
    differentiated.
    """

    def __init__(self, model: FlatModel, loss: Loss) -> None:
        _keep_memory()
        self._model, self._loss = model, loss
        # A chain does not look at the loss; any other is traced with the model.
        self.chain = Chain.of(model) if is_ours(loss) else None
        # A GPU gains nothing from numpy, and the passes are written for it.
        self.dense = Dense.of(model, loss) if at_hand(model.vector) else None
        self._ways: dict[object, _Way] = {}
        self._space = Space()
        self._modules = list(model.module.modules())
        convolutions = [m for m in self._modules if isinstance(m, nn.Conv2d)]
        self._images = _gains(self._modules)
        self._instance = max([m.weight.nbytes for m in convolutions], default=0)

    def at_once(self, asked: SiteSum, *, exact: bool = False) -> Tensor | None:
        """Return what is asked for [d], None where it takes the passes that the others make.

        exact: in float64, of however few records.
        """
        if self.dense is None or self.chain is None or not self.chain.holds:
            return None
        return self.dense.sum_of(asked, exact=exact)

    def way(self, x: Tensor, y: Tensor) -> str:
        """Which way records of the form of x, y take: "chain", "graph" or "records"."""
        if self._chain(x) is not None:
            return "chain"
        return "graph" if isinstance(self._traced(x, y), Graph) else "records"

    def draws(self, x: Tensor, y: Tensor) -> bool:
        """Whether passes over records of the form of x, y draw random numbers."""
        return self._chain(x) is None and self._traced(x, y).draws

    def cut_small(self, x: Tensor, y: Tensor) -> bool:
        """Whether passes may hold so few records that float32 would add too many of them up."""
        return self._chain(x) is None and isinstance(self._traced(x, y), Alone)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """The losses [B] of records x, y [B, ...], without gradient.

        In the form that `gradients` gives them, so that one record more changes no other's bits.
        """
        found: list[Tensor] = []
        for rows in self._slices(x, y):
            some = self._given(x[rows], y[rows])
            chain = self._chain(x)
            losses = (
                chain.losses(*some, self._loss)
                if chain is not None
                else self._traced(*some).losses(*some)
            )
            found.append(losses[: rows.stop - rows.start])
        return one_each(torch.cat(found), len(x))

    def gradients(
        self, x: Tensor, y: Tensor, every: Sequence[slice] | None = None
    ) -> Iterator[tuple[slice, Measured]]:
        """Measure g_j = ∇ℓ_j at the model's weights, slice by slice of the batch.

        every: the slices, by default those of the whole batch.
        """
        every = every or self._slices(x, y)
        for rows in every:
            some = (x, y) if rows == slice(0, len(x)) else (x[rows], y[rows])
            losses, shares = self._pass(*self._given(*some), held=False)
            yield rows, self._measured(losses, shares, rows)

    def differences(
        self, x: Tensor, y: Tensor, w: Tensor, anchor: Tensor
    ) -> Iterator[tuple[slice, Measured]]:
        """Measure g_j = ∇ℓ_j(w) - ∇ℓ_j(anchor), w and anchor [d]; leaves the model at w.

        The losses are those at w, and not finite where one of the two is not.
        """
        for rows in self._slices(x, y):
            some = self._given(x[rows], y[rows])
            self._model.load(anchor)
            below, before = self._pass(*some, held=True)
            self._model.load(w)
            above, after = self._pass(*some, held=False)
            names = dict.fromkeys([*after, *before])
            both = {n: difference(after.pop(n, []), before.pop(n, [])) for n in names}
            yield rows, self._measured(torch.where(below.isfinite(), above, below), both, rows)

    def blocks(self, x: Tensor, y: Tensor) -> list[slice]:
        """Slices of the batch that threads may measure side by side, each with passes of its own.

        None of them where they may not: a GPU has its own threads; a recurrence is as slow for a
        few records as for many; random numbers are drawn in turn, and records that are given to a
        model one by one are given to its Python.
        """
        if self._model.size < _WORTHWHILE or not at_hand(self._model.vector):
            return []
        way = self._chain(x) or self._traced(x, y)
        if isinstance(way, Alone) or (isinstance(way, Graph) and way.in_turn):
            return []
        block = max(_BLOCK[isinstance(way, Chain)], way.alike)
        return slices(len(x), min(block, self._length(x, y)))

    def beside(self) -> "Passes":
        """Passes of the same model for another thread; what was traced serves both."""
        other = copy(self)
        other.chain = None if self.chain is None else Chain.of(self._model)
        other._space = Space()
        return other

    def _slices(self, x: Tensor, y: Tensor) -> list[slice]:
        return slices(len(x), self._length(x, y))

    def _length(self, x: Tensor, y: Tensor) -> int:
        """So many records at once that most of their gradients can be kept."""
        way = None if self._chain(x) is not None else self._traced(x, y)
        if isinstance(way, Alone):
            return way.step
        most = norms.KEEP_BYTES // max(1, self._instance if way is None else way.instance)
        if way is not None:
            most = min(most, 2 * norms.KEEP_BYTES // max(1, way.activations))
        # A few records at a time would cost more than making their gradients twice; a slice that is
        # no multiple of what its pass is padded to would waste the rest.
        alike = ALIKE if way is None else way.alike
        return min(max(most // alike, 1) * alike, _MOST)

    def _given(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The records as their way takes them.

        Images by pixel; and but for a chain the last record over and over behind, see
        products.padded.
        """
        images = self._images and x.dim() == 4
        if (chain := self._chain(x)) is not None:
            x = padded(x, chain.alike)  # first: what it puts together is by channel
            return (pixelwise(x) if images else x), y
        way = self._traced(x, y)
        count = x.shape[0]
        more = (-count % way.step) if isinstance(way, Alone) else wanted(count, way.alike) - count
        if more:
            x, y = (torch.cat([v, v[-1:].expand(more, *v.shape[1:])]) for v in (x, y))
        # Last: what is put together is by channel, however its parts lie in memory. Record by
        # record it is the model's own code: see by_pixel.
        return (pixelwise(x) if images and not isinstance(way, Alone) else lying(x)), y

    def _pass(self, x: Tensor, y: Tensor, *, held: bool) -> tuple[Tensor, Shares]:
        """Losses [B] and shares by the parameters' names; held: they outlast other weights."""
        if (chain := self._chain(x)) is not None:
            return chain.run(x, y, self._loss)
        way = self._traced(x, y)
        return way.run(x, y) if isinstance(way, Alone) else way.run(x, y, held=held)

    def _chain(self, x: Tensor) -> Chain | None:
        chain = self.chain
        return chain if chain is not None and chain.holds and chain.takes(x) else None

    def _traced(self, x: Tensor, y: Tensor) -> _Way:
        """The way of records of this form, for a model in this state of training."""
        key = (self.state(), x.shape[1:], x.dtype, y.shape[1:], y.dtype)
        if key not in self._ways:
            try:
                self._ways[key] = Graph(self._model, self._loss, x, y)
            except (Mixed, Untraceable) as why:
                self._ways[key] = Alone(self._model, self._loss, x, y, str(why))
        return self._ways[key]

    def state(self) -> tuple[object, ...]:
        """What of a model's state a way follows."""
        return tuple(
            (
                m.training,
                getattr(m, "dropout", None),
                len(vars(m)["_forward_hooks"]),
                "forward" in vars(m),
            )
            for m in self._modules
        )

    def _measured(self, losses: Tensor, shares: Shares, rows: slice) -> Measured:
        count = rows.stop - rows.start
        losses = losses[:count]
        self._space.reset()
        parts = {name: part(some, self._space) for name, some in shares.items() if some}

        def add(c: Tensor, total: Tensor) -> None:
            for name, one in parts.items():
                place = self._model.own[name]
                # model.views in one operation.
                view = total.as_strided(place.shape, place.stride(), place.storage_offset())
                one.add(c, view)

        squares = [one.squares[:count] for one in parts.values()]
        if not squares:
            return Measured(losses, losses.new_zeros(len(losses), dtype=torch.float64), add)
        # One by one, as torch.sum adds the last few columns in another order.
        total = sum(squares[1:], squares[0])
        return Measured(losses, torch.where(total > LONGEST**2, torch.inf, total).sqrt_(), add)


class Team:
    """Threads that take a batch's blocks side by side, each with passes of its own.

    Of torch's own threads each takes a part of an operation, by how many records there are, which
    changes last bits; here each takes whole operations on records that stand together anyway.
    """

    def __init__(self, passes: Passes) -> None:
        self._first = passes
        self._of: tuple[object, ...] = ()
        self._passes: list[Passes] = []
        self._pool: ThreadPoolExecutor | None = None

    def over(self, number: int, blocks: Sequence[slice], summed: _Summed) -> Iterator[Tensor]:
        """Yield what is summed of each block, in their order, on so many threads."""
        # A fork has no threads, and a model in another state may take another way.
        of = (os.getpid(), self._first.state())
        if self._pool is None or self._of != of or len(self._passes) < number:
            self._of, self._passes = of, [self._first.beside() for _ in range(number)]
            self._pool = ThreadPoolExecutor(number, "records", begin_alone)
        for start in range(0, len(blocks), number):
            pairs = zip(self._passes, blocks[start : start + number], strict=False)
            # All of them, before one's error is told: passes are not to be begun twice.
            try:
                jobs = [self._pool.submit(summed, passes, block) for passes, block in pairs]
                wait(jobs)
            except BaseException:  # as Ctrl-C: what is at work goes on with what is let go of here
                self._passes, self._pool = [], None
                raise
            yield from (job.result() for job in jobs)


@cache
def _keep_memory() -> None:
    """Have the C library keep freed memory for the next step, which asks for the same again.

    glibc takes each tensor of some MiB from the system and gives it back, at the price of zeroing
    its pages, until it has seen one of 32 MiB or less freed; then it keeps what is smaller. This
    one is never written to, so it costs nothing.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def by_pixel(module: nn.Module) -> bool:
    """Whether images may lie by pixel for a module, and should: a chain of torch's own layers.

    Those go by shape. Code of a user's own may go by how numbers lie: `view` fails where channels
    do not come first, and `as_strided` reads others.
    """
    layers = chain_of(module) or []
    return _gains(layers) and all(
        type(layer).__module__.startswith("torch.nn.modules.") for layer in layers
    )


def _gains(layers: Sequence[nn.Module]) -> bool:
    """Whether images that lie by pixel are worth it: max-pooling takes a ninth of its time.

    Not where channels are normalised: the variance of numbers that are nearly alike, as of an
    empty image, is then rounding, as torch takes it as the mean square less the squared mean.
    """

    def has(*kinds: type[nn.Module]) -> bool:
        return any(isinstance(layer, kinds) for layer in layers)

    return has(nn.Conv2d) and has(nn.MaxPool2d) and not has(nn.GroupNorm, nn.InstanceNorm2d)


def slices(batch: int, most: int) -> list[slice]:
    """A batch in slices of `most` records, the last of those that are left.

    Not of equal length: then one record more would move the others to other places.
    """
    return [slice(i, min(i + most, batch)) for i in range(0, batch, most)]


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
