"""The models that are timed, with made-up records: the papers' networks on the papers' shapes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedpact.models import papers

CLIP, SIGMA, RATE = 0.1, 1.0, 0.1
CLASSES = 10


@dataclass(frozen=True)
class Problem:
    """A model and the shape of its records; the model's weights are the same at every call.

    device: where model and records are.
    """

    name: str
    shape: tuple[int, ...]
    factory: Callable[[tuple[int, ...], int], nn.Module]
    device: str = "cpu"

    def module(self) -> nn.Module:
        """Return the model."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.factory(self.shape, CLASSES).to(self.device)

    def records(self, count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
        """Return made-up records x [count, ...] in [0, 1) and labels y [count]."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(count, *self.shape, generator=generator)
        y = torch.randint(0, CLASSES, (count,), generator=generator)
        return x.to(self.device), y.to(self.device)

    @property
    def size(self) -> int:
        """d."""
        return sum(p.numel() for p in self.module().parameters())


def _wide(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Model B with 4,096 hidden units instead of 512."""
    layers = list(papers.cnn_padded(shape, classes))
    return nn.Sequential(
        *layers[:-3], nn.Linear(layers[-3].in_features, 4096), nn.ReLU(), nn.Linear(4096, classes)
    )


def tiny(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The smallest network with each kind of layer, on 8x8 images."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, classes)
    )


PROBLEMS = {
    "A": Problem("A", (1, 28, 28), papers.logistic),
    "B": Problem("B", (1, 28, 28), papers.cnn_padded),
    "Bnp": Problem("Bnp", (1, 28, 28), papers.cnn),
    "C": Problem("C", (3, 32, 32), papers.cnn_padded),
    "13M": Problem("13M", (1, 28, 28), _wide),
    "mlp": Problem("mlp", (1, 28, 28), papers.mlp),
    "tiny A": Problem("tiny A", (1, 8, 8), papers.logistic),
    "tiny": Problem("tiny", (1, 8, 8), tiny),
}
