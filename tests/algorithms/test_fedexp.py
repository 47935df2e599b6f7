"""FedExP's step by its paper's (6), and that noise alone does not lengthen it."""

import pytest
import torch

from fedpact.algorithms import fedexp
from fedpact.algorithms.wrappers.base import Method
from fedpact.common.messages import Reply, State
from fedpact.studies.conformance import HandFederation

START = torch.tensor([3.0, -2.0], dtype=torch.float64)


def updated(moves, weights, damping=1e-12):
    start = torch.arange(3.0, 3.0 + len(moves[0]), dtype=torch.float64)
    replies = [
        Reply("r", 1, str(i), weight, {"w": start + move}, {"moved": float(move.square().sum())})
        for i, (move, weight) in enumerate(zip(moves, weights, strict=True))
    ]
    settings = fedexp.Settings(damping=damping)
    return fedexp.update(State({"w": start}), replies, settings).vectors["w"] - start


def test_sites_that_agree_take_fedavgs_step():
    move = torch.tensor([0.5, 0.25], dtype=torch.float64)
    torch.testing.assert_close(updated([move, move], [3.0, 1.0]), move, rtol=1e-12, atol=0)


@pytest.mark.parametrize("sites", [2, 3, 6])
def test_orthogonal_sites_step_by_half_their_number(sites):
    """Σ ‖Δ_i‖²/M over 2 ‖Σ Δ_i/M‖² is M/2; at two sites it is 1."""
    moves = list(torch.eye(sites, dtype=torch.float64))
    torch.testing.assert_close(updated(moves, [1.0] * sites), sum(moves) / 2, rtol=1e-9, atol=0)


def test_the_extrapolation_is_the_papers():
    """(6) by hand, with unlike weights: p = 3/4, 1/4."""
    moves = [torch.tensor([1.0, 0.0]).double(), torch.tensor([-1.0, 0.5]).double()]
    mean = 0.75 * moves[0] + 0.25 * moves[1]
    scale = (0.75 * 1.0 + 0.25 * 1.25) / (2 * (float(mean.square().sum()) + 0.01))
    assert scale > 1
    found = updated(moves, [3.0, 1.0], damping=0.01)
    torch.testing.assert_close(found, scale * mean, rtol=1e-12, atol=0)


def test_noise_alone_makes_no_step_longer():
    """Empty sites send noise: D_i is freed of its energy, and a step along noise has its length."""
    settings, moved, spare, steps = fedexp.Settings(local_steps=2), [], [], []
    method, energy = Method("fedexp", settings), 0.0
    for seed in range(40):
        bed = HandFederation(
            private=True, seed=seed, counts={"a": 0, "b": 0}, sizes={"a": 10.0, "b": 10.0}
        )
        state = method.init(bed.w)
        replies = list(bed.replies(method, state))
        variance = bed.terms("a", method.facts.channels, None).noise_variance
        energy = 2 * settings.learning_rate**2 * len(bed.w) * variance
        for reply in replies:
            moved.append(float((reply.vectors["w"] - bed.w).square().sum()))
            spare.append(max(0.0, moved[-1] - energy))
            assert reply.numbers["moved"] == pytest.approx(spare[-1], rel=1e-9, abs=1e-12)
        mean = sum(reply.vectors["w"] for reply in replies) / 2 - bed.w
        step = method.update(state, iter(replies)).vectors["w"] - bed.w
        steps.append(float(step.norm() / mean.norm()))
    # 80 chi-squared values of 12 degrees of freedom: their mean spreads by 4.6 %; five of that.
    assert sum(moved) / 80 == pytest.approx(energy, rel=0.23)
    # Opposite noise lengthens about one step in 1,000: three of 40 once in 80,000 tests.
    assert sum(step > 1 + 1e-9 for step in steps) <= 2


def test_a_nan_takes_fedavgs_step():
    move = torch.tensor([0.5, 0.25], dtype=torch.float64)
    reply = Reply("r", 1, "a", 1.0, {"w": START + move}, {"moved": float("nan")})
    w = fedexp.update(State({"w": START}), [reply], fedexp.Settings()).vectors["w"]
    torch.testing.assert_close(w, START + move, rtol=1e-15, atol=0)
