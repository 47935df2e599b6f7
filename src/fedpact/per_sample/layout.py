"""The slots of a batch's records in passes of one shape, and whether slots matter.

Every pass of a run has exactly P slots, each with a record or empty, so a library takes the same
code for every batch (docs/notes/proofs.md has the lemma and its proof). P follows from the model
and from the expected size of a batch, which is public: never from how many records there are.

compact    Records fill slots in order, ⌈n/P⌉ passes. Sound where a record's numbers do not depend
           on its slot, which a private run checks on its machine before it begins.
scattered  Each record draws one of the P slots from the step's stream; those that share one stand
           in passes one after the other. Sound by construction: a record's slot does not depend on
           the other records, nor on how many there are.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fedpact.common.params import copy_to_device
from fedpact.per_sample.gradients import IN_FLOAT32, PARTIAL_SUMS

EXPECTED = 64.0
"""The expected batch size of a caller that names none."""

PLACEMENTS: Final = {
    "compact": "Records fill passes of one shape in order; what is computed of a record was found "
    "not to depend on its slot or on the others, for this model (checked on this machine).",
    "scattered": "Each record draws its slot in passes of one shape anew for each batch, so the "
    "bound does not rest on how a library computes (by construction).",
}
"""How a site places records, as its log and its receipt say it."""

_LENGTHS = (4, *range(8, 64, 8), *range(64, 128, 16), 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True)
class Placement:
    """How the records of a batch are placed.

    expected: the batch's expected size q N, a public number, for which a compact pass is as long as
    is cheapest. places: int64 [B], each record's slot below `slots`, all different, on the CPU or
    the records' device; None: compact. slots: of all passes together; length: P. See `scatter`.
    """

    expected: float = EXPECTED
    places: Tensor | None = None
    slots: int = 0
    length: int = 0

    def of(self, rows: Tensor | slice) -> "Placement":
        """Return the layout of some of the batch's records, each where it stands."""
        return self if self.places is None else replace(self, places=self.places[rows])

    def in_float64(self, batch: int, length: int) -> bool:
        """Whether so many records in passes of so many slots are more than float32 may add."""
        passes = -(-(batch if self.places is None else self.slots) // length)
        return batch > IN_FLOAT32 or passes > PARTIAL_SUMS


COMPACT = Placement()
"""Compact, for batches of the default expected size."""


@dataclass(frozen=True)
class Pass:
    """One pass: records x, y [P, ...], and which slots hold one: occupied [P], None for all.

    rows: its slots among the batch's; of a compact pass those that hold records, which come first.
    """

    x: Tensor
    y: Tensor
    occupied: Tensor | None
    rows: slice
    places: Tensor | None
    slots: int

    def place(self, values: Tensor) -> Tensor:
        """Return values [B], one for each record of the batch, as [P]; 0 for empty slots."""
        if self.places is not None:
            return _place_rows(values, self.places, self.slots)[self.rows]
        some = values[self.rows]
        return torch.nn.functional.pad(some, (0, len(self.y) - len(some)))


def lay_out(
    x: Tensor, y: Tensor, length: int, layout: Placement, blank: Tensor | None = None
) -> Iterator[Pass]:
    """Yield the passes of so many slots over records x, y [B, ...]; none without any slot.

    blank: what an empty slot holds [...], the same in every pass; None: zeros.
    """
    if layout.places is not None:
        places, slots = copy_to_device(layout.places, x.device), layout.slots
        occupied = _place_rows(torch.ones_like(places, dtype=torch.bool), places, slots)
        x, y = _place_rows(x, places, slots, blank), _place_rows(y, places, slots)
        for i in range(0, slots, length):
            rows = slice(i, i + length)
            some = align(x[rows]), align(y[rows])
            yield Pass(*some, occupied[rows], rows, places, slots)
        return
    batch = y.shape[0]  # in a quarter of the time of len
    for i in range(0, batch, length):
        rows = slice(i, min(i + length, batch))
        count, occupied = rows.stop - i, None
        if count < length:
            occupied = torch.arange(length, device=x.device) < count
        some = _fill(x[rows], length, blank), _fill(y[rows], length)
        yield Pass(*some, occupied, rows, None, 0)


def collect(parts: list[Tensor], batch: int, layout: Placement) -> Tensor:
    """Return numbers [P] of each pass as those of the batch's records [B]."""
    values = torch.cat(parts)
    if layout.places is None:
        return values[:batch]
    return values[copy_to_device(layout.places, values.device)]


def align(rows: Tensor) -> Tensor:
    """Return rows [n, ...] with the memory layout and alignment of a new tensor."""
    if rows.is_contiguous() and rows.data_ptr() % 64 == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def _fill(rows: Tensor, length: int, blank: Tensor | None = None) -> Tensor:
    count = rows.shape[0]
    if count == length:
        return align(rows)
    found = _empty(rows, length, blank)
    found[:count] = rows
    return found


def _place_rows(values: Tensor, places: Tensor, slots: int, blank: Tensor | None = None) -> Tensor:
    return _empty(values, slots, blank).index_copy_(0, places, values)


def _empty(like: Tensor, slots: int, blank: Tensor | None) -> Tensor:
    shape = slots, *like.shape[1:]
    return like.new_zeros(shape) if blank is None else blank.expand(shape).clone()


def overhead(operations: float, flops: float, weights: int, numbers: float = 0.0) -> float:
    """Estimate the fixed cost of a pass, in the time of one record; the same on any machine.

    operations: their number in a forward pass. flops, numbers: computed and kept for one record.
    weights: d, each of which is read a few times.
    """
    fixed = operations * 8e-5 + weights * 24 / 1e10
    return 3 + fixed / max(flops / 8e10 + numbers * 1e-9, 1e-8)


def scatter(positions: Tensor, length: int) -> Placement:
    """Return the scattered placement of records that have drawn positions [B] in passes of P slots.

    positions: int64, below `length`, drawn alike and independently for each record. The k-th record
    at a position stands there in pass k.

    >>> scatter(torch.tensor([2, 0, 2]), 8).places.tolist()
    [2, 0, 10]
    """
    counts = positions.bincount(minlength=length)
    order = positions.argsort(stable=True)
    rank = torch.empty_like(positions)
    rank[order] = torch.arange(len(positions)) - (counts.cumsum(0) - counts)[positions[order]]
    return Placement(
        places=rank * length + positions, slots=int(counts.max()) * length, length=length
    )


@lru_cache(4096)
def length_for(
    expected: float,
    most: int,
    overhead: float,
    multiple: int = 1,
    *,
    exact: bool = False,
    scattered: bool = False,
) -> int:
    """Return P: how many slots make a batch cheapest, a `multiple` if they are not scattered.

    A pass costs its slots and `overhead` more, in records' time, whatever it holds. most: the most
    that fit at a time. expected: of a Poisson batch, or with `exact` how many records there are.
    """
    multiple = 1 if scattered else multiple
    lengths = [p for p in _LENGTHS if p <= max(most, multiple, _LENGTHS[0]) and not p % multiple]
    if exact:
        numbers, chances = np.array([math.ceil(expected)]), np.ones(1)
    else:
        numbers, chances = _poisson(expected)

    def passes(length: int) -> float:
        if scattered:
            # How many share a slot is Poisson, independently of other slots: the most of them.
            first, each = _poisson(expected / length)
            return float(first[0] + (1 - each.cumsum().clip(max=1) ** length).sum())
        return float((chances * -(-numbers // length)).sum())

    return min(lengths, key=lambda length: passes(length) * (length + overhead))


def _poisson(mean: float) -> tuple[np.ndarray, np.ndarray]:
    """The numbers that a Poisson variable has but for a chance of 1e-8 or less, and theirs."""
    spread = 6 * math.sqrt(mean) + 6
    numbers = np.arange(max(0, math.floor(mean - spread)), math.ceil(mean + spread) + 1)
    logs = numbers * math.log(max(mean, 1e-9)) - [math.lgamma(n + 1) for n in numbers]
    chances = np.exp(logs - logs.max())
    return numbers, chances / chances.sum()


def is_invariant(
    measure: Callable[[Tensor, Tensor], list[Tensor]],
    x: Tensor,
    y: Tensor,
    length: int,
    beside: Sequence[Tensor],
) -> bool:
    """Whether a pass gives a record the same bits in every slot, whatever other slots hold.

    measure: everything that a pass of `length` records computes, tensors [P, ...], losses first.
    x, y: dummy records [n, ...], repeated with small changes. beside: other contents of slots,
    [...] each. A library distributes work by slot, so all slots are tried, in five passes or more.
    False if most losses are not finite, as equal NaN would show nothing.
    """
    rows = torch.arange(length, device=x.device) % len(x)
    x, y = x[rows].clone(), y[rows].clone()
    if x.is_floating_point():
        # Different scales, so that no two records are equal.
        scale = torch.linspace(0.5, 1.5, length, dtype=x.dtype, device=x.device)
        x *= scale.view(-1, *[1] * (x.dim() - 1))
    base = measure(x, y)
    if 2 * int(base[0].isfinite().sum()) < length:
        return False
    half = torch.arange(length, device=x.device) < length // 2
    trials: list[tuple[Tensor, Tensor]] = []  # order of the records, and which are still there
    # Of short passes more, as each shows little, and costs little.
    for shift in {1, length // 2, length - 1, *range(1, length, 1 + length**2 // 128)}:
        trials.append((torch.arange(length, device=x.device).roll(shift), torch.ones_like(half)))
    trials += [(torch.arange(length, device=x.device).flip(0), half), (rows.argsort(), ~half)]
    for number, (order, there) in enumerate(trials):
        mask = there.view(-1, *[1] * (x.dim() - 1))
        other = torch.where(mask, x[order], beside[number % len(beside)])
        of = torch.where(there.view(-1, *[1] * (y.dim() - 1)), y[order], torch.zeros_like(y))
        for before, now in zip(base, measure(other, of), strict=True):
            a, b = before[order][there], now[there]
            # NaN equals NaN here: the record is left out in either slot.
            if not ((a == b) | (a.isnan() & b.isnan())).all():
                return False
    return True
