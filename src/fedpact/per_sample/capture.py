"""Passes that are captured once, as CUDA graphs, and replayed.

On a GPU a pass of a small model takes as long as it takes Python to launch its operations. So the
operations of the first pass of each shape are captured, and later ones replay them: the inputs are
copied to where the first one's were, and the parameters are read where they lie. Captured are
measuring and adding, each by itself; weights, clip and coefficients, which follow from numbers of
the host, stay between them. What cannot be captured runs operation by operation, and says so once.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedpact.per_sample.passes import Measured

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
