"""Words of a ring: packing numbers modulo 2^b, and splitting long numbers into short words."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

RingWords = NDArray[np.uint64 | np.uint32]
"""Numbers modulo 2^64, or modulo 2^32 if fewer bits suffice."""

_AT_A_TIME: Final = 2**16


def centre_words(words: RingWords, width: int) -> NDArray[np.float64]:
    """Return words modulo 2^b as numbers in [-2^(b-1), 2^(b-1)).

    >>> centre_words(np.array([1, 2**16 - 1, 2**15, 2**20], dtype=np.uint64), 16).tolist()
    [1.0, -1.0, -32768.0, 0.0]
    """
    # Two's complement of b bits: the upper half encodes negative numbers.
    low = words.astype(np.int64) & (2**width - 1)
    return np.where(low < 2 ** (width - 1), low, low - 2**width).astype(np.float64)


def pack_bits(words: RingWords, width: int) -> NDArray[np.uint8]:
    """Return the low `width` bits of each word (1 to 32, or 64), concatenated.

    >>> pack_bits(np.array([1, 2, 3], dtype=np.uint64), 16).tolist()
    [1, 0, 2, 0, 3, 0]
    """
    if width == 64:
        return words.astype("<u8").view(np.uint8)
    low = words.astype("<u4")
    # In parts, as each bit takes a byte while it is packed. Parts are multiples of 8 words, so that
    # they end at whole bytes.
    packed: list[NDArray[np.uint8]] = []
    for start in range(0, len(low), _AT_A_TIME):
        some = low[start : start + _AT_A_TIME].view(np.uint8).reshape(-1, 4)
        each = np.unpackbits(some, axis=1, count=width, bitorder="little")
        packed.append(np.packbits(each.reshape(-1), bitorder="little"))
    return np.concatenate(packed) if packed else np.zeros(0, np.uint8)


def unpack_bits(packed: NDArray[np.uint8], width: int) -> RingWords:
    """Return the words that `pack_bits` packed, modulo 2^width; width 8 to 32, or 64.

    Trailing bytes that are less than a word are ignored.
    """
    if width == 64:
        return packed[: len(packed) // 8 * 8].view("<u8")
    count = 8 * len(packed) // width
    found = np.zeros(count, dtype=np.uint32)
    step = _AT_A_TIME * width // 8
    for start in range(0, len(packed), step):
        each = np.unpackbits(packed[start : start + step], bitorder="little")
        some = len(each) // width
        rows = np.packbits(each[: some * width].reshape(some, width), axis=1, bitorder="little")
        # Pad each word to four bytes, to view them as numbers.
        whole = np.zeros((some, 4), np.uint8)
        whole[:, : rows.shape[1]] = rows
        at = start // step * _AT_A_TIME
        found[at : at + some] = whole.view("<u4").reshape(-1)
    return found


def split_words(words: RingWords, width: int) -> RingWords:
    """Return each word of 64 bits as several of `width` bits, the lowest first.

    n of them can be summed in words of width + log2 n bits.

    >>> split_words(np.array([2**40 + 5], dtype=np.uint64), 20).tolist()
    [5, 0, 1, 0]
    """
    shifts = np.arange(0, 64, width, dtype=np.uint64)
    parts = (words[:, None] >> shifts) & np.uint64(2**width - 1)
    return parts.astype(np.uint32).reshape(-1)


def join_words(parts: RingWords, width: int) -> RingWords:
    """Return the words, modulo 2^64, that `split_words` split, from these parts or sums of them."""
    shifts = np.arange(0, 64, width, dtype=np.uint64)
    return (parts.reshape(-1, len(shifts)).astype(np.uint64) << shifts).sum(1, dtype=np.uint64)
