"""A cell is read by itself: kept rows and float32 bits are those of a slow parse of each alone."""

import math
import re
import struct

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpact.common.errors import DataError
from fedpact.data.cells import to_numbers
from fedpact.data.load import from_arrays, load_dataset, load_site
from fedpact.data.schema import RecordForm
from fedpact.plan import Plan
from fedpact.simulation.setup import SimulationSetup

NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
DIRT = [
    *(
        "",
        " ",
        "NA",
        "nan",
        "NaN",
        "inf",
        "-Infinity",
        "1e400",
        "1_000",
        "0x1F",
        "1,5",
        "٣",
        "1\xa0",
    ),
    *("true", "FALSE", "True", "--1", "1e", "1d5", "6 1", "abc", "-0", "1e-400", "9" * 40, "$5"),
]


def slow(cell):
    """One cell as a float32, by a grammar and exact rounding; None where it is no number."""
    text = cell.strip()
    if text.lower() in ("true", "false"):
        return float(text.lower() == "true")
    if not NUMBER.fullmatch(text):
        return None
    (value,) = (
        struct.unpack("f", struct.pack("f", float(text)))
        if abs(float(text)) < 3.4e38
        else (math.inf,)
    )
    return value if math.isfinite(value) else None


def dirty(draw):
    if draw.random() < 0.1:
        return str(draw.choice(DIRT))
    value = float(draw.standard_normal() * 10.0 ** draw.integers(-40, 36))
    return [repr(value), f"{value:.3e}", f" {value:+.17g} ", str(int(value))][draw.integers(4)]


@pytest.mark.parametrize("seed", range(2))
def test_dirty_cells_are_read_as_a_slow_parser_does(tmp_path, seed):
    draw = np.random.default_rng(seed)
    rows = [[dirty(draw) for _ in range(3)] for _ in range(2000)]
    quoted = "\n".join(",".join(f'"{cell}"' for cell in [*row, "no"]) for row in rows)
    (tmp_path / "r.csv").write_text(f"a,b,c,y\n{quoted}\n", encoding="utf-8")
    names = ("a", "b", "c")
    found, _ = load_site(
        tmp_path / "r.csv", "y", ("no", "yes"), (3,), "float32", RecordForm(), features=names
    )
    read = [[slow(cell) for cell in row] for row in rows]
    good = [k for k, row in enumerate(read) if None not in row]
    assert 700 < len(good) < 1700
    assert found.numbers.tolist() == [k + 1 for k in good]
    expected = np.array([read[k] for k in good], np.float32)
    assert found.x.numpy().tobytes() == expected.tobytes()


@settings(max_examples=80, deadline=None)
@given(cells=st.lists(st.one_of(st.sampled_from(DIRT), st.integers(), st.floats(), st.none(),
       st.floats().map(repr), st.integers().map(str), st.booleans())))  # fmt: skip
def test_each_cell_is_read_as_if_it_were_alone(cells):
    alone = [to_numbers([cell])[0] for cell in cells]
    assert to_numbers(cells).tobytes() == np.array(alone, float).tobytes()


MULTI = b'1,"a note\nof two, ""lines""\n",no'


@pytest.mark.parametrize(
    "other", [b'7,"open,yes', b'7,open",yes', b'"', b"7,x", b'7,"",yes', b'","']
)
def test_quoted_line_breaks_keep_their_record_alone(tmp_path, other, caplog):
    """RFC 4180; and a stray quote takes no other record with it, wherever it stands."""
    good, form = [b"0,plain,no", MULTI, b"2,plain,yes"], RecordForm(drop=["note"])
    broken = other not in (b'7,"",yes', b'7,open",yes')

    def numbers(records):
        path = tmp_path / "r.csv"
        path.write_bytes(b"\r\n".join([b"v,note,y", *records]))
        return load_dataset(str(path), "y", form=form, classes=["no", "yes"]).x[:, 0].tolist()

    assert numbers(good) == [0, 1, 2]
    for place in range(4):
        # Its owner reads which line it is before anything is computed.
        caplog.clear()
        found = numbers([*good[:place], other, *good[place:]])
        assert (f"row {place + 1}: the line" in caplog.text) == broken
        assert [v for v in found if v != 7] == [0, 1, 2]


@pytest.mark.parametrize("line", [b"7", b"7,,no,8", b'7,",no', b"\xff,,no"])
def test_no_cell_of_an_unreadable_line_is_at_fault(tmp_path, line):
    (tmp_path / "r.csv").write_bytes(b"v,w,y\n1,,no\n" + line + b"\n2,3,yes\n")
    at = tmp_path / "r.csv", "y", ("no", "yes"), (2,), "float32", RecordForm()
    reasons = load_site(*at, features=("v", "w"))[1].reasons()
    assert sorted(reasons)[1:] == [("w", "is missing", 1)]
    assert [column for column, *_ in reasons].count("") == 1


@pytest.mark.parametrize("names", ['a,"b\nc",y', '"é\nx",b,y'])
def test_a_header_of_two_lines_has_no_other_encoding(tmp_path, names):
    """The command that was shown wrote a file with the same header, or without its first name."""
    (tmp_path / "r.csv").write_text(f"{names}\n1,2,u\n3,4,v\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"write each name on one line$"):
        load_dataset(str(tmp_path / "r.csv"), "y")


@pytest.mark.parametrize(
    "missing",
    [None, math.nan, np.float32("nan"), pd.NA, pd.NaT, "", "  ", "NaT", "<NA>", "None"],
    ids=repr,
)
def test_a_record_of_no_site_is_left_out_of_arrays(missing, caplog):
    """Before, arrays had a site called "None", and one called "nan", each with an ε of its own."""
    site = [missing, " a ", "b"] * 4
    data = from_arrays(torch.eye(12), [0, 1] * 6, site=site)
    assert data.site == ("a", "b") * 4
    assert data.numbers.tolist() == [k for k in range(12) if k % 3]
    assert (
        "4 rows (0, 3, 6, ...): column site names no site (a record without one is left"
        in caplog.text
    )


def test_as_many_sites_are_made_as_the_records_name():
    data = from_arrays(torch.eye(12), [0, 1] * 6, site=[None, " a ", "b"] * 4)
    natural = {"partition": {"kind": "natural"}, "model": "logistic"}
    scene = SimulationSetup.of(Plan.parse(natural), data)
    assert (scene.plan.sites, [site.name for site in scene.sites]) == (2, ["a", "b"])
    with pytest.raises(DataError, match=r"sites is 3 .* has 2 sites of its own: set sites = 2"):
        SimulationSetup.of(Plan.parse({**natural, "sites": 3}), data)
