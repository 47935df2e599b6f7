"""Before a site opens: its owner sees each mistake, and nobody else sees anything."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.deployment.grid import Node, Run, read_from
from tests.recounted import timeless
from tests.tables import write_rows
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.common.errors import DataError, FedpactError
from fedpact.common.messages import from_bytes, to_bytes
from fedpact.deployment import packaging, processes
from fedpact.deployment.check import check_site
from fedpact.deployment.site import Site

pytestmark = pytest.mark.usefixtures("clock")

COLUMNS = {
    "age": {"range": [0, 120], "scale": "range"},
    "lactate": {"range": [0, 20], "scale": "range", "fill": 1},
    "sex": {"categories": ["female", "male"], "scale": "one-hot"},
}
OWN = """
[columns]
lactate = { column = "blood_lactate", factor = 0.111 }
sex = { column = "gender", values = { "F" = "female", "M" = "male" } }
"""


def rows(n=200, factor=1.0):
    rng = np.random.default_rng(5)
    for k in range(n):
        sex = ["female", "male"][k % 2]
        lactate = f"{factor * rng.uniform(0.5, 8):.2f}"
        yield {"age": rng.integers(20, 90), "lactate": lactate, "sex": sex, "out": "ny"[k % 3 == 0]}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """One file for all, so that one deployment is written for all that ask alike."""
    return write_rows(tmp_path_factory.mktemp("study") / "study.csv", rows())


@pytest.fixture
def sites(make, study, tmp_path):
    """sites(table, ...) -> a deployment whose sites read these tables, and the sites' homes."""

    def new(*tables, choices=None, name="d", **plan):
        whole = {"data": str(study), "label": "out", "rounds": 2, "sites": len(tables), **plan}
        whole |= {"records": {"classes": ["n", "y"], "columns": COLUMNS}}
        where = make(tmp_path / name, {"records": False, **(choices or {})}, **whole)
        homes = sorted((where / "sites").iterdir())
        for home, table in zip(homes, tables, strict=True):
            read_from(table, home)
        return where, homes

    return new


def add(home, text):
    path = home / "site.toml"
    path.write_text(path.read_text() + text)


def spoiled(path, bad, n=100):
    """A table in which so many records have an age that nobody has."""
    found = list(rows(n))
    for row in found[:bad]:
        row["age"] = 400
    return write_rows(path, found)


def test_a_wrong_unit_is_named(sites, tmp_path):
    table = write_rows(tmp_path / "own.csv", rows(factor=9.0))
    _, (home,) = sites(table)
    found = check_site(home)
    (lactate,) = (one for one in found.columns if one.name == "lactate")
    values = np.array([float(row["lactate"]) for row in rows(factor=9.0)])
    assert (lactate.low, lactate.median, lactate.high) == (
        values.min(),
        np.median(values),
        values.max(),
    )
    assert lactate.outside == pytest.approx((values > 20).mean())
    assert found.left_out == [("lactate", "is beyond its declared range", int((values > 20).sum()))]
    expected = f"column lactate: median {np.median(values):.4g}, declared 0 to 20: different unit?"
    assert found.remarks[0] == expected
    assert found.problems
    # The owner says which unit it is, and all is well.
    add(home, '[columns]\nlactate = { column = "lactate", factor = 0.1111 }\n')
    found = check_site(home)
    assert (found.problems, found.left_out) == ([], [])
    assert not any("unit?" in remark for remark in found.remarks)


def test_a_clamped_column_in_another_unit_does_not_open(sites, tmp_path, monkeypatch):
    """None of its records would be left out, and all would hold one number."""
    monkeypatch.setitem(COLUMNS["lactate"], "clamp", True)
    _, (home,) = sites(write_rows(tmp_path / "own.csv", rows(factor=99.0)))
    found = check_site(home)
    assert found.left_out == []
    (told,) = found.problems
    assert told.startswith("column lactate: 200 of 200 values are beyond the declared range")
    with pytest.raises(DataError, match="nothing is reserved: give the file"):
        Site(home)
    assert not (home / "ledger.jsonl").exists()
    shown = CliRunner().invoke(app, ["deploy", "approve", str(home), "--by", "A. Owner"])
    assert shown.exit_code != 0
    assert "declared 0 to 20: different unit?" in " ".join(shown.output.split())


def test_6_percent_left_out_refuses_before_any_charge(sites, tmp_path):
    table = spoiled(tmp_path / "own.csv", 6)
    _, (home,) = sites(table)
    match = r"6 of 100 records .* 6.0 %, but most_left_out .* 5.0 %: column age is beyond .*\(6\)"
    with pytest.raises(DataError, match=match):
        Site(home)
    assert not (home / "ledger.jsonl").exists()
    assert "6 of 100" in check_site(home).problems[0]
    spoiled(table, 5)
    with Site(home) as site:
        site.take_part()


def test_a_reservation_is_kept_for_any_records(sites, tmp_path):
    """That a site stops at a record would tell of it."""
    table = spoiled(tmp_path / "own.csv", 0)
    _, (home,) = sites(table)
    with Site(home) as site:
        site.take_part()
    spoiled(table, 100)
    with Site(home) as site:
        assert len(site._records._records.x) == 0
    assert check_site(home).problems == []


def test_up_refuses_files_for_an_existing_flower_federation(make, tmp_path):
    where = make(tmp_path / "d")
    packaging.write_package(where, "flower", 8443)
    told = CliRunner().invoke(app, ["deploy", "up", str(where)])
    assert f"flwr run {where / 'app'}" in str(told.exception)
    assert not list(where.glob("sites/*/ledger.jsonl"))


def test_differing_columns_are_reported_together(sites, tmp_path):
    found = [{"case": k, "blood_lactate": r.pop("lactate"), **r} for k, r in enumerate(rows())]
    _, (home,) = sites(write_rows(tmp_path / "own.csv", found))
    checked = check_site(home)
    assert checked.missing == ("lactate",)
    assert checked.renamed == {"lactate": "blood_lactate"}
    assert checked.unexpected == ("case", "blood_lactate")
    names = ["age", "lactate ('blood_lactate')", "sex", "out"]
    assert [one.name for one in checked.columns] == names
    assert checked.mends == ['lactate = "blood_lactate"']
    # The records are looked at, too, as if that column were meant.
    assert checked.used == 200
    assert "Missing: lactate (probably its 'blood_lactate')" in checked.problems[0]
    told = CliRunner().invoke(app, ["deploy", "check", str(home)])
    assert "lactate (probably its 'blood_lactate')" in told.output
    assert "ignored: case" in told.output
    assert "cannot start" in told.output


def test_the_cost_and_what_remains_are_the_owners(sites, tmp_path):
    _, (home,) = sites(write_rows(tmp_path / "own.csv", rows()))
    before = check_site(home)
    assert (before.epsilon, before.epsilon_before, before.reserved) == (2.0, 0.0, False)
    with Site(home) as site:
        site.take_part()
    after = check_site(home)
    assert (after.epsilon_before, after.reserved, after.problems) == (0.0, True, [])
    path = home / "federation.toml"
    path.write_text(path.read_text().replace(after.run, "next"))
    other = check_site(home)
    assert (other.epsilon_before, other.epsilon_ever) == (2.0, 2.0)
    assert "epsilon would be 4: the site's policy has epsilon_ever = 2" in other.problems[0]
    assert other.seconds > 0
    assert other.classes == {"n": 133, "y": 67}


def finish(run):
    run()
    for node in run.nodes:
        node.site.close()
    # But for the hash of a ledger's last line, in which its time is.
    said = [
        [to_bytes(replace(from_bytes(block), ledger_head="")) for block in node.said]
        for node in run.nodes
    ]
    return said, [timeless(node.directory / "ledger.jsonl") for node in run.nodes]


def test_no_message_reveals_checks_or_mappings(sites, tmp_path, in_memory):
    """Replies and ledgers are those of a renamed file, byte for byte but for the time."""
    plain = write_rows(tmp_path / "plain.csv", rows())
    own = [
        {
            "case": k,
            "gender": row["sex"][0].upper(),
            "blood_lactate": row["lactate"],
            "age": row["age"],
            "out": row["out"],
        }
        for k, row in enumerate(rows(factor=9.0))
    ]
    # The same numbers, worked out here.
    same = [{**row, "lactate": repr(float(row["lactate"]) * 0.111)} for row in rows(factor=9.0)]
    own, same = write_rows(tmp_path / "own.csv", own), write_rows(tmp_path / "same.csv", same)
    first, homes = sites(same, plain, choices={"seeds": "test"})
    second = shutil.copytree(first, tmp_path / "second")
    mapped = second / "sites" / homes[0].name
    text = (mapped / "site.toml").read_text().replace(str(same), str(own))
    (mapped / "site.toml").write_text(text)
    add(mapped, OWN)
    found = check_site(mapped)
    assert not found.problems
    assert CliRunner().invoke(app, ["deploy", "check", str(second)]).exit_code == 0
    said, ledgers = finish(Run(first))
    said_mapped, ledgers_mapped = finish(Run(second))
    assert said == said_mapped
    assert ledgers == ledgers_mapped
    sent = b"".join(block for blocks in said_mapped for block in blocks)
    assert not any(word in sent for word in (b"blood_lactate", b"gender", b"lactate", b"left_out"))


def test_up_checks_every_site_before_it_starts_any(sites, tmp_path, monkeypatch):
    good, bad = write_rows(tmp_path / "a.csv", rows()), spoiled(tmp_path / "b.csv", 50)
    where, homes = sites(good, bad)
    monkeypatch.setattr(processes.Parties, "start", None)
    told = CliRunner().invoke(app, ["deploy", "up", str(where)])
    assert isinstance(told.exception, FedpactError)
    assert f"{homes[1].name} cannot start" in str(told.exception)
    assert "problem: 50 of 100 records" in told.output
    assert f"site {homes[0].name}: 200 of 200 records used" in told.output
    assert not list(where.glob("sites/*/ledger.jsonl"))
    monkeypatch.setattr(processes.Parties, "start", lambda parties: {"server": 1})
    spoiled(tmp_path / "b.csv", 1)
    told = CliRunner().invoke(app, ["deploy", "up", str(where)])
    assert "started: server" in told.output


def test_check_runs_while_the_site_is_open(sites, tmp_path):
    _, (home,) = sites(write_rows(tmp_path / "own.csv", rows()))
    node = Node(10, home)
    before = (home / "ledger.jsonl").read_bytes()
    assert check_site(home).problems == []
    assert (home / "ledger.jsonl").read_bytes() == before
    node.site.close()


def mended(home, found):
    """The site's check once its owner has put in the proposed lines."""
    add(home, "\n[columns]\n" + "\n".join(found.mends) + "\n")
    return check_site(home)


def test_what_a_site_has_kept_is_checked_as_it_opens(federate, tmp_path):
    run = federate(None, rounds=1, evaluation={"share": 0.2, "epsilon": 1.0, "delta": 1e-5})
    run()
    node = run.nodes[0]
    node.site.close()
    assert check_site(node.directory).problems == []
    entries = (node.directory / "ledger.jsonl").read_text().splitlines(keepends=True)
    settings = (node.directory / "site.toml").read_text()
    other = settings.replace('data_set = "site-00"', 'data_set = "other"')
    for number, damage in enumerate(
        (
            {"ledger.jsonl": None},
            {"ledger.jsonl": None, "ledger.jsonl.seen": None, "log.txt": None},
            {"ledger.jsonl": "".join(entries[:-1])},
            {"ledger.jsonl": "".join(entries[:-1]), "ledger.jsonl.seen": None},
            {"ledger.jsonl": "".join(entries[:2]), "ledger.jsonl.seen": None},
            {"site.db": "not a database"},
            {"site.db": None, "ledger.jsonl": None, "log.txt": None},
            {"held-out.key": None},
            {"site.toml": other},
        )
    ):
        home = Path(shutil.copytree(node.directory, tmp_path / f"home-{number}"))
        for name, text in damage.items():
            if text is None:
                (home / name).unlink(missing_ok=True)
            else:
                (home / name).write_text(text)
        problems, left = check_site(home).problems, {path.name for path in home.iterdir()}
        with pytest.raises(FedpactError) as refused:
            Site(home)
        # Opening has begun a new ledger in the place of one that is lost.
        as_opened = [problem.replace("has 0 entries", "has 1 entries") for problem in problems]
        assert as_opened == [str(refused.value)], damage
        assert not {name for name, text in damage.items() if text is None} & left


def test_one_check_shows_each_kind_of_fault(sites, tmp_path):
    """A renamed column, words of the label, empty cells."""
    words = {"n": "n", "y": "positive"}
    found = [
        {
            "age": "" if k < 5 else row["age"],
            "blood_lactate": row["lactate"],
            "sex": row["sex"],
            "out": words[row["out"]],
        }
        for k, row in enumerate(rows())
    ]
    path = write_rows(tmp_path / "own.csv", found)
    _, (home,) = sites(path)
    checked = check_site(home)
    assert "Missing: lactate" in checked.problems[0]
    assert "are left out" in checked.problems[1]
    positive = sum(row["out"] == "y" for row in rows())
    assert ("out", "is not one of the 2 classes", positive) in checked.left_out
    assert ("age", "is missing", 5) in checked.left_out
    assert any(f"'positive' ({positive})" in remark for remark in checked.remarks)
    # All is well once each was mended.
    after = mended(home, checked)
    assert (after.problems, after.left_out) == ([], [("age", "is missing", 5)])


@pytest.mark.parametrize(
    ("name", "form", "told"),
    [
        ("own.csv", lambda text: text.encode("cp1252"), "encoding='cp1252'"),
        (
            "own.csv",
            lambda text: text.replace("é", "e").encode("cp1252"),
            "200 lines not in UTF-8: save it as UTF-8",
        ),
        (
            "own.csv",
            lambda text: b"Our hospital\n\n" + text.encode(),
            "its first line is 'Our hospital': expected a header line",
        ),
        (
            "own.csv",
            lambda text: text.replace(",", ";").replace(".", ",").encode(),
            "sep=';', decimal=','",
        ),
        ("own.csv", lambda _: b"", "is empty"),
        ("own.csv", lambda _: b"age,lactate,sex,out\n", "has no records"),
        ("own.xlsx", lambda _: b"PK\x03\x04", "read_excel"),
    ],
)
def test_a_table_of_another_form_is_one_problem(sites, tmp_path, name, form, told):
    table = write_rows(tmp_path / name, [{**row, "é": "ü"} for row in rows()])
    table.write_bytes(form(table.read_text()))
    _, (home,) = sites(table)
    (problem,) = check_site(home).problems
    assert told in problem


def test_two_sites_with_one_file_are_told(sites, tmp_path):
    table = write_rows(tmp_path / "own.csv", rows())
    where, _ = sites(table, table)
    told = CliRunner().invoke(app, ["deploy", "check", str(where)])
    assert "site site-00 reads the same file" in told.stdout


def test_a_check_is_printed_whole_to_one_stream(sites, tmp_path, monkeypatch):
    """And has no row numbers."""
    _, (home,) = sites(spoiled(tmp_path / "own.csv", 50))
    # Python's own: what nobody handles goes to stderr.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger("fedpact"), "handlers", [])
    told = CliRunner().invoke(app, ["deploy", "check", str(home)])
    assert told.exit_code == FedpactError.exit_code
    assert "problem: 50 of 100 records" in told.stdout
    assert "beyond its declared range" in told.stdout
    assert told.stderr == ""
    told = CliRunner().invoke(app, ["deploy", "check", str(home), "--json"])
    assert json.loads(told.stdout)["sites"][home.name]["problems"]
