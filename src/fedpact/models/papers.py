"""The papers' models for records of any fitting shape: functions (shape, classes) -> module."""

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict
from torch import nn

from fedpact.errors import ModelError


class LogisticSettings(BaseModel):
    """The [logistic] table of a plan, for model = "logistic".

    start: "random" draws the first weights from the seed, as torch does; "zero" starts where all
    classes are alike, which on unit rows is nearer to where it ends than any draw. bias: whether a
    class has a weight for an input of 1. On unit rows that input is half of a gradient's squared
    length, so it takes 1 - 1/sqrt(2) of what a clip leaves of the rest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    start: Literal["random", "zero"] = "random"
    bias: bool = True


def logistic(
    shape: tuple[int, ...], classes: int, settings: LogisticSettings | None = None
) -> nn.Module:
    """Multinomial logistic regression (the convex task of FedProxVR)."""
    chosen = settings or LogisticSettings()
    linear = nn.Linear(math.prod(shape), classes, bias=chosen.bias)
    if chosen.start == "zero":
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)
    return nn.Sequential(nn.Flatten(), linear)


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """One hidden layer of 128 units with ReLU."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), 128), nn.ReLU(), nn.Linear(128, classes)
    )


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The papers' 4-layer CNN without padding: d = 582,026 on 1x28x28, 878,538 on 3x32x32."""
    return _cnn(shape, classes, padding=0)


def cnn_padded(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The papers' 4-layer CNN with padding 2: d = 1,663,370 on 1x28x28."""
    return _cnn(shape, classes, padding=2)


def _cnn(shape: tuple[int, ...], classes: int, padding: int) -> nn.Module:
    if len(shape) != 3:
        raise ModelError(
            f"model 'cnn' got records of shape {shape}: expected images (channels, height, width); "
            "use 'logistic' or 'mlp' for other records"
        )
    channels, *sides = shape
    for _ in range(2):
        sides = [(side + 2 * padding - 4) // 2 for side in sides]
    if min(sides) < 1:
        raise ModelError(
            f"model 'cnn' got images of {shape[1]}x{shape[2]}: too small for two 5x5 convolutions "
            f"with padding {padding}, each followed by pooling; use 'cnn_padded' or 'mlp'"
        )
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * math.prod(sides), 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )
