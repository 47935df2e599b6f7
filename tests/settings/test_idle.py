"""A setting that does nothing beside the others is refused where it is typed, and only there."""

import json

import pytest
from pydantic import BaseModel

from fedpact import algorithms
from fedpact.algorithms.wrappers.combine import USES
from fedpact.api import load, run
from fedpact.cli.commands.run import resume
from fedpact.common.configuration import DEFAULTS_KEY
from fedpact.common.errors import PlanError
from fedpact.plan import Plan
from fedpact.report.page import write_report
from fedpact.studies.sweep import expand_sweep

SHARE = {"share": 0.2}
PLANS = {
    # what is typed, and what makes it do something
    "server.momentum": ({"momentum": 0.5}, {"optimiser": "adam"}),
    "server.learning_rate": ({"learning_rate": 7.0}, {"optimiser": "momentum"}),
    "server.second_moment": (
        {"second_moment": 0.5, "optimiser": "momentum"},
        {"optimiser": "yogi"},
    ),
    "server.adaptivity": ({"adaptivity": 7.0, "optimiser": "momentum"}, {"optimiser": "adam"}),
    "server.average_decay": ({"average_decay": 0.5}, {"average": "exponential"}),
    "server.average_share": ({"average_share": 0.1}, {"average": "tail"}),
    "privacy.size_noise": ({"size_noise": 3.0}, {"sizes": "noisy"}),
    "compression.keep": ({"keep": 0.5}, {"kind": "topk"}),
    "robust.liars": ({"liars": 2}, {"rule": "median"}),
    "fairness.weight_rule": ({"weight_rule": "relative"}, {"weight": 0.1}),
    "fairness.loss_noise": ({"loss_noise": 3.0}, {"weight": 0.1}),
    "fairness.quantile_rate": (
        {"weight": 0.1, "loss_bound_rule": "mean", "quantile_rate": 0.5},
        {"loss_bound_rule": "quantile"},
    ),
    "evaluation.epsilon": ({**SHARE, "releases": [], "epsilon": 3.0}, {"releases": ["hits"]}),
    "evaluation.loss_bound": (
        {**SHARE, "releases": ["hits"], "loss_bound": 2.0},
        {"releases": ["hits", "loss"]},
    ),
    "evaluation.bins": ({**SHARE, "bins": 7}, {"releases": ["roc"]}),
}
OF_ALGORITHMS = {
    "fedfdp": ("weight_rule", {"fairness_weight": 0.0, "weight_rule": "relative"}),
    "fedfair": ("weight_rule", {"fairness_weight": 0.0, "weight_rule": "relative"}),
    "qffl": ("least_loss", {"fairness_exponent": 0.0, "least_loss": 0.1}),
    "ldp_fedsgd": ("bias_penalty", {"bias_penalty": 3.0}),
    "fedproxvr": ("step_divisor", {"learning_rate": 0.1, "step_divisor": 7.0}),
}


def parsed(key, changes):
    return Plan.parse({"rounds": 3, key.partition(".")[0]: changes})


@pytest.mark.parametrize("key", PLANS)
def test_settings_without_effect_are_refused_others_not(key):
    typed, used = PLANS[key]
    with pytest.raises(
        PlanError, match=rf"^{key} is .* with .*: it has an effect only with .*; leave it out"
    ):
        parsed(key, typed)
    parsed(key, {**typed, **used})


@pytest.mark.parametrize("name", OF_ALGORITHMS)
def test_settings_without_effect_in_an_algorithm_are_refused(name):
    key, settings = OF_ALGORITHMS[name]
    tables = {"algorithm": name, "privacy": {"mode": "none"} if name == "fedfair" else {}}
    with pytest.raises(PlanError, match=rf"^settings\.{key} is .*it has an effect only with "):
        Plan.parse({**tables, "settings": settings})
    Plan.parse({**tables, "settings": {k: v for k, v in settings.items() if k != key}})


def test_momentum_at_sites_needs_a_second_step():
    with pytest.raises(PlanError, match=r"^local\.momentum is 0\.9 with settings\.local_steps = 1"):
        Plan.parse({"local": {"momentum": 0.9}})
    Plan.parse({"local": {"momentum": 0.9}, "settings": {"local_steps": 2}})


def test_column_options_need_a_matching_column():
    with pytest.raises(PlanError, match=r"^privacy\.column_share is 0\.5 .*released"):
        Plan.parse({"privacy": {"column_share": 0.5}})


def test_a_typed_default_is_accepted():
    tables = {"server": {"momentum": 0.9, "average_share": 0.5}, "privacy": {"size_noise": 10.0}}
    assert Plan.parse(tables).document()["server"] == Plan.parse({}).document()["server"]


def test_every_rule_is_of_keys_that_there_are():
    """And every key that it is told by; none is of a table that it does not know."""
    own = [algorithms.load(name).Settings for name in algorithms.names()]
    for use in USES:
        models = own if use.table == "settings" else [Plan.model_fields[use.table].annotation]
        for key in use.keys:
            assert any(key in model.model_fields for model in models), key
        place, _, last = use.beside.partition(".")
        if use.beside != "records.released":
            models = own if place == "settings" else [Plan.model_fields[place].annotation]
            assert any(last in model.model_fields for model in models), use.beside
            assert all(issubclass(model, BaseModel) for model in models)


OLD = {"momentum": 0.5, "adaptivity": 7.0}


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """The folder of a run whose plan.json has settings without effect, as a sweep's may."""
    folder = tmp_path_factory.mktemp("old") / "run"
    plan = Plan.parse({"rounds": 2, "sites": 2, "privacy": {"mode": "none"}})
    done = []
    run(plan, folder, on_round=done.append, stop=lambda: len(done) > 1)
    document = json.loads((folder / "plan.json").read_text())
    document["server"] |= OLD
    document[DEFAULTS_KEY] = [
        k for k in document[DEFAULTS_KEY] if k.removeprefix("server.") not in OLD
    ]
    (folder / "plan.json").write_text(json.dumps(document))
    return folder


def test_a_run_of_before_is_resumed_read_and_repeated(old):
    resume(old, "local", as_json=True)
    assert load(old).summary["rounds"] == 2
    assert "server.adaptivity" in write_report(old).read_text().replace("<wbr>", "")
    plan = Plan.read(old / "plan.json")
    assert (plan.server.momentum, plan.server.adaptivity) == (0.5, 7.0)
    assert Plan.parse(plan.document()) == plan


def test_settings_typed_with_an_old_plan_are_refused(old):
    with pytest.raises(PlanError, match=r"^server\.momentum is 0\.7 with"):
        Plan.read(old / "plan.json", ["server.momentum=0.7"])


def test_sweep_may_idle_others_settings_but_not_its_own():
    base = {"base": Plan.parse({"server": {"optimiser": "momentum", "momentum": 0.5}})}
    entries, _ = expand_sweep(base, {"server.optimiser": ["none", "momentum"]})
    assert {plan.server.optimiser for plan in entries.values()} == {"none", "momentum"}
    for plan in entries.values():
        assert Plan.parse(plan.document()) == plan
    with pytest.raises(PlanError, match=r"server\.adaptivity is 0\.1 with"):
        expand_sweep(base, {"server.adaptivity": [0.1, 0.2]})


@pytest.mark.parametrize("name", algorithms.names())
def test_no_algorithm_refuses_a_key_for_anothers_sake(name):
    """adaptive_clip has fedfdp's quantile_rate, but not the rule beside which that one counts."""
    fields = algorithms.load(name).Settings.model_fields
    for use in USES:
        if use.table == "settings" and use.beside.partition(".")[2] not in fields:
            for key in {*use.keys} & {*fields}:
                value = 1.25 * fields[key].default
                found = Plan.parse({"algorithm": name, "settings": {key: value}})
                assert getattr(found.algorithm_settings, key) == value
