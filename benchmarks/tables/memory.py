"""Peak memory of three steps, each method in a process of its own."""

from pathlib import Path

import torch

from benchmarks import child, steps
from benchmarks.problems import PROBLEMS
from benchmarks.results import Row
from benchmarks.scale import Scale

TITLE = "Peak memory"
ABOUT = (
    "Peak resident memory during set-up and three steps of model B, minus that after the imports;"
    " ratios to the plain step of the same batch. One intra-op thread."
)
NAMES = ("memory",)

_TITLES = {
    "fedpact": "fedpact",
    "channels_last": "plain, channels_last",
    "opacus_hooks": "Opacus, hooks",
    "opacus_ghost": "Opacus, ghost",
    "vmap_grad": "vmap(grad)",
}


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    del name
    model = scale.of("B", "tiny")
    rows: list[Row] = []
    for batch in scale.of((75, 300), (2,)):
        plain = child.call(peak, "plain", model, batch)
        rows.append(Row(f"plain, batch {batch}", 1.0, note=f"{plain:.0f} MiB"))
        for method in scale.of(tuple(_TITLES), ("fedpact",)):
            found = child.call(peak, method, model, batch)
            goal, stretch = (0.6, 0.45) if method == "fedpact" else (None, None)
            title = f"{_TITLES[method]}, batch {batch}"
            ratio = found / max(plain, 1e-9)
            note = f"{found:.0f} MiB"
            rows.append(Row(title, ratio, goal=goal, stretch=stretch, note=note))
    return rows, False


def resident() -> float:
    """Return the largest resident memory of this program so far, in MiB."""
    # getrusage's figure would begin with that of the process that started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def peak(method: str, model: str, batch: int) -> float:
    """Return the MiB that a method's set-up and three steps add at most."""
    torch.set_num_threads(1)
    if method.startswith("opacus"):
        import opacus  # noqa: F401
    before = resident()
    step = steps.METHODS[method](PROBLEMS[model], batch)
    for _ in range(3):
        step()
    return max(resident() - before, 0.001)
