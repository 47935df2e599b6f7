"""Uniform words from a key, and what draws make of them: Poisson batches and normal numbers.

Words of 64 bits are AES-256's in counter mode (NIST SP 800-38A). The counter's first 12 bytes are a
place, its last 4 count blocks from there: whoever holds a key and goes to each place once sees that
none of its words is used twice.

Batches compare whole multiples of 2^-53 with the rate: a record is in with probability
floor(2^53 q) 2^-53, at most q. Normal numbers are Box and Muller's, in pairs of equal length r:

    r = sqrt(-2 ln U),  z = r cos Θ and r sin Θ
    with t = tan(Θ/2):  cos Θ = 2/(1 + t²) - 1,  sin Θ = t · 2/(1 + t²)

    type     U                                Θ                              |z| at most
    float64  (2k + 1) 2^-53 for 2^52 whole k  2^52 equal steps               8.58, see below
    float32  (2k + 1) 2^-32 for 2^31 whole k  2^32 equal steps, in float32   6.66

U is never 0, so no number is infinite. Beyond 8.58 a normal number lies with probability 1e-17,
beyond 6.66 with 3e-11. Who sees a number there, from a sum with a record, knows that the record
is in: with σ of 1 or less, or a small rate's, that is more than many a δ. So float32 is for
simulations, in a third of the time; and for a deployment's float64 there are `Further` words, with
which there is no end: U below 2^-12 is (k + V) 2^-52, V again of such a law, so that steps of U are
never more than 2^-40 of it.
"""

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, Self

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from fedpact.common.params import from_numpy, one_thread

# Words that are worked on at once. With the intermediate results they stay in the cache, and each
# operation is long enough for several threads to take turns with the interpreter.
CHUNK: Final = 1 << 17
# From one place to the next, in words.
MAX_STREAM_WORDS: Final = 2 * 2**32

_ZEROS: Final = memoryview(bytes(8 * CHUNK))
# The upper 12 bits of a float64 in [1, 2); the others are then uniform there.
_ONE: Final = np.uint64(0x3FF0_0000_0000_0000)
_NOT_NEGATIVE: Final = np.int32(0x7FFF_FFFF)
# Of numbers below this, one in 4096, steps of 2^-52 are more than 2^-40.
_SMALL: Final = 2.0**-12
# numpy's own logarithm and tangent are all vectorised with AVX-512 only, torch's always. Those are
# asked for on one thread: whoever draws much has threads of its own, and in a fork torch waits for
# ever for the threads that only its parent has.
_NUMPY_IS_FAST: Final = torch.backends.cpu.get_cpu_capability() == "AVX512"

Words = NDArray[np.uint64]
Floats = NDArray[np.floating[Any]]
Further = Callable[[int], Words]
"""(count) -> so many uniform words of 64 bits that nothing else is made of, not in `_room`."""
Parts = Iterator[tuple[slice, Tensor]]
"""Parts of a vector, and a number for each entry of them; the next part overwrites the last."""


class _Room(threading.local):
    """Each thread's own: where words are written, and what comes between them and normals."""

    def __init__(self) -> None:
        # The cipher wants room for one more block than it writes.
        self.bytes = bytearray(8 * CHUNK + 16)
        self.words = np.frombuffer(self.bytes, dtype=np.uint64, count=CHUNK)
        self.between = np.empty(CHUNK)


_room = _Room()


class KeyStream:
    """The words that belong to a key of 32 bytes, in order, from place 0 on."""

    def __init__(self, key: bytes) -> None:
        self.rekey(key)

    def rekey(self, key: bytes) -> None:
        """Begin with the words of another key."""
        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def seek(self, place: bytes) -> Self:
        """Go on with the words from a place [12 bytes] on, and return the stream."""
        self._encryptor.reset_nonce(place + bytes(4))
        return self

    def words(self, count: int) -> Words:
        """Return uint64 [count], count <= CHUNK, to be written over by whoever asked. A view of the
        thread's room: later calls write over it."""
        self._encryptor.update_into(_ZEROS[: 8 * count], _room.bytes)
        return _room.words[:count]


def poisson(source: "KeyStream", records: int, rate: float) -> Tensor:
    """Return the indices of a Poisson batch of 0, ..., records - 1, in order, for rate < 1."""
    # 2^53 rate is exact, and so is comparing it with whole numbers up to 2^53.
    limit = np.uint64(math.floor(math.ldexp(rate, 53)))
    parts = [
        _below(source.words(min(CHUNK, records - start)), limit) + start
        for start in range(0, max(records, 1), CHUNK)
    ]
    return from_numpy(np.concatenate(parts) if len(parts) > 1 else parts[0])


def positions(source: "KeyStream", count: int, slots: int) -> Tensor:
    """Return int64 [count], each below `slots`, independently and alike."""
    parts = [
        (source.words(min(CHUNK, count - start)) % np.uint64(slots)).astype(np.int64)
        for start in range(0, max(count, 1), CHUNK)
    ]
    return from_numpy(np.concatenate(parts))


def _below(words: Words, limit: np.uint64) -> NDArray[np.int64]:
    return (np.right_shift(words, 11, out=words) < limit).nonzero()[0]


def normals(
    source: "KeyStream", size: int, dtype: torch.dtype, further: Further | None = None
) -> Parts:
    """Yield `size` standard normal numbers, part by part.

    dtype: float64, or anything else for float32. further: where float64's tail comes from; without
    it, it ends at 8.58.
    """
    double = dtype == torch.float64
    most = CHUNK if double else 2 * CHUNK
    for start in range(0, size, most):
        count = min(most, size - start)
        words = source.words(count + count % 2 if double else (count + 1) // 2)
        yield slice(start, start + count), from_numpy(_pair(words, dtype, further))[:count]


def _pair(words: Words, dtype: torch.dtype, further: Further | None = None) -> Floats:
    """Return standard normal numbers [..., n] in the place of uniform words, of 32 bits or of 64.

    The first half of a row's words are the lengths of its pairs, the second half their angles.
    """
    if dtype != torch.float64:
        return _of_31_bits(words.view(np.uint32))
    z = _from_one(words)
    first, second = _halves(z)
    _middles(first)
    if further is not None:
        _refine(first, further)
    _map("log", first)
    first *= -2
    r, twice = _between(first)
    np.sqrt(first, out=r)
    # Half the angle, in [-π/2, π/2): there the tangent gives sine and cosine by divisions alone.
    second -= 1.5
    second *= math.pi
    return _turn(z, r, twice)


def _from_one(words: Words) -> NDArray[np.float64]:
    """Write numbers in [1, 2) over words, whose 52 random bits are the fraction.

    No conversion, no rounding, no branch.
    """
    np.right_shift(words, 12, out=words)
    np.bitwise_or(words, _ONE, out=words)
    return words.view(np.float64)


def _middles(u: Floats) -> Floats:
    """Take [1, 2) to (0, 1): the middles of 2^52 steps, never 0. Exact: there is a bit more."""
    u -= 1 - 2.0**-53
    return u


def _refine(u: Floats, further: Further) -> None:
    """Put small ones of the numbers u [n] anywhere in their steps of 2^-52, not in the middle."""
    small = np.flatnonzero(u < _SMALL)
    if len(small) == 0:
        return
    inside = _middles(_from_one(further(len(small))))
    # The first of all steps has no end towards 0: there, this number's own steps count.
    _refine(inside, further)
    u[small] = (u[small] - 2.0**-53) + inside * 2.0**-52


def _of_31_bits(words: NDArray[np.uint32]) -> Floats:
    z, (first, second) = words.view(np.float32), _halves(words.view(np.int32))
    lengths, angles = _halves(z)
    r, twice = _between(lengths)
    # A shift would do as well, but AND leaves the type signed, and signed words become floats in
    # one instruction where unsigned ones take several.
    np.bitwise_and(first, _NOT_NEGATIVE, out=first)
    np.copyto(r, first, casting="unsafe")
    np.copyto(angles, second, casting="unsafe")
    # Half a step up, so that no U is 0. Above 2^24 the conversion has rounded already, to even.
    r += np.float32(0.5)
    r *= np.float32(2.0**-31)
    _map("log", r)
    r *= np.float32(-2)
    np.sqrt(r, out=r)
    # The signed words stand for [-2^31, 2^31): again half the angle, in [-π/2, π/2).
    angles *= np.float32(math.pi * 2.0**-32)
    return _turn(z, r, twice)


def _turn(z: Floats, r: Floats, twice: Floats) -> Floats:
    """Write r cos Θ and r sin Θ to the two halves of z, whose second half holds Θ/2."""
    first, second = _halves(z)
    _map("tan", second)
    np.multiply(second, second, out=twice)
    twice += 1
    np.divide(r, twice, out=twice)
    twice += twice
    # With c = 2r/(1 + t²): r sin Θ = t c and r cos Θ = c - r, neither of which needs a table.
    second *= twice
    np.subtract(twice, r, out=first)
    return z


def _halves(rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    half = rows.shape[-1] // 2
    return rows[..., :half], rows[..., half:]


def _between(like: Floats) -> Floats:
    """Return two arrays like this one in the thread's room; their content does not matter."""
    return _room.between.view(like.dtype)[: 2 * like.size].reshape(2, *like.shape)


def _map(function: str, x: Floats) -> None:
    """Write a function of each number, "log" or "tan", over it."""
    if _NUMPY_IS_FAST:
        getattr(np, function)(x, out=x)
    else:
        with one_thread():
            getattr(from_numpy(x), f"{function}_")()
