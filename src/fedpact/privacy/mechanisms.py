"""The noise mechanisms, one entry of MECHANISMS each.

Every mechanism adds Gaussian noise of deviation σ_c times its channel's bound (C for the gradient),
which is what accountants bound and ledgers record. They differ in how far one record moves a
release: the entry states it, and the docstring of its batch proves it. docs/how-to/extend.md adds a
mechanism.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fedpact.common.errors import InputError, PlanError
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.privacy.batches import (
    AutomaticBatch,
    BatchClippedBatch,
    BatchClippedKernel,
    PerSampleBatch,
)


@dataclass(frozen=True)
class Mechanism:
    """How a batch's releases are clipped, and how far one record moves them.

    told: its description in reports. kernel: computes gradients; a class other than PerSampleKernel
    takes the sum of the model's gradients as `plain`. batch: has a method for each channel.
    sensitivities: channel -> how far one record, added or removed, moves the release before noise,
    > 0, in units of the channel's bound. summed: whether a gradient is a sum of separately clipped
    records over the expected batch size, so that records can have weights; else it is one vector
    per batch with a norm of at most C.
    """

    told: str
    kernel: type[PerSampleKernel] | type[BatchClippedKernel]
    batch: type[PerSampleBatch] | type[BatchClippedBatch]
    sensitivities: Mapping[str, float]
    summed: bool


MECHANISMS: Final[dict[str, Mechanism]] = {
    "per_sample": Mechanism(
        told="Each record's part of a sum is clipped to its bound (a gradient to C), the sum over "
        "a Poisson batch gets Gaussian noise and is divided by the expected batch size. One record "
        "moves a sum by at most its bound.",
        kernel=PerSampleKernel,
        batch=PerSampleBatch,
        sensitivities={"gradient": 1.0, "difference": 1.0, "loss": 1.0, "below": 1.0},
        summed=True,
    ),
    "automatic": Mechanism(
        told="Each record's gradient is scaled to the length C ‖g‖ / (‖g‖ + 0.01), up as well as "
        "down (automatic clipping, AUTO-S), the sum over a Poisson batch gets Gaussian noise and "
        "is divided by the expected batch size. One record moves a sum by at most its bound.",
        kernel=PerSampleKernel,
        batch=AutomaticBatch,
        sensitivities={"gradient": 1.0, "difference": 1.0, "loss": 1.0, "below": 1.0},
        summed=True,
    ),
    "batch_clipped": Mechanism(
        told="The mean gradient of a Poisson batch is clipped to C as a whole and gets Gaussian "
        "noise. One record can turn it round: it moves by at most 2C, so σ counts half.",
        kernel=BatchClippedKernel,
        batch=BatchClippedBatch,
        sensitivities={"gradient": 2.0, "loss": 1.0, "below": 1.0},
        summed=False,
    ),
}
"""privacy.mode -> what it is; "none", which protects nothing, is no mechanism."""


def mechanism_of(name: str) -> Mechanism:
    """Return an entry of MECHANISMS. Raises InputError: another name."""
    if name not in MECHANISMS:
        raise InputError(f"mechanism is {name!r}: expected one of {', '.join(MECHANISMS)}")
    return MECHANISMS[name]


def sensitivity(mechanism: str, channel: str) -> float:
    """Return how far one record, added or removed, moves a channel's release before noise.

    In units of the channel's bound (C for the gradient). Its sigma has the same unit, so sigma over
    this is the noise multiplier. Raises PlanError: a channel without a known sensitivity.
    InputError: an unknown mechanism.
    """
    known = mechanism_of(mechanism).sensitivities
    if channel not in known:
        raise PlanError(
            f"channel {channel!r} has no known sensitivity under privacy.mode = {mechanism!r}: "
            f"expected one of {', '.join(known)}; use another mode"
        )
    return known[channel]
