"""A table of no rows is read as one of one row is, and one long cell takes the room of one."""

import tracemalloc

import numpy as np
import pytest
from tests.tables import write_csv, write_parquet

from fedpact.data.load import load_dataset, load_site
from fedpact.data.schema import Column, LabelForm, RecordForm

FORM = RecordForm(
    columns={
        "age": Column(range=[0.0, 120.0], fill=50.0),
        "colour": Column(categories=["red", "green"], fill="red"),
    }
)
NAMES = ["person", "age", "colour", "y"]
ROW = ["anna", "40", "green", "b"]
FEATURES = "age", "colour"
FILES = "csv", "parquet"


def written(path, rows):
    """The rows in a file by their names, all of them text."""
    if path.suffix == ".csv":
        return write_csv(path, NAMES, *rows)
    pa = pytest.importorskip("pyarrow", reason="writes Parquet: the extra `parquet`")
    cells = [pa.array([row[k] for row in rows], pa.string()) for k in range(len(NAMES))]
    return write_parquet(path, dict(zip(NAMES, cells, strict=True)))


def of_site(path):
    return load_site(path, "y", ("a", "b"), (2,), "float32", FORM, "person", FEATURES)[0]


def in_a_simulation(path):
    """As whose sites the persons are."""
    return load_dataset(str(path), "y", "person", classes=("a", "b"), form=FORM)


@pytest.mark.parametrize("kind", FILES)
def test_a_site_s_table_has_as_many_rows_as_it_has(tmp_path, kind):
    for count in (0, 1, 2):
        found = of_site(written(tmp_path / f"records.{kind}", [ROW] * count))
        assert (found.x.shape, found.y.shape) == ((count, 2), (count,))
        assert found.person == ("anna",) * count


@pytest.mark.parametrize("text", [False, True], ids=["numbers", "text"])
@pytest.mark.parametrize("target", ["class", "number", "several"])
def test_a_site_s_arrays_have_as_many_rows_as_they_have(tmp_path, target, text):
    several, path = target == "several", tmp_path / "records.npz"
    form = RecordForm(target=LabelForm(kind=target), fill=1.0)
    for count in (0, 1, 2):
        x, y = np.zeros((count, 4)), np.zeros((count, 3) if several else count)
        whose = np.full(count, "anna")
        x, y = x.astype(str) if text else x, y.astype(str) if text and target == "class" else y
        np.savez(path, x=x, y=y, person=whose)
        classes = {"class": ("0.0", "1.0") if text else ("0", "1"), "number": ("y",)}
        named = classes.get(target, ("a", "b", "c"))
        found = load_site(path, None, named, (4,), "float32", form, "person")[0]
        assert len(found.x) == len(found.y) == len(found.person) == count


def test_several_labels_in_a_column_of_no_rows(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="writes Parquet: the extra `parquet`")
    form, path = RecordForm(target=LabelForm(kind="several")), tmp_path / "records.parquet"
    for count in (0, 1, 2):
        labels = pa.array([[0.0, 1.0]] * count, pa.list_(pa.float64()))
        numbers = pa.array([1.0] * count, pa.float64())
        write_parquet(path, {"a": numbers, "y": labels})
        found = load_site(path, "y", ("a", "b"), (1,), "float32", form, features=("a",))[0]
        assert found.y.shape == (count, 2)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("column", NAMES)
def test_one_long_cell_takes_the_room_of_one(tmp_path, kind, column):
    """In an array of text each cell is as long as the longest: here 800 MB."""
    long = list(ROW)
    long[NAMES.index(column)] = "x" * 10**6
    path = written(tmp_path / f"records.{kind}", [*[ROW] * 200, long])
    for read in (of_site, in_a_simulation):
        tracemalloc.start()
        try:
            found = read(path)
            assert len(found.y) >= 200
            assert tracemalloc.get_traced_memory()[1] < 10**8
        finally:
            tracemalloc.stop()


def test_of_a_long_cell_the_beginning_is_quoted(tmp_path, caplog):
    path = written(tmp_path / "records.csv", [ROW, ["anna", "x" * 10**5, "green", "b"]])
    in_a_simulation(path)
    assert "row 2 = 'xxx" in caplog.text
    assert "... (100002 characters)" in caplog.text
    assert len(caplog.text) < 1000
