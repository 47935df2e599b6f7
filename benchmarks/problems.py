"""The models that are timed, with made-up records: the papers' networks, and those of `models`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import models
from fedpact.common.losses import Loss, cross_entropy, pixel_entropy
from fedpact.models import zoo

CLIP, SIGMA, RATE = 0.1, 1.0, 0.1
CLASSES = 10

_Factory = Callable[[tuple[int, ...], int], nn.Module]


@dataclass(frozen=True)
class Problem:
    """A model and the shape of its records; the model's weights are the same at every call.

    device: where model and records are. classes: of the labels. vocabulary: the number of tokens
    whose ids the records are, 0 where they are numbers. for_opacus: the same model with the same
    weights, built as Opacus wants it; None where it takes the model as it is. pixels: each pixel of
    a record has a label, and a record's loss is their mean.
    """

    name: str
    shape: tuple[int, ...]
    factory: _Factory
    device: str = "cpu"
    classes: int = CLASSES
    vocabulary: int = 0
    for_opacus: _Factory | None = None
    pixels: bool = False

    @property
    def loss(self) -> Loss:
        """The loss of each record."""
        return pixel_entropy if self.pixels else cross_entropy

    def module(self) -> nn.Module:
        """Return the model."""
        return self._made(self.factory)

    def module_for_opacus(self) -> nn.Module:
        """Return the model as Opacus wants it built."""
        return self._made(self.for_opacus or self.factory)

    def _made(self, factory: _Factory) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return factory(self.shape, self.classes).to(self.device)

    def records(self, count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
        """Return records x [count, ...], in [0, 1) or token ids, and labels y [count, ...]."""
        generator = torch.Generator().manual_seed(seed)
        shape = (count, *self.shape)
        if self.vocabulary:
            x = torch.randint(0, self.vocabulary, shape, generator=generator)
        else:
            x = torch.rand(shape, generator=generator)
        labels = (count, *(self.shape[1:] if self.pixels else ()))
        y = torch.randint(0, self.classes, labels, generator=generator)
        return x.to(self.device), y.to(self.device)

    @property
    def size(self) -> int:
        """d, the number of trainable parameters."""
        return sum(p.numel() for p in self.module().parameters() if p.requires_grad)


def _wide(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Model B with 4,096 hidden units instead of 512."""
    layers = list(zoo.cnn_padded(shape, classes))
    return nn.Sequential(
        *layers[:-3], nn.Linear(layers[-3].in_features, 4096), nn.ReLU(), nn.Linear(4096, classes)
    )


def tiny(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The smallest network with each kind of layer, on 8x8 images."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, classes)
    )


def _tiny(name: str, *shape: int, **sizes: int) -> Problem:
    """A model of `models` at a size at which its code runs in no time."""
    full = _BROUGHT[name]
    return replace(
        full,
        name=f"tiny {name}",
        shape=shape,
        factory=partial(full.factory, **sizes),
        for_opacus=full.for_opacus and partial(full.for_opacus, **sizes),
    )


_IDS = models.VOCABULARY
_tokens = partial(Problem, vocabulary=_IDS)
_low_rank_for_opacus = partial(models.LowRankTransformer, linear=models.LowRankOfModules)
_BROUGHT = {
    problem.name: problem
    for problem in (
        Problem("resnet", (3, 32, 32), models.resnet),
        Problem("resnet18", (3, 32, 32), models.resnet18),
        Problem("unet", (1, 64, 64), models.UNet, classes=2, pixels=True),
        _tokens("transformer", (64,), models.Transformer, for_opacus=models.TransformerOfModules),
        Problem("vit", (3, 32, 32), models.ViT, for_opacus=models.ViTOfModules),
        _tokens("lora", (64,), models.LowRankTransformer, for_opacus=_low_rank_for_opacus),
        _tokens("lstm256", (80,), partial(models.Recurrent, hidden=256), classes=_IDS),
        _tokens("lstm64", (80,), partial(models.Recurrent, hidden=64), classes=_IDS),
    )
}
_TINY = (
    _tiny("resnet", 3, 8, 8),
    _tiny("resnet18", 3, 8, 8, width=8),
    _tiny("unet", 1, 8, 8, width=8),
    _tiny("transformer", 5, width=8, heads=2),
    _tiny("vit", 3, 8, 8, width=8, heads=2),
    _tiny("lora", 5, width=8, heads=2),
    _tiny("lstm256", 3, hidden=5),
    _tiny("lstm64", 3, hidden=4),
)

PROBLEMS = {
    "A": Problem("A", (1, 28, 28), zoo.logistic),
    "B": Problem("B", (1, 28, 28), zoo.cnn_padded),
    "Bnp": Problem("Bnp", (1, 28, 28), zoo.cnn),
    "C": Problem("C", (3, 32, 32), zoo.cnn_padded),
    "13M": Problem("13M", (1, 28, 28), _wide),
    "mlp": Problem("mlp", (1, 28, 28), zoo.mlp),
    "tiny A": Problem("tiny A", (1, 8, 8), zoo.logistic),
    "tiny": Problem("tiny", (1, 8, 8), tiny),
    **_BROUGHT,
    **{problem.name: problem for problem in _TINY},
}
