"""How replies become whole numbers modulo 2^b that sites add up under masks, and back.

n sites, Q of them in a sum; p_i = ω_i / Σ N in (0, 1] is a site's weight, P = Σ p_i over the sum.

fixed point    e_i = round(p_i clamp(x, -R, R) 2^s) mod 2^64,   R = 2^20,  s = 42 - ceil(log2 n)
               It cannot wrap: |Σ e_i| <= n (2^(20+s) + 1/2) < 2^63, whatever the sites send. The
               mean is off by Q 2^-(s+1) / P at most, and float64's own rounding, 2^-51 max|x|.
own noise      e_i = round(p_i x / u) mod 2^b,   u = min_i p_i s_i / 32
               s_i: the deviation of the noise in x, public. The server knows w, from which all
               started, so b has to hold Σ p_i (x_i - w) / u alone (`own_noise_bits`).
shared noise   e_i: a site's noisy sums as its oracle rounded them, on one grid for all sites. The
               opened sum is that of the shares (privacy.accounting.shared_noise), its mean
               S unit / Σ q_i N_i; with it the server carries the algorithm's local part out once.

All that is done to a reply with a site's own noise is post-processing: it spends no privacy, and a
sum that wraps costs utility alone.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
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
from fedpact.privacy.column_scales import Means
from fedpact.privacy.mechanisms import mechanism_of
from fedpact.privacy.oracle import Oracle
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
"""R: what lies beyond ±R is clamped before it is sent."""

MASKED: Final = "masked"
"""The one vector of a masked reply: its words of b bits, packed, uint8 [ceil(b L / 8)]."""

_BITS: Final = 42  # of fractions of one site: 20 before the point, one for the sign, one to spare
_LEAST_BITS: Final = 24  # fewer would be coarser than float32


def fraction_bits(sites: int) -> int:
    """Return s for a federation of n sites. Raises InputError: too many, or none.

    >>> fraction_bits(3), fraction_bits(8), fraction_bits(9)
    (40, 39, 38)
    """
    bits = _BITS - max(0, sites - 1).bit_length()
    if not (sites >= 1 and bits >= _LEAST_BITS):
        raise InputError(
            f"secure aggregation over {sites} sites: expected 1 to 2^{_BITS - _LEAST_BITS}, as the "
            "sum of more has too few bits left for its fractions"
        )
    return bits


@dataclass(frozen=True)
class Layout:
    """What is in a masked vector, in this order: the coordinates of vectors, then numbers."""

    vectors: Mapping[str, tuple[torch.Size, torch.dtype]]
    numbers: tuple[str, ...]

    @property
    def length(self) -> int:
        """L, the number of words."""
        return sum(shape.numel() for shape, _ in self.vectors.values()) + len(self.numbers)


@dataclass(frozen=True)
class Form:
    """What a reply has to be made of: vectors in shapes and types, and the names of numbers.

    coded: whether vectors are blocks that are as long as they came out
    (algorithms.wrappers.integers); opening one shows whether it holds as many codes as expected.
    """

    vectors: Mapping[str, tuple[torch.Size, torch.dtype]]
    numbers: frozenset[str]
    coded: bool = False

    @staticmethod
    def of(vectors: Mapping[str, Tensor], numbers: Iterable[str]) -> "Form":
        """Return the form of these vectors and numbers."""
        return Form({n: (v.shape, v.dtype) for n, v in vectors.items()}, frozenset(numbers))

    def fits(self, vectors: Mapping[str, Tensor], numbers: Iterable[str]) -> bool:
        """Whether a reply of these vectors and numbers has this form."""
        if self.coded and vectors.keys() == self.vectors.keys():
            same = all(
                (v.dim(), v.dtype) == (len(self.vectors[n][0]), self.vectors[n][1])
                for n, v in vectors.items()
            )
            return same and self.numbers == frozenset(numbers)
        return replace(self, coded=False) == Form.of(vectors, numbers)


class _Masking:
    """What every coding does alike: words of `bits` bits in place of all that is not public.

    summed: see Summed.
    """

    summed: Summed

    @property
    def bits(self) -> int:
        """b, the width of a word."""
        return 64

    def length(self, layout: Layout) -> int:
        """Return how many words a plain reply of this layout takes."""
        return layout.length

    def mask(self, reply: Reply, words: RingWords) -> Reply:
        """Return a reply with masked words in place of all that is not public."""
        public = {n: value for n, value in reply.numbers.items() if n in self.summed.public}
        packed = torch.from_numpy(pack_bits(words, self.bits))
        return replace(reply, vectors={MASKED: packed}, numbers=public)

    def words(self, masked: Reply) -> RingWords:
        """Return the words of what `mask` made."""
        return unpack_bits(masked.vectors[MASKED].numpy(), self.bits)

    def form(self, layout: Layout) -> Form:
        """Return the form of a masked reply."""
        # Whole bytes, rounded up: the last one may end in zeros.
        size = torch.Size([-(-self.length(layout) * self.bits // 8)])
        return Form({MASKED: (size, torch.uint8)}, frozenset(self.summed.public))

    def _check_length(self, total: RingWords, layout: Layout) -> None:
        if len(total) != self.length(layout):
            raise InputError(
                f"a sum of {len(total)} words: expected {self.length(layout)}, as of one reply"
            )


@dataclass(frozen=True)
class FixedPointMean(_Masking):
    """Codes the weighted mean of vectors and numbers, each reply's weight its own.

    total: Σ N_i of all sites, declared. sites: n, of all who could send. limit: beyond which
    numbers are clamped.
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
        """Return a plain reply's words. task: which it answers, in full or short. Raises DataError:
        the reply has no place in a sum."""
        share = self.weight(reply) / self.total
        return encode_fixed_point(reply.vectors, self._numbers(reply), share, self.sites)

    def check(self, reply: Reply) -> None:
        """Raise InputError for a masked reply whose public numbers no honest site sends."""
        self.weight(reply)

    def layout(self, form: Form) -> Layout:
        """Return what the words of a plain reply of this form are."""
        numbers = tuple(sorted(form.numbers - set(self.summed.public)))
        return Layout(dict(sorted(form.vectors.items())), numbers)

    def mean(
        self, task: Task, replies: Mapping[str, Reply], total: RingWords, layout: Layout
    ) -> tuple[State, float]:
        """Return what stands for the reply of each site in a sum, and how far it may be off."""
        self._check_length(total, layout)
        share = self._share(replies)
        state = State(*decode_fixed_point(total, share, self.sites, layout))
        return state, rounding(share, self.sites)

    def _numbers(self, reply: Reply) -> dict[str, float]:
        return {n: v for n, v in reply.numbers.items() if n not in self.summed.public}

    def _share(self, replies: Mapping[str, Reply]) -> float:
        return sum(self.weight(reply) / self.total for _, reply in sorted(replies.items()))


OWN_NOISE_UNITS: Final = 32.0
"""The least deviation of a site's noise in units of the grid that its masked reply is rounded to.

Rounding then adds at most 1/(12 · 32²) < 10^-4 of the noise's variance.
"""


@dataclass(frozen=True)
class RoundedMean(FixedPointMean):
    """Codes the same mean of vectors that hold each site's own noise, in words of fewer bits.

    Vectors are rounded to a small part of that noise; numbers are in fixed point, of 64 bits, in
    several words each. For methods whose MethodFacts.sums_releases holds. terms: of all sites.
    """

    method: Method
    terms: Mapping[str, Terms]
    limit = math.inf

    @property
    def bits(self) -> int:
        """b, the width of a word. Raises PlanError: 32 bits do not hold the sum."""
        return self._bits

    @cached_property
    def _bits(self) -> int:
        return own_noise_bits(self.terms, self._noise(1), self.method.steps())

    def length(self, layout: Layout) -> int:
        """Return how many words a plain reply of this layout takes."""
        of_one = len(split_words(np.zeros(1, np.uint64), self._part))
        return layout.length + len(layout.numbers) * (of_one - 1)

    def encode(self, task: Task, reply: Reply) -> RingWords:
        """Return a plain reply's words. task: which it answers, in full or short."""
        share, units = self.weight(reply) / self.total, self.units(task)
        scaled = [
            np.rint(vector.detach().double().reshape(-1).numpy() * (share / units[name]))
            for name, vector in sorted(reply.vectors.items())
        ]
        # NaN fails the check; beyond it there is no whole number of 64 bits.
        if not all(np.abs(part).max(initial=0.0) < 2.0**63 for part in scaled):
            raise DataError("a vector with NaN or infinity has no place in a sum of whole numbers")
        numbers = encode_fixed_point({}, self._numbers(reply), share, self.sites)
        parts = [part.astype(np.int64).astype(np.uint32) for part in scaled]
        return np.concatenate([*parts, split_words(numbers, self._part)])

    def mean(
        self, task: Task, replies: Mapping[str, Reply], total: RingWords, layout: Layout
    ) -> tuple[State, float]:
        """Return what stands for the reply of each site in a sum, and how far it may be off."""
        self._check_length(total, layout)
        share, units = self._share(replies), self.units(task)
        vectors, at = dict[str, Tensor](), 0
        for name, (shape, dtype) in layout.vectors.items():
            words, at = total[at : at + shape.numel()], at + shape.numel()
            told = task.vectors.get(name, torch.zeros(shape))
            start = np.rint(told.double().reshape(-1).numpy() * (share / units[name]))
            # Known modulo 2^b, and less than 2^(b-1) away from what all were told.
            away = centre_words(words - start.astype(np.int64).astype(np.uint32), self.bits)
            mean = torch.from_numpy((start + away) * (units[name] / share))
            vectors[name] = mean.to(dtype).reshape(shape)
        whole = join_words(total[at:] & np.uint32(2**self.bits - 1), self._part)
        _, numbers = decode_fixed_point(whole, share, self.sites, Layout({}, layout.numbers))
        error = max(len(replies) / 2 * max(units.values()) / share, rounding(share, self.sites))
        return State(vectors, numbers), error

    def units(self, task: Task) -> dict[str, float]:
        """Return u of each vector of a reply to this task, in full or short."""
        least = min(self._noise(task.round).values()) / OWN_NOISE_UNITS
        # Finer than the fixed point is of no use, and 0, as of a step of length 0, is no unit.
        finest = 2.0 ** -fraction_bits(self.sites)
        found = weights(self.method, self._as_planned(task.round, task.numbers))
        return {name: max(finest, of_batches * least) for name, (of_batches, _) in found.items()}

    def _noise(self, number: int) -> dict[str, float]:
        """Return p_i times the deviation of a gradient's noise in a round, of each site."""
        task, name, found = self._as_planned(number), self.summed.weight, dict[str, float]()
        for site, terms in self.terms.items():
            numbers = self.method.public_numbers(task, terms) if name else {}
            weight = numbers[name].most if name else terms.size
            found[site] = weight / self.total * math.sqrt(terms.at(number).noise_variance)
        return found

    def _as_planned(self, number: int, numbers: Mapping[str, float] = MappingProxyType({})) -> Task:
        # A short task lacks vectors, of which only the names count here: they are the plan's.
        told = self.method.task(self.method.init(torch.zeros(1)))
        return Task("", number, self.method.name, told.vectors, {**told.numbers, **numbers})

    @property
    def _part(self) -> int:
        """How many bits of a number in fixed point a word holds, so that n of them can be added."""
        return self.bits - (self.sites - 1).bit_length()


def encode_fixed_point(
    vectors: Mapping[str, Tensor], numbers: Mapping[str, float], share: float, sites: int
) -> RingWords:
    """Return e_i, uint64 [L], in the order of `Layout.of`. share: p_i in (0, 1]. sites: n.

    Raises DataError: NaN or infinity among them. Raises InputError: a share out of its range.
    """
    if not 0 < share <= 1:
        raise InputError(f"share is {share!r}: expected a number in (0, 1], a site's part of all")
    parts = [v.detach().double().reshape(-1).numpy() for _, v in sorted(vectors.items())]
    values = np.concatenate([*parts, [numbers[name] for name in sorted(numbers)]])
    if not np.isfinite(values).all():
        raise DataError("a vector with NaN or infinity has no place in a sum modulo 2^64")
    # Weighted before it is rounded, so that the sum over sites is that of the weighted mean. The
    # clamp is what keeps |Σ e_i| below 2^63: a site can lie about its vector, and wrap nothing.
    scaled = np.clip(values, -RANGE, RANGE) * np.ldexp(share, fraction_bits(sites))
    return np.rint(scaled).astype(np.int64).view(np.uint64)


def rounding(share: float, sites: int) -> float:
    """Return by how much `decode_fixed_point` may miss a mean, in each coordinate; for both see
    there."""
    return float(sites * np.ldexp(0.5, -fraction_bits(sites)) / share)


def decode_fixed_point(
    total: RingWords, share: float, sites: int, layout: Layout
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the mean of vectors and numbers from Σ e_i, uint64 [L]. share: Σ p_i of its sites.

    sites: n, of all who could have sent.
    """
    # Modulo 2^64 and below 2^63 in absolute value: as int64 it is the sum itself.
    means = np.ldexp(total.view(np.int64).astype(np.float64), -fraction_bits(sites)) / share
    vectors, at = dict[str, Tensor](), 0
    for name, (shape, dtype) in layout.vectors.items():
        part = means[at : at + shape.numel()]
        vectors[name] = torch.from_numpy(part.copy()).to(dtype).reshape(shape)
        at += shape.numel()
    return vectors, dict(zip(layout.numbers, means[at:].tolist(), strict=True))


_LEAST: Final = 16
_MOST: Final = 32
_LONGEST: Final = 2.0**22
_DEVIATIONS: Final = 12.0
_GRADIENT: Final = "gradient"

LocalFunction = Callable[[Task, Oracle, State], Local]
"""An algorithm's local part."""


def own_noise_bits(terms: Mapping[str, Terms], noise: Mapping[str, float], steps: int) -> int:
    """Return b, from 16 to 32, that holds a sum of replies w + Σ c_t g_t with T releases at most.

    noise: of each site, in one measure. steps: T. A coordinate wraps with a probability below
    n T (10^-32 + 10^-31) (docs/notes/secure-aggregation.md). Raises PlanError: 32 bits are too few.
    """
    least, reach = min(noise.values()), float(len(terms))
    for site, one in terms.items():
        most = most_records(one.batch_size) if mechanism_of(one.mechanism).summed else 1
        # Of one release, in deviations of its noise; Σ |c_t| <= √T (Σ c_t²)^(1/2) for T of them.
        far = most / one.sigmas[_GRADIENT] + _DEVIATIONS
        reach += OWN_NOISE_UNITS * math.sqrt(steps) * far * noise[site] / least
    return _width(reach, len(terms))


def bits(terms: Mapping[str, Terms]) -> int:
    """Return b, from 16 to 32: the sum of all sites' shares wraps less than once in 10^31 rounds.

    A channel's sum at a site is at most M records long, which is M ν/σ_c units, the shares' noise
    at most 12 of its deviations, rounding half a unit each. Raises PlanError: 32 bits are too few.
    """
    each = [
        most_records(t.batch_size) * SHARE_DEVIATION / min(t.sigmas.values())
        for t in terms.values()
    ]
    if max(each) > _LONGEST:
        raise PlanError(
            f"a site's sum has up to {max(each):.3g} units of its grid: expected at most "
            f"{_LONGEST:.3g}, as far as floating point is shown to round it like a real number; "
            "use smaller batches or more noise"
        )
    noise = _DEVIATIONS * SHARE_DEVIATION * math.sqrt(len(terms))
    return _width(sum(each) + noise + len(terms), len(terms))


def _width(reach: float, sites: int) -> int:
    """Return how many bits hold whole numbers up to ± `reach`. Raises PlanError: more than 32."""
    # 1.001 is far beyond what floating point adds to a sum. There are 2 reach + 1 such numbers.
    needed = math.ceil(math.log2(2.002 * reach + 1))
    if not needed <= _MOST:
        raise PlanError(
            f"a sum of {sites} sites has up to {reach:.3g} units of its grid, which takes "
            f"{needed} bits: expected at most {_MOST}; use smaller batches or more noise"
        )
    return max(_LEAST, needed)


def check_shares(plan: Plan, terms: Mapping[str, Terms], dimension: int) -> None:
    """Raise InputError of some kind unless shared noise holds what the plan says of it.

    dimension: d. Nothing is checked where each site's noise is its own.
    """
    if plan.privacy.shares_noise:
        bits(terms)
        for one in terms.values():
            sums = float(dimension + len(one.sigmas) - 1) * one.steps
            check_added_delta(one.budget.epsilon, len(terms), sums)


@dataclass(frozen=True)
class SharedSum(_Masking):
    """Codes a sum with shared noise, by the same methods as FixedPointMean.

    terms: of all sites. step: the algorithm's local part.
    """

    terms: Mapping[str, Terms]
    summed: Summed
    step: LocalFunction
    limit = math.inf

    @property
    def bits(self) -> int:
        """b, the width of a word. Raises PlanError: 32 bits do not hold the sum."""
        return self._bits

    @cached_property
    def _bits(self) -> int:
        return bits(self.terms)

    @cached_property
    def _some(self) -> Terms:
        # σ is that of the sum, and one for all.
        return next(iter(self.terms.values()))

    @cached_property
    def _channels(self) -> list[str]:
        return sorted(self._some.sigmas)

    def encode(self, task: Task, reply: Reply) -> RingWords:
        """Return a plain reply's words. Raises DataError: no whole numbers of a share."""
        shares = [reply.vectors[name] for name in sorted(reply.vectors)]
        if sorted(reply.vectors) != self._channels or any(s.dtype != torch.int64 for s in shares):
            raise DataError(
                f"a reply of {reply.site} has {[*reply.vectors]}: expected a share of each of "
                f"{', '.join(self._channels)}"
            )
        # From int64 to 32 bits modulo 2^32, of which the low b are sent: two's complement.
        return torch.cat(shares).numpy().astype(np.uint32)

    def check(self, reply: Reply) -> None:
        """Raise InputError for a masked reply whose public numbers no honest site sends. The
        divisor is the site's declared q N."""
        if reply.site not in self.terms:
            raise InputError(f"{reply.site} is no site of this run")

    def layout(self, form: Form) -> Layout:
        """Return what the words of a plain reply of this form are."""
        # The gradient, or before it is known the model: both are [d].
        shape, _ = form.vectors.get(_GRADIENT) or next(iter(form.vectors.values()))
        one = torch.Size([1])
        shapes = {name: shape if name == _GRADIENT else one for name in self._channels}
        return Layout({name: (shape, torch.int64) for name, shape in shapes.items()}, ())

    def mean(
        self, task: Task, replies: Mapping[str, Reply], total: RingWords, layout: Layout
    ) -> tuple[State, float]:
        """Return what stands for the reply of each site in a sum, and how far it may be off."""
        self._check_length(total, layout)
        whole, sums, at = torch.from_numpy(centre_words(total, self.bits)), dict[str, Tensor](), 0
        for name, (shape, _) in layout.vectors.items():
            sums[name] = whole[at : at + shape.numel()]
            at += shape.numel()
        # The expected batches of those in the sum: public, and what the noise was reckoned for.
        records = math.fsum(self.terms[site].batch_size for site in sorted(replies))
        opened = NoisySumOracle(sums, self._some.at(task.round), records)
        told = self.step(task, opened, State())
        numbers = {n: v for n, v in told.numbers.items() if n not in self.summed.public}
        return State(told.vectors, numbers), opened.coarsest * len(replies) / records


Coding = FixedPointMean | SharedSum
"""How replies become words that can be summed, and what their sum says."""


def coding_of(plan: Plan, sizes: Mapping[str, float], terms: Mapping[str, Terms]) -> Coding:
    """Return how replies are summed. sizes: declared, of all sites; terms: the same sites'."""
    facts, total = plan.method.facts, sum(sizes.values())
    if plan.privacy.shares_noise:
        return SharedSum(terms, facts.summed, plan.method.local)
    # A grid of the noise is only where all that leaves a site has noise.
    if plan.compression.kind == "grid" and facts.sums_releases:
        rounded = RoundedMean(total, facts.summed, len(sizes), plan.method, terms)
        with suppress(PlanError):
            _ = rounded.bits
            return rounded
    return FixedPointMean(total, facts.summed, len(sizes))


class NoisySumOracle:
    """An oracle whose one batch is all sites' together: its answers are the sums that they opened.

    sums: channel -> whole numbers, as float64. terms: of any of the sites. batch_size: Σ q_i N_i.
    """

    noise_variance = 0.0
    sampling_rate = 1.0
    steps_left = math.inf
    shares: Mapping[str, Tensor] = MappingProxyType({})

    def __init__(self, sums: Mapping[str, Tensor], terms: Terms, batch_size: float) -> None:
        self._sums, self._terms, self.batch_size = sums, terms, batch_size
        self.coarsest = 0.0

    def batches(self, count: int, *channels: str) -> Iterator[Batch]:
        if count != 1 or {*channels} != {*self._sums}:
            raise PolicyRefused(f"{count} batches with {channels}: {self._answers}")
        yield _SumBatch(self._mean)

    def opening(self, *channels: str) -> Batch:
        raise PolicyRefused(f"an opening with {channels}: {self._answers}")

    def columns(self) -> Means:
        raise PolicyRefused("what scales columns was asked for: a sum has one gradient")

    def unprotected(self, w: Tensor) -> tuple[float, Tensor]:
        """Return F_i(w) and ∇F_i(w) [d] over all records, exact: no clip, no noise, no charge."""
        raise PolicyRefused(f"exact numbers were asked for: {self._answers}")

    @property
    def _answers(self) -> str:
        return f"sums were opened once, of {', '.join(self._sums)}"

    def _mean(self, channel: str, bound: float | None = None) -> Tensor:
        """Return the mean of a channel, each record's part of it at most `bound`; C by default."""
        if channel not in self._sums:
            raise PolicyRefused(f"channel {channel!r} was asked for: {self._answers}")
        unit = self._terms.unit(channel, self._terms.clip if bound is None else bound)
        self.coarsest = max(self.coarsest, unit)
        return self._sums[channel] * (unit / self.batch_size)


class _SumBatch:
    """A batch whose answers are the sums of all sites, each at the task's w."""

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
        # Sites sum 1/2 or -1/2 of each record, so that it is of sensitivity 1/2.
        return float(self._mean("below", 0.5)) + 0.5
