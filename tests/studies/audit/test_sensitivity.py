"""How far one record moves a sum: nothing here is left to chance, so it holds for every seed."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, vmap

from fedpact.common.losses import cross_entropy
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.data.load import from_arrays, load_dataset
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.plan import Plan
from fedpact.privacy.oracle import PrivateOracle
from fedpact.simulation.setup import SimulationSetup
from fedpact.simulation.simulate import simulate
from fedpact.studies.audit import sensitivity
from fedpact.studies.audit.sensitivity import crafted_records, measure_sensitivity, requests
from fedpact.studies.audit.target import Target, private_oracle

# All five with -m slow.
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
CNN = pytest.param("models_of_sums:cnn", marks=pytest.mark.slow)
MODELS = ("logistic", CNN, "models_of_sums:embedding")


@pytest.fixture(autouse=True)
def _own_models(monkeypatch, tmp_path):
    (tmp_path / "models_of_sums.py").write_text(
        "import math\nimport torch\nfrom torch import nn\n"
        "def cnn(shape, classes):\n"
        "    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),\n"
        "                         nn.Linear(36, classes))\n"
        "class Mean(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x.mean(1)\n"
        "def embedding(shape, classes):\n"
        "    return nn.Sequential(nn.Embedding(12, 6), Mean(), nn.Linear(6, classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def few(monkeypatch):
    """Two kinds of records to try, and smaller batches: enough for what is far out."""

    def some(made):
        return lambda target, x: dict(list(made(target, x).items())[:2])

    monkeypatch.setattr(sensitivity, "_values", some(sensitivity._values))
    monkeypatch.setattr(sensitivity, "_tokens", some(sensitivity._tokens))
    monkeypatch.setattr(sensitivity, "_MOST_LABELS", 1)
    monkeypatch.setattr(sensitivity, "_MOST_RECORDS", 32)


def target(model="logistic", seed=0, *overrides):
    plan = Plan.read(None, [f"model={model}", f"seed={seed}", "rounds=2", "sites=2", *overrides])
    data = None
    if model.endswith(":embedding"):
        generator = np.random.default_rng(7)
        x = generator.integers(0, 12, (400, 5))
        data = from_arrays(x, generator.integers(0, 4, 400), classes=[*"abcd"])
    return Target.of(SimulationSetup.of(plan, data))


def passes(target):
    return all(channel.passed for channel in measure_sensitivity(target))


class Rows:
    """A kernel that adds what it makes of each record's gradient [n, d], one by one clipped."""

    def __init__(self, kernel, terms, records):
        self.inner, self.model, self.losses = kernel, kernel.model, kernel.losses
        self.seed = kernel.seed
        self.clip, self.records = terms.clip, records

    def rows(self, x, y):
        weights = {name: view.detach() for name, view in self.model.views(self.model.vector)}

        def loss(w, x, y):
            return cross_entropy(functional_call(self.model.module, w, (x[None],)), y[None])[0]

        found = vmap(grad(loss), (None, 0, 0))(weights, x, y)
        return torch.cat([found[name].flatten(1) for name in weights], 1).double()

    def clipped_sum(self, x, y, clip, weights=None, most=None, shares=None, layout=None):
        if not len(y):
            return torch.zeros_like(self.model.vector)
        rows = self.rows(x, y)
        rows = torch.where(rows.isfinite().all(1, True), rows, 0)
        return self.added(rows, x, y, clip).to(self.model.vector.dtype)

    def added(self, rows, x, y, clip):
        return (rows * shrunk(rows, clip)).sum(0)


def shrunk(rows, clip):
    return (clip / rows.norm(dim=1, keepdim=True)).nan_to_num(posinf=math.inf).clamp_max(1)


class TwiceTheClip(Rows):
    def added(self, rows, x, y, clip):
        return (rows * shrunk(rows, 2 * clip)).sum(0)


class OneBiasUnclipped(Rows):
    def added(self, rows, x, y, clip):
        clipped = rows * shrunk(rows, clip)
        names = [name for name, _ in self.model.views(self.model.vector)]
        marks = torch.zeros_like(self.model.vector)
        dict(self.model.views(marks))[names[-1]].fill_(1)
        assert names[-1].endswith("bias")
        return torch.where(marks == 1, rows, clipped).sum(0)


class EachLayerClipped(Rows):
    def added(self, rows, x, y, clip):
        parts = []
        for _, view in self.model.views(torch.arange(rows.shape[1])):
            part = rows[:, view.flatten()]
            parts.append((part * shrunk(part, clip)).sum(0))
        return torch.cat(parts)


class MeanClipped(Rows):
    """Of the batch, in place of each record: no longer than it may be, and it turns round."""

    def added(self, rows, x, y, clip):
        mean = rows.mean(0, keepdim=True)
        return (mean * shrunk(mean, clip))[0]


class RareLabelUnclipped(Rows):
    def added(self, rows, x, y, clip):
        counts = torch.bincount(self.records.y)
        rare = y == int(torch.where(counts > 0, counts, counts.max() + 1).argmin())
        return torch.where(rare[:, None], rows, rows * shrunk(rows, clip)).sum(0)


class NotANumber(Rows):
    def added(self, rows, x, y, clip):
        return super().added(rows, x, y, clip) + (math.nan if len(y) > 1 else 0)


def by(kind, site):
    return lambda r, k, t, d: private_oracle(r, kind(k, t, site), t, d)


KERNELS = {
    "logistic": [RareLabelUnclipped, NotANumber, EachLayerClipped, OneBiasUnclipped],
    "models_of_sums:cnn": [EachLayerClipped, OneBiasUnclipped],
    "models_of_sums:embedding": [MeanClipped],
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", MODELS)
def test_an_honest_mechanism_passes_and_is_tried(model, seed, request):
    if model != "logistic":
        request.getfixturevalue("few")
    (channel,) = measure_sensitivity(target(model, seed))
    assert channel.passed, channel.text
    # Records were clipped: what was measured is the clip, and not how short the gradients are.
    for move in (channel.single, channel.in_batch):
        assert 0.98 < move.size <= 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", MODELS)
def test_each_wrong_clip_fails(model, seed, few):
    one = target(model, seed)
    right = dataclasses.replace(one, make=by(Rows, one.records))
    assert passes(right)
    for kind in KERNELS[model]:
        assert not passes(dataclasses.replace(one, make=by(kind, one.records))), kind


@pytest.mark.parametrize("seed", SEEDS)
def test_the_realised_batch_size_fails(seed, audited, few):
    one = target("logistic", seed)
    broken = dataclasses.replace(one, make=audited.broken["realised batch size"])
    assert not passes(broken)


def test_a_mechanism_that_adds_nothing_is_not_passed(few):
    class Silent(Rows):
        def clipped_sum(self, *args, **kwargs):
            raise RuntimeError("this kernel adds nothing")

    one = target()
    (check,) = measure_sensitivity(dataclasses.replace(one, make=by(Silent, one.records)))
    assert not check.passed
    assert "nothing was measured" in check.row.text


def test_a_clip_is_measured_and_the_finding_says_how(few):
    """Twice the clip is twice as long as right."""
    one = target()
    (right,) = measure_sensitivity(one)
    (found,) = measure_sensitivity(dataclasses.replace(one, make=by(TwiceTheClip, one.records)))
    assert found.single.size == pytest.approx(2 * right.single.size, rel=1e-5)
    check, good = found.row, right.row
    assert not check.passed
    assert check.bound == pytest.approx(2, abs=0.02)
    assert "longest single-record sum 1.98" in check.text
    assert "label" in check.text
    assert good.passed
    assert "label" not in good.text
    # No number passes for a good one.
    broken = dataclasses.replace(one, make=by(NotANumber, None))
    (nan,) = measure_sensitivity(broken)
    assert not nan.row.passed
    assert nan.row.document()["bound"] is None


class Channels(PrivateOracle):
    """An oracle that answers some channels as if every record were `times` as many."""

    def __init__(self, broken, times, *given):
        super().__init__(*given, lambda *_: None)
        self.broken, self.times = broken, times

    def _batch(self, terms, step, channels):
        batch = super()._batch(terms, step, channels)
        for channel in self.broken.intersection(channels):
            ask = getattr(batch, channel)
            setattr(batch, channel, lambda *query, ask=ask: ask(*query) * self.times)
        return batch


@pytest.mark.parametrize(
    ("algorithm", "parts", "times"),
    [
        (("fedfdp", "settings.fairness_weight=0.6"), ({"loss"}, {"gradient", "below"}), 1.1),
        (("fedproxvr",), ({"opening gradient", "difference"},), 1.5),
    ],
)
def test_every_channel_is_held_to_its_own_bound(algorithm, parts, times, few):
    one = target("logistic", 0, f"algorithm={algorithm[0]}", *algorithm[1:])
    found = measure_sensitivity(one)
    assert {c.channel for c in found} == set().union(*parts)
    assert all(c.passed for c in found)

    def make(r, k, t, d):
        return Channels(broken, times, r, k, t, d)

    for failed in parts:
        broken = {name.split()[-1] for name in failed}
        found = measure_sensitivity(dataclasses.replace(one, make=make))
        assert {c.channel for c in found if not c.passed} == failed


def test_an_unclamped_weight_fails(audited, few):
    """FedFDP's weight as printed, below 0 where a reference is large: records of any length."""
    fair = target("logistic", 0, "algorithm=fedfdp", "settings.fairness_weight=0.6")
    broken = dataclasses.replace(fair, make=audited.broken["weight not clamped"])
    failed = [c.channel for c in measure_sensitivity(broken) if not c.passed]
    assert failed == ["gradient"]


def test_batch_clipping_turns_by_twice_its_clip_at_most(few):
    one = target("logistic", 0, "algorithm=ldp_fedsgd", "privacy.mode=batch_clipped")
    (channel,) = measure_sensitivity(one)
    assert channel.passed
    assert channel.sensitivity == 2
    assert channel.single.size <= 1 < channel.in_batch.size <= 2


def test_every_rounds_clip_is_measured(audited, few):
    one = target("logistic", 0, "privacy.clip_schedule=[1.0, 0.5]")
    assert passes(one)

    def stays(records, kernel, terms, draws):
        return private_oracle(records, audited.Constant(kernel, 0.9), terms, draws)

    (channel,) = measure_sensitivity(dataclasses.replace(one, make=stays))
    assert channel.single.size == pytest.approx(0.9 / 0.5, rel=1e-3)


def test_a_person_moves_a_sum_by_one_clip(few):
    digits = load_dataset("digits")
    whose = [f"p{i}" for i in np.random.default_rng(1).integers(0, 500, len(digits.y))]
    data = from_arrays(digits.x, digits.y, classes=digits.classes, person=whose)
    privacy = {"unit": "person", "person_records": 5}
    one = Target.of(
        SimulationSetup.of(Plan.parse({"rounds": 2, "sites": 2, "privacy": privacy}), data)
    )
    assert {len(each.y) for each in crafted_records(one)} == {5}
    (channel,) = measure_sensitivity(one)
    assert 0.98 < channel.single.size <= 1
    assert channel.passed

    class Each(type(one.records)):
        def batch(self, draws, rate, step, *, lent=False):
            x, y, _ = super().batch(draws, rate, step, lent=lent)
            return x, y, None

    def broken(r, k, t, d):
        return private_oracle(Each(r.x, r.y, persons=r.persons), k, t, d)

    (found,) = measure_sensitivity(dataclasses.replace(one, make=broken))
    assert found.single.size == pytest.approx(5 * channel.single.size, rel=1e-3)


def test_requests_are_the_algorithms_at_the_worst_references():
    fair = target("logistic", 0, "algorithm=fedfdp", "settings.fairness_weight=0.6")
    asked = list(requests(fair, crafted_records(fair)))
    assert [request.opening for request in asked] == [False] * 3
    references = [request.queries["gradient"][1].reference for request in asked]
    assert references[1] < references[0] < references[2]
    opened = target("logistic", 0, "algorithm=fedproxvr")
    assert {request.opening for request in requests(opened, crafted_records(opened))} == {
        True,
        False,
    }
    vector = asked[0].scaled(10.0).queries["gradient"][0]
    assert torch.equal(vector, 10 * asked[0].queries["gradient"][0])


def test_the_measured_passes_are_as_long_as_a_runs(monkeypatch, tmp_path):
    """Of a run's expected batch: the kernel's default length is another one."""
    seen, clipped_sum = [], PerSampleKernel.clipped_sum

    def watch(self, x, y, clip, weights=None, most=None, shares=None, layout=None):
        seen.append(layout)
        return clipped_sum(self, x, y, clip, weights, most, shares, layout)

    monkeypatch.setattr(PerSampleKernel, "clipped_sum", watch)
    plan = Plan.parse({"rounds": 1, "sites": 2})
    simulate(plan, tmp_path / "run")
    of_run, seen[:] = {*seen}, []
    one = Target.of(SimulationSetup.of(plan))
    batch = next(one.oracle(one.records, SeededDraws(0)).batches(1, "gradient"))
    batch.gradient(one.w)
    (of_audit,) = seen
    assert of_audit in of_run
