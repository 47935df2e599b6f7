"""The same table gives the same records from whatever it is read, truth values included."""

from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import torch

import fedpact
from fedpact.common.errors import DataError
from fedpact.data.dataset import RecordFilter
from fedpact.data.load import from_python, load_dataset
from fedpact.data.schema import Column, PlanRecords, RecordForm
from fedpact.data.targets import class_numbers, persons_of

FRAME = pd.DataFrame({"age": np.arange(40) / 40, "smoker": [True, False] * 20,
                      "ill": [True, True, False, False] * 10})  # fmt: skip
every_container = pytest.mark.parametrize("kind", ["frame", "csv", "parquet"])
GAPS = FRAME.assign(smoker=[None, *FRAME.smoker[1:]]).astype({"smoker": "boolean"})


def from_frame(frame, label, site=None, person=None, classes=None, form=None):
    declared = {} if form is None else form.model_dump()
    return from_python(frame, PlanRecords(classes=classes, **declared), label, site, person)


def read(kind, frame, tmp_path, form, classes=None):
    if kind == "frame":
        return from_frame(frame, "ill", classes=classes, form=form)
    return load_dataset(stored(frame, tmp_path / f"t.{kind}"), "ill", classes=classes, form=form)


def stored(frame, path):
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        pytest.importorskip("pyarrow")
        frame.to_parquet(path)
    return str(path)


@every_container
@pytest.mark.parametrize(
    ("own", "ones"),
    [
        (None, True),
        (Column(categories=[0.0, 1.0]), True),
        (Column(categories=["False", "True"]), True),
        (Column(categories=["true", "false"]), False),
        (Column(categories=["0", "1"]), True),
    ],
)
@pytest.mark.parametrize("frame", [FRAME, GAPS], ids=["all", "gaps"])
def test_truth_values_are_the_same_from_every_container(kind, own, ones, frame, tmp_path):
    data = read(kind, frame, tmp_path, RecordForm(columns={"smoker": own} if own else {}))
    smoker = torch.tensor([float(s == ones) for s in frame.smoker if s is not pd.NA])
    assert data.x[:, 1].tolist() == smoker.tolist()
    assert data.classes == ("False", "True")
    assert data.y.tolist() == [int(v) for v in FRAME.ill][len(FRAME) - len(smoker) :]


@every_container
@pytest.mark.parametrize("classes", [["True", "False"], ["true", "false"], ["1", "0"]])
def test_declared_classes_are_truth_values_from_every_container(kind, classes, tmp_path):
    data = read(kind, FRAME, tmp_path, RecordForm(), classes)
    assert data.y.tolist() == [int(not v) for v in FRAME.ill]


def test_words_for_truth_stand_for_numbers_in_arrays_too():
    text = np.array([["TRUE", "0.5"], ["false", "1"]])
    data = fedpact.from_arrays(text, [True, False], classes=["False", "True"])
    assert data.x.tolist() == [[1.0, 0.5], [0.0, 1.0]]
    assert data.y.tolist() == [1, 0]


def test_columns_that_leave_every_record_out_are_named_together():
    days = pd.date_range("2020-01-01", periods=40)
    frame = FRAME.assign(patient="p", ward=["A", None] * 20, visit=days)
    with pytest.raises(DataError) as caught:
        from_frame(frame, "ill")
    told = str(caught.value)
    assert "column patient, visit, ward: is not a finite number" in told
    for word in (
        'drop = ["patient", "visit", "ward"]',
        "records.columns.ward.categories = [...]",
        "date",
        "features",
    ):
        assert word in told
    assert "row" not in told


@pytest.mark.parametrize("classes", [["no"], None])
def test_one_class_is_refused_with_the_labels_that_are_found(classes):
    labels = ["no"] * 40 if classes is None else ["no", "yes"] * 20
    with pytest.raises(DataError, match=r"one class, 'no', .*'no'.*records\.classes") as caught:
        from_frame(FRAME.assign(ill=labels), "ill", classes=classes)
    assert ("'yes'" in str(caught.value)) == (classes is not None)
    with pytest.raises(DataError, match="one class"):
        fedpact.from_arrays(np.zeros((40, 2)), labels, classes=classes)


@every_container
def test_whole_numbers_are_the_same_with_a_point(kind, tmp_path):
    """An empty cell makes floats of a column of whole numbers, which a CSV then writes as 1.0."""
    codes = [2, 1, 3, -1] * 10
    whole = pd.DataFrame({"age": FRAME.age, "ward": codes, "ill": [1, 0] * 20})
    gaps = whole.astype({"ward": float, "ill": float})
    gaps.loc[39, ["ward", "ill"]] = None
    ward = Column(categories=["1", "2", "3", "-1"], fill="2")
    for frame, rows in ((whole, 40), (gaps, 39)):
        data = read(kind, frame, tmp_path, RecordForm(columns={"ward": ward}), ["0", "1"])
        assert data.y.tolist() == ([1, 0] * 20)[:rows]
        assert data.x[:, 1].tolist() == ([1.0, 0.0, 2.0, 3.0] * 10)[:rows]


def test_codes_with_points_are_what_they_are(tmp_path):
    rows = [f"{code},{k % 2}" for k, code in enumerate(["250", "250.0", "250.1", "250.10"] * 3)]
    (tmp_path / "codes.csv").write_text("\n".join(["code,ill", *rows]))
    for names, places in (
        (["250", "250.1", "x"], [0.0, 2.0, 1.0, 2.0]),
        (["250", "250.0", "250.1", "250.10"], [0.0, 1.0, 2.0, 3.0]),
    ):
        own = Column(categories=names, other="x" if "x" in names else None)
        data = load_dataset(
            str(tmp_path / "codes.csv"), "ill", form=RecordForm(columns={"code": own})
        )
        assert data.x[:, 0].tolist() == places * 3


@every_container
def test_one_number_is_one_class_however_it_is_written(kind, tmp_path):
    """Undeclared: files of two hospitals are put together, and one had an empty cell."""
    frame = pd.DataFrame({"age": FRAME.age, "ill": ["0", "1", "0.0", "1.0"] * 10})
    data = read(kind, frame, tmp_path, RecordForm())
    assert (data.classes, data.y.tolist()) == (("0", "1"), [0, 1, 0, 1] * 10)
    # Beside numbers "NA" is no class; among names it may be one.
    gaps = read(kind, frame.assign(ill=["0", "1", "NA", "1.0"] * 10), tmp_path, RecordForm())
    assert (gaps.classes, gaps.y.tolist()) == (("0", "1"), [0, 1, 1] * 10)
    names = read(kind, frame.assign(ill=["NA", "b"] * 20), tmp_path, RecordForm())
    assert names.classes == ("NA", "b")


def test_why_one_class_is_left_is_told():
    table = {"a": ["1", "70 kg", "2", "x"], "y": ["no", "yes"] * 2}
    with pytest.raises(DataError, match=r"2 of 4 records are left out: of 2 column a is not a fin"):
        from_python(table, PlanRecords(), "y")


NOBODY = [
    *("", "inf", "NA", "N/A", "NULL", "none", "NaN", "?"),
    *("#N/A", "#REF!", "N.A.", "-", "\u200b"),
]


@every_container
@pytest.mark.parametrize("nobody", NOBODY)
def test_missing_names_are_not_one_person(kind, nobody, tmp_path, caplog):
    """Ten records of many people, taken for one, would each be protected less than is said."""
    whose = ["7", "7.0", nobody, "8"] * 10
    frame = pd.DataFrame({"age": FRAME.age, "ill": ["a", "b"] * 20, "patient": whose})
    if kind == "frame":
        data = from_frame(frame, "ill", person="patient")
    else:
        data = load_dataset(stored(frame, tmp_path / f"t.{kind}"), "ill", person="patient")
    assert data.person == ("7", "7", "8") * 10
    assert "names no person" in caplog.text


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        # As pandas, and spreadsheets of two languages, write a number of 18 places.
        ("3.2010119900199e+17", False),
        ("3.20101E+17", False),
        ("3,20101E+17", False),
        ("3e+17", False),
        ("320101199001990016,0", False),
        ("1,234", True),
        ("320101199001990010.0", False),
        ("320101199001990010", True),
        ("123456.0", True),
        # Codes, which no number was rounded to.
        ("12E3", True),
        ("E+7", True),
        ("1.2.3", True),
        ("O'Neill", True),
    ],
)
def test_a_persons_number_that_text_rounds_is_nobodys(written, kept, tmp_path):
    """Parquet and frames tell a float by its type; a CSV has nothing but how it is written."""
    path = tmp_path / "t.csv"
    path.write_text(f'age,ill,patient\n1,a,"{written}"\n2,b,8\n')
    assert len(load_dataset(str(path), "ill", person="patient").person) == 1 + kept


def test_a_name_is_what_one_sees_of_it():
    """Copied from elsewhere, one person's name has marks without width, or accents of their own."""
    sieve = RecordFilter("t", 8, 1)
    names = ["Zoë", "Zoe\u0308", "\ufeffZoë", "Zo\u200bë", "Zoë\0", "Zoé", "Zoë²", "Zo\të"]
    assert persons_of(names, sieve) == ["Zoë"] * 5 + ["Zoé", "Zoë²", "Zo\të"]
    assert sieve.good.all()


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_bytes_are_the_text_that_they_spell(kind, tmp_path):
    """Whoever is nobody is so in bytes, too, which some writers store text as."""
    whose = [b"7", b"", b"NA", b"8"] * 10
    path = tmp_path / f"t.{kind}"
    if kind == "npz":
        np.savez(path, x=np.eye(40), y=[0, 1] * 20, person=np.array(whose))
        data = load_dataset(str(path))
    else:
        frame = pd.DataFrame({"age": FRAME.age, "ill": [b"yes", b"no"] * 20, "who": whose})
        data = load_dataset(stored(frame, path), "ill", person="who")
        assert data.classes == ("no", "yes")
    assert data.person == ("7", "8") * 10


def test_bytes_name_a_declared_class_not_a_position():
    """As at a site, where classes are declared and nothing says how labels are written."""
    sieve = RecordFilter("t", 3, 1)
    found = class_numbers([b"yes", "yes", b"no"], ("no", "yes"), None, "ill", sieve)
    assert found.tolist() == [1, 1, 0]
    assert sieve.good.all()


def test_a_spreadsheet_error_is_neither_class_nor_site():
    frame = FRAME.assign(ill=["a", "b", "#N/A", "b"] * 10, site=["x", "y", "z", "-nan"] * 10)
    data = from_frame(frame, "ill", "site")
    assert data.classes == ("a", "b")
    assert set(data.site) == {"x", "y"}


def test_a_number_that_a_decimal_has_exactly_is_a_name():
    sieve = RecordFilter("t", 2, 1)
    persons_of([Decimal("320101199001990010.0000"), Decimal("1E+3")], sieve)
    assert sieve.good.all()
