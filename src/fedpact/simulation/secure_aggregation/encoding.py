"""Encoding replies as integers modulo 2^b that can be summed under masks, and decoding the sum.

n sites, Q of them in a sum; p_i = ω_i / Σ N in (0, 1] is a site's weight, P = Σ p_i over the sum.

fixed point    e_i = round(p_i clamp(x, -R, R) 2^s) mod 2^64,   R = 2^20,  s = 42 - ceil(log2 n)
               It cannot wrap: |Σ e_i| <= n (2^(20+s) + 1/2) < 2^63, whatever the sites send. The
               mean is off by at most Q 2^-(s+1) / P, and float64's rounding, 2^-51 max|x|.
own noise      e_i = round(p_i x / u) mod 2^b,   u = min_i p_i s_i / 32
               s_i: the public standard deviation of the noise in x. The server knows the initial w
               of all sites, so b must hold only Σ p_i (x_i - w) / u (`own_noise_bits`).
shared noise   e_i: a site's noisy sums as its oracle rounded them, on one grid for all sites. The
               opened sum is that of the shares (privacy.accounting.shared_noise), its mean
               S unit / Σ q_i N_i; with it the server runs the algorithm's local part once.

Encoding a reply with a site's own noise is post-processing: it spends no privacy, and a sum that
wraps costs only utility.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpact.algorithms import Summed
from fedpact.algorithms.wrappers.base import Method
from fedpact.algorithms.wrappers.integers import weights
from fedpact.common.errors import DataError, InputError, PlanError, PolicyRefused
from fedpact.common.messages import Local, Reply, State, Task
from fedpact.per_sample.clipping import UNIFORM, Weighting
from fedpact.plan import Plan
from fedpact.privacy.accounting.shared_noise import SHARE_DEVIATION, check_added_delta
from fedpact.privacy.batches import Batch, most_records
from fedpact.privacy.mechanisms import mechanism_of
from fedpact.privacy.oracle import EmptyOracle, Oracle
from fedpact.privacy.terms import Terms
from fedpact.simulation.secure_aggregation.words import (
    RingWords,
    centre_words,
    join_words,
    pack_bits,
    split_words,
    unpack_bits,
)

RANGE: Final = 2.0**20
"""R: numbers are clamped to [-R, R] before they are sent."""

MASKED: Final = "masked"
"""The name of a masked reply's vector: its packed words of b bits, uint8 [ceil(b L / 8)]."""

_BITS: Final = 42  # fraction bits of one site: 20 bits before the point, one sign, one spare
_LEAST_BITS: Final = 24  # fewer would be coarser than float32


def fraction_bits(sites: int) -> int:
    """Return s for n sites. Raises InputError: too many, or none.

    >>> fraction_bits(3), fraction_bits(8), fraction_bits(9)
    (40, 39, 38)
    """
    bits = _BITS - max(0, sites - 1).bit_length()
    if not (sites >= 1 and bits >= _LEAST_BITS):
        raise InputError(
            f"secure aggregation over {sites} sites: expected 1 to 2^{_BITS - _LEAST_BITS}, as "
            "more leave too few bits for fractions"
        )
    return bits


@dataclass(frozen=True)
class Form:
    """The vectors of a reply, with shapes and types, and the names of its numbers; both sorted.

    A masked vector has the coordinates of the vectors, then the numbers, in this order. coded:
    whether vectors are compressed blocks of any length (algorithms.wrappers.integers), whose
    content is checked when they are decoded.
    """

    vectors: Mapping[str, tuple[torch.Size, torch.dtype]]
    numbers: tuple[str, ...]
    coded: bool = False

    @staticmethod
    def of(vectors: Mapping[str, Tensor], numbers: Iterable[str]) -> "Form":
        """Return the form of these vectors and numbers."""
        each = {name: (v.shape, v.dtype) for name, v in sorted(vectors.items())}
        return Form(each, tuple(sorted(numbers)))

    def fits(self, vectors: Mapping[str, Tensor], numbers: Iterable[str]) -> bool:
        """Whether a reply of these vectors and numbers has this form."""
        found = Form.of(vectors, numbers)
        if self.coded:
            return self._ranks == found._ranks and self.numbers == found.numbers
        return self == found

    @property
    def _ranks(self) -> dict[str, tuple[int, torch.dtype]]:
        return {name: (len(shape), dtype) for name, (shape, dtype) in self.vectors.items()}

    @property
    def length(self) -> int:
        """L, the number of words."""
        return sum(shape.numel() for shape, _ in self.vectors.values()) + len(self.numbers)

    def split(self, values: NDArray[Any]) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
        """Return each vector's part of these values, flat, and what follows the vectors."""
        found, at = dict[str, NDArray[Any]](), 0
        for name, (shape, _) in self.vectors.items():
            found[name], at = values[at : at + shape.numel()], at + shape.numel()
        return found, values[at:]

    def reshape(self, name: str, values: NDArray[np.float64]) -> Tensor:
        """Return a vector's flat values in its shape and type."""
        shape, dtype = self.vectors[name]
        return torch.from_numpy(values.copy()).to(dtype).reshape(shape)


class _Masking:
    """The part that all codings share: words of `bits` bits replace everything but public numbers.

    summed: see Summed.
    """

    summed: Summed

    @cached_property
    def bits(self) -> int:
        """b, the width of a word. Raises PlanError: 32 bits do not hold the sum."""
        return 64

    def length(self, layout: Form) -> int:
        """Return the number of words of a plain reply."""
        return layout.length

    def mask(self, reply: Reply, words: RingWords) -> Reply:
        """Return a reply with its public numbers and masked words."""
        public = {n: value for n, value in reply.numbers.items() if n in self.summed.public}
        packed = torch.from_numpy(pack_bits(words, self.bits))
        return replace(reply, vectors={MASKED: packed}, numbers=public)

    def words(self, masked: Reply) -> RingWords:
        """Return the words of a masked reply."""
        return unpack_bits(masked.vectors[MASKED].numpy(), self.bits)

    def form(self, layout: Form) -> Form:
        """Return the form of a masked reply."""
        # Whole bytes, rounded up.
        size = torch.Size([-(-self.length(layout) * self.bits // 8)])
        return Form({MASKED: (size, torch.uint8)}, tuple(sorted(self.summed.public)))


@dataclass(frozen=True)
class FixedPointMean(_Masking):
    """Encodes for the weighted mean of vectors and numbers, in fixed point.

    total: Σ N_i of all sites, as declared. sites: n, all sites that could send. limit: numbers are
    clamped to it.
    """

    total: float
    summed: Summed
    sites: int
    limit = RANGE

    def weight(self, reply: Reply) -> float:
        """Return ω_i. Raises InputError: not a number in (0, Σ N]."""
        name = self.summed.weight
        weight = reply.numbers.get(name, -1.0) if name else reply.weight
        if not 0 < weight <= self.total:
            raise InputError(
                f"the weight of {reply.site} is {weight!r}: expected a number in (0, "
                f"{self.total:g}], at most all sites' declared sizes"
            )
        return weight

    def encode(self, task: Task, reply: Reply) -> RingWords:
        """Return a plain reply's words. task: whole or short. Raises DataError: not finite."""
        share = self.weight(reply) / self.total
        return encode_fixed_point(reply.vectors, self._numbers(reply), share, self.sites)

    def layout(self, form: Form) -> Form:
        """Return what is masked of a plain reply of this form."""
        numbers = tuple(name for name in form.numbers if name not in self.summed.public)
        return Form(form.vectors, numbers)

    def mean(
        self, task: Task, replies: Mapping[str, Reply], total: RingWords, layout: Form
    ) -> tuple[State, float]:
        """Return the mean of a sum, and the bound on its error in each coordinate."""
        share = self._share(replies)
        state = State(*decode_fixed_point(total, share, self.sites, layout))
        return state, rounding(share, self.sites) + storage_error(state.vectors)

    def _numbers(self, reply: Reply) -> dict[str, float]:
        return {n: v for n, v in reply.numbers.items() if n not in self.summed.public}

    def _share(self, replies: Mapping[str, Reply]) -> float:
        return sum(self.weight(reply) / self.total for _, reply in sorted(replies.items()))


OWN_NOISE_UNITS: Final = 32.0
"""The least standard deviation of a site's noise in units of its masked reply's grid.

Rounding adds at most 1/(12 · 32²) < 10^-4 of the noise's variance, unless the noise is so small
that the fixed point's unit is coarser, as with a factor of a clip schedule below 10^-9.
"""


@dataclass(frozen=True)
class RoundedMean(FixedPointMean):
    """Encodes for the same mean of vectors with each site's own noise, in shorter words.

    Vectors are rounded to a small part of that noise. Numbers are in fixed point of 64 bits, split
    into several words. For methods with MethodFacts.sums_releases. terms: of all sites.
    """

    method: Method
    terms: Mapping[str, Terms]
    limit = math.inf

    @cached_property
    def bits(self) -> int:
        """b, the width of a word. Raises PlanError: 32 bits do not hold the sum."""
        return own_noise_bits(self.terms, self._noise(1), self.method.steps())

    def length(self, layout: Form) -> int:
        """Return the number of words of a plain reply."""
        of_one = len(split_words(np.zeros(1, np.uint64), self._part))
        return layout.length + len(layout.numbers) * (of_one - 1)

    def encode(self, task: Task, reply: Reply) -> RingWords:
        """Return a plain reply's words. task: whole or short. Raises DataError: not finite."""
        share, units = self.weight(reply) / self.total, self.units(task)
        scaled = [
            np.rint(vector.detach().double().reshape(-1).numpy() * (share / units[name]))
            for name, vector in sorted(reply.vectors.items())
        ]
        # NaN fails the check; larger numbers exceed 64 bits.
        if not all(np.abs(part).max(initial=0.0) < 2.0**63 for part in scaled):
            raise DataError("a vector with NaN or infinity cannot be summed as integers")
        numbers = encode_fixed_point({}, self._numbers(reply), share, self.sites)
        parts = [part.astype(np.int64).astype(np.uint32) for part in scaled]
        return np.concatenate([*parts, split_words(numbers, self._part)])

    def mean(
        self, task: Task, replies: Mapping[str, Reply], total: RingWords, layout: Form
    ) -> tuple[State, float]:
        """Return the mean of a sum, and the bound on its error in each coordinate."""
        share, units = self._share(replies), self.units(task)
        parts, rest = layout.split(total)
        vectors = dict[str, Tensor]()
        for name, words in parts.items():
            told = task.vectors.get(name, torch.zeros(len(words)))
            start = np.rint(told.double().reshape(-1).numpy() * (share / units[name]))
            # Known modulo 2^b, and less than 2^(b-1) from what all sites were sent.
            away = centre_words(words - start.astype(np.int64).astype(np.uint32), self.bits)
            vectors[name] = layout.reshape(name, (start + away) * (units[name] / share))
        whole = join_words(rest & np.uint32(2**self.bits - 1), self._part)
        _, numbers = decode_fixed_point(whole, share, self.sites, Form({}, layout.numbers))
        error = max(len(replies) / 2 * max(units.values()) / share, rounding(share, self.sites))
        return State(vectors, numbers), error + storage_error(vectors)

    def units(self, task: Task) -> dict[str, float]:
        """Return u of each vector of a reply to this task, whole or short."""
        least = min(self._noise(task.round).values()) / OWN_NOISE_UNITS
        # At least the fixed point's unit; it could be 0 for a step of length 0.
        finest = 2.0 ** -fraction_bits(self.sites)
        found = weights(self.method, self._as_planned(task.round, task.numbers))
        return {name: max(finest, of_batches * least) for name, (of_batches, _) in found.items()}

    def _noise(self, number: int) -> dict[str, float]:
        """Return p_i times the standard deviation of a gradient's noise in a round, by site."""
        task, name, found = self._as_planned(number), self.summed.weight, dict[str, float]()
        for site, terms in self.terms.items():
            numbers = self.method.public_numbers(task, terms) if name else {}
            weight = numbers[name].most if name else terms.size
            found[site] = weight / self.total * math.sqrt(terms.at(number).noise_variance)
        return found

    def _as_planned(self, number: int, numbers: Mapping[str, float] = MappingProxyType({})) -> Task:
        # Only the names of vectors matter here, and a short task lacks some.
        told = self.method.task(self.method.init(torch.zeros(1)))
        return Task("", number, self.method.name, told.vectors, {**told.numbers, **numbers})

    @property
    def _part(self) -> int:
        """The bits of a fixed-point number that a word holds, so that n words can be summed."""
        return self.bits - (self.sites - 1).bit_length()


def encode_fixed_point(
    vectors: Mapping[str, Tensor], numbers: Mapping[str, float], share: float, sites: int
) -> RingWords:
    """Return e_i, uint64 [L], in the order of Form. share: p_i in (0, 1]. sites: n.

    Raises DataError: NaN or infinity.
    """
    parts = [v.detach().double().reshape(-1).numpy() for _, v in sorted(vectors.items())]
    values = np.concatenate([*parts, [numbers[name] for name in sorted(numbers)]])
    if not np.isfinite(values).all():
        raise DataError("a vector with NaN or infinity cannot be summed modulo 2^64")
    # Weight before rounding, so that the sum is the weighted mean's. The clamp keeps |Σ e_i| below
    # 2^63.
    scaled = np.clip(values, -RANGE, RANGE) * np.ldexp(share, fraction_bits(sites))
    return np.rint(scaled).astype(np.int64).view(np.uint64)


def rounding(share: float, sites: int) -> float:
    """Return the error bound of `decode_fixed_point` in each coordinate; arguments as there."""
    return float(sites * np.ldexp(0.5, -fraction_bits(sites)) / share)


def storage_error(vectors: Mapping[str, Tensor]) -> float:
    """Return the error bound of computing vectors in float64 and storing them in their types."""
    digits = ((v, torch.finfo(v.dtype).eps / 2 + 2.0**-51) for v in vectors.values() if v.numel())
    return max((float(v.abs().max()) * unit for v, unit in digits), default=0.0)


def decode_fixed_point(
    total: RingWords, share: float, sites: int, layout: Form
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the mean of vectors and numbers from Σ e_i, uint64 [L].

    share: Σ p_i over the sum. sites: n, all sites that could have sent.
    """
    # The absolute sum is below 2^63, so as int64 it is exact.
    means = np.ldexp(total.view(np.int64).astype(np.float64), -fraction_bits(sites)) / share
    parts, numbers = layout.split(means)
    vectors = {name: layout.reshape(name, part) for name, part in parts.items()}
    return vectors, dict(zip(layout.numbers, numbers.tolist(), strict=True))


_LEAST: Final = 16
_MOST: Final = 32
_LONGEST: Final = 2.0**22
_DEVIATIONS: Final = 12.0
_GRADIENT: Final = "gradient"

LocalFunction = Callable[[Task, Oracle, State], Local]
"""An algorithm's local part."""


def own_noise_bits(terms: Mapping[str, Terms], noise: Mapping[str, float], steps: int) -> int:
    """Return b, from 16 to 32, for a sum of replies w + Σ c_t g_t with at most T releases.

    noise: by site, in any common unit. steps: T. A coordinate wraps with probability below
    n T (10^-32 + 10^-31) (docs/notes/secure-aggregation.md). Raises PlanError: 32 bits are too few.
    """
    least, reach = min(noise.values()), float(len(terms))
    for site, one in terms.items():
        most = most_records(one.batch_size) if mechanism_of(one.mechanism).summed else 1
        # One release in deviations of its noise; Σ |c_t| <= √T (Σ c_t²)^(1/2) for T of them.
        far = most / one.sigmas[_GRADIENT] + _DEVIATIONS
        reach += OWN_NOISE_UNITS * math.sqrt(steps) * far * noise[site] / least
    return _width(reach, len(terms))


def bits(terms: Mapping[str, Terms]) -> int:
    """Return b, from 16 to 32: the sum of all sites' shares wraps less than once in 10^31 rounds.

    A channel's sum at a site is at most M records, or M ν/σ_c units; the shares' noise at most 12
    of its standard deviations; rounding half a unit each. Raises PlanError: 32 bits are too few.
    """
    each = [
        most_records(t.batch_size) * SHARE_DEVIATION / min(t.sigmas.values())
        for t in terms.values()
    ]
    if max(each) > _LONGEST:
        raise PlanError(
            f"a site's sum has up to {max(each):.3g} units of its grid: expected at most "
            f"{_LONGEST:.3g}, the proven range of floating-point rounding; use smaller batches or "
            "more noise"
        )
    noise = _DEVIATIONS * SHARE_DEVIATION * math.sqrt(len(terms))
    return _width(sum(each) + noise + len(terms), len(terms))


def _width(reach: float, sites: int) -> int:
    """Return the bits for integers up to ± `reach`. Raises PlanError: more than 32."""
    # 2 reach + 1 numbers; the factor 1.001 far exceeds floating point's error.
    needed = math.ceil(math.log2(2.002 * reach + 1))
    if not needed <= _MOST:
        raise PlanError(
            f"a sum of {sites} sites has up to {reach:.3g} units of its grid, which takes "
            f"{needed} bits: expected at most {_MOST}; use smaller batches or more noise"
        )
    return max(_LEAST, needed)


def check_shares(plan: Plan, terms: Mapping[str, Terms], dimension: int) -> None:
    """Raise InputError if shared noise cannot give the plan's guarantee. dimension: d."""
    if plan.privacy.shares_noise:
        bits(terms)
        for one in terms.values():
            sums = float(dimension + len(one.sigmas) - 1) * one.steps
            check_added_delta(one.budget.epsilon, len(terms), sums)


@dataclass(frozen=True)
class SharedSum(_Masking):
    """Encodes for a sum with shared noise, with the methods of FixedPointMean.

    terms: of all sites. step: the algorithm's local part.
    """

    terms: Mapping[str, Terms]
    summed: Summed
    step: LocalFunction
    limit = math.inf

    @cached_property
    def bits(self) -> int:
        """b, the width of a word. Raises PlanError: 32 bits do not hold the sum."""
        return bits(self.terms)

    @cached_property
    def _some(self) -> Terms:
        # σ is the sum's, the same for all sites.
        return next(iter(self.terms.values()))

    @cached_property
    def _channels(self) -> list[str]:
        return sorted(self._some.sigmas)

    def encode(self, task: Task, reply: Reply) -> RingWords:
        """Return a plain reply's words. Raises DataError: it has other vectors than shares."""
        shares = [reply.vectors[name] for name in sorted(reply.vectors)]
        if sorted(reply.vectors) != self._channels or any(s.dtype != torch.int64 for s in shares):
            raise DataError(
                f"a reply of {reply.site} has {[*reply.vectors]}: expected a share of each of "
                f"{', '.join(self._channels)}"
            )
        # int64 modulo 2^32, in two's complement; the low b bits are sent.
        return torch.cat(shares).numpy().astype(np.uint32)

    def layout(self, form: Form) -> Form:
        """Return what is masked of a plain reply of this form."""
        # The gradient's shape, or the model's before that is known: both are [d].
        shape, _ = form.vectors.get(_GRADIENT) or next(iter(form.vectors.values()))
        one = torch.Size([1])
        shapes = {name: shape if name == _GRADIENT else one for name in self._channels}
        return Form({name: (shape, torch.int64) for name, shape in shapes.items()}, ())

    def mean(
        self, task: Task, replies: Mapping[str, Reply], total: RingWords, layout: Form
    ) -> tuple[State, float]:
        """Return the mean of a sum, and the bound on its error in each coordinate."""
        parts, _ = layout.split(centre_words(total, self.bits))
        sums = {name: torch.from_numpy(part) for name, part in parts.items()}
        # The public expected batch sizes, for which the noise was calibrated.
        records = math.fsum(self.terms[site].batch_size for site in sorted(replies))
        opened = NoisySumOracle(sums, self._some.at(task.round), records)
        told = self.step(task, opened, State())
        numbers = {n: v for n, v in told.numbers.items() if n not in self.summed.public}
        error = opened.coarsest * len(replies) / records
        return State(told.vectors, numbers), error + storage_error(told.vectors)


Coding = FixedPointMean | SharedSum
"""Encodes replies as words that can be summed, and decodes the sum."""


def coding_of(plan: Plan, sizes: Mapping[str, float], terms: Mapping[str, Terms]) -> Coding:
    """Return a plan's coding. sizes: declared, of all sites. terms: of the same sites."""
    facts, total = plan.method.facts, sum(sizes.values())
    if plan.privacy.shares_noise:
        return SharedSum(terms, facts.summed, plan.method.local)
    if plan.compression.kind == "grid" and facts.sums_releases:
        rounded = RoundedMean(total, facts.summed, len(sizes), plan.method, terms)
        with suppress(PlanError):
            _ = rounded.bits
            return rounded
    return FixedPointMean(total, facts.summed, len(sizes))


class NoisySumOracle(EmptyOracle):
    """An oracle with one batch, the sites' together, that answers with the opened sums.

    sums: channel -> integers, as float64. terms: of any of the sites. batch_size: Σ q_i N_i.
    """

    def __init__(self, sums: Mapping[str, Tensor], terms: Terms, batch_size: float) -> None:
        self._sums, self._terms, self.batch_size = sums, terms, batch_size
        self.coarsest = 0.0

    def batches(self, count: int, *channels: str) -> Iterator[Batch]:
        if count != 1 or {*channels} != {*self._sums}:
            raise PolicyRefused(f"{count} batches with {channels}: {self._answers}")
        yield _SumBatch(self._mean)

    @property
    def _answers(self) -> str:
        return f"sums were opened once, of {', '.join(self._sums)}"

    def _mean(self, channel: str, bound: float | None = None) -> Tensor:
        """Return a channel's mean, with each record's part at most `bound`, by default C."""
        if channel not in self._sums:
            raise PolicyRefused(f"channel {channel!r} was asked for: {self._answers}")
        unit = self._terms.unit(channel, self._terms.clip if bound is None else bound)
        self.coarsest = max(self.coarsest, unit)
        return self._sums[channel] * (unit / self.batch_size)


class _SumBatch:
    """A batch that answers with the sites' sums, each at the task's w."""

    noise_variance = 0.0

    def __init__(self, mean: Callable[..., Tensor]) -> None:
        self._mean = mean

    def gradient(self, w: Tensor, weighting: Weighting = UNIFORM) -> Tensor:
        return self._mean(_GRADIENT).to(w.dtype, copy=True)

    def difference(self, w: Tensor, anchor: Tensor, bound: float) -> Tensor:
        """Return the mean of ∇ℓ_j(w) - ∇ℓ_j(anchor), each clipped to `bound`: [d], [d] -> [d]."""
        return self._mean("difference", bound)

    def loss(self, w: Tensor, bound: float) -> float:
        return float(self._mean("loss", bound))

    def below(self, w: Tensor, bound: float, of: str = "loss") -> float:
        """Return the share of records with at most bound at w [d]; see Batch.below."""
        # Sites sum 1/2 or -1/2 for each record, for a sensitivity of 1/2.
        return float(self._mean("below", 0.5)) + 0.5
