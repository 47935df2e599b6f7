"""Constants of an architecture, known by their content: positions, masks, tables of sines.

Each is one of a few tensors that follow from a shape alone, bit for bit, so that nothing can be
hidden in it: neither in a number that is chosen, as where an index begins, nor in last digits. A
tensor that is one plain number is known, too (`_is_plain`). That stops a mean or a deviation of
records from passing by mistake, and not a model that is written to spell records in plain numbers.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

_LIBRARIES: Final = ("transformers", "timm", "torchvision", "monai")
"""Public libraries of models, which were written before anybody's records came."""
_BASES: Final = (1e4, 5e5, 1e6)
"""Of the frequencies of positions, as published: of Vaswani 2017, Llama 3, Qwen."""
_STARTS: Final = (0, 1, 2)
"""Where positions begin; models of OPT's and RoBERTa's kind count from 2."""
_HIDDEN: Final = (0.0, -1.0, -math.inf, -1e4, -1e9)
"""What a mask that is added has in one of two kinds of places, beside 0; or a type's least."""
_IMAGENET: Final = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Means and deviations of colours, as published."""
_LARGEST_SQUARE: Final = 2**16
_MOST: Final = 2**24
_ROWS: Final = 4
_FLOATS: Final = (torch.float32, torch.float64)


def find_library_tensors(module: nn.Module) -> set[int]:
    """Return the ids of tensors that follow from the configuration of a public library's layers.

    These are what the libraries' own layers hold, except statistics and what torch's layers have:
    weights that were trained are in torch's layers, too.
    """
    found: set[int] = set()
    for layer in module.modules():
        kinds = [kind.__module__ for kind in type(layer).__mro__ if kind is not nn.Module]
        if kinds[0].partition(".")[0] in _LIBRARIES and not any(
            kind.startswith("torch.nn.modules") for kind in kinds
        ):
            named = layer.named_parameters(recurse=False), layer.named_buffers(recurse=False)
            held = {**vars(layer), **dict(named[0]), **dict(named[1])}
            found |= {id(v) for n, v in held.items() if "running" not in n}
    return found


def is_constant(tensor: Tensor) -> bool:
    """Whether a tensor is one of the known constants of its shape and type.

    They are: an arange from 0, 1 or 2, up or down; a triangle, a band or the identity, of truth
    values, of 0 and 1, or of 0 and what hides; differences of places, from 0 or from their least;
    a one-hot row; frequencies of positions to a published base, and sines and cosines of them;
    published means of colours; a range from 0 or -1 to 1; up to four of these; a plain number,
    anywhere the same.

    >>> is_constant(torch.arange(8)[None]), is_constant(torch.ones(3, 3).tril())
    (True, True)
    >>> is_constant(torch.tensor([0, 1, 3])), is_constant(torch.arange(8) + 900)
    (False, False)
    """
    x = _distinct(tensor.detach().cpu())
    if x.numel() > _MOST or x.is_complex():
        return False
    if _is_plain(x) if x.dim() == 0 else _is_known(x):
        return True
    # A row that is one number is 0 or 1: of others, a few rows would hold what one likes.
    return x.dim() > 1 and len(x) <= _ROWS and all(_is_known(_distinct(row)) for row in x)


def _is_plain(x: Tensor) -> bool:
    """Whether a number [] has two digits, or is a root or a power of two.

    Of a root the square, or its inverse, is whole: as scales of attention and of embeddings are. A
    mean of records hardly ever is one of these.
    """
    v = float(x)
    if v == 0 or not math.isfinite(v):
        return not math.isnan(v)
    near = {float(f"{v:.1e}"), math.copysign(2.0 ** round(math.log2(abs(v))), v)}
    for power in (2, -2):
        square = abs(v) ** power if 1e-3 < abs(v) < 1e3 else 0.0
        if 1 <= round(square) <= _LARGEST_SQUARE:
            near.add(math.copysign(round(square) ** (1 / power), v))
    if x.is_floating_point():
        ends = {torch.finfo(d).max for d in (torch.float16, torch.bfloat16, *_FLOATS)}
        return abs(v) in ends or v in (float(torch.tensor(n, dtype=x.dtype)) for n in near)
    return v in {*near, *(n - 1 for n in near)}  # the most of a type is a power of two, less 1


def _is_known(x: Tensor) -> bool:
    if x.dim() == 0:
        return bool((x == 0) | (x == 1))
    if x.dim() == 1:
        one_hot = bool(((x == 0) | (x == 1)).all()) and int((x == 1).sum()) == 1
        return one_hot or _is(x, _rows(x))
    if x.dim() != 2:
        return False
    # At place 0 all sines are alike, and all cosines, which spares making the others.
    begins = x.is_floating_point() and len(x[0].unique()) <= 2
    return _is(x, _tables(x)) or (begins and _is(x, _sines(*x.shape)))


def _is(x: Tensor, known: Iterator[Tensor]) -> bool:
    def alike(one: Tensor) -> bool:
        made = one.to(x.dtype)
        # Whole numbers are not compared with what is cut to them.
        return torch.equal(made, x) and (x.is_floating_point() or torch.equal(made, one))

    return any(one.shape == x.shape and alike(one) for one in known)


def _distinct(x: Tensor) -> Tensor:
    """A tensor without the dimensions along which it is all alike."""
    for dim in reversed(range(x.dim())):
        if x.shape[dim] and torch.equal(x.narrow(dim, 0, 1).expand_as(x), x):
            x = x.select(dim, 0)
    return x


def _rows(x: Tensor) -> Iterator[Tensor]:
    """The rows that are known, of the length of x [n]."""
    n = len(x)
    for start in _STARTS:
        yield torch.arange(n) + start
        yield (torch.arange(n) + start).flip(0)
    if x.is_floating_point():
        yield from _frequencies(n)
        yield from (torch.tensor(m) * scale for m in _IMAGENET for scale in (1, 255))
        yield from (torch.linspace(lowest, 1, n) for lowest in (0, -1))


def _frequencies(n: int) -> Iterator[Tensor]:
    """base^(-2i/2n) [n], as the ways to write it round it."""
    for base, d in itertools.product(_BASES, _FLOATS):
        steps = torch.arange(0, 2 * n, 2, dtype=d)
        yield 1.0 / (base ** (steps / (2 * n)))
        yield base ** (-steps / (2 * n))
        yield torch.exp(steps * (-math.log(base) / (2 * n)))
        # To the last frequency 1 / base, as Whisper has them.
        yield torch.exp(torch.arange(n, dtype=d) * -(math.log(base) / max(n - 1, 1)))


def _tables(x: Tensor) -> Iterator[Tensor]:
    """The tables that are known, of the shape of x [n, m]."""
    (n, m), dtype = x.shape, x.dtype
    apart = torch.arange(m)[None] - torch.arange(n)[:, None]
    least = torch.finfo(dtype).min if dtype.is_floating_point else 0
    # A triangle, the identity and any band are known by how far their corner reaches.
    alike = x == x[0, 0]
    held = (apart < alike[0].sum()) & (-apart < alike[:, 0].sum())
    for picked in (held, ~held):
        yield picked
        for hidden in (*_HIDDEN, least) if dtype.is_floating_point else ():
            wide = _FLOATS[dtype == torch.float64]
            yield torch.zeros(n, m, dtype=wide).masked_fill_(picked, hidden)
    for difference in (apart, -apart, apart.abs()):
        yield difference
        yield difference - difference.min()


def _sines(n: int, m: int) -> Iterator[Tensor]:
    """Sines and cosines of places [n, m], in turn or in halves (Vaswani 2017), or one of them."""
    for width in (m, m // 2):
        for d, frequencies in itertools.product(_FLOATS, _frequencies(width)):
            angles = torch.arange(n, dtype=d)[:, None] * frequencies.to(d)
            parts = angles.sin(), angles.cos()
            yield from parts
            for pair in itertools.permutations(parts):
                yield torch.stack(pair, 2).flatten(1)
                yield torch.cat(pair, 1)
