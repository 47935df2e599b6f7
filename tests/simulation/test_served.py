"""A run's model in use: its answers are those of its module on records as training had them."""

import csv
import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.tables import write_csv

import fedpact
from fedpact.api import load
from fedpact.common.errors import DataError, InputError, ModelError
from fedpact.plan import Plan
from fedpact.simulation.predict import Predictor
from fedpact.simulation.setup import SimulationSetup

ROWS = 60
TABLE = {
    "data": "own.csv",
    "label": "outcome",
    "rounds": 1,
    "sites": 2,
    "records": {
        "classes": ["no", "yes"],
        "columns": {
            "age": {"range": [0.0, 120.0], "scale": "range", "fill": 50.0},
            "kind": {"categories": ["a", "b"], "scale": "one-hot"},
        },
    },
}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A run on a table with declared columns, and its folder's place."""
    where = tmp_path_factory.mktemp("table")
    rng = np.random.default_rng(0)
    rows = []
    for k in range(ROWS):
        age = "" if k == 3 else f"{rng.uniform(0, 120):.1f}"
        rows.append([age, ["no", "yes"][k % 2], "ab"[k % 3 > 0], f"{rng.normal():.3f}"])
    path = write_csv(where / "own.csv", ["age", "outcome", "kind", "weight"], *rows)
    raw = {**TABLE, "data": str(path)}
    result = fedpact.run(Plan.parse(raw), where / "run")
    return SimpleNamespace(where=where, plan=Plan.parse(raw), result=result)


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_is_read_scaled_and_answered_as_in_training(table):
    scene = SimulationSetup.of(table.plan)
    with torch.no_grad():
        expected = table.result.model.eval()(scene.dataset.x).double().softmax(-1).numpy()
    found = load(table.where / "run").predict(table.where / "own.csv")
    assert found.used.all()
    np.testing.assert_allclose(found.probabilities, expected, rtol=1e-6)
    assert found.labels.tolist() == [["no", "yes"][k] for k in expected.argmax(1)]
    # Columns by name, in any order, as a mapping, without labels.
    rows = rows_of(table.where / "own.csv")
    columns = {name: [row[name] for row in rows] for name in ("weight", "kind", "age")}
    again = load(table.where / "run").predict(columns)
    np.testing.assert_array_equal(again.probabilities, found.probabilities)


def test_records_that_training_drops_get_empty_predictions(table):
    rows = {"age": ["30", "300", "30"], "kind": ["a", "a", "c"], "weight": ["0.5"] * 3}
    found = table.result.predict(rows)
    assert found.used.tolist() == [True, False, False]
    assert found.labels[1] == found.labels[2] == ""
    assert np.isnan(found.probabilities[1:]).all()
    assert found.probabilities[0].sum() == pytest.approx(1)


def test_a_record_is_reported_once_with_its_fault(table, caplog):
    """Not as one that could not be scaled, which it was not even given to."""
    table.result.predict({"age": ["x", "30"], "kind": ["a", "a"], "weight": ["0.5"] * 2})
    assert len(caplog.records) == 1
    assert "row 1 = 'x': column age is not a finite number" in caplog.text


def test_probabilities_that_are_nan_answer_no_class(table):
    class Broken(torch.nn.Module):
        def forward(self, x):
            return torch.zeros(len(x), 2).index_fill(0, torch.tensor([1]), math.nan)

    served = replace(Predictor.of(table.where / "run"), model=Broken())
    assert served.predict(table.where / "own.csv").labels[:3].tolist() == ["no", "", "no"]


def test_figures_are_those_of_counting(table):
    found = table.result.predict(table.where / "own.csv")
    truth = [row["outcome"] for row in rows_of(table.where / "own.csv")]
    score = load(table.where / "run").evaluate(table.where / "own.csv")
    assert score.accuracy == np.mean(found.labels == np.array(truth))
    own = found.probabilities[np.arange(ROWS), [found.classes.index(t) for t in truth]]
    assert score.loss == pytest.approx(-np.log(own).mean(), rel=1e-5)
    assert score.records == ROWS


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    where = tmp_path_factory.mktemp("digits")
    plan = Plan.parse(
        {
            "rounds": 1,
            "sites": 2,
            "model": "logistic",
            "features": {"kind": "scattering", "cells": 1},
        }
    )
    return SimpleNamespace(plan=plan, folder=where / "run", run=fedpact.run(plan, where / "run"))


def test_features_replace_images_with_the_runs_accuracy(digits):
    data = SimulationSetup.of(digits.plan).raw
    found = load(digits.folder)
    assert found.evaluate(data.x_test, data.y_test).accuracy == digits.run.summary["accuracy"]
    assert found.summary == digits.run.summary
    assert [r.round for r in found.records] == [r.round for r in digits.run.records]
    for one, other in zip(found.model.parameters(), digits.run.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("records", "told"),
    [
        (np.zeros((3, 8, 8), np.float32), r"expected shape \(1, 8, 8\)"),
        ("nowhere.npz", "does not exist"),
        ({"a": [1.0]}, r"columns a: expected shape"),
    ],
)
def test_records_of_another_form_are_refused(digits, records, told):
    with pytest.raises(DataError, match=told):
        digits.run.predict(records)


def test_unlabelled_file_is_predicted_but_not_evaluated(digits, tmp_path):
    path, x = tmp_path / "new.npz", SimulationSetup.of(digits.plan).raw.x_test[:3].numpy()
    np.savez(path, x=x)
    found = digits.run.predict(path)
    np.testing.assert_array_equal(found.probabilities, digits.run.predict(x).probabilities)
    with pytest.raises(DataError, match="no labels; give them"):
        digits.run.evaluate(path)


def test_a_folder_without_a_finished_run_is_refused(digits, tmp_path):
    with pytest.raises(DataError, match=r"plan\.json"):
        load(tmp_path)
    plan = json.dumps(digits.plan.document())
    (tmp_path / "plan.json").write_text(plan)
    with pytest.raises(DataError, match="fedpact resume"):
        load(tmp_path)


def test_frames_are_rounds_and_sites(digits):
    frames = digits.run.frames()
    assert list(frames["rounds"]["round"]) == [0, 1]
    spent = dict(zip(frames["sites"]["site"], frames["sites"]["epsilon"], strict=True))
    assert spent == digits.run.summary["epsilon"]


@pytest.mark.filterwarnings("ignore")
def test_an_exported_model_gives_the_same_scores(digits, tmp_path):
    served = Predictor.of(digits.folder)
    x, _ = served.preprocess(SimulationSetup.of(digits.plan).raw.x_test[:7])
    digits.run.export(tmp_path / "new" / "model.pt")
    with torch.no_grad():
        assert torch.equal(torch.jit.load(tmp_path / "new" / "model.pt")(x), served.model(x))
    with pytest.raises(InputError, match="ends in"):
        digits.run.export(tmp_path / "other" / "model.bin")
    assert not (tmp_path / "other").exists()


def test_missing_onnx_packages_get_a_remedy(digits, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(InputError, match=r"fedpact\[onnx\]"):
        digits.run.export(tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_onnx_export_gives_equal_scores_for_any_batch_size(digits, tmp_path):
    reference = pytest.importorskip("onnx.reference", reason="fedpact[onnx] is not installed")
    pytest.importorskip("onnxscript", reason="fedpact[onnx] is not installed")
    served, path = Predictor.of(digits.folder), tmp_path / "model.onnx"
    digits.run.export(path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    session = reference.ReferenceEvaluator(str(path))
    for count in (1, 7):
        x, _ = served.preprocess(SimulationSetup.of(digits.plan).raw.x_test[:count])
        (scores,) = session.run(None, {session.input_names[0]: x.numpy()})
        with torch.no_grad():
            np.testing.assert_allclose(scores, served.model(x).numpy(), rtol=1e-5, atol=1e-5)


def test_released_column_scales_are_applied_to_new_records(table, tmp_path):
    columns = {"age": {"range": [0.0, 120.0], "scale": "released", "fill": 50.0}}
    records = {"classes": ["no", "yes"], "columns": {**TABLE["records"]["columns"], **columns}}
    plan = Plan.parse({**TABLE, "data": table.plan.data, "records": records})
    result = fedpact.run(plan, tmp_path / "run")
    (by,) = json.loads((tmp_path / "run" / "columns.json").read_text()).values()
    scene = SimulationSetup.of(plan)
    x = scene.dataset.x.double()
    (place,) = scene.released
    x[:, place] = (x[:, place] - by["mean"]) / by["deviation"]
    with torch.no_grad():
        expected = result.model.eval()(x.float()).double().softmax(-1).numpy()
    found = result.predict(table.plan.data).probabilities
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    for broken in (
        None,
        {},
        {"age": {"mean": 0.1}},
        {"age": {"mean": "a", "deviation": 1.0}},
        {"age": {"mean": math.nan, "deviation": 1.0}},
        {"age": {"mean": 0.1, "deviation": 0.0}},
        {"age": {"mean": 0.1, "deviation": -0.3}},
        ["age"],
        {"age": None},
    ):
        path = tmp_path / "run" / "columns.json"
        path.unlink() if broken is None else path.write_text(json.dumps(broken))
        with pytest.raises(DataError, match=r"columns\.json lacks the scales of the columns age"):
            Predictor.of(tmp_path / "run")
        path.write_text("{}")


def test_the_commands_say_the_same(table, typed, tmp_path):
    run, file = str(table.where / "run"), str(table.where / "own.csv")
    out = tmp_path / "found.csv"
    found = table.result.predict(file)
    said = typed("predict", run, file, "--json").out
    assert json.loads(said)["labels"] == found.labels.tolist()
    assert typed("predict", run, file, "--out", out).code == 0
    assert [row["label"] for row in rows_of(out)] == found.labels.tolist()
    assert out.stat().st_mode & 0o077 == 0
    score = json.loads(typed("evaluate", run, file, "--json").out)
    assert score["accuracy"] == table.result.evaluate(file).accuracy


def test_a_file_of_predicted_numbers_has_as_many_headings(table, tmp_path, typed):
    """And an empty cell for a record that is not used; its label may be kept beside."""
    task = {"kind": "regression", "range": [0, 120]}
    plan = Plan.parse(
        {
            **table.plan.document(),
            "label": "age",
            "records": {"drop": ["kind", "outcome"]},
            "task": task,
        }
    )
    result = fedpact.run(plan, tmp_path / "run")
    file, out = tmp_path / "new.csv", tmp_path / "out.csv"
    file.write_text("weight,age\n0.5,30\nx,40\n")
    typed("predict", tmp_path / "run", file, "--out", out)
    with out.open(newline="") as lines:
        found = list(csv.reader(lines))
    answer = result.predict(file).labels[0]
    assert found == [["row", "label"], ["1", str(answer)], ["2", ""]]


def test_heads_of_the_sites_own_leave_no_model_to_ask(digits, tmp_path):
    for file in ("records.json", "model.safetensors"):
        (tmp_path / file).write_bytes((digits.folder / file).read_bytes())
    plan = digits.plan.document()
    plan["local"]["head"] = 10
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(DataError, match="its own head"):
        Predictor.of(tmp_path)


def test_the_average_that_a_server_kept_can_be_asked(table, tmp_path, typed):
    raw = {**TABLE, "data": table.plan.data, "rounds": 3}
    kept = {"average": "exponential", "average_decay": 0.5}
    result = fedpact.run(Plan.parse({**raw, "server": kept}), tmp_path / "run")
    asked = load(tmp_path / "run", average=True)
    weights = load_file(tmp_path / "run" / "average.safetensors")
    assert all(torch.equal(asked.model.state_dict()[name], w) for name, w in weights.items())
    assert not np.array_equal(
        asked.predict(raw["data"]).probabilities, result.predict(raw["data"]).probabilities
    )
    assert f"{result.summary['average']['accuracy']:.1%}"[:-1] in repr(asked)

    command, file = ("evaluate", tmp_path / "run"), table.plan.data
    # Whoever does not ask for it is told that there is one.
    assert "--average uses the average" in typed(*command, file).err
    of_average = typed(*command, file, "--average", "--json")
    assert "--average" not in of_average.err
    assert json.loads(of_average.out)["loss"] == asked.evaluate(file).loss
    with pytest.raises(DataError, match=r"holds no average of models .*server\.average = 'none'"):
        load(table.where / "run", average=True)


class Counting(torch.nn.Module):
    """Its answer has as many rows as there were records when it was traced."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x) * torch.ones(len(x), 1)


def test_a_model_that_keeps_the_traced_size_is_not_exported(tmp_path):
    records = np.random.default_rng(0).normal(size=(40, 64)), np.arange(40) % 10
    how = {"rounds": 1, "sites": 2, "privacy": {"mode": "none"}}
    result = fedpact.run(Counting(), records, out=tmp_path / "run", **how)
    with pytest.raises(ModelError, match=r"x\.shape\[0\] and not from len"):
        result.export(tmp_path / "m.pt")
    assert not (tmp_path / "m.pt").exists()


@pytest.mark.filterwarnings("ignore:`torch.jit.load` is deprecated:DeprecationWarning")
def test_the_zoos_transformer_is_exported(tmp_path):
    rng = np.random.default_rng(0)
    records, labels = rng.integers(0, 20, (40, 6)), rng.integers(0, 20, 40)
    form = {"vocabulary": 20, "classes": list(map(str, range(20)))}
    result = fedpact.run(
        "transformer", (records, labels), records=form, rounds=1, sites=2,
        privacy={"mode": "none"}, out=tmp_path / "run",
    )  # fmt: skip
    result.export(tmp_path / "t.pt")
    made, served = torch.jit.load(tmp_path / "t.pt"), Predictor.of(result.folder)
    for count in (1, 2, 7):
        x, _ = served.preprocess(records[:count])
        with torch.no_grad():
            assert torch.allclose(made(x), served.model(x), atol=1e-6)
