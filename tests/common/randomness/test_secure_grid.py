"""The grid: exact addition, the sensitivity it claims, and the attack it stops."""

import itertools
import math
import os
import signal
import threading
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from fedpact.common.errors import InputError, PrivacyError
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.common.randomness import keystream
from fedpact.common.randomness import secure as grid
from fedpact.common.randomness.secure import SecureDraws, noisy, spacing
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.batches import BatchClippedKernel
from fedpact.privacy.oracle import PrivateOracle, Records
from fedpact.privacy.terms import Terms

FAIL = 1e-6
finite = st.floats(-1e3, 1e3, width=32)


def secure(size, like):
    return SecureDraws().gaussian(size, like, 0, "gradient")


def silent(size, like):
    return torch.zeros(size, dtype=like.dtype)


@settings(max_examples=100)
@given(st.floats(1e-6, 1e6), st.integers(1, 10**8))
def test_spacing(sensitivity, size):
    step = spacing(sensitivity, size)
    assert math.frexp(step)[0] == 0.5
    assert step * math.sqrt(size) <= 2**-10 * sensitivity < 2 * step * math.sqrt(size) * (1 + 1e-12)


@settings(max_examples=100)
@given(st.lists(st.tuples(finite, st.floats(-8, 8)), min_size=1, max_size=20))
def test_it_is_the_rounded_sum_and_the_rounded_noise_exactly(pairs):
    """Against rational arithmetic; only ν z itself is a floating-point product."""
    sigma, sensitivity, d = 1.3, 0.7, len(pairs)
    total = torch.tensor([s for s, _ in pairs], dtype=torch.float64)
    z = [z for _, z in pairs]
    found = noisy(total, sigma, sensitivity, lambda n, like: torch.tensor(z, dtype=like.dtype))
    step = spacing(sensitivity, d)
    scale = sigma * (sensitivity + step * math.sqrt(d))
    for s, normal, release in zip(total.tolist(), z, found.tolist(), strict=True):
        whole = round(Fraction(s) / Fraction(step)) + round(
            Fraction(scale * normal) / Fraction(step)
        )
        assert Fraction(release) == whole * Fraction(step)


@settings(max_examples=100)
@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=50))
def test_sensitivity_on_the_grid(pairs):
    """‖round a - round b‖ <= ‖a - b‖ + Λ sqrt(d), without noise."""
    a, b = torch.tensor(pairs, dtype=torch.float64).T
    on_grid = noisy(a, 1.0, 1.0, silent) - noisy(b, 1.0, 1.0, silent)
    allowed = float((a - b).norm()) + spacing(1.0, len(a)) * math.sqrt(len(a))
    assert float(on_grid.norm()) <= allowed * (1 + 1e-12)


def test_the_noise_is_never_less_than_claimed():
    """Its σ covers the sensitivity on the grid: accepted, and 0.9 and 1.1 of it are not."""
    d, sigma, sensitivity = 300_000, 1.1, 0.5
    total = torch.full((d,), 3.0)
    enlarged = sensitivity + spacing(sensitivity, d) * math.sqrt(d)
    assert sensitivity * (1 + 2**-11) < enlarged <= sensitivity * (1 + 2**-10)
    z = (noisy(total, sigma, sensitivity, secure) - 3.0).double() / (sigma * enlarged)
    law = stats.chi2(d)
    for factor, accepted in ((1.0, True), (0.9, False), (1.1, False)):
        level = law.cdf(float(((factor * z) ** 2).sum()))
        assert (FAIL / 2 <= level <= 1 - FAIL / 2) == accepted
    assert stats.kstest(z.numpy(), "norm").pvalue > FAIL


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 0), (torch.float64, 1)])
def test_type_and_size_are_the_sums(dtype, size):
    released = noisy(torch.zeros(size, dtype=dtype), 1.0, 1.0, secure)
    assert (released.dtype, released.shape) == (dtype, (size,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sum_is_left_alone(dtype):
    total = torch.linspace(-1, 1, 7, dtype=dtype)
    before = total.clone()
    noisy(total, 1.0, 1.0, secure)
    assert torch.equal(total, before)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_has_one_sign(monkeypatch, dtype, there):
    """A negative sum that rounds to 0 is told from 0 by nothing, whatever the noise's sign."""
    monkeypatch.setattr(grid, "on_cpu", lambda _: there)
    for tiny in (-1e-9, 0.0, 1e-9, -0.0):
        for z in (-1e-9, 1e-9, -0.0, 0.0):
            total = torch.full((5,), tiny, dtype=dtype)
            found = noisy(total, 1.0, 1.0, lambda n, like, z=z: torch.full((n,), z).double())
            assert not found.any()
            assert not torch.signbit(found).any()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_bad_numbers_are_refused(bad):
    with pytest.raises(InputError, match="sigma is"):
        noisy(torch.zeros(2), bad, 1.0, secure)
    with pytest.raises(InputError, match="sensitivity is"):
        noisy(torch.zeros(2), 1.0, bad, secure)


def test_sensitivity_without_invertible_spacing_is_refused():
    """1/Λ was infinite: NaN for a sum of 0 and infinity for others told the two apart."""
    for tiny in (1e-306, 5e-324):
        with pytest.raises(InputError, match=f"sensitivity is {tiny!r}"):
            noisy(torch.zeros(1, dtype=torch.float64), 1.0, tiny, secure)
    assert noisy(torch.zeros(1, dtype=torch.float64), 1.0, 1e-300, secure).isfinite().all()


LONG = 8 * grid.CHUNK


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_long_totals_are_worked_on_part_by_part(count, threads):
    """Every part has its own sum and noise of its own, of the right deviation, by any threads."""
    threads(count)
    total = torch.arange(LONG + 3) // grid.CHUNK * 100.0
    # As a deployment draws: the numbers are in the thread's own room.
    z = SecureDraws().add_noise(total, 1.1, 0.5, 0, "gradient").double() - total
    parts = z[:LONG].reshape(-1, grid.CHUNK)
    # One in 131,072: 0.2 % is the standard error of each, and the grid's 0.1 % more.
    assert float((parts.std(1) / (1.1 * 0.5) - 1).abs().max()) < 0.015
    assert float(z[-3:].abs().min()) > 0
    # No part's noise is another's: 28 correlations, standard normal but for sqrt(CHUNK).
    correlations = np.corrcoef(parts.numpy())[np.triu_indices(8, 1)]
    assert abs(correlations).max() * math.sqrt(grid.CHUNK) < stats.norm.isf(FAIL / 56)


def test_parts_are_put_where_they_belong(threads):
    """With made-up noise, which threads add what is told by the release: sum and noise, rounded."""
    threads(2)
    total = torch.linspace(-1, 1, 5 * grid.CHUNK + 7, dtype=torch.float64)
    lock, drawn = threading.Lock(), itertools.count()

    def numbered(size, like):
        with lock:
            return torch.full((size,), float(next(drawn)), dtype=like.dtype)

    step = spacing(1.0, len(total))
    left = (noisy(total, 1.0, 1.0, numbered) - (total / step).round() * step) / step
    scale = (1.0 + step * math.sqrt(len(total))) / step
    values, lengths = left.unique_consecutive(return_counts=True)
    # Two threads have three parts each, of no more than a sixth, rounded up.
    assert sorted(values.tolist()) == [round(k * scale) for k in range(6)]
    assert max(lengths) <= math.ceil(len(total) / 6) <= grid.CHUNK


@pytest.mark.filterwarnings("ignore:.*fork")  # what a process with threads is told
@pytest.mark.parametrize("fast", [True, False])
def test_a_fork_has_its_own_threads(fast, threads, monkeypatch):
    threads(2)
    monkeypatch.setattr(keystream, "_NUMPY_IS_FAST", fast)
    draws, total = SecureDraws(), torch.zeros(400_000)
    draws.add_noise(total, 1.0, 1.0, 0, "gradient")
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(100)  # a thread that is not there would be waited for without end
            draws.add_noise(total, 1.0, 1.0, 0, "gradient")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_noise_that_repeats_itself_is_refused():
    """A seeded draw is the same at every call; within one call it is of no harm."""
    seeded = partial(SeededDraws(0).gaussian, step=0, purpose="gradient")
    with pytest.raises(PrivacyError, match="repeats itself"):
        noisy(torch.zeros(2 * grid.CHUNK), 1.0, 1.0, seeded)
    noisy(torch.zeros(grid.CHUNK), 1.0, 1.0, seeded)


SCALE = np.float32(1.1)


def explained(release, total):
    """Which float32 releases some float32 z makes of this sum, as total + SCALE z is computed."""
    guess = ((release.astype(np.float64) - total) / SCALE).astype(np.float32)
    found = np.zeros(len(release), bool)
    for step in range(-4, 5):
        z = guess.copy()
        for _ in range(abs(step)):
            z = np.nextafter(z, np.float32(math.copysign(np.inf, step)))
        found |= (np.float32(total) + SCALE * z) == release
    return found


def test_the_attack_works_on_plain_addition_and_not_on_the_grid():
    """Mironov 2012: is the sum 0 or 0.3? Noise of 1.1 z in float32 leaves gaps; the grid none."""
    d = 2000
    like = torch.empty(0)
    z = SeededDraws(0).gaussian(d, like, 0, "gradient").numpy()
    at_0, at_1 = SCALE * z, np.float32(0.3) + SCALE * z
    assert explained(at_0, 0.0).all()
    # Many a release of one sum is impossible for the other: no ε at all.
    assert (~explained(at_1, 0.0)).mean() > 0.05
    # On the grid the values that sums differ by are values of the noise as well.
    step = spacing(1.0, d)
    releases = [
        noisy(torch.full((d,), s, dtype=torch.float64), 1.1, 1.0, secure) for s in (0.0, 0.3)
    ]
    for release in releases:
        whole = release / step
        assert torch.equal(whole, whole.round())
    # No pattern is left either: the residues of both sums' whole numbers have one law.
    for modulus in (2, 3, 8):
        tables = [
            np.bincount((r / step).long().numpy() % modulus, minlength=modulus) for r in releases
        ]
        assert stats.chi2_contingency(np.stack(tables)).pvalue > FAIL


@pytest.mark.parametrize("mechanism", ["per_sample", "batch_clipped"])
def test_a_deployments_oracle_releases_on_the_grid(mechanism):
    """Whole multiples of Λ, with batch sizes a power of 2 so that the division is exact, too."""
    model = FlatModel(nn.Linear(3, 2))
    kind = PerSampleKernel if mechanism == "per_sample" else BatchClippedKernel
    sigmas = {"gradient": 2.0, "loss": 2.0}
    terms = Terms("a", 16.0, 0.5, 1.0, sigmas, 9, Budget(1, 1e-5), "best", mechanism)
    records = Records(torch.randn(16, 3), torch.randint(2, (16,)))
    oracle = PrivateOracle(
        records, kind(model, cross_entropy), terms, SecureDraws(), lambda *_: None
    )
    for batch in oracle.batches(9, "gradient", "loss"):
        divisor = 8 if mechanism == "per_sample" else 1
        gradient = batch.gradient(model.vector.clone()).double() * divisor / spacing(1.0, 8)
        loss = batch.loss(model.vector.clone(), 2.0) * 8 / spacing(2.0, 1)
        assert torch.equal(gradient, gradient.round())
        assert loss == round(loss)
