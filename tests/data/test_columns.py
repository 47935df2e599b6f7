"""A site's columns under other names, in other units and words: the records of a renamed file."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.tables import write_parquet, write_rows

from fedpact.common.errors import DataError
from fedpact.data.columns import ColumnDifference, FileColumn
from fedpact.data.load import load_site
from fedpact.data.schema import RecordForm

FEATURES = ("age", "bmi", "lactate", "temperature", "sex")
FORM = RecordForm.model_validate(
    {
        "columns": {
            "age": {"low": 0.0, "high": 120.0},
            "lactate": {"low": 0.0, "high": 20.0, "fill": 1.0},
            "sex": {"categories": ["female", "male"]},
        }
    }
)
OWN = {
    "bmi": "body_mass_index",
    "lactate": {"column": "lactate_mgdl", "factor": 0.111},
    "temperature": {"column": "temp_f", "factor": 5 / 9, "offset": -160 / 9},
    "sex": {"column": "gender", "values": {"F": "female", "M": "male"}},
    "ill": {"column": "diagnosis", "values": {"1": "yes", "0": "no"}},
    "patient": "case",
}
SOURCES = {name: FileColumn.model_validate(own) for name, own in OWN.items()}


def rows(n=60):
    """As they stand at the site: every kind of cell, a missing and a wrong one among them."""
    rng = np.random.default_rng(1)
    for k in range(n):
        lactate = "" if k % 7 == 0 else "high" if k == 9 else f"{rng.uniform(5, 40):.1f}"
        yield {
            "": k,
            "ward": rng.choice(["A", "B"]),
            "case": f"P{k // 2}",
            "body_mass_index": f"{rng.normal(25, 5):.3f}",
            "diagnosis": k % 2,
            "gender": "X" if k == 5 else rng.choice(["F", "M"]),
            "lactate_mgdl": lactate,
            "temp_f": f"{rng.normal(98, 1):.2f}",
            "age": rng.integers(18, 90),
        }


def renamed(row):
    """The same as the federation has it, every number computed here."""
    lactate = row["lactate_mgdl"]
    return {
        "sex": {"F": "female", "M": "male"}.get(row["gender"], row["gender"]),
        "patient": row["case"],
        "age": row["age"],
        "bmi": row["body_mass_index"],
        "lactate": lactate if lactate in ("", "high") else repr(float(lactate) * 0.111),
        "temperature": repr(float(row["temp_f"]) * (5 / 9) + (-160 / 9)),
        "ill": "yes" if row["diagnosis"] else "no",
    }


def write_typed(path, found):
    """As Parquet, numbers as numbers."""

    def column(name):
        cells = [row[name] for row in found]
        if name not in ("body_mass_index", "temp_f", "bmi", "temperature"):
            return cells if name in ("", "age", "diagnosis") else list(map(str, cells))
        return [float(cell) for cell in cells]

    return write_parquet(path, {name: column(name) for name in found[0]})


def read(path, sources=None, **changes):
    asked = {"form": FORM, "person": "patient", "features": FEATURES, **changes}
    return load_site(path, "ill", ("no", "yes"), (5,), "float32", sources=sources or {}, **asked)[0]


@pytest.mark.parametrize(("suffix", "store"), [("csv", write_rows), ("parquet", write_typed)])
def test_mapped_columns_are_a_renamed_files_bits(tmp_path, suffix, store):
    own = list(rows())
    mapped = read(store(tmp_path / f"own.{suffix}", own), SOURCES)
    plain = read(store(tmp_path / f"plain.{suffix}", [renamed(row) for row in own]))
    assert torch.equal(mapped.x, plain.x)
    assert torch.equal(mapped.y, plain.y)
    assert torch.equal(mapped.numbers, plain.numbers)
    assert mapped.person == plain.person
    # The wrong word and the wrong number are left out, a missing one is filled; nothing else is.
    assert len(mapped.y) == 58
    assert (mapped.x[:, 2] == 1.0).sum() >= 8


def test_other_columns_of_a_file_count_for_nothing(tmp_path):
    few = [renamed(row) for row in rows()]
    many = [{"Unnamed: 0": k, "site": "here", **row, "note": "a,b"} for k, row in enumerate(few)]
    plain = read(write_rows(tmp_path / "a.csv", few))
    wide = read(write_rows(tmp_path / "b.csv", many))
    assert torch.equal(plain.x, wide.x)
    assert plain.features == wide.features == FEATURES


@pytest.mark.parametrize(
    ("name", "others", "meant"),
    [
        ("lactate", ["ward", "lactate_mgdl"], "lactate_mgdl"),
        ("Temperature", ["temperatur"], "temperatur"),
        ("sex", ["ward", "case_no"], None),
    ],
)
def test_a_renamed_column_is_detected(name, others, meant):
    found = ColumnDifference.of(["x", name], [*others, "x"])
    assert (found.missing, found.unexpected) == ((name,), tuple(others))
    assert found.renamed.get(name) == meant


def test_an_error_about_columns_lists_the_differences(tmp_path):
    """And not two full lists."""
    with pytest.raises(DataError) as raised:
        read(write_rows(tmp_path / "own.csv", list(rows())))
    told = str(raised.value)
    assert "has 1 of the 7 columns" in told
    assert "Missing: bmi, lactate (probably its 'lactate_mgdl'), temperature, sex, ill" in told
    assert "other columns are ward, case, body_mass_index, diagnosis, gender" in told
    assert "age" not in told.split("Missing")[1].split("Say")[0]
    assert 'lactate = "lactate_mgdl"' in told


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bim": "body_mass_index"}, r"names bim: expected .* nearest is 'bmi'"),
        ({"bmi": "bodymass_index"}, r"no column 'bodymass_index'.*nearest is 'body_mass_index'"),
    ],
)
def test_a_mapping_that_leads_nowhere_is_refused(tmp_path, wrong, message):
    sources = SOURCES | {name: FileColumn(column=column) for name, column in wrong.items()}
    with pytest.raises(DataError, match=message):
        read(write_rows(tmp_path / "own.csv", list(rows())), sources)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"column": "a", "factor": 0}, "factor = 0"),
        ({"column": "a", "factor": math.inf}, "finite"),
        ({"column": "a", "factor": 2, "values": {"F": "f"}}, "leave one out"),
        ({"factor": 2}, "column"),
        ({"column": "a", "unit": "kg"}, "Extra"),
    ],
)
def test_a_source_that_makes_no_sense_is_refused(own, message):
    with pytest.raises(ValidationError, match=message):
        FileColumn.model_validate(own)


def test_arrays_have_no_columns_to_map(tmp_path):
    np.savez(tmp_path / "r.npz", x=np.zeros((4, 5)), y=[0, 1, 0, 1])
    with pytest.raises(DataError, match=r"is no table: \[columns\]"):
        load_site(
            tmp_path / "r.npz", None, ("a", "b"), (5,), "float32", RecordForm(), sources=SOURCES
        )[0]
