"""The papers' models for records of any fitting shape: functions (shape, classes) -> module."""

import math

from torch import nn

from fedpact.errors import ModelError


def logistic(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Multinomial logistic regression (the convex task of FedProxVR)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


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
