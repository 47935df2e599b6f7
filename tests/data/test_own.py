"""Own records: what does not fit the declared form is left out alone, and told of to its owner."""

import csv
import io
import math
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.tables import write_csv, write_parquet

from fedpact.common.errors import DataError
from fedpact.data.dataset import RecordFilter
from fedpact.data.inputs import read_table
from fedpact.data.load import from_arrays, load_dataset, load_site, refit
from fedpact.data.schema import PlanRecords, RecordForm
from fedpact.data.tables import Roles
from fedpact.data.targets import persons_of

FORM = RecordForm(
    columns={
        "age": {"low": 0.0, "high": 120.0},
        "dose": {"low": -0.1, "high": 0.1, "clamp": True},
        "ward": {"categories": ["A", "B"]},
        "grade": {"categories": [0.1, 3.0]},
    }
)
HEADER = ["age", "dose", "ward", "grade", "free", "out"]
GOOD = [["61", "0.1", "A", "0.1", "-7", "yes"], ["0", "-0.1", "B", "3", "1e30", "no"]]
CLASSES = ("no", "yes")
X = [[61, 0.1, 0, 0.1, -7], [0, -0.1, 1, 3, 1e30]]

BAD = {
    "age": ["121", "-1", "", "NaN", "inf", "abc", "1e300", "?", "6 1", "1_0", "٤٢"],
    "dose": ["", "x", "nan", "-inf"],
    "ward": ["C", "", "a", "0", "NA"],
    "grade": ["0.2", "2", "", "A"],
    "free": ["", "1e39", "-inf", "nan", "1,5", "0x10", "1_000"],
    "out": ["maybe", "", "2", "-1", "nan", "YES", "1.5"],
}


def text(rows):
    stream = io.StringIO()
    csv.writer(stream).writerows([HEADER, *rows])
    return stream.getvalue()


def read(path, form=FORM):
    return load_site(path, "out", CLASSES, (5,), "float32", form, features=tuple(HEADER[:-1]))[0]


def check_only_the_good(found):
    assert torch.equal(found.x, torch.tensor(X))
    assert found.y.tolist() == [1, 0]


@pytest.mark.parametrize(("column", "value"), [(c, v) for c, values in BAD.items() for v in values])
def test_bad_cell_drops_its_own_record_only(tmp_path, caplog, column, value):
    """The owner's log names file, column and row. Before, one such cell kept the site out."""
    row = list(GOOD[0])
    row[HEADER.index(column)] = value
    path = tmp_path / "r.csv"
    path.write_text(text([GOOD[0], row, GOOD[1]]))
    found = read(path)
    check_only_the_good(found)
    assert found.numbers.tolist() == [1, 3]
    (told,) = [r.message for r in caplog.records]
    assert f"{path}: 1 of 3 records are left out" in told
    assert f"row 2: column {column} is " in told
    caplog.clear()
    load_dataset(str(path), "out", classes=CLASSES, form=FORM)
    # In a simulation the owner of the records is who looks at the screen.
    assert repr(value) in caplog.records[0].message


@pytest.mark.parametrize(
    "line",
    [
        b"61",
        b"61,0,A,3,0,yes,1",
        b'61,0,"A,3,0,yes',
        b'61,0,A,3,0,"yes',
        b'61,0,A"",3,0,y"es',
        b"61,0,\xff,3,0,yes",
        b"\x00\x00",
        b'"""',
        b",,,,,",
        b"age,dose,ward,grade,free,out",
    ],
)
def test_an_invalid_line_does_not_change_other_records(tmp_path, line):
    """An open quote would otherwise swallow every record behind it."""
    path = tmp_path / "r.csv"
    good = text(GOOD).encode().splitlines()
    path.write_bytes(b"\r\n".join([*good[:2], line, good[2]]) + b"\n")
    check_only_the_good(read(path))


def test_clamped_values_are_used_and_reported(tmp_path, caplog):
    rows = [[*GOOD[0][:1], dose, *GOOD[0][2:]] for dose in ("0.5", "-1e300", "0.05")]
    path = tmp_path / "r.csv"
    path.write_text(text(rows))
    assert torch.equal(read(path).x[:, 1], torch.tensor([0.1, -0.1, 0.05]))
    assert "2 of 3 records hold a value that was clamped" in caplog.records[0].message
    path.write_text(text(rows * 100))
    read(path)
    told = caplog.records[1].message
    assert "200 rows (1, 2, 4, ...): column dose is beyond" in told


def test_a_site_whose_records_are_all_bad_still_has_a_form(tmp_path, caplog):
    path = tmp_path / "r.csv"
    for rows in ([], [["x"] * 6] * 500):
        path.write_text(text(rows))
        found = read(path)
        assert (found.x.shape, found.y.shape, found.x.dtype) == ((0, 5), (0,), torch.float32)
        assert "no record that is used" in caplog.records[-1].message
    assert "500 rows (1, 2, 3, ...): column age is not a finite number" in caplog.text


def arrays(path, x, y, form=None, classes=("a", "b"), shape=(2,), values="float32"):
    np.savez(path, x=x, y=y)
    return load_site(path, None, classes, shape, values, form or RecordForm())[0]


@pytest.mark.parametrize("wrong", [{"drop": ["1"]}, {"features": ["0"]}])
def test_a_sites_arrays_have_no_columns_to_leave_out(tmp_path, wrong):
    """Nor does a site train on what federation.toml says to leave out; a table's numbers are it."""
    x, form = np.zeros((2, 2)), RecordForm(**wrong)
    with pytest.raises(DataError, match="leave columns out of the sites' arrays"):
        arrays(tmp_path / "r.npz", x, [0, 1], form)
    beside = load_site(
        tmp_path / "r.npz", None, ("a", "b"), (2,), "float32", form, features=("a", "b")
    )[0]
    assert beside.features == ("a", "b")


def test_a_sites_arrays_may_name_sites_and_persons_in_vain(tmp_path):
    """Neither is asked of them, so no record is left out because it names none."""
    path, more = tmp_path / "r.npz", {"site": ["north", ""], "person": ["", "anna"]}
    np.savez(path, x=np.zeros((2, 2)), y=[0, 1], **more)
    found = load_site(path, None, ("a", "b"), (2,), "float32", RecordForm())[0]
    assert (len(found.y), found.site, found.person) == (2, None, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39, "abc", ""])
def test_a_value_of_an_array_takes_its_record_out(tmp_path, bad):
    """Also where it gave the whole array another type: text, or float64."""
    found = arrays(tmp_path / "r.npz", np.array([[1, 2], [bad, 0], [3, 4]]), [0, 1, 1])
    assert torch.equal(found.x, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert (found.y.tolist(), found.numbers.tolist()) == ([0, 1], [0, 2])


@pytest.mark.parametrize("bad", [2, -1, 99, -100, 2**62, 0.5, math.nan, "c", "", "2", "-1"])
def test_a_label_of_an_array_takes_its_record_out(tmp_path, bad):
    found = arrays(tmp_path / "r.npz", np.zeros((3, 2)), np.array([1, bad, 0]))
    assert (found.y.tolist(), found.numbers.tolist()) == ([1, 0], [0, 2])


@pytest.mark.parametrize("bad", [50, -1, 2**40, 0.5, math.nan, "word", 2.0**63])
def test_a_word_out_of_the_vocabulary_takes_its_record_out(tmp_path, bad):
    form = RecordForm(vocabulary=50)
    x = np.array([[1, 2], [bad, 0], [3, 49]])
    found = arrays(tmp_path / "r.npz", x, [0, 1, 1], form, values="int64")
    assert found.x.dtype == torch.int64
    assert found.x.tolist() == [[1, 2], [3, 49]]


def test_a_range_in_float32_takes_its_own_bounds(tmp_path):
    """0.1 in float32 is more than 0.1, and is not beyond it."""
    x = np.array([[0.1, 0.1], [0.2, 0.0]], np.float32)
    form = RecordForm(low=0.0, high=0.1)
    assert arrays(tmp_path / "r.npz", x, [0, 1], form).y.tolist() == [0]
    images = np.zeros((3, 1, 2, 2))
    images[1, 0, 1, 0] = 7
    found = arrays(tmp_path / "r.npz", images, [0, 1, 0], form, shape=(1, 2, 2))
    assert found.numbers.tolist() == [0, 2]


def test_label_meaning_does_not_follow_other_values_types(tmp_path):
    """1 may be the class called "1" or the one at place 1: who shares records has to say which."""
    path, classes, x = tmp_path / "r.npz", ("1", "2", "3"), np.zeros((2, 2))
    with pytest.raises(DataError, match='labels = "names" or "numbers"'):
        arrays(path, x, [1, 2], classes=classes)
    for labels in (np.array([1, 2]), np.array(["1", "2"]), np.array([1.0, 2.0])):
        for how, expected in (("names", [0, 1]), ("numbers", [1, 2])):
            form = RecordForm(labels=how)
            assert arrays(path, x, labels, form, classes).y.tolist() == expected


def test_missing_value_error_lists_possible_replacements(tmp_path, caplog):
    lines = [f"{'' if k % 2 else k},{'a' if k % 3 else ''}" for k in range(600)]
    (tmp_path / "t.csv").write_text("\n".join(["age,out", *lines]))
    for fill, told in ({}, True), ({"fill": 40.0}, False):
        caplog.clear()
        form = RecordForm(columns={"age": fill})
        found = load_site(tmp_path / "t.csv", "out", ("a", "b"), (1,), "float32", form)[0]
        assert len(found.y) == (200 if told else 400)
        (line,) = [r.message for r in caplog.records]
        assert ("300 rows (2, 4, 6, ...): column age is missing" in line) == told
        assert "200 rows (1, 4, 7, ...): column out is not a class" in line
        assert line.endswith("as records.columns.age.fill" if told else "remove them from the file")
        assert len(line) < 500


def test_faults_of_the_file_as_a_whole_are_errors(tmp_path):
    path = tmp_path / "r.npz"
    with pytest.raises(DataError, match="has shape"):
        arrays(path, np.zeros((2, 3)), [0, 1])
    with pytest.raises(DataError, match="equal n"):
        arrays(path, np.zeros((2, 2)), [0])
    (tmp_path / "r.csv").write_text(text(GOOD))
    with pytest.raises(DataError, match="declares heigth: expected some of its columns"):
        read(tmp_path / "r.csv", RecordForm(columns={"heigth": {"low": 0.0}}))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"low": 2.0, "high": 1.0}, "low <= high"),
        ({"clamp": True}, "clamp = true without"),
        ({"vocabulary": 5, "low": 0.0}, "words have none"),
        ({"columns": {"a": {"categories": ["x", "x"]}}}, "each once"),
        ({"low": math.nan}, "finite"),
        ({"scale": "one-hot"}, "declare the rest in"),
        ({"fill": "A"}, "declare the rest in"),
        ({"vocabulary": 3, "fill": 1}, "words have none"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(wrong, message):
    with pytest.raises(ValidationError, match=message):
        RecordForm.model_validate(wrong)


def test_arrays_of_a_simulation_are_sifted_alike(caplog):
    x, y = torch.zeros(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    x[1, 1], x[4, 0] = math.nan, 9.0
    data = from_arrays(x, y, name="ward", site=list("aabbcc"), form=RecordForm(high=5.0))
    assert (data.y.tolist(), data.site) == ([0, 0, 1, 1], ("a", "b", "b", "c"))
    assert data.numbers.tolist() == [0, 2, 3, 5]
    (told,) = [r.message for r in caplog.records]
    assert "ward: 2 of 6 records are left out" in told
    assert "row 1 = nan: column 1 is not a finite number" in told
    assert "row 4 = 9.0: column 0 is beyond its declared range" in told
    again = refit(data, PlanRecords(low=0.0))
    assert torch.equal(again.x, data.x)
    with pytest.raises(DataError, match=r"records\.classes declares"):
        refit(data, PlanRecords(classes=["x", "y"]))


def test_a_clamped_value_leaves_the_bits_of_all_others(tmp_path):
    """A whole number that no float32 holds, and -0.0, beside a clamped value and without it."""
    form = RecordForm(low=0.0, clamp=True)
    whole = np.array([[2**53 - 1, 3], [-5, 1]], np.int64)
    both = arrays(tmp_path / "a.npz", whole, [0, 1], form, values="int64")
    alone = arrays(tmp_path / "b.npz", whole[:1], [0], form, values="int64")
    assert both.x.tolist() == [[2**53 - 1, 3], [0, 1]]
    assert torch.equal(both.x[:1], alone.x)
    x = np.array([[-0.0, 1.0], [-5.0, 1.0]], np.float32)
    found = arrays(tmp_path / "c.npz", x, [0, 1], form).x
    assert math.copysign(1, found[0, 0]) == -1
    assert found[1].tolist() == [0.0, 1.0]


def test_unreadable_parquet_cell_drops_its_record(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="reads Parquet: the extra `parquet`")
    text = arrow.array([b"yes", b"\xff\xfe", b"no"], arrow.binary()).view(arrow.string())
    columns = {name: [float(row[k]) for row in [X[0], X[0], X[1]]] for k, name in enumerate("vw")}
    path = write_parquet(tmp_path / "t.parquet", {**columns, "out": text})
    found = load_site(path, "out", CLASSES, (2,), "float32", RecordForm(), features=("v", "w"))[0]
    assert found.y.tolist() == [1, 0]
    assert len(found.x) == 2


def test_the_order_of_a_files_columns_is_the_federations(tmp_path):
    """A file whose columns stand otherwise gives the same numbers; nobody's order, no numbers."""
    order = [4, 0, 5, 2, 1, 3]
    rows = [[row[k] for k in order] for row in [HEADER, *GOOD]]
    path = write_csv(tmp_path / "r.csv", *rows)
    found = read(path)
    check_only_the_good(found)
    assert found.features == tuple(HEADER[:-1])
    with pytest.raises(DataError, match=r"not say in which order .* add features"):
        load_site(path, "out", CLASSES, (5,), "float32", FORM)[0]
    others = ("age", "dose", "ward", "grade", "size")
    with pytest.raises(DataError, match=r"5 of the 6 columns .*Missing: size; .* columns are free"):
        load_site(path, "out", CLASSES, (5,), "float32", FORM, features=others)[0]


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16])
def test_a_persons_number_that_a_float_rounds_is_nobodys(kind):
    """From 2^p on, p the bits of its mantissa, two whole numbers may be one float."""
    end = 2.0 ** (np.finfo(kind).nmant + 1)
    sieve = RecordFilter("r.npz", 4, 1)
    whose = np.array(persons_of(np.array([end, end - 1, -end, 3], kind), sieve))
    assert sieve.good.tolist() == [False, True, False, True]
    assert whose[[1, 3]].tolist() == [str(int(end - 1)), "3"]
    assert f"floats round, from {end:.0f} on" in sieve.paragraphs(values=False)[0]
    # Text says whose it is, however long, and whole numbers that nothing makes floats of.
    for exact in ([2**53, 2**53 + 1], [str(2**53), str(2**53 + 1)], np.array([2**53 - 1, 7])):
        sieve = RecordFilter("r.npz", 2, 1)
        assert len(set(persons_of(exact, sieve))) == 2
        assert sieve.good.all()


@pytest.mark.parametrize("name", ["", "Unnamed: 1"])
def test_unnamed_row_number_column_is_dropped(tmp_path, name):
    rows = [f"{i},{i % 7},{i % 2}" for i in range(40)]
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    first.write_text("\n".join([f"{name},a,y", *rows]))
    second.write_text("\n".join([f"a,{name},y", *rows]))
    assert read_table(first, RecordForm(), Roles("y")).features == ("a",)
    with pytest.raises(DataError, match=r"column 2 of 3 has no name .* records\.drop"):
        read_table(second, RecordForm(), Roles("y"))
    if name:
        dropped = RecordForm(drop=[name])
        assert read_table(second, dropped, Roles("y")).features == ("a",)
    chosen = RecordForm(features=["a"])
    assert read_table(second, chosen, Roles("y")).features == ("a",)


@pytest.mark.parametrize("values", ["float32", "int64"])
@pytest.mark.parametrize("kind", [np.bool_, np.int64, np.uint64, np.float32, np.float64])
def test_numbers_are_equal_among_text_and_missing_values(tmp_path, kind, values):
    """2^60 + 2^36 + 1 is 2^60 in float32 by way of float64, and the number above it by itself."""
    draw = np.random.default_rng(0)
    bits = draw.integers(0, 2, (60, 1)) << draw.integers(0, 56, (60, 4))
    x = (bits + draw.integers(0, 3, (60, 4))).astype(kind)
    x[:2] = np.array([[2**60 + 2**36 + 1, 2**53 + 1, 2**53 - 1, 7]] * 2, np.uint64).astype(kind)
    whole = RecordForm()
    alone = [load_one(tmp_path, x[i : i + 1], whole, values) for i in range(60)]
    expected = [row for rows in alone for row in rows]
    assert 20 < len(expected) < 60 or values == "float32" or x.itemsize < 8
    for other in (["word"] * 4, [math.nan] * 4):
        beside = np.array([*x.tolist(), other])
        assert load_one(tmp_path, beside, whole, values) == expected


def load_one(folder, x, form, values):
    np.savez(folder / "r.npz", x=x, y=np.zeros(len(x), np.int64))
    return load_site(folder / "r.npz", None, ("a", "b"), (4,), values, form)[0].x.tolist()


@pytest.mark.parametrize("odd", [math.nan, 5, "x"])
@pytest.mark.parametrize("how", [None, "names", "numbers"])
@pytest.mark.parametrize("classes", [("True", "False"), ("False", "True"), ("no", "yes")])
def test_booleans_are_the_same_labels_with_missing_ones(tmp_path, classes, how, odd):
    """numpy makes 1.0, 1 or "True" of them, by what the other label is."""
    form, x = RecordForm(labels=how), np.zeros((4, 2))
    truth = [True, False, True]
    alone = arrays(tmp_path / "r.npz", x[:3], np.array(truth), form, classes)
    beside = arrays(tmp_path / "r.npz", x, np.array([*truth, odd]), form, classes)
    assert beside.y.tolist() == alone.y.tolist()
    if how != "numbers" and "True" in classes:
        assert [classes[k] for k in alone.y.tolist()] == list(map(str, truth))


def test_integers_beyond_2_53_are_missing(tmp_path):
    """17 digits, as of SNOMED CT: a column of pandas' or an array is of floats beside a blank."""
    code = 32570731000036101
    codes, x = [code, code + 4, code], np.zeros((4, 2))
    classes = (str(code), str(code + 4))
    for more in ([], [math.nan]):
        n = 3 + len(more)
        zeros, named = np.zeros(n, np.int64), np.array([*codes, *more])
        np.savez(tmp_path / "r.npz", x=x[:n], y=zeros, person=named)
        at = tmp_path / "r.npz", None, ("a", "b"), (2,), "float32", RecordForm()
        assert not len(load_site(*at, person="person")[0].y)
        assert not len(arrays(tmp_path / "r.npz", x[:n], named, classes=classes).y)
        # As text they are what they are.
        named = np.array([*map(str, codes), *(["?"] * len(more))])
        assert arrays(tmp_path / "r.npz", x[:n], named, classes=classes).y.tolist() == [0, 1, 0]
        np.savez(tmp_path / "r.npz", x=x[:n], y=zeros, person=named)
        assert len(load_site(*at, person="person")[0].y) == 3


def test_a_decimal_name_ignores_other_names_digits(tmp_path):
    """Arrow gives all of a column as many digits as the longest has."""
    own = {"categories": ["1.5", "2.5", "o"], "other": "o"}
    form = RecordForm(columns={"code": own})
    found = []
    for more in ([], ["1.555"]):
        cells = list(map(Decimal, ["1.5", "2.5", "10", *more]))
        path = write_parquet(tmp_path / "t.parquet", {"code": cells, "out": cells})
        classes = ("1.5", "2.5", "10")
        some = load_site(path, "out", classes, (1,), "float32", form)[0]
        found.append((some.x[:3].tolist(), some.y[:3].tolist()))
    assert found[0] == found[1] == ([[0.0], [1.0], [2.0]], [0, 1, 2])


@settings(max_examples=60, deadline=None)
@given(line=st.binary(max_size=40).filter(lambda b: not set(b) & set(b"\n\r")))
def test_whatever_one_line_holds_the_others_are_read_alike(tmp_path_factory, line):
    path = tmp_path_factory.mktemp("any") / "r.csv"
    good = text(GOOD).encode().splitlines()
    path.write_bytes(b"\n".join([good[0], line, *good[1:]]))
    found = read(path)
    assert torch.equal(found.x[-2:], torch.tensor(X))
    assert found.y[-2:].tolist() == [1, 0]
    assert len(found.y) <= 3


def test_parquet_is_sifted_alike(tmp_path):
    columns = {"x": [1.0, None, math.nan, 2.0, 5.0], "y": ["no", "no", "yes", "yes", None]}
    path = write_parquet(tmp_path / "t.parquet", columns)
    found = load_site(path, "y", CLASSES, (1,), "float32", RecordForm())[0]
    assert (found.x.tolist(), found.y.tolist()) == ([[1.0], [2.0]], [0, 1])
