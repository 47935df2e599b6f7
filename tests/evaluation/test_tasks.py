"""What is learnt, and by which loss: each task through the kernel, the oracle and a whole run."""

import json
import math
import re

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedpact
from fedpact.common.errors import DataError, InputError, ModelError, PlanError
from fedpact.common.losses import (
    UNLABELLED,
    LabelEntropy,
    WeightedEntropy,
    cross_entropy,
    pixel_entropy,
)
from fedpact.common.params import FlatModel
from fedpact.data.load import from_python
from fedpact.data.schema import LabelForm, PlanRecords
from fedpact.evaluation.metrics import evaluate
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.report.page import repeat
from fedpact.report.run_summary import read_run
from fedpact.studies.pool import Job

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 4)).astype(np.float32)
PRESSURE = 100 + 20 * X[:, 0] - 10 * X[:, 1]
FRAME = pd.DataFrame(X, columns=list("abcd")).assign(bp=PRESSURE)
IMAGES = RNG.normal(size=(40, 1, 6, 6)).astype(np.float32)
MASKS = (IMAGES[:, 0] > 0).astype(np.int64)
SEVERAL = (X[:, :3] > 0).astype(np.int64)
SETTINGS = {
    "sites": 2,
    "rounds": 8,
    "partition": {"held_out": 0.25},
    "privacy": {"epsilon": 8.0, "delta": 1e-5},
    "settings": {"learning_rate": 0.5},
}


def test_losses_are_torchs_by_another_name():
    z, y = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    weights = (0.5, 2.0, 7.0)
    expected = F.cross_entropy(z, y, torch.tensor(weights), reduction="none")
    assert torch.allclose(WeightedEntropy(weights)(z, y), expected)
    t = (torch.rand(5, 3) > 0.5).float()
    each = F.binary_cross_entropy_with_logits(
        z, t, reduction="none", pos_weight=torch.tensor(weights)
    )
    assert torch.allclose(LabelEntropy(weights)(z, t), each.mean(1))
    image, mask = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    by_pixel = F.cross_entropy(image, mask, reduction="none").mean((1, 2))
    assert torch.allclose(pixel_entropy(image, mask), by_pixel)
    mask[1, 0, 0] = 3
    assert pixel_entropy(image, mask).isnan().tolist() == [False, True]


def test_unlabelled_values_count_nowhere():
    z, y = torch.randn(3, 4, 6), torch.randint(4, (3, 6))
    y[0, 2:], y[1] = UNLABELLED, UNLABELLED
    found = pixel_entropy(z, y)
    assert torch.allclose(found[0], F.cross_entropy(z[0].T[:2], y[0, :2]))
    assert found[1] == 0
    assert torch.allclose(found[2], F.cross_entropy(z[2].T, y[2]))

    class Given(nn.Module):
        def forward(self, x):
            return x

    # Right is what the first two tokens of one record and all of another's are, by construction.
    right = F.one_hot(y.clamp(min=0), 4).movedim(2, 1).float()
    right[0, :, 2:] = F.one_hot(torch.tensor(3), 4)[:, None].float()
    assert evaluate(Given(), pixel_entropy, right, y).accuracy == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("module", "loss", "y"),
    [
        (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), WeightedEntropy((1.0, 9.0)),
         torch.arange(6) % 2),
        (nn.Sequential(nn.Linear(4, 3)), LabelEntropy((1.0, 2.0, 3.0)),
         torch.from_numpy(SEVERAL[:6]).float()),
    ],
)  # fmt: skip
def test_a_record_moves_the_sum_by_at_most_the_clip(module, loss, y):
    """The kernel's clipped sum is that of autograd, record by record, whatever the weights."""
    model, x, clip = FlatModel(module), torch.from_numpy(X[:6]), 0.3
    kernel = PerSampleKernel(model, loss)
    rows = []
    for i in range(6):
        value = loss(module(x[i : i + 1]), y[i : i + 1]).sum()
        flat = torch.cat([g.flatten() for g in torch.autograd.grad(value, module.parameters())])
        rows.append(flat * min(1.0, clip / float(flat.norm())))
    found = kernel.clipped_sum(x, y, clip)
    assert torch.allclose(found, torch.stack(rows).sum(0), atol=1e-5)


def test_a_regression_learns_in_the_labels_units(tmp_path):
    task = {"kind": "regression", "range": [40, 160]}
    result = fedpact.run("logistic", FRAME, label="bp", task=task, **SETTINGS, out=tmp_path / "r")
    said = result.predict(FRAME)
    missed = ((said.labels - PRESSURE) ** 2).mean() / PRESSURE.var()
    assert missed < 0.2
    assert result.summary["r2"] > 0.8
    assert result.summary["accuracy"] is None
    assert result.summary["fairness"] is None
    for path in (*result.folder.glob("*.json"), *result.folder.glob("*.jsonl")):
        assert not re.search(r"\b(NaN|Infinity)\b", path.read_text(encoding="utf-8")), path
    assert all(math.isnan(record.accuracy) for record in fedpact.load(result.folder).records)
    # In units of half the range: the loss is ½ (difference / 60)².
    score = result.evaluate(FRAME)
    assert score.loss == pytest.approx(((said.labels - PRESSURE) ** 2).mean() / 7200, rel=1e-3)
    page = (result.folder / "report.html").read_text(encoding="utf-8")
    assert "mean loss" in page
    assert "R²" in page
    assert "not a number" not in page
    assert max(result.summary["epsilon"].values()) <= 8


def test_labels_beyond_the_range_are_clamped_and_others_left_out(caplog):
    frame = FRAME[:4].assign(bp=[0.0, 100.0, 500.0, np.nan])
    target = LabelForm(kind="number", low=50.0, high=150.0)
    found = from_python(frame, PlanRecords(), "bp", target=target)
    assert found.y.tolist() == [-1.0, 0.0, 1.0]
    assert found.classes == ("bp",)
    told = " ".join(caplog.messages)
    assert "beyond the declared range of labels" in told
    assert "row 4 = nan: column bp has no value" in told


@pytest.mark.usefixtures("no_page")
def test_several_labels_and_pixels_are_learnt(tmp_path):
    several = fedpact.run("logistic", (X, SEVERAL), task={"kind": "multi_label"}, **SETTINGS,
                          out=tmp_path / "m")  # fmt: skip
    assert several.summary["accuracy"] > 0.6
    assert {"auc", "f1", "ece"} <= set(several.summary)
    named = [" ".join(str(k) for k in range(3) if row[k]) for row in SEVERAL]
    assert (several.predict(X).labels == named).mean() > 0.3
    pixels = fedpact.run(_segmenter, (IMAGES, MASKS), task={"kind": "segmentation"}, **SETTINGS,
                         out=tmp_path / "p")  # fmt: skip
    assert pixels.summary["accuracy"] > 0.7
    said = pixels.predict(IMAGES).labels
    assert (said == MASKS.astype(str)).mean() == pytest.approx(
        pixels.evaluate(IMAGES, MASKS).accuracy, abs=1e-9
    )


def _segmenter(shape, classes):
    return nn.Sequential(nn.Conv2d(shape[0], classes, 3, padding=1))


@pytest.mark.usefixtures("no_page")
def test_class_weights_move_the_answer_to_the_heavy_class(tmp_path):
    y = (X[:, 0] + RNG.normal(size=120) > 1).astype(int)
    plan = {**SETTINGS, "rounds": 2, "privacy": {"mode": "none"}}
    said = []
    for weights in ([1.0, 1.0], [1.0, 20.0]):
        run = fedpact.run("logistic", (X, y), task={"class_weights": weights}, **plan,
                          out=tmp_path / f"{weights[1]}")  # fmt: skip
        said.append((run.predict(X).labels == "1").sum())
    assert said[1] > said[0]
    alike = fedpact.run("logistic", (X, y), **plan, out=tmp_path / "plain")
    assert (alike.predict(X).labels == "1").sum() == said[0]
    with pytest.raises(PlanError, match="3 weights for 2 classes"):
        fedpact.run("logistic", (X, y), task={"class_weights": [1.0, 1.0, 1.0]}, **plan)


def own(outputs, y):
    """cross_entropy, written by somebody."""
    return outputs.logsumexp(1) - outputs.gather(1, y[:, None])[:, 0]


def share(outputs, y):
    """Accuracy, written by somebody."""
    return float((outputs.argmax(1) == y).double().mean())


def test_a_custom_loss_and_metric_are_used(tmp_path):
    """Cross entropy of one's own, or of torch, trains as ours does; accuracy of one's own is ours.

    A module is a loss, and a class is not.
    """
    y, few = SEVERAL[:, 0], {**SETTINGS, "rounds": 2}
    ours = fedpact.run("logistic", (X, y), **few, out=tmp_path / "ours")
    runs = {}
    for name, loss in (("own", own), ("torch", nn.CrossEntropyLoss(reduction="none"))):
        task = {"loss": loss, "metrics": [share, "auc"]}
        runs[name] = fedpact.run("logistic", (X, y), task=task, **few, out=tmp_path / name)
        for a, b in zip(runs[name].model.parameters(), ours.model.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-4)
    mine = runs["own"]
    assert mine.summary["share"] == pytest.approx(mine.summary["accuracy"])
    plan = json.loads((mine.folder / "plan.json").read_text())
    assert plan["task"]["loss"] == f"{__name__}:own"
    assert "share" in (mine.folder / "report.html").read_text(encoding="utf-8")
    command, _ = repeat(read_run(runs["torch"].folder))
    assert command.startswith("fedpact.run(")
    assert command.endswith("data=..., loss=...)")
    with pytest.raises(ModelError, match="which is a class"):
        fedpact.Plan(task={"loss": torch.nn.CrossEntropyLoss}).task.per_record(2)
    with pytest.raises(ModelError, match=r"task\.loss is 'huber': expected your own as 'package"):
        fedpact.Plan(task={"loss": "huber"}).task.per_record(2)


@pytest.mark.parametrize("mode", ["none", "per_sample"])
@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda outputs, y: own(outputs, y).mean(), "one number for each record"),
        (lambda outputs, y: own(outputs, y) - own(outputs, y).mean(), "batch with others"),
        (lambda outputs, y: outputs.nothing, "AttributeError"),
        (lambda outputs, y: own(outputs, y) * torch.rand(1), "without random numbers"),
    ],
)
def test_a_loss_that_is_not_of_single_records_is_refused(loss, why, mode, tmp_path):
    settings = {**SETTINGS, "privacy": {"mode": mode}}
    with pytest.raises(ModelError, match=why):
        fedpact.run("logistic", (X, SEVERAL[:, 0]), task={"loss": loss}, **settings,
                    out=tmp_path / "x")  # fmt: skip
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({"kind": "regression"}, "for regression only"),
        ({"kind": "regression", "range": [1, 1]}, "for regression only"),
        ({"range": [0, 1]}, "for regression only"),
        ({"kind": "regression", "range": [0, 1], "class_weights": [1.0]}, "leave them out"),
        ({"class_weights": [1.0, 0.0]}, "expected a number from"),
        ({"class_weights": [1e300, 1.0]}, "expected a number from"),
        ({"kind": "regression", "range": [-1e308, 1e308]}, "for regression only"),
        ({"kind": "ranking"}, "task.kind is 'ranking'"),
    ],
)
def test_tasks_that_contradict_themselves_are_refused(task, why):
    with pytest.raises(PlanError, match=why):
        fedpact.Plan(task=task)


def test_class_metrics_are_refused_with_other_tasks(tmp_path):
    task = {"kind": "regression", "range": [0, 1]}
    with pytest.raises(PlanError, match=r"\[evaluation\] cannot be combined with \[task\]"):
        fedpact.Plan(task=task, evaluation={"share": 0.2})
    with pytest.raises(PlanError, match="which has no accuracy"):
        fedpact.Plan(task=task, budget={"patience": 3}, privacy={"mode": "none"})
    with pytest.raises(PlanError, match="labels of data set digits are those of classification"):
        fedpact.run(fedpact.Plan(task=task), tmp_path / "digits")
    by_label = {**SETTINGS, "partition": {"kind": "dirichlet"}}
    with pytest.raises(DataError, match="spreads records by their class"):
        fedpact.run("logistic", FRAME, label="bp", task={"kind": "regression", "range": [40, 160]},
                    **by_label, out=tmp_path / "d")  # fmt: skip
    lost = fedpact.Plan(task={"loss": lambda outputs, y: own(outputs, y)})
    with pytest.raises(InputError, match='engine = "ray" with lambda@'):
        fedpact.run(lost, tmp_path / "ray", engine="ray")
    assert Job("name", 0, lost, tmp_path).here
    assert not Job("name", 0, fedpact.Plan(task={"loss": own}), tmp_path).here
    with pytest.raises(
        ModelError, match=r"'r2', which is of regression, .* classification: .* auc, f1, ece,"
    ):
        fedpact.run(fedpact.Plan(task={"metrics": ["r2"]}), tmp_path / "m")
    with pytest.raises(ModelError, match="the name of another number"):
        fedpact.run(fedpact.Plan(task={"metrics": ["os.path:loss"]}), tmp_path / "n")


def test_cross_entropy_stays_the_quick_way():
    """Without a table [task] the kernel is given the very loss that its quick ways know."""
    assert fedpact.Plan().task.per_record(10) is cross_entropy


class Rooted(nn.Linear):
    """A model whose outputs are NaN wherever a layer's are below 0."""

    def __init__(self, shape, classes):
        super().__init__(*shape, classes)

    def forward(self, x):
        return super().forward(x).sqrt()


@pytest.mark.usefixtures("no_page")
def test_values_that_are_not_numbers_are_reported(tmp_path):
    """Before, as a model that mixes the records of a batch. A plain run may train it."""
    y = SEVERAL[:, 0]
    losses = {"some": lambda o, y: torch.log(o[:, 0]), "all": lambda o, y: o[:, 0] * torch.nan}
    for loss in losses.values():
        with pytest.raises(ModelError, match=r"gives \[.*nan.*\] on 4 made-up records.*finite"):
            fedpact.run("logistic", (X, y), task={"loss": loss}, **SETTINGS,
                        out=tmp_path / "own")  # fmt: skip
    with pytest.raises(ModelError, match=r"Rooted has outputs.* that are not finite"):
        fedpact.run(Rooted, (X, y), **SETTINGS, out=tmp_path / "model")
    plain = {**SETTINGS, "rounds": 1, "privacy": {"mode": "none"}}
    fedpact.run(Rooted, (X, y), task={"loss": losses["some"]}, **plain, out=tmp_path / "plain")
