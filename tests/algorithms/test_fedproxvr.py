"""FedProxVR's local solver against closed forms, and what it asks for."""

import json
import math

import pytest
import torch
from tests import recounted
from torch import nn

from fedpact.algorithms import fedproxvr
from fedpact.algorithms.fedproxvr import Settings
from fedpact.common.losses import cross_entropy
from fedpact.common.messages import State, Task
from fedpact.common.params import FlatModel
from fedpact.common.randomness.seeded import SeededDraws, seeded_generator
from fedpact.data.load import from_arrays
from fedpact.per_sample.kernel import PlainKernel
from fedpact.plan import Plan
from fedpact.privacy.ledger.hash_chain import read_entries
from fedpact.privacy.oracle import PlainOracle, Records
from fedpact.simulation.simulate import simulate

CENTER = torch.tensor([3.0, -2.0], dtype=torch.float64)


class Quadratic:
    """F(w) = ½ a ‖w - b‖², exactly; counts what it is asked for."""

    batch_size, noise_variance, steps_left, clip = 1.0, 0.0, math.inf, math.inf

    def __init__(self, a=2.0, b=(1.0, 0.5)):
        self.a, self.b = a, torch.tensor(b, dtype=torch.float64)
        self.batches_asked = 0

    def opening(self, *channels):
        return self

    def batches(self, count, *channels):
        for _ in range(count):
            self.batches_asked += 1
            yield self

    def gradient(self, w):
        return self.a * (w - self.b)

    def difference(self, w, anchor, bound):
        return self.a * (w - anchor)


def solve(oracle, number=1, **settings):
    """The site's answer of one round."""
    task = Task("run", number, "fedproxvr", {"w": CENTER}, {})
    return fedproxvr.local(task, oracle, State(), Settings(**settings)).vectors["w"]


def proximal_descent(site, steps, eta, mu):
    """w after `steps` exact proximal steps from w̄: each shortens the way to the minimiser of
    F + (μ/2)‖w - w̄‖², (a b + μ w̄)/(a + μ), by the factor (1 - ηa)/(1 + ημ)."""
    target = (site.a * site.b + mu * CENTER) / (site.a + mu)
    return target + ((1 - eta * site.a) / (1 + eta * mu)) ** steps * (CENTER - target)


@pytest.mark.parametrize("solver", ["sarah", "svrg", "sgd"])
@pytest.mark.parametrize(("steps", "mu"), [(1, 0.0), (4, 0.7), (30, 5.0)])
def test_with_exact_gradients_every_solver_is_proximal_descent(solver, steps, mu):
    site = Quadratic()
    w = solve(site, solver=solver, learning_rate=0.1, proximal=mu, local_steps=steps)
    expected = proximal_descent(site, steps + 1, 0.1, mu)
    torch.testing.assert_close(w, expected, rtol=0, atol=1e-13)


def test_the_step_is_one_over_beta_l():
    given = solve(Quadratic(), learning_rate=1 / (7 * 3), proximal=0.4)
    torch.testing.assert_close(
        solve(Quadratic(), step_divisor=7.0, smoothness=3.0, proximal=0.4), given, rtol=0, atol=0
    )


def test_the_random_iterate_is_one_of_the_path_and_costs_no_more():
    drawn = []
    for number in range(1, 200):
        site = Quadratic()
        w = solve(site, number, iterate="random", learning_rate=0.1, proximal=0.7, local_steps=5)
        (t,) = [
            t
            for t in range(1, 6)
            if torch.allclose(w, proximal_descent(site, t, 0.1, 0.7), rtol=0, atol=1e-13)
        ]
        assert site.batches_asked == t - 1
        drawn.append(t)
    # t' is a fixed sequence, so this cannot fail by chance: about 40 of 199 each.
    assert {t: 25 < drawn.count(t) < 55 for t in range(1, 6)} == dict.fromkeys(range(1, 6), True)


@pytest.mark.parametrize("solver", ["sarah", "svrg"])
@pytest.mark.parametrize("theta", [0.9, 0.5, 0.05])
def test_accuracy_ends_the_round_at_its_first_iterate(solver, theta):
    """‖∇J(w_t)‖ = ‖∇F(w̄)‖ times the contraction^t, so t is known; what follows is not asked for."""
    site, eta, mu = Quadratic(), 0.1, 0.7
    contraction = (1 - eta * site.a) / (1 + eta * mu)
    first = math.ceil(math.log(theta) / math.log(contraction))
    w = solve(site, solver=solver, accuracy=theta, learning_rate=eta, proximal=mu, local_steps=50)
    torch.testing.assert_close(w, proximal_descent(site, first, eta, mu), rtol=0, atol=1e-13)
    assert site.batches_asked == first


# ---------------------------------------------------------------- the opening


def test_all_of_a_run_is_in_its_ledgers_and_within_its_budget(tmp_path):
    """Each round is the opening at q_a and τ events at q; dp-accounting's sum of all is below ε."""
    draws = seeded_generator("records")
    x, y = torch.randn(90, 4, generator=draws), torch.randint(3, (90,), generator=draws)
    settings = {"opening_rate": 0.3, "opening_noise": 4.0, "local_steps": 6}
    plan = Plan.parse(
        {
            "algorithm": "fedproxvr",
            "rounds": 5,
            "sites": 2,
            "sampling_rate": 0.2,
            "settings": settings,
            "privacy": {"epsilon": 2.0},
            "run": {"workers": 1, "evaluate_every": 9},
        }
    )
    result = simulate(plan, tmp_path / "run", data=from_arrays(x, y))
    stated = json.loads((result.folder / "privacy.json").read_text())["sites"]
    for site, terms in stated.items():
        path = result.folder / "sites" / site / "ledger.jsonl"
        charges = [e for e in read_entries(path) if e["kind"] == "charge"]
        (sigma,) = terms["sigmas"].values()
        events = [(e["q"], e["sigma"], e["count"]) for e in charges]
        assert events == [(0.3, 4 * sigma, 1), (0.2, sigma, 6)] * 5
    # Of both sites. Theirs is an upper bound as well, of a discretised loss: allow it 0.1 %.
    assert 1.9 < recounted.epsilon(events, 1e-5) <= 2.0 * 1.001


def test_by_default_an_opening_is_as_noisy_as_the_batches_mean(tmp_path):
    """σ_a / (q_a N) is σ / (q N sqrt(τ)), whatever q a site has."""
    for rate, opened, tau in ((0.5, 1.0, 10), (0.02, 0.3, 4)):
        settings = {"opening_rate": opened, "local_steps": tau}
        asked = {"algorithm": "fedproxvr", "sampling_rate": rate, "settings": settings}
        (terms,) = Plan.parse({**asked, "privacy": {"epsilon": 2.0}}).terms({"a": 300.0}).values()
        batches = terms.sigmas["difference"] / (rate * math.sqrt(tau))
        assert terms.opening_sigmas["gradient"] / opened == pytest.approx(batches, rel=1e-9)


def test_openings_are_as_noisy_as_a_round_of_the_mean_tau():
    """Not as one of the controller's longest, of 100 steps: most of ε would go to the openings."""
    asked = {"algorithm": "fedproxvr", "rounds": 8, "sampling_rate": 0.5}
    plan = Plan.parse({**asked, "control": {"kind": "ali", "iterations": 72}})
    (terms,) = plan.terms({"a": 300.0}).values()
    noise = terms.sigmas["difference"], terms.opening_sigmas["gradient"]
    assert (terms.steps, terms.openings, noise[1] / noise[0]) == (72, 8, pytest.approx(2 / 3))


def test_a_sampled_opening_is_the_full_gradient_on_average():
    """400 openings of rate 0.3 over 40 records: their mean is off by a few of its standard errors.

    15 coordinates within six standard errors each: fails once in 3e7.
    """
    model = FlatModel(nn.Linear(4, 3, dtype=torch.float64))
    x = torch.randn(40, 4, generator=seeded_generator("x"), dtype=torch.float64)
    y = torch.randint(3, (40,), generator=seeded_generator("y"))
    kernel, w = PlainKernel(model, cross_entropy), model.vector.clone()

    def openings(rate, count):
        oracles = (
            PlainOracle(Records(x, y), kernel, 0.1, 40.0, SeededDraws(seed), rate)
            for seed in range(count)
        )
        return torch.stack([oracle.opening("gradient").gradient(w) for oracle in oracles])

    (full,), sampled = openings(1.0, 1), openings(0.3, 400)
    error = sampled.std(0) / 400**0.5
    assert bool(((sampled.mean(0) - full).abs() < 6 * error).all())
    assert float(error.max()) < 0.1 * float(full.norm())
