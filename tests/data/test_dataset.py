import math
import sys
from importlib.resources import files

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_digits
from tests.tables import write_parquet
from torch.utils.data import Subset

from fedpact.common.errors import DataError
from fedpact.data import load, public
from fedpact.data.cells import read_columns, read_npz
from fedpact.data.dataset import Dataset
from fedpact.data.inputs import columns_of
from fedpact.data.load import from_arrays, from_python, load_dataset
from fedpact.data.schema import LabelForm, PlanRecords, RecordForm


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_data_set_holds_no_value_that_is_not_finite(bad):
    x = torch.zeros(7, 3)
    x[2, 1] = x[5, 0] = bad
    y = torch.zeros(7, dtype=torch.int64)
    for given, name in ((x, "x"), (torch.zeros(7, 3), "x_test")):
        with pytest.raises(DataError, match=f"ward: row 2 of {name} .*from_arrays leaves out"):
            Dataset("ward", given, y, ("a",), x_test=x, y_test=y)


@pytest.mark.parametrize(
    ("role", "given"),
    [
        ("column", {"features": ("a", "b\x1b[31m")}),
        ("column", {"column": "image\x07"}),
        ("class", {"classes": ("ill", "well\x9b2J")}),
        ("site", {"site": ("north", "south\x08")}),
    ],
)
def test_names_with_terminal_controls_are_refused(role, given):
    names = {"classes": ("ill", "well"), **given}
    with pytest.raises(DataError, match=rf"has a {role} '.*\\x.*': expected a name without"):
        Dataset("d", torch.zeros(2, 2), torch.tensor([0, 1]), **names)
    # Of texts the classes are the characters that they have.
    if role == "class":
        Dataset("d", torch.zeros(2, 2, dtype=torch.int64), torch.tensor([0, 1]), **names)


@pytest.mark.parametrize(
    ("x", "y", "more", "message"),
    [
        (np.zeros((3, 2)), [0, 1], {}, "equal n"),
        (np.zeros((0, 2)), np.zeros(0, int), {}, "n >= 1"),
        (np.zeros((3, 0)), [0, 1, 0], {}, "at least one"),
        (np.zeros(3), [0, 1, 0], {}, "reshape"),
        (np.zeros((3, 2)), [0.5, math.nan, -1.0], {}, "such as 0.5, .* task.kind = 'regression'"),
        (np.zeros((3, 2)), [0, 1, 0], {"classes": ("a", "a")}, "no name twice"),
        (np.zeros((3, 2)), ["c", "d", "e"], {"classes": ("a", "b")}, "not one of the 2 classes"),
        (np.zeros((3, 2)), [0, 1, 0], {"site": ["a"]}, "1 entries for 3"),
        (np.zeros((3, 2)), [0, 1, 0], {"person": ["a"]}, "1 entries for 3"),
        (np.zeros((3, 2)), [0, 1, 0], {"test": (np.zeros((1, 3)), [0])}, "equal shapes"),
        ([["a"], ["b"]], [0, 1], {}, "column 0: is not a finite number"),
        ([[math.nan], [math.inf]], [0, 1], {}, "column 0: is not a finite number"),
        ([[1.0], [2.0, 3.0]], [0, 1], {}, "no array"),
        (np.array([[None], [None]]), [0, 1], {}, "column 0: is not a finite number"),
        (np.array([[{}], [{}]]), [0, 1], {}, "type object"),
        (torch.zeros(2, 1, device="meta"), [0, 1], {}, "no array"),
    ],
)
def test_mismatches_are_refused(x, y, more, message):
    with pytest.raises(DataError, match=message):
        from_arrays(x, y, **more)


def test_arrays_become_a_data_set():
    x = np.arange(6).reshape(3, 2)
    data = from_arrays(x.astype(np.uint8), ["b", "a", "b"], site=[1, 2, 1], test=(x[:1] / 2, ["c"]))
    assert data.x.dtype == torch.float32
    assert torch.equal(data.x, torch.from_numpy(x).float())
    assert data.classes == ("a", "b", "c")
    assert data.y.tolist() == [1, 0, 1]
    assert data.y_test is not None
    assert data.y_test.tolist() == [2]
    assert data.site == ("1", "2", "1")
    assert from_arrays(x, [0, 2, 1]).x.dtype == torch.int64  # 64-bit integers are tokens
    assert from_arrays(torch.from_numpy(x), [0, 2, 1]).classes == ("0", "1", "2")


@pytest.mark.parametrize("kind", [np.float32, np.int64, str])
def test_masked_values_are_missing(kind):
    """numpy's own conversion drops the mask, and with it that nothing was measured."""
    x = np.array([[1, 2], [-999, 4], [5, 6]]).astype(kind)
    covered = np.ma.masked_array(x, mask=[[0, 0], [1, 0], [0, 0]])
    assert from_arrays(covered, [0, 1, 0]).x.tolist() == [[1, 2], [5, 6]]
    assert from_arrays(np.ma.masked_array(x), [0, 1, 0]).x.tolist() == x.astype(float).tolist()
    labels = np.ma.masked_array([0, 1, 7], mask=[0, 0, 1])
    assert from_arrays(x, labels).y.tolist() == [0, 1]


def test_columns_of_unequal_length_are_named():
    """One value had become everybody's."""
    for short in ([5.0], [1.0, 2.0]):
        with pytest.raises(DataError, match=f"lengths a {len(short)}, b 3, y 3: expected equal"):
            columns_of({"a": short, "b": [1.0, 2.0, 3.0], "y": [0, 1, 0]})


def test_changing_the_given_array_does_not_change_the_data_set():
    x = np.zeros((2, 1), np.float32)
    data = from_arrays(x, [0, 1])
    x[:] = np.nan
    assert torch.equal(data.x, torch.zeros(2, 1))


def test_numeric_class_names_are_sorted_by_size():
    assert from_arrays(np.zeros((3, 1)), ["10", "9", "-1"]).classes == ("-1", "9", "10")


def test_bundled_digits_match_scikit_learn_with_licence():
    pixels, labels = load_digits(return_X_y=True)
    data = load_dataset("digits")
    # The test set is every fifth of a class; joined again, each record is there once.
    x = torch.cat([data.x, data.x_test]).reshape(-1, 64).double() * 16
    ours = sorted(
        (*row, label) for row, label in zip(x.tolist(), [*data.y, *data.y_test], strict=True)
    )
    theirs = sorted((*row, label) for row, label in zip(pixels.tolist(), labels, strict=True))
    assert ours == theirs
    first = pixels[labels == 3][:5]
    assert torch.equal(data.x[data.y == 3][:4].reshape(4, 64) * 16, torch.tensor(first[:4]).float())
    assert torch.equal(
        data.x_test[data.y_test == 3][0].flatten() * 16, torch.tensor(first[4]).float()
    )
    counts = data.y_test.bincount()
    assert torch.equal(counts, (data.y.bincount() + counts) // 5)
    licence = files("fedpact.data").joinpath("digits.LICENSE").read_text(encoding="utf-8")
    assert "Attribution 4.0" in licence
    assert "BSD 3-Clause" in licence


def test_heart_disease_reads_missing_as_declared_finding():
    def features(line):
        return public._features(public._columns(line), public._RANGES, 0)

    written_out = features("50,1,4,120,200,0,0,150,0,0,1,0,3,1")
    assert np.array_equal(features("50,1,4,?,?,?,?,?,?,?,?,?,?,1"), written_out)
    assert np.array_equal(features("50,1,4,0,0,0,0,150,0,0,1,0,3,1"), written_out)


# Files


CSV = "age,city,out,dose\n61,A,yes,0.5\n47,B,no,1e-3\n\n39,A,no,-2\n"


def write(path, text):
    path.write_text(text)
    return str(path)


def test_csv(tmp_path):
    data = load_dataset(write(tmp_path / "t.csv", CSV), label="out", site="city")
    assert torch.equal(data.x, torch.tensor([[61, 0.5], [47, 1e-3], [39, -2]]))
    assert data.classes == ("no", "yes")
    assert data.y.tolist() == [1, 0, 0]
    assert data.site == ("A", "B", "A")
    assert data.x_test is None


def test_sites_that_name_the_classes_agree_on_the_labels(tmp_path):
    path = write(tmp_path / "t.csv", "x,y\n1,yes\n2,zebra\n")
    assert load_dataset(path, label="y").y.tolist() == [0, 1]
    assert load_dataset(path, label="y", classes=("no", "yes")).y.tolist() == [1]
    with pytest.raises(DataError, match=r"y: is not one of the 2 classes.* records\.classes"):
        load_dataset(path, label="y", classes=("0", "1"))


@pytest.mark.parametrize(
    ("text", "label", "site", "message"),
    [
        (CSV, None, None, "label column is None: expected one of its columns age, city, out"),
        (CSV, "outcome", None, "'outcome'"),
        (CSV, "out", "ward", "site column is 'ward'"),
        (CSV, "out", "out", "different columns"),
        (CSV, "out", None, "column city: is not a finite number"),
        ("x,x,y\n1,2,a\n", "y", None, "names each column once"),
        ("Ward report,,\nx,z,y\n1,2,a\n", "y", None, "delete lines above it, and columns without"),
        ("x\x1b[31m,y\n1,a\n", "y", None, r"column 'x\\x1b\[31m': expected a name without"),
        ("x;y\n1,5;a\n", "y", None, "by ';', not by commas: expected .* points in"),
        ("x\ty\n1\ta\n", "y", None, r"by '\\t', not by commas"),
        ('x,y\n"1,5",a\n', "y", None, "a number with a point, not a comma"),
        ("x y,y\nb,a\n", "y", None, r'drop = \["x y"\] .* records\.columns\."x y"\.categories'),
        ("x,y\n", "y", None, "has 0 records: expected at least one below the header"),
        ("", "y", None, "is empty: expected a header line"),
        ("x,y\n1\n2\n", "y", None, 'a record has 1 values: .* "CSV UTF-8'),
        ("y\na\n", "y", None, "at least one more"),
        ('x,y\n1,"a\n', "y", None, "a record has a quotation mark that nothing closes"),
    ],
)
def test_a_csv_that_cannot_be_used_is_explained(tmp_path, text, label, site, message):
    with pytest.raises(DataError, match=message):
        load_dataset(write(tmp_path / "t.csv", text), label=label, site=site)


def test_no_error_quotes_a_value(tmp_path):
    path = write(tmp_path / "t.csv", "x,y\nsecret,b\n")
    with pytest.raises(DataError) as error:
        load_dataset(path, label="y")
    assert "secret" not in str(error.value)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "t.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # what a missing module looks like
    with pytest.raises(DataError, match=r"fedpact\[parquet\]"):
        load_dataset(str(tmp_path / "t.parquet"), label="y")


def test_a_broken_parquet_is_refused(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow, an extra, is not installed")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        load_dataset(str(tmp_path / "t.parquet"), label="y")


def test_npz_round_trip(tmp_path):
    path = tmp_path / "t.npz"
    x, y = np.random.default_rng(0).normal(size=(5, 3)), np.array([0, 1, 2, 1, 0])
    np.savez(path, x=x, y=y, x_test=x[:2], y_test=y[:2], site=np.array(list("ababa")))
    data = load_dataset(str(path))
    assert torch.equal(data.x, torch.from_numpy(x).float())
    assert data.y.tolist() == y.tolist()
    assert data.y_test is not None
    assert data.y_test.tolist() == [0, 1]
    assert data.site == tuple("ababa")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((2, 1))}, "expected x and y"),
        ({"x": np.zeros((2, 1)), "y": [0, 1], "z": [1]}, "expected x and y"),
        ({"x": np.zeros((2, 1)), "y": [0, 1], "y_test": [1]}, "x_test with y_test"),
        ({"x": np.array([[None]]), "y": [0]}, "Python objects"),
    ],
)
def test_an_npz_that_cannot_be_used_is_explained(tmp_path, arrays, message):
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load_dataset(str(tmp_path / "t.npz"))


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.npz"])
def test_a_missing_file_is_named(name):
    with pytest.raises(DataError, match=f"{name} does not exist"):
        load_dataset(name, **({} if name == "t.npz" else {"label": "y"}))


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.npz"])
def test_what_cannot_be_opened_is_not_called_damaged(tmp_path, name):
    """A folder, as a file that another account owns is opened by root all the same."""
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=rf"{name} cannot be read \(Is a directory\)"):
        (read_npz if name == "t.npz" else read_columns)(tmp_path / name)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(DataError) as error:
        load_dataset("mnits")
    assert "'mnits'" in str(error.value)
    assert all(name in str(error.value) for name in (*load.NAMES, ".csv", ".parquet", ".npz"))


def test_settings_that_do_not_belong_to_the_data_set_are_refused():
    with pytest.raises(DataError, match=r"only \.csv and \.parquet"):
        load_dataset("digits", label="y")
    with pytest.raises(DataError, match="its own classes"):
        load_dataset("digits", classes=("a",))


class Folder(torch.utils.data.Dataset):
    """As torchvision's ImageFolder: each numbers the classes that it has."""

    def __init__(self, classes, labels):
        self.classes, self.labels = classes, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return torch.full((2,), float(i)), self.classes.index(self.labels[i])


def test_a_torch_data_sets_labels_are_its_own_classes_names():
    train, test = Folder(["a", "b", "c"], "abcabc"), Folder(["a", "c"], "acca")
    found = from_python(train, PlanRecords(), test=test)
    assert found.classes == ("a", "b", "c")
    assert (found.y.tolist(), found.y_test.tolist()) == ([0, 1, 2, 0, 1, 2], [0, 2, 2, 0])
    other = from_python(train, PlanRecords(classes=["c", "b", "a"]), test=test)
    assert (other.y.tolist(), other.y_test.tolist()) == ([2, 1, 0, 2, 1, 0], [2, 0, 0, 2])
    digits = from_python(
        Folder(["0", "1", "2"], "012"), PlanRecords(), test=Folder(["1", "2"], "12")
    )
    assert digits.y_test.tolist() == [1, 2]


def test_a_part_of_a_torch_data_set_keeps_its_classes_names():
    """As of random_split: a part without the last class had a class less."""
    whole = Folder(["a", "b", "c"], "abcab")
    some = Subset(Subset(whole, [4, 3, 1, 0]), [0, 1, 2])
    found = from_python(some, PlanRecords(), test=Folder(["a", "c"], "ca"))
    assert found.classes == ("a", "b", "c")
    assert (found.y.tolist(), found.y_test.tolist()) == ([1, 0, 1], [2, 0])


def test_a_list_of_pairs_is_an_error_that_says_what_to_pass():
    pairs = [(torch.zeros(2), torch.tensor(k % 2)) for k in range(4)]
    with pytest.raises(
        DataError, match=r"data is a builtins\.list: expected .* a torch Dataset of"
    ):
        from_python(pairs, PlanRecords())


@pytest.mark.parametrize("classes", [["1", "0"], ["1", "2", "3"], ["-1", "1"], ["0", "2"]])
def test_numbers_that_name_other_classes_are_asked_about(classes):
    y = np.array([int(name) for name in classes] * 4)
    with pytest.raises(DataError, match=r'may mean two: set labels = "names" or "numbers"'):
        from_arrays(np.zeros((len(y), 1)), y, classes=classes)
    named = from_python((np.zeros((len(y), 1)), y), PlanRecords(classes=classes, labels="names"))
    assert named.y.tolist() == [*range(len(classes))] * 4
    assert from_arrays(np.zeros((2, 1)), [True, False], classes=["1", "0"]).y.tolist() == [0, 1]


def test_dates_are_no_numbers_in_any_container(caplog):
    days = np.array(["2020-01-01", "2021-06-01", "NaT"] * 4, "datetime64[ns]")
    data = {"age": np.arange(12.0), "seen": days, "ill": ["no", "yes"] * 6}
    for container in (data, pd.DataFrame(data)):
        with pytest.raises(DataError, match="seen: is not a finite number"):
            from_python(container, PlanRecords(), "ill")


def test_a_class_that_is_spelt_as_missing_is_warned_of(caplog):
    frame = pd.DataFrame({"age": np.arange(40.0), "ill": ["no", "yes", "none", "NA"] * 10})
    assert from_python(frame, PlanRecords(), "ill").classes == ("NA", "no", "none", "yes")
    assert "the labels 'NA', 'none' count as classes" in caplog.text
    caplog.clear()
    assert len(from_python(frame, PlanRecords(classes=["no", "yes"]), "ill").y) == 20
    assert "count as classes" not in caplog.text


def test_numbers_to_learn_stay_in_their_declared_range():
    form = RecordForm(target=LabelForm(kind="number", low=0.0, high=4.0))
    assert from_arrays(np.zeros((3, 1)), [-1.0, 3.0, 9.0], form=form).y.tolist() == [-1, 0.5, 1]


def test_parquet_equals_csv(tmp_path):
    columns = {"age": [61, 47], "city": ["A", "B"], "out": [1, 0], "dose": [0.5, -2.0]}
    stored = write_parquet(tmp_path / "t.parquet", columns)
    rows = "\n".join(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))
    text = write(tmp_path / "t.csv", f"{','.join(columns)}\n{rows}\n")
    a, b = (load_dataset(str(p), label="out", site="city") for p in (stored, text))
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.y, b.y)
    assert (a.classes, a.site) == (b.classes, b.site)
