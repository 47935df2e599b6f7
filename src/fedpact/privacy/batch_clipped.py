"""Batch clipping: the mean gradient of a batch, clipped as a whole (LDP FedSGD, arXiv 2102.04737).

One record can turn the clipped mean round: with C = 1 the gradients 1 and -3 have the mean -1,
without the second one it is 1. Both lie in the ball of radius C, so the sensitivity is 2C, exactly,
whatever the batch's gradients are; `terms.sensitivity` has it. The batch's realised size leaves
only through the clipped mean. That a record changes no batch that it is not in, which sampling is
counted on for, takes gradients that follow from weights and batch alone: they are summed as under
per-sample clipping, from what was traced.
"""

import math

import torch
from torch import Tensor

from fedpact.errors import PolicyRefused
from fedpact.losses import Loss
from fedpact.params import FlatModel
from fedpact.persample.kernel import PerSampleKernel
from fedpact.persample.layout import Placement
from fedpact.persample.weighting import UNIFORM, Uniform, Weighting
from fedpact.privacy.batches import NoisyBatch
from fedpact.privacy.guarded import sum_finite

# Scaling rounds each entry, by 2^-24 in float32: this keeps the true length at or below C.
_SLACK = 1e-6


class BatchClippedKernel:
    """Clipped mean gradients of one model. Raises ModelError, as PerSampleKernel does.

    apart: what sums gradients, and has the loss channels' losses; one of its own by default.
    """

    def __init__(self, model: FlatModel, loss: Loss, apart: PerSampleKernel | None = None) -> None:
        self.model, self.loss = model, loss
        self._apart = apart or PerSampleKernel(model, loss)

    def losses(self, x: Tensor, y: Tensor, layout: Placement | None = None) -> Tensor:
        """The per-sample losses [B] at the model's weights, without gradient."""
        return self._apart.losses(x, y, layout)

    def clipped_mean(self, x: Tensor, y: Tensor, clip: float) -> Tensor:
        """Return ḡ min(1, C/‖ḡ‖) [d], ḡ the mean gradient of the records x, y [B, ...].

        clip: C > 0, or infinity. A record whose loss or gradient is not finite adds 0 to the mean's
        sum; see PerSampleKernel. Zeros for an empty batch, and where ‖ḡ‖ is not finite.
        """
        if len(x) == 0:
            return torch.zeros_like(self.model.vector)
        mean = self._apart.clipped_sum(x, y, math.inf) / len(x)
        exact = mean.double()
        norm = exact.square().sum().sqrt()
        scale = (clip * (1 - _SLACK) / norm).clamp_max(1)
        return torch.where(norm.isfinite(), exact * scale, 0).to(mean.dtype)

    def way(self, x: Tensor, y: Tensor) -> str:
        """Return how records of the form of x, y [B, ...] are kept apart, as
        PerSampleKernel.way."""
        return self._apart.way(x, y)

    def verify(self, x: Tensor, y: Tensor) -> None:
        """Check that the model keeps the records of a batch apart. Raises ModelError otherwise."""
        self._apart.verify(x, y)


class BatchClippedBatch(NoisyBatch[BatchClippedKernel]):
    """A batch whose mean gradient is clipped as a whole."""

    def gradient(self, w: Tensor, weighting: Weighting = UNIFORM) -> Tensor:
        """Return the mean weighted gradient at w: [d] -> [d], which the caller may write over.
        Raises PolicyRefused: a weighting, part of a per-record clip."""
        self.use("gradient")
        if not isinstance(weighting, Uniform):
            raise PolicyRefused(
                f"weighting is {weighting}: under batch clipping records have no clip of their "
                'own that a weight could be part of; use privacy.mode = "per_sample"'
            )
        self._kernel.model.load(w)
        clipped_mean = self._kernel.clipped_mean

        def take(x: Tensor, y: Tensor, _: Tensor | None, layout: Placement | None) -> Tensor:
            del layout  # the ball bounds it, wherever records stand
            return clipped_mean(x, y, self._terms.clip)

        # Whatever it is, it lies in the ball of radius C, and 2C is what one record may do.
        mean = sum_finite(take, self._x, self._y, None, w, None)
        return self.noisy(mean, "gradient", self._terms.clip)

    def difference(self, w: Tensor, anchor: Tensor, bound: float) -> Tensor:
        """Return the mean of ∇ℓ_j(w) - ∇ℓ_j(anchor), each clipped to `bound`: [d], [d] -> [d].
        Raises PolicyRefused: a batch's mean difference has no proof here."""
        del w, anchor, bound
        raise PolicyRefused(
            "a gradient difference was asked for under batch clipping, which has no sensitivity "
            'for it; use privacy.mode = "per_sample"'
        )
