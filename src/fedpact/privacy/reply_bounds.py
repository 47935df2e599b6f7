"""How far an honest reply can go, from public numbers: what lies beyond it is broken, or a lie.

A released sum over a Poisson batch is made of |B| parts that are at most C long and of noise, and
is divided by q N. With k = DEVIATIONS, and z from N(0, I_d):

    ‖z‖ <= sqrt(d) + k                          ‖·‖ is 1-Lipschitz, and E‖z‖ <= sqrt(d)
    |B| <= μ + L/3 + sqrt(L²/9 + 2 L μ)          Bernstein, L = k²/2, μ = RECORDS q N

each but once in exp(k²/2), which is 4e17. So a sum Σ c_t g_t of releases with noise of deviation s
in each coordinate is at most

    Σ |c_t| M C + sqrt(Σ c_t²) s (sqrt(d) + k),   M = (the bound on |B|) / (q N)

long, as the noise of each is its own; a reply that is made of n releases exceeds its bound less
than once in 2e17 / n. M = 1 for a batch's clipped mean. A site may hold up to RECORDS times the
records that it declared, as a declared size is a round number.

A plain run's releases have no clip, and so no such bound: none is asked for there.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fedpact.common.errors import PlanError
from fedpact.common.messages import Numbers, Vectors
from fedpact.privacy.batches import most_records
from fedpact.privacy.mechanisms import mechanism_of
from fedpact.privacy.terms import FullDataRelease, Terms

DEVIATIONS: Final = 9.0
"""k; see the module."""

RECORDS: Final = 2.0
"""How many times its declared size a site's true one may be."""

_LONGEST: Final = 2.0**27
"""Units of a sum whose last bit is 2^-26 of a unit: it moves a probability by as much of itself."""

# Of a bound, for the noise grid's share (2^-10), the clip's slack and float32.
_LEEWAY: Final = 1 + 2.0**-7
# Of a number that both sides compute from the same terms, perhaps on unlike machines.
_DIGITS: Final = 1e-6


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`, both among them; `whole`: integers only."""

    least: float
    most: float
    whole: bool = False

    def holds(self, value: float) -> bool:
        """Whether a number is in it; NaN is in none."""
        return self.least <= value <= self.most and (not self.whole or float(value).is_integer())

    def __str__(self) -> str:
        kind = "an integer" if self.whole else "a number"
        if self.least == self.most:
            return f"{self.most:g}"
        return f"{kind} from {self.least:g} to {self.most:g}"


def widen(value: float) -> Range:
    """Return the range of what is equal to a number up to its last digits."""
    return Range(value - abs(value) * _DIGITS, value + abs(value) * _DIGITS)


def range_between(least: float, most: float) -> Range:
    """Return the range between two bounds that were derived without rounding, and some more."""
    return Range(least - abs(least) * (_LEEWAY - 1), most + abs(most) * (_LEEWAY - 1))


@dataclass(frozen=True)
class ReplyBounds:
    """What an honest reply to a task can be.

    vectors: name -> the longest distance from what was told under that name, from 0 where nothing
    was; infinity where there is no bound. numbers: name -> range. steps: how many steps went into
    the vectors, each of which rounds.
    """

    vectors: Mapping[str, float]
    numbers: Mapping[str, Range]
    steps: int = 1

    def fault(self, vectors: Vectors, numbers: Numbers, told: Vectors) -> str | None:
        """Return what is beyond its bound, in words; None if nothing is.

        vectors, numbers: of a reply; those without a bound are `find_undeclared`'s to find. told:
        what the task had.
        """
        for name, bound in self.numbers.items():
            if name in numbers and not bound.holds(numbers[name]):
                return f"its number {name!r} is {numbers[name]!r}: expected {bound}"
        for name in self.vectors.keys() & vectors.keys():
            far, most = measure_distance(vectors[name], told.get(name)), self.longest(name, told)
            if not far <= most:
                return (
                    f"its vector {name!r} is {far:.6g} away from what was told: an honest one is "
                    f"at most {most:.6g} away"
                )
        return None

    def longest(self, name: str, told: Vectors) -> float:
        """Return the bound of a vector, rounding included."""
        bound = self.vectors[name] * _LEEWAY
        start = told.get(name)
        if start is None or not math.isfinite(bound):
            return bound
        # Each step has a few operations on w, which round each coordinate by half an ulp or less.
        ulps = 4 * (self.steps + 2) * torch.finfo(start.dtype).eps
        return bound + ulps * (bound + measure_distance(start, None))

    @staticmethod
    def of_mean(
        each: Sequence["ReplyBounds"], d: int, error: float, weights: Sequence[float] = ()
    ) -> "ReplyBounds":
        """Return the bounds of a weighted mean of replies that each keep theirs.

        each: at least one, with the same names. error: of the mean, in each of d coordinates.
        weights: of each in the mean, > 0; without, it may be any.
        """
        first = each[0]
        vectors = {n: max(b.vectors[n] for b in each) + error * math.sqrt(d) for n in first.vectors}
        ranges = {n: [b.numbers[n] for b in each] for n in first.numbers}

        def ends(values: list[float]) -> tuple[float, float]:
            if not weights:
                return min(values), max(values)
            whole = sum(w * value for w, value in zip(weights, values, strict=True))
            return whole / sum(weights), whole / sum(weights)

        numbers = {
            name: Range(
                ends([r.least for r in some])[0] - error, ends([r.most for r in some])[1] + error
            )
            for name, some in ranges.items()
        }
        return ReplyBounds(vectors, numbers, max(b.steps for b in each))

    def find_undeclared(self, vectors: Collection[str], numbers: Collection[str]) -> list[str]:
        """Return the names among these that have no bound, sorted."""
        return sorted((set(vectors) - set(self.vectors)) | (set(numbers) - set(self.numbers)))


def measure_distance(vector: Tensor, told: Tensor | None) -> float:
    """Return ‖vector - told‖, of [d] each; told: None for 0."""
    moved = vector if told is None else vector - told
    return float(moved.double().square().sum().sqrt())


@dataclass(frozen=True)
class Release:
    """A release [d]: at most `clipped` long, and noise of this deviation in each coordinate."""

    clipped: float
    deviation: float

    def longest(self, d: int, total: float = 1.0, squares: float = 1.0) -> float:
        """Return the bound on ‖Σ c_t g_t‖ of independent releases like this one.

        total: Σ |c_t|. squares: Σ c_t². See the module.
        """
        noise = math.sqrt(squares) * self.deviation * (math.sqrt(d) + DEVIATIONS)
        return total * self.clipped + noise


def crowding(terms: Terms) -> float:
    """Return M: at most how many times its expected size a batch is."""
    expected, tail = RECORDS * terms.batch_size, DEVIATIONS**2 / 2
    drawn = expected + tail / 3 + math.sqrt(tail**2 / 9 + 2 * tail * expected)
    return min(drawn, RECORDS * terms.size) / terms.batch_size


def gradient(terms: Terms) -> Release:
    """Return a batch's released gradient; give `terms.opening` for the one that opens a round."""
    most = crowding(terms) if mechanism_of(terms.mechanism).summed else 1.0
    return Release(most * terms.clip, math.sqrt(terms.noise_variance))


def bound_difference(terms: Terms) -> Release:
    """Return a batch's released gradient difference, each record's clipped to 1."""
    return Release(crowding(terms), terms.sigmas["difference"] / terms.batch_size)


def bound_loss(terms: Terms, bound: float) -> Range:
    """Return the range of a batch's released loss, each record's clipped to at most `bound` > 0."""
    noise = DEVIATIONS * terms.sigmas["loss"] / terms.batch_size
    return range_between(-noise * bound, (crowding(terms) + noise) * bound)


def below(terms: Terms) -> Range:
    """Return the range of the released share of a batch's losses that are below a bound."""
    # Votes of ±1/2 over the expected size, and noise of half a vote, around 1/2.
    half = (crowding(terms) + DEVIATIONS * terms.sigmas["below"] / terms.batch_size) / 2
    return range_between(0.5 - half, 0.5 + half)


def counts(once: FullDataRelease, lengths: Mapping[str, int], records: float) -> ReplyBounds:
    """Return the bounds of sums that a site released once, of `records` that it declared, or fewer.

    lengths: how many numbers each channel has. A record moves a channel by at most its bound, so
    as many move it by at most so many times as much.
    """
    found = {
        channel: Release(RECORDS * records * bound, once.sigma * bound).longest(lengths[channel])
        for channel, bound in once.bounds.items()
    }
    return ReplyBounds(found, {})


def geometric(ratio: float, count: float) -> float:
    """Return Σ_{j < count} ratio^j for ratio in [0, 1]; count may be infinite."""
    return count if ratio == 1 else (1 - ratio**count) / (1 - ratio)


def check_grid(terms: Iterable[Terms]) -> None:
    """Raise PlanError unless sums are short enough on their grids for float64 to round them.

    A release is u floor(S/u + ν z + 1/2), z normal and ν u the noise's deviation: post-processing
    of a Gaussian mechanism, whatever S is and the grid's u. That S/u + ν z is one float64 number
    moves the value where it is within its last bit of a half.
    terms: of any sites; those without a grid of their own are left alone.
    """
    for one in terms:
        for each in (one, one.opening) if one.grid else ():
            longest = most_records(each.batch_size) * one.grid / min(each.sigmas.values())
            if not longest <= _LONGEST:
                raise PlanError(
                    f"a sum of site {one.site!r} has up to {longest:.3g} units of its grid: "
                    f"expected at most {_LONGEST:.3g}, as far as floating point is shown to round "
                    'it like a real number; use smaller batches, or compression.kind = "none"'
                )
