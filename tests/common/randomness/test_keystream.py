"""Uniform words, and what is made of them: batches that never exceed their rate, normal numbers."""

import math

import mpmath
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from fedpact.common.randomness import keystream
from fedpact.common.randomness.keystream import KeyStream, normals, poisson

DOUBLE, FLOAT = torch.float64, torch.float32
ALL = 2**64 - 1
HALF = 2**32 - 1
# By numpy's logarithm and tangent and by torch's: a machine uses one of them.
both = pytest.mark.parametrize("numpy_is_fast", [True, False])


class Fixed:
    """A source that is one word for ever, or these words over and over."""

    def __init__(self, *words):
        self.pattern = np.array(words, dtype=np.uint64)

    def words(self, count):
        return np.resize(self.pattern, count)


class Narrow:
    """The same of words of 32 bits."""

    def __init__(self, *words):
        self.pattern = np.array(words, dtype=np.uint32)

    def words(self, count):
        return np.resize(self.pattern, 2 * count).view(np.uint64)


def drawn(source, size, dtype=DOUBLE):
    parts = [part.clone() for _, part in normals(source, size, dtype)]
    return torch.cat([torch.empty(0, dtype=dtype), *parts])


def test_the_stream_is_aes_256_in_counter_mode():
    """Against single blocks of the cipher, from 0 on, and from a place on (SP 800-38A)."""
    key = bytes(range(32))
    stream = KeyStream(key)
    block = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    for place in (bytes(12), b"another here"):
        blocks = b"".join(place + counter.to_bytes(4, "big") for counter in range(32))
        expected = np.frombuffer(block.update(blocks), dtype=np.uint64)
        stream.seek(place)
        assert [*stream.words(30).tolist(), *stream.words(34).tolist()] == expected.tolist()
    assert np.array_equal(KeyStream(key).words(9).copy(), stream.seek(bytes(12)).words(9))


def test_the_rate_is_never_exceeded():
    """The probability is floor(2^53 q) / 2^53 exactly: the words on both sides of the limit."""
    for rate in (1 / 3, 0.1, 0.015, 1 - 2**-53, 2**-53):
        limit = math.floor(rate * 2**53)
        # The lower 11 bits are not looked at.
        inside = poisson(Fixed((limit << 11) - 1), 3, rate)
        outside = poisson(Fixed(limit << 11), 3, rate)
        assert (inside.tolist(), outside.tolist()) == ([0, 1, 2], [])
    # Less than one word in 2^53: never, rather than too often.
    assert poisson(Fixed(0), 3, 1e-17).tolist() == []
    assert poisson(Fixed(2**63), 3, 0.5).tolist() == []
    assert poisson(Fixed(2**63 - 1), 3, 0.5).tolist() == [0, 1, 2]
    assert poisson(Fixed(ALL), 3, 0.999).tolist() == []


@both
def test_extreme_words_give_finite_numbers(monkeypatch, numpy_is_fast):
    """The least and largest integers, and the tangent's pole: no infinity, and the tail's end."""
    monkeypatch.setattr(keystream, "_NUMPY_IS_FAST", numpy_is_fast)
    longest = math.sqrt(2 * 53 * math.log(2))
    # U is half a unit: the longest radius. Θ = -π.
    zeros = drawn(Fixed(0), 10)
    assert torch.allclose(zeros[:5], torch.full((5,), -longest, dtype=torch.float64))
    assert float(zeros[5:].abs().max()) < 1e-14
    # U is half a unit below 1: the shortest radius, and not 0.
    shortest = float(drawn(Fixed(ALL), 10).abs().max())
    assert shortest == pytest.approx(math.sqrt(2 * 2**-53), rel=1e-6)
    half_turn = [2**63, 2**63 - 1, 2**63 + 1, 2**63 - 4096, 2**63 + 4096]
    for words in ((0, ALL), (ALL, 0), (0, 2**63 - 1, 1), half_turn, [4095, 4096, ALL - 4095]):
        for turn in range(len(words)):
            z = drawn(Fixed(*words[turn:], *words[:turn]), 12)
            assert z.isfinite().all()
            assert float(z.abs().max()) <= longest + 1e-12


class Later:
    """Further words, by call: those that are there, and then 2^63. V = 1/2 + 2^-53 ends it."""

    def __init__(self, *calls):
        self.calls = list(calls)

    def __call__(self, count):
        words = self.calls.pop(0) if self.calls else []
        return np.array([*words, *[2**63] * count][:count], dtype=np.uint64)


@both
def test_small_numbers_have_bits_below_the_first_52(monkeypatch, numpy_is_fast):
    """U = (k + V) 2^-52 where U < 2^-12, V a number of the same kind; to 5e-16 of r."""
    monkeypatch.setattr(keystream, "_NUMPY_IS_FAST", numpy_is_fast)
    limit = 2**40
    firsts = [limit - 1, limit, 0, 5, 0, 0]
    seconds = [limit, 2**52 - 1, 9, 0, 0]  # of all but the first number that is not small
    thirds, fourths = [limit + 1, 3, 0], [2**51, 0]
    with mpmath.workdps(70):
        half, step = mpmath.mpf("0.5"), mpmath.mpf(2) ** -52
        end = (2**51 + half) * step
        third = [(limit + 1 + half) * step, (3 + end) * step, (0 + (0 + end) * step) * step]
        second = [(k + half) * step for k in seconds[:2]]
        second += [(k + v) * step for k, v in zip(seconds[2:], third, strict=True)]
        inside = [second[0], half, *second[1:]]
        expected = [
            mpmath.sqrt(-2 * mpmath.log((k + v) * step))
            for k, v in zip(firsts, inside, strict=True)
        ]
        # Half a turn: z = -r.
        words = [k << 12 for k in firsts] + [0] * 6
        later = Later(*([k << 12 for k in more] for more in (seconds, thirds, fourths)))
        found = next(normals(Fixed(*words), 12, DOUBLE, later))[1].tolist()
        for z, r in zip(found, expected, strict=False):
            assert abs(z + r) <= 5e-16 * r
    assert -found[5] == pytest.approx(math.sqrt(2 * 209 * math.log(2)), rel=1e-3)
    assert later.calls == []


@both
def test_pairs_are_box_mullers_to_the_stated_error(monkeypatch, numpy_is_fast):
    """U = (2k + 1) 2^-53 and Θ = 2π (m - 2^51) 2^-52 from 52 bits each: 5e-16 of r (see grid)."""
    monkeypatch.setattr(keystream, "_NUMPY_IS_FAST", numpy_is_fast)
    words = np.random.default_rng(0).integers(0, 2**64, 2000, dtype=np.uint64)
    words[:4] = words[-4:] = 0, ALL, 2**63, 2**63 + 4096
    found = drawn(Fixed(*words.tolist()), 2000).tolist()
    with mpmath.workdps(40):
        for i in range(1000):
            k, m = int(words[i]) >> 12, int(words[1000 + i]) >> 12
            z, other = found[i], found[1000 + i]
            r = mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(2 * k + 1) / 2**53))
            angle = 2 * mpmath.pi * mpmath.mpf(m - 2**51) / 2**52
            assert abs(z - r * mpmath.cos(angle)) <= 5e-16 * r
            assert abs(other - r * mpmath.sin(angle)) <= 5e-16 * r


@both
def test_numbers_of_32_bits_are_box_mullers_too(monkeypatch, numpy_is_fast):
    """U = (2k + 1) 2^-32, Θ = 2π m 2^-32, m from -2^31, both rounded to float32: 1e-6 of r."""
    monkeypatch.setattr(keystream, "_NUMPY_IS_FAST", numpy_is_fast)
    words = np.random.default_rng(1).integers(0, 2**32, 2000, dtype=np.uint32)
    # The longest and the shortest radius, half turns, the tangent's poles and what is around them.
    edges = 0, HALF, 2**31, 2**31 - 1, 2**31 + 1, 1, 2**31 - 128, 2**31 + 128
    words[:8], words[1000:1008], words[8:16], words[1008:1016] = edges, 7, 7, edges
    found = drawn(Narrow(*words.tolist()), 2000, FLOAT)
    assert found.dtype == FLOAT
    turned = words[1000:].view(np.int32).astype(np.float32)
    with mpmath.workdps(40):
        for i, m in enumerate(turned.tolist()):
            u = np.float32(int(words[i]) % 2**31) + np.float32(0.5)
            r = mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(float(u)) / 2**31))
            angle = 2 * mpmath.pi * mpmath.mpf(m) / 2**32
            assert abs(found[i].item() - r * mpmath.cos(angle)) <= 1e-6 * r
            assert abs(found[1000 + i].item() - r * mpmath.sin(angle)) <= 1e-6 * r
    longest = math.sqrt(2 * 32 * math.log(2))
    assert float(found.abs().max()) <= longest * (1 + 1e-6)
    assert 2.5e-11 < 2 * stats.norm.sf(longest) < 3e-11


@pytest.mark.parametrize("dtype", [FLOAT, DOUBLE])
@pytest.mark.parametrize("size", [0, 1, 2, 3, *(2**k + i for k in (17, 18) for i in (-1, 0, 1))])
def test_numbers_do_not_depend_on_how_many_follow(size, dtype):
    """Whole parts are the same; the last one pairs its numbers by its own length."""
    key = bytes(32)
    each = keystream.CHUNK * (2 if dtype == FLOAT else 1)
    one, more = drawn(KeyStream(key), size, dtype), drawn(KeyStream(key), size + each, dtype)
    assert (len(one), one.dtype) == (size, dtype)
    # Of 2^24 values and less, some come twice.
    assert dtype == FLOAT or len(one.unique()) == size
    whole = size // each * each
    assert torch.equal(one[:whole], more[:whole])
