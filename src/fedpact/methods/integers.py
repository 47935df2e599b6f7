"""Whole numbers times a step, as few bytes: how vectors cross the wire under [compression] "grid".

    block = step (8 bytes) · zstd(first bytes of all codes, then their second ones, ...)

A code c is written as 2c, or -2c - 1 where it is negative, so that the second bytes are 0 where
codes are small, and cost nothing. Of whole numbers that are normal with deviation 4 zstd makes 4.10
bits each, where their entropy is log2(4 sqrt(2πe)) = 4.05. No block says how long it is once it is
opened: that follows from the length of the vector that is expected, and whatever has another is
refused unopened.
"""

import math
import struct
import threading
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from fedpact.errors import InputError
from fedpact.params import from_numpy

_Floats = NDArray[np.floating[Any]]

_STEP: Final = struct.Struct("<d")
_LONGEST_CODE: Final = 8
_LARGEST: Final = 2.0**52
"""Float64 numbers up to here have halves."""

_KINDS: Final = {np.int8: 2**7 - 1, np.int16: 2**15 - 1, np.int32: 2**31 - 1, np.int64: _LARGEST}
"""The types of codes, and their largest ones."""

_PART: Final = 1 << 15

DEFAULT_STEPS: Final = 12.0
"""How many steps the deviation of a vector has where nothing is known of its noise."""

_NORMAL: Final = 1.4826
"""A normal law's deviation over the median of its absolute values."""

# What repeats in noise is found by chance, and costs more bits than it saves: look for long
# repetitions only, and for few.
_LEVEL: Final = 1
_LONG: Final = {"min_match": 7, "hash_log": 6}


class _OfThread(threading.local):
    """What each thread compresses with: making one takes longer than a small model's vector."""

    def __init__(self) -> None:
        how = zstandard.ZstdCompressionParameters.from_level(_LEVEL, **_LONG)
        self.compressor = zstandard.ZstdCompressor(compression_params=how)
        self.decompressor = zstandard.ZstdDecompressor()


_own = _OfThread()


def step_of(x: Tensor, units: float = DEFAULT_STEPS) -> float:
    """Return the deviation of x [d], by its median, over `units`; 1 where x is 0.

    Rounding to it adds 1/(12 units²) of the variance of a normal x. The median is the same on any
    number of threads.
    """
    lengths = x.detach().abs()
    deviation = _NORMAL * float(lengths.median()) if x.numel() else 0.0
    if not deviation > 0:
        deviation = float(lengths.double().square().mean().sqrt()) if x.numel() else 0.0
    # A deviation of a few denormals has no quarter.
    return deviation / units if deviation / units > 0 else 1.0


def quantise(x: Tensor, step: float, start: Tensor | None = None) -> tuple[Tensor, float]:
    """Return floor((x - start)/step + 1/2) [d], and the step: a larger one where codes had no room.

    start: [d], 0 by default. The codes are of the smallest signed type that holds them all. Of an x
    with NaN or infinity they are 0 and the step is NaN, so that it is seen again.
    """
    source, base = _at_hand(x), None if start is None else _at_hand(start)
    for kind, largest in _KINDS.items():
        codes = np.empty(len(source), kind)
        if _filled(codes, source, base, step, largest):
            return torch.from_numpy(codes), step
    most = float(np.abs(source if base is None else np.subtract(source, base, dtype=float)).max())
    if not math.isfinite(most):
        return torch.zeros(len(source), dtype=torch.int8), math.nan
    return quantise(x, 2 * most / _LARGEST, start)


def _filled(
    codes: NDArray[Any], x: _Floats, start: _Floats | None, step: float, largest: float
) -> bool:
    """Write floor((x - start)/step + 1/2) to codes [d]; False where one is longer than `largest`.

    Part by part, so that what is in between stays in the processor's cache.
    """
    room = np.empty(min(_PART, len(x)))
    for part in _parts(len(x)):
        whole = room[: len(x[part])]
        np.subtract(x[part], 0 if start is None else start[part], out=whole)
        whole /= step
        whole += 0.5
        np.floor(whole, out=whole)
        # False for NaN, too.
        if not -largest <= whole.min() <= whole.max() <= largest:
            return False
        np.copyto(codes[part], whole, casting="unsafe")
    return True


def apply_codes(start: Tensor, codes: Tensor, step: float) -> Tensor:
    """Return start + step · codes, of start's type: the same bits at whoever has all three.

    Two operations in float64 and one rounding, each of them exact to the bit by IEEE 754.
    """
    source, whole = _at_hand(start), codes.numpy()
    target, room = np.empty_like(source), np.empty(min(_PART, len(source)))
    for part in _parts(len(source)):
        sums = room[: len(source[part])]
        np.copyto(sums, whole[part])
        sums *= step
        sums += source[part]
        target[part] = sums
    return from_numpy(target).to(start.device)


def pack_codes(codes: Tensor, step: float) -> Tensor:
    """Return the block of codes [d], of any signed type, and their step: uint8 [n]."""
    whole = codes.numpy()
    # numpy adds vectorised, and shifts to the left one by one.
    flat = (whole + whole) ^ (whole >> (8 * whole.itemsize - 1))
    planes = flat.view(np.uint8).reshape(-1, whole.itemsize).T
    count = max((i + 1 for i, plane in enumerate(planes) if plane.any()), default=1)
    block = _STEP.pack(step) + _own.compressor.compress(np.ascontiguousarray(planes[:count]).data)
    return torch.from_numpy(np.frombuffer(block, np.uint8).copy())


def unpack_codes(block: Tensor, length: int) -> tuple[Tensor, float]:
    """Return codes [length], of the smallest signed type, and step of what `pack_codes` made.

    Raises InputError: it made no such block. Nothing longer than 8 bytes a code is ever unpacked.
    """
    if block.dtype != torch.uint8 or block.dim() != 1 or len(block) <= _STEP.size:
        raise _malformed(f"a vector of {block.dtype} with the shape {list(block.shape)}")
    data = block.numpy().tobytes()
    (step,), frame = _STEP.unpack_from(data), data[_STEP.size :]
    try:
        told = zstandard.frame_content_size(frame)
        if length < 1 or told % length or not 1 <= told // length <= _LONGEST_CODE:
            raise _malformed(f"a frame that says it holds {told} bytes, for {length} numbers")
        raw = _own.decompressor.decompress(frame, max_output_size=told, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _malformed(f"a frame that zstd cannot read ({error})") from None
    if len(raw) != told:
        raise _malformed(f"a frame of {len(raw)} bytes that says it holds {told}")
    count = told // length
    size = 1 << (count - 1).bit_length()
    flat = np.zeros((length, size), np.uint8)
    flat[:, :count] = np.frombuffer(raw, np.uint8).reshape(count, length).T
    whole = flat.view(f"<u{size}")[:, 0]
    signs = whole & 1
    whole >>= 1
    whole ^= np.negative(signs, out=signs)
    return torch.from_numpy(whole.view(f"<i{size}")), float(step)


def _at_hand(x: Tensor) -> _Floats:
    return x.detach().cpu().numpy()


def _parts(length: int) -> Iterator[slice]:
    return (slice(start, start + _PART) for start in range(0, length, _PART))


def _malformed(what: str) -> InputError:
    return InputError(
        f"{what} came where whole numbers are expected: expected what integers.encode wrote; check "
        "that both ends run the same version"
    )
