"""The range of a site's replies: the server rejects what is outside as broken or malicious.

One bound serves every algorithm. A reply is computed from released gradients: a sum of them with
factors up to η, added to the model of the task, or one of them alone. So its distance from the
task's model is at most

    η n G       n: the events that the site has reserved,   G: the largest released gradient

times LEEWAY, for momentum, schedules, corrections and compression. G = M C + s (sqrt(d) + 9), with
noise of deviation s in each of d coordinates, is exceeded less than once in 10^17 releases, so
honest sites are not rejected. The bound stops values that would overflow, not lies of plausible
size: the distance to the other sites' median (deployment.admission) and [robust] are for those.
Gradient differences (fedproxvr) have no such bound, as their clip grows with the movement.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fedpact.common.messages import Numbers, Vectors
from fedpact.privacy.mechanisms import mechanism_of
from fedpact.privacy.terms import FullDataRelease, Terms

LEEWAY: Final = 100.0
"""The factor by which a reply may exceed the bound above."""

LARGEST_NUMBER: Final = 1e18
"""The largest number in a reply, unless the terms determine it."""

_DEVIATIONS: Final = 9.0
# The factor by which a site's true size may exceed the declared one, which is a round number.
_RECORDS: Final = 2.0


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`, inclusive. whole: integers only."""

    least: float
    most: float
    whole: bool = False

    def holds(self, value: float) -> bool:
        """Whether a number is in the range; never for NaN."""
        return self.least <= value <= self.most and (not self.whole or float(value).is_integer())

    def __str__(self) -> str:
        kind = "an integer" if self.whole else "a number"
        if self.least == self.most:
            return f"{self.most:g}"
        return f"{kind} from {self.least:g} to {self.most:g}"


def nearly(value: float) -> Range:
    """Return the numbers that equal `value` to six digits, as another machine may compute it."""
    return Range(value - abs(value) * 1e-6, value + abs(value) * 1e-6)


def longest_gradient(terms: Terms, d: int) -> float:
    """Return G, the largest norm of a batch's released gradient [d]."""
    clip, most = max(terms.clip, *terms.clips, 0.0), 1.0
    if mechanism_of(terms.mechanism).summed:
        # Bernstein: a Poisson batch has more than `drawn` records with probability <= exp(-tail).
        expected, tail = _RECORDS * terms.batch_size, _DEVIATIONS**2 / 2
        drawn = expected + tail / 3 + math.sqrt(tail**2 / 9 + 2 * tail * expected)
        most = min(drawn, _RECORDS * terms.size) / terms.batch_size
    # ‖z‖ is 1-Lipschitz in z and E‖z‖ <= sqrt(d), so it exceeds sqrt(d) + 9 as rarely.
    noise = math.sqrt(terms.noise_variance) * clip / terms.clip * (math.sqrt(d) + _DEVIATIONS)
    return most * clip + noise


def longest_reply(terms: Terms, rate: float, told: Tensor | None, d: int) -> float:
    """Return the largest distance of a reply's vector [d] from the task's, or from 0 without one.

    rate: η > 0, a site's learning rate. told: the task's vector. Infinite for differences.
    """
    if "difference" in terms.sigmas:
        return math.inf
    gradient = max(longest_gradient(one, d) for one in (terms, terms.opening))
    far = LEEWAY * max(1, terms.steps + terms.openings) * gradient
    if told is None:
        return far
    return rate * far + LEEWAY * torch.finfo(told.dtype).eps * distance(told, None)


def longest_sums(
    once: FullDataRelease, lengths: Mapping[str, int], records: float
) -> dict[str, float]:
    """Return channel -> the largest norm of a one-time release over `records` declared records.

    lengths: channel -> its number of coordinates. A record moves a channel by at most its bound.
    """
    return {
        channel: bound
        * (_RECORDS * records + once.sigma * (math.sqrt(lengths[channel]) + _DEVIATIONS))
        * (1 + 2.0**-7)  # the noise grid's share, and float32
        for channel, bound in once.bounds.items()
    }


def distance(vector: Tensor, told: Tensor | None) -> float:
    """Return ‖vector - told‖, each [d]; told: None for 0."""
    moved = vector if told is None else vector - told
    return float(moved.double().square().sum().sqrt())


def find_fault(
    vectors: Vectors,
    numbers: Numbers,
    told: Vectors,
    longest: Mapping[str, float],
    public: Mapping[str, Range],
) -> str | None:
    """Describe the first part of a reply that is outside its bound; None if all are within.

    told: the task's vectors. longest: vector -> the largest distance from the task's. public: the
    ranges of numbers that follow from the terms.
    """
    any_number = Range(-LARGEST_NUMBER, LARGEST_NUMBER)
    for name, value in numbers.items():
        allowed = public.get(name, any_number)
        if not allowed.holds(value):
            return f"its number {name!r} is {value!r}: expected {allowed}"
    for name, most in longest.items():
        far = distance(vectors[name], told.get(name))
        if not far <= most:
            return (
                f"its vector {name!r} is {far:.6g} away from what was told: an honest one is at "
                f"most {most:.6g} away"
            )
    return None
