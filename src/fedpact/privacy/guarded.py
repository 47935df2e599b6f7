"""Sums over a batch that hold whatever its records do: no record makes a release fail.

A model may raise at a record that nobody foresaw, and a failure would leave the site as a refusal,
which depends on records. So a batch that raises is taken without the records at which the model
raises when it is given each of them alone: the answer then has the bits that it would have without
them. Whether a record is one of these follows from that record and public numbers only, so what one
record moves a sum by is as it was. What stays in the site's own log is told there once.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from fedpact.persample.layout import Placement

_Take = Callable[[Tensor, Tensor, Placement | None], Tensor]
_TakeShared = Callable[[Tensor, Tensor, Tensor | None, Placement | None], Tensor]
_TakeRows = Callable[[slice], Tensor]
_Finish = Callable[[Tensor], Tensor]

_logger = logging.getLogger("fedpact.site")
_told: set[str] = set()


def sum_finite(
    take: _TakeShared,
    x: Tensor,
    y: Tensor,
    shares: Tensor | None,
    like: Tensor,
    finish: _Finish | None,
    layout: Placement | None = None,
) -> Tensor:
    """Return take(x, y, shares, layout) [d], a sum over a batch, in which bad records weigh 0.

    shares: of each record [B], or None; those that are left keep theirs, and their slots.
    like: [d], for the form of a sum. finish: what is done to a sum [d] of single records' sums, in
    float64, to have that of all; it is made so where the good records raise together, as for want
    of memory. None where it is no such sum: it is 0 then.
    """

    def some(rows: Tensor | slice) -> Tensor:
        part = None if shares is None else shares[rows]
        return take(x[rows], y[rows], part, layout and layout.of(rows))

    try:
        return take(x, y, shares, layout)
    except Exception as error:  # whatever a model may raise at a record
        good = _good(some, len(y), error)
    try:
        return some(good) if len(good) else torch.zeros_like(like)
    except Exception as error:
        _tell(f"good records raise together, and are taken one by one: {_words(error)}")
    if finish is None:
        return torch.zeros_like(like)
    total = torch.zeros_like(like, dtype=torch.float64)
    for j in map(int, good):
        total += some(slice(j, j + 1))
    return finish(total).to(like.dtype)


def measure_losses(losses: _Take, x: Tensor, y: Tensor, layout: Placement | None = None) -> Tensor:
    """Return losses(x, y, layout) [B] in float64, NaN for the records at which it raises."""

    def some(rows: slice) -> Tensor:
        return losses(x[rows], y[rows], layout and layout.of(rows))

    try:
        return losses(x, y, layout).double()
    except Exception as error:  # whatever a model may raise at a record
        good = _good(some, len(y), error)
    found = torch.full((len(y),), torch.nan, dtype=torch.float64, device=y.device)
    for j in map(int, good):
        found[j] = some(slice(j, j + 1)).double()[0]
    return found


def _good(take: _TakeRows, count: int, error: Exception) -> Tensor:
    """Return the places, on the CPU, of the records at which `take` does not raise alone."""
    good = [j for j in range(count) if _taken(take, slice(j, j + 1))]
    _tell(
        f"the model raises at some records of a batch, which are given weight 0: {_words(error)}; "
        "declare the ranges, categories or vocabulary that it takes"
    )
    return torch.tensor(good, dtype=torch.int64)


def _taken(take: _TakeRows, rows: slice) -> bool:
    try:
        take(rows)
    except Exception:  # whatever a model may raise at a record
        return False
    return True


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _tell(message: str) -> None:
    if message not in _told:
        _told.add(message)
        _logger.warning(message)
