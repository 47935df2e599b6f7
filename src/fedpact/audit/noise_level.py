"""Is the noise as loud as the terms say? From releases of a site without any records: noise alone.

Of all mistakes the one that an attack on a single canary takes longest to find, and this at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from scipy import stats

from fedpact.audit.target import Target
from fedpact.privacy.noise import SeededDraws
from fedpact.privacy.oracle import Records

_EVENTS = 200
# The right noise is at the claim itself, not below it, so the check fails as often as this.
_ERROR = 1e-3
CONFIDENCE = 1 - _ERROR
"""With which the upper bounds on all channels' noise hold together."""


@dataclass(frozen=True)
class NoiseLevel:
    """One channel's noise multiplier: an upper confidence bound on it, and what the terms state."""

    channel: str
    measured: float
    at_most: float
    claimed: float

    @property
    def passed(self) -> bool:
        """Whether the noise can be as loud as it has to be."""
        return self.claimed <= self.at_most


def noise_levels(target: Target, queries: Mapping[str, tuple[Any, ...]]) -> tuple[NoiseLevel, ...]:
    """Return the level of every channel; all are right at once with probability 0.999.

    Sum of squares over σ² is chi-square, with as many degrees of freedom as there are numbers.
    """
    nobody = Records(target.records.x[:0], target.records.y[:0])
    draws = SeededDraws(target.plan.seed, "audit", "noise")
    answers = {channel: list[torch.Tensor]() for channel in queries}
    for batch in target.oracle(nobody, draws).batches(_EVENTS, *queries):
        for channel, query in queries.items():
            answer = torch.as_tensor(getattr(batch, channel)(*query)).reshape(-1).double()
            answers[channel].append(answer)
    levels = list[NoiseLevel]()
    for channel, query in queries.items():
        # The sum without records, as a count is told as a share with 1/2 added.
        centre = target.answer(nobody, channel, query).double()
        noise = torch.stack(answers[channel]) - centre
        noise *= _claimed(target, channel) / _deviation(target, channel, query)
        squares, numbers = float(noise.square().sum()), noise.numel()
        at_most = (squares / float(stats.chi2.ppf(_ERROR / len(queries), numbers))) ** 0.5
        measured = (squares / numbers) ** 0.5
        levels.append(NoiseLevel(channel, measured, at_most, _claimed(target, channel)))
    return tuple(levels)


def _claimed(target: Target, channel: str) -> float:
    return target.terms.multipliers[channel]


def _deviation(target: Target, channel: str, query: tuple[Any, ...]) -> float:
    """The standard deviation of the noise in a release, by the terms (see privacy.oracle)."""
    if channel == "gradient":
        return target.terms.noise_variance**0.5
    bound = {"loss": lambda: float(query[1]), "below": lambda: 0.5}[channel]()
    return target.terms.sigmas[channel] * bound / target.terms.batch_size
