"""Rounds of federated averaging by pfl: runs in pfl's own environment, which has no fedpact.

python -I benchmarks/pfl_child.py REQUEST THREADS COUNT      prints the seconds of COUNT rounds

REQUEST: a file with the layers, the users' records and the learning rate, as `pfl.rounds` saves it.
The last line printed is a JSON list.
"""

import itertools
import json
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


class Trained(torch.nn.Module):
    """Layers with the two functions that pfl asks of a model."""

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy."""
        return F.cross_entropy(self.layers(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        """Needed by pfl, which evaluates in its first round."""
        return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


class Clock(TrainingProcessCallback):
    """The time at the start and at the end of each round."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *, model: Any) -> Metrics:  # noqa: ARG002
        """Note the time."""
        self.times.append(time.perf_counter())
        return Metrics()

    def after_central_iteration(
        self,
        aggregate_metrics: Metrics,  # noqa: ARG002
        model: Any,  # noqa: ARG002
        *,
        central_iteration: int,  # noqa: ARG002
    ) -> tuple[bool, Metrics]:
        """Note the time."""
        self.times.append(time.perf_counter())
        return False, Metrics()


def train(request: dict[str, Any], count: int) -> tuple[torch.nn.Module, list[float]]:
    """Return the trained layers and the seconds of each round, of all users and one step each.

    A user's records are one batch. They stay in memory from round to round, and nothing is
    evaluated or reported after the first round.
    """
    users = [PyTorchTensorDataset(records) for records in request["users"]]
    batch = len(users[0])
    data = FederatedDataset(users.__getitem__, MinimizeReuseUserSampler(range(len(users))))
    layers = Trained(request["layers"])
    model = PyTorchModel(layers, torch.optim.SGD, torch.optim.SGD(layers.parameters(), lr=1.0))
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=count,
            evaluation_frequency=count + 1,
            train_cohort_size=len(users),
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(
            local_batch_size=batch,
            local_num_epochs=None,
            local_num_steps=1,
            local_learning_rate=request["learning_rate"],
        ),
        NNEvalHyperParams(local_batch_size=None),
        [clock],
        send_metrics_to_platform=False,
    )
    return layers.layers, [end - start for start, end in itertools.pairwise(clock.times)]


if __name__ == "__main__":
    path, threads, rounds = sys.argv[1:]
    torch.set_num_threads(int(threads))
    # The file is the caller's own, and holds a module.
    _, seconds = train(torch.load(path, weights_only=False), int(rounds))
    print(json.dumps(seconds), flush=True)
