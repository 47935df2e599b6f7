"""Federated runs on made-up records, by fedpact and by loops over Opacus, timed by turns."""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.problems import CLIP, PROBLEMS, RATE, Problem
from benchmarks.steps import made_private
from benchmarks.timing import Others, Turns, Work
from fedpact.common.messages import RoundRecord
from fedpact.data.dataset import Dataset
from fedpact.plan import Plan
from fedpact.simulation.simulate import simulate

_MODELS = {
    "A": "logistic",
    "B": "cnn_padded",
    "Bnp": "cnn",
    "C": "cnn_padded",
    "tiny A": "logistic",
    "tiny": "benchmarks.problems:tiny",
}
_TINY = ("tiny A", "tiny")
_WARM = 2  # rounds that are not counted, the initial evaluation among them


def plan_of(
    model: str,
    sites: int,
    rate: float,
    rounds: int,
    workers: int = 0,
    steps: int = 1,
    device: str = "cpu",
) -> Plan:
    """DP-FedAvg with so many local steps; nothing is evaluated between first and last round."""
    raw: dict[str, Any] = {
        "data": "made-up records",
        "model": _MODELS[model],
        "rounds": rounds,
        "sites": sites,
        "sampling_rate": rate,
        "settings": {"learning_rate": RATE, "local_steps": steps},
        "partition": {"kind": "iid", "held_out": 0.0},
        # Made-up models are for tests, which need no tight bound.
        "privacy": {"clip": CLIP, "accountant": "rdp" if model in _TINY else "best"},
        # The peers write no bytes for a network, and count none.
        "compression": {"kind": "none"},
        "run": {
            "workers": workers,
            "evaluate_every": 10**6,
            "device": device,
        },
    }
    return Plan.parse(raw)


def made_up(model: str, records: int) -> Dataset:
    """Made-up records for a model, all sites' together, and a few to test on."""
    (x, y), (x_test, y_test) = (PROBLEMS[model].records(n, n) for n in (records, 10))
    return Dataset("made-up records", x, y, tuple("0123456789"), x_test, y_test)


def rounds_by_turns(
    plan: Plan, data: Dataset, others: Mapping[str, Work], folder: str | None = None
) -> Turns:
    """Time a run's rounds, each with its commit to the disk, in turn with other functions.

    The run's own time is called "fedpact". folder: where its folder lies, None for the usual place.
    """
    for work in others.values():
        work()
    turns: list[dict[str, float]] = []
    quiet: list[bool] = []
    watch = Others()
    resumed = time.perf_counter()

    def on_round(record: RoundRecord) -> None:
        nonlocal watch, resumed
        turn = {"fedpact": time.perf_counter() - resumed}
        if record.round >= _WARM or record.round == plan.rounds:
            for name, work in others.items():
                started = time.perf_counter()
                work()
                turn[name] = time.perf_counter() - started
            turns.append(turn)
            quiet.append(watch.undisturbed)
        watch = Others()
        resumed = time.perf_counter()

    with tempfile.TemporaryDirectory(dir=folder) as place:
        simulate(plan, Path(place) / "run", data=data, on_round=on_round)
    busy = sum(quiet) < max(1, len(quiet) // 3)
    kept = [turn for turn, good in zip(turns, quiet, strict=True) if good or busy]
    return Turns({name: [turn[name] for turn in kept] for name in kept[0]}, busy)


def opacus_round(problem: Problem, sites: int, batch: int, mode: str) -> Work:
    """A round as a loop over sites, each making its model private anew, as a client does."""
    records = problem.records(10 * batch)
    weights = {name: value.clone() for name, value in problem.module().state_dict().items()}

    def a_round() -> None:
        total = {name: torch.zeros_like(value) for name, value in weights.items()}
        for _ in range(sites):
            for name, value in opacus_client(problem, weights, records, batch, mode).items():
                total[name] += value / sites
        weights.update(total)

    return a_round


def opacus_client(
    problem: Problem,
    weights: dict[str, torch.Tensor],
    records: tuple[torch.Tensor, torch.Tensor],
    batch: int,
    mode: str,
) -> dict[str, torch.Tensor]:
    """One private step of one site from given weights; the new ones."""
    module = problem.module()
    module.load_state_dict(weights)
    loader = DataLoader(TensorDataset(*records), batch_size=batch, shuffle=True)
    module, optimizer, criterion, loader = made_private(module, loader, mode)
    x, y = next(iter(loader))
    optimizer.zero_grad()
    criterion(module(x), y).backward()
    optimizer.step()
    return {name.removeprefix("_module."): value for name, value in module.state_dict().items()}
