import itertools

import numpy as np
import pytest
import torch

from fedpact.common.errors import PlanError
from fedpact.common.user_code import name_object
from fedpact.plan import Plan
from fedpact.studies.compare import read_plans
from fedpact.studies.sweep import expand_sweep, read_sweeps

PLAN = Plan.parse({"rounds": 7, "sites": 3, "settings": {"learning_rate": 0.25}})


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("privacy.epsilon=0.5,1,2", [0.5, 1, 2]),
        ("partition.kind=iid,dirichlet", ["iid", "dirichlet"]),
        ('model="logistic","mlp"', ["logistic", "mlp"]),
        ("privacy.sigma=[1.0,2.0],[3.0,4.0]", [[1.0, 2.0], [3.0, 4.0]]),
        ("logistic.bias=true,false", [True, False]),
        ("rounds = 5", [5]),
        ("local.schedule=[1.0, 0.5],cosine", [[1.0, 0.5], "cosine"]),
        ("x={a = 1, b = 2},'y, z',word", [{"a": 1, "b": 2}, "y, z", "word"]),
        ("x=word,,2", ["word", "", 2]),
    ],
)
def test_values_are_read_as_set_reads_them(text, values):
    assert list(read_sweeps([text]).values()) == [values]


def test_several_keys_make_all_combinations():
    values = {"privacy.epsilon": [1.0, 2.0], "settings.local_steps": [1, 5, 9]}
    entries, points = expand_sweep({"a": PLAN}, values)
    assert [tuple(point.values.values()) for point in points.values()] == list(
        itertools.product([1.0, 2.0], [1, 5, 9])
    )
    for name, plan in entries.items():
        chosen = points[name].values
        given = [f"{key}={value}" for key, value in chosen.items()]
        own = {"rounds": 7, "sites": 3, "settings": {"learning_rate": 0.25}}
        expected = Plan.parse(own).model_dump(mode="json")
        expected["privacy"]["epsilon"] = chosen["privacy.epsilon"]
        expected["settings"]["local_steps"] = chosen["settings.local_steps"]
        assert plan == Plan.parse(expected), given
        assert points[name].base == "a"
    assert "a-epsilon-1.0-local_steps-9" in entries


def test_names_of_long_sweeps_stay_short_and_differ():
    keys = {f"privacy.per_site.site-{i:02}.epsilon": [1.0] for i in range(29)}
    sweep = {**keys, "privacy.per_site.site-29.epsilon": [1.0, 2.0]}
    entries, _ = expand_sweep({"a": Plan.parse({"sites": 30})}, sweep)
    assert len(entries) == 2
    assert all(len(name) <= 100 for name in entries)


def test_a_large_number_is_not_named_as_a_small_one():
    entries, _ = expand_sweep({"a": PLAN}, {"settings.learning_rate": [1e16, 1e-16]})
    assert list(entries) == ["a-learning_rate-1e16", "a-learning_rate-1e-16"]


def test_derived_keys_follow_a_swept_key():
    (few, many), _ = (
        list(part.values())
        for part in expand_sweep({"a": Plan(algorithm="ali_dpfl")}, {"rounds": [4, 8]})
    )
    assert (few.steps, many.steps) == (5 * 4, 5 * 8)


def test_an_algorithm_is_swept_over_the_settings_that_it_knows():
    plans = read_plans([], ["fedavg", "fedprox"])
    entries, points = expand_sweep(plans, {"settings.proximal": [0.1, 1.0]})
    assert list(entries) == ["fedavg", "fedprox-proximal-0.1", "fedprox-proximal-1.0"]
    assert points["fedavg"].values == {}


@pytest.mark.parametrize(
    ("sweep", "told"),
    [
        (["privacy.epsilon"], "expected KEY=V1,V2"),
        (["privacy.epsilon="], "expected KEY=V1,V2"),
        (["rounds=1,2", "rounds=3"], "rounds is swept already"),
        (["rounds=1,1"], "each once"),
        (["seed=1,2"], "--seeds"),
        (["algorithm=fedavg,fedprox"], "--algorithms"),
        (["settings.nothing=1"], "settings.nothing: it is no setting of fedavg"),
        (["privacy.epsilom=1"], "privacy.epsilom is not a known key"),
        (["privacy.epsilon=1,-1"], "sweep privacy.epsilon=-1"),
        (["privacy.epsilon=1,nan"], "privacy.epsilon"),
        ({"privacy.epsilon": 1}, "sweep privacy.epsilon: its values are 1: expected a list"),
        ({"rounds": "35"}, "its values are '35': expected a list"),
        ({"data": [object()]}, "object is not JSON"),
        ((("rounds", [3]),), "expected {"),
        ({"settings.mu": [1.0]}, "expected one of learning_rate, local_steps"),
    ],
)
def test_a_sweep_that_does_not_fit_is_refused(sweep, told):
    with pytest.raises(PlanError) as refused:
        expand_sweep({"a": PLAN}, read_sweeps(sweep) if isinstance(sweep, list) else sweep)
    assert told in str(refused.value)


class NetA(torch.nn.Linear):
    """A model by its class."""


class NetB(NetA):
    """Another."""


def test_models_are_swept_as_classes_and_numbers_as_arrays():
    entries, points = expand_sweep({"a": PLAN}, {"model": [NetA, NetB]})
    assert [plan.model for plan in entries.values()] == [name_object(NetA), name_object(NetB)]
    assert [point.values["model"] for point in points.values()] == [
        name_object(NetA),
        name_object(NetB),
    ]
    entries, _ = expand_sweep({"a": PLAN}, {"rounds": np.array([3, 4])})
    assert [plan.rounds for plan in entries.values()] == [3, 4]
    entries, _ = expand_sweep({"a": PLAN}, {"privacy.sigma": [None, 20.0]})
    assert [plan.privacy.sigma for plan in entries.values()] == [None, 20.0]
    entries, _ = expand_sweep({"a": Plan(sampling_rate=0.1)}, {"batch_size": [3.0, 5.0]})
    assert [plan.sampling_rate for plan in entries.values()] == [None, None]
