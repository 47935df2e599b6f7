"""What a cell is read as follows from it and its column's type alone: a null changes no other."""

import datetime
import itertools
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from fedpact.common.errors import DataError
from fedpact.data.cells import arrow_cells
from fedpact.data.dataset import RecordFilter
from fedpact.data.inputs import columns_of
from fedpact.data.load import from_arrays, from_python, load_dataset, load_site
from fedpact.data.schema import Column, LabelForm, PlanRecords, RecordForm
from fedpact.data.targets import persons_of

pa = pytest.importorskip("pyarrow", reason="reads Parquet: the extra `parquet`")
from pyarrow import parquet  # noqa: E402

DAY = datetime.datetime(2020, 1, 1)
WHOLE = (0, 1, 2, 1)
TYPES = {
    # Whole numbers, some that a float rounds, and parts: each is a name, a place, or a number.
    pa.float16(): (*map(float, WHOLE), 0.1, 2048.0, 2047.0, float("nan")),
    pa.float32(): (*map(float, WHOLE), 0.1, 17e6, 2.0**24 - 1, float("nan")),
    pa.float64(): (*map(float, WHOLE), 0.1, 17e6, 2.0**53, float("nan")),
    pa.int8(): (*WHOLE, -7),
    pa.int32(): (*WHOLE, 17_000_001),
    pa.int64(): (*WHOLE, 2**53 + 1, 2**53, -(2**63)),
    pa.uint64(): (*WHOLE, 2**64 - 1, 2**63 + 1025),
    pa.bool_(): (True, False, True, False),
    pa.decimal128(20, 1): (*map(Decimal, ("0.0", "1.0", "2.0")), Decimal("9007199254740993.0")),
    pa.string(): ("0", "1", "2", "nan", "", "True"),
    pa.large_string(): ("0", "1.0", "2", "9007199254740993"),
    pa.dictionary(pa.int32(), pa.string()): ("0", "1", "2", "1"),
    pa.dictionary(pa.int32(), pa.float32()): (0.0, 1.0, 2.0, 0.1, 17e6),
    pa.dictionary(pa.int32(), pa.int64()): (0, 1, 2, 2**53 + 1),
    pa.timestamp("ms"): (DAY, DAY.replace(month=2), DAY),
    pa.date32(): (DAY.date(), DAY.replace(month=2).date(), DAY.date()),
    pa.binary(): (b"0", b"1", b"0"),
}
NAMES = ["0", "1", "2", "True", "False", "0.1", "0.0", "1.0", "2.0", str(DAY), str(DAY.date())]
FORMS = {
    "number": RecordForm(),
    "filled": RecordForm(columns={"v": Column(fill=0.5)}),
    "category": RecordForm(columns={"v": Column(categories=NAMES)}),
    "label": RecordForm(),
    "regression": RecordForm(target=LabelForm(kind="number", low=0.0, high=2.0)),
    "site": RecordForm(),
    "person": RecordForm(),
}


COLUMN = {"label": "y", "regression": "y", "person": "who", "site": "where"}
WAYS = ("deployed", "file", "table")
CASES = [
    *(("deployed", role) for role in FORMS if role != "site"),
    *(("file", "site"), ("table", "number"), ("table", "person"), ("table", "label")),
]


def table_of(kind, cells, role):
    """A table with these cells in one of its columns, in two chunks, as a file's row groups are."""
    n = len(cells)
    others = {"y": list("ab" * n)[:n], "who": [*map(str, range(n))], "where": ["here"] * n}
    if role == "regression":
        others["y"] = [1.0] * n
    whole = pa.array(cells, getattr(kind, "value_type", kind))
    whole = whole.dictionary_encode() if pa.types.is_dictionary(kind) else whole
    chunks = {COLUMN.get(role, "v"): pa.chunked_array([whole[:2], whole[2:]])}
    return pa.table({"v": [0.5] * n, "w": np.arange(n, dtype=np.float32), **others, **chunks})


def used(way, table, role, path):
    """The row of each record that is used -> its numbers, label, site and person."""
    form, classes = FORMS[role], ["a", "b"]
    if role in ("label", "regression"):
        classes = NAMES if role == "label" else None
    if way != "table":
        parquet.write_table(table, path, row_group_size=2)
    if way == "deployed":
        names = ("v", "w")
        own = form.model_copy(update={"drop": ["where"]})
        found = load_site(path, "y", classes or ("y",), (2,), "float32", own, "who", names)[0]
        rows, persons, sites = found.numbers, found.person, [""] * len(found.y)
    else:
        try:
            if way == "file":
                found = load_dataset(
                    str(path), "y", "where", person="who", classes=classes, form=form
                )
            else:
                records = PlanRecords(classes=classes, columns=form.columns)
                found = from_python(table, records, "y", "where", "who", target=form.target)
        except DataError as error:
            if "no record is left" not in str(error):
                raise
            return {}
        rows, persons, sites = found.rows, found.person, found.site
    bits = [row.tobytes() for row in found.x.numpy()]
    whole = zip(rows.tolist(), bits, found.y.tolist(), sites, persons, strict=True)
    return {row: (*rest,) for row, *rest in whole}


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_a_null_changes_no_other_record(kind, tmp_path):
    cells, path = TYPES[kind], tmp_path / "t.parquet"
    for way, role in CASES:
        full = used(way, table_of(kind, [cells[0], *cells, cells[0]], role), role, path)
        gaps = used(way, table_of(kind, [None, *cells, None], role), role, path)
        among = range(2, len(cells) + 2)
        assert {row: gaps[row] for row in gaps if row in among} == {
            row: full[row] for row in full if row in among
        }, (way, role)


FLOATS = {"float16": 2048.0, "float32": 2.0**24, "float64": 2.0**53}


@pytest.mark.parametrize("role", ["number", "category", "label", "site", "person"])
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("gap", [[], [None]], ids=["all", "gap"])
def test_a_whole_number_is_the_same_text_from_floats_of_any_size(gap, kind, role, tmp_path):
    table = table_of(getattr(pa, kind)(), [0.0, 1.0, 2.0, *gap], role)
    for way in WAYS:
        if (way, role) in CASES:
            found = used(way, table, role, tmp_path / "t.parquet")
            assert [*found] == [1, 2, 3]
            bits, labels, sites, persons = zip(*found.values(), strict=True)
            first = [np.frombuffer(x, np.float32)[0] for x in bits]
            told = {"number": first, "category": first, "label": labels, "site": sites}
            names = ("0", "1", "2") if role in ("site", "person") else (0, 1, 2)
            assert (*told.get(role, persons),) == names


FRAMES = {
    "dict": lambda kind, whose: {"who": np.array(whose, kind)},
    "tensor": lambda kind, whose: {"who": torch.tensor(whose, dtype=getattr(torch, kind))},
    "arrow": lambda kind, whose: pa.table({"who": pa.array(whose, getattr(pa, kind)())}),
    "batch": lambda kind, whose: pa.record_batch({"who": pa.array(whose, getattr(pa, kind)())}),
    "dictionary": lambda kind, whose: pa.table(
        {"who": pa.array(whose, getattr(pa, kind)()).dictionary_encode()}
    ),
    "frame": lambda kind, whose: pd.DataFrame({"who": np.array(whose, kind)}),
    "gaps": lambda kind, whose: pd.DataFrame({"who": pd.array(whose, kind.capitalize())}),
    "of arrow": lambda kind, whose: pd.DataFrame(
        {"who": pd.array(whose, pd.ArrowDtype(getattr(pa, kind)()))}
    ),
    "category": lambda kind, whose: pd.DataFrame({"who": np.array(whose, kind)}).astype("category"),
}


@pytest.mark.parametrize("frame", FRAMES)
def test_float_resolution_is_the_columns_in_python_too(frame):
    """From there on two persons may be one; before, of 32 bits they were, in silence.

    Of 16 bits pandas has neither Float16 nor categories.
    """
    gap = float("nan") if frame in ("dict", "tensor", "frame", "category") else None
    for (kind, end), null in itertools.product(FLOATS.items(), (False, True)):
        if kind == "float16" and frame in ("gaps", "category"):
            continue
        whose = [end, end - 1, -end, 3.0, gap if null else 4.0]
        cells = columns_of(FRAMES[frame](kind, whose)).cells["who"]
        sieve = RecordFilter("table", 5, 1)
        found = np.array(persons_of(cells, sieve))
        assert sieve.good.tolist() == [False, True, False, True, not null], kind
        assert found[[1, 3]].tolist() == [str(int(end - 1)), "3"], kind


def test_hugging_faces_columns_are_of_their_declared_type():
    """Theirs give Python's floats, and say elsewhere what these were."""

    class Data:
        def __init__(self):
            kinds = {"who": "float32", "x": "float64"}
            self.column_names = [*kinds]
            self.features = {name: SimpleNamespace(dtype=kind) for name, kind in kinds.items()}

        def __getitem__(self, name):
            return [17e6, None, 1.0]

    columns = columns_of(Data()).cells
    assert [*map(type, columns["who"])] == [np.float32, type(None), np.float32]
    assert columns["x"] == [17e6, None, 1.0]


def test_persons_and_sites_in_a_list_are_read_one_by_one():
    """NumPy would make floats of all for one that is missing, which round their numbers."""
    whose, y = [2**53 + 1, 2**53, float("nan"), 5], ["a", "b", "a", "b"]
    found = from_arrays(np.eye(4), y, person=whose, site=[1, 2, 1.5, torch.tensor(3)])
    assert found.person == (str(2**53 + 1), str(2**53), "5")
    assert found.site == ("1", "2", "3")


@pytest.mark.parametrize("odd", [None, [1], [0, None], [0, 2], [], [0, 1, 0]])
def test_unfit_multi_label_cell_drops_its_record(odd, tmp_path):
    """Before, a site whose file had such a cell stopped with an error of NumPy's."""
    table, path = (
        pa.table({"v": [1.0, 2.0, 3.0], "y": [[0, 1], odd, [1, 1]]}),
        tmp_path / "t.parquet",
    )
    parquet.write_table(table, path)
    form = RecordForm(target=LabelForm(kind="several"))
    found = load_site(path, "y", ("a", "b"), (1,), "float32", form)[0]
    assert (found.numbers.tolist(), found.y.tolist()) == ([1, 3], [[0, 1], [1, 1]])


@pytest.mark.parametrize("cells", [[[[0]], [[1]]], [[[0]], None]])
def test_masks_in_a_table_are_refused_whatever_is_in_them(cells, tmp_path):
    parquet.write_table(pa.table({"v": [1.0, 2.0], "y": cells}), tmp_path / "t.parquet")
    form = RecordForm(target=LabelForm(kind="pixels"))
    with pytest.raises(DataError, match="expected arrays x and y"):
        load_site(tmp_path / "t.parquet", "y", ("a", "b"), (1,), "float32", form)[0]


def test_numbers_of_parquet_name_classes_by_their_own_type(tmp_path):
    table = pa.table({"v": [1.5, 2.0], "y": pa.array([0.1, 0.5], pa.float32())})
    assert isinstance(arrow_cells(table["v"]), np.ndarray)
    parquet.write_table(table, tmp_path / "t.parquet")
    data = load_dataset(str(tmp_path / "t.parquet"), "y", classes=["0.1", "0.5"])
    assert data.y.tolist() == [0, 1]


def test_a_parquet_column_named_twice_is_named_in_the_error(tmp_path):
    table = pa.Table.from_arrays([pa.array([1.0]), pa.array([2.0])], names=["a", "a"])
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DataError, match="has a as several columns: give each column a name"):
        load_dataset(str(tmp_path / "t.parquet"), "a")
