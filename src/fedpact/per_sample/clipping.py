"""Clip coefficients: weights of records, and a bound on how long a clipped sum can be."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fedpact.common.check import finite, non_negative, positive
from fedpact.common.errors import InputError, ModelError
from fedpact.common.params import on_cpu
from fedpact.per_sample.gradients import IN_FLOAT32, TOGETHER

SHORTEST: Final = 2.0**-40
LARGEST_CLIP: Final = 2.0**100
"""The smallest clip, beside which the digits that float32 loses near 0 do not count, and the
largest but for infinity, as sums have to be finite."""

_MOST: Final = 2.0**60
"""A coefficient that makes no gradient of up to norms.LONGEST overflow."""


def slack(records: int) -> float:
    """By how much a sum over at most so many records may exceed the clip: relative, proven.

    docs/notes/proofs.md has the proof: |S(D + r) - S(D)| <= C (1 + slack) for batches D and D + r
    of at most `records`, where float32 adds (gradients.TOGETHER records to a product) and where
    float64 does.

    >>> slack(75) < 2e-3 and slack(10**6) < 0.13
    True
    """
    unit = 2.0**-24
    added = (TOGETHER + 16) * unit * min(records, IN_FLOAT32)
    rounded = unit * (1 + 2.0**-5) * records if records > IN_FLOAT32 else 0.0
    return 2.0**-14 + 2 * max(added, rounded)


def within(total: Tensor, clip: float, most: int | None) -> Tensor:
    """Return a sum [d] of clipped parts, shortened to most C; as it is where most is None.

    For a batch of more than `most` records, whose sum in float64 is rounded to float32 afterwards:
    that rounding is then no larger than with `most`. The nearest point of a ball is never farther
    from another's than the points themselves are, so what one record moves the sum by only shrinks.
    """
    if most is None:
        return total
    # A little more than `most` clips, so that sums of so many records are left as they are.
    longest = most * clip * (1 + 2.0**-14)
    return total * torch.clamp(longest / total.square().sum().sqrt(), max=1)


def check_clip(name: str, clip: float) -> None:
    """Raise InputError unless float32 keeps sums of such clips, or it is infinity."""
    if not (SHORTEST <= clip <= LARGEST_CLIP or clip == math.inf):
        raise InputError(
            f"{name} is {clip!r}: expected a number from 2^-40 to 2^100, or infinity; beside a "
            "smaller one what float32 loses near 0 would count, and sums of larger ones might "
            "overflow; scale loss or weights"
        )


def coefficients(
    clip: float,
    norms: Tensor,
    w: Tensor | None,
    shares: Tensor | None,
    gamma: float | None = None,
) -> Tensor:
    """c_j = s_j min(w_j, C/‖g_j‖) [P] in float64; less where float32 would not hold c_j g_j.

    gamma: weights are w_j C/(‖g_j‖ + γ) where it is given; see PerSampleKernel.clipped_sum.
    """
    if gamma is not None:
        longer = clip / (norms.double() + gamma)
        w = longer if w is None else w * longer
    c = clip / norms
    c = c.clamp_max(1) if w is None else torch.minimum(w.double(), c).clamp_max(_MOST)
    return c if shares is None else c * shares


def mask_slots(
    c: Tensor, losses: Tensor, norms: Tensor, w: Tensor | None, occupied: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return c [P] with 0 for slots that do not count, and which do; None: all slots are finite.

    A slot counts if it holds a record that is finite in loss, norm and weight.
    """
    known = [v for v in (losses, norms, w) if v is not None]
    # A sum is finite only if its terms are. A GPU is not asked, as the host would have to wait.
    if on_cpu(norms) and math.isfinite(sum(float(v.sum()) for v in known)):
        return (c if occupied is None else torch.where(occupied, c, 0)), None
    good = torch.stack([v.isfinite() for v in known]).all(0)
    good = good if occupied is None else good & occupied
    return torch.where(good, c, 0), good


Weights = Callable[[Tensor], Tensor]
"""Losses [n] of any records -> weights [n], each from its own record's loss alone."""


def weights_of(weights: Weights | None, losses: Tensor) -> Tensor:
    """Return the weights [n] of losses [n], ones without any. Raises ModelError."""
    if weights is None:
        return torch.ones_like(losses)
    w = weights(losses).detach()
    if w.shape != losses.shape:
        raise ModelError(
            f"the weights have shape {tuple(w.shape)} for {len(losses)} losses: expected one each"
        )
    return w.to(losses.dtype)


@dataclass(frozen=True)
class Uniform:
    """Every record counts alike: w_j = `weight` > 0.

    By the clip C gradients longer than C/weight are cut; the sum over weight is that of this clip.
    """

    weight: float = 1.0

    def __post_init__(self) -> None:
        positive(weight=self.weight)

    def __call__(self, losses: Tensor) -> Tensor:
        """Return w_j [B] for losses ℓ_j [B]."""
        return torch.full_like(losses, self.weight)


@dataclass(frozen=True)
class Fair:
    """FedFair's weighting, per record: w_j = max(0, 1 + λ (ℓ_j - F)) (FedFDP, equation 15).

    lam: λ >= 0. reference: F, the loss that records are compared with.
    The paper's weight has no lower bound, and its contribution none above; see
    docs/notes/errata.md.
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
