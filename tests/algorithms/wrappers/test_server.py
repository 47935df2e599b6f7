"""Server optimisers against the papers' recurrences and against torch.optim."""

import math

import pytest
import torch
from tests.algorithms.made_up import SMALL

from fedpact.algorithms.fedavg import Settings
from fedpact.algorithms.wrappers.base import Method
from fedpact.algorithms.wrappers.optimizers import ServerOptimised, ServerSettings
from fedpact.common.errors import PlanError
from fedpact.common.messages import Reply, State
from fedpact.plan import Plan
from fedpact.simulation.simulate import simulate


def path(server, targets):
    """The server's models when the sites' mean is, round by round, w plus each of the steps."""
    method = ServerOptimised(Method("fedavg", Settings()), server, len(targets))
    state = method.init(torch.zeros(3, dtype=torch.float64))
    models = []
    for step in targets:
        reply = Reply("r", 1, "a", 1.0, {"w": state.vectors["w"] + step}, {})
        state = method.update(state, iter([reply]))
        models.append(state.vectors["w"])
    return torch.stack(models)


@pytest.fixture(scope="module")
def steps():
    generator = torch.Generator().manual_seed(3)
    return list(torch.randn(12, 3, generator=generator, dtype=torch.float64))


def optimised(make, steps):
    """The path of a torch optimiser whose gradients are -Δ."""
    w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimiser, models = make([w]), []
    for step in steps:
        w.grad = -step
        optimiser.step()
        models.append(w.detach().clone())
    return torch.stack(models)


@pytest.mark.parametrize(("rate", "beta"), [(1.0, 0.9), (0.3, 0.5), (1.0, 0.0)])
def test_momentum_is_torchs(steps, rate, beta):
    ours = path(ServerSettings(optimiser="momentum", learning_rate=rate, momentum=beta), steps)
    theirs = optimised(lambda p: torch.optim.SGD(p, lr=rate, momentum=beta), steps)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_adam_without_second_memory_is_a_signed_step(steps, beta):
    """β2 = 0 and a -> 0: the step is η_s m / |Δ|, coordinate by coordinate."""
    server = ServerSettings(
        optimiser="adam", momentum=beta, second_moment=0.0, adaptivity=1e-12, learning_rate=0.5
    )
    m, w, expected = torch.zeros(3), torch.zeros(3), []
    for step in steps:
        m = beta * m + (1 - beta) * step
        w = w + 0.5 * m / step.abs()
        expected.append(w)
    torch.testing.assert_close(path(server, steps), torch.stack(expected), rtol=1e-9, atol=1e-9)


def test_adams_second_moment_is_an_exponential_mean(steps):
    """v_t = β2^t a² + (1 - β2) Σ β2^(t-s) Δ_s², in closed form instead of the recurrence."""
    server = ServerSettings(optimiser="adam", momentum=0.0, adaptivity=0.1, learning_rate=1.0)
    squares = torch.stack(steps).square()
    expected = torch.zeros(3, dtype=torch.float64)
    models = []
    for t, step in enumerate(steps, 1):
        weights = 0.99 ** torch.arange(t - 1, -1, -1, dtype=torch.float64)
        second = 0.99**t * 0.01 + 0.01 * (weights[:, None] * squares[:t]).sum(0)
        expected = expected + step / (second.sqrt() + 0.1)
        models.append(expected)
    torch.testing.assert_close(path(server, steps), torch.stack(models), rtol=1e-11, atol=1e-11)


def test_yogis_second_moment_moves_by_the_square_alone(steps):
    """|v_t - v_{t-1}| = (1 - β2) Δ², up where Δ² > v: unlike Adam's, whatever v is."""
    server = ServerSettings(optimiser="yogi", momentum=0.0, learning_rate=1.0, adaptivity=0.5)
    second, w, expected = torch.full((3,), 0.25, dtype=torch.float64), torch.zeros(3), []
    for step in steps:
        up = 2 * (step.square() > second).double() - 1
        second = second + 0.01 * up * step.square()
        w = w + step / (second.sqrt() + 0.5)
        expected.append(w)
    torch.testing.assert_close(path(server, steps), torch.stack(expected), rtol=1e-11, atol=1e-11)


def test_sites_are_not_informed_of_it():
    method = ServerOptimised(Method("fedavg", Settings()), ServerSettings(optimiser="yogi"), 5)
    told = method.task(method.init(torch.ones(4)))
    assert told.vectors.keys() == {"w"}
    assert isinstance(told, State)


@pytest.mark.parametrize(
    ("chosen", "factors"),
    [
        ({"schedule": "cosine"}, [(1 + math.cos(math.pi * t / 12)) / 2 for t in range(12)]),
        ({"schedule": "inverse", "halved_after": 3.0}, [3 / (3 + t) for t in range(12)]),
        ({"schedule": [1.0, 0.25, 0.5]}, [1.0, 0.25, *[0.5] * 10]),
        ({"schedule": [0.0]}, [0.0] * 12),
    ],
)
@pytest.mark.parametrize("optimiser", ["momentum", "adam"])
def test_a_schedule_is_a_learning_rate_of_each_round(steps, chosen, factors, optimiser):
    """The optimiser's memory does not notice it: each step is the constant one times f(t)."""
    constant = path(ServerSettings(optimiser=optimiser), steps)
    steps_taken = torch.diff(constant, dim=0, prepend=torch.zeros(1, 3))
    expected = steps_taken * torch.tensor(factors, dtype=torch.float64)[:, None]
    found = path(ServerSettings(optimiser=optimiser, **chosen), steps)
    torch.testing.assert_close(found, expected.cumsum(0), rtol=0, atol=1e-12)


def test_a_schedule_is_the_same_in_a_run_that_is_resumed(tmp_path):
    table = {"optimiser": "momentum", "schedule": "cosine"}
    plan = Plan.parse({**SMALL, "server": table})
    whole = simulate(plan, tmp_path / "whole")
    done = []
    simulate(plan, tmp_path / "cut", on_round=done.append, stop=lambda: len(done) > 2)
    resumed = simulate(plan, tmp_path / "cut")
    assert len(done) < 5
    assert resumed.records[-1].round == 4
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "table",
    [
        {"schedule": "cosine"},
        {"optimiser": "momentum", "schedule": [0.5, -1.0]},
        {"optimiser": "momentum", "schedule": [float("nan")]},
        {"optimiser": "momentum", "halved_after": 3.0},
        # These would spend all of ε, and train nothing.
        {"optimiser": "momentum", "schedule": [0.0]},
        {"optimiser": "momentum", "schedule": [0.0] * 30 + [1.0]},
        {"optimiser": "adam", "schedule": [1e308, 1e308]},
    ],
)
def test_unknown_input_is_refused(table):
    with pytest.raises(PlanError, match="server"):
        Plan.parse({"server": table})
