"""MR-MTL: its ends are known algorithms bit for bit, its fixed point is its objective's optimum,
and what is evaluated at a site is the site's own model."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from tests.conformance.test_fixed_points import SITES, START, P

from fedpact import algorithms
from fedpact.algorithms import fedavg, mr_mtl
from fedpact.algorithms.mr_mtl import Settings
from fedpact.algorithms.wrappers.base import Method
from fedpact.algorithms.wrappers.optimizers import Averaged, ServerSettings, read_average
from fedpact.client import read_memory
from fedpact.common.losses import cross_entropy
from fedpact.common.messages import Reply, State, Task
from fedpact.common.params import FlatModel
from fedpact.common.run_folder import Folder
from fedpact.data.load import from_arrays
from fedpact.evaluation.metrics import evaluate
from fedpact.plan import Plan
from fedpact.simulation.simulate import simulate
from fedpact.studies.conformance import HandFederation


def plain(**settings):
    return Method("fedavg", algorithms.load("fedavg").Settings(**settings))


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_without_lambda_each_site_is_alone_bit_for_bit(private, steps):
    """Same draws, same noise: the site's own model is that of FedAvg with nobody else in it."""
    together = HandFederation(private=private)
    method = Method("mr_mtl", Settings(proximal=0.0, local_steps=steps))
    state = together.run(method, 4)
    for site, count in together.counts.items():
        alone = HandFederation(private=private, counts={site: count})
        expected = alone.run(plain(local_steps=steps), 4).vectors["w"]
        own = method.own_model(state.vectors["w"], together.memories[site])
        assert torch.equal(own, expected)


@pytest.mark.parametrize(
    ("end", "private"),
    [({"proximal": 1e300}, False), ({"proximal": 1e300}, True), ({"proximal_noise": 1e300}, True)],
)
def test_without_any_freedom_own_models_are_fedavgs_bit_for_bit(end, private):
    bed, twin = HandFederation(private=private), HandFederation(private=private)
    method = Method("mr_mtl", Settings(**{"proximal": 0.0, **end}, local_steps=2))
    state = bed.run(method, 4)
    expected = twin.run(plain(local_steps=2), 4).vectors["w"]
    for site in bed.sites:
        assert torch.equal(method.own_model(state.vectors["w"], bed.memories[site]), expected)


def test_without_noise_kappa_changes_nothing():
    found = []
    for noise in (0.0, 1e300):
        bed = HandFederation(private=False)
        method = Method("mr_mtl", Settings(proximal=0.3, proximal_noise=noise))
        w = bed.run(method, 4).vectors["w"]
        found.append([w, *(method.own_model(w, bed.memories[site]) for site in bed.sites)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("proximal", [0.0, 1e300])
def test_average_of_ends_is_end_of_average_exactly(proximal):
    """[server] average = "exponential" around FedAvg is the reference, with one decay."""
    server = ServerSettings(average="exponential", average_decay=0.7)
    together = HandFederation(private=True)
    method = Method("mr_mtl", Settings(proximal=proximal, average_decay=0.7))
    state = together.run(method, 5)
    for site, count in together.counts.items():
        counts = together.counts if proximal else {site: count}
        twin = HandFederation(private=True, counts=counts)
        expected = read_average(twin.run(Averaged(plain(), server, 5), 5))
        own = method.own_model(state.vectors["w"], together.memories[site])
        assert torch.equal(own, expected)


def test_an_average_changes_neither_training_nor_messages():
    averaging = rounds(Settings(proximal=0.5, average_decay=0.9), 6)
    w, memories = rounds(Settings(proximal=0.5), 6)
    assert torch.equal(averaging[0], w)
    assert all(torch.equal(averaging[1][n].vectors["w"], memories[n].vectors["w"]) for n in SITES)


def noisy(**variances):
    """SITES, whose gradients say that they have noise of these variances."""
    return {name: replace(SITES[name], noise_variance=v) for name, v in variances.items()}


def test_site_kappa_is_lambda_of_kappa_times_noise():
    by_noise = Settings(local_steps=2, proximal=0.5, proximal_noise=2.0)
    by_weight = Settings(local_steps=2, proximal=1.0)
    w, memories = rounds(by_noise, 5, sites=noisy(a=0.25, b=0.25))
    expected, others = rounds(by_weight, 5)
    for name in SITES:
        own = by_noise.own_model(w, memories[name])
        assert torch.equal(own, by_weight.own_model(expected, others[name]))


def test_kappa_fixed_point_is_the_joint_optimum():
    variances, settings = {"a": 0.04, "b": 3.0}, Settings(learning_rate=0.1, proximal_noise=2.0)
    w, memories = rounds(settings, 600, sites=noisy(**variances))

    def objective(flat):
        own = dict(zip(SITES, flat.reshape(3, 2), strict=False))
        return sum(
            P[n]
            * (
                s.a * np.sum((own[n] - s.b.numpy()) ** 2)
                + (0.01 + 2 * variances[n]) * np.sum((own[n] - flat[4:]) ** 2)
            )
            / 2
            for n, s in SITES.items()
        )

    found = minimize(objective, np.zeros(6), tol=1e-14).x
    own = [settings.own_model(w, memories[name]) for name in SITES]
    np.testing.assert_allclose(torch.stack([*own, w]).flatten().numpy(), found, rtol=0, atol=1e-5)


class Flat:
    """An oracle of a loss without slope: every gradient is noise of one variance."""

    def __init__(self, variance):
        self.noise_variance, self._draws = variance, torch.Generator().manual_seed(0)

    def batches(self, count, *channels):
        return (self for _ in range(count))

    def gradient(self, w):
        return self.noise_variance**0.5 * torch.randn(len(w), generator=self._draws)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # η / (2κ) of each, and of one λ η v_i / (2λ).
        (Settings(proximal=0.0, proximal_noise=1.0), (0.25, 0.25)),
        (Settings(proximal=0.05), (0.05, 0.5)),
    ],
)
def test_kappa_equalises_noise_of_own_models_and_lambda_not(settings, expected):
    """Of sites of which one's gradients have ten times the other's variance.

    5,000 coordinates: a variance's relative error has a deviation of 2 %, and b² is off by 3 %.
    """
    w, found = torch.zeros(5000), []
    task = Task("run", 1, "mr_mtl", {"w": w}, {})
    for variance in (0.01, 0.1):
        site, memory = Flat(variance), State()
        for _ in range(800):
            memory = mr_mtl.local(task, site, memory, settings).memory
        found.append(float((settings.own_model(w, memory) - w).square().mean()))
    assert found == pytest.approx(expected, rel=0.13)


def rounds(settings, count, heard=lambda number: SITES, sites=SITES):
    """The server's w and the sites' memories, after rounds in which some sites are heard."""
    state, memories = fedavg.init(START, settings), dict.fromkeys(SITES, State())
    for number in range(1, count + 1):
        task, replies = Task("run", number, "mr_mtl", state.vectors, {}), []
        for site in heard(number):
            local = mr_mtl.local(task, sites[site], memories[site], settings)
            memories[site] = local.memory
            replies.append(Reply("run", number, site, SITES[site].size, local.vectors, {}))
        state = fedavg.update(state, iter(replies), settings)
    return state.vectors["w"], memories


def optimum(weight):
    """The w_i that minimise Σ p_i (F_i(w_i) + λ/2 ‖w_i - w̄‖²), from its linear equations.

    In w_i: p_i a_i (w_i - b_i) + λ p_i (w_i - w̄) = 0, as Σ p_j (w_j - w̄) = 0.
    """
    names = list(SITES)
    left = np.zeros((2, 2))
    for i, name in enumerate(names):
        left[i, i] += SITES[name].a + weight
        for j, other in enumerate(names):
            left[i, j] -= weight * P[other]
    right = np.array([SITES[n].a * SITES[n].b.numpy() for n in names])
    return dict(zip(names, np.linalg.solve(left, right), strict=True))


@pytest.mark.parametrize("weight", [0.0, 0.3, 5.0, 1e4])
def test_the_fixed_point_is_the_optimum_of_the_papers_objective(weight):
    settings = Settings(learning_rate=0.1, local_steps=1, proximal=weight)
    # A round contracts by at most 1 - η min a_i = 0.9.
    w, memories = rounds(settings, 400)
    for name, expected in optimum(weight).items():
        own = settings.own_model(w, memories[name])
        np.testing.assert_allclose(own.numpy(), expected, rtol=0, atol=1e-10)


def test_w_is_the_mean_of_own_models_after_lost_rounds():
    settings = Settings(learning_rate=0.1, local_steps=2, proximal=1.0)

    def off(w, memories):
        return float((w - sum(P[n] * memories[n].vectors["w"] for n in SITES)).norm())

    assert off(*rounds(settings, 10)) < 1e-12
    absent = off(*rounds(settings, 10, lambda number: "a" if number > 5 else "ab"))
    assert absent > 1e-3
    # Each full round leaves b = 1 / (1 + 0.2) of it.
    back = off(*rounds(settings, 40, lambda number: "a" if 5 < number <= 10 else "ab"))
    assert back == pytest.approx(absent / 1.2**30, rel=1e-6)


def a_run(folder, data, **tables):
    asked = {"algorithm": "mr_mtl", "rounds": 3, "sites": 3, "partition": {"held_out": 0.3}}
    plan = Plan.parse({**asked, **tables})
    return plan, simulate(plan, folder, data=data)


def some_data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(90, 3)).astype(np.float32)
    return from_arrays(x, generator.integers(0, 2, 90), name="made up")


def test_sites_evaluate_own_models_and_the_server_the_mean(tmp_path):
    data = some_data()
    plan, result = a_run(tmp_path, data, settings={"proximal": 0.2})
    checkpoint, _ = Folder(tmp_path).restore()
    w, model = checkpoint.state.vectors["w"], FlatModel(result.model)
    partition = json.loads((tmp_path / "partition.json").read_text())
    pooled, differ = [], False
    for site, score in result.records[-1].scores.items():
        memory = read_memory(Folder(tmp_path).site(site) / "memory.safetensors", 3)
        held = partition["held_out"][site]
        for own in (True, False):
            model.load(plan.method.own_model(w, memory) if own else w)
            found = evaluate(model.module, cross_entropy, data.x[held], data.y[held])
            if own:
                assert found == score
            else:
                pooled.append(found)
                differ |= found.loss != score.loss
    assert differ
    right = sum(s.accuracy * s.records for s in pooled) / sum(s.records for s in pooled)
    assert result.records[-1].accuracy == pytest.approx(right)
    assert json.loads((tmp_path / "privacy.json").read_text())["own_models"] is True


def test_nothing_of_an_own_model_is_in_a_reply():
    """u_i - w̄ is -η Σ g alone: two sites whose own models differ send what their gradients say."""

    class Constant:
        def batches(self, count, *channels):
            return (self for _ in range(count))

        def gradient(self, w):
            return torch.ones_like(w)

    settings = Settings(learning_rate=0.25, local_steps=2, proximal=1.0)
    task = Task("run", 1, "mr_mtl", {"w": START}, {})
    for own in (START + 100, START - 7):
        local = mr_mtl.local(task, Constant(), State({"w": own}), settings)
        assert set(local.vectors) == {"w"}
        assert not local.numbers
        assert torch.equal(local.vectors["w"], START - 0.5)


def test_its_sums_are_rounded_more_finely_than_fedavgs():
    """w_i asks for a finer grid than one release a round does."""
    ends = {"fedavg": {}, "mr_mtl": {"settings": {"proximal": 1e30}}}
    units = [
        Plan.parse({"algorithm": name, **more}).method.facts.units for name, more in ends.items()
    ]
    assert units[0] != units[1]
