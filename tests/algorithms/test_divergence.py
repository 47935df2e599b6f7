"""Runs whose steps are far too long: they end as "diverged", whatever overflows on the way."""

import pytest
import torch
from tests.spread import spread

from fedpact import algorithms
from fedpact.algorithms.wrappers.base import Method
from fedpact.data.load import from_arrays
from fedpact.plan import Plan
from fedpact.simulation.simulate import simulate

BASE = {"rounds": 2, "sites": 2, "run": {"workers": 1, "evaluate_every": 100}}
PRIVATE = {"sigma": 4.0, "epsilon": 100.0, "accountant": "rdp"}


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=generator)
    return from_arrays(x, torch.randint(3, (60,), generator=generator))


def ends(tmp_path, data, **tables):
    result = simulate(Plan.parse({**BASE, **tables}), tmp_path / "run", data=data)
    assert torch.isfinite(torch.cat([p.reshape(-1) for p in result.model.parameters()])).all()
    return result.summary["status"]


@pytest.mark.parametrize(
    ("solver", "rate", "accuracy"),
    [("sarah", 3.0, None), ("svrg", 1e30, 0.5)],
)
def test_a_private_movement_without_bound(solver, rate, accuracy, tmp_path, data):
    """Each difference's noise follows the movement and makes the next one longer."""
    settings = {
        "solver": solver,
        "learning_rate": rate,
        "difference_bound": 100.0,
        "local_steps": 20,
    }
    if accuracy:
        settings["accuracy"] = accuracy
    told = ends(tmp_path, data, algorithm="fedproxvr", settings=settings, privacy=PRIVATE)
    assert told == "diverged"


def test_a_huge_bound_on_differences_leaves_a_plain_run_alone(tmp_path, data):
    """A plain run does not clip: K does not matter, however large."""
    models = []
    for name, bound in {"large": 1e30, "given": 1.0}.items():
        settings = {"difference_bound": bound}
        asked = {"algorithm": "fedproxvr", "settings": settings, "privacy": {"mode": "none"}}
        result = simulate(Plan.parse({**BASE, **asked}), tmp_path / name, data=data)
        models.append((result.folder / "model.safetensors").read_bytes())
    assert models[0] == models[1]


@pytest.mark.parametrize(
    ("name", "mode"), spread(algorithms.names(), ("none", "per_sample"), one_in=2)
)
def test_no_algorithm_fails_on_the_way(name, mode, tmp_path, data):
    """A plain run with η = 1e9 overflows; a private one may only wander off, as it is clipped."""
    algorithm = algorithms.load(name)
    if mode != "none" and Method(name).facts.plain_only:
        return
    settings = {"learning_rate": 1e9}
    if "local_steps" in algorithm.Settings.model_fields:
        settings["local_steps"] = 5
    if "proximal" in algorithm.Settings.model_fields:
        settings["proximal"] = 1e-9
    told = ends(
        tmp_path, data, algorithm=name, settings=settings, privacy={"mode": mode, **PRIVATE}
    )
    assert told in ("diverged", "finished", "iterations")
