"""FedDyn's own parts: the paper's rounds, and what its noise comes to."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.algorithms.made_up import SIZES, D, Drawn, NoiseAlone, accepts, replies

from fedpact import algorithms
from fedpact.algorithms import fedavg, feddyn
from fedpact.algorithms.feddyn import Settings
from fedpact.common.messages import State, Task

TOTAL = sum(SIZES.values())


def after(rounds, settings, oracles, start):
    state, memories = fedavg.init(start, settings), {}
    for number in range(1, rounds + 1):
        answers = replies(feddyn, state, settings, oracles, memories, number)
        state = feddyn.update(state, answers, settings)
    return state, memories


@pytest.mark.parametrize("aggregation", ["size", "uniform"])
@pytest.mark.parametrize("rounds", [1, 2, 9])
def test_the_rounds_are_the_papers(aggregation, rounds):
    """Algorithm 1 with all devices active, its local problem by τ steps, written down on its own:
    h ← h - α mean (θ_k - θ), θ ← mean θ_k - h/α; and h is the mean of the h_k."""
    rate, steps, alpha = 0.1, 4, 0.7
    settings = Settings(
        learning_rate=rate, local_steps=steps, proximal=alpha, aggregation=aggregation
    )
    oracles = {site: Drawn(site) for site in SIZES}
    state, memories = after(rounds, settings, oracles, torch.ones(D).double())
    even = aggregation == "uniform"
    p = {site: 1 / 3 if even else n / TOTAL for site, n in SIZES.items()}
    theta, h, h_k = np.ones(D), np.zeros(D), dict.fromkeys(SIZES, np.zeros(D))
    for _ in range(rounds):
        mean = np.zeros(D)
        for site, oracle in oracles.items():
            x = theta.copy()
            for _ in range(steps):
                x = x - rate * (oracle.gradient_at(x) - h_k[site] + alpha * (x - theta))
            h_k[site] = h_k[site] - alpha * (x - theta)
            mean += p[site] * x
        h = h - alpha * (mean - theta)
        theta = mean - h / alpha
    np.testing.assert_allclose(state.vectors["w"].numpy(), theta, rtol=0, atol=1e-12)
    for site in SIZES:
        np.testing.assert_allclose(memories[site].vectors["h"].numpy(), h_k[site], atol=1e-12)
    held = sum(p[site] * memories[site].vectors["h"].numpy() for site in SIZES)
    np.testing.assert_allclose(held, h, rtol=0, atol=1e-12)


def test_a_reply_is_as_long_as_fedavgs():
    """d numbers up: h's share travels in u_i."""
    task = Task("run", 1, "feddyn", {"w": torch.ones(D).double()}, {})
    local = feddyn.local(task, Drawn("a"), State(), Settings())
    assert [len(vector) for vector in local.vectors.values()] == [D]
    assert local.numbers == {}


@pytest.mark.parametrize(("alpha", "rounds"), [(1.0, 30), (0.2, 80)])
def test_noise_settles_in_h_and_moves_w_by_one_over_alpha(alpha, rounds):
    """Gradients of noise alone, of variance 1: with ρ = 1 - ηα and κ = 1 - ρ^τ a round's noise ξ_i
    in w_i has η² (1 - ρ^2τ)/(1 - ρ²). It stays in h_i as -α (1 - κ)^k ξ_i after k rounds, which
    adds up to αη/(2 - αη); and is in w as (1 + (2κ - 1)(1 - κ)^k)/κ Σ p_i ξ_i, in the end 1/κ.

    4000 numbers: the energy's relative deviation is 2.2 %.
    """
    size, steps, rate = 4000, 5, 0.2
    settings = Settings(learning_rate=rate, local_steps=steps, proximal=alpha)
    oracles = {site: NoiseAlone(seed, size) for seed, site in enumerate(SIZES)}
    state, memories = after(rounds, settings, oracles, torch.zeros(size).double())
    rho = 1 - rate * alpha
    kappa = 1 - rho**steps
    one = rate**2 * (1 - rho ** (2 * steps)) / (1 - rho**2)
    in_w = [(1 + (2 * kappa - 1) * (1 - kappa) ** k) / kappa for k in range(rounds)]
    shares = sum((n / TOTAL) ** 2 for n in SIZES.values())
    variance = shares * one * sum(x * x for x in in_w)
    settled = alpha * rate / (2 - alpha * rate)
    assert accepts(state.vectors["w"], variance)
    assert all(accepts(memory.vectors["h"], settled) for memory in memories.values())
    for wrong in (0.81, 1.21):
        assert not accepts(state.vectors["w"], wrong * variance)
        assert not accepts(memories["a"].vectors["h"], wrong * settled)
    # Beside fedavg's τ η² a round it is the factor that the page warns of.
    factor = (variance / (rounds * shares * steps * rate**2)) ** 0.5
    assert factor == pytest.approx(1 / (alpha * steps * rate), rel=0.2)


@pytest.mark.parametrize("name", ["fedprox", "feddyn"])
def test_steps_that_run_away_whatever_the_data_are_refused(name):
    """w - w̄ is scaled by 1 - ηα where the loss is flat."""
    settings = algorithms.load(name).Settings
    with pytest.raises(ValidationError, match="proximal = 1: expected a product below 2"):
        settings(learning_rate=2.0, proximal=1.0)
    settings(learning_rate=1.99, proximal=1.0)
