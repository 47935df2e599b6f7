"""Integers on the wire: their code, the linear quantiser, and the weights of released noise.

block = step (8 bytes) · zstd(first bytes of all codes, then their second ones, ...)

A code c is written as 2c, or -2c - 1 if it is negative, so small codes have second bytes of 0,
which cost nothing. Zstandard compresses normal integers of deviation 4 to 4.10 bits each; their
entropy is log2(4 sqrt(2πe)) = 4.05. A block does not say how long its content is: the expected
vector does, and a block that claims another length is refused before it is decompressed.

With the trajectory held fixed, every algorithm's reply is a sum of released gradients with public
weights (-η for each of FedAvg's). They are computed by running the algorithm's local part on unit
vectors: with gradients e_1, e_2, ..., coordinate k of the reply is the weight of the k-th.
"""

import math
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import repeat
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from fedpact.algorithms.wrappers.base import Method, MethodWrapper
from fedpact.algorithms.wrappers.optimizers import Stepped
from fedpact.common.errors import InputError
from fedpact.common.messages import State, Task
from fedpact.common.params import from_numpy
from fedpact.per_sample.clipping import UNIFORM, Weighting
from fedpact.privacy.oracle import Batch, EmptyOracle

_Floats = NDArray[np.floating[Any]]

_STEP: Final = struct.Struct("<d")
_LONGEST_CODE: Final = 8
_LARGEST: Final = 2.0**52
"""Up to here, float64 represents halves."""

_KINDS: Final = {np.int8: 2**7 - 1, np.int16: 2**15 - 1, np.int32: 2**31 - 1, np.int64: _LARGEST}
"""Type -> largest code."""

_PART: Final = 1 << 15

DEFAULT_STEPS: Final = 12.0
"""Steps per standard deviation of a vector whose noise is unknown."""

_NORMAL: Final = 1.4826
"""A normal distribution's deviation over the median of its absolute values."""

# Short repetitions in noise occur by chance and cost more bits than they save.
_LEVEL: Final = 1
_LONG: Final = {"min_match": 7, "hash_log": 6}


class _OfThread(threading.local):
    """Compressors by thread: creating one takes longer than compressing a small vector."""

    def __init__(self) -> None:
        how = zstandard.ZstdCompressionParameters.from_level(_LEVEL, **_LONG)
        self.compressor = zstandard.ZstdCompressor(compression_params=how)
        self.decompressor = zstandard.ZstdDecompressor()


_own = _OfThread()


def step_of(x: Tensor, units: float = DEFAULT_STEPS) -> float:
    """Return the deviation of x [d], by its median, over `units`; 1 if x is 0.

    Rounding to it adds 1/(12 units²) of the variance of a normal x. Unlike a mean, the median does
    not depend on the number of threads.
    """
    if not x.numel():
        return 1.0
    lengths, middle = _at_hand(x.abs()), (x.numel() - 1) // 2
    deviation = _NORMAL * float(np.partition(lengths, middle)[middle])
    if not deviation > 0:
        deviation = float(np.sqrt(np.square(lengths, dtype=float).mean()))
    # A denormal deviation may underflow.
    return deviation / units if deviation / units > 0 else 1.0


def quantise(x: Tensor, step: float, start: Tensor | None = None) -> tuple[Tensor, float]:
    """Return floor((x - start)/step + 1/2) [d], and the step, enlarged if codes would overflow.

    start: [d], 0 by default. The codes have the smallest signed type that holds them. If x has NaN
    or infinity, they are 0 and the step is NaN.
    """
    source, base = _at_hand(x), None if start is None else _at_hand(start)
    for kind, largest in _KINDS.items():
        codes = np.empty(len(source), kind)
        if _fill(codes, source, base, step, largest):
            return torch.from_numpy(codes), step
    most = float(np.abs(source if base is None else np.subtract(source, base, dtype=float)).max())
    if not math.isfinite(most):
        return torch.zeros(len(source), dtype=torch.int8), math.nan
    return quantise(x, 2 * most / _LARGEST, start)


def _fill(
    codes: NDArray[Any], x: _Floats, start: _Floats | None, step: float, largest: float
) -> bool:
    """Write floor((x - start)/step + 1/2) to codes [d]; return False if one exceeds `largest`.

    Part by part, so that intermediate results stay in the processor's cache.
    """
    room = np.empty(min(_PART, len(x)))
    for part in _parts(len(x)):
        whole = room[: len(x[part])]
        np.subtract(x[part], 0 if start is None else start[part], out=whole)
        whole /= step
        whole += 0.5
        np.floor(whole, out=whole)
        # Also false for NaN.
        if not -largest <= whole.min() <= whole.max() <= largest:
            return False
        np.copyto(codes[part], whole, casting="unsafe")
    return True


def apply_codes(start: Tensor, codes: Tensor, step: float) -> Tensor:
    """Return start + step · codes, in start's type: the same bits on every machine.

    Two float64 operations and one rounding, each defined by IEEE 754.
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
    # numpy vectorises additions, but not left shifts.
    flat = (whole + whole) ^ (whole >> (8 * whole.itemsize - 1))
    planes = flat.view(np.uint8).reshape(-1, whole.itemsize).T
    count = max((i + 1 for i, plane in enumerate(planes) if plane.any()), default=1)
    block = _STEP.pack(step) + _own.compressor.compress(np.ascontiguousarray(planes[:count]).data)
    return torch.from_numpy(np.frombuffer(block, np.uint8).copy())


def unpack_codes(block: Tensor, length: int) -> tuple[Tensor, float]:
    """Return codes [length], of the smallest signed type, and step of a block of `pack_codes`.

    Raises InputError: a malformed block. At most 8 bytes a code are ever decompressed.
    """
    if block.dtype != torch.uint8 or block.dim() != 1 or len(block) <= _STEP.size:
        raise _malformed_error(f"a vector of {block.dtype} with the shape {list(block.shape)}")
    data = block.numpy().tobytes()
    (step,), frame = _STEP.unpack_from(data), data[_STEP.size :]
    try:
        told = zstandard.frame_content_size(frame)
        if length < 1 or told % length or not 1 <= told // length <= _LONGEST_CODE:
            raise _malformed_error(f"a frame that says it holds {told} bytes, for {length} numbers")
        raw = _own.decompressor.decompress(frame, max_output_size=told, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _malformed_error(f"a frame that zstd cannot read ({error})") from None
    if len(raw) != told:
        raise _malformed_error(f"a frame of {len(raw)} bytes that says it holds {told}")
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


def _malformed_error(what: str) -> InputError:
    return InputError(
        f"{what} came instead of a block of integers: check that both ends run the same version"
    )


NoiseWeights = Mapping[str, tuple[float, float]]
"""Name of a reply's vector -> sqrt(Σ c_k²) over gradients of batches, and of openings."""

_SOME_SHARE: Final = 0.5
_NOTHING: Final[Mapping[str, float]] = MappingProxyType({})


def weights(method: Method, task: Task, memory: Mapping[str, float] = _NOTHING) -> NoiseWeights:
    """Return the weights of a reply to a task, of which only numbers and round are used.

    memory: the numbers that the site remembers, such as its own clip, in which its steps are.
    Differences of gradients count as 0, as their noise depends on the trajectory; the weights then
    understate the noise.
    """
    while isinstance(method, MethodWrapper) and not isinstance(method, Stepped):
        method = method.inner
    steps = int(task.numbers.get("local_steps", method.steps()))
    small = replace(
        task, vectors={n: torch.zeros(steps + 1, dtype=torch.float64) for n in task.vectors}
    )
    still, moving = _Units(steps + 1, 0.0), _Units(steps + 1, 1.0)
    begun = State(numbers=dict(memory))
    without = method.local(small, still, begun).vectors
    found = dict[str, tuple[float, float]]()
    for name, vector in method.local(small, moving, begun).vectors.items():
        squares = (vector.double() - without[name].double()).square()
        opened = squares[list(moving.opened)].sum() if moving.opened else torch.zeros(())
        found[name] = math.sqrt((squares.sum() - opened).clamp_min(0)), math.sqrt(opened)
    return found


class _Units(EmptyOracle):
    """An oracle and its batches: the k-th gradient is `length` times the k-th unit vector [d]."""

    sampling_rate = 1e-12  # so that fednova makes the most steps

    def __init__(self, d: int, length: float) -> None:
        self._d, self._length, self._given = d, length, 0
        self.opened = set[int]()

    def batches(self, count: int, *channels: str) -> Iterator[Batch]:
        return repeat(self, count)

    def opening(self, *channels: str) -> Batch:
        self.opened.add(self._given)
        return self

    def gradient(self, w: Tensor, weighting: Weighting = UNIFORM) -> Tensor:
        found = torch.zeros(self._d, dtype=torch.float64)
        found[self._given] = self._length
        self._given += 1
        return found

    def difference(self, w: Tensor, anchor: Tensor, bound: float) -> Tensor:
        return torch.zeros_like(w)

    def loss(self, w: Tensor, bound: float) -> float:
        return _SOME_SHARE * bound

    def below(self, w: Tensor, bound: float, of: str = "loss") -> float:
        return _SOME_SHARE
