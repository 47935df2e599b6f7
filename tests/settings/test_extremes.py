"""Numbers as large or small as a plan takes them: it refuses them, or the run ends and is told."""

import numpy as np
import pytest
from pydantic import BaseModel

import fedpact
from fedpact import algorithms
from fedpact.algorithms.wrappers.base import Method
from fedpact.common import configuration
from fedpact.common.errors import FedpactError, PlanError
from fedpact.plan import Plan

_DRAW = np.random.default_rng(7)
RECORDS = _DRAW.uniform(-1, 1, (40, 3)).astype(np.float32), np.arange(40) % 2
TABLES = {
    # What a key needs to have an effect.
    "server.learning_rate": {"server.optimiser": "adam"},
    "server.momentum": {"server.optimiser": "momentum"},
    "server.second_moment": {"server.optimiser": "adam"},
    "server.adaptivity": {"server.optimiser": "yogi"},
    "server.average_decay": {"server.average": "exponential"},
    "server.average_share": {"server.average": "tail"},
    "evaluation.level": {"evaluation.share": 0.3, "evaluation.releases": ["hits"]},
    "server.halved_after": {"server.optimiser": "momentum", "server.schedule": "inverse"},
    "local.halved_after": {"local.schedule": "inverse"},
    "local.momentum": {"settings.local_steps": 2},
    "privacy.clip_halved_after": {"privacy.clip_schedule": "inverse"},
    "privacy.size_noise": {"privacy.sizes": "noisy"},
    "control.kappa": {"control.kind": "ali", "control.iterations": 4},
    "compression.keep": {"compression.kind": "topk"},
    "evaluation.epsilon": {"evaluation.share": 0.3, "evaluation.releases": ["hits"]},
    "evaluation.loss_bound": {"evaluation.share": 0.3, "evaluation.releases": ["hits", "loss"]},
}
# Of records' columns; δ, which may be of any size; and what is of files, images or the clock.
ELSEWHERE = ("records.", "features.", "budget.", "run.")


def floats(model, prefix=""):
    for key, field in model.model_fields.items():
        form = field.annotation
        if isinstance(form, type) and issubclass(form, BaseModel):
            yield from floats(form, f"{prefix}{key}.")
        elif "float" in str(form) and key != "delta":
            yield prefix + key


SHARED = {f"settings.{key}" for key in algorithms.load("fedavg").Settings.model_fields}


def cases():
    for key in floats(Plan):
        if not key.startswith(ELSEWHERE):
            yield "fedavg", key
    for name in algorithms.names():
        for key in floats(algorithms.load(name).Settings, "settings."):
            # What it shares with FedAvg it is carried out with in test_divergence.
            if name == "fedavg" or key not in SHARED:
                yield name, key


def configured(algorithm, key, value):
    raw = {"rounds": 2, "sites": 2, "algorithm": algorithm}
    beside = {"fairness.weight": 0.5} if key.startswith("fairness.") else TABLES.get(key, {})
    if Method(algorithm).facts.plain_only:
        beside = {**beside, "privacy.mode": "none"}
    for name, each in {"partition.kind": "iid", **beside, key: value}.items():
        configuration.set_key(raw, name, each, "test")
    return raw


def begun(folder):
    return any(folder.rglob("*.jsonl"))


@pytest.mark.parametrize(("place", "algorithm", "key"), [(n, *c) for n, c in enumerate(cases())])
def test_a_number_is_refused_by_the_plan_or_the_run_ends(tmp_path, place, algorithm, key):
    """Each plan is made with both numbers; every sixteenth is carried out, with one by turns."""
    name, told = key.rsplit(".", 1)[-1], []
    for turn, value in enumerate((2.0**-100, 2.0**100)):
        try:
            plan = Plan(**configured(algorithm, key, value))
        except PlanError as error:
            told.append(str(error))
            continue
        if place % 32 != 8 * turn:
            continue
        folder = tmp_path / f"{value:g}"
        try:
            fedpact.run(plan, data=RECORDS, out=folder)
        except FedpactError:
            # What no budget allows is told; a site that has been charged gets its report.
            assert not begun(folder)
        else:
            assert (folder / "report.html").exists()
    assert all(name in each for each in told)
    for value in (1e-300, 1e300):
        with pytest.raises(PlanError, match=name):
            Plan(**configured(algorithm, key, value))


def test_lists_and_per_site_numbers_are_range_checked():
    for raw in (
        {"local": {"schedule": [1.0, 1e-31]}},
        {"privacy": {"per_site": {"a": {"epsilon": 1e31}}}},
    ):
        with pytest.raises(PlanError, match="2\\^100"):
            Plan(settings={"local_steps": 2}, **raw)
    assert Plan(privacy={"delta": 1e-200}).privacy.delta == 1e-200
    assert Plan(privacy={"epsilon": 1}).privacy.epsilon == 1
