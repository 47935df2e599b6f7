"""Flower's simulation of a round: its message API, FedAvg, Ray, and Opacus in the clients."""

import importlib.util
import os
import time
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from benchmarks import child, federation
from benchmarks.problems import PROBLEMS
from fedpact.simulation.machine import keep_freed_memory


def missing() -> str:
    """Return what has to be installed first, or nothing."""
    for package in ("flwr", "ray", "opacus"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: pip install 'fedpact[bench]'"
    return ""


def rounds(mode: str, model: str, sites: int, batch: int, count: int) -> list[float]:
    """Return the seconds of each of `count` rounds, after two that are not counted.

    mode: Opacus' hooks or ghost, or idle for clients that send back what they got.
    """
    return child.call(simulate, mode, model, sites, batch, count + 2)[2:]


def simulate(mode: str, model: str, sites: int, batch: int, count: int) -> list[float]:
    """Run Flower here and return each round's seconds."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    ends: list[float] = []
    server = ServerApp()

    @server.main()
    def main(grid: Any, context: Any) -> None:  # noqa: ARG001
        arrays = ArrayRecord(PROBLEMS[model].module().state_dict())
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=sites)
        strategy.start(
            grid=grid,
            initial_arrays=arrays,
            num_rounds=count,
            evaluate_fn=lambda *_: ends.append(time.perf_counter()),
        )

    cores = os.cpu_count() or 1
    run_simulation(
        server,
        _client(mode, model, batch),
        num_supernodes=sites,
        backend_config={
            "client_resources": {"num_cpus": 1.0, "num_gpus": 0.0},
            "init_args": {"num_cpus": cores},
        },
    )
    return [end - start for start, end in pairwise(ends)]


def _client(mode: str, model: str, batch: int) -> Any:
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Any, context: Any) -> Any:
        keep_freed_memory()  # as all methods here have it; this is Ray's process
        arrays = message.content["arrays"]
        if mode != "idle":
            torch.set_num_threads(1)
            records = _records(model, 10 * batch, int(context.node_config["partition-id"]))
            weights = arrays.to_torch_state_dict()
            arrays = ArrayRecord(
                federation.opacus_client(PROBLEMS[model], weights, records, batch, mode)
            )
        metrics = MetricRecord({"num-examples": batch})
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app


@cache
def _records(model: str, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return PROBLEMS[model].records(count, seed)
