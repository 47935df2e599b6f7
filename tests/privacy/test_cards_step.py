"""A step by what is done otherwise on a card: noise, losses. See test_cards."""

import math

import torch

from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.common.randomness import secure
from fedpact.common.randomness.secure import SecureDraws
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.models import zoo
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.batches import BatchClippedKernel
from fedpact.privacy.oracle import PrivateOracle, Records
from fedpact.privacy.terms import Terms


def case(name, count=9, dtype=torch.float64):
    torch.manual_seed(0)
    module = getattr(zoo, name)((1, 12, 12), 3).to(dtype)
    return module, torch.randn(count, 1, 12, 12, dtype=dtype), torch.arange(count) % 3


def terms(**sigmas):
    return Terms("site", 18.0, 0.5, 0.5, sigmas, 10**6, Budget(1.0, 1e-5), "best")


def test_a_step_looks_at_no_number(card, no_operation_looks):
    """From sampling to the new weights: batch, sum, a simulation's noise, step."""
    module, x, y = case("mlp", 18, torch.float32)
    model = FlatModel(module)
    kernel, draws = PerSampleKernel(model, cross_entropy), SeededDraws(0, "site", 1)
    oracle = PrivateOracle(Records(x, y), kernel, terms(gradient=1.0), draws, lambda *_: None)
    w = model.vector.clone()
    before = w.clone()
    with no_operation_looks:
        for batch in oracle.batches(2, "gradient"):
            w -= 0.1 * batch.gradient(w)
    assert w.isfinite().all()
    assert not torch.equal(w, before)


def test_non_finite_losses_are_left_out_of_the_release(card):
    module, x, y = case("logistic", 18)
    draws = SeededDraws(0, "site", 1)
    bad = int(draws.batch(18, 0.5, 0)[1])
    x[bad] = math.nan
    silent = terms(loss=0.0, below=0.0)
    kernel = PerSampleKernel(FlatModel(module), cross_entropy)
    oracle = PrivateOracle(Records(x, y), kernel, silent, draws, lambda *_: None)
    w = kernel.model.vector.clone()
    chosen = [int(j) for j in draws.batch(18, 0.5, 0) if j != bad]
    assert chosen
    losses = cross_entropy(module(x[chosen]), y[chosen]).detach()
    batch = next(oracle.batches(1, "loss", "below"))
    assert math.isclose(batch.loss(w, 1.0), float(losses.clamp(0, 1).sum()) / 9)
    share = float(((losses <= 1.1).double() - 0.5).sum()) / 9 + 0.5
    assert math.isclose(batch.below(w, 1.1), share)


def test_a_batch_clipped_mean_looks_at_no_number(card, nobody_looks):
    module, x, y = case("cnn_padded")
    one = BatchClippedKernel(FlatModel(module), cross_entropy)
    with nobody_looks:
        free, short = (one.clipped_mean(x, y, clip) for clip in (math.inf, 1e-3))
    assert 0.99999e-3 < float(short.norm()) <= 1e-3
    assert (short / short.norm() - free / free.norm()).norm() < 1e-12
    x[0] = math.nan
    rest, clip = one.clipped_mean(x[1:], y[1:], math.inf), 1e6
    assert (one.clipped_mean(x, y, clip) - rest * (len(x) - 1) / len(x)).norm() < 1e-12


def test_noise_on_the_grid_goes_to_the_card(monkeypatch, no_operation_looks):
    """The release is the one that is made at hand, bit for bit, from the same normal numbers."""
    total = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    z = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gaussian(size, like):
        return z.clone()

    here = secure.noisy(total, 1.5, 0.3, gaussian)
    monkeypatch.setattr(secure, "on_cpu", lambda _: False)
    with no_operation_looks:
        there = secure.noisy(total, 1.5, 0.3, gaussian)
    assert there.dtype == total.dtype
    assert torch.equal(here, there)
    assert not torch.equal(SecureDraws().add_noise(total.clone(), 1.5, 0.3, 0, "gradient"), there)
