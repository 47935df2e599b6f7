"""Shares of noise and what they stand on, summed: whole numbers modulo 2^b, packed into b bits.

Where sites share noise out, a site sends its noisy sums e_i as the oracle rounded them, channel by
channel: whole numbers on one grid each. Nothing is rounded again, so an opened sum is that of the
shares, whose law is in theory.shares. Its mean is S unit / Σ q_i N_i, and each record counts alike.
With these the algorithm's own local part is carried out once, at the server: what comes out is what
every site in the sum would have sent. b is as small as |Σ e_i| allows, which follows from public
terms (`bits`).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpact.algorithms import Summed
from fedpact.engines.secure.ring import MASKED, Coding, FixedPointMean, Form, Layout, RingWords
from fedpact.errors import DataError, InputError, PlanError, PolicyRefused
from fedpact.messages import Local, Reply, State, Task
from fedpact.persample.weighting import UNIFORM, Weighting
from fedpact.plan import Plan
from fedpact.privacy.batches import Batch, most_records
from fedpact.privacy.columns import Means
from fedpact.privacy.oracle import Oracle
from fedpact.privacy.terms import Terms
from fedpact.theory.shares import SHARE_DEVIATION, check_added_delta

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
    if plan.privacy.honest:
        bits(terms)
        for one in terms.values():
            sums = float(dimension + len(one.sigmas) - 1) * one.steps
            check_added_delta(one.budget.epsilon, len(terms), sums)


def coding_of(plan: Plan, sizes: Mapping[str, float], terms: Mapping[str, Terms]) -> Coding:
    """Return how replies are summed. sizes: declared, of all sites; terms: the same sites'."""
    if plan.privacy.honest:
        return SharedSum(terms, plan.method.summed, plan.method.local)
    return FixedPointMean(sum(sizes.values()), plan.method.summed, len(sizes))


@dataclass(frozen=True)
class SharedSum:
    """Codes a sum with shared noise. terms: of all sites. step: the algorithm's local part."""

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
        return torch.cat(shares).numpy().astype(np.uint32)

    def check(self, reply: Reply) -> None:
        """Raise InputError for a masked reply whose public numbers no honest site sends. The
        divisor is the site's declared q N."""
        if reply.site not in self.terms:
            raise InputError(f"{reply.site} is no site of this run")

    def mask(self, reply: Reply, words: RingWords) -> Reply:
        """Return a reply with masked words [L] in place of all that is not public."""
        vector = torch.from_numpy(pack_bits(words, self._bits))
        public = {n: v for n, v in reply.numbers.items() if n in self.summed.public}
        return replace(reply, vectors={MASKED: vector}, numbers=public)

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
        records = math.fsum(self.terms[site].batch_size for site in sorted(replies))
        opened = NoisySumOracle(sums, self._some.at(task.round), records)
        told = self.step(task, opened, State())
        numbers = {n: v for n, v in told.numbers.items() if n not in self.summed.public}
        return State(told.vectors, numbers), opened.coarsest * len(replies) / records


class NoisySumOracle:
    """An oracle whose one batch is all sites' together: its answers are the sums that they opened.

    sums: channel -> whole numbers, as float64. terms: of any of the sites. batch_size: Σ q_i N_i.
    """

    noise_variance = 0.0
    steps_left = math.inf
    shares: Mapping[str, Tensor] = MappingProxyType({})

    def __init__(self, sums: Mapping[str, Tensor], terms: Terms, batch_size: float) -> None:
        self._sums, self._terms, self.batch_size = sums, terms, batch_size
        self.coarsest = 0.0

    def batches(self, count: int, *channels: str) -> Iterator[Batch]:
        """Yield `count` batches that answer the channels; each is closed by the next one."""
        if count != 1 or {*channels} != {*self._sums}:
            raise PolicyRefused(f"{count} batches with {channels}: {self._answers}")
        yield _SumBatch(self._mean)

    def opening(self, *channels: str) -> Batch:
        """Return the batch that opens a round, of the rate that the algorithm's Opening names."""
        raise PolicyRefused(f"an opening with {channels}: {self._answers}")

    def columns(self) -> Means:
        """Return what scales the site's columns, once, before the first round."""
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

    def below(self, w: Tensor, bound: float) -> float:
        """Return the share of records with a loss of at most bound at w [d]; may leave [0, 1]."""
        del w, bound
        return float(self._mean("below", 0.5)) + 0.5


def centre_words(words: RingWords, width: int) -> NDArray[np.float64]:
    """Return words modulo 2^b as numbers from -2^(b-1) on, below 2^(b-1).

    >>> centre_words(np.array([1, 2**16 - 1, 2**15, 2**20], dtype=np.uint64), 16).tolist()
    [1.0, -1.0, -32768.0, 0.0]
    """
    low = words.astype(np.int64) & (2**width - 1)
    return np.where(low < 2 ** (width - 1), low, low - 2**width).astype(np.float64)


def pack_bits(words: RingWords, width: int) -> NDArray[np.uint8]:
    """Return the low `width` bits of each word, from 1 to 32, one behind the other.

    >>> pack_bits(np.array([1, 2, 3], dtype=np.uint64), 16).tolist()
    [1, 0, 2, 0, 3, 0]
    """
    low = words.astype("<u4")
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
        whole = np.zeros((some, 4), np.uint8)
        whole[:, : rows.shape[1]] = rows
        at = start // step * _AT_A_TIME
        found[at : at + some] = whole.view("<u4").reshape(-1)
    return found
