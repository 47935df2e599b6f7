"""How an algorithm weights the records of a batch: by each one's own loss, in a closed family."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpact.check import finite, non_negative
from fedpact.errors import ModelError
from fedpact.params import FlatModel
from fedpact.persample.layout import COMPACT, Placement

Weights = Callable[[Tensor], Tensor]
"""Losses [n] of any records -> weights [n], each from its own record's loss alone."""


def weights_of(weights: Weights | None, losses: Tensor) -> Tensor:
    """Return the weights [n] of the losses [n], ones without any. Raises ModelError."""
    if weights is None:
        return torch.ones_like(losses)
    w = weights(losses).detach()
    if w.shape != losses.shape:
        raise ModelError(
            f"the weights have shape {tuple(w.shape)} for {len(losses)} losses: expected one each"
        )
    return w.to(losses.dtype)


@dataclass(eq=False, slots=True)
class SiteSum:
    """One site's question: Σ_j c_j g_j at the model's weights over x, y [n, ...].

    c_j = min(w_j, C/‖g_j‖) with C = clip; infinity for c_j = w_j. See PerSampleKernel. plain: what
    is not finite is not left out but spreads, as without privacy. shares: s [n] in (0, 1], float64,
    by which each c_j is multiplied; None for 1. layout: where the records stand.
    """

    model: FlatModel
    x: Tensor
    y: Tensor
    clip: float
    weights: Weights | None
    plain: bool = False
    shares: Tensor | None = None
    layout: Placement = COMPACT


@dataclass(frozen=True)
class Uniform:
    """Every record counts alike: w_j = 1."""

    def __call__(self, losses: Tensor) -> Tensor:
        """Return w_j [B] for losses ℓ_j [B]."""
        return torch.ones_like(losses)


@dataclass(frozen=True)
class Fair:
    """FedFair's weighting, per record: w_j = max(0, 1 + λ (ℓ_j - F)) (FedFDP, equation 15).

    lam: λ >= 0. reference: F, the loss that records are compared with.
    The paper's weight has no lower bound, and its contribution none above; see docs/errata.md.
    """

    lam: float
    reference: float

    def __post_init__(self) -> None:
        non_negative(lam=self.lam)
        finite(reference=self.reference)

    def __call__(self, losses: Tensor) -> Tensor:
        """Return w_j [B] for losses ℓ_j [B]."""
        return (1 + self.lam * (losses - self.reference)).clamp_(min=0)


UNIFORM = Uniform()

Weighting = Uniform | Fair
"""The closed family of per-record weights: an algorithm names one, it cannot pass code."""
