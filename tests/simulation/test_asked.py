"""Whatever a run takes, predict and evaluate take, with labels and without."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset as Items
from torch.utils.data import TensorDataset

import fedpact
from fedpact.common.errors import DataError
from fedpact.data.load import from_python
from fedpact.data.schema import PlanRecords

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)
WORDS = np.where(Y > 0, "yes", "no")
FRAME = pd.DataFrame(X, columns=["a", "b", "c"])
SETTINGS = {
    "sites": 2,
    "rounds": 4,
    "partition": {"held_out": 0.2},
    "privacy": {"mode": "none"},
    "settings": {"learning_rate": 0.5},
}
LABEL = {"label": "out"}


class Named(Items):
    """Pairs whose labels number classes that have names, as torchvision's."""

    classes = ("no", "yes")

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i], int(Y[i])


class Alone(Items):
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return torch.from_numpy(X[i])


pytestmark = pytest.mark.usefixtures("no_page")


def _arrow(frame):
    import pyarrow

    return pyarrow.Table.from_pandas(frame)


def _faces():
    import datasets

    label = datasets.ClassLabel(names=["no", "yes"])
    kinds = datasets.Features({"image": datasets.Array2D((1, 3), "float32"), "out": label})
    whole = {"image": X[:, None].tolist(), "out": Y.tolist()}
    return datasets.Dataset.from_dict(whole, features=kinds)


KINDS = {
    "pair": lambda: ((X, Y), X, {}),
    "lists": lambda: ([X.tolist(), Y.tolist()], X.tolist(), {}),
    "words": lambda: ((X, pd.Series(WORDS)), X, {}),
    "objects": lambda: ((X.astype(object), WORDS.astype(object)), X.astype(object), {}),
    "column": lambda: ((torch.from_numpy(X), Y[:, None]), torch.from_numpy(X), {}),
    "tensors": lambda: (
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
        TensorDataset(torch.from_numpy(X)),
        {},
    ),
    "items": lambda: (Named(), Alone(), {}),
    "fedpact": lambda: (fedpact.from_arrays(X, WORDS), X, {}),
    "frame": lambda: (FRAME.assign(out=WORDS), FRAME, LABEL),
    "mapping": lambda: ({**FRAME.to_dict("list"), "out": WORDS.tolist()}, FRAME, LABEL),
    "arrow": lambda: (
        _arrow(FRAME.assign(out=WORDS, number=range(60)).set_index("number")),
        _arrow(FRAME),
        LABEL,
    ),
    "cells": lambda: ({"x": list(X), "out": WORDS.tolist()}, {"x": list(X)}, LABEL),
    "faces": lambda: (_faces(), _faces().remove_columns("out"), LABEL),
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow if k == "faces" else ()) for k in KINDS]
)
def test_predict_and_evaluate_accept_the_input_of_a_run(kind, tmp_path):
    pytest.importorskip({"arrow": "pyarrow", "faces": "datasets"}.get(kind, "numpy"))
    whole, alone, named = KINDS[kind]()
    result = fedpact.run("logistic", whole, **named, **SETTINGS, out=tmp_path / "r")
    said = result.predict(alone)
    assert result.predict(whole).labels.tolist() == said.labels.tolist()
    right = (said.labels == (WORDS if "yes" in said.classes else Y.astype(str))).mean()
    assert right > 0.8
    score = result.evaluate(whole)
    assert score.accuracy == pytest.approx(right)
    assert score.records == 60
    given = WORDS if "yes" in said.classes else Y
    assert result.evaluate(alone, given) == score
    assert result.evaluate(alone, list(given)) == score
    assert {"auc", "f1", "ece"} == set(score.metrics)
    with pytest.raises(DataError, match="there are no labels"):
        result.evaluate(alone)
    if named and kind not in ("cells", "faces"):
        assert result._served.form.features == ("a", "b", "c")


def test_two_records_are_no_pair(tmp_path):
    """A pair (x, y) and two records [d] are told apart by the run's shape of a record."""
    result = fedpact.run("logistic", (X, Y), **SETTINGS, out=tmp_path / "r")
    one = result.predict(X[:2])
    for two in ((X[0], X[1]), [X[0].tolist(), X[1].tolist()]):
        assert result.predict(two).labels.tolist() == one.labels.tolist()
    with pytest.raises(DataError, match="expected a path"):
        result.predict(3)
    with pytest.raises(DataError, match=r"records is 'digits': expected the path"):
        result.predict("digits")
    other = fedpact.from_arrays(X, WORDS, classes=("yes", "no"))
    with pytest.raises(DataError, match="the run's are 0, 1"):
        result.evaluate(other)


def test_omitted_parts_of_a_split_are_reported(caplog):
    whole = FRAME.assign(out=WORDS)
    parts = {"train": whole[:40], "validation": whole[40:50], "test": whole[50:]}
    data = from_python(parts, PlanRecords(), "out")
    assert len(data.y) == 40
    assert len(data.y_test) == 10
    assert "the parts validation are not used" in caplog.text
    with pytest.raises(DataError, match=r"no test: pass data\[\"train\"\] alone"):
        from_python({k: parts[k] for k in ("train", "validation")}, PlanRecords(), "out")


def test_objects_that_are_no_numbers_are_refused():
    with pytest.raises(DataError, match="of numbers, or strings"):
        fedpact.from_arrays(X, np.array([{}] * 60, object))
    ragged = np.array([np.zeros(2), *(np.zeros(3) for _ in range(59))], object)
    with pytest.raises(DataError, match="rows of equal length"):
        fedpact.from_arrays(ragged, Y)
    stacked = fedpact.from_arrays(pd.Series(list(X)), pd.Series(WORDS, dtype="string"))
    assert torch.equal(stacked.x, torch.from_numpy(X))
    missing = fedpact.from_arrays(X, pd.Series([None, *Y[1:]], dtype="Int64"))
    assert len(missing.y) == 59


@pytest.mark.parametrize("form", [lambda frame, path: frame, lambda frame, path: path])
def test_a_column_that_is_missing_is_named(form, tmp_path):
    frame = FRAME.assign(out=WORDS)
    result = fedpact.run("logistic", frame, **LABEL, **SETTINGS, out=tmp_path / "run")
    lacking = frame.rename(columns={"b": "B"})
    lacking.to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(DataError) as refused:
        result.predict(form(lacking, tmp_path / "new.csv"))
    assert "has no column b, on which the model was trained: it has a, B, c, out" in str(
        refused.value
    )
    assert "records." not in str(refused.value)


class Packed(torch.nn.Module):
    """Reads as many tokens as are not 0, of which torch asks for one at least."""

    def __init__(self):
        super().__init__()
        self.words, self.cell = torch.nn.Embedding(9, 4), torch.nn.LSTM(4, 3, batch_first=True)

    def forward(self, x):
        lengths = (x != 0).sum(1).cpu()
        pack = torch.nn.utils.rnn.pack_padded_sequence
        packed = pack(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        return self.cell(packed)[1][0][-1]


def test_a_record_on_which_a_model_fails_is_left_out(tmp_path):
    x, y = torch.randint(1, 9, (40, 5)), torch.arange(40) % 3
    x[3] = 0
    given = {"sites": 2, "rounds": 1, "test": (x, y), "privacy": {"epsilon": 4.0}}
    result = fedpact.run(Packed, (x, y), out=tmp_path / "run", **given)
    assert result.predict(x).used.tolist() == [k != 3 for k in range(40)]
    good = torch.arange(40) != 3
    assert result.evaluate((x, y)).loss == result.evaluate((x[good], y[good])).loss
