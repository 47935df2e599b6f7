"""Passes over a batch: losses, norms of per-sample gradients, and a way to add them up.

A model takes the first of these ways that takes it. Each keeps records apart by construction:

dense    a small sequence of dense layers, summed in one go (dense)
graph    operations that are known to keep records apart, as they were traced (graph)
records  each record by itself (per_record)

On a GPU a pass of a small model takes as long as it takes Python to launch its operations. So the
operations of the first pass of each shape are captured as CUDA graphs, and later ones replay them:
the inputs are copied to where the first one's were, and the parameters are read where they lie.
Captured are measuring and adding, each by itself; weights, clip and coefficients, which follow from
numbers of the host, stay between them. What cannot be captured runs operation by operation, and
says so once.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from fedpact.common.errors import ModelError
from fedpact.common.losses import Loss
from fedpact.common.params import FlatModel, fewer_digits, on_cpu
from fedpact.per_sample import norms
from fedpact.per_sample.convolution import pixelwise
from fedpact.per_sample.dense import Dense
from fedpact.per_sample.gradients import Measured, difference, part, together
from fedpact.per_sample.graph import Graph, Shares
from fedpact.per_sample.layers import gains_by_pixel
from fedpact.per_sample.layout import Pass, Placement, lay_out, length_for
from fedpact.per_sample.norms import LONGEST
from fedpact.per_sample.per_record import Alone
from fedpact.per_sample.tracing.batch_rules import Mixed
from fedpact.per_sample.tracing.export import Untraceable
from fedpact.per_sample.tracing.keyed_draws import PassNumbers, Seed, drawing, without_fused_draws

WAYS: Final = {
    "dense": "The model is a sequence of dense layers, each of which maps records one by one.",
    "graph": "The model was traced, without a branch on values or on the batch's length and "
    "without state, into operations each of which is known to keep the records of a batch apart; "
    "what runs is what was traced.",
    "records": "The model is given each record by itself, as a batch of one.",
}
"""How each way keeps the records of a batch apart, as a privacy statement says it."""

_Way = Graph | Alone


class Passes:
    """Measures passes; call it without gradient.

    Raises ModelError where neither model and loss as a whole nor single records can be
    differentiated.
    """

    def __init__(self, model: FlatModel, loss: Loss) -> None:
        _keep_memory()
        self._model, self._loss = model, loss
        # Of bfloat16 only autograd's passes know.
        self.dense = None if model.precision == "bf16" else Dense.of(model, loss)
        self.seed: Seed = lambda: 0  # of the step's random numbers, as dropout draws them
        self._ways: dict[object, _Way] = {}
        self._fits: dict[object, int] = {}
        self._blanks: dict[object, Tensor] = {}
        modules = list(model.module.modules())
        self._modules = [(m, vars(m)) for m in modules]
        self._images = gains_by_pixel(modules)

    def at_once(self, x: Tensor, y: Tensor) -> Dense | None:
        """What sums such records in one go, None where they take the passes that others make."""
        dense = self.dense
        return dense if dense is not None and dense.holds and dense.fits(x, y) else None

    def way(self, x: Tensor, y: Tensor) -> str:
        """Which way records of the form of x, y take: "dense", "graph" or "records"."""
        if self.at_once(x, y) is not None:
            return "dense"
        return "graph" if isinstance(self._trace_for(x, y), Graph) else "records"

    def draws(self, x: Tensor, y: Tensor) -> bool:
        """Whether passes over records of the form of x, y draw random numbers."""
        return self.at_once(x, y) is None and self._trace_for(x, y).draws

    def multiple(self, x: Tensor, y: Tensor) -> int:
        """Return a number of slots of which multiples leave no rest of registers, of traced passes.

        Other code may compute a rest, and so some slots; memory may not allow such a multiple.
        """
        return self._trace_for(x, y).multiple

    def length(
        self, x: Tensor, y: Tensor, expected: float, *, traced: bool = False, **how: bool
    ) -> int:
        """Return P for batches of records of the form of x, y; see layout.length_for.

        traced: of the traced passes, also where the model has the dense way.
        """
        if not traced and (dense := self.at_once(x, y)) is not None:
            return dense.length(expected, **how)
        way = self._trace_for(x, y)
        if isinstance(way, Alone):
            return way.length(expected, **how)
        if not on_cpu(x):
            return length_for(expected, self._fitting(x, y), _GPU_OVERHEAD, **how)
        instance, activations, overhead = way.cost
        keep = norms.keep_bytes(self._model.vector)
        # P must follow from the model alone, never from the records.
        most = max(16, min(2 * keep // max(1, instance), 6 * keep // max(1, activations)))
        if overhead < _BUSY:
            most = min(most, _CACHED)
        return length_for(expected, most, overhead, way.multiple, **how)

    def _fitting(self, x: Tensor, y: Tensor) -> int:
        """Return how many slots a pass on a GPU may have.

        It follows from the memory of passes over synthetic records and the GPU's total memory. Free
        memory would depend on the number of records.
        """
        form = self.form(x, y)
        if form not in self._fits:

            def run(length: int) -> None:
                blanks = self.blank(x, y).expand(length, *x.shape[1:]).clone()
                found = self.gradients(blanks, y.new_zeros(length, *y.shape[1:]))
                c = found.norms.to(self._model.vector.dtype)
                found.add(c, found.norms.isfinite(), torch.zeros_like(self._model.vector))

            with torch.no_grad():
                self._fits[form] = slots_that_fit(run, x.device)
        return self._fits[form]

    def over(self, x: Tensor, y: Tensor, layout: Placement, length: int = 0) -> Iterator[Pass]:
        """Return the passes over records x, y [B, ...]. length: P; 0: as the layout has it."""
        length = length or layout.length or self.length(x, y, layout.expected)
        # Dense layers take zeros, as whatever an empty slot holds.
        blank = self.blank(x, y) if self.dense is None else None
        return lay_out(x, y, length, layout, blank)

    def blank(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the contents [...] of empty slots for records of the form of x, y.

        Zeros, or ones if the model raises at zeros. Determined once for each form, from no record.
        """
        form = self.form(x, y)
        if form not in self._blanks:
            zeros = x.new_zeros(x.shape[1:])
            tried = zeros, zeros + 1
            self._blanks[form] = next((one for one in tried if self.takes(one, y)), zeros)
        return self._blanks[form]

    def takes(self, one: Tensor, y: Tensor) -> bool:
        """Whether the model takes a made-up record [...], with labels of the form of y."""
        two, labels = torch.stack([one, one]), y.new_zeros(2, *y.shape[1:])
        try:
            self.losses(two, labels)
        except Exception:  # whatever a model may raise
            return False
        return True

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """The losses [P] of records x, y [P, ...], without gradient."""
        if (dense := self.at_once(x, y)) is not None:
            return dense.losses(x, y)
        way, x = self._prepare(x, y)
        with fewer_digits(self._model), self._drawing(way, x, y):
            return way.losses(x, y)

    def norms(self, x: Tensor, y: Tensor) -> Tensor:
        """‖g_j‖ [P] of records x, y [P, ...], in float64; call it without gradient."""
        return self.gradients(x, y).norms

    def gradients(self, x: Tensor, y: Tensor, *, traced: bool = False) -> Measured:
        """Measure g_j = ∇ℓ_j of records x, y [P, ...] at the model's weights; traced: see length.

        Call it without gradient.
        """
        if not traced and (dense := self.at_once(x, y)) is not None:
            return dense.gradients(x, y)
        way, x = self._prepare(x, y)
        return self._measure(*self._pass(way, x, y))

    def differences(self, x: Tensor, y: Tensor, w: Tensor, anchor: Tensor) -> Measured:
        """Measure g_j = ∇ℓ_j(w) - ∇ℓ_j(anchor), w and anchor [d]; leaves the model at w.

        The losses are those at w, and not finite where one of the two is not. At both points the
        same random numbers are drawn.
        """
        way, x = self._prepare(x, y)
        self._model.load(anchor)
        below, before = self._pass(way, x, y, held=True)
        self._model.load(w)
        above, after = self._pass(way, x, y)
        names = dict.fromkeys([*after, *before])
        both = {n: difference(after.pop(n, []), before.pop(n, [])) for n in names}
        return self._measure(torch.where(below.isfinite(), above, below), both)

    def _prepare(self, x: Tensor, y: Tensor) -> tuple[_Way, Tensor]:
        """Return the way of records x, y, and x in its memory format: by pixel where faster."""
        way = self._trace_for(x, y)
        # Record by record it is the model's own code: see by_pixel.
        images = self._images and x.dim() == 4 and isinstance(way, Graph)
        return way, pixelwise(x) if images else x

    def _pass(
        self, way: _Way, x: Tensor, y: Tensor, *, held: bool = False
    ) -> tuple[Tensor, Shares]:
        """Losses [P] and shares by the parameters' names; held: they outlast the weights."""
        with fewer_digits(self._model), self._drawing(way, x, y):
            return way.run(x, y, held=held)

    @contextmanager
    def _drawing(self, way: _Way, x: Tensor, y: Tensor) -> Generator[None]:
        """Let a way draw the random numbers of the records x, y at this step."""
        if not way.draws:
            yield
            return
        numbers = PassNumbers.of_records(self.seed, x, y, leading=isinstance(way, Alone))
        with without_fused_draws(self._model), drawing(numbers):
            yield

    def _trace_for(self, x: Tensor, y: Tensor) -> _Way:
        """The way of records of this form, for a model in this state of training."""
        key = self.form(x, y)
        if key not in self._ways:
            try:
                self._ways[key] = Graph(self._model, self._loss, x, y)
            except (Mixed, Untraceable) as why:
                self._ways[key] = Alone(self._model, self._loss, x, y, str(why))
        return self._ways[key]

    def form(self, x: Tensor, y: Tensor) -> tuple[object, ...]:
        """What a way follows: a model's state and the form of records x, y."""
        return self.state(), x.shape[1:], x.dtype, y.shape[1:], y.dtype

    def state(self) -> tuple[object, ...]:
        """What of a model's state a way follows."""
        hooks = ("_forward_hooks", "_forward_pre_hooks")
        return tuple(
            (m.training, held.get("dropout"), *(len(held[n]) for n in hooks), "forward" in held)
            for m, held in self._modules
        )

    def _measure(self, losses: Tensor, shares: Shares) -> Measured:
        groups = together(shares)
        parts = [part(some, partial(fewer_digits, self._model)) for _, some in groups]
        squares = [one.squares for one in parts]

        def add(c: Tensor, good: Tensor | None, total: Tensor) -> None:
            for (names, _), one in zip(groups, parts, strict=True):
                # model.views in one operation.
                views = [
                    total.as_strided(p.shape, p.stride(), p.storage_offset())
                    for p in map(self._model.own.__getitem__, names)
                ]
                if len(views) == 1:
                    one.add(c, good, views[0])
                    continue
                one.add(c, good, rest := total.new_zeros(sum(v.numel() for v in views)))
                for view in views:
                    view.add_(rest[: view.numel()].view(view.shape))
                    rest = rest[view.numel() :]

        def factors() -> list[Tensor]:
            made = [t for some in shares.values() for share in some for t in share.factors()]
            return squares + made

        if not squares:
            none = losses.new_zeros(len(losses), dtype=torch.float64)
            return Measured(losses, none, add, factors)
        least = norms.least_square(self._model.vector)
        total = torch.stack(squares).double().clamp_min_(least).sum(0)
        lengths = torch.where(total > LONGEST**2, torch.inf, total).sqrt_()
        return Measured(losses, lengths, add, factors)


_CACHED: Final = 128
_BUSY: Final = 32.0
"""The longest pass on a CPU, by its caches, if its overhead in records is below _BUSY."""

_GPU_OVERHEAD: Final = 4096.0
"""A GPU's pass is as long as fits: most of its time goes into launching operations."""


@cache
def _keep_memory() -> None:
    """Make the C library keep freed memory for the next step.

    glibc returns each tensor of some MiB to the system, and its pages are zeroed when it is
    allocated again, until one of up to 32 MiB was freed; it then keeps smaller ones. This tensor is
    never written to, so it costs nothing.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def trainable(model: FlatModel) -> list[nn.Parameter]:
    """The model's trainable parameters in the order of its vector."""
    named = dict(model.module.named_parameters())
    return [named[name] for name, _ in model.views(model.vector)]


def one_each(losses: Tensor, batch: int) -> Tensor:
    """Return losses [batch]. Raises ModelError for another shape."""
    if losses.shape != (batch,):
        raise ModelError(
            f"the losses of {batch} records have shape {tuple(losses.shape)}: expected ({batch},), "
            "one a record; use a loss that does not reduce over the batch, as "
            "fedpact.common.losses has"
        )
    return losses


_SHARE: Final = 3
"""A pass takes a third of a GPU's memory at most, and differences, which are two, two thirds."""

_FEW, _MORE = 8, 24
"""Slots of two passes, of which the second's peak is higher by what the slots between take."""


def slots_that_fit(run: Callable[[int], object], device: torch.device) -> int:
    """Return how many slots a pass may have, at least 1. run: does a pass with so many."""
    run(_FEW)  # libraries take memory of their own the first time
    few, more = (peak_memory(run, slots, device) for slots in (_FEW, _MORE))
    each = max(1, (more - few) // (_MORE - _FEW))
    return max(1, _FEW + (whole_memory(device) // _SHARE - few) // each)


def peak_memory(run: Callable[[int], object], slots: int, device: torch.device) -> int:
    """Return how many bytes a pass with so many slots takes at most."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run(slots)
    return torch.cuda.max_memory_allocated(device) - before


def whole_memory(device: torch.device) -> int:
    """Return how many bytes a GPU has in all, in use or not."""
    return torch.cuda.mem_get_info(device)[1]


_logger = logging.getLogger("fedpact")

Recorder = Callable[[Callable[[], object]], Callable[[], object]]
"""Runs a function of no arguments that waits for nothing, and returns what does all of it again.

Each time all results are in the same place in memory, so who has the first ones has the last.
"""


def recorder_for(device: torch.device) -> Recorder | None:
    """Return the recorder of a device; None for a CPU."""
    if device.type != "cuda":
        return None
    return partial(_cuda_graph, device, torch.cuda.graph_pool_handle())


class Captures:
    """What was captured of one model's passes. name: the model's, for messages."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._record = name, recorder_for(device)
        self._known: dict[object, _Captured] = {}

    @property
    def active(self) -> bool:
        """Whether passes are, or have been, captured."""
        return self._record is not None or len(self._known) > 0

    def measured(
        self, state: object, measure: Callable[..., Measured], *inputs: Tensor
    ) -> Measured:
        """Return measure(*inputs), which the next call may write over.

        state: whatever else than the numbers of its inputs and of the model `measure` depends on.
        """
        key = state, measure, *((v.shape, v.dtype) for v in inputs)
        if key not in self._known:
            if self._record is None:
                return measure(*inputs)
            self._known[key] = _Captured(self.recorded, measure, inputs)
        return self._known[key].measured(inputs)

    def recorded(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return a function that repeats `run`: a replay, or `run` if it cannot be captured."""
        if self._record is not None:
            try:
                return self._record(run)
            except Exception as error:  # whatever a model or a library may not have captured
                self._record = None
                _logger.warning(
                    "model %s: steps run operation by operation on the GPU, as one cannot be "
                    "captured: %s: %s", self._name, type(error).__name__, error
                )  # fmt: skip
        return run


class _Captured:
    """One pass that can be measured and added again, for inputs like the given ones."""

    def __init__(
        self,
        recorded: Callable[[Callable[[], object]], Callable[[], object]],
        measure: Callable[..., Measured],
        inputs: Sequence[Tensor],
    ) -> None:
        self._inputs, self._recorded = [v.clone() for v in inputs], recorded
        self._found: list[Measured] = []
        self._sums: dict[torch.dtype, tuple[Callable[[], object], tuple[Tensor, ...]]] = {}

        def run() -> None:
            self._found[:] = [measure(*self._inputs)]

        self._measure = recorded(run)

    def measured(self, inputs: Sequence[Tensor]) -> Measured:
        """Return what is found of other inputs."""
        for place, given in zip(self._inputs, inputs, strict=True):
            place.copy_(given)
        self._measure()
        return replace(self._found[0], add=self._add)

    def _add(self, c: Tensor, good: Tensor | None, total: Tensor) -> None:
        if total.dtype not in self._sums:
            self._sums[total.dtype] = self._adding(c, total)
        add, (own_c, own_good, own_total) = self._sums[total.dtype]
        own_c.copy_(c)
        own_good.copy_(good) if good is not None else own_good.fill_(True)
        add()
        total += own_total

    def _adding(self, c: Tensor, total: Tensor) -> tuple[Callable[[], object], tuple[Tensor, ...]]:
        places = torch.zeros_like(c), torch.ones_like(c, dtype=torch.bool), torch.zeros_like(total)

        def run() -> None:
            self._found[0].add(places[0], places[1], places[2].zero_())

        return self._recorded(run), places


def _cuda_graph(device: torch.device, pool: Any, run: Callable[[], object]) -> Callable[[], object]:
    """See Recorder. pool: the memory that graphs share of which one is replayed at a time."""
    with torch.cuda.device(device):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Libraries initialise themselves in a first run, which cannot be captured.
            run()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool, stream, "thread_local"):
            run()
    return graph.replay
