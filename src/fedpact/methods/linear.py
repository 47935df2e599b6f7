"""How a reply is made of what a site releases: the weights with which noise enters it.

Of every algorithm a reply's vector is, with the trajectory held fixed, a sum of released gradients
with public weights (-η for each of FedAvg's). They are found by carrying out the algorithm's own
local part on unit vectors, so they are right for whatever algorithm there is: with gradients
e_1, e_2, ... in place of released ones, coordinate k of the reply is the weight of the k-th.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from fedpact.errors import PolicyRefused
from fedpact.messages import State, Task
from fedpact.methods import Method, MethodWrapper
from fedpact.methods.stepped import Stepped
from fedpact.persample.weighting import UNIFORM, Weighting
from fedpact.privacy.batches import Batch
from fedpact.privacy.columns import Means

NoiseWeights = Mapping[str, tuple[float, float]]
"""Vector of a reply -> sqrt(Σ c_k²) over gradients of batches, and over those of openings."""

_SOME_SHARE: Final = 0.5


def weights(method: Method, task: Task) -> NoiseWeights:
    """Return the weights of a reply to a task; of this only numbers and round count.

    A difference of gradients counts for nothing, as its noise follows the trajectory: the weights
    are then of less noise than there is.
    """
    while isinstance(method, MethodWrapper) and not isinstance(method, Stepped):
        method = method.inner
    steps = int(task.numbers.get("local_steps", method.steps()))
    small = replace(
        task, vectors={n: torch.zeros(steps + 1, dtype=torch.float64) for n in task.vectors}
    )
    still, moving = _Units(steps + 1, 0.0), _Units(steps + 1, 1.0)
    without = method.local(small, still, State()).vectors
    found = dict[str, tuple[float, float]]()
    for name, vector in method.local(small, moving, State()).vectors.items():
        squares = (vector.double() - without[name].double()).square()
        opened = squares[list(moving.opened)].sum() if moving.opened else torch.zeros(())
        found[name] = math.sqrt((squares.sum() - opened).clamp_min(0)), math.sqrt(opened)
    return found


class _Units:
    """An oracle whose k-th gradient is `length` times the k-th unit vector [d]."""

    batch_size = 1.0
    noise_variance = 0.0
    steps_left = math.inf
    shares: Mapping[str, Tensor] = MappingProxyType({})

    def __init__(self, d: int, length: float) -> None:
        self._d, self._length, self._given = d, length, 0
        self.opened = set[int]()

    def unit(self) -> Tensor:
        """Return the next gradient."""
        found = torch.zeros(self._d, dtype=torch.float64)
        found[self._given] = self._length
        self._given += 1
        return found

    def batches(self, count: int, *channels: str) -> Iterator[Batch]:
        """Yield `count` batches that answer the channels; each is closed by the next one."""
        del channels
        yield from (_Unit(self) for _ in range(count))

    def opening(self, *channels: str) -> Batch:
        """Return the batch that opens a round, of the rate that the algorithm's Opening names."""
        del channels
        self.opened.add(self._given)
        return _Unit(self)

    def columns(self) -> Means:
        """Return what scales the site's columns, once, before the first round."""
        raise PolicyRefused("what scales columns was asked for: weights are of gradients alone")

    def unprotected(self, w: Tensor) -> tuple[float, Tensor]:
        """Return F_i(w) and ∇F_i(w) [d] over all records, exact: no clip, no noise, no charge."""
        del w
        raise PolicyRefused("exact numbers were asked for: unit vectors have none")


class _Unit:
    """A batch that answers with unit vectors, whatever the records are."""

    noise_variance = 0.0

    def __init__(self, units: _Units) -> None:
        self._units = units

    def gradient(self, w: Tensor, weighting: Weighting = UNIFORM) -> Tensor:
        """Return the mean weighted gradient at w: [d] -> [d], which the caller may write over."""
        del w, weighting
        return self._units.unit()

    def difference(self, w: Tensor, anchor: Tensor, bound: float) -> Tensor:
        """Return the mean of ∇ℓ_j(w) - ∇ℓ_j(anchor), each clipped to `bound`: [d], [d] -> [d]."""
        del anchor, bound
        return torch.zeros_like(w)

    def loss(self, w: Tensor, bound: float) -> float:
        """Return the mean of the losses at w [d], each clipped to [0, bound]."""
        del w
        return _SOME_SHARE * bound

    def below(self, w: Tensor, bound: float) -> float:
        """Return the share of records with a loss of at most bound at w [d]; may leave [0, 1]."""
        del w, bound
        return _SOME_SHARE
