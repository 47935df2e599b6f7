"""Constants of an architecture, known by their content: positions, masks, tables of sines.

Each is one of a few tensors that follow from a shape alone, bit for bit, so that nothing can be
hidden in it: neither in a number that is chosen, as where an index begins, nor in last digits.
"""

import math
from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

_BASES: Final = (1e4, 1e5, 1.6e5, 5e5, 1e6, 1e7)
"""Of the frequencies of positions, as published: of Vaswani 2017, Llama 3, Qwen, ModernBERT."""
_STARTS: Final = (0, 1, 2)
"""Where positions begin; models of OPT's and RoBERTa's kind count from 2."""
_HIDDEN: Final = (0.0, -1.0, -math.inf, -1e4, -1e9)
"""What a mask that is added has in one of two kinds of places, beside 0; or a type's least."""
_MOST: Final = 2**24
_ROWS: Final = 4


def is_constant(tensor: Tensor) -> bool:
    """Whether a tensor is one of the known constants of its shape and type.

    They are: an arange from 0, 1 or 2, up or down; a triangle, a band beside the diagonal or the
    identity, of truth values, of 0 and 1, or of 0 and what hides; differences of places, from 0 or
    from their least; a one-hot row; frequencies of positions to a published base, and sines and
    cosines of them; windows' relative places, also on Swin v2's log scale; up to four such rows.

    >>> is_constant(torch.arange(8)[None]), is_constant(torch.ones(3, 3).tril())
    (True, True)
    >>> is_constant(torch.tensor([0, 1, 3])), is_constant(torch.arange(8) + 900)
    (False, False)
    """
    x = _distinct(tensor.detach().cpu())
    if x.numel() > _MOST or x.is_complex():
        return False
    if x.dim() == 0 or _is_known(x):
        return True
    # A row that is one number is 0 or 1: of others, a few rows would hold what one likes.
    return x.dim() == 2 and len(x) <= _ROWS and all(_is_known(_distinct(row)) for row in x)


def _is_known(x: Tensor) -> bool:
    if x.dim() == 0:
        return bool((x == 0) | (x == 1))
    if x.dim() == 1:
        one_hot = bool(((x == 0) | (x == 1)).all()) and int((x == 1).sum()) == 1
        return one_hot or _is(x, _rows(len(x), x.dtype))
    flat = torch.arange(x.numel()).view(x.shape)
    if _is(x, (v for d in _FLOATS for v in (flat.to(d).sin(), flat.to(d).cos()))):
        return True
    if x.dim() == 3 and x.shape[2] == 2 and x.is_floating_point():
        return bool(torch.equal(x, _log_windows(*x.shape[:2]).to(x.dtype)))
    if x.dim() != 2:
        return False
    # At place 0 sines are 0 and cosines 1, which spares making the others.
    begins = x.is_floating_point() and bool(((x[0] == 0) | (x[0] == 1)).all())
    n, m = x.shape
    return _is(x, _tables(n, m, x.dtype)) or (begins and _is(x, _sines(n, m)))


_FLOATS: Final = (torch.float32, torch.float64)


def _is(x: Tensor, known: Iterator[Tensor]) -> bool:
    return any(one.shape == x.shape and torch.equal(one.to(x.dtype), x) for one in known)


def _distinct(x: Tensor) -> Tensor:
    """A tensor without the dimensions along which it is all alike."""
    for dim in reversed(range(x.dim())):
        if x.shape[dim] and torch.equal(x.narrow(dim, 0, 1).expand_as(x), x):
            x = x.select(dim, 0)
    return x


def _rows(n: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """The rows [n] that are known."""
    places = torch.arange(n)
    for start in _STARTS:
        yield places + start
        yield (places + start).flip(0)
    yield places.roll(1)
    yield places.roll(-1)
    if (side := math.isqrt(math.isqrt(n))) ** 4 == n:
        yield _windows(side).flatten()
    if dtype.is_floating_point:
        for d in _FLOATS:
            yield places.to(d).sin()
            yield places.to(d).cos()
        yield from _frequencies(n, _BASES)
        # Slopes of ALiBi (Press 2022).
        yield 2.0 ** (-8.0 * (places + 1) / n)


def _frequencies(n: int, bases: tuple[float, ...]) -> Iterator[Tensor]:
    """base^(-2i/2n) [n], as the ways to write it round it."""
    for base in bases:
        for d in _FLOATS:
            steps = torch.arange(0, 2 * n, 2, dtype=d)
            yield 1.0 / (base ** (steps / (2 * n)))
            yield base ** (-steps / (2 * n))
            yield torch.exp(steps * (-math.log(base) / (2 * n)))


def _tables(n: int, m: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """The tables [n, m] that are known."""
    rows, columns = torch.arange(n)[:, None], torch.arange(m)[None]
    apart = columns - rows
    least = torch.finfo(dtype).min if dtype.is_floating_point else 0
    for k in (-1, 0, 1):
        for held in (apart > k, apart < k, apart == k):
            for picked in (held, ~held):
                yield picked.to(dtype)
                for hidden in (*_HIDDEN, least) if dtype.is_floating_point else ():
                    yield torch.zeros(n, m, dtype=dtype).masked_fill_(picked, hidden)
    for difference in (apart, -apart, apart.abs()):
        yield difference
        yield difference - difference.min()
    if n == m and (side := math.isqrt(n)) ** 2 == n:
        yield _windows(side)
    if n == m and (side := math.isqrt(n - 1)) ** 2 == n - 1:
        # A class's token ahead of the patches has three numbers of its own (Bao 2022, BEiT).
        last = (2 * side - 1) ** 2
        table = F.pad(_windows(side), (1, 0, 1, 0), value=last)
        table[1:, 0], table[0, 0] = last + 1, last + 2
        yield table


def _windows(side: int) -> Tensor:
    """Relative places of a window's patches [side², side²], numbered (Liu 2021, Swin)."""
    places = torch.arange(side)
    grid = torch.stack(torch.meshgrid(places, places, indexing="ij")).flatten(1)
    apart = grid[:, :, None] - grid[:, None, :] + side - 1
    return apart[0] * (2 * side - 1) + apart[1]


def _log_windows(n: int, m: int) -> Tensor:
    """Relative places of a window's patches on a log scale [n, m, 2] (Liu 2022, Swin v2)."""
    sides = [torch.arange(-(k // 2), k // 2 + 1).float()[:k] for k in (n, m)]
    table = torch.stack(torch.meshgrid(sides, indexing="ij"), 2)
    table /= torch.tensor([max(n // 2, 1), max(m // 2, 1)]).float()
    table *= 8
    return table.sign() * torch.log2(table.abs() + 1.0) / math.log2(8)


def _sines(n: int, m: int) -> Iterator[Tensor]:
    """Sines and cosines of places [n, m], in turn or in halves (Vaswani 2017)."""
    for frequencies in _frequencies(m // 2, _BASES[:1]) if m % 2 == 0 else ():
        for d in _FLOATS:
            angles = torch.arange(n, dtype=d)[:, None] * frequencies.to(d)
            sine, cosine = angles.sin(), angles.cos()
            for pair in ((sine, cosine), (cosine, sine)):
                yield torch.stack(pair, 2).flatten(1)
                yield torch.cat(pair, 1)
    for d in _FLOATS:
        for base in _BASES:
            for frequencies in _frequencies(m, (base,)):
                angles = torch.arange(n, dtype=d)[:, None] * frequencies.to(d)
                yield angles.sin()
                yield angles.cos()
