"""Readings of ALI-DPFL's paper at τ = 1, to find which of them gives the printed numbers.

Each is the faithful run with something changed. Some need another network: the papers', behind
inputs of another range or with other first weights (`xavier`, `signed`, `unit`, `bytes_`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from experiments.evidence.ali import FAITHFUL, LARGER, batch_size, fixed, undivided
from experiments.evidence.runs import Run, overrides
from torch import Tensor, nn

from fedpact.models.zoo import cnn

ROW: Final = (79, 122, 177, 231, 317)  # iterations of the printed row at τ = 1, R_s >= R_c


@dataclass(frozen=True)
class Reading:
    """What is changed. noise: of a record, over the printed; 0 for none.

    rate: η, as it is or, with `undivided`, of a sum that is not divided by the batch.
    """

    rate: float = FAITHFUL
    noise: float = 1.0
    own: Mapping[str, Any] = field(default_factory=dict[str, Any])
    undivided: bool = False


def readings(data: str) -> dict[str, Reading]:
    """Return the readings of a data set but for those that the tables have, by name.

    CIFAR-10 has those that say most: its runs take longer.
    """
    batch = batch_size(data)
    momentum = {"server.optimiser": "momentum"}
    none, dirichlet = {"privacy.mode": "none"}, {"partition": _DIRICHLET}
    # The printed noise of a mean of B gradients, σ C / B, on the mean that is clipped as a whole.
    # One record moves that by 2 C.
    mean: dict[str, Any] = {"privacy.mode": "batch_clipped", "privacy.sigma": 1.1 / batch}
    both = {
        "η = 16": Reading(16.0),
        "C = 1": Reading(own={"privacy.clip": 1.0}),
        "C = 5": Reading(own={"privacy.clip": 5.0}),
        "server momentum 0.9": Reading(own=momentum),
        "server momentum 0.9, η = 2": Reading(2.0, own=momentum),
        "sums and noise never cleared": Reading(own=momentum | {"server.momentum": 0.999999}),
        "automatic clipping": Reading(own={"privacy.mode": "automatic"}),
        "sum and noise undivided": Reading(undivided=True),
        "sum undivided, noise over √B": Reading(noise=batch**-0.5, undivided=True),
        "η = 32, a tenth of the noise": Reading(32.0, 0.1),
        "η = 32, no noise": Reading(32.0, 0.0),
        "sum undivided, noise over B, Dirichlet(1)": Reading(
            noise=1 / batch, own=dirichlet, undivided=True
        ),
        **{
            f"batch mean clipped, η = {rate:g}": Reading(rate, 0.5 / batch, mean)
            for rate in (2.0, 4.0, 8.0)
        },
        "no clip or noise, η = 0.2": Reading(0.2, 0.0, none),
        "no clip or noise, η = 0.1, momentum 0.9": Reading(0.1, 0.0, none | momentum),
    }
    if data != "fashion_mnist":
        return both
    return both | {
        **{f"η = {rate:g}": Reading(rate) for rate in (2.0, 4.0, 32.0)},
        "sum divided by 64, noise by B": Reading(FAITHFUL * batch / 64, 64 / batch),
        "no noise": Reading(noise=0.0),
        "η = 8, a tenth of the noise": Reading(8.0, 0.1),
        "C = 1, η = 2": Reading(2.0, own={"privacy.clip": 1.0}),
        "server momentum 0.99": Reading(own=momentum | {"server.momentum": 0.99}),
        "Adam at the server, 0.001": Reading(
            own={
                **{"server.optimiser": "adam", "server.learning_rate": 0.001},
                # As torch has them. The plan's own adaptivity, 1e-3, is above a step's length in
                # a coordinate, 2e-4, and leaves plain steps.
                **{"server.second_moment": 0.999, "server.adaptivity": 1e-8},
            }
        ),
        "sum undivided, noise over B^0.75": Reading(noise=batch**-0.75, undivided=True),
        "batch mean clipped, η = 0.5": Reading(FAITHFUL, 0.5 / batch, mean),
        "mean of all sites' batches clipped, η = 2": Reading(2.0, 0.5 / batch, mean | _ONE_SITE),
        "inputs in -1..1": Reading(own={"model": f"{__name__}:signed"}),
        "inputs in 0..1": Reading(own={"model": f"{__name__}:unit"}),
        "inputs in 0..255": Reading(own={"model": f"{__name__}:bytes_"}),
        "Xavier": Reading(own={"model": f"{__name__}:xavier"}),
        "Xavier, η = 8": Reading(8.0, own={"model": f"{__name__}:xavier"}),
        "convolutions with padding": Reading(own={"model": "cnn_padded"}),
        "Dirichlet(1)": Reading(own=dirichlet),
    }


def variants(data: str) -> dict[str, tuple[Run, float]]:
    """Return all readings: the run, and its noise for a record over the printed.

    All are looked at after the iterations of ROW.
    """
    found = {
        "faithful": (fixed(data, "cnn", FAITHFUL, 1), 1.0),
        f"η = {LARGER:g}": (fixed(data, "cnn", LARGER, 1), 1.0),
    }
    for name, reading in readings(data).items():
        rate = reading.rate * (batch_size(data) if reading.undivided else 1)
        run, own, noise = fixed(data, "cnn", rate, 1), dict(reading.own), reading.noise
        if noise < 1 and own.get("privacy.mode") != "none":
            # No noise to speak of stands for none, which no private run can have.
            sigma = 1.1 * noise or 1e-3
            own, noise = {"privacy.sigma": sigma, "privacy.epsilon": 1e9} | own, sigma / 1.1
        settings = (*run.settings, *overrides(own.items()))
        found[name] = (
            replace(run, name=f"variant {name}", settings=settings, looks=ROW),
            noise,
        )
    return found | {"sum undivided, noise over B": (undivided(data, 1), 1 / batch_size(data))}


_ONE_SITE: Final = {"sites": 1, "partition": '{kind = "iid", held_out = 0.0}'}
_DIRICHLET: Final = '{kind = "dirichlet", beta = 1.0, held_out = 0.0}'


class _Rescaled(nn.Module):
    """Pixels of Fashion-MNIST as loaded, back in 0..1, times `scale`, plus `shift`."""

    def __init__(self, scale: float, shift: float) -> None:
        super().__init__()
        self._scale, self._shift = scale, shift

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0.3530 + 0.2860) * self._scale + self._shift


def signed(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the papers' network for inputs in -1..1."""
    return nn.Sequential(_Rescaled(2.0, -1.0), cnn(shape, classes))


def unit(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the papers' network for inputs in 0..1."""
    return nn.Sequential(_Rescaled(1.0, 0.0), cnn(shape, classes))


def bytes_(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the papers' network for inputs in 0..255."""
    return nn.Sequential(_Rescaled(255.0, 0.0), cnn(shape, classes))


def xavier(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the papers' network with Glorot's uniform first weights, and biases of 0."""
    model = cnn(shape, classes)
    for weights in model.parameters():
        if weights.dim() > 1:
            nn.init.xavier_uniform_(weights)
        else:
            nn.init.zeros_(weights)
    return model
