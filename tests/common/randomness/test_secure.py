"""Draws for a deployment: fresh, never repeated, of the right law.

The tests that draw fail by chance with probability 1e-6 or less each, as noted at FAIL.
"""

import copy
import math
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy import stats

from fedpact.common.randomness import keystream, secure
from fedpact.common.randomness.secure import FreshStream, SecureDraws

FAIL = 1e-6
MANY = 400_000
DOUBLE = torch.empty(0, dtype=torch.float64)


def normal(size=MANY, like=DOUBLE):
    return SecureDraws().gaussian(size, like, 0, "gradient")


def variance_is_one(z):
    """A two-sided chi-square test of the variance, at level FAIL, of numbers with mean 0."""
    level = stats.chi2(len(z)).cdf(float((z.double() ** 2).sum()))
    return FAIL / 2 <= level <= 1 - FAIL / 2


def test_it_is_a_source_of_draws():
    draws = SecureDraws()
    assert draws.repeats is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_right_sigma_is_accepted_and_others_are_not(dtype):
    z = normal(like=torch.empty(0, dtype=dtype))
    assert z.dtype == dtype
    assert variance_is_one(z)
    # At this size 0.9 and 1.1 are more than 80 standard errors off.
    assert not variance_is_one(0.9 * z)
    assert not variance_is_one(1.1 * z)
    assert abs(float(z.double().mean())) * math.sqrt(len(z)) < stats.norm.isf(FAIL / 2)


@pytest.mark.parametrize("on_the_grid", [False, True])
def test_the_tail_has_no_end(monkeypatch, on_the_grid):
    """Where a key's words are all 0, lengths lie beyond 8.49, as those of normal pairs there do.

    U is then uniform on [0, 2^-52], and not one number. Of 1,000 of them one in ten thousand
    suites finds none below a hundredth part.
    """
    monkeypatch.setattr(
        FreshStream, "words", lambda self, count, at=0: np.zeros(count, dtype=np.uint64)
    )
    if on_the_grid:
        zeros = torch.zeros(2000, dtype=torch.float64)
        z = SecureDraws().add_noise(zeros, 1000.0, 1.0, 0, "gradient") / 1000
    else:
        z = normal(2000)
    squares = z[:1000] ** 2 + z[1000:] ** 2
    inside = (-squares / 2).exp() * 2.0**52
    assert float(inside.max()) < 1.1
    assert float(inside.min()) < 0.01
    if not on_the_grid:  # whose rounding, and scale of 1.001, a test of this size sees
        assert stats.kstest(inside.numpy(), "uniform").pvalue > FAIL


def test_kolmogorov_smirnov():
    z = normal(100_000)
    assert stats.kstest(z.numpy(), "norm").pvalue > FAIL
    assert stats.kstest(0.9 * z.numpy(), "norm").pvalue < FAIL
    assert stats.kstest(1.1 * z.numpy(), "norm").pvalue < FAIL


def test_numbers_are_independent():
    """Neighbours, the two of a pair, chunks, two calls: neither values nor squares correlate."""
    draws = SecureDraws()
    a, b = (draws.gaussian(MANY, DOUBLE, 0, "gradient") for _ in range(2))
    half, chunk = keystream.CHUNK // 2, keystream.CHUNK
    pairs = [(a, b), (a[:-1], a[1:]), (a[:half], a[half:chunk]), (a[:-chunk], a[chunk:])]
    for x, y in pairs:
        for u, v in ((x, y), (x**2 - 1, y**2 - 1), (x, y**2 - 1)):
            scale = math.sqrt(float((u**2).mean() * (v**2).mean()) * len(u))
            # Three of a kind in four pairs: FAIL for all of them together, to be split by 12.
            assert abs(float((u * v).sum())) / scale < stats.norm.isf(FAIL / 24)


@pytest.mark.parametrize("size", [0, 1, 2, 3, *(keystream.CHUNK + i for i in (-1, 0, 1)), 300_001])
def test_every_size(size):
    z = normal(size)
    assert z.shape == (size,)
    assert len(z.unique()) == size  # equal by chance with probability 1e-6


@pytest.mark.parametrize("rate", [0.015, 0.5, 0.97])
def test_batches_have_their_rate(rate):
    records = 100_000
    chosen = SecureDraws().batch(records, rate, 0)
    law = stats.binom(records, rate)
    assert law.ppf(FAIL / 2) <= len(chosen) <= law.isf(FAIL / 2)
    assert (chosen[1:] > chosen[:-1]).all()
    assert 0 <= int(chosen[0]) <= int(chosen[-1]) < records


def test_records_are_chosen_independently():
    draws = SecureDraws()
    taken = torch.zeros(400, 1000, dtype=torch.float64)
    for row in taken:
        row[draws.batch(1000, 0.3, 0)] = 1
    # Each record's count is binomial; so is each batch's size. Chi-square over both.
    for totals, n in ((taken.sum(0), 400), (taken.sum(1), 1000)):
        value = float(((totals - 0.3 * n) ** 2).sum()) / (0.21 * n)
        law = stats.chi2(len(totals))
        assert law.ppf(FAIL / 2) <= value <= law.isf(FAIL / 2)


def test_edges_of_batches():
    draws = SecureDraws()
    assert draws.batch(0, 0.5, 0).tolist() == []
    assert draws.batch(3, 1, 0).tolist() == [0, 1, 2]
    assert draws.batch(3, 1.0, 0).dtype == draws.batch(3, 0.5, 0).dtype == torch.int64


def test_no_stream_comes_twice():
    """Equal questions to a hundred objects, twice each: 200 different answers."""
    draws = [SecureDraws() for _ in range(100)]
    answers = {tuple(d.gaussian(4, DOUBLE, 0, "g").tolist()) for _ in range(2) for d in draws}
    assert len(answers) == 200
    streams = [FreshStream() for _ in range(25)]
    words = np.concatenate([s.words(1000).copy() for _ in range(2) for s in streams])
    assert len(np.unique(words)) == len(words)  # equal by chance with probability 1e-10


def test_no_copies():
    for thing in (SecureDraws(), FreshStream()):
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError):
                attempt(thing)


def test_noise_is_added_on_the_grid_with_its_deviation():
    """Accepted at σ times the sensitivity; 0.9 and 1.1 times are rejected as by variance_is_one."""
    total = torch.full((MANY,), 2.0)
    z = (SecureDraws().add_noise(total, 1.5, 0.4, 0, "gradient").double() - 2) / 0.6
    step = secure.spacing(0.4, MANY)
    whole = (0.6 * z + 2) / step
    assert torch.allclose(whole, whole.round(), atol=1e-3)
    assert variance_is_one(z / (1 + step * math.sqrt(MANY) / 0.4))
    assert not variance_is_one(0.9 * z)
    assert not variance_is_one(1.1 * z)


@pytest.mark.filterwarnings("ignore:.*fork")  # what a process with threads is told
def test_a_fork_takes_a_new_key():
    draws = SecureDraws()
    draws.batch(3, 0.5, 0)
    reader, writer = os.pipe()

    def tell():
        os.write(writer, b"%d\n" % draws._own.stream.words(1)[0])

    for _ in range(2):
        child = os.fork()
        if child == 0:
            try:
                tell()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    tell()
    os.close(writer)
    with open(reader, "rb") as told:
        words = told.read().split()
    assert len(words) == len(set(words)) == 3


def test_a_key_is_changed_in_time(monkeypatch):
    """Not before its words are used up, and before one would be drawn beyond them."""
    monkeypatch.setattr(secure, "_KEY_LASTS", 10)
    stream = FreshStream()
    first = stream._encryptor
    for count, kept in ((4, True), (6, True), (1, False)):
        stream.words(count)
        assert (stream._encryptor is first) == kept
    monkeypatch.undo()
    assert secure._KEY_LASTS < keystream.MAX_STREAM_WORDS


def test_threads_have_keys_of_their_own():
    draws = SecureDraws()
    with ThreadPoolExecutor(2) as pool:
        both = threading.Barrier(2)

        def stream():
            both.wait(10)
            return draws._own.stream

        found = [job.result() for job in [pool.submit(stream) for _ in range(2)]]
    assert len({id(s) for s in (*found, draws._own.stream)}) == 3
