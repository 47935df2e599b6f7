"""How far one record may move a sum, rounding included, and what keeps it there."""

import math
from typing import Final

import torch
from torch import Tensor

from fedpact.errors import InputError
from fedpact.params import on_cpu
from fedpact.persample.norms import LARGEST
from fedpact.persample.share import IN_FLOAT32, TOGETHER, unit_of

SHORTEST: Final = 2.0**-100
"""The smallest clip; 1 over it is the largest but for infinity, as sums have to be finite."""


def slack(records: int) -> float:
    """By how much a sum over at most so many records may exceed the clip: relative, proven.

    docs/privacy.md has the proof: |S(D + r) - S(D)| <= C (1 + slack) for batches D and D + r of at
    most `records`, where float32 adds (gradients.TOGETHER records to a product) and where float64
    does.

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
    longest = most * clip * (1 + 2.0**-14)
    return total * torch.clamp(longest / total.square().sum().sqrt(), max=1)


def check_clip(name: str, clip: float) -> None:
    """Raise InputError unless a sum of such clips has digits in float32, or it is infinity."""
    if not (SHORTEST <= clip <= 1 / SHORTEST or clip == math.inf):
        raise InputError(
            f"{name} is {clip!r}: expected a number from 2^-100 to 2^100, or infinity; others have "
            "no digits in float32; scale loss or weights"
        )


def coefficients(clip: float, norms: Tensor, w: Tensor | None, shares: Tensor | None) -> Tensor:
    """c_j = s_j min(w_j, C/‖g_j‖) [P] in float64, in units of the clip (share.unit_of)."""
    c = clip / norms
    c = (c.clamp_max(1) if w is None else torch.minimum(w.double(), c)) / unit_of(clip)
    # A weight in units of a small clip may be no number of float32.
    c = c.clamp_max(LARGEST)
    return c if shares is None else c * shares


def usable(losses: Tensor, norms: Tensor, w: Tensor | None, occupied: Tensor | None) -> Tensor:
    """Which slots [P] hold a record that is finite in loss, norm and weight."""
    good = losses.isfinite() & norms.isfinite()
    if w is not None:
        good &= w.isfinite()
    return good if occupied is None else good & occupied


def every_slot_finite(losses: Tensor, norms: Tensor, w: Tensor | None) -> bool:
    """Whether all slots are, which a GPU is not asked: the host would have to wait."""
    if not on_cpu(norms):
        return False
    # A sum is finite only if its terms are.
    return math.isfinite(sum(float(v.sum()) for v in (losses, norms, w) if v is not None))
