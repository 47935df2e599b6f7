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
from typing import Final

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from fedpact.errors import InputError

_STEP: Final = struct.Struct("<d")
_LONGEST_CODE: Final = 8
_LARGEST: Final = 2.0**52
"""Float64 numbers up to here have halves."""

EXACT: Final = 12.0
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


def step_of(x: Tensor, units: float = EXACT) -> float:
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


def coded(x: Tensor, step: float) -> tuple[Tensor, float]:
    """Return floor(x/step + 1/2), int64 [d], and the step: a larger one where codes had no room.

    Of an x with NaN or infinity the codes are 0 and the step is NaN, so that it is seen again.
    """
    most = float(x.detach().abs().max()) if x.numel() else 0.0
    if not math.isfinite(most):
        return torch.zeros_like(x, dtype=torch.int64, device="cpu"), math.nan
    step = max(step, most / _LARGEST)
    return (x.detach().double() / step).add_(0.5).floor_().long().cpu(), step


def moved(start: Tensor, codes: Tensor, step: float) -> Tensor:
    """Return start + step · codes, of start's type: the same bits at whoever has all three.

    Two operations in float64 and one rounding, each of them exact to the bit by IEEE 754.
    """
    return (start.double() + codes.to(start.device).double() * step).to(start.dtype)


def encode(codes: Tensor, step: float) -> Tensor:
    """Return the block of int64 codes [d] and their step, uint8 [n]."""
    whole = codes.numpy()
    flat = ((whole << 1) ^ (whole >> 63)).astype("<u8", copy=False)
    count = max(1, (int(flat.max()).bit_length() + 7) // 8) if len(flat) else 1
    planes = flat.view(np.uint8).reshape(-1, 8).T[:count]
    block = _STEP.pack(step) + _own.compressor.compress(planes.tobytes())
    return torch.from_numpy(np.frombuffer(block, np.uint8).copy())


def decode(block: Tensor, length: int) -> tuple[Tensor, float]:
    """Return codes, int64 [length], and step of what `encode` made.

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
    flat = _of_planes(np.frombuffer(raw, np.uint8).reshape(-1, length))
    whole = (flat >> np.uint64(1)).astype(np.int64) ^ -(flat & np.uint64(1)).astype(np.int64)
    return torch.from_numpy(whole), float(step)


def _of_planes(planes: NDArray[np.uint8]) -> NDArray[np.uint64]:
    flat = planes[0].astype(np.uint64)
    for place, plane in enumerate(planes[1:], start=1):
        flat |= plane.astype(np.uint64) << np.uint64(8 * place)
    return flat


def _malformed(what: str) -> InputError:
    return InputError(
        f"{what} came where whole numbers are expected: expected what integers.encode wrote; check "
        "that both ends run the same version"
    )
