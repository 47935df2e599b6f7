"""Server optimisers against the papers' recurrences and against torch.optim."""

import pytest
import torch

from fedpact.algorithms.fedavg import Settings
from fedpact.errors import PlanError
from fedpact.messages import Reply, State
from fedpact.methods import Method
from fedpact.methods.server import ServerOptimised, ServerSettings
from fedpact.plan import Plan


def path(server, targets):
    """The server's models when the sites' mean is, round by round, w plus each of the steps."""
    method = ServerOptimised(Method("fedavg", Settings()), server)
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


@pytest.mark.parametrize(("rate", "beta"), [(1.0, 0.9), (0.3, 0.5)])
def test_momentum_is_torchs(steps, rate, beta):
    ours = path(ServerSettings(optimiser="momentum", learning_rate=rate, momentum=beta), steps)
    theirs = optimised(lambda p: torch.optim.SGD(p, lr=rate, momentum=beta), steps)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_momentum_without_any_is_the_algorithm_alone(steps):
    ours = path(ServerSettings(optimiser="momentum", momentum=0.0), steps)
    torch.testing.assert_close(ours, torch.stack(steps).cumsum(0), rtol=0, atol=1e-13)


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


def test_sites_are_told_nothing_of_it():
    method = ServerOptimised(Method("fedavg", Settings()), ServerSettings(optimiser="yogi"))
    told = method.task(method.init(torch.ones(4)))
    assert told.vectors.keys() == {"w"}
    assert isinstance(told, State)


@pytest.mark.parametrize("table", [{"optimiser": "adagrad"}, {"momentum": 1.0}, {"rate": 1.0}])
def test_what_is_not_understood_is_refused(table):
    with pytest.raises(PlanError, match="server"):
        Plan.parse({"server": table})
