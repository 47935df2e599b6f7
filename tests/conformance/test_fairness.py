"""Fairness as a wrapper: around fedavg it is fedfdp. Combinations without a meaning are refused."""

import pytest
import torch
from tests.spread import spread

from fedpact import algorithms
from fedpact.algorithms.wrappers.base import Method
from fedpact.common.errors import PlanError
from fedpact.plan import Plan


def method(**tables):
    return Plan.parse({"privacy": {"mode": "none"}, **tables}).method


@pytest.mark.parametrize(
    ("private", "rule", "steps", "loss_of"),
    spread((False, True), ("quantile", "mean"), (1, 3), ("own", "common"), one_in=3),
)
def test_around_fedavg_it_is_fedfdp_bit_for_bit(federation, private, rule, steps, loss_of):
    common = {"learning_rate": 0.7, "local_steps": steps}
    release = {"loss_bound_rule": rule, "loss_bound": 1.5, "loss_noise": 3.0, "loss_of": loss_of}
    around = method(algorithm="fedavg", settings=common, fairness={"weight": 0.4, **release})
    itself = method(algorithm="fedfdp", settings={"fairness_weight": 0.4, **common, **release})
    runs = [federation(private=private).run(one, 3) for one in (around, itself)]
    assert torch.equal(runs[0].vectors["w"], runs[1].vectors["w"])
    assert runs[0].numbers["fair/loss"] == runs[1].numbers["loss"]
    assert runs[0].numbers.get("fair/loss_bound") == runs[1].numbers.get("loss_bound")


def test_a_weight_of_nothing_leaves_the_algorithm_alone(federation):
    one = method(algorithm="fedavg", fairness={"weight": 0.0})
    other = method(algorithm="fedavg")
    assert one.facts.channels == other.facts.channels == {"gradient": 1.0}


@pytest.mark.parametrize(
    ("table", "algorithm"),
    [
        (part, name)
        for name in algorithms.names()
        for part in Method(name).facts.excludes
        if "." not in part
    ],
)
def test_invalid_input_is_refused_with_its_reason(table, algorithm):
    on = {
        "fairness": {"weight": 0.1},
        "control": {"kind": "ali"},
        "server": {"optimiser": "momentum"},
        "local": {"momentum": 0.5},
        "robust": {"rule": "median"},
        "secure_aggregation": {"threshold": 3},
        "evaluation": {"share": 0.2},
    }
    tables = {"algorithm": algorithm, "privacy": {"mode": "none"}}
    Plan.parse(tables)
    with pytest.raises(PlanError, match=f"{table}.*{algorithm}") as refusal:
        Plan.parse({**tables, table: on[table]})
    assert Method(algorithm).facts.excludes[table] in str(refusal.value)
