"""SCAFFOLD's own parts: the paper's rounds, its noise, a site that comes late."""

import numpy as np
import pytest
import torch
from tests.algorithms.made_up import SIZES, D, Drawn, NoiseAlone, accepts, replies

from fedpact import algorithms
from fedpact.algorithms import scaffold
from fedpact.algorithms.scaffold import Settings
from fedpact.common.messages import Reply, State, Task


@pytest.mark.parametrize("aggregation", ["size", "uniform"])
def test_the_rounds_are_the_papers(aggregation):
    """Algorithm 1 with option II, all sites sampled, η_g = 1, written down on its own:
    x ← x + mean (y_i - x), c ← c + mean (c_i⁺ - c_i)."""
    rate, steps, rounds = 0.05, 4, 15
    settings = Settings(learning_rate=rate, local_steps=steps, aggregation=aggregation)
    state, memories = scaffold.init(torch.zeros(D).double(), settings), {}
    oracles = {site: Drawn(site, noise=0.3) for site in SIZES}
    even = aggregation == "uniform"
    p = {s: 1 / 3 if even else n / sum(SIZES.values()) for s, n in SIZES.items()}
    x, c, c_i = np.zeros(D), np.zeros(D), dict.fromkeys(SIZES, np.zeros(D))
    for number in range(rounds):
        moved, changed = np.zeros(D), np.zeros(D)
        for site, oracle in oracles.items():
            y = x.copy()
            for k in range(number * steps, (number + 1) * steps):
                y = y - rate * (oracle.gradient_at(y, k) - c_i[site] + c)
            after = c_i[site] - c + (x - y) / (steps * rate)
            moved += p[site] * (y - x)
            changed += p[site] * (after - c_i[site])
            c_i[site] = after
        x, c = x + moved, c + changed
        answers = replies(scaffold, state, settings, oracles, memories, number + 1)
        state = scaffold.update(state, answers, settings)
        np.testing.assert_allclose(state.vectors["w"].numpy(), x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(state.vectors["c"].numpy(), c, rtol=0, atol=1e-12)
        for site in SIZES:
            np.testing.assert_allclose(memories[site].vectors["c"].numpy(), c_i[site], atol=1e-11)


def test_a_site_without_a_control_variate_makes_fedavgs_steps():
    """In the first round, where c = 0 as well, and whenever it joins."""
    fedavg, w = algorithms.load("fedavg"), torch.ones(D).double()
    theirs = fedavg.Settings(learning_rate=0.1, local_steps=3)
    task = Task("run", 1, "fedavg", {"w": w}, {})
    expected = fedavg.local(task, Drawn("a"), State(), theirs).vectors["w"]
    for c in (0.0, 7.0):
        task = Task("run", 1, "scaffold", {"w": w, "c": torch.full_like(w, c)}, {})
        settings = Settings(learning_rate=0.1, local_steps=3)
        sent = scaffold.local(task, Drawn("a"), State(), settings).vectors["w"]
        torch.testing.assert_close(sent, expected, rtol=1e-14, atol=0)


def test_a_reply_is_as_long_as_fedavgs():
    """d numbers up, not the paper's 2d."""
    task = Task("run", 1, "scaffold", dict.fromkeys(("w", "c"), torch.ones(D).double()), {})
    local = scaffold.local(task, Drawn("a"), State(), Settings())
    assert [len(vector) for vector in local.vectors.values()] == [D]


def test_noise_does_not_add_up_in_the_control_variates():
    """c_i has variance v_i/τ in every round, and w that of fedavg: T τ η² Σ p_i² v_i.

    4000 numbers: the energy's relative deviation is 2.2 %.
    """
    size, steps, rounds, rate = 4000, 5, 30, 0.1
    settings = Settings(learning_rate=rate, local_steps=steps)
    oracles = {site: NoiseAlone(seed, size) for seed, site in enumerate(SIZES)}
    state, memories = scaffold.init(torch.zeros(size).double(), settings), {}
    for number in range(1, rounds + 1):
        answers = replies(scaffold, state, settings, oracles, memories, number)
        state = scaffold.update(state, answers, settings)
        for memory in memories.values():
            assert accepts(memory.vectors["c"], 1 / steps)
    shares = sum((n / sum(SIZES.values())) ** 2 for n in SIZES.values())
    variance = rounds * steps * rate**2 * shares
    assert accepts(state.vectors["w"], variance)
    for wrong in (0.81, 1.21):
        assert not accepts(state.vectors["w"], wrong * variance)
        assert not accepts(memory.vectors["c"], wrong / steps)


def test_a_controllers_tau_counts():
    """The task's "local_steps" is how many gradients c_i is the mean of, and w moves τη c."""
    settings, w = Settings(learning_rate=0.1, local_steps=5), torch.ones(D).double()
    state = State({"w": w, "c": torch.zeros(D).double()})
    task = Task("run", 1, "scaffold", state.vectors, {"local_steps": 2})
    oracle = Drawn("a")
    local = scaffold.local(task, oracle, State(), settings)
    assert oracle.asked == 2
    reply = Reply("run", 1, "a", 3.0, local.vectors, local.numbers)
    after = scaffold.update(state, [reply], settings)
    first = oracle.gradient_at(w.numpy(), 0)
    second = oracle.gradient_at(w.numpy() - 0.1 * first, 1)
    expected = w.numpy() - 0.1 * (first + second)
    np.testing.assert_allclose(after.vectors["w"].numpy(), expected, rtol=0, atol=1e-14)
