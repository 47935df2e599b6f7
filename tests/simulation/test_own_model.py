"""A model and records that are handed in from Python: what runs, and what the folder says of it."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedpact
from fedpact.api import with_own
from fedpact.common.errors import DataError, InputError, ModelError, PlanError
from fedpact.common.user_code import name_object
from fedpact.data.load import digest_of, from_python, load_dataset, refit
from fedpact.data.schema import PlanRecords
from fedpact.report.page import repeat
from fedpact.report.run_summary import read_run
from fedpact.simulation.setup import load_data

ROOT = Path(__file__).parents[2]
SETTINGS = {"sites": 2, "rounds": 1, "partition": {"held_out": 0.2}}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
FRAME = pd.DataFrame(X, columns=["a", "b", "c"]).assign(ill=np.where(Y, "yes", "no"), id=range(60))


def net():
    """Of a file that can be imported."""
    return nn.Sequential(nn.Linear(3, 2))


def local(width):
    """A factory that no other process can import."""
    return lambda: nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


pytestmark = pytest.mark.usefixtures("no_page")


def test_the_readmes_ten_lines_run(tmp_path, monkeypatch, capsys):
    """Eleven lines of Python at most, of which three import and three make a table."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python own\n(.*?)```", page, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 11
    scope = {"__name__": "__main__"}
    exec(compile(code.replace("rounds=40", "rounds=2"), "readme", "exec"), scope)
    record = json.loads((scope["result"].folder / "records.json").read_text())
    assert record["features"] == ["age", "ward"]
    told = "columns used: age, ward; label ill, of classes no, yes; 3,000 records"
    assert told in capsys.readouterr().err


def test_instance_starts_from_its_weights_and_is_unchanged(tmp_path):
    module = nn.Linear(3, 2)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    result = fedpact.run(module, (X, Y), **SETTINGS, settings={"learning_rate": 1e-30},
                         privacy={"mode": "none"}, out=tmp_path / "run")  # fmt: skip
    for key, value in result.model.state_dict().items():
        assert torch.equal(value, before[key])
        assert torch.equal(module.state_dict()[key], before[key])
    assert result.predict(X).labels.shape == (60,)


def test_records_in_every_container_are_the_same_records(tmp_path):
    """The same numbers, labels and classes, and of tables one digest."""
    from datasets import ClassLabel
    from datasets import Dataset as Hugging

    FRAME.to_csv(tmp_path / "t.csv")
    names = ClassLabel(names=["no", "yes"])
    hugging = Hugging.from_pandas(FRAME.assign(ill=Y)).cast_column("ill", names)
    tables = {
        "frame": FRAME,
        "columns": {name: FRAME[name].tolist() for name in FRAME},
        "hugging face": hugging,
        "with a test set": {"train": hugging, "test": hugging.select(range(5))},
    }
    dropped = PlanRecords(drop=["id"])
    found = {kind: from_python(data, dropped, "ill") for kind, data in tables.items()}
    assert len({digest_of(one) for one in found.values()}) == 2
    assert torch.equal(found["with a test set"].x_test, found["frame"].x[:5])
    served = fedpact.run("logistic", hugging, label="ill", drop=["id"], **SETTINGS,
                         out=tmp_path / "run")  # fmt: skip
    assert served.evaluate(hugging) == served.evaluate(X, Y)
    found["csv"] = load_dataset(str(tmp_path / "t.csv"), "ill", form=dropped)
    items = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    for kind, data in {"arrays": (X, Y), "torch": items}.items():
        found[kind] = from_python(data, PlanRecords(classes=["no", "yes"]))
    for kind, one in found.items():
        assert torch.equal(one.x, torch.from_numpy(X)), kind
        assert torch.equal(one.y, torch.from_numpy(Y)), kind
        assert one.classes == ("no", "yes"), kind


@pytest.mark.parametrize("write", ["to_parquet", "to_csv"])
def test_a_pandas_index_is_not_a_feature_by_default(tmp_path, write):
    name = "patient" if write == "to_parquet" else None
    frame = FRAME.drop(columns="id").set_axis([f"{i}" for i in range(60)]).rename_axis(name)
    path = tmp_path / f"t.{write.removeprefix('to_')}"
    getattr(frame, write)(path)
    assert load_dataset(str(path), "ill").features == ("a", "b", "c")
    asked = [name or "", "c"]
    assert load_dataset(str(path), "ill", form=PlanRecords(features=asked)).features == tuple(asked)


def test_wrong_columns_are_named():
    for wrong in ({"drop": ["idd"]}, {"features": ["a", "ill"]}):
        with pytest.raises(DataError, match="expected some of its columns a, b, c, ill, id"):
            from_python(FRAME, PlanRecords(**wrong), "ill")
    with pytest.raises(PlanError, match="not both"):
        fedpact.Plan(records={"features": ["a"], "drop": ["b"]})


@pytest.mark.parametrize("wrong", [{"drop": ["1"]}, {"features": ["0"]}, {"drop": ["no such"]}])
def test_arrays_have_no_columns_to_leave_out(tmp_path, wrong):
    """What is to be left out of the records, as a patient's number, is never kept in silence."""
    file, records = tmp_path / "t.npz", PlanRecords(**wrong)
    np.savez(file, x=X, y=Y)
    ways = (
        lambda: load_dataset(str(file), form=records),
        lambda: load_data(fedpact.Plan(data=str(file), records=records)),
        lambda: from_python((X, Y), records),
        lambda: from_python(file, records),
        lambda: fedpact.run("logistic", (X, Y), out=tmp_path / "run", **wrong, **SETTINGS),
    )
    for way in ways:
        with pytest.raises(DataError, match="leave columns out of its arrays"):
            way()


def test_arrays_with_a_table_obey_its_column_limits(tmp_path):
    """By their places: a test set, and what a run is asked about."""
    frame = FRAME.assign(c=np.where(X[:, 2] > 0, "A", "B"))
    numbers = np.column_stack([X[:, :2], X[:, 2] <= 0]).astype(np.float32)
    numbers[0, 0], numbers[1, 2] = 500, 7
    columns = {
        "a": {"range": [-9, 9], "scale": "range"},
        "c": {"categories": ["A", "B"], "scale": "one-hot"},
        "id": {"low": 0},
    }
    file, given = tmp_path / "test.npz", {"drop": ["id"], "columns": columns}
    np.savez(file, x=numbers, y=Y)
    own = {"label": "ill", "records": given, **SETTINGS}
    result = fedpact.run("logistic", frame, test=file, out=tmp_path / "run", **own)
    found = from_python(frame, PlanRecords.model_validate(given), "ill", test=file)
    assert torch.equal(found.x_test, torch.from_numpy(numbers[2:]))
    table = from_python(frame, PlanRecords.model_validate(given), "ill", test=frame[:7])
    assert torch.equal(table.x_test, found.x[:7])
    by_name, by_place = result.predict(frame), result.predict(numbers)
    assert np.isnan(by_place.probabilities[:2]).all()
    assert np.array_equal(by_name.probabilities[2:], by_place.probabilities[2:])
    assert np.array_equal(result.predict(file).probabilities, by_place.probabilities, True)
    # A data set goes by name, too.
    turned = from_python(frame[["c", "ill", "id", "b", "a"]], PlanRecords(**given), "ill")
    assert turned.features == ("c", "b", "a")
    assert np.array_equal(result.predict(turned).probabilities, by_name.probabilities)


@pytest.mark.parametrize(
    ("chosen", "more"),
    [({"drop": ["id"]}, {}), ({"features": ["image"]}, {"low": -9.0, "high": 9.0})],
)
def test_of_a_table_one_column_of_arrays_may_be_chosen(tmp_path, chosen, more):
    frame = pd.DataFrame({"id": range(60), "image": list(X), "ill": Y})
    own = {"label": "ill", "records": {**chosen, **more}, **SETTINGS}
    result = fedpact.run("logistic", frame, test=frame[:7], out=tmp_path / "run", **own)
    assert result.summary["rounds"] == 1
    asked = [result.predict(records).probabilities for records in (frame, X)]
    assert np.array_equal(*asked)
    records = PlanRecords.model_validate({**chosen, **more})
    found = from_python(frame, records, "ill")
    with pytest.raises(DataError, match="leave columns out of its arrays"):
        refit(found, PlanRecords(drop=["image"]))


def test_named_columns_cannot_be_declared_by_position():
    """Scaling goes by names: what is declared of "0" would be checked, and never scaled."""
    data = from_python(FRAME, PlanRecords(drop=["id"]), "ill")
    columns = {"0": {"scale": "standard", "mean": 0.0, "deviation": 0.1}}
    with pytest.raises(DataError, match="declares 0: expected some of its columns, which are a, b"):
        refit(data, PlanRecords(columns=columns))


def test_a_missing_pandas_label_is_not_a_class():
    frame = FRAME.assign(ill=FRAME["ill"].astype("string").where(FRAME["id"] > 2, pd.NA))
    found = from_python(frame, PlanRecords(drop=["id"]), "ill")
    assert found.classes == ("no", "yes")
    assert len(found.y) == 57


def test_input_that_is_not_a_data_set_gets_a_remedy():
    for wrong in (3, iter([]), FRAME["a"], (X, Y, Y)):
        with pytest.raises(DataError, match="expected a path"):
            from_python(wrong, PlanRecords())
    with pytest.raises(DataError, match="expected one; "):
        from_python(_Items([(X[0], 0), (X[0, :2], 1)]), PlanRecords())
    with pytest.raises(DataError, match="only a table has columns"):
        from_python((X, Y), PlanRecords(), "ill")
    with pytest.raises(DataError, match=r"is a folder: .*'imagefolder'"):
        load_dataset(str(Path(__file__).parent))


class _Items(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def test_images_of_pillow_become_arrays_with_channels_first():
    from PIL import Image

    raw = RNG.integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
    items = _Items([(Image.fromarray(a), i % 2) for i, a in enumerate(raw)])
    items.classes = ["cat", "dog"]
    form = PlanRecords(low=0.0, high=255.0)
    found = from_python(items, form)
    assert np.array_equal(found.x.numpy(), np.moveaxis(raw, -1, 1).astype(np.float32))
    assert found.classes == ("cat", "dog")


def test_a_folder_records_passed_objects_and_accepts_no_other(tmp_path):
    first = fedpact.run(local(4), (X, Y), **SETTINGS, out=tmp_path / "run")
    plan = fedpact.Plan.read(first.folder / "plan.json")
    own = fedpact.from_arrays(X, Y)
    assert plan.data == f"arrays@{digest_of(own)[:16]}"
    assert plan.model == name_object(local(4)) != name_object(local(5))
    other = (X + 1, Y)
    with pytest.raises(PlanError, match="give the records that the plan was made for"):
        fedpact.run(plan, data=other, out=tmp_path / "other")
    with pytest.raises(DataError, match=r"passed in from Python .* pass the same records"):
        fedpact.run(plan, out=tmp_path / "none")
    with pytest.raises(PlanError, match="another configuration"):
        fedpact.run(plan, data=own, model=local(5), out=tmp_path / "run")
    again = fedpact.run(plan, data=own, out=tmp_path / "again")
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    command, words = repeat(read_run(first.folder))
    assert command.startswith("fedpact.run(")
    assert "data=..., model=..." in command
    assert plan.model in words
    assert "test=..." in words


def test_a_missing_test_set_is_asked_for_with_the_records():
    plan, _ = with_own(fedpact.Plan(), data=(X, Y), test=(X, Y))
    with pytest.raises(PlanError, match=r"with the same test=\.\.\. if it had a test set"):
        with_own(plan, data=(X, Y))
    assert with_own(plan, data=(X, Y), test=(X, Y))[0] == plan


def test_another_process_needs_the_model_again(tmp_path, monkeypatch):
    result = fedpact.run(local(4), (X, Y), **SETTINGS, out=tmp_path / "run")
    monkeypatch.setattr("fedpact.common.user_code._kept", {})
    with pytest.raises(ModelError, match=r"pass the same again, as model=\.\.\."):
        fedpact.load(result.folder)
    loaded = fedpact.load(result.folder, model=local(4))
    assert np.array_equal(loaded.predict(X).probabilities, result.predict(X).probabilities)


def test_settings_with_a_plan_and_bad_plans_are_refused():
    with pytest.raises(PlanError, match="rounds: these are settings of the plan"):
        fedpact.run(fedpact.Plan(), rounds=3)
    with pytest.raises(InputError, match='engine = "ray" with lambda@'):
        fedpact.run(local(4), "digits", engine="ray")
    raw = {"rounds": 0, "privacy": {"epsilon": -1}, "nonsense": 1}
    with pytest.raises(PlanError) as by_hand:
        fedpact.Plan(**raw)
    with pytest.raises(PlanError) as parsed:
        fedpact.Plan.parse(raw)
    assert str(by_hand.value) == str(parsed.value)
    assert all(key in str(parsed.value) for key in ("rounds is 0", "privacy.epsilon", "nonsense"))


def test_compare_accepts_models_and_records_as_run_does(tmp_path):
    """A local model in this process, an importable one in its own: each as `run` trains it."""
    plans = {
        "narrow": fedpact.Plan(model=local(2), **SETTINGS),
        "wide": fedpact.Plan(model=local(5), **SETTINGS),
    }
    found = fedpact.compare(plans, seeds=1, out=tmp_path / "both", data=(X, Y))
    assert not found.inequalities
    for name, plan in plans.items():
        alone = fedpact.run(plan, data=(X, Y), out=tmp_path / name)
        model = fedpact.load(tmp_path / "both" / name / "seed-0").model
        for a, b in zip(alone.model.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)
    again = fedpact.compare(plans, seeds=1, out=tmp_path / "both", data=(X, Y))
    assert [e.name for e in again.entries] == ["narrow", "wide"]


def test_a_run_that_fails_here_leaves_the_others(tmp_path):
    """As runs in processes of their own do."""

    def broken():
        raise RuntimeError("no model today")

    plans = {"good": fedpact.Plan(model=local(2), **SETTINGS),
             "bad": fedpact.Plan(model=broken, **SETTINGS)}  # fmt: skip
    found = fedpact.compare(plans, seeds=1, out=tmp_path / "c", data=(X, Y))
    missing = {entry.name: dict(entry.missing) for entry in found.entries}
    assert missing["good"] == {}
    assert "no model today" in missing["bad"][0]


def test_a_tables_test_set_may_be_arrays_in_its_order(tmp_path):
    file, dropped = tmp_path / "test.npz", PlanRecords(drop=["id"])
    np.savez(file, x=X[:7], y=Y[:7])
    found = from_python(FRAME, dropped, "ill", test=file)
    assert found.features == ("a", "b", "c")
    assert torch.equal(found.x_test, torch.from_numpy(X[:7]))
