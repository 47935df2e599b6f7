"""Constants of an architecture, known by their content: positions, masks, tables of sines.

Each is one of a few tensors that follow from a shape alone, bit for bit, so that nothing can be
hidden in it: neither in a number that is chosen, as where an index begins, nor in last digits.
Eight numbers or more may also make a range whose ends are round numbers: see `_ranges`. A tensor
that is one plain number is known, too (`_is_plain`). That stops a mean or a deviation of records
from passing by mistake, and not a model that is written to spell records in plain numbers.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

_BASES: Final = (1e4, 1e5, 1.5e5, 1.6e5, 5e5, 1e6, 1e7)
"""Of the frequencies of positions, as published: of Vaswani 2017, Llama 3, Qwen, ModernBERT."""
_SLOWED: Final = (2.0, 4.0, 8.0, 32.0, 40.0)
"""How much slower the lowest of them turn for longer texts: Gemma 3, Llama 3, Qwen, DeepSeek."""
_YARN: Final = (4096, 8192, 32768)
"""The lengths of text that models were trained on before YaRN (Peng 2023)."""
_STARTS: Final = (0, 1, 2)
"""Where positions begin; models of OPT's and RoBERTa's kind count from 2."""
_HIDDEN: Final = (0.0, -1.0, -math.inf, -1e4, -1e9)
"""What a mask that is added has in one of two kinds of places, beside 0; or a type's least."""
_IMAGENET: Final = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_CLIP: Final = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""Means and deviations of colours, as published."""
_LOGIT_SCALE: Final = 2.6592
"""Of CLIP (Radford 2021), as configurations have it."""
_LARGEST_SQUARE: Final = 2**16
_MOST: Final = 2**24
_ROWS: Final = 4
_LINE: Final = 8
"""From how many numbers on a range may have any round ends: fewer would fit many of these."""
_SCALES: Final[tuple[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], ...]] = (
    (torch.clone, torch.clone),
    (torch.sqrt, torch.square),
    (torch.log, torch.exp),
    (torch.log2, torch.exp2),
    (torch.log10, lambda line: 10.0**line),
    (torch.exp, torch.log),
    (lambda x: (x / math.pi).log2(), lambda line: line.exp2() * math.pi),
)
"""Functions that make evenly spaced numbers of a row, and their inverses."""


def is_constant(tensor: Tensor) -> bool:
    """Whether a tensor is one of the known constants of its shape and type.

    They are: an arange from 0, 1 or 2, up or down; a triangle, a band or the identity, of truth
    values, of 0 and 1, or of 0 and what hides; differences of places, from 0 or from their least;
    a one-hot row; frequencies of positions to a published base, also slowed for longer texts, and
    sines and cosines of them, also of places in a square; windows' relative places, also on Swin
    v2's log scale; rows and columns of a triangle's entries; windows of a Fourier transform;
    published means of colours; of eight numbers or more a range between two round numbers, its
    square, exponential and logarithm; up to four of these; a plain number, anywhere the same.

    >>> is_constant(torch.arange(8)[None]), is_constant(torch.ones(3, 3).tril())
    (True, True)
    >>> is_constant(torch.tensor([0, 1, 3])), is_constant(torch.arange(8) + 900)
    (False, False)
    """
    x = _distinct(tensor.detach().cpu())
    if x.numel() > _MOST or x.is_complex():
        return False
    if x.is_floating_point() and x.numel() >= _LINE:
        # What was once of half precision is compared as such.
        halves = (d for d in (torch.bfloat16, torch.float16) if torch.equal(x.to(d).to(x.dtype), x))
        x = x.to(next(halves, x.dtype))
    if _is_plain(x) if x.dim() == 0 else _is_known(x):
        return True
    # A row that is one number is 0 or 1: of others, a few rows would hold what one likes.
    if x.dim() > 1 and len(x) <= _ROWS and all(_is_known(_distinct(row)) for row in x):
        return True
    return all(map(_is_known, parts)) if (parts := _by_side(x)) else False


def _by_side(x: Tensor) -> list[Tensor]:
    """Tables of rows or columns that a table of places in a square [n, m] is made of, if it is.

    In front of the square there may be a row of zeros, for a class's token (He 2022, MAE).
    """
    if x.dim() != 2 or x.shape[1] % _ROWS or not x.is_floating_point():
        return []
    side = math.isqrt(len(x))
    if side**2 + 1 == len(x) and not x[0].any():
        x = x[1:]
    if side < 2 or side**2 != len(x):
        return []
    parts = x.view(side, side, _ROWS, -1).unbind(2)
    # Both numbers of a pair that is turned have one angle, side by side (Su 2021).
    found = [
        _distinct(one.unflatten(2, (-1, 2)) if one.shape[2] % 2 == 0 else one) for one in parts
    ]
    found = [one.flatten(1) if one.dim() > 1 else one for one in found]
    return found if all(one.dim() == 2 and len(one) == side for one in found) else []


def _is_plain(x: Tensor) -> bool:
    """Whether a number [] has two digits, or is a root, a power of two, or a logarithm of such.

    Of a root the square, or its inverse, is whole: as scales of attention and of embeddings are. A
    mean of records hardly ever is one of these.
    """
    v = float(x)
    if v == 0 or not math.isfinite(v):
        return not math.isnan(v)
    near = {float(f"{v:.1e}"), math.copysign(2.0 ** round(math.log2(abs(v))), v), _LOGIT_SCALE}
    for power in (2, -2):
        square = abs(v) ** power if 1e-3 < abs(v) < 1e3 else 0.0
        if 1 <= round(square) <= _LARGEST_SQUARE:
            near.add(math.copysign(round(square) ** (1 / power), v))
    if abs(v) < 100:
        near |= {s * math.log(float(f"{math.exp(s * v):.1e}")) for s in (1, -1)}
    if x.is_floating_point():
        ends = {torch.finfo(d).max for d in (torch.float16, torch.bfloat16, *_FLOATS)}
        own = (float(torch.tensor(n, dtype=x.dtype)) for n in near)
        return abs(v) in ends or v in own
    return v in {*near, *(n - 1 for n in near)}  # the most of a type is a power of two, less 1


def _is_known(x: Tensor) -> bool:
    if x.dim() == 0:
        return bool((x == 0) | (x == 1))
    if x.dim() == 1:
        one_hot = bool(((x == 0) | (x == 1)).all()) and int((x == 1).sum()) == 1
        return one_hot or _is(x, _rows(x)) or _is(x, _ranges(x))
    flat = torch.arange(x.numel()).view(x.shape)
    if _is(x, (v for d in _FLOATS for v in (flat.to(d).sin(), flat.to(d).cos()))):
        return True
    if x.dim() == 3 and x.shape[2] == 2 and x.is_floating_point():
        return bool(torch.equal(x, _log_windows(*x.shape[:2]).to(x.dtype)))
    if x.dim() != 2:
        return False
    # At place 0 all sines are alike, and all cosines, which spares making the others.
    begins = x.is_floating_point() and len(x[0].unique()) <= 2
    return _is(x, _tables(x)) or (begins and _is(x, _variants(x, _sines(*x.shape))))


_FLOATS: Final = (torch.float32, torch.float64)


def _is(x: Tensor, known: Iterator[Tensor]) -> bool:
    def alike(one: Tensor) -> bool:
        made = one.to(x.dtype)
        # Whole numbers are not compared with what is cut to them.
        whole = x.is_floating_point() or torch.equal(made.to(one.dtype), one)
        return torch.equal(made, x) and whole

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
    places = torch.arange(n)
    for start in _STARTS:
        yield places + start
        yield (places + start).flip(0)
    yield places.roll(1)
    yield places.roll(-1)
    side = (1 + math.isqrt(1 + 8 * n)) // 2
    for k, ahead in ((side, 1), (side - 1, 0)):
        if k * (k + 1 - 2 * ahead) == 2 * n:
            yield from (*torch.triu_indices(k, k, ahead), *torch.tril_indices(k, k, -ahead))
    if (side := math.isqrt(math.isqrt(n))) ** 4 == n:
        yield _windows(side).flatten()
    if x.is_floating_point():
        for d in _FLOATS:
            # The last as Mamba's states begin.
            yield from (places.to(d).sin(), places.to(d).cos(), (places.to(d) + 1).log())
        if float(x[0]) in (1.0, *(1 / factor for factor in _SLOWED)):
            # Of a row that is long enough, the base may be any round number.
            falls = x.double()[[0]] / x.double()[[1, -1]] if n >= _LINE else torch.zeros(2)
            own = (falls.abs() ** torch.tensor([n, n / max(n - 1, 1)])).tolist()
            bases = {*_BASES, *(float(f"{base:.1e}") for base in own if 10 < base < 1e12)}
            yield from _frequencies(n, bases)
            for base in bases if n >= _LINE else ():
                yield from _slowed_frequencies(n, base)
        # Slopes of ALiBi (Press 2022).
        yield 2.0 ** (-8.0 * (places + 1) / n)
        yield from (torch.tensor(m) * scale for m in _IMAGENET + _CLIP for scale in (1, 255))
        yield from (torch.linspace(lowest, 1, n) for lowest in (0, -1))
        for window in (torch.hann_window, torch.hamming_window, torch.blackman_window):
            for periodic, d in itertools.product((True, False), _FLOATS):
                yield window(n, periodic=periodic, dtype=d)


def _ranges(x: Tensor) -> Iterator[Tensor]:
    """Rows between the same ends as x [n], if these are round numbers, evenly or on a log scale.

    One end is 0, 1, -1, π or half a step, or both are powers of ten: another range may be that of a
    column of records.
    """
    n, places = len(x), torch.arange(len(x))
    ends = [abs(float(x[0])), abs(float(x[-1]))]
    fixed = any(math.isclose(v, e, rel_tol=1e-6) for v in ends for e in (0, 1, math.pi, 0.5 / n))
    powers = all(
        0 < v < math.inf and abs(math.log10(v) - round(math.log10(v))) < 1e-6 for v in ends
    )
    if n < _LINE or not (fixed or powers):
        return
    for straighten, bend in _SCALES if x.is_floating_point() else _SCALES[:1]:
        y = straighten(x.double())
        first, last, step = (float(v) for v in (y[0], y[-1], (y[-1] - y[0]) / (n - 1)))
        for start, d in itertools.product(_rounded_numbers(first, n), _FLOATS):
            yield from (
                bend(torch.linspace(start, v, n, dtype=d)) for v in _rounded_numbers(last, n)
            )
            yield from (bend(start + places.to(d) * v) for v in _rounded_numbers(step, n))


def _rounded_numbers(number: float, n: int) -> set[float]:
    """The near numbers of two digits, logarithms of such, and parts of n or π of two digits."""
    if not 1e-5 < abs(number) < 100:
        # Any last digits of almost 0 would be round.
        return {float(f"{number:.1e}") * (abs(number) > 1)} if abs(number) < 1e30 else set()
    parts = [unit / of for unit in (1.0, math.pi) for of in (1, n, n - 1)]
    near = {float(f"{number / part:.1e}") * part for part in parts}
    near.add(math.log(float(f"{math.exp(number):.1e}")))
    return {one for one in near if abs(one - number) <= 0.01 * abs(number) + 1e-6}


def _frequencies(n: int, bases: Iterable[float]) -> Iterator[Tensor]:
    """base^(-2i/2n) [n], as the ways to write it round it."""
    for base in bases:
        for d in _FLOATS:
            steps = torch.arange(0, 2 * n, 2, dtype=d)
            yield 1.0 / (base ** (steps / (2 * n)))
            yield base ** (-steps / (2 * n))
            yield torch.exp(steps * (-math.log(base) / (2 * n)))
            # To the last frequency 1 / base, as Whisper and translators have them.
            yield torch.exp(torch.arange(n, dtype=d) * -(math.log(base) / max(n - 1, 1)))


def _slowed_frequencies(n: int, base: float) -> Iterator[Tensor]:
    """Frequencies [n] of which the lower ones are divided: Llama 3's, YaRN's, and all of them."""
    power = base ** (torch.arange(0, 2 * n, 2).float() / (2 * n))
    fast = 1.0 / power
    for factor in _SLOWED:
        yield fast / factor
        share = ((8192 / (2 * math.pi / fast) - 1.0) / 3.0).clamp(0, 1)
        yield (1 - share) * fast / factor + share * fast
        for length in _YARN:
            # Where 32 turns, and where one, fit the length.
            turns = [length / (2 * math.pi * count) for count in (32, 1)]
            low, high = (n * math.log(one) / math.log(base) for one in turns)
            for first, last in ((low, high), (math.floor(low), math.ceil(high))):
                reach = min(last, 2 * n - 1) - max(first, 0)
                kept = 1 - ((torch.arange(n).float() - max(first, 0)) / reach).clamp(0, 1)
                yield 1.0 / (factor * power) * (1 - kept) + fast * kept


def _tables(x: Tensor) -> Iterator[Tensor]:
    """The tables that are known, of the shape of x [n, m]."""
    (n, m), dtype = x.shape, x.dtype
    rows, columns = torch.arange(n)[:, None], torch.arange(m)[None]
    apart = columns - rows
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
    if n == m and (side := math.isqrt(n)) ** 2 == n:
        yield _windows(side)
    if (side := math.isqrt(m)) ** 2 == m:
        yield from (_offsets(side, stride) for stride in (1, 2))
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


def _offsets(side: int, stride: int) -> Tensor:
    """How far a window's patches are from each stride-th of them [n, side²] (LeViT)."""
    ours, theirs = (torch.cartesian_prod(*[torch.arange(0, side, k)] * 2) for k in (stride, 1))
    apart = (ours.view(-1, 1, 2) - theirs.view(-1, 2)).abs()
    return apart[..., 0] * side + apart[..., 1]


def _log_windows(n: int, m: int) -> Tensor:
    """Relative places of a window's patches on a log scale [n, m, 2] (Liu 2022, Swin v2)."""
    sides = [torch.arange(-(k // 2), k // 2 + 1).float()[:k] for k in (n, m)]
    table = torch.stack(torch.meshgrid(sides, indexing="ij"), 2)
    table /= torch.tensor([max(n // 2, 1), max(m // 2, 1)]).float()
    table *= 8
    return table.sign() * torch.log2(table.abs() + 1.0) / math.log2(8)


def _variants(x: Tensor, tables: Iterator[Tensor]) -> Iterator[Tensor]:
    """Tables, and the same with a padding token's row of zeros, as x has, and of a given spread."""
    blank = [start for start in _STARTS if start < len(x) and not x[start].any()]
    # As PatchTST has it (Nie 2023).
    spread = math.isclose(float(x.std()), 0.1, rel_tol=0.01)
    for table in tables:
        yield table
        for start in blank:
            yield table.index_fill(0, torch.tensor(start), 0)
        if spread:
            centred = table - table.mean()
            yield centred / (centred.std() * 10)


def _sines(n: int, m: int) -> Iterator[Tensor]:
    """Sines and cosines of places [n, m], in turn or in halves (Vaswani 2017)."""
    for frequencies in _frequencies(m // 2, _BASES[:1]) if m % 2 == 0 else ():
        for d in _FLOATS:
            angles = torch.arange(n, dtype=d)[:, None] * frequencies.to(d)
            for pair in itertools.permutations((angles.sin(), angles.cos())):
                yield torch.stack(pair, 2).flatten(1)
                yield torch.cat(pair, 1)
    for d, frequencies in itertools.product(_FLOATS, _frequencies(m, _BASES)):
        angles = torch.arange(n, dtype=d)[:, None] * frequencies.to(d)
        yield angles.sin()
        yield angles.cos()
