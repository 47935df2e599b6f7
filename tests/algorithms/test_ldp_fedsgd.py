"""LDP FedSGD: the update by hand, sites with budgets of their own, and the aggregate's noise.

Statistical tests are seeded and have level 1e-6.
"""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from tests import recounted
from tests.algorithms.made_up import accepts
from tests.recounted import charges
from torch import nn

from fedpact.algorithms import ldp_fedsgd
from fedpact.algorithms.ldp_fedsgd import Settings
from fedpact.common.errors import InputError
from fedpact.common.losses import cross_entropy
from fedpact.common.messages import Reply, State, Task
from fedpact.common.params import FlatModel
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.data.load import from_arrays
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.accounting.planner import least_noise
from fedpact.privacy.batches import BatchClippedKernel
from fedpact.privacy.oracle import PrivateOracle, Records
from fedpact.privacy.terms import Terms
from fedpact.report.tradeoffs import Problem, utility_bound
from fedpact.simulation.simulate import simulate


def aggregate_variance(sizes, rates, sigmas, clip=1.0):
    """C² Σ(N_k q_k σ_k)²/(Σ N_k q_k)²: of clipped batch means, by their expected batch sizes."""
    shares = [n * q for n, q in zip(sizes, rates, strict=True)]
    total = sum((a * s) ** 2 for a, s in zip(shares, sigmas, strict=True))
    return clip**2 * total / sum(shares) ** 2


def aggregate_variance_of_sums(weights, sizes, rates, sigmas, clip=1.0):
    """C² Σ(ω_k σ_k/(q_k N_k))²: of sums of per-sample clipped gradients over q_k N_k."""
    each = zip(weights, sizes, rates, sigmas, strict=True)
    return clip**2 * sum((w * s / (q * n)) ** 2 for w, n, q, s in each)


SIZES, RATES, SIGMAS = (100.0, 40.0, 300.0), (0.1, 1.0, 0.05), (4.0, 12.0, 30.0)
CLIP, SITES = 0.5, ("a", "b", "c")
BATCHES = [n * q for n, q in zip(SIZES, RATES, strict=True)]


def reply(site, gradient, batch_size, variance):
    numbers = {"batch_size": batch_size, "noise_variance": variance}
    return Reply("run", 1, site, 1e9, {"gradient": gradient}, numbers)


# The update


@pytest.mark.parametrize(("schedule", "rate"), [("inverse", 0.6 / 4), ("constant", 0.6)])
@pytest.mark.parametrize("aggregation", ["batch_size", "least_noise"])
def test_the_update_by_hand(schedule, rate, aggregation):
    generator = np.random.default_rng(0)
    w, gradients = generator.normal(size=5), generator.normal(size=(3, 5))
    variances = [0.3, 2.0, 7.0]
    if aggregation == "batch_size":
        weights = np.array(BATCHES) / sum(BATCHES)
    else:
        weights = np.array(least_noise(BATCHES, variances, 2.5 / 5))
    settings = Settings(
        learning_rate=0.6, step_schedule=schedule, aggregation=aggregation, bias_penalty=2.5
    )
    told = zip(SITES, map(torch.from_numpy, gradients), BATCHES, variances, strict=True)
    # Lazily, and each gradient spoilt once the next is asked for: nothing may be kept of it.
    before = State({"w": torch.from_numpy(w)}, {"round": 3})

    def lazily():
        for site, gradient, size, variance in told:
            gradient = gradient.clone()
            yield reply(site, gradient, size, variance)
            gradient.fill_(math.nan)

    after = ldp_fedsgd.update(before, lazily(), settings)
    expected = w - rate * weights @ gradients
    np.testing.assert_allclose(after.vectors["w"].numpy(), expected, rtol=1e-12)
    assert after.numbers["round"] == 4
    assert after.numbers["noise_variance"] == pytest.approx(float(weights**2 @ variances))


@pytest.mark.parametrize("numbers", [(0.0, 1.0), (math.nan, 1.0), (1.0, -1.0), (1.0, math.nan)])
@pytest.mark.parametrize("aggregation", ["batch_size", "least_noise"])
def test_public_numbers_out_of_range_are_refused(numbers, aggregation):
    state = State({"w": torch.zeros(2)}, {"round": 0})
    with pytest.raises(InputError):
        ldp_fedsgd.update(
            state, iter([reply("a", torch.ones(2), *numbers)]), Settings(aggregation=aggregation)
        )


# The aggregate's noise


def terms(mechanism):
    return {
        site: Terms(site, n, q, CLIP, {"gradient": s}, 99, Budget(9.0, 1e-5), "best", mechanism)
        for site, n, q, s in zip(SITES, SIZES, RATES, SIGMAS, strict=True)
    }


def noise_of_rounds(mechanism, settings, rounds=20):
    """Steps of a federation of empty sites: η times the aggregate's noise and nothing else."""
    model = FlatModel(nn.Linear(199, 2, dtype=torch.float64))
    kind = BatchClippedKernel if mechanism == "batch_clipped" else PerSampleKernel
    kernel = kind(model, cross_entropy)
    empty = Records(torch.zeros(0, 199).double(), torch.zeros(0, dtype=torch.int64))
    state = ldp_fedsgd.init(torch.zeros(400).double(), settings)
    steps, told = [], ldp_fedsgd.task(state, settings)
    for number in range(1, rounds + 1):
        replies = []
        for site, agreed in terms(mechanism).items():
            draws = SeededDraws(3, site, number)
            oracle = PrivateOracle(empty, kernel, agreed, draws, lambda *_: None)
            task = Task("run", number, "ldp_fedsgd", told.vectors, told.numbers)
            local = ldp_fedsgd.local(task, oracle, State(), settings)
            replies.append(Reply("run", number, site, agreed.size, local.vectors, local.numbers))
        after = ldp_fedsgd.update(state, iter(replies), settings)
        steps.append(state.vectors["w"] - after.vectors["w"])
        state = after
    return torch.cat(steps), state.numbers["noise_variance"]


def expected_variance(mechanism, weights):
    if mechanism == "per_sample":
        return aggregate_variance_of_sums(weights, SIZES, RATES, SIGMAS, CLIP)
    return sum((w * s * CLIP) ** 2 for w, s in zip(weights, SIGMAS, strict=True))


@pytest.mark.parametrize("mechanism", ["batch_clipped", "per_sample"])
@pytest.mark.parametrize("aggregation", ["batch_size", "least_noise"])
def test_the_aggregates_noise_is_what_theory_says(mechanism, aggregation):
    # 8000 numbers: the energy's relative deviation is 1.6 %, and 10 % in σ are 19 % or 21 %.
    settings = Settings(
        learning_rate=1.0, step_schedule="constant", aggregation=aggregation, bias_penalty=40.0
    )
    if aggregation == "batch_size":
        weights = [size / sum(BATCHES) for size in BATCHES]
    else:
        variances = [agreed.noise_variance for agreed in terms(mechanism).values()]
        weights = least_noise(BATCHES, variances, 40.0 / 400)
    variance = expected_variance(mechanism, weights)
    if (mechanism, aggregation) == ("batch_clipped", "batch_size"):
        assert variance == pytest.approx(aggregate_variance(SIZES, RATES, SIGMAS, CLIP), rel=1e-12)
    steps, stated = noise_of_rounds(mechanism, settings)
    assert stated == pytest.approx(variance, rel=1e-12)
    assert accepts(steps, variance)
    for wrong in (0.81, 1.21):
        assert not accepts(steps, wrong * variance)


# The paper's step on a strongly convex loss


class Distance(nn.Module):
    """x - w, so that half its square has μ = λ = 1 and the mean gradient w - x̄."""

    def __init__(self, size):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size).double())

    def forward(self, x):
        return x - self.w


def half_square(outputs, y, /):
    del y
    return outputs.square().sum(1) / 2


def test_papers_step_averages_noise_within_utility_bound():
    """η_t = G/(Cλt) with C = G, λ = 1: w_T - w* is the mean of the T aggregates' noises.

    4000 numbers: the energy's relative deviation is 2.2 %.
    """
    size, rounds, clip = 4000, 10, 1e3
    generator = torch.Generator().manual_seed(0)
    kernel = BatchClippedKernel(FlatModel(Distance(size)), half_square)
    sigmas, budget = {"a": 0.004, "b": 0.001, "c": 0.002}, Budget(9.0, 1e-5)
    held, agreed = {}, {}
    for site, n in [("a", 20), ("b", 5), ("c", 10)]:
        x = torch.randn(n, size, generator=generator, dtype=torch.float64)
        held[site] = Records(x, torch.zeros(n))
        noise = {"gradient": sigmas[site]}
        agreed[site] = Terms(site, n, 1.0, clip, noise, 99, budget, "best", "batch_clipped")
    optimum = torch.cat([records.x for records in held.values()]).mean(0)
    settings = Settings(learning_rate=1.0)
    state = ldp_fedsgd.init(torch.ones(size).double(), settings)
    for number in range(1, rounds + 1):
        task = Task("run", number, "ldp_fedsgd", {"w": state.vectors["w"]}, {})
        replies = []
        for site, records in held.items():
            draws = SeededDraws(3, site, number)
            oracle = PrivateOracle(records, kernel, agreed[site], draws, lambda *_: None)
            local = ldp_fedsgd.local(task, oracle, State(), settings)
            replies.append(Reply("run", number, site, 1.0, local.vectors, local.numbers))
        state = ldp_fedsgd.update(state, iter(replies), settings)
    variance = aggregate_variance((20, 5, 10), (1.0,) * 3, tuple(sigmas.values()), clip)
    rest = state.vectors["w"] - optimum
    assert accepts(rest, variance / rounds)
    for wrong in (0.81, 1.21):
        assert not accepts(rest, wrong * variance / rounds)
    problem = Problem(dimension=size, gradient_bound=clip, clip=clip)
    utility = 1 / (float(rest.square().sum()) / 2)
    assert utility >= utility_bound(problem, variance / clip**2, rounds)


# Whole runs


def plan(**changes):
    raw = {
        "algorithm": "ldp_fedsgd",
        "rounds": 4,
        "sites": 3,
        "partition": {"kind": "dirichlet", "held_out": 0.25},
        "run": {"workers": 1, "evaluate_every": 4},
        "privacy": {"mode": "batch_clipped", "accountant": "rdp"},
    }
    return Plan.parse({**raw, **changes})


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 4, generator=generator)
    return from_arrays(x, torch.randint(3, (120,), generator=generator))


OWN = {
    "site-00": {"epsilon": 1.0, "delta": 1e-6, "sampling_rate": 0.1},
    "site-01": {"epsilon": 4.0, "delta": 1e-4, "sampling_rate": 1.0},
    "site-02": {"epsilon": 8.0, "delta": 1e-5, "sampling_rate": 0.5, "sigma": 9.0},
}


@pytest.mark.parametrize("aggregation", ["batch_size", "least_noise"])
def test_sites_with_budgets_of_their_own(tmp_path, data, aggregation):
    privacy = {"mode": "batch_clipped", "accountant": "rdp", "per_site": OWN, "clip": 0.3}
    whole = plan(privacy=privacy, settings={"aggregation": aggregation})
    result = simulate(whole, tmp_path / "run", data=data)
    stated = json.loads((result.folder / "privacy.json").read_text())["sites"]
    assert (result.summary["status"], result.summary["rounds"]) == ("finished", 4)
    for site, own in OWN.items():
        made = charges(result.folder, site)
        sigma = stated[site]["sigmas"]["gradient"]
        assert sigma == own.get("sigma", sigma)
        assert sum(entry["count"] for entry in made) == 4
        # The noise is σ C on what one record moves by 2 C.
        assert {(e["q"], e["sigma"]) for e in made} == {(own["sampling_rate"], sigma / 2)}
        events = [(own["sampling_rate"], sigma / 2, 4)]
        spent = recounted.epsilon(events, own["delta"], "rdp")
        assert spent <= own["epsilon"] * (1 + 1e-3)
        if "sigma" not in own:
            assert spent >= 0.98 * own["epsilon"]
        assert result.summary["epsilon"][site] <= own["epsilon"]
        assert result.summary["epsilon"][site] >= 0.98 * spent
    sizes = [stated[site]["size"] for site in OWN]
    sigmas = [stated[site]["sigmas"]["gradient"] for site in OWN]
    rates = [own["sampling_rate"] for own in OWN.values()]
    least = aggregate_variance(sizes, rates, sigmas, 0.3)
    found = result.records[-1].numbers["noise_variance"]
    if aggregation == "batch_size":
        assert found == pytest.approx(least, rel=1e-12)
    else:
        assert found < least


def test_a_site_that_has_spent_its_budget_leaves_the_weights(tmp_path, data):
    spent = {**OWN, "site-02": {"epsilon": 1.2, "sigma": 9.0, "sampling_rate": 0.5}}
    privacy = {"mode": "batch_clipped", "accountant": "rdp", "per_site": spent}
    whole = plan(privacy=privacy, rounds=12)
    result = simulate(whole, tmp_path / "run", data=data)
    stated = json.loads((result.folder / "privacy.json").read_text())["sites"]
    steps = stated["site-02"]["steps"]
    assert 0 < steps < 12
    assert recounted.epsilon([(0.5, 4.5, steps)], 1e-5, "rdp") <= 1.2 * (1 + 1e-3)
    for record in result.records[1:]:
        left = [site for site in OWN if site not in record.refused]
        assert (len(left) == 3) == (record.round <= steps)
        columns = (
            [stated[site]["size"] for site in left],
            [stated[site]["rate"] for site in left],
            [stated[site]["sigmas"]["gradient"] for site in left],
        )
        assert record.numbers["noise_variance"] == pytest.approx(aggregate_variance(*columns))


def test_fedavg_and_fedfdp_run_under_batch_clipping_too(tmp_path, data):
    for name, settings in [("fedavg", {"local_steps": 2}), ("fedfdp", {"fairness_weight": 0.0})]:
        result = simulate(plan(algorithm=name, settings=settings), tmp_path / name, data=data)
        stated = json.loads((result.folder / "privacy.json").read_text())["sites"]
        for site, held in stated.items():
            sigmas = dict(held["sigmas"])
            needs = [2 / sigmas.pop("gradient"), *(1 / sigma for sigma in sigmas.values())]
            joint = sum(need**2 for need in needs) ** -0.5
            assert held["sigma_joint"] == pytest.approx(joint, rel=1e-12)
            made = charges(result.folder, site)
            assert {entry["sigma"] for entry in made} == {held["sigma_joint"]}
            steps = sum(entry["count"] for entry in made)
        # All sites have one budget and one noise.
        assert recounted.epsilon([(0.5, joint, steps)], 1e-5, "rdp") <= 2 * (1 + 1e-3)


def test_the_sites_public_numbers_do_not_depend_on_their_records():
    agreed = terms("batch_clipped")["a"]
    assert (agreed.batch_size, agreed.noise_variance) == (SIZES[0] * RATES[0], (4.0 * CLIP) ** 2)
    summed = dataclasses.replace(agreed, mechanism="per_sample")
    assert summed.noise_variance == pytest.approx((4.0 * CLIP / (SIZES[0] * RATES[0])) ** 2)
