"""Known optima: every algorithm's fixed point on unequal quadratics, from the papers' equations.

F_i(w) = ½ a_i ‖w - b_i‖², so ∇F_i(w) = a_i (w - b_i), and a step w - η∇F_i(w) scales w - b_i by
1 - η a_i. The oracle is exact: one record a site, always in the batch, no noise.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from fedpact import algorithms
from fedpact.algorithms import term
from fedpact.algorithms.wrappers.base import Method
from fedpact.common.messages import Reply, State, Task
from fedpact.privacy.oracle import Uniform


@dataclass(frozen=True)
class Quadratic:
    """A site's objective; as an oracle and a batch it implements both protocols."""

    a: float
    b: Tensor
    size: float
    noise_variance: float = 0.0
    sampling_rate: float = 1.0

    @property
    def batch_size(self):
        return self.size

    def batches(self, count, *channels):
        for _ in range(count):
            yield self

    def gradient(self, w, weighting=Uniform()):  # noqa: B008
        weight = weighting(torch.tensor([self.value(w)], dtype=w.dtype))
        return weight * self.a * (w - self.b)

    def loss(self, w, bound):
        return self.value(w)

    def below(self, w, bound):
        return float(self.value(w) <= bound)

    def value(self, w):
        return 0.5 * self.a * float((w - self.b).square().sum())


SITES = {
    "a": Quadratic(1.0, torch.tensor([1.0, 0.0], dtype=torch.float64), 30.0),
    "b": Quadratic(4.0, torch.tensor([-1.0, 2.0], dtype=torch.float64), 10.0),
}
P = {name: site.size / 40 for name, site in SITES.items()}
START = torch.tensor([3.0, -2.0], dtype=torch.float64)


def same(one, other):
    kept = one.numbers == other.numbers and one.vectors.keys() == other.vectors.keys()
    return kept and all(torch.equal(v, other.vectors[name]) for name, v in one.vectors.items())


def run(name, settings, rounds, sites=None):
    """The server's state after some rounds, from START, or as soon as a round changes nothing."""
    method = Method(name, settings)
    state, memories = method.init(START), dict.fromkeys(SITES, State())
    for number in range(1, rounds + 1):
        before, remembered = state, dict(memories)
        told = method.task(state)
        task = Task("run", number, name, told.vectors, told.numbers)
        replies = []
        for site, objective in (sites or SITES).items():
            local = method.local(task, objective, memories[site])
            memories[site] = local.memory
            replies.append(Reply("run", number, site, objective.size, local.vectors, local.numbers))
        state = method.update(state, iter(replies))
        if same(state, before) and all(same(memories[n], remembered[n]) for n in memories):
            break
    return state


def make(name, **settings):
    return algorithms.load(name).Settings(**settings)


def weighted(values):
    return sum(P[name] * value for name, value in values.items())


def fedavgs_fixed_point(rate, steps):
    """The w with Σ p_i (1 - (1 - η a_i)^τ) (w - b_i) = 0."""
    pull = {name: 1 - (1 - rate * site.a) ** steps for name, site in SITES.items()}
    return weighted({n: pull[n] * SITES[n].b for n in SITES}) / weighted(pull)


OPTIMUM = weighted({n: s.a * s.b for n, s in SITES.items()}) / weighted(
    {n: s.a for n, s in SITES.items()}
)


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_fedavg(steps):
    # A round contracts by at most max |1 - η a_i| = 0.9: 400 rounds leave 1e-18 of the start.
    w = run("fedavg", make("fedavg", learning_rate=0.1, local_steps=steps), 400).vectors["w"]
    torch.testing.assert_close(w, fedavgs_fixed_point(0.1, steps), rtol=0, atol=1e-12)


def test_fedavg_reaches_the_optimum_at_one_step_only():
    torch.testing.assert_close(fedavgs_fixed_point(0.1, 1), OPTIMUM, rtol=0, atol=1e-14)
    assert float((fedavgs_fixed_point(0.1, 10) - OPTIMUM).norm()) > 0.1


@pytest.mark.parametrize("steps", [1, 10])
def test_fedprox(steps):
    """A local step scales w - w̄ - m by ρ = 1 - η (a + μ), m the way from w̄ to the minimum of
    F_i + (μ/2)‖w - w̄‖², a (b - w̄)/(a + μ); so Σ p_i (1 - ρ_i^τ) a_i/(a_i + μ) (w̄ - b_i) = 0."""
    rate, mu = 0.1, 2.0
    settings = make("fedprox", learning_rate=rate, local_steps=steps, proximal=mu)
    w = run("fedprox", settings, 600).vectors["w"]
    pull = {n: (1 - (1 - rate * (s.a + mu)) ** steps) * s.a / (s.a + mu) for n, s in SITES.items()}
    expected = weighted({n: pull[n] * SITES[n].b for n in SITES}) / weighted(pull)
    torch.testing.assert_close(w, expected, rtol=0, atol=1e-12)


EVENLY = (1.0 * SITES["a"].b + 4.0 * SITES["b"].b) / 5  # the minimum of F_a + F_b


WEIGHTED = pytest.mark.parametrize(
    ("steps", "aggregation", "optimum"), [(1, "size", OPTIMUM), (10, "uniform", EVENLY)]
)


@WEIGHTED
def test_scaffold_reaches_the_optimum_whatever_the_steps(steps, aggregation, optimum):
    """With c_i = ∇F_i(w*) and c = 0 no step from w* moves anything; fedavg stops elsewhere."""
    settings = make("scaffold", learning_rate=0.1, local_steps=steps, aggregation=aggregation)
    state = run("scaffold", settings, 400)
    torch.testing.assert_close(state.vectors["w"], optimum, rtol=0, atol=1e-12)
    torch.testing.assert_close(state.vectors["c"], torch.zeros_like(optimum), rtol=0, atol=1e-12)


@WEIGHTED
def test_feddyn_reaches_the_optimum_whatever_the_steps(steps, aggregation, optimum):
    """With h_i = ∇F_i(w*) no step from w* moves anything, and Σ p_i h_i = 0."""
    settings = make(
        "feddyn", learning_rate=0.1, local_steps=steps, proximal=1.0, aggregation=aggregation
    )
    w = run("feddyn", settings, 500).vectors["w"]
    torch.testing.assert_close(w, optimum, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("q", "aggregation"), [(0.5, "size"), (2.0, "uniform")])
def test_qffl_minimises_its_objective(q, aggregation):
    """At τ = 1: argmin Σ p_i F_i^(q+1)/(q+1), where Σ p_i F_i^q ∇F_i = 0."""
    p = P if aggregation == "size" else dict.fromkeys(SITES, 0.5)
    settings = make("qffl", learning_rate=0.1, fairness_exponent=q, aggregation=aggregation)
    w = run("qffl", settings, 600).vectors["w"]
    gradient = sum(p[n] * s.value(w) ** q * s.gradient(w) for n, s in SITES.items())
    torch.testing.assert_close(gradient, torch.zeros_like(w), rtol=0, atol=1e-10)

    def objective(point):
        at = torch.from_numpy(point)
        return sum(p[n] * s.value(at) ** (q + 1) for n, s in SITES.items()) / (q + 1)

    found = minimize(objective, OPTIMUM.numpy(), method="BFGS", options={"gtol": 1e-10}).x
    # The numerical minimum is good to about 1e-6.
    torch.testing.assert_close(w, torch.from_numpy(found), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "setting", "least"), [("qffl", "fairness_exponent", 1.1), ("term", "tilt", 1.05)]
)
def test_the_larger_the_exponent_the_better_off_the_worst_site(name, setting, least):
    worst = []
    for value in (0.0, 1.0, 5.0):
        w = run(name, make(name, learning_rate=0.05, **{setting: value}), 200).vectors["w"]
        worst.append(max(site.value(w) for site in SITES.values()))
    assert worst[0] > 1.1 * worst[1] > 1.1 * least * worst[2]


@pytest.mark.parametrize("communication", [1.0, 0.5])
def test_proxskip_reaches_the_optimum_whatever_the_coins(communication):
    """With h_i = ∇F_i(w*) no step from w* moves anything, and Σ p_i h_i = 0."""
    settings = make("proxskip", learning_rate=0.1, communication=communication)
    w = run("proxskip", settings, 600).vectors["w"]
    torch.testing.assert_close(w, OPTIMUM, rtol=0, atol=1e-11)


def test_proxskips_control_variate_is_the_papers():
    """h = (p/γ)(w̄ - x̂), and x̂ - (γ/p) h is sent: with another p it converges, only slower."""
    settings, site = make("proxskip", learning_rate=0.1, communication=0.25), SITES["b"]
    told = START + 1
    memory = State({"w": START}, {"round": 1.0})
    task = Task("run", 2, "proxskip", {"w": told}, {"local_steps": 1.0})
    local = algorithms.load("proxskip").local(task, site, memory, settings)
    h = 0.25 / 0.1 * (told - START)
    ended = told - 0.1 * (site.gradient(told) - h)
    torch.testing.assert_close(local.memory.vectors["h"], h, rtol=0, atol=1e-14)
    torch.testing.assert_close(local.vectors["w"], ended - 0.1 / 0.25 * h, rtol=0, atol=1e-14)


def test_proxskips_rounds_are_as_long_as_the_coin_says():
    """2,000 geometric lengths of mean 1/p = 4: their mean spreads by 0.08; five of that."""
    algorithm, settings = algorithms.load("proxskip"), make("proxskip", communication=0.25)
    long = settings.model_copy(update={"most_steps": 1000})
    lengths = [algorithm.steps(long, State({}, {"round": float(n)})) for n in range(2000)]
    assert sum(lengths) / 2000 == pytest.approx(4.0, abs=0.4)
    capped = [algorithm.steps(settings, State({}, {"round": float(n)})) for n in range(2000)]
    assert capped == [min(n, settings.most_steps) for n in lengths]


def test_fednova_minimises_the_weighted_loss_with_unlike_steps():
    """At small η the fixed point is that of Σ p_i F_i; fedavg's mean leans to the longer site.

    Sites of 8 and 1 steps: Σ p_i (1 - (1 - η a_i)^τ_i)/τ_i (w - b_i) = 0, exactly.
    """
    rate = 0.01
    rates = {"a": 1 / 8, "b": 1.0}
    sites = {n: replace(s, sampling_rate=rates[n]) for n, s in SITES.items()}
    settings = make("fednova", learning_rate=rate, passes=1.0, local_steps=10)
    w = run("fednova", settings, 4000, sites).vectors["w"]
    steps = {n: 1 / rate_ for n, rate_ in rates.items()}
    pull = {n: (1 - (1 - rate * s.a) ** steps[n]) / steps[n] for n, s in SITES.items()}
    expected = weighted({n: pull[n] * SITES[n].b for n in SITES}) / weighted(pull)
    torch.testing.assert_close(w, expected, rtol=0, atol=1e-10)
    leaning = {n: pull[n] * steps[n] for n in SITES}
    fedavgs = weighted({n: leaning[n] * SITES[n].b for n in SITES}) / weighted(leaning)
    assert float((w - OPTIMUM).norm()) < 0.1 * float((fedavgs - OPTIMUM).norm())


@pytest.mark.parametrize("tilt", [2.0, -0.05])
def test_term_minimises_its_tilted_loss(tilt):
    """At τ = 1: the gradient of (1/t) log Σ p_i exp(t F_i), Σ a_i ∇F_i, is 0."""
    w = run("term", make("term", learning_rate=0.05, tilt=tilt), 1000).vectors["w"]
    tilted = {n: P[n] * math.exp(tilt * s.value(w)) for n, s in SITES.items()}
    gradient = sum(tilted[n] * s.gradient(w) for n, s in SITES.items())
    torch.testing.assert_close(gradient, torch.zeros_like(w), rtol=0, atol=1e-9)


@pytest.mark.parametrize("tilt", [2.0, -2.0])
def test_term_leans_alike_however_large_all_losses_are(tilt):
    """A constant that is added to all losses changes no weight, as it cancels in each a_i."""
    found = []
    for least in (0.0, 1e4):
        replies = [
            Reply("run", 1, name, site.size, {"w": site.b}, {"loss": least + loss})
            for (name, site), loss in zip(SITES.items(), (0.5, 1.5), strict=True)
        ]
        found.append(term.update(State({"w": START}), replies, make("term", tilt=tilt)))
    torch.testing.assert_close(*(state.vectors["w"] for state in found), rtol=1e-9, atol=0)
    assert (
        float((found[0].vectors["w"] - weighted({n: s.b for n, s in SITES.items()})).norm()) > 0.1
    )


def test_term_tells_losses_apart_however_far_they_are():
    replies = [
        Reply("run", 1, str(i), 1.0, {"w": w}, {"loss": 700.0 * i})
        for i, w in enumerate(torch.eye(3).double())
    ]
    for order in (replies, replies[::-1]):
        after = term.update(State({"w": torch.zeros(3).double()}), order, make("term", tilt=1.0))
        assert after.vectors["w"].tolist() == pytest.approx([0.0, 0.0, 1.0])


def test_afl_reaches_the_best_for_the_worst_mixture():
    """At the saddle point both sites' losses are equal, and a mixture of gradients is 0."""
    settings = make("afl", learning_rate=0.1, mixture_rate=0.05)
    w = run("afl", settings, 2000).vectors["w"]

    def worst(point):
        return max(site.value(torch.from_numpy(point)) for site in SITES.values())

    losses = [site.value(w) for site in SITES.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    found = minimize(worst, OPTIMUM.numpy(), method="Nelder-Mead", options={"xatol": 1e-9}).x
    assert max(losses) == pytest.approx(worst(found), rel=1e-5)


@pytest.mark.parametrize("aggregation", ["batch_size", "least_noise"])
def test_ldp_fedsgd(aggregation):
    """With step η_1/t what is left of w - w* is Π (1 - η_1 a/t), a = Σ p_i a_i; without noise the
    two aggregations are one."""
    a = weighted({n: s.a for n, s in SITES.items()})
    settings = make("ldp_fedsgd", learning_rate=0.3, aggregation=aggregation)
    left = 1.0
    for number in range(1, 8):
        left *= 1 - 0.3 * a / number
        w = run("ldp_fedsgd", settings, number).vectors["w"]
        torch.testing.assert_close(w, OPTIMUM + left * (START - OPTIMUM), rtol=0, atol=1e-12)


def test_fedfdp_without_fairness_reaches_the_optimum():
    w = run("fedfdp", make("fedfdp", learning_rate=0.1, fairness_weight=0.0), 400).vectors["w"]
    torch.testing.assert_close(w, OPTIMUM, rtol=0, atol=1e-12)


def value_and_unfairness(w):
    """F(w) and Ψ(w) = Σ p_i (F_i(w) - F(w))²."""
    losses = {name: site.value(w) for name, site in SITES.items()}
    mean = weighted(losses)
    return mean, weighted({name: (loss - mean) ** 2 for name, loss in losses.items()})


@pytest.mark.parametrize("fairness", [0.05, 0.3])
def test_fedfdps_fixed_point(fairness):
    """Σ p_i (1 + λ (F_i(w) - F)) a_i (w - b_i) = 0 with F = Σ p_i F_i(w_i), w_i after the step."""
    rate = 0.05
    settings = make("fedfdp", learning_rate=rate, fairness_weight=fairness)
    state = run("fedfdp", settings, 600)
    w, reference = state.vectors["w"], state.numbers["loss"]
    weights = {n: 1 + fairness * (s.value(w) - reference) for n, s in SITES.items()}
    assert min(weights.values()) > 0  # not clamped here
    steps = {n: weights[n] * s.a * (w - s.b) for n, s in SITES.items()}
    torch.testing.assert_close(weighted(steps), torch.zeros_like(w), rtol=0, atol=1e-12)
    after = weighted({n: s.value(w - rate * steps[n]) for n, s in SITES.items()})
    assert reference == pytest.approx(after, rel=1e-12)


def test_fedfdp_minimises_fedfairs_objective_at_small_steps():
    """As η → 0 it reaches argmin F + (λ/2) Ψ; F is Σ p_i F_i(w_i), which is off by O(η)."""

    fairness = 0.3

    def objective(point):
        mean, unfairness = value_and_unfairness(torch.from_numpy(point))
        return mean + fairness / 2 * unfairness

    found = minimize(objective, OPTIMUM.numpy(), method="BFGS", options={"gtol": 1e-10}).x
    errors = []
    for rate in (0.04, 0.02):
        settings = make("fedfdp", learning_rate=rate, fairness_weight=fairness)
        w = run("fedfdp", settings, round(12 / rate)).vectors["w"]
        errors.append(float((w - torch.from_numpy(found)).norm()))
        assert value_and_unfairness(w)[1] < 0.9 * value_and_unfairness(OPTIMUM)[1]
    # First order: half the step, half the error; the numerical minimum is good to 1e-6 only.
    assert errors[0] < 0.1
    assert errors[1] == pytest.approx(errors[0] / 2, rel=0.1, abs=2e-6)


def test_a_wrong_weighting_would_be_found():
    """With the sites' weights swapped, or uniform, neither fixed point is reached."""
    swapped = {n: replace(s, size=40 - s.size) for n, s in SITES.items()}
    settings = make("fedavg", learning_rate=0.1)
    w = run("fedavg", settings, 400, swapped).vectors["w"]
    assert float((w - OPTIMUM).norm()) > 0.1
