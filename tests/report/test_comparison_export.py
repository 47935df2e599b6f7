"""What a comparison writes for other programs is read back to the figures that the page has."""

import math

import pandas as pd
import pytest
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.report.comparison import comparison_table, guarantees, inequality
from fedpact.report.exports import COLUMNS, curves_as_csv, table_as_latex
from fedpact.studies.pool import Job

from .test_comparison import put, read, two

SIGNS = {
    "\\%": "%",
    "\\_": "_",
    "$\\pm$": "±",
    "$\\varepsilon$": "ε",
    "$\\delta$": "δ",
    "--": "–",
    "$\\Psi$": "Ψ",
    "$\\lambda$": "λ",
}


def plain(tex):
    for code, sign in SIGNS.items():
        tex = tex.replace(code, sign)
    return tex


def test_a_csv_has_every_round_of_every_run(tmp_path):
    put(tmp_path, "a, b", 3, {0: 0.1, 2: 0.5}, epsilon=2.0)
    put(tmp_path, "free", 3, {0: 0.1, 1: 0.7}, epsilon=None)
    comparison = read(tmp_path, ["a, b", "free"], [3])
    (tmp_path / "c.csv").write_text(curves_as_csv(comparison))
    found = pd.read_csv(tmp_path / "c.csv")
    assert tuple(found.columns) == COLUMNS
    assert found["run"].tolist() == ["a, b"] * 3 + ["free"] * 2
    assert found["round"].tolist() == [0, 1, 2, 0, 1]
    assert found["bytes"].tolist() == [0, 300, 600, 0, 300]
    private, free = found[:3], found[3:]
    assert private["epsilon_allowed"].tolist() == [2.0] * 3
    assert free["epsilon_allowed"].isna().all()
    assert set(found["algorithm"]) == {"fedavg"}
    assert private["epsilon"].tolist() == [0.0, 1.0, 2.0]
    assert free["epsilon"].isna().all()
    # Round 1 was not evaluated.
    assert private["accuracy"].isna().tolist() == [False, True, False]
    assert float(private["loss"].iloc[-1]) == 0.5


def test_a_regression_has_no_accuracy_in_a_csv(tmp_path):
    put(tmp_path, "x", 0, {0: math.nan, 1: math.nan})
    rows = curves_as_csv(read(tmp_path, ["x"], [0])).splitlines()[1:]
    assert [row.split(",")[COLUMNS.index("accuracy")] for row in rows] == ["", ""]


def test_an_unknown_epsilon_is_infinite(tmp_path):
    put(tmp_path, "x", 0, {0: 0.1, 1: 0.5}, epsilon=math.nan)
    assert (
        curves_as_csv(read(tmp_path, ["x"], [0])).splitlines()[-1]
        == "x,fedavg,2.0,0,1,0.5,0.5,inf,300,"
    )


@pytest.mark.parametrize("change", [{}, {"rounds": 5}])
def test_latex_has_the_cells_and_sentences_of_the_table(tmp_path, change):
    comparison = two(tmp_path, **change)
    tex = table_as_latex(comparison)
    assert tex.count("toprule") == tex.count("midrule") == tex.count("bottomrule") == 1
    rows = [line for line in tex.splitlines() if line.endswith(" \\\\")]
    cells = [tuple(map(plain, line[: -len(" \\\\")].split(" & "))) for line in rows]
    table = comparison_table(comparison)
    assert [row[:3] for row in cells[1:]] == [(n, "fedavg", "2") for n in ("one", "two")]
    assert [row[:1] + row[3:] for row in cells] == [("", *table.headings), *table.rows]
    assert "{l" + "r" * (len(table.headings) + 2) + "}" in tex
    told = plain(tex)
    for sentence in (*guarantees(comparison), *filter(None, [inequality(comparison)])):
        assert sentence in told
    assert ("NOT AN EQUAL" in tex) == bool(change)


def test_compare_writes_both_files_to_the_given_place(tmp_path, monkeypatch):
    monkeypatch.setattr(Job, "here", True)  # no process to begin
    files = {"--csv": tmp_path / "curves.csv", "--latex": tmp_path / "table.tex"}
    named = [word for option, file in files.items() for word in (option, str(file))]
    small = ["--set", "rounds=1", "--set", "sites=2", "--seeds", "2", "--jobs", "1"]
    out = ["--out", str(tmp_path / "c")]
    done = CliRunner().invoke(app, ["compare", *small, *named, *out])
    assert done.exit_code == 0, done.output
    assert "(1 of 2 runs; about " in done.output
    assert len(pd.read_csv(files["--csv"])) == 4
    assert files["--latex"].read_text().startswith("\\begin{tabular}")
    refused = CliRunner().invoke(app, ["compare", *small, "--csv", str(tmp_path), *out])
    assert "folder" in str(refused.exception or refused.output)
