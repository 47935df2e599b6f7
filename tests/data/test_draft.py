"""A draft of [records] from a file: proposals for a person to confirm, nothing taken in silence."""

import json
import re
import tomllib

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tables import write_parquet, write_rows
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.common.errors import DataError
from fedpact.data.cells import read_columns, to_numbers
from fedpact.data.load import load_dataset
from fedpact.data.schema import Column, PlanRecords, RecordForm
from fedpact.data.summary import ColumnCells, draft, propose_range
from fedpact.plan import Plan


def rows(n=90):
    rng = np.random.default_rng(2)
    for k in range(n):
        yield {
            "admitted": f"2024-0{k % 9 + 1}-12",
            "born": f"0{k % 9 + 1}.03.1970",
            "age": rng.integers(18, 95),
            "b.m.i": "" if k % 9 == 0 else f"{rng.normal(26, 4):.1f}",
            "ward": rng.choice(["A", "B", "C"]),
            "note": f"seen by {k}",
            "empty": "NA",
            "always": 1,
            "site": "xyz"[k % 3],
            "person": f"P{k // 2}",
            "ill": ["no", "yes"][k % 2],
        }


ROLES = {"label": "ill", "site": "site", "person": "person"}
NAMES = [f"--{role}={name}" for role, name in ROLES.items()]


@pytest.fixture
def table(tmp_path):
    return write_rows(tmp_path / "t.csv", rows())


def confirmed(text):
    """The draft once a person has taken each # away, as it would be done by hand."""
    return re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)


def test_a_draft_takes_nothing_from_the_records(table):
    """Not a range, not a category, not a class: only what can be no number is dropped."""
    raw = tomllib.loads(draft(table, ROLES)[0])
    assert {**raw, "records": 0} == {"data": str(table), **ROLES, "records": 0}
    records = PlanRecords.model_validate(raw["records"])
    assert records.drop == ["admitted", "born", "note", "empty", "always"]
    assert set(records.columns) == {"age", "b.m.i", "ward"}
    assert all(not column.model_fields_set for column in records.columns.values())
    assert records.classes is None


def test_a_confirmed_draft_reads_every_record(table):
    raw = tomllib.loads(confirmed(draft(table, ROLES)[0]))
    plan = Plan.parse(raw)
    columns = plan.records.columns
    assert columns["ward"].scale == "one-hot"
    assert columns["ward"].categories == ["A", "B", "C"]
    found = load_dataset(
        raw["data"],
        "ill",
        "site",
        person="person",
        classes=plan.records.classes,
        form=plan.records.shared(),
    )
    assert len(found.y) == 90
    assert found.features == ("age", "b.m.i", "ward")
    assert all(columns[name].low <= found.x[:, k].min() for k, name in enumerate(["age", "b.m.i"]))


@pytest.mark.parametrize("label", ["v", "y"])
def test_a_word_that_counts_as_missing_is_named_in_a_draft(tmp_path, label):
    """Most patients do not smoke: "none" is no gap that the next best word may fill.

    Undeclared, "none" is a class; its records would be left out by the proposed ones.
    """
    (tmp_path / "t.csv").write_text("v,y\n" + "0,none\n0,none\n1,light\n1,heavy\n" * 5)
    told = draft(tmp_path / "t.csv", {"label": label})[0]
    assert "'none' in 10 rows, which counts as missing" in told
    assert "fill" not in told


def test_the_command_prints_a_draft_to_keep(table):
    told = CliRunner().invoke(app, ["inspect", str(table), *NAMES])
    assert told.exit_code == 0
    assert tomllib.loads(told.stdout)["label"] == "ill"
    assert "median" in told.stderr
    document = json.loads(CliRunner().invoke(app, ["inspect", str(table), *NAMES, "--json"]).stdout)
    assert document["draft"] == told.stdout
    assert [each["name"] for each in document["columns"]][:3] == ["admitted", "born", "age"]


@pytest.mark.parametrize("role", ["label", "site", "person"])
def test_a_column_that_is_not_there_is_an_error(role, table, tmp_path):
    with pytest.raises(DataError, match=f"{role} column is 'sick': expected one of its columns"):
        draft(table, {role: "sick"})
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 3)), y=np.arange(2))
    with pytest.raises(DataError, match=f"--{role}: an .npz file has no columns"):
        draft(tmp_path / "a.npz", {role: "sick"})


def test_arrays_and_parquet_are_drafted_alike(table, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.linspace(0, 255, 640).reshape(10, 1, 8, 8), y=np.arange(10))
    form = tomllib.loads(confirmed(draft(tmp_path / "a.npz", {})[0]))["records"]
    assert (form["low"], form["high"]) == (0, 300)
    RecordForm.model_validate(form)
    np.savez(tmp_path / "b.npz", x=np.array([[b"1"], [b"2"]]), y=np.arange(2))
    assert "# found: numbers, 1 to 2" in draft(tmp_path / "b.npz", {})[0]
    found = {name: [row[name] for row in rows()] for name in ("age", "ward", "ill")}
    path = write_parquet(tmp_path / "t.parquet", found)
    of_csv = tomllib.loads(confirmed(draft(table, ROLES)[0]))["records"]["columns"]
    raw = tomllib.loads(confirmed(draft(path, {"label": "ill"})[0]))
    assert raw["records"]["columns"] == {name: of_csv[name] for name in ("age", "ward")}


def of_column(tmp_path, cells, name="v"):
    """The draft's lines of a column of a file, without the range that is proposed."""
    path = tmp_path / "one.csv"
    path.write_text("\n".join([f"{name},w,y", *(f"{cell},{k},a" for k, cell in enumerate(cells))]))
    return draft(path, {"label": "y"})[0]


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ([f"{k:05d}" for k in range(1, 900, 9)], "leading zeros"),
        (range(5000, 5100), "case number"),
        ([20230101 + k % 28 for k in range(100)], "20240131"),
        ([f"{k} kg" for k in range(50, 90)], "a unit"),
        ([f'"{k},5"' for k in range(50, 90)], "decimal commas"),
        ([f'"{k},500.25"' for k in range(50, 90)], "thousands separators"),
        ([f"{k % 28 + 1:02d}/03/99 10:00" for k in range(40)], "dates or times"),
        ([f"2024-0{k % 9 + 1}-12" for k in range(40)], "days since a fixed day"),
        ([f"0{k % 9 + 1}.03.1970" for k in range(40)], "days since a fixed day"),
        ([f"seen by {k}" for k in range(90)], "many different values"),
        (["NA"] * 40, "every cell is empty"),
        ([1] * 40, "the same value in every row"),
    ],
)
def test_columns_that_measure_nothing_are_not_declared(tmp_path, cells, why):
    text = of_column(tmp_path, cells)
    assert re.search(rf"# not used: v: .*{why}", text)
    assert tomllib.loads(text)["records"]["drop"] == ["v", "w"]


def test_numbers_written_otherwise_have_no_median(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("v,y\n" + "\n".join([*['"70,5",a'] * 96, *["7.5,b"] * 4]))
    v, y = draft(path, {"label": "y"})[1]
    assert (v.median, v.remark.partition(". ")[0]) == (None, "numbers with decimal commas")
    assert (y.median, y.remark) == (None, "")
    told = CliRunner().invoke(app, ["inspect", str(path)]).stderr
    assert "numbers with decimal commas" in told
    assert "7.5" not in told
    # The remedy is one.
    code = v.remark.partition("by ")[2].replace("X", "v")
    found = eval(code, {"table": pd.read_csv(path)})
    assert to_numbers(found.tolist()).tolist() == [70.5] * 96 + [7.5] * 4


@pytest.mark.parametrize(
    ("encoding", "dialect"),
    [
        ("cp1252", {"sep": ";", "decimal": ","}),
        ("utf-8", {"sep": ";", "decimal": ","}),
        ("utf-16", {"sep": "\t"}),
        ("cp1252", {}),
        ("utf-8", {"sep": "|"}),
    ],
)
def test_other_forms_of_a_table_are_refused_with_a_remedy(tmp_path, encoding, dialect):
    frame = pd.DataFrame({"Größe": [1.5, 2.25, 3.0], "y": ["ja", "nein", "ja"]})
    frame.to_csv(tmp_path / "t.csv", index=False, encoding=encoding, **dialect)
    with pytest.raises(DataError, match="convert it: python -c") as refused:
        read_columns(tmp_path / "t.csv")
    code = re.search(r'python -c "(.*)"$', str(refused.value))[1]
    exec(code, {})  # as the message says
    table = read_columns(tmp_path / "t.utf8.csv")
    assert not table.broken
    assert to_numbers(table.cells["Größe"]).tolist() == [1.5, 2.25, 3.0]


def test_cells_in_another_encoding_are_named_with_a_remedy(tmp_path):
    """Of a file whose header is plain: only lines with an umlaut are left out."""
    path = tmp_path / "t.csv"
    pd.DataFrame({"ward": ["Süd", "Nord"] * 3, "y": ["a", "b"] * 3}).to_csv(
        path, index=False, encoding="cp1252"
    )
    text = draft(path, {"label": "y"})[0]
    code = re.search(r'^# found: .* UTF-8 .*python -c "(.*)"$', text, re.MULTILINE)[1]
    exec(code, {})  # as the draft says
    table = read_columns(tmp_path / "t.utf8.csv")
    assert not table.broken
    assert "UTF-8" not in draft(tmp_path / "t.utf8.csv", {"label": "y"})[0]


@pytest.mark.parametrize("cells", [["1e308", "-1e308", "inf", ""] * 9, ["7", ""], [""], []])
def test_a_draft_of_odd_numbers_can_be_read(tmp_path, cells):
    text = of_column(tmp_path, cells)
    Plan.parse(tomllib.loads(confirmed(text)))
    Plan.parse(tomllib.loads(confirmed(text.replace('label = "y"', 'label = "v"'))))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_infinite_cells_are_told_as_left_out(tmp_path, kind):
    frame = pd.DataFrame({"v": [1.5, np.inf, 3.5, -np.inf, 2.5] * 4, "y": ["a", "b"] * 10})
    path = tmp_path / f"t.{kind}"
    if kind == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow, an extra, is not installed")
    frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    assert len(load_dataset(str(path), "y").y) == 12
    own = ColumnCells.of("v", read_columns(path).cells["v"]).summary(Column())
    assert (own.outside, own.remark) == (0.4, "8 cells are no numbers")
    told = draft(path, {"label": "y"})[0]
    assert "# found: 8 cells without a number (rows 2, 4, 7, ...): these rows are left" in told


def test_other_formats_get_a_command_that_converts_them():
    with pytest.raises(DataError, match=r"convert it: .*read_excel\('t.xlsx'\)"):
        load_dataset("t.xlsx", "y")


finite = st.floats(-1e12, 1e12)


@given(finite, finite)
def test_a_proposed_range_holds_what_was_found(a, b):
    low, high = min(a, b), max(a, b)
    first, last = propose_range(low, high)
    assert first <= low or first == pytest.approx(low)
    assert last >= high or last == pytest.approx(high)
