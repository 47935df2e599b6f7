"""Whether a record's numbers depend on its slot, or on who stands beside it, on this machine."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def is_invariant(
    measure: Callable[[Tensor, Tensor], list[Tensor]], x: Tensor, y: Tensor, length: int
) -> bool:
    """Whether passes give each record the same bits wherever it stands and whatever is beside it.

    measure: of a pass of `length` records whatever it computes of each, tensors [P, ...]. x, y:
    made-up records [n, ...], which are taken over and over, each a little different. A library
    shares out work by place, so every place of a pass is tried, in five passes.
    """
    rows = torch.arange(length, device=x.device) % len(x)
    x, y = x[rows].clone(), y[rows].clone()
    if x.is_floating_point():
        # Signs and sizes of their own, so that no record stands for another.
        scale = torch.linspace(0.5, 1.5, length, dtype=x.dtype, device=x.device)
        x *= scale.view(-1, *[1] * (x.dim() - 1))
    base = measure(x, y)
    half = torch.arange(length, device=x.device) < length // 2
    trials: list[tuple[Tensor, Tensor]] = []  # order of the records, and which are still there
    for shift in (1, length // 2, length - 3):
        trials.append((torch.arange(length, device=x.device).roll(shift), torch.ones_like(half)))
    trials += [(torch.arange(length, device=x.device), half), (rows.argsort(), ~half)]
    for number, (order, there) in enumerate(trials):
        beside = math.inf if number % 2 and x.is_floating_point() else 0
        mask = there.view(-1, *[1] * (x.dim() - 1))
        other = torch.where(mask, x[order], torch.full_like(x, beside))
        of = torch.where(there.view(-1, *[1] * (y.dim() - 1)), y[order], torch.zeros_like(y))
        for before, now in zip(base, measure(other, of), strict=True):
            if not _same_bits(before[order][there], now[there]):
                return False
    return True


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # What is not a number is as good in one slot as in another: the record is left out.
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
