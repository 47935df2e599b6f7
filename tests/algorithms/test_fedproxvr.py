"""FedProxVR's local solver against closed forms, and what it asks for."""

import math

import pytest
import torch

from fedpact.algorithms import fedproxvr
from fedpact.algorithms.fedproxvr import Settings
from fedpact.messages import State, Task

CENTER = torch.tensor([3.0, -2.0], dtype=torch.float64)


class Quadratic:
    """F(w) = ½ a ‖w - b‖², exactly; counts what it is asked for."""

    batch_size, noise_variance, steps_left = 1.0, 0.0, math.inf

    def __init__(self, a=2.0, b=(1.0, 0.5)):
        self.a, self.b = a, torch.tensor(b, dtype=torch.float64)
        self.batches_asked = 0

    def anchor(self, *channels):
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
def test_accuracy_ends_the_round_at_the_first_iterate_that_has_it(solver, theta):
    """‖∇J(w_t)‖ = ‖∇F(w̄)‖ times the contraction^t, so t is known; what follows is not asked for."""
    site, eta, mu = Quadratic(), 0.1, 0.7
    contraction = (1 - eta * site.a) / (1 + eta * mu)
    first = math.ceil(math.log(theta) / math.log(contraction))
    w = solve(site, solver=solver, accuracy=theta, learning_rate=eta, proximal=mu, local_steps=50)
    torch.testing.assert_close(w, proximal_descent(site, first, eta, mu), rtol=0, atol=1e-13)
    assert site.batches_asked == first
