"""Local steps with momentum or a schedule: against torch.optim, and where they are refused."""

import math

import pytest
import torch
from tests.algorithms.made_up import SMALL

from fedpact.algorithms.wrappers.integers import weights
from fedpact.common.errors import PlanError
from fedpact.common.messages import Task
from fedpact.common.run_settings import Scheduled
from fedpact.plan import Plan
from fedpact.simulation.simulate import simulate
from fedpact.studies.conformance import HandFederation, method_of

LOCAL = {"momentum": 0.6, "schedule": [1.0, 0.5, 2.0, 0.25]}
FACTORS = [1.0, 0.5, 2.0, 0.25, 0.25, 0.25]


def by_hand(made, rounds, steps, rate, beta, factors):
    """FedAvg on all records of each site with torch's optimiser and these factors of its rate."""
    w, count = made.w.clone(), 0
    total = sum(made.sizes.values())
    for _ in range(rounds):
        mean = torch.zeros_like(w)
        for site in made.sites:
            own = torch.nn.Parameter(w.clone())
            optimiser = torch.optim.SGD([own], lr=rate, momentum=beta)
            for k in range(steps):
                optimiser.param_groups[0]["lr"] = rate * factors[count + k]
                made.model.load(own.detach())
                records = made.records[site]
                each = made.kernel.alone(records.x, records.y)
                own.grad = each.mean(0)
                optimiser.step()
            mean += made.sizes[site] / total * own.detach()
        w, count = mean, count + steps
    return w


@pytest.mark.parametrize(("steps", "beta"), [(1, 0.0), (3, 0.0), (3, 0.6)])
def test_local_steps_are_torchs(steps, beta):
    """Full batches of a plain run; momentum begins anew in each round."""
    tables = {"algorithm": "fedavg", "rounds": 2, "local": {**LOCAL, "momentum": beta}}
    method = method_of({**tables, "settings": {"local_steps": steps, "learning_rate": 0.3}})
    made = HandFederation(private=False, rate=1.0)
    ours = made.run(method, 2).vectors["w"]
    factors = FACTORS if steps == 3 else [1.0, 0.5]
    theirs = by_hand(made, 2, steps, 0.3, beta, factors)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_reply_is_coded_by_the_noise_that_its_steps_have():
    """-η (f_1 + f_2 β) and so on for the releases of a round; by them `grid` takes its steps."""
    tables = {"algorithm": "fedavg", "settings": {"local_steps": 2, "learning_rate": 0.5}}
    made = method_of({**tables, "rounds": 2, "local": LOCAL, "server": {"optimiser": "adam"}})
    zeros = {"w": torch.zeros(3)}
    for number, (one, two) in ((1, (1.0, 0.5)), (2, (2.0, 0.25))):
        found = weights(made, Task("run", number, "fedavg", zeros, {}))["w"]
        expected = 0.5 * math.hypot(one + 0.6 * two, two)
        assert found == (pytest.approx(expected, rel=1e-12), 0.0)


def test_a_schedule_counts_steps_through_the_rounds():
    """Of T = 12: n = 1 .. 12, whatever the round."""
    assert Scheduled(schedule="cosine").factor(7, 12) == pytest.approx(0.5)
    assert Scheduled(schedule="inverse", halved_after=4).factor(5, 12) == pytest.approx(0.5)
    assert Scheduled(schedule=[3.0, 2.0]).factor(9, 12) == 2.0


def test_optimizer_spends_as_plain_steps(tmp_path):
    tables = {**SMALL, "settings": {"local_steps": 2}}
    plan = Plan.parse({**tables, "local": {"momentum": 0.9, "schedule": "cosine"}})
    whole = simulate(plan, tmp_path / "whole")
    plain = simulate(Plan.parse(tables), tmp_path / "plain")
    for one, other in zip(whole.records, plain.records, strict=True):
        assert one.epsilon == other.epsilon
    ends = [torch.cat([p.reshape(-1) for p in r.model.parameters()]) for r in (whole, plain)]
    assert not torch.equal(*ends)


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"local": {"schedule": [0.0]}}, "above 0"),
        ({"local": {"schedule": [0.0] * 4 + [1.0]}, "rounds": 4}, "above 0 .* steps 1 to 4"),
        ({"local": {"schedule": [1e308, 1e308]}}, r"local\.schedule\.0 is 1e\+308"),
        ({"local": {"schedule": [-1.0, 1.0]}}, "schedule"),
        ({"local": {"halved_after": 3.0}}, 'belongs to schedule = "inverse"'),
        ({"local": {"schedule": "cosine"}, "compression": {"kind": "topk"}}, "left out of earlier"),
        ({"local": {"momentum": 0.5}, "control": {"kind": "ali"}}, r"\[local\].*\[control\]"),
    ],
)
def test_invalid_input_is_refused(tables, why):
    with pytest.raises(PlanError, match=why):
        Plan.parse(tables)
