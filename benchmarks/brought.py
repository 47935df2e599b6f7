"""Public models as they come: does each train privately, how fast, with how much memory?

python -m benchmarks.brought [NAME ...]    goes on where it ended: a model that has a result of this
                                           kernel and machine is left as it is; writes the table of
                                           docs/how-to/hugging-face.md

Needs transformers, timm, torchvision and MONAI, beside Opacus. Every model runs in a process of
its own. Steps are timed in turn, and ratios are to a plain step of the same model.
"""

import ctypes
import gc
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fedpact
from benchmarks import provenance, steps
from benchmarks.brought_models import CLASSES, Brought, catalogue
from benchmarks.child import call
from benchmarks.machine import describe
from benchmarks.problems import Problem
from fedpact import api
from fedpact.models.hugging_face import with_named_inputs

RESULTS = Path(__file__).parent / "brought.json"
PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "hugging-face.md"
_TURNS = 3
_METHODS = {
    "private": steps.kernel_step,
    "vmap": steps.vmap_grad,
    "hooks": steps.opacus_hooks,
    "ghost": steps.opacus_ghost,
}


class _Problem(Problem):
    """With token records of which some have padding behind them."""

    def records(self, count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
        x, y = super().records(count, seed)
        if not self.vocabulary:
            return x, y
        x = x.clamp(min=3)
        length = x.shape[-1]
        x[:, 1] = (torch.arange(length) < length - (torch.arange(count) % 8)[:, None]).long()
        return x, y


def _problem(one: Brought, batch_norm: bool) -> Problem:
    def factory(shape: tuple[int, ...], _: int) -> torch.nn.Module:
        model = one.make()
        if batch_norm:
            model = fedpact.prepare(model, batch_norm="group").model
        dtype = torch.int64 if one.form == "tokens" else torch.float32
        record = torch.zeros(shape, dtype=dtype)
        return with_named_inputs(model, record, "pixels" if one.pixels else "class").train()

    tokens = one.tokens if one.form == "tokens" else 0
    return _Problem(
        one.name, one.shape, factory, classes=one.classes, vocabulary=tokens, pixels=one.pixels
    )


def measured(name: str) -> dict[str, Any]:
    """Return what a process of its own finds about a model."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    one = catalogue()[name]
    found = _tried(one)
    return found if found["runs"] == "no" else found | _timed(one)


def _tried(one: Brought) -> dict[str, Any]:
    """Train a model in a federation of two sites, as it comes, else after `prepare`."""
    first = _run(one, prepared=False)
    if "refused" not in first:
        return {"runs": "as it comes", **first}
    second = _run(one, prepared=True)
    if "refused" not in second:
        return {"runs": "after prepare", **second, "refused": first["refused"]}
    return {"runs": "no", **second}


def _run(one: Brought, *, prepared: bool) -> dict[str, Any]:
    def make() -> torch.nn.Module:
        if not prepared:
            return one.make()
        return fedpact.prepare(one.make(), batch_norm="group").model

    x, y = _problem(one, False).records(24)
    settings: dict[str, Any] = {"sites": 2, "rounds": 1, "sampling_rate": 0.5}
    if one.pixels and one.form == "tokens":
        settings |= {"task": "next_token", "records": {"vocabulary": one.tokens}}
        y = x[:, 0]
    else:
        y[: 4 * CLASSES] = torch.arange(4 * CLASSES).view(-1, *[1] * (y.dim() - 1)) % CLASSES
        settings["task"] = "segmentation" if one.pixels else "classification"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        try:
            # Its page is not looked at.
            vars(api)["write_report"] = lambda _: None
            fedpact.run(make, (x, y), out=out, privacy={"epsilon": 8.0}, **settings)
        except fedpact.FedpactError as error:
            return {"refused": str(error)}
        told = json.loads((out / "privacy.json").read_text())["separation"]
    return {"way": "traced" if "traced" in told else "record by record"}


def _timed(one: Brought) -> dict[str, Any]:
    """Return each method's step over a plain one's, its median over turns; or why there is none."""
    problem = _problem(one, True)
    works = {"plain": steps.plain(problem, one.batch)}
    found: dict[str, Any] = {}
    for method, make in _METHODS.items():
        try:
            works[method] = make(problem, one.batch)
            works[method]()
        except Exception as error:  # whatever another library may raise
            works.pop(method, None)
            found[method] = f"{type(error).__name__}: {error}"[:200]
    works["plain"]()
    for method in ("plain", "private"):
        found[f"{method} MiB"] = round(_memory(works[method]), 1)
    turns: list[dict[str, float]] = []
    for _ in range(_TURNS):
        turns.append({method: _seconds(work) for method, work in works.items()})
    for method in works:
        found[method] = statistics.median(turn[method] / turn["plain"] for turn in turns)
    found["seconds"] = statistics.median(turn["plain"] for turn in turns)
    found["parameters"] = problem.size
    return found


def _seconds(work: Any) -> float:
    # Short steps would be charged for the caches that the one before has left.
    start = time.thread_time()
    work()
    return time.thread_time() - start


def _memory(work: Any) -> float:
    """Return the MiB that a step takes at its peak beyond what there was (Linux alone)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work()
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key)))


_MARK = "## What a private step costs"


def _table(stored: dict[str, Any]) -> list[str]:
    """The last section of the page: a line for each model that was measured."""
    known = catalogue()
    shown = {name: one for name, one in stored.items() if name in known and "runs" in one}
    machines = "; ".join(sorted({one["processor"] for one in shown.values()}))
    lines = [
        "Times of a step in units of a plain step of the same model, beside PyTorch's `vmap` and "
        "Opacus by hooks and by ghost norms. The models are small random configurations, with "
        "16 records and one thread. Those under `sizes` are larger, with the batch and the length "
        "or side in their names. Each figure is the median of "
        f"{_TURNS} turns on a busy machine, by "
        "processor time. A dash stands where the other library failed. `prepare` has replaced "
        "BatchNorm. MiB are those of a private step beside a plain one. Made by "
        f"`python -m benchmarks.brought` ({machines}); `benchmarks/brought.json` has the commit "
        "of each.",
        "",
        "| model | runs | way | private | vmap | hooks | ghost | MiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in sorted(shown.items()):
        ratios = (one.get(method) for method in _METHODS)
        cells = [f"{r:.1f}" if isinstance(r, float) else "–" for r in ratios]
        sizes = f"{one.get('private MiB', 0):.0f} / {one.get('plain MiB', 0):.0f}"
        row = [f"{name}", one["runs"], one.get("way", "–"), *cells, sizes]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def main(names: list[str]) -> None:
    """Measure the models named, all by default, that have no result yet; write the table."""
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    machine, kernel = describe("1"), provenance.digest()
    for name in names or catalogue():
        old = stored.get(name, {})
        if not names and (old.get("kernel"), old.get("processor")) == (
            kernel,
            machine["processor"],
        ):
            continue
        found: dict[str, Any] = {"kernel": kernel, "commit": provenance.commit()}
        found["processor"] = machine["processor"]
        try:
            found |= call(measured, name, timeout=400)
        except Exception as error:  # a model that ends the process is a result too
            found["failed"] = str(error)[-600:]
        stored[name] = found
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
        told = {k: v for k, v in found.items() if k not in ("kernel", "commit", "processor")}
        print(name, json.dumps(told), flush=True)
    head, _, _ = PAGE.read_text().partition(_MARK)
    PAGE.write_text(head + _MARK + "\n\n" + "\n".join(_table(stored)) + "\n")


if __name__ == "__main__":
    # By the name that its processes are told.
    from benchmarks import brought

    brought.main(sys.argv[1:])
