"""What is handed in as something else is told with what was expected; a test set may be a path."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedpact
from fedpact.common.errors import DataError, InputError, ModelError, PlanError

FRAME = pd.DataFrame({"a": np.arange(60) / 60, "ill": ["no", "yes"] * 30})
TEST = pd.DataFrame({"ill": ["yes", "no", "yes"], "a": [0.1, 0.2, 0.3]})
SETTINGS = {"rounds": 1, "sites": 2, "privacy": {"mode": "none"}}


def net(shape, classes):
    return nn.Linear(shape[0], classes)


@pytest.fixture
def files(tmp_path):
    FRAME.to_csv(tmp_path / "data.csv", index=False)
    TEST.to_csv(tmp_path / "test.csv", index=False)
    y = (TEST.ill == "yes").to_numpy().astype(int)
    np.savez(tmp_path / "test.npz", x=TEST[["a"]].to_numpy(np.float32), y=y)
    return tmp_path


def test_a_test_set_may_be_a_path_whatever_the_data_is(files):
    path, test = str(files / "data.csv"), files / "test.csv"
    rest = {**SETTINGS, "label": "ill"}
    runs = [
        fedpact.run(net, data, test=other, **rest, out=files / f"run{k}")
        for k, (data, other) in enumerate(
            [(FRAME, TEST), (path, str(test)), (path, test), (FRAME, test), (path, TEST)]
        )
    ]
    plan = fedpact.Plan(model=net, data=path, **rest)
    runs.append(fedpact.run(plan, files / "plan", test=test))
    wanted = [round.loss for round in runs[0].records]
    assert all([round.loss for round in run.records] == wanted for run in runs)
    pair = FRAME[["a"]].to_numpy(np.float32), (FRAME.ill == "yes").to_numpy().astype(int)
    arrays = fedpact.run(net, pair, test=files / "test.npz", **SETTINGS, out=files / "npz")
    assert [round.loss for round in arrays.records] == wanted


def test_a_test_set_of_another_kind_is_refused(files):
    with pytest.raises(DataError, match=r"test is .*tuple beside data data\.csv: .* table"):
        fedpact.run(net, files / "data.csv", test=(TEST[["a"]], TEST.ill), label="ill")
    with pytest.raises(DataError, match="digits has a test set of its own"):
        fedpact.run(net, "digits", test=(np.zeros((2, 1, 8, 8)), [0, 1]))


@pytest.mark.parametrize("named", [{"label": "ill"}, {"site": "ward"}, {"drop": ["id"]}])
def test_columns_without_data_are_no_default_data_set(named, tmp_path):
    with pytest.raises(DataError, match=f"data set digits.*{next(iter(named))} = "):
        fedpact.run(net, **named, out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_unusable_input_is_reported_with_the_expectation(tmp_path):
    with pytest.raises(DataError, match=r"x\.xlsx.* \.csv, \.parquet, \.npz"):
        fedpact.run(net, "x.xlsx", label="ill", **SETTINGS)
    for model in (None, 5):
        with pytest.raises(
            PlanError, match=f"model: {model}: expected a model: a name, a module, a class or"
        ):
            fedpact.run(model, FRAME, label="ill", **SETTINGS)
    with pytest.raises(ModelError, match=r"torch\.float64: .*\.float\(\)"):
        fedpact.run(lambda shape, classes: net(shape, classes).double(), FRAME, label="ill",
                    **SETTINGS, out=tmp_path / "d")  # fmt: skip


def test_a_table_is_not_an_image_and_predictions_are_short(tmp_path):
    x = torch.arange(60.0).reshape(60, 1, 1, 1).expand(60, 1, 2, 2)
    flat = lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(4, classes))  # noqa: E731
    result = fedpact.run(flat, (x, np.arange(60) % 2), **SETTINGS, out=tmp_path / "r")
    with pytest.raises(InputError, match=r"expected shape \(1, 2, 2\).*\.npz"):
        result.predict(FRAME)
    said = result.predict(x)
    assert repr(said) == "Predictions(60 records, 60 used; of 0, 1; .labels, .probabilities)"
