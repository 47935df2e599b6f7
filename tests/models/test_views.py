"""[views]: a record's gradient is the mean over its views, and clipped as one record's.

That a record then moves a sum by no more than without is tried among the models of
tests/per_sample/attacked.py.
"""

import copy
import json

import pytest
import torch
from torch import nn

import fedpact
from fedpact.common.errors import FedpactError
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel, model_name
from fedpact.models.build import build
from fedpact.models.zoo import Views, ViewSettings, make_views
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.per_sample.layout import Placement
from fedpact.plan import Plan
from fedpact.privacy.oracle import Records
from fedpact.simulation.setup import SimulationSetup
from fedpact.studies.audit.one_run import _shares
from fedpact.studies.audit.target import Asked, Target

ALL = ViewSettings(mirror=True, shift=2)


def kernel(module, settings, shape):
    return PerSampleKernel(FlatModel(Views(module, settings, shape)), cross_entropy)


def records(shape, count=6):
    x = torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(count) % 3


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("logistic", (8, 8)),
        pytest.param("cnn_group_norm", (3, 12, 12), marks=pytest.mark.slow),
    ],
)
def test_the_views_gradients_are_averaged_before_the_clip(name, shape):
    x, y = records(shape)
    module = build(name, x[0], 3, 0)
    alone = copy.deepcopy(module)
    rows = []
    for j in range(len(x)):
        losses = [cross_entropy(alone(v[j : j + 1]), y[j : j + 1]) for v in make_views(x, ALL)]
        mean = torch.cat(losses).mean()
        found = torch.autograd.grad(mean, list(alone.parameters()))
        rows.append(torch.cat([row.reshape(-1) for row in found]))
    ours = kernel(module, ALL, shape)
    for clip in (0.1, 1e6):
        expected = sum(g * min(1.0, clip / float(g.norm())) for g in rows)
        found = ours.clipped_sum(x, y, clip, layout=Placement(length=8))
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_views_are_the_image_moved_and_mirrored():
    """By places: of a picture whose numbers say where they were."""
    x = torch.arange(36.0).view(1, 6, 6)
    here, down, up, right, left = make_views(x, ViewSettings(shift=1))
    assert torch.equal(here, x)
    inner = x[:, 1:-1, 1:-1]
    moved = {"up": (up, -1, 0), "down": (down, 1, 0), "left": (left, 0, -1), "right": (right, 0, 1)}
    found = {
        name: [
            (a, b)
            for a in (-1, 0, 1)
            for b in (-1, 0, 1)
            if torch.equal(view[:, 1 + a : 5 + a, 1 + b : 5 + b], inner)
        ]
        for name, (view, _, _) in moved.items()
    }
    assert found == {name: [(a, b)] for name, (_, a, b) in moved.items()}
    both = make_views(x, ViewSettings(shift=1, mirror=True))
    assert len(both) == ViewSettings(shift=1, mirror=True).count
    assert all(torch.equal(a.flip(-1), b) for a, b in zip(both[:5], both[5:], strict=True))


def test_a_model_is_evaluated_on_the_image_itself():
    x, y = records((8, 8))
    module = build("mlp", x[0], 3, 0)
    alone = copy.deepcopy(module)
    made = kernel(module, ALL, (8, 8))
    made.model.module.eval()
    assert torch.allclose(made.losses(x, y), cross_entropy(alone(x), y), atol=1e-6)


def digits(*overrides):
    return Plan.read(None, ["views.mirror=true", "rounds=2", "sites=2", *overrides])


def test_a_run_says_so_and_spends_what_it_spends_without(tmp_path):
    plain = Plan.read(None, ["rounds=2", "sites=2"])
    with_views, without = SimulationSetup.of(digits()), SimulationSetup.of(plain)
    assert with_views.terms == without.terms
    assert torch.equal(
        with_views.workshop.bench().private.model.vector,
        without.workshop.bench().private.model.vector,
    )
    done = fedpact.run(digits("rounds=1"), tmp_path / "run")
    assert max(done.summary["epsilon"].values()) <= plain.privacy.epsilon
    told = json.loads((tmp_path / "run" / "privacy.json").read_text())["features"]
    assert "mean over 2 views" in told


def test_an_audit_looks_at_the_sum_that_sites_make():
    target = Target.of(SimulationSetup.of(digits()))
    canaries = Records(target.spare.x[:5], target.spare.y[:5])
    asked = Asked(0, "gradient", (target.w,), torch.zeros(len(target.w)), target.terms)
    rows = _shares(target, canaries, asked)
    total = target.kernel.clipped_sum(canaries.x, canaries.y, target.terms.clip)
    assert torch.allclose(rows.sum(0), total, atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["features.kind=scattering"], "features"),
        (["task.kind=segmentation"], "task"),
        (["views.shift=8"], "shift = 8"),
        (["data=synthetic_iid", "partition.kind=natural"], "expected images"),
        (["views.shift=-1"], "views.shift"),
    ],
)
def test_views_are_refused_for_other_tasks(overrides, named):
    with pytest.raises(FedpactError, match=named):
        SimulationSetup.of(digits(*overrides))


def test_a_refusal_names_the_model_that_views_are_of():
    views = Views(nn.Linear(64, 10), ViewSettings(mirror=True), (1, 8, 8))
    assert model_name(views) == "Linear with [views]"
