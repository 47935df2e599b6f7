"""The papers' models for records of any fitting shape: functions (shape, classes) -> module."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from fedpact.errors import ModelError
from fedpact.persample.dense import ScaledBias


class LogisticSettings(BaseModel):
    """How model = "logistic" begins.

    start: "random" draws the first weights from the seed, as torch does; "zero" starts where all
    classes are alike, which on unit rows is nearer to where it ends than any draw. bias: the input,
    in (0, 1000], for which a class has a weight; true is 1, false leaves it out. On unit rows an
    input of 1 is half of a gradient's squared length, so it takes 1 - 1/sqrt(2) of what a clip
    leaves of the rest; one of 0.3 takes 4 %.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    start: Literal["random", "zero"] = "random"
    bias: bool | Annotated[float, Field(gt=0, le=1000)] = True

    def check_model(self, model: str) -> None:
        """Raise ValueError: another model, which has no use for it."""
        if self != LogisticSettings() and model != "logistic":
            raise ValueError(f"model is {model!r} with a table [logistic]: leave that out")


def logistic(
    shape: tuple[int, ...], classes: int, settings: LogisticSettings | None = None
) -> nn.Module:
    """Multinomial logistic regression (the convex task of FedProxVR)."""
    chosen = settings or LogisticSettings()
    if isinstance(chosen.bias, bool):
        linear = nn.Linear(math.prod(shape), classes, bias=chosen.bias)
    else:
        linear = ScaledBias.of(math.prod(shape), classes, chosen.bias)
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


def cnn_group_norm(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A small CNN, as private training likes it: d = 19,338 on 1x28x28, 19,626 on 3x32x32.

    Three 3x3 convolutions of stride 2 (16, 32, 32 maps), each with GroupNorm over groups of 8,
    which keeps records apart where BatchNorm does not, and Tanh (Papernot, Thakurta, Song, Chien,
    Erlingsson, arXiv 2007.14191); then one linear layer.
    """
    channels, *sides = _image("cnn_group_norm", shape)
    layers: list[nn.Module] = []
    for maps in (16, 32, 32):
        layers += [nn.Conv2d(channels, maps, 3, stride=2, padding=1)]
        layers += [nn.GroupNorm(maps // 8, maps), nn.Tanh()]
        channels, sides = maps, [(side + 1) // 2 for side in sides]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * math.prod(sides), classes))


def _image(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an image. Raises ModelError: of something else."""
    if len(shape) != 3:
        remedy = "use 'logistic' or 'mlp' for other records"
        if len(shape) == 2:
            remedy = f"give images without channels as {(1, *shape)}, or {remedy}"
        raise ModelError(
            f"model {name!r} got records of shape {shape}: expected images (channels, height, "
            f"width); {remedy}"
        )
    return shape


def _cnn(shape: tuple[int, ...], classes: int, padding: int) -> nn.Module:
    name = "cnn_padded" if padding else "cnn"
    channels, *sides = _image(name, shape)
    for _ in range(2):
        sides = [(side + 2 * padding - 4) // 2 for side in sides]
    if min(sides) < 1:
        # With padding 2 an image is halved twice.
        smaller = "cnn_padded" if not padding and min(shape[1:]) >= 4 else "cnn_group_norm"
        raise ModelError(
            f"model {name!r} got images of {shape[1]}x{shape[2]}: too small for two 5x5 "
            f"convolutions with padding {padding}, each followed by pooling; use {smaller!r} or "
            "'mlp'"
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
