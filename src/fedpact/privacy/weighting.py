"""How an algorithm weights the records of a batch: by each one's own loss, in a closed family."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpact.check import finite, non_negative


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
