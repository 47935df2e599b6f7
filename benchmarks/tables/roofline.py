"""How far a step is from what its multiplications alone would take."""

import numpy as np
import torch

from benchmarks import steps
from benchmarks.problems import PROBLEMS
from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.timing import Spread, by_turns

TITLE = "Distance from the roofline"
ABOUT = (
    "The clipped sum of B multiplies matrices: forward, the gradients of all inputs but the first"
    " layer's, and the weights' gradients, 5.43 GFLOP at a batch of 75. The roofline is this "
    "number divided by the rate at which this machine multiplies two square matrices of 2,048 "
    "rows (float32; the better of torch's and numpy's library) in the same turn, on one thread."
)
NAMES = ("roofline",)


def _flops(batch: int) -> float:
    """Multiplications and additions of model B's step: conv1, conv2, and two linear layers."""
    layers = [32 * 25 * 784, 64 * 800 * 196, 3136 * 512, 512 * 10]
    return 2.0 * batch * (3 * sum(layers) - layers[0])


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    del name
    torch.set_num_threads(1)
    n, batch = scale.of(2048, 64), scale.of(75, 2)
    a = torch.randn(n, n)
    by_numpy = a.numpy()
    works = {m: steps.METHODS[m](PROBLEMS[scale.of("B", "tiny")], batch) for m in _TITLES}
    works["mm"] = lambda: torch.mm(a, a)

    works["dot"] = lambda: np.dot(by_numpy, by_numpy)
    turns = by_turns(works, scale.repetitions)
    best = "mm" if turns.time("mm").median <= turns.time("dot").median else "dot"
    rate = 2.0 * n**3 / turns.time(best).median
    rows = [Row("rate of matrix products", rate / 1e9, unit="GFLOP/s", note=best)]
    for method, title in _TITLES.items():
        pairs = zip(turns.seconds[method], turns.seconds[best], strict=True)
        found = Spread.of([step / (_flops(batch) * gemm / (2.0 * n**3)) for step, gemm in pairs])
        rows.append(Row(title, found.median, found.low, found.high))
    return rows, turns.busy


_TITLES = {
    "kernel_alone": "fedpact's clipped sum",
    "fedpact": "fedpact's step",
    "plain": "plain step",
    "channels_last": "plain step, channels_last",
}
