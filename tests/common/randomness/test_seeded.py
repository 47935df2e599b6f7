"""Draws are reproducible, differ by every part of their key, and have the laws they claim.

The statistical tests are seeded, so they do not fluctuate. Their level is 1e-6 each: that is the
chance that a sound generator was given seeds on which they fail.
"""

import hashlib
import itertools
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedpact.common.randomness.seeded import SeededDraws, seeded_generator

LEVEL = 1e-6
FLOAT = torch.zeros(0)
DOUBLE = torch.zeros(0, dtype=torch.float64)


def test_equal_keys_give_equal_draws():
    one, other = SeededDraws(7, "a", 3), SeededDraws(7, "a", 3)
    assert torch.equal(one.batch(500, 0.3, 2), other.batch(500, 0.3, 2))
    drawn = one.gaussian(9, FLOAT, 2, "loss")
    other.gaussian(100, FLOAT, 1, "loss")
    assert torch.equal(drawn, other.gaussian(9, FLOAT, 2, "loss"))


def test_draws_differ_by_every_part_of_their_key():
    keys = itertools.product((0, 1, 2**32, -1), ("a", "b", "1"), (1, 2), (0, 1, 11))
    first = {}
    for seed, site, number, step in keys:
        draws = SeededDraws(seed, site, number)
        for purpose in ("gradient", "loss", "below", "batch"):
            head = tuple(draws.gaussian(4, DOUBLE, step, purpose).tolist())
            assert first.setdefault(head, (seed, site, number, step, purpose)) == (
                seed,
                site,
                number,
                step,
                purpose,
            )
    batches = {tuple(SeededDraws(0, "a", 1).batch(200, 0.5, t).tolist()) for t in range(50)}
    assert len(batches) == 50


@pytest.mark.parametrize(
    ("one", "other"),
    [((1, 12), (11, 2)), (("a", "b"), ("ab",)), (("a,b",), ("a", "b")), ((1,), ("1",))],
)
def test_keys_are_unambiguous(one, other):
    drawn = [torch.rand(4, generator=seeded_generator(*key)) for key in (one, other, (*one, ""))]
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_all_of_the_generators_state_comes_from_the_key():
    # numpy's own Mersenne Twister, given the 624 words, is the reference: manual_seed would keep
    # no more than 32 bits of the key, and this torch's layout of the state is checked as well.
    key = ("seed", 5, "é")
    digest = hashlib.shake_256(json.dumps(key).encode()).digest(4 * 624)
    twister = np.random.MT19937()
    twister.state = {
        "bit_generator": "MT19937",
        "state": {"key": np.frombuffer(digest, "<u4").astype(np.uint32), "pos": 624},
    }
    words = twister.random_raw(4000).astype(np.int64)
    # A float32 in [0, 1) takes the lower 24 bits of one word.
    drawn = torch.rand(4000, generator=seeded_generator(*key)).double() * 2**24
    assert drawn.tolist() == (words % 2**24).tolist()


@pytest.mark.parametrize("rate", [0.02, 0.37, 0.9])
def test_records_are_sampled_independently_at_their_rate(rate):
    records, steps = 40, 1500
    draws = SeededDraws(3, "site", 1)
    inside = np.zeros((steps, records))
    for step in range(steps):
        inside[step, draws.batch(records, rate, step).numpy()] = 1

    def binomial(count, of, p):
        return stats.binomtest(int(count), of, p).pvalue

    assert binomial(inside.sum(), inside.size, rate) > LEVEL
    # 40 records, each frequency, and every pair of neighbours; levels divided by their number.
    for record in range(records):
        assert binomial(inside[:, record].sum(), steps, rate) > LEVEL / records
        pair = inside[:, record] * inside[:, (record + 1) % records]
        assert binomial(pair.sum(), steps, rate**2) > LEVEL / records
    # The same record in consecutive batches.
    both = (inside[::2] * inside[1::2]).sum()
    assert binomial(both, inside.size // 2, rate**2) > LEVEL
    # Sizes are binomial: their variance is records·q(1-q), where fixed-size batches have 0.
    sizes = inside.sum(1)
    spread = ((sizes - records * rate) ** 2).sum() / (records * rate * (1 - rate))
    # Squares of numbers whose kurtosis is below 5: the sum's standard deviation is below
    # sqrt(4 steps), and 5 of those are exceeded with probability 6e-7.
    assert abs(spread - steps) < 5 * math.sqrt(4 * steps)


def test_extreme_rates():
    draws = SeededDraws(0, "a", 1)
    assert draws.batch(5, 1, 0).tolist() == [0, 1, 2, 3, 4]
    assert draws.batch(5, 1.0, 0).tolist() == [0, 1, 2, 3, 4]
    assert draws.batch(0, 1, 0).shape == draws.batch(0, 0.5, 0).shape == (0,)
    # 2^-60 is below the step of the uniform numbers: rounding it up would sample at 2^-53.
    assert len(draws.batch(1_000_000, 2.0**-60, 0)) == 0
    assert len(draws.batch(1_000_000, math.nextafter(1, 0), 0)) >= 1_000_000 - 1


@pytest.mark.parametrize("like", [FLOAT, DOUBLE])
def test_noise_is_standard_normal(like):
    drawn = SeededDraws(1, "a", 1).gaussian(200_000, like, 0, "gradient")
    assert drawn.dtype == like.dtype
    values = drawn.double().numpy()
    assert stats.kstest(values, "norm").pvalue > LEVEL
    energy = float((values**2).sum())
    assert 2 * min(stats.chi2.cdf(energy, 200_000), stats.chi2.sf(energy, 200_000)) > LEVEL
    # Tails: P(|z| > 4) = 6.3e-5; a generator cut off at 4 has none.
    assert stats.binomtest(int((abs(values) > 4).sum()), 200_000, 6.334e-5).pvalue > LEVEL


def test_noise_of_different_keys_is_uncorrelated():
    size = 20_000
    drawn = torch.stack(
        [
            SeededDraws(seed, site, number).gaussian(size, DOUBLE, step, purpose)
            for seed, site, number, step, purpose in [
                (0, "a", 1, 0, "gradient"),
                (1, "a", 1, 0, "gradient"),
                (0, "b", 1, 0, "gradient"),
                (0, "a", 2, 0, "gradient"),
                (0, "a", 1, 1, "gradient"),
                (0, "a", 1, 0, "loss"),
            ]
        ]
    )
    correlations = np.corrcoef(drawn.numpy())[np.triu_indices(6, 1)]
    # sqrt(size) times a correlation is nearly standard normal; 15 of them.
    assert abs(correlations).max() * math.sqrt(size) < stats.norm.isf(LEVEL / 30)


def test_noise_of_no_or_one_number():
    draws = SeededDraws(0, "a", 1)
    assert draws.gaussian(0, FLOAT, 0, "x").shape == (0,)
    ones = torch.cat([draws.gaussian(1, DOUBLE, step, "loss") for step in range(1000)])
    assert stats.kstest(ones.numpy(), "norm").pvalue > LEVEL


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "size", [0, 1, 15, 16, 17, *(2**k + i for k in (17, 18) for i in (-1, 0, 1))]
)
def test_noise_is_added_in_parts_as_if_in_one(size, dtype):
    draws = SeededDraws(0, "a", 1)
    for whole in (size, 2 * size):
        drawn = draws.gaussian(whole, torch.empty(0, dtype=dtype), 2, "gradient")
        total = torch.zeros(whole, dtype=dtype)
        assert draws.add_noise(total, 1.0, 1.0, 2, "gradient") is total
        assert torch.equal(total, drawn)
        draws.add_noise(total, 1.5, 2.0, 2, "gradient")
        assert torch.allclose(total, 4 * drawn, rtol=1e-6 if dtype == torch.float32 else 1e-14)
