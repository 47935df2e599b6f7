"""Whole numbers as bytes: the same ones come back, in as few bits as noise has, or nothing does."""

import math
import struct

import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from fedpact.algorithms.wrappers import integers
from fedpact.common.errors import InputError
from fedpact.common.randomness.seeded import seeded_generator

WHOLE = st.integers(-(2**63), 2**63 - 1)


@given(
    st.lists(WHOLE | st.integers(-300, 300), min_size=1, max_size=50), st.floats(allow_nan=False)
)
def test_encoded_values_are_decoded(codes, step):
    codes = torch.tensor(codes, dtype=torch.int64)
    got, again = integers.unpack_codes(integers.pack_codes(codes, step), len(codes))
    assert torch.equal(got, codes)
    assert again == step


def normal(name, size, deviation):
    z = torch.randn(size, generator=seeded_generator("integers", name), dtype=torch.float64)
    return z.mul_(deviation).add_(0.5).floor_().long()


@pytest.mark.parametrize(("deviation", "most"), [(4.0, 4.15), (12.0, 5.72), (1000.0, 13.0)])
def test_noise_takes_its_entropy_and_little_more(deviation, most):
    """The entropy of a rounded normal is log2(deviation sqrt(2πe)) as soon as it is 1 or more."""
    codes = normal("noise", 200_000, deviation)
    bits = 8 * len(integers.pack_codes(codes, 1.0)) / len(codes)
    assert math.log2(deviation * math.sqrt(2 * math.pi * math.e)) < bits + 0.01 < most + 0.01


def test_one_large_number_does_not_make_all_of_them_long():
    codes = normal("outlier", 100_000, 4.0)
    short = len(integers.pack_codes(codes, 1.0))
    codes[7] = 10**9
    assert len(integers.pack_codes(codes, 1.0)) < 1.02 * short


def framed(raw, **how):
    return struct.pack("<d", 1.0) + zstandard.ZstdCompressor(**how).compress(raw)


GOOD = framed(bytes(10))
NO_SIZE = struct.pack("<d", 1.0) + zstandard.ZstdCompressor(write_content_size=False).compress(
    bytes(10)
)


@pytest.mark.parametrize(
    "block",
    [
        b"",
        GOOD[:8],
        GOOD[:-1],
        GOOD + b"\0",
        GOOD + GOOD[8:],
        b"\0" * 40,
        NO_SIZE,
        framed(bytes(9)),
        framed(bytes(11)),
        framed(bytes(90)),
        framed(bytes(2**24)),
    ],
)
def test_bytes_that_encode_did_not_write_are_refused(block):
    vector = torch.frombuffer(bytearray(block), dtype=torch.uint8) if block else torch.zeros(0)
    with pytest.raises(InputError, match="instead of a block of integers"):
        integers.unpack_codes(vector.to(torch.uint8), 10)


def test_nothing_is_unpacked_that_is_longer_than_expected(monkeypatch):
    """The length that a frame claims is looked at before a byte of it is unpacked."""

    class Never:
        def decompress(self, *args, **kwargs):
            raise AssertionError("it was unpacked")

    monkeypatch.setattr(integers._own, "decompressor", Never())
    bomb = torch.frombuffer(bytearray(framed(bytes(2**26))), dtype=torch.uint8)
    assert len(bomb) < 10_000
    with pytest.raises(InputError, match="says it holds 67108864 bytes, for 1000 numbers"):
        integers.unpack_codes(bomb, 1000)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
def test_other_types_and_shapes_are_refused(dtype):
    block = torch.frombuffer(bytearray(GOOD), dtype=torch.uint8)
    for other in (block.to(dtype), block.reshape(1, -1)):
        with pytest.raises(InputError, match="a vector of"):
            integers.unpack_codes(other, 10)


def test_a_vector_that_diverged_is_seen():
    for bad in (math.nan, math.inf):
        codes, step = integers.quantise(torch.tensor([1.0, bad]), 0.1)
        got, again = integers.unpack_codes(integers.pack_codes(codes, step), 2)
        assert bool(integers.apply_codes(torch.zeros(2), got, again).isnan().all())


@pytest.mark.parametrize("x", [[0.0], [0.0, 0.0, 1e-30], [1e300, 1.0, 0.0], [1e-300, 0.0]])
def test_any_numbers_have_a_step(x):
    x = torch.tensor(x, dtype=torch.float64)
    codes, step = integers.quantise(x, integers.step_of(x))
    off = integers.apply_codes(torch.zeros_like(x), codes, step) - x
    assert float(off.abs().max()) <= 0.5 * step * (1 + 1e-9)
