"""A draft of [records] from a file: proposals for a person to confirm, nothing taken in silence."""

import csv
import json
import re
import tomllib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.data.draft import draft, propose_range
from fedpact.data.load import load_dataset
from fedpact.data.schema import PlanRecords, RecordForm
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
    path = tmp_path / "t.csv"
    found = list(rows())
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, found[0].keys())
        writer.writeheader()
        writer.writerows(found)
    return path


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


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("admitted", "days since a day that is fixed"),
        ("born", "days since a day that is fixed"),
        ("note", "write all that there are as its categories"),
        ("empty", "nothing in it"),
        ("always", "it says nothing"),
    ],
)
def test_what_is_no_feature_is_named_with_a_remedy(table, name, remedy):
    (line,) = (x for x in draft(table, ROLES)[0].splitlines() if x.startswith(f"# {name}:"))
    assert remedy in line


def test_one_hot_says_that_it_is_the_default(table):
    assert '# scale = "one-hot"   # the default here' in draft(table, ROLES)[0]


def test_the_command_prints_a_draft_to_keep(table):
    told = CliRunner().invoke(app, ["inspect", str(table), *NAMES])
    assert told.exit_code == 0
    assert tomllib.loads(told.stdout)["label"] == "ill"
    assert "median" in told.stderr
    document = json.loads(CliRunner().invoke(app, ["inspect", str(table), *NAMES, "--json"]).stdout)
    assert document["draft"] == told.stdout
    assert [each["name"] for each in document["columns"]][:3] == ["admitted", "born", "age"]


def test_a_label_that_is_not_there_is_told(table):
    text, _ = draft(table, {"label": "sick"})
    assert "no column 'sick'" in text


def test_arrays_and_parquet_are_drafted_alike(table, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.linspace(0, 255, 640).reshape(10, 1, 8, 8), y=np.arange(10))
    form = tomllib.loads(confirmed(draft(tmp_path / "a.npz", {})[0]))["records"]
    assert (form["low"], form["high"]) == (0, 300)
    RecordForm.model_validate(form)
    arrow = pytest.importorskip("pyarrow", reason="reads Parquet: the extra `parquet`")
    from pyarrow import parquet

    found = {name: [row[name] for row in rows()] for name in ("age", "ward", "ill")}
    parquet.write_table(arrow.table(found), tmp_path / "t.parquet")
    of_csv = tomllib.loads(confirmed(draft(table, ROLES)[0]))["records"]["columns"]
    raw = tomllib.loads(confirmed(draft(tmp_path / "t.parquet", {"label": "ill"})[0]))
    assert raw["records"]["columns"] == {name: of_csv[name] for name in ("age", "ward")}


finite = st.floats(-1e12, 1e12)


@given(finite, finite)
def test_a_proposed_range_holds_what_was_found(a, b):
    low, high = min(a, b), max(a, b)
    first, last = propose_range(low, high)
    assert first <= low or first == pytest.approx(low)
    assert last >= high or last == pytest.approx(high)
