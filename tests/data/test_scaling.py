"""Constants declared column by column: what stands in place of a record, in all engines alike."""

import logging
import tomllib

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.tables import write_csv, write_parquet

from fedpact.common.errors import DataError
from fedpact.common.params import FlatModel
from fedpact.data.load import from_arrays, from_python, load_dataset, load_site
from fedpact.data.schema import Column, PlanRecords, RecordForm, Scaling
from fedpact.deployment.federation import Federation, read_plan
from fedpact.deployment.files import write_deployment
from fedpact.plan import Plan
from fedpact.simulation.setup import SimulationSetup
from fedpact.simulation.workshop import TrainingSetup

COLUMNS = {
    "age": {"range": [20, 80], "clamp": True, "fill": 50, "scale": "range"},
    "dose": {"low": 0, "high": 4, "scale": "unit"},
    "bmi": {"scale": "standard", "mean": 25, "deviation": 5, "fill": 30},
    "ward": {"categories": ["A", "B", "C"], "other": "C", "fill": "A", "scale": "one-hot"},
    "code": {"categories": [1, 7, 9], "other": 9, "scale": "one-hot"},
    "sex": {},
}
HEADER = ["age", "dose", "bmi", "ward", "code", "sex", "out"]
ROWS = [
    ["50", "1", "25", "A", "1", "0", "no"],
    ["95", "4", "35", "B", "7", "1", "yes"],
    ["", "0", "?", "", "4", "0", "no"],
    ["NA", "3", "20", "new", "9", "1", "yes"],
    ["50", "", "25", "A", "1", "0", "no"],  # nothing is declared for a missing dose
    ["50", "1", "25", "A", "", "0", "no"],  # nor for a missing code
    ["50", "5", "25", "A", "1", "0", "no"],  # beyond its range, and not to be clamped
    ["x", "1", "25", "A", "1", "0", "no"],  # not missing: wrong
]
# By hand: (2 x - 100) / 60, x / 4, (x - 25) / 5, A B C, 1 7 9, sex.
WANTED = [
    [0, 0.25, 0, 1, 0, 0, 1, 0, 0, 0],
    [1, 1.0, 2, 0, 1, 0, 0, 1, 0, 1],
    [0, 0.0, 1, 1, 0, 0, 0, 0, 1, 0],
    [0, 0.75, -1, 0, 0, 1, 0, 0, 1, 1],
]
NAMES = ["age", "dose", "bmi", "ward=A", "ward=B", "ward=C", "code=1.0", "code=7.0", "code=9.0"]


def table(path, rows=ROWS):
    return write_csv(path, HEADER, *rows)


def prepared(data, form):
    return Scaling.of(form, data.x.shape[1:], data.features)(data.x)


class Frame:
    """What pandas and polars have in common."""

    def __init__(self, columns):
        self._columns, self.columns = columns, list(columns)

    def __getitem__(self, name):
        return self._columns[name]


def test_columns_by_hand_from_every_kind_of_table(tmp_path):
    form = PlanRecords(columns=COLUMNS).shared()
    path = table(tmp_path / "t.csv")
    wanted = torch.tensor(WANTED)
    found = load_dataset(str(path), "out", form=form)
    assert torch.equal(prepared(found, form), wanted)
    assert Scaling.of(form, (6,), found.features).names == (*NAMES, "sex")

    site = load_site(path, "out", ("no", "yes"), (6,), "float32", form, features=found.features)[0]
    assert torch.equal(Scaling.of(form, (6,), site.features)(site.x), wanted)

    # The same numbers as a site's array, in the federation's order.
    np.savez(tmp_path / "t.npz", x=found.x.numpy(), y=found.y.numpy())
    of = (None, ("no", "yes"), (6,), "float32", form)
    site = load_site(tmp_path / "t.npz", *of, features=found.features)[0]
    assert torch.equal(Scaling.of(form, (6,), site.features)(site.x), wanted)

    cells = dict(zip(HEADER, zip(*ROWS, strict=True), strict=True))
    cells["bmi"] = [float("nan") if v == "?" else float(v) for v in cells["bmi"]]
    cells["age"] = [None if v in ("", "NA") else v for v in cells["age"]]
    frame = from_python(Frame(cells), PlanRecords(**form.model_dump()), "out")
    assert torch.equal(prepared(frame, form), wanted)
    assert torch.equal(frame.y, found.y)

    path = write_parquet(tmp_path / "t.parquet", {k: list(v) for k, v in cells.items()})
    stored = load_dataset(str(path), "out", form=form)
    assert torch.equal(prepared(stored, form), wanted)


def test_arrays_are_filled_and_scaled_by_place_and_as_a_whole():
    form = RecordForm(columns={"1": {"range": [0, 10], "fill": 5, "scale": "range"}})
    x = np.array([[1, np.nan], [2, 10], [np.nan, 3]])
    data = from_arrays(x, [0, 1, 0], form=form)
    assert torch.equal(prepared(data, form), torch.tensor([[1.0, 0.0], [2.0, 1.0]]))
    text = from_arrays(np.array([["1", "n/a"], ["2", "x"]]), ["a", "b"], form=form)
    assert torch.equal(prepared(text, form), torch.tensor([[1.0, 0.0]]))
    assert np.isnan(x).sum() == 2  # what was given is left as it is
    whole = RecordForm(low=0, high=255, fill=0, scale="unit")
    images = from_arrays(np.full((2, 3, 3), 51.0), [0, 1], form=whole)
    assert torch.equal(prepared(images, whole), torch.full((2, 3, 3), 51 / 255))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"scale": "range"}, 'scale = "range" with low = None and high = None'),
        ({"scale": "unit", "low": 1, "high": 1}, "low < high"),
        ({"scale": "standard", "mean": 1.0}, "with both"),
        ({"mean": 1.0, "deviation": 1.0}, "with both, or none"),
        ({"scale": "standard", "mean": 1.0, "deviation": 0.0}, "greater than 0"),
        ({"scale": "one-hot"}, "without categories"),
        ({"other": 1.0}, "without categories"),
        ({"fill": "A"}, "without categories"),
        ({"fill": "A", "range": [0, 1]}, "fill = 'A' beside a range of numbers"),
        ({"fill": 9, "high": 8}, "fill = 9 is beyond"),
        ({"range": [0, 1], "low": 0}, r"range = \[0, 1\]"),
        ({"range": [0]}, r"range = \[0\]"),
        ({"range": ["a", "b"]}, "low"),
        ({"categories": ["A"], "fill": "B"}, "fill = 'B'"),
        ({"categories": ["A"], "other": "B"}, "other = 'B'"),
        ({"categories": ["A"], "range": [0, 1]}, "leave one out"),
        ({"scale": "zscore"}, "one-hot"),
        ({"fill": float("nan")}, "finite"),
    ],
)
def test_a_declaration_that_means_nothing_is_refused(column, message):
    with pytest.raises(ValidationError, match=message):
        RecordForm(columns={"a": column})


def test_one_record_more_changes_no_other(tmp_path):
    """What is filled, scaled and encoded follows from the record and the constants alone."""
    form = PlanRecords(columns=COLUMNS).shared()
    alone = load_dataset(str(table(tmp_path / "a.csv", ROWS[:2])), "out", form=form)
    more = load_dataset(
        str(table(tmp_path / "b.csv", [*ROWS[:2], *ROWS[2:] * 5])), "out", form=form
    )
    assert torch.equal(prepared(alone, form), prepared(more, form)[:2])


def wide(path, n=400):
    """Age says nothing, two binary columns say the label; returns the file."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 2, (2, n))
    age = rng.integers(20, 80, n)
    rows = [f"{t},{p},{q},{p}" for t, p, q in zip(age, a, b, strict=True)]
    path.write_text("\n".join(["age,smoker,sex,out", *rows]) + "\n")
    return str(path)


def asked(data, **records):
    return Plan.parse(
        {"data": data, "label": "out", "sites": 2, "rounds": 20, "records": records,
         "privacy": {"epsilon": 5.0, "accountant": "rdp"}}
    )  # fmt: skip


def test_an_unscaled_table_is_warned_of_and_its_remedy_works(tmp_path, caplog):
    """The lines of the warning, put into the plan, end it; that they help: see test_advice."""
    data = wide(tmp_path / "t.csv")
    SimulationSetup.of(asked(data))
    (told,) = [r.message for r in caplog.records if "far from 0" in r.message]
    assert "age (79)" in told
    assert "smoker" not in told
    assert "found by looking" in told
    assert '[records.columns.age]\nrange = [..., ...]\nclamp = true\nscale = "range"' in told
    caplog.clear()
    declared = {"columns": {"age": {"range": [0, 120]}}}
    SimulationSetup.of(asked(data, **declared))
    (told,) = [r.message for r in caplog.records if "far from 0" in r.message]
    # Of what was declared, and never of what is in the file.
    assert "age (120)" in told
    assert "79" not in told
    assert "found by looking" not in told
    lines = told[told.index("[records") :]
    caplog.clear()
    remedy = tomllib.loads(lines)["records"]
    SimulationSetup.of(asked(data, **remedy))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_codes_are_advised_to_be_encoded(tmp_path, caplog):
    data = wide(tmp_path / "t.csv")
    SimulationSetup.of(
        asked(data, columns={"age": {"categories": [float(k) for k in range(20, 80)]}})
    )
    assert 'scale = "one-hot"' in caplog.text


def test_a_model_is_built_for_the_output(tmp_path):
    plan = asked(str(table(tmp_path / "t.csv", ROWS[:4] * 5)), columns=COLUMNS)
    scene = SimulationSetup.of(plan)
    assert (scene.raw.x.shape[1], scene.dataset.x.shape[1]) == (6, 10)
    assert scene.dataset.features[3:6] == ("ward=A", "ward=B", "ward=C")
    example = plan.stage().example(torch.zeros(6))
    assert FlatModel(TrainingSetup(plan, example, 2).module()).size == 2 * 10 + 2


@pytest.mark.parametrize("features", ["none", "own"])
@pytest.mark.parametrize(("value", "deviation"), [(3e38, 0.5), (2.0, 1e-300)])
def test_record_with_undefined_scaled_value_is_dropped_alone(caplog, value, deviation, features):
    """(x - mean) / deviation is beyond float32 for it alone: it must not end anybody's run."""
    x = np.zeros((60, 4), np.float32)
    x[:, 1] = np.arange(60)
    x[7, 0] = value
    columns = {"0": {"scale": "standard", "mean": 0, "deviation": deviation}}
    chosen = {"kind": "tests.data.features.backbones_of_users:linear", "trained_on": "nothing"}
    plan = Plan.parse(
        {
            "records": {"columns": columns},
            "sites": 2,
            "features": chosen if features == "own" else {},
        }
    )
    labels = [0, 1] * 30
    with caplog.at_level(logging.WARNING, logger="fedpact"):
        scene = SimulationSetup.of(plan, from_arrays(x, labels))
    assert "1 of 60 records have no finite numbers as they are scaled" in caplog.text
    assert "places 7 " in caplog.text
    rest = [k for k in range(60) if k != 7]
    without = SimulationSetup.of(plan, from_arrays(x[rest], [labels[k] for k in rest]))
    assert torch.equal(scene.dataset.x, without.dataset.x)
    assert torch.equal(scene.raw.x, without.raw.x)


def test_declarations_of_dropped_columns_are_ignored(tmp_path):
    """Numbers, names and forms are those of a table that has no such column."""
    dropped = {"ward", "dose"}
    places = [k for k, name in enumerate(HEADER) if name not in dropped]
    left = {name: own for name, own in COLUMNS.items() if name not in dropped}
    whole = RecordForm(columns=COLUMNS, drop=sorted(dropped))
    without = RecordForm(columns=left)
    path = table(tmp_path / "t.csv")
    fewer = [[row[k] for k in places] for row in [HEADER, *ROWS]]
    short = write_csv(tmp_path / "short.csv", *fewer)
    one = load_dataset(str(path), "out", form=whole)
    other = load_dataset(str(short), "out", form=without)
    assert one.features == other.features
    assert torch.equal(one.x, other.x)
    assert torch.equal(prepared(one, whole), prepared(other, without))
    scaling = Scaling.of(whole, one.x.shape[1:], one.features)
    assert scaling.example(one.x[0]).shape == scaling(one.x).shape[1:]
    assert whole.in_arrays(one.features) == without.in_arrays(one.features)
    released = {"age": {"range": [0, 9], "scale": "released"}}
    assert RecordForm(columns=released, drop=["age"]).released == ()
    n = len(one.features)
    site = load_site(path, "out", ("no", "yes"), (n,), "float32", whole, features=one.features)[0]
    assert torch.equal(site.x, one.x)


def test_deployed_tables_drop_declared_columns(tmp_path):
    path, rows = tmp_path / "t.csv", [row[:] for row in ROWS[:4] for _ in range(10)]
    plan = Plan(
        data=str(table(path, rows)),
        label="out",
        model="logistic",
        sites=2,
        rounds=1,
        records={"columns": COLUMNS, "drop": ["ward"], "classes": ["no", "yes"]},
        partition={"held_out": 0.0},
    )
    federation = write_deployment(tmp_path / "d", plan, records=False)
    assert federation.features == ("age", "dose", "bmi", "code", "sex")
    own = tmp_path / "d" / "sites" / "site-01"
    plan, federation = read_plan(own / "plan.json"), Federation.read(own / "federation.toml")
    record = federation.stage(plan, own).example(federation.example())
    assert record.shape == SimulationSetup.of(plan).dataset.x.shape[1:] == (7,)


def test_range_unresolved_in_float32_is_refused():
    with pytest.raises(ValidationError, match="take an offset off in the file"):
        Column.model_validate({"range": [1.7e9, 1.7e9 + 60], "scale": "range"})
    # 128 numbers between them, or all whole numbers that there are.
    for ends in ([1.7e9, 1.7e9 + 3e4], [1e5, 100_001], [1900, 2030], [-122.5, -122.4], [0, 1e-9]):
        assert Column.model_validate({"range": ends, "scale": "range"}).high == ends[1]


def test_categories_equal_in_float32_are_refused():
    for few in ([16777216.0, 16777217.0], [0.1, 0.1 + 1e-12]):
        with pytest.raises(ValidationError, match="the same number in single precision"):
            Column.model_validate({"categories": few, "scale": "one-hot"})
    assert Column.model_validate({"categories": [16777214.0, 16777215.0]}).categories


def test_large_codes_are_one_hot_in_integer_arrays():
    """73211009 is no number of float32: it is 73211008 there, and in a table's records."""
    codes = np.array([73211009, 44054006, 73211009])
    form = RecordForm(columns={"0": Column(categories=[73211009.0, 44054006.0], scale="one-hot")})
    for values in (torch.from_numpy(codes), torch.from_numpy(codes).float()):
        found = Scaling(form, ("0",))(values[:, None])
        assert found.tolist() == [[1, 0], [0, 1], [1, 0]]


def test_columns_of_another_table_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"records\.columns declares ages"):
        SimulationSetup.of(asked(wide(tmp_path / "t.csv"), columns={"ages": {"fill": 0}}))
