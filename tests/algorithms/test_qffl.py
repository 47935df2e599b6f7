"""q-FedAvg's own parts: the paper's update, the released loss, the noise in ‖Δ‖²."""

import math

import numpy as np
import pytest
import torch
from tests.algorithms.made_up import SIZES, Told, accepts
from torch import nn

from fedpact.algorithms import fedavg, qffl
from fedpact.algorithms.qffl import Settings
from fedpact.common.losses import cross_entropy
from fedpact.common.messages import Reply, State, Task
from fedpact.common.params import FlatModel
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.batches import BatchClippedKernel
from fedpact.privacy.oracle import PrivateOracle, Records
from fedpact.privacy.terms import Terms


def made_up(seed=0):
    generator = np.random.default_rng(seed)
    w = generator.normal(size=5)
    return w, {site: (w + generator.normal(size=5), generator.uniform(0.1, 3)) for site in SIZES}


def updated(settings, w, sites):
    replies = []
    for site, (w_i, loss) in sites.items():
        moved = float(((w - w_i) ** 2).sum())
        numbers = {"loss": loss, "moved": moved}
        replies.append(Reply("run", 1, site, SIZES[site], {"w": torch.from_numpy(w_i)}, numbers))
    state = fedavg.init(torch.from_numpy(w), settings)
    return qffl.update(state, iter(replies), settings).vectors["w"].numpy()


@pytest.mark.parametrize("aggregation", ["size", "uniform"])
@pytest.mark.parametrize("q", [0.0, 0.1, 1.0, 5.0])
def test_the_update_is_the_papers(q, aggregation):
    """Algorithm 2: Δ_k = F_k^q L (w - w_k), h_k = q F_k^(q-1) ‖L (w - w_k)‖² + L F_k^q,
    w ← w - Σ Δ_k / Σ h_k, its sums with weights p_k here; L = 1/η."""
    rate = 0.3
    settings = Settings(learning_rate=rate, fairness_exponent=q, aggregation=aggregation)
    w, sites = made_up()
    above, below = np.zeros(5), 0.0
    for site, (w_k, loss) in sites.items():
        p = 1.0 if aggregation == "uniform" else SIZES[site] / sum(SIZES.values())
        delta = (w - w_k) / rate
        above += p * loss**q * delta
        below += p * (q * loss ** (q - 1) * (delta @ delta) + loss**q / rate)
    np.testing.assert_allclose(updated(settings, w, sites), w - above / below, rtol=1e-12)


def test_at_q_0_it_is_the_mean_of_the_models_whatever_the_losses():
    settings, (w, sites) = Settings(fairness_exponent=0.0), made_up()
    mean = sum(SIZES[s] * w_k for s, (w_k, _) in sites.items()) / sum(SIZES.values())
    np.testing.assert_allclose(updated(settings, w, sites), mean, rtol=0, atol=1e-15)
    odd = {s: (w_k, x) for (s, (w_k, _)), x in zip(sites.items(), (-1, 1e300, 0), strict=True)}
    np.testing.assert_allclose(updated(settings, w, odd), mean, rtol=0, atol=1e-15)


@pytest.mark.parametrize("loss", [-5.0, 0.0, 0.001, math.nan])
@pytest.mark.parametrize("q", [0.1, 1.0, 20.0])
def test_a_loss_below_the_floor_counts_as_the_floor(loss, q):
    settings = Settings(fairness_exponent=q, least_loss=0.02)
    w, sites = made_up()
    low = {site: (w_k, loss) for site, (w_k, _) in sites.items()}
    floor = {site: (w_k, 0.02) for site, (w_k, _) in sites.items()}
    assert np.array_equal(updated(settings, w, low), updated(settings, w, floor))


@pytest.mark.parametrize("loss", [1e300, math.inf])
def test_a_loss_without_bound_leaves_finite_weights(loss):
    """Such a run diverges by its model, not by an error on the way."""
    settings, (w, sites) = Settings(fairness_exponent=20.0), made_up()
    sites["b"] = (sites["b"][0], loss)
    assert np.isfinite(updated(settings, w, sites)).all()


def test_the_step_is_never_longer_than_the_way_to_the_mean():
    """Whatever numbers are released with the models."""
    generator = np.random.default_rng(1)
    for seed in range(50):
        q = float(generator.uniform(0, 5))
        settings = Settings(fairness_exponent=q)
        w, sites = made_up(seed)
        step = updated(settings, w, sites) - w
        farthest = max(np.linalg.norm(w_k - w) for w_k, _ in sites.values())
        assert np.linalg.norm(step) <= farthest


@pytest.mark.parametrize("steps", [1, 3])
def test_loss_is_the_broadcast_models_on_the_first_batch(steps):
    oracle, settings = Told(loss=1.5, share=0.4), Settings(learning_rate=0.5, local_steps=steps)
    start = torch.tensor([3.0, 4.0])
    task = Task("run", 1, "qffl", {"w": start}, {})
    local = qffl.local(task, oracle, State(numbers={"loss_bound": 2.0}), settings)
    assert oracle.asked[0] == (1, ("gradient", "loss", "below"))
    for w, bound in oracle.asked[1:3]:
        assert torch.equal(w, start)
        assert bound == 2.0
    assert oracle.asked[3:] == ([(steps - 1, ("gradient",))] if steps > 1 else [])
    way = 0.5 * sum(range(1, steps + 1))
    assert torch.equal(local.vectors["w"], start - way)
    assert local.numbers == {"loss": 1.5, "moved": 2 * way**2}
    assert local.memory.numbers == {"loss_bound": settings.after(2.0, {"below": 0.4})}
    assert torch.equal(start, torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("mechanism", ["per_sample", "batch_clipped"])
@pytest.mark.parametrize("steps", [1, 4])
def test_noise_correction_equals_the_noise_in_the_movement(mechanism, steps):
    """An empty site moves by noise alone: ‖w - w̄‖² is τ η² v times a chi-square of d degrees.

    d = 4000: its relative deviation is 2.2 %. Two-sided test of level 1e-6.
    """
    model = FlatModel(nn.Linear(1999, 2, dtype=torch.float64))
    kernel = {"per_sample": PerSampleKernel, "batch_clipped": BatchClippedKernel}[mechanism]
    records = Records(torch.zeros(0, 1999).double(), torch.zeros(0, dtype=torch.int64))
    settings = Settings(learning_rate=0.3, local_steps=steps)
    sigmas = {name: 2.0 * ratio for name, ratio in qffl.facts(settings).channels.items()}
    terms = Terms("a", 100.0, 0.2, 0.5, sigmas, 99, Budget(9.0, 1e-5), "best", mechanism)
    draws = SeededDraws(3, "a", 1)
    oracle = PrivateOracle(records, kernel(model, cross_entropy), terms, draws, lambda *_: None)
    start = torch.zeros(model.size).double()
    local = qffl.local(Task("run", 1, "qffl", {"w": start}, {}), oracle, State(), settings)
    moved = local.vectors["w"] - start
    one = steps * 0.3**2 * terms.noise_variance
    assert accepts(moved, one)
    for wrong in (0.81, 1.21):
        assert not accepts(moved, wrong * one)
    way = float(moved.square().sum())
    assert local.numbers["moved"] == pytest.approx(max(0.0, way - one * model.size), rel=1e-9)
