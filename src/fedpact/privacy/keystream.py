"""Uniform words from a key, and what draws make of them: Poisson batches and normal numbers.

Words of 64 bits are AES-256's in counter mode: what GCM (NIST SP 800-38D) makes of zeros, as
processors do that fastest. Whoever holds a key sees that none of its words is used twice.

Batches compare whole multiples of 2^-53 with the rate: a record is in with probability
floor(2^53 q) 2^-53, at most q. Normal numbers are Box and Muller's, in pairs of equal length r:

    r = sqrt(-2 ln U),  z = r cos Θ and r sin Θ
    with t = tan(Θ/2):  cos Θ = 2/(1 + t²) - 1,  sin Θ = t · 2/(1 + t²)

    type     U                                Θ                              |z| at most
    float64  (2k + 1) 2^-53 for 2^52 whole k  2^52 equal steps               8.58
    float32  (2k + 1) 2^-32 for 2^31 whole k  2^32 equal steps, in float32   6.66

U is never 0, so no number is infinite. Beyond 8.58 a normal number lies with probability 1e-17,
beyond 6.66 with 3e-11: with a million coordinates and a thousand releases that is a matter of
course, and its absence would cost part of δ. So float32 is for simulations, in a third of the time.
"""

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, cast

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

# Words that are worked on at once. With the intermediate results they stay in the cache, and each
# operation is long enough for several threads to take turns with the interpreter.
CHUNK: Final = 1 << 17
# Where GCM's counter of blocks of 16 bytes would end, in words of 8 (SP 800-38D, 5.2.1.1).
LONGEST: Final = 2 * (2**32 - 2)

_ZEROS: Final = memoryview(bytes(8 * CHUNK))
# The upper 12 bits of a float64 in [1, 2); the others are then uniform there.
_ONE: Final = np.uint64(0x3FF0_0000_0000_0000)
_NOT_NEGATIVE: Final = np.uint32(0x7FFF_FFFF)
# numpy's own logarithm and tangent are all vectorised with AVX-512 only, torch's always.
_NUMPY_IS_FAST: Final = torch.backends.cpu.get_cpu_capability() == "AVX512"

from_numpy = cast(Callable[[NDArray[Any]], Tensor], torch.from_numpy)  # pyright: ignore[reportUnknownMemberType]

Words = NDArray[np.uint64]
Floats = NDArray[np.floating[Any]]


class Source(Protocol):
    """Where words come from."""

    def words(self, count: int) -> Words:
        """Return uint64 [count], count <= CHUNK, to be written over by whoever asked."""
        ...


class _Room(threading.local):
    """Each thread's own: where words are written, and what is in between them and normal numbers.

    Two threads that draw have two rooms, and one that draws for many keys has one.
    """

    def __init__(self) -> None:
        # The cipher wants room for one more block than it writes.
        self.bytes = bytearray(8 * CHUNK + 16)
        self.words = np.frombuffer(self.bytes, dtype=np.uint64, count=CHUNK)
        self.between = np.empty((2, CHUNK // 2))


_room = _Room()


class KeyStream:
    """The words that belong to a key of 32 bytes, in order."""

    def __init__(self, key: bytes) -> None:
        self.rekey(key)

    def rekey(self, key: bytes) -> None:
        """Begin with the words of another key."""
        # A key is used once, so any fixed nonce will do.
        self._encryptor = Cipher(algorithms.AES(key), modes.GCM(bytes(12))).encryptor()

    def words(self, count: int) -> Words:
        """See Source. A view, which the thread's next call writes over, whatever its key."""
        self._encryptor.update_into(_ZEROS[: 8 * count], _room.bytes)
        return _room.words[:count]


def poisson(source: Source, records: int, rate: float) -> Tensor:
    """Return the indices of a Poisson batch of 0, ..., records - 1, in order, for rate < 1."""
    # 2^53 rate is exact, and so is comparing it with whole numbers up to 2^53.
    limit = np.uint64(math.floor(math.ldexp(rate, 53)))
    chosen = [np.empty(0, dtype=np.int64)]
    for start in range(0, records, CHUNK):
        words = source.words(min(CHUNK, records - start))
        chosen.append(np.flatnonzero(np.right_shift(words, 11, out=words) < limit) + start)
    return from_numpy(np.concatenate(chosen))


def normals(source: Source, size: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield `size` standard normal numbers, part by part; the next part overwrites the last.

    dtype: float64, or anything else for float32.
    """
    double = dtype == torch.float64
    most = CHUNK if double else 2 * CHUNK
    for start in range(0, size, most):
        count = min(most, size - start)
        if double:
            z = _of_52_bits(source.words(count + count % 2), _room.between)
        else:
            words = source.words((count + 1) // 2).view(np.uint32)
            z = _of_31_bits(words, _room.between.view(np.float32))
        yield from_numpy(z[:count])


def _of_52_bits(words: Words, between: Floats) -> Floats:
    """Return standard normal numbers [n] in the place of uniform words [n], n even.

    between: float64 [2, n / 2] or more, whose content does not matter.
    """
    np.right_shift(words, 12, out=words)
    np.bitwise_or(words, _ONE, out=words)
    z = words.view(np.float64)
    half = len(z) // 2
    first, second = z[:half], z[half:]
    r, twice = between[:, :half]
    first -= 1 - 2.0**-53
    _log(first)
    first *= -2
    np.sqrt(first, out=r)
    second -= 1.5
    second *= math.pi
    return _turned(z, r, twice)


def _of_31_bits(words: NDArray[np.uint32], between: Floats) -> Floats:
    """The same in float32, of words of 32 bits."""
    z, whole = words.view(np.float32), words.view(np.int32)
    half = len(z) // 2
    r, twice = between[:, :half]
    np.bitwise_and(words[:half], _NOT_NEGATIVE, out=words[:half])
    np.copyto(r, whole[:half], casting="unsafe")
    np.copyto(z[half:], whole[half:], casting="unsafe")
    r += np.float32(0.5)
    r *= np.float32(2.0**-31)
    _log(r)
    r *= np.float32(-2)
    np.sqrt(r, out=r)
    z[half:] *= np.float32(math.pi * 2.0**-32)
    return _turned(z, r, twice)


def _turned(z: Floats, r: Floats, twice: Floats) -> Floats:
    """Write r cos Θ and r sin Θ to the two halves of z, whose second half holds Θ/2."""
    first, second = z[: len(r)], z[len(r) :]
    _tan(second)
    np.multiply(second, second, out=twice)
    twice += 1
    np.divide(r, twice, out=twice)
    twice += twice
    second *= twice
    np.subtract(twice, r, out=first)
    return z


def _log(x: Floats) -> None:
    if _NUMPY_IS_FAST:
        np.log(x, out=x)
    else:
        from_numpy(x).log_()


def _tan(x: Floats) -> None:
    if _NUMPY_IS_FAST:
        np.tan(x, out=x)
    else:
        from_numpy(x).tan_()
