"""Vectors as integers modulo 2^64, whose sum over the sites cannot wrap.

    e_i = round(p_i clamp(x, -R, R) 2^s) mod 2^64,   R = 2^20,  s = 42 - ceil(log2 n),  0 < p_i <= 1

|Σ e_i| <= n (2^(20+s) + 1/2) < 2^63, whatever the sites send. With Q of the n sites in the sum,
Σ e_i / 2^s / Σ p_i misses the mean of the clamped x by at most Q 2^-(s+1) / Σ p_i and float64's
own rounding, 2^-51 max|x|.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpact.algorithms import Summed
from fedpact.errors import DataError, InputError
from fedpact.messages import Numbers, Reply, State, Task

RingWords = NDArray[np.uint64 | np.uint32]
"""Numbers modulo 2^64, or where fewer bits will do modulo 2^32."""

RANGE: Final = 2.0**20
"""R: what lies beyond ±R is clamped before it is sent."""

MASKED: Final = "masked"
"""The one vector of a masked reply: int64 [L]."""

_BITS: Final = 42
_LEAST_BITS: Final = 24


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

    coded: whether vectors are blocks that are as long as they came out (methods.integers); opening
    one shows whether it holds as many codes as expected.
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


class Coding(Protocol):
    """How replies become words that can be summed, and what their sum says."""

    def encode(self, reply: Reply) -> RingWords:
        """Return a plain reply's words [L]. Raises DataError: it has no place in a sum."""
        ...

    def check(self, reply: Reply) -> None:
        """Raise InputError for a masked reply whose public numbers no honest site sends."""
        ...

    def mask(self, reply: Reply, words: RingWords) -> Reply:
        """Return a reply with masked words [L] in place of all that is not public."""
        ...

    def words(self, masked: Reply) -> RingWords:
        """Return the words [L] of what `mask` made."""
        ...

    def layout(self, form: Form) -> Layout:
        """Return what the words of a plain reply of this form are."""
        ...

    def form(self, layout: Layout) -> Form:
        """Return the form of a masked reply."""
        ...

    def mean(
        self, task: Task, replies: Mapping[str, Reply], total: RingWords, layout: Layout
    ) -> tuple[State, float]:
        """Return what stands for the reply of each site in a sum, and how far it may be off.

        replies: those in the sum, masked. total: Σ e_i. Off: in each coordinate of the mean.
        """
        ...


@dataclass(frozen=True)
class FixedPointMean:
    """Codes the weighted mean of vectors and numbers, each reply's weight its own.

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

    def share(self, reply: Reply) -> float:
        """Return p_i = ω_i / Σ N, in (0, 1]. Raises InputError, as `weight` does."""
        return self.weight(reply) / self.total

    def public(self, numbers: Numbers) -> dict[str, float]:
        """Return those of a reply's numbers that stay readable."""
        return {name: value for name, value in numbers.items() if name in self.summed.public}

    def private(self, numbers: Numbers) -> dict[str, float]:
        """Return those of a reply's numbers that are summed."""
        return {name: value for name, value in numbers.items() if name not in self.summed.public}

    def encode(self, reply: Reply) -> RingWords:
        """Return a plain reply's words [L]."""
        return encode_fixed_point(
            reply.vectors, self.private(reply.numbers), self.share(reply), self.sites
        )

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
        share = sum(self.share(reply) for _, reply in sorted(replies.items()))
        state = State(*decode_fixed_point(total, share, self.sites, layout))
        return state, rounding(share, self.sites)

    def mask(self, reply: Reply, words: RingWords) -> Reply:
        """Return a reply with masked words [L] in place of all that is not public."""
        vector = torch.from_numpy(words.view(np.int64))
        return replace(reply, vectors={MASKED: vector}, numbers=self.public(reply.numbers))

    def words(self, masked: Reply) -> RingWords:
        """Return the words [L] of what `masked` made."""
        return masked.vectors[MASKED].numpy().view(np.uint64)


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
    means = np.ldexp(total.view(np.int64).astype(np.float64), -fraction_bits(sites)) / share
    vectors, at = dict[str, Tensor](), 0
    for name, (shape, dtype) in layout.vectors.items():
        part = means[at : at + shape.numel()]
        vectors[name] = torch.from_numpy(part.copy()).to(dtype).reshape(shape)
        at += shape.numel()
    return vectors, dict(zip(layout.numbers, means[at:].tolist(), strict=True))
