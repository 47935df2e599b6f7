"""Labels and outputs that do not go together are told of before anything is written."""

import json

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from torch import nn

import fedpact
from fedpact.api import plan_of
from fedpact.common.errors import DataError, ModelError
from fedpact.data.load import from_python
from fedpact.data.schema import LabelForm, PlanRecords, RecordForm

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype(np.float32)
IMAGES = RNG.normal(size=(24, 1, 6, 6)).astype(np.float32)
MASKS = (IMAGES[:, 0] > 0).astype(np.int64)
PIXELS = {"kind": "segmentation"}
SETTINGS = {
    "sites": 2,
    "rounds": 1,
    "partition": {"held_out": 0.25},
    "privacy": {"epsilon": 8.0, "delta": 1e-5},
}


def same(shape, classes):
    return nn.Sequential(nn.Conv2d(shape[0], classes, 3, padding=1))


def smaller(shape, classes):
    return nn.Sequential(nn.Conv2d(shape[0], classes, 3))


def a_vector(outputs, y):
    return outputs.mean(0)


@pytest.mark.parametrize(
    ("model", "masks", "task", "why"),
    [
        (smaller, MASKS, PIXELS, r"returns \(2, 4, 4\) for a record.*its mask has shape \(6, 6\)"),
        (same, MASKS[:, :3], PIXELS, r"its mask has shape \(3, 6\)"),
        (same, MASKS, {**PIXELS, "metrics": [a_vector]}, "a_vector' failed on outputs"),
        ("logistic", MASKS, PIXELS, r"one of 2 classes, so expected \(2, 2, height, width\)"),
    ],
)
def test_shapes_are_checked_before_anything_is_written(model, masks, task, why, tmp_path):
    with pytest.raises(ModelError, match=why):
        fedpact.run(model, (IMAGES, masks), task=task, **SETTINGS, out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_masks_lose_their_channel_axis_and_keep_every_value():
    form = RecordForm(target=LabelForm(kind="pixels"))
    found = fedpact.from_arrays(IMAGES, MASKS[:, None], form=form)
    assert found.y.numpy().tolist() == MASKS.tolist()
    with pytest.raises(DataError, match=r"up to 255, and 2, 3, 4, 5, 6 .* never occur"):
        fedpact.from_arrays(IMAGES, np.where(IMAGES[:, 0] > 2, 255, MASKS), form=form)
    with pytest.raises(DataError, match="are they masks of class numbers"):
        fedpact.from_arrays(IMAGES, MASKS / 3, form=form)


def test_a_regression_model_error_says_what_to_return(tmp_path):
    task = {"kind": "regression", "range": [-3, 3]}
    with pytest.raises(ModelError, match=r"labels are numbers, so expected \(2, 1\) or \(2,\)"):
        fedpact.run(
            lambda: nn.Linear(4, 2), (X, X[:, 0]), task=task, **SETTINGS, out=tmp_path / "r"
        )


@pytest.mark.parametrize(("last", "told"), [(nn.Softmax, True), (nn.LogSoftmax, False)])
def test_a_softmax_under_cross_entropy_is_warned_of(last, told, tmp_path, caplog):
    """A logarithm of probabilities is unchanged by another softmax; the probabilities are not."""
    y = (X[:, 0] > 0).astype(np.int64)
    fedpact.run(lambda: nn.Sequential(nn.Linear(4, 2), last(1)), (X, y), **SETTINGS, out=tmp_path)
    assert ("without the last softmax" in caplog.text) is told


class Net(nn.Module):
    def __init__(self, n_features, n_classes=2):
        super().__init__()
        self.layer = nn.Linear(n_features, n_classes)

    def forward(self, x):
        return self.layer(x)


def test_wrong_feature_count_of_a_class_error_has_a_remedy(tmp_path):
    y = (X[:, 0] > 0).astype(int)
    with pytest.raises(ModelError, match=r"lambda shape, classes: Net\(shape\[0\], classes\)"):
        fedpact.run(Net, (X, y), **SETTINGS, out=tmp_path / "r")


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        (X[:, 0], "60 different labels, such as .*regression"),
        (np.round(X[:, 0], 1), "task.kind = 'regression', with task.range"),
        (np.arange(60) + 100, "regression"),
        ([f"patient {i}" for i in range(60)], "60 different labels.*is it the column"),
    ],
)
def test_labels_that_are_not_classes_are_asked_about(labels, why):
    frame = pd.DataFrame(X, columns=list("abcd")).assign(out=labels)
    for path in (lambda: fedpact.run("logistic", frame, label="out", **SETTINGS),
                 lambda: fedpact.from_arrays(X, labels)):  # fmt: skip
        with pytest.raises(DataError, match=why):
            path()
    half = np.array([0.5, 1.0, 1.5])[np.arange(60) % 3]
    declared = fedpact.from_arrays(X, half.astype(str), classes=["0.5", "1.0", "1.5"])
    assert declared.y.tolist() == (np.arange(60) % 3).tolist()


@pytest.mark.parametrize("swapped", [False, True])
def test_names_beside_numbers_in_a_test_set_are_refused(swapped):
    """The numbers were classes of their own beside the names."""
    x, names, numbers = np.eye(4), np.array([*"abab"]), np.array([0, 1, 0, 1])
    train, test = ((x, numbers), (x, names)) if swapped else ((x, names), (x, numbers))
    with pytest.raises(DataError, match="expected names of classes in both, or numbers in both"):
        from_python(train, PlanRecords(), test=test)
    found = from_python(train, PlanRecords(classes=["a", "b"]), test=test)
    assert found.y.tolist() == found.y_test.tolist() == [0, 1, 0, 1]


def test_class_numbers_that_never_occur_are_reported(caplog):
    fedpact.from_arrays(X, 1 + np.arange(60) % 2)
    assert "up to 2, and 0 never occur: it is trained with 3 classes" in caplog.text


@pytest.mark.parametrize(
    ("x", "y", "why"),
    [
        (X, 2 * (X[:, 0] > 0) - 1, "a label is -1: expected class numbers from 0"),
        (X, (X > 0).astype(int), "several labels is task.kind = 'multi_label'"),
        (["some words"] * 60, np.arange(60) % 2, "numbers of words"),
        (scipy.sparse.csr_matrix(X), np.arange(60) % 2, r"with x.toarray\(\) of a sparse matrix"),
        (
            pd.DataFrame({"d": pd.date_range("2020", periods=60)}),
            None,
            "column d: is not a finite number; .*if it holds text or dates.* drop = ..d",
        ),
        (pd.DataFrame({"k": ["a", "b"] * 30}), None, r"records\.columns\.k\.categories"),
        (X, ["ill"] * 60, "one class, 'ill', .* found are 'ill': expected two .* records.classes"),
        (X, np.zeros(60, int), "one class, '0', .* expected two classes"),
    ],
)
def test_wrongly_passed_objects_get_a_remedy(x, y, why):
    label = None if y is not None else "out"
    data = (x, y) if y is not None else x.assign(out=np.arange(60) % 2)
    with pytest.raises(DataError, match=why):
        fedpact.run("logistic", data, label=label, **SETTINGS)


def test_an_obvious_mistake_is_reported(caplog, tmp_path):
    fedpact.from_arrays(np.zeros((4, 8, 8, 3), np.uint8), [0, 1, 0, 1])
    assert "numpy.moveaxis(x, -1, 1)" in caplog.text
    tokens = torch.randint(50, (60, 6)), np.arange(60) % 2
    with pytest.raises(DataError, match="no record is left, as the model"):
        fedpact.run(lambda shape, classes: nn.Sequential(nn.Embedding(2, 4), nn.Flatten(),
                                                         nn.Linear(24, classes)),
                    (tokens[0] + 2, tokens[1]), **SETTINGS, out=tmp_path / "r")  # fmt: skip
    frame = pd.DataFrame(X, columns=list("abcd")).assign(out=np.arange(60) % 2)
    for wrong, why in (
        (frame[["a", "out"]], "the test table"),
        ("x.csv", "x.csv does not exist"),
    ):
        with pytest.raises(DataError, match=why):
            fedpact.run("logistic", frame, label="out", test=wrong, **SETTINGS)
    assert plan_of("logistic", {"features": "a"}).records.features == ["a"]
    weighed = fedpact.Plan(task={"class_weights": np.array([1.0, 5.0])}).task
    assert weighed.class_weights == [1.0, 5.0]
    assert fedpact.Plan(task={"kind": "regression", "range": (0, 2)}).task.range == [0, 2]


def test_a_command_writes_pixels_where_they_fit(tmp_path, no_page, typed):
    result = fedpact.run(same, (IMAGES, MASKS), task=PIXELS, **SETTINGS, out=tmp_path / "r")
    np.savez(tmp_path / "x.npz", x=IMAGES)
    words = "predict", tmp_path / "r", tmp_path / "x.npz"
    told = typed(*words)
    assert told.code == 2
    assert "name an .npz file, --out answers.npz" in told.err
    assert typed(*words, "--out", tmp_path / "said.csv").code == 2
    assert not (tmp_path / "said.csv").exists()
    assert typed(*words, "--out", tmp_path / "said.npz").code == 0
    said = result.predict(IMAGES)
    with np.load(tmp_path / "said.npz") as stored:
        assert (stored["labels"] == said.labels).all()
        assert np.allclose(stored["probabilities"], said.probabilities)
        assert stored["classes"].tolist() == ["0", "1"]
    assert json.loads(typed(*words, "--json").out)["labels"] == said.labels.tolist()
