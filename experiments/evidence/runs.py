"""A run of a plan, what is looked at of it, and what it takes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

# Record gradients a second on one core of the machine that measured.
_SPEED: Final = {"cnn": 2800.0, "logistic": 40_000.0, "features": 60_000.0}
_SIZES: Final = {"mnist": 60_000, "fashion_mnist": 60_000, "cifar10": 50_000}
_IMAGE: Final = {"mnist": 1.0, "fashion_mnist": 1.0, "cifar10": 1.8}  # a gradient's cost


@dataclass(frozen=True)
class Run:
    """One plan. base: its file in experiments/; settings: what is overridden, but for the seed.

    looks: the rounds after which its model is evaluated; the last is the run's last. gradients: of
    how many records, kind: of which model, for what it costs.
    """

    group: str
    name: str
    base: str
    settings: tuple[str, ...]
    looks: tuple[int, ...]
    gradients: float
    kind: str

    @property
    def minutes(self) -> float:
        """What it takes of one core, about."""
        return self.gradients / _SPEED[self.kind] / 60

    @property
    def title(self) -> str:
        """What names it, on the command line too."""
        return f"{self.group} {self.name}"


def gradients(data: str, share: float, model: str = "cnn") -> float:
    """Return what so many passes over a data set's training records cost, as gradients of MNIST."""
    return share * _SIZES[data] * (_IMAGE[data] if model == "cnn" else 1.0)


def overrides(given: Iterable[tuple[str, object]]) -> tuple[str, ...]:
    """Return settings as Plan.read takes them."""
    return tuple(f"{key}={value}" for key, value in given)
