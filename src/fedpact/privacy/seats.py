"""What a site computes with that trains in lockstep with others: kernels and draws that ask.

Each has the numbers of the site that trains alone, sums up to rounding and noise bit for bit.
"""

import math
from collections.abc import Callable

from torch import Tensor

from fedpact.losses import Loss
from fedpact.params import FlatModel, at_hand
from fedpact.persample.dense import Sum
from fedpact.persample.kernel import PerSampleKernel, PlainKernel
from fedpact.persample.weighting import Weights
from fedpact.privacy.keystream import together
from fedpact.privacy.noise import SeededDraws
from fedpact.privacy.stacked import Noise

Ask = Callable[[Sum | Noise], Tensor | None]
"""A question to whoever stacks; None: the site has to answer it itself."""


class Seat(PerSampleKernel):
    """A site's kernel whose sums are asked for together with other sites'."""

    def __init__(self, model: FlatModel, loss: Loss, ask: Ask) -> None:
        super().__init__(model, loss)
        self._ask = ask

    def clipped_sum(
        self,
        x: Tensor,
        y: Tensor,
        clip: float,
        weights: Weights | None = None,
        most: int | None = None,
    ) -> Tensor:
        """See PerSampleKernel."""
        # What is to be refused, or is too long, and an empty batch, is for the site's own kernel.
        if x.shape[0] and clip > 0 and most is None:
            total = self._ask(Sum(self.model, x.detach(), y, clip, weights))
            if total is not None:
                return total
        return super().clipped_sum(x, y, clip, weights, most)


class PlainSeat(PlainKernel):
    """The same of a run without privacy."""

    def __init__(self, model: FlatModel, loss: Loss, ask: Ask) -> None:
        super().__init__(model, loss)
        self._ask = ask

    def weighted_sum(self, x: Tensor, y: Tensor, weights: Weights | None = None) -> Tensor:
        """See PlainKernel."""
        if x.shape[0]:
            total = self._ask(Sum(self.model, x.detach(), y, math.inf, weights, plain=True))
            if total is not None:
                return total
        return super().weighted_sum(x, y, weights)


class SeatDraws(SeededDraws):
    """A site's draws whose noise is drawn together with other sites', each from its own key."""

    def __init__(self, ask: Ask, seed: int, *around: str | int) -> None:
        super().__init__(seed, *around)
        self._ask = ask

    def add_noise(
        self, total: Tensor, sigma: float, sensitivity: float, step: int, purpose: str
    ) -> Tensor:
        """See SeededDraws."""
        if at_hand(total) and together(total.numel(), total.dtype) > 1:
            key = self.noise_key(step, purpose)
            answer = self._ask(Noise(total, sigma * sensitivity, key))
            if answer is not None:
                return answer
        return super().add_noise(total, sigma, sensitivity, step, purpose)
