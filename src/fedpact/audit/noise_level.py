"""Is the noise as loud as the terms say? From releases of a site without any records: noise alone.

Of all mistakes the one that an attack on a single canary takes longest to find, and this at once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy import stats

from fedpact.audit.target import Target, bound_of
from fedpact.draws.seeded import SeededDraws, seeded_generator
from fedpact.privacy.oracle import Records

_EVENTS = 200
_REQUESTS = 5
_LONG = 64  # of vectors this long two that are the same are told from chance
_SAMPLE = 20_000
# The right noise is at the claim itself, not below it, so the check fails as often as this.
_ERROR = 1e-3
JOINT_CONFIDENCE = 1 - _ERROR
"""With which the upper bounds on all channels' noise hold together."""


@dataclass(frozen=True)
class NoiseLevel:
    """One channel's noise multiplier: an upper confidence bound on it, and what the terms state.

    at_best: the bound that is expected, were the noise exactly as stated.
    """

    channel: str
    measured: float
    at_most: float
    claimed: float
    at_best: float

    @property
    def passed(self) -> bool:
        """Whether the noise can be as loud as it has to be."""
        return self.claimed <= self.at_most


@dataclass(frozen=True)
class Tested:
    """A hypothesis that holds for a right mechanism: its p-value, and the level to be above.

    A right mechanism falls below `level` with at most that probability.
    """

    what: str
    p: float
    level: float

    @property
    def passed(self) -> bool:
        """Whether what was seen may happen."""
        return self.p >= self.level


ChannelNoise = Mapping[str, torch.Tensor]
"""Each channel's noise in units of what the terms state, [requests, events, numbers]."""


def noise_alone(target: Target, queries: Mapping[str, tuple[Any, ...]]) -> ChannelNoise:
    """Return the noise of releases of the site without any records."""
    return _noise(target, queries, target.no_records)


def noise_levels(
    target: Target, queries: Mapping[str, tuple[Any, ...]], alone: ChannelNoise | None = None
) -> tuple[NoiseLevel, ...]:
    """Return the level of every channel; all are right at once with probability 0.999.

    alone: `noise_alone` of the same, where it is at hand.

    Sum of squares over σ² is chi-square, with as many degrees of freedom as there are numbers;
    about the mean of all events, with one less a coordinate: what does not change hides nothing.
    """
    levels = list[NoiseLevel]()
    for channel, noise in (alone or noise_alone(target, queries)).items():
        flat = noise.flatten(0, 1)
        squares = float((flat - flat.mean(0)).square().sum())
        numbers = (len(flat) - 1) * flat.shape[1]
        claimed = target.terms.multipliers[channel]
        least = float(stats.chi2.ppf(_ERROR / len(queries), numbers))
        at_most = claimed * (squares / least) ** 0.5
        measured = claimed * (squares / numbers) ** 0.5
        at_best = claimed * (numbers / least) ** 0.5
        levels.append(NoiseLevel(channel, measured, at_most, claimed, at_best))
    return tuple(levels)


def noise_tests(
    target: Target, queries: Mapping[str, tuple[Any, ...]], alone: ChannelNoise | None = None
) -> tuple[Tested, ...]:
    """Test that every channel's noise is N(0, 1) in units of its own, and new each time.

    On a site without records and, where all records are in every batch, on all of them, whose sum
    is known. A right mechanism passes all tests at once with probability 0.999.

    alone: `noise_alone` of the same, where it is at hand.
    """
    found = list[tuple[str, float]]()
    for noises, where in (
        (alone or noise_alone(target, queries), "no records"),
        (_noise(target, queries, target.records), "all records"),
    ):
        for channel, noise in noises.items():
            found += [(f"{channel}, {where}: {what}", p) for what, p in _tests(noise)]
    # Bonferroni's: each test has its share of the error.
    return tuple(Tested(what, p, _ERROR / len(found)) for what, p in found)


def _tests(noise: torch.Tensor) -> Iterator[tuple[str, float]]:
    """Yield p-values, each exact or too large, of noise [requests, events, numbers]."""
    numbers = noise.shape[2]
    flat = noise.flatten(0, 1)
    squares = flat.square()
    for what, sums, size in (
        ("some coordinate's noise is as loud", squares.sum(0), len(flat)),
        ("some event's noise is as loud", squares.sum(1), numbers),
    ):
        p = float(stats.chi2.cdf(float(sums.min()), size))
        yield what, min(1.0, p * len(sums))
    # Noise of bounded size hides no record that is larger; P[all |z| <= a] = (2 Φ(a) - 1)^n.
    within = 1 - 2 * float(stats.norm.sf(float(flat.abs().max())))
    yield "its largest values are large", within ** flat.numel()
    some = flat.flatten()[:: max(1, flat.numel() // _SAMPLE)].numpy()
    yield "it is normal", float(stats.kstest(some, "norm", method="asymp").pvalue)
    # Given one of two independent vectors, their product over its length is N(0, 1).
    yield "requests are independent", _together(noise.flatten(1))
    if numbers >= _LONG:
        yield "events are independent", _together(flat)
    for lag in (1, 2):
        products = (noise[:, lag:] * noise[:, :-lag])[:, :: 2 * lag].flatten()
        # Without an event in two products: given one side, normal.
        length = float(noise[:, :-lag][:, :: 2 * lag].norm())
        z = abs(float(products.sum())) / max(length, 1e-300)
        yield f"events {lag} apart are independent", float(2 * stats.norm.sf(z))


def _together(vectors: torch.Tensor) -> float:
    """Return a p-value of the two vectors [n, d] that are most alike or most opposed."""
    lengths = vectors.norm(dim=1).clamp_min(1e-300)
    z = (vectors @ vectors.T).abs() / lengths[:, None]
    z.fill_diagonal_(0)
    n = len(vectors)
    return min(1.0, n * (n - 1) * float(stats.norm.sf(float(z.max()))) * 2)


def _noise(
    target: Target, queries: Mapping[str, tuple[Any, ...]], records: Records
) -> ChannelNoise:
    """Return each channel's noise over records.

    All records are in every batch: the rate is 1, and with it the sum is known.
    """
    whole = replace(target, terms=replace(target.terms, rate=1.0))
    answers = {channel: list[torch.Tensor]() for channel in queries}
    for request in range(_REQUESTS):
        draws = SeededDraws(target.plan.seed, "audit", "noise", len(records.y), request)
        for batch in whole.oracle(records, draws).batches(_EVENTS // _REQUESTS, *queries):
            for channel, query in queries.items():
                answer = torch.as_tensor(getattr(batch, channel)(*query)).reshape(-1).double()
                answers[channel].append(answer)
    made = dict[str, torch.Tensor]()
    for channel, query in queries.items():
        stacked = torch.stack(answers[channel])
        if len(records.y):
            # Differences of neighbours, in place of a sum that rounding keeps from being known.
            centred = (stacked[0::2] - stacked[1::2]) / 2**0.5
        else:
            # The sum without records, as a count is told as a share with 1/2 added.
            centred = stacked - whole.answer(records, channel, query).double()
        deviation = _deviation(whole, channel, query)
        if whole.terms.units:
            # Whole numbers of a coarse grid are not normal; spread over it, of which differences
            # have a finer one, they are, of a variance with what rounding and spreading add.
            spread = seeded_generator(target.plan.seed, "audit", "spread", channel)
            unit = deviation / whole.terms.units
            width = unit / 2**0.5 if len(records.y) else unit
            centred += width * (
                torch.rand(centred.shape, generator=spread, dtype=centred.dtype) - 0.5
            )
            deviation = (deviation**2 + (unit**2 + width**2) / 12) ** 0.5
        centred /= deviation
        made[channel] = centred.unflatten(0, (_REQUESTS, -1))
    return made


def _deviation(target: Target, channel: str, query: tuple[Any, ...]) -> float:
    """The standard deviation of the noise in a release, by the terms (see privacy.oracle)."""
    if channel == "gradient":
        return target.terms.noise_variance**0.5
    bound = bound_of(channel, query, target.terms)
    return target.terms.sigmas[channel] * bound / target.terms.batch_size
