"""Vectors as whole numbers modulo 2^b, and noise that only the sum carries.

e_i = round(p_i clamp(x, -R, R) 2^s) mod 2^64,   R = 2^20,  s = 42 - ceil(log2 n),  0 < p_i <= 1

|Σ e_i| <= n (2^(20+s) + 1/2) < 2^63, whatever the sites send. With Q of the n sites in the sum,
Σ e_i / 2^s / Σ p_i misses the mean of the clamped x by at most Q 2^-(s+1) / Σ p_i and float64's
own rounding, 2^-51 max|x|.

Where sites share noise out, a site sends its noisy sums e_i as the oracle rounded them, channel by
channel: whole numbers on one grid each. Nothing is rounded again, so an opened sum is that of the
shares, whose law is in privacy.accounting.shared_noise. Its mean is S unit / Σ q_i N_i, and each
record counts alike.
With these the algorithm's own local part is carried out once, at the server: what comes out is what
every site in the sum would have sent. b is as small as |Σ e_i| allows, which follows from public
terms (`bits`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpact.algorithms import Summed
from fedpact.common.errors import DataError, InputError, PlanError, PolicyRefused
from fedpact.common.messages import Local, Reply, State, Task
from fedpact.per_sample.clipping import UNIFORM, Weighting
from fedpact.plan import Plan
from fedpact.privacy.accounting.shared_noise import SHARE_DEVIATION, check_added_delta
from fedpact.privacy.batches import Batch, most_records
from fedpact.privacy.column_scales import Means
from fedpact.privacy.oracle import Oracle
from fedpact.privacy.terms import Terms

RingWords = NDArray[np.uint64 | np.uint32]
"""Numbers modulo 2^64, or where fewer bits will do modulo 2^32."""

RANGE: Final = 2.0**20
"""R: what lies beyond ±R is clamped before it is sent."""

MASKED: Final = "masked"
"""The one vector of a masked reply: int64 [L]."""

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


@dataclass(frozen=True)
class FixedPointMean:
    """Codes the weighted mean of vectors and numbers, each reply's weight its own.

    encode: a plain reply's words [L], DataError where it has no place in a sum. mask: a reply with
    masked words in place of all that is not public; words: those again. check: InputError for a
    masked reply whose public numbers no honest site sends. mean: what stands for the reply of each
    site in a sum Σ e_i, and by how much it may be off in each coordinate.
    total: Σ N_i of all sites, declared. summed: see Summed. sites: n, of all who could send.
    """

    total: float
    summed: Summed
    sites: int

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

    def encode(self, reply: Reply) -> RingWords:
        """Return a plain reply's words [L]."""
        summed = {n: v for n, v in reply.numbers.items() if n not in self.summed.public}
        share = self.weight(reply) / self.total
        return encode_fixed_point(reply.vectors, summed, share, self.sites)

    def check(self, reply: Reply) -> None:
        """Raise InputError for a masked reply whose public numbers no honest site sends."""
        self.weight(reply)

    def layout(self, form: Form) -> Layout:
        """Return what the words of a plain reply of this form are."""
        numbers = tuple(sorted(form.numbers - set(self.summed.public)))
        return Layout(dict(sorted(form.vectors.items())), numbers)

    def form(self, layout: Layout) -> Form:
        """Return the form of a masked reply."""
        masked = {MASKED: (torch.Size([layout.length]), torch.int64)}
        return Form(masked, frozenset(self.summed.public))

    def mean(
        self, task: Task, replies: Mapping[str, Reply], total: RingWords, layout: Layout
    ) -> tuple[State, float]:
        """Return what stands for the reply of each site in a sum, and how far it may be off."""
        del task
        share = sum(self.weight(reply) / self.total for _, reply in sorted(replies.items()))
        state = State(*decode_fixed_point(total, share, self.sites, layout))
        return state, rounding(share, self.sites)

    def mask(self, reply: Reply, words: RingWords) -> Reply:
        """Return a reply with masked words [L] in place of all that is not public."""
        return _masked(reply, words.view(np.int64), self.summed)

    def words(self, masked: Reply) -> RingWords:
        """Return the words [L] of what `masked` made."""
        return masked.vectors[MASKED].numpy().view(np.uint64)


def _masked(reply: Reply, words: NDArray[np.int64 | np.uint8], summed: Summed) -> Reply:
    public = {name: value for name, value in reply.numbers.items() if name in summed.public}
    return replace(reply, vectors={MASKED: torch.from_numpy(words)}, numbers=public)


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
    if len(total) != layout.length:
        raise InputError(f"a sum of {len(total)} words: expected {layout.length}, as of one reply")
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
_GRADIENT: Final = "gradient"
_AT_A_TIME: Final = 2**16

LocalFunction = Callable[[Task, Oracle, State], Local]
"""An algorithm's local part."""


def bits(terms: Mapping[str, Terms]) -> int:
    """Return b, from 16 to 32: the sum of all sites' shares wraps less than once in 10^31 rounds.

    A channel's sum at a site is at most M times its bound b long, M the most records that it is
    reckoned with, which is M ν/σ_c units; the shares' noise is at most 12 of its deviations, and
    rounding half a unit each. What wraps costs utility, never privacy. Raises PlanError: 32 bits do
    not hold it.
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
    # 1.001 is far beyond what floating point adds to a sum. Whole numbers from -reach to reach are
    # 2 reach + 1 many.
    reach = 1.001 * sum(each) + 12 * SHARE_DEVIATION * math.sqrt(len(terms)) + len(terms)
    needed = math.ceil(math.log2(2 * reach + 1))
    if needed > _MOST:
        raise PlanError(
            f"a sum of {len(terms)} sites has up to {reach:.3g} units of its grid, which takes "
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
class SharedSum:
    """Codes a sum with shared noise, by the same methods as FixedPointMean.

    terms: of all sites. step: the algorithm's local part.
    """

    terms: Mapping[str, Terms]
    summed: Summed
    step: LocalFunction

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

    def encode(self, reply: Reply) -> RingWords:
        """Return a plain reply's words [L]. Raises DataError: no whole numbers of a share."""
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

    def mask(self, reply: Reply, words: RingWords) -> Reply:
        """Return a reply with masked words [L] in place of all that is not public."""
        return _masked(reply, pack_bits(words, self._bits), self.summed)

    def words(self, masked: Reply) -> RingWords:
        """Return the words [L] of what `masked` made."""
        return unpack_bits(masked.vectors[MASKED].numpy(), self._bits)

    def layout(self, form: Form) -> Layout:
        """Return what the words of a plain reply of this form are."""
        # The gradient, or before it is known the model: both are [d].
        shape, _ = form.vectors.get(_GRADIENT) or next(iter(form.vectors.values()))
        one = torch.Size([1])
        shapes = {name: shape if name == _GRADIENT else one for name in self._channels}
        return Layout({name: (shape, torch.int64) for name, shape in shapes.items()}, ())

    def form(self, layout: Layout) -> Form:
        """Return the form of a masked reply."""
        # Whole bytes, rounded up: the last one may end in zeros.
        size = torch.Size([-(-layout.length * self._bits // 8)])
        return Form({MASKED: (size, torch.uint8)}, frozenset(self.summed.public))

    def mean(
        self, task: Task, replies: Mapping[str, Reply], total: RingWords, layout: Layout
    ) -> tuple[State, float]:
        """Return what stands for the reply of each site in a sum, and how far it may be off."""
        if len(total) != layout.length:
            raise InputError(f"a sum of {len(total)} words: expected {layout.length}")
        whole, sums, at = torch.from_numpy(centre_words(total, self._bits)), dict[str, Tensor](), 0
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
    if plan.privacy.shares_noise:
        return SharedSum(terms, plan.method.facts.summed, plan.method.local)
    return FixedPointMean(sum(sizes.values()), plan.method.facts.summed, len(sizes))


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
        """Yield `count` batches that answer these channels; asking for the next closes the last."""
        if count != 1 or {*channels} != {*self._sums}:
            raise PolicyRefused(f"{count} batches with {channels}: {self._answers}")
        yield _SumBatch(self._mean)

    def opening(self, *channels: str) -> Batch:
        """Return the batch that opens a round, sampled at the rate of the algorithm's Opening."""
        raise PolicyRefused(f"an opening with {channels}: {self._answers}")

    def columns(self) -> Means:
        """Return the scales of the site's columns; once, before the first round."""
        raise PolicyRefused("what scales columns was asked for: a sum has one gradient")

    def unprotected(self, w: Tensor) -> tuple[float, Tensor]:
        """Return F_i(w) and ∇F_i(w) [d] over all records, exact: no clip, no noise, no charge."""
        del w
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
        """Return the mean weighted gradient at w: [d] -> [d], which the caller may write over."""
        del weighting
        return self._mean(_GRADIENT).to(w.dtype, copy=True)

    def difference(self, w: Tensor, anchor: Tensor, bound: float) -> Tensor:
        """Return the mean of ∇ℓ_j(w) - ∇ℓ_j(anchor), each clipped to `bound`: [d], [d] -> [d]."""
        del w, anchor
        return self._mean("difference", bound)

    def loss(self, w: Tensor, bound: float) -> float:
        """Return the mean of the losses at w [d], each clipped to [0, bound]."""
        del w
        return float(self._mean("loss", bound))

    def below(self, w: Tensor, bound: float, of: str = "loss") -> float:
        """Return the share of records with at most bound at w [d]; see Batch.below."""
        del w, bound, of
        # Sites sum 1/2 or -1/2 of each record, so that it is of sensitivity 1/2.
        return float(self._mean("below", 0.5)) + 0.5


def centre_words(words: RingWords, width: int) -> NDArray[np.float64]:
    """Return words modulo 2^b as numbers from -2^(b-1) on, below 2^(b-1).

    >>> centre_words(np.array([1, 2**16 - 1, 2**15, 2**20], dtype=np.uint64), 16).tolist()
    [1.0, -1.0, -32768.0, 0.0]
    """
    # Two's complement of b bits: an upper half stands for the negative numbers.
    low = words.astype(np.int64) & (2**width - 1)
    return np.where(low < 2 ** (width - 1), low, low - 2**width).astype(np.float64)


def pack_bits(words: RingWords, width: int) -> NDArray[np.uint8]:
    """Return the low `width` bits of each word, from 1 to 32, one behind the other.

    >>> pack_bits(np.array([1, 2, 3], dtype=np.uint64), 16).tolist()
    [1, 0, 2, 0, 3, 0]
    """
    low = words.astype("<u4")
    # In parts, as bits take a byte each while they are packed.
    packed: list[NDArray[np.uint8]] = []
    # Whole bytes at each cut, as their number is a multiple of 8.
    for start in range(0, len(low), _AT_A_TIME):
        some = low[start : start + _AT_A_TIME].view(np.uint8).reshape(-1, 4)
        each = np.unpackbits(some, axis=1, count=width, bitorder="little")
        packed.append(np.packbits(each.reshape(-1), bitorder="little"))
    return np.concatenate(packed) if packed else np.zeros(0, np.uint8)


def unpack_bits(packed: NDArray[np.uint8], width: int) -> RingWords:
    """Return the words of which `pack_bits` made this, modulo 2^width; width at least 8."""
    count = 8 * len(packed) // width
    found = np.zeros(count, dtype=np.uint32)
    step = _AT_A_TIME * width // 8
    for start in range(0, len(packed), step):
        each = np.unpackbits(packed[start : start + step], bitorder="little")
        some = len(each) // width
        rows = np.packbits(each[: some * width].reshape(some, width), axis=1, bitorder="little")
        # Four bytes a word, of which the upper ones stay zero, make a view as numbers possible.
        whole = np.zeros((some, 4), np.uint8)
        whole[:, : rows.shape[1]] = rows
        at = start // step * _AT_A_TIME
        found[at : at + some] = whole.view("<u4").reshape(-1)
    return found
