"""A simulation of own records leaves out what a site would, and says so to who looks at it."""

import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedpact
from fedpact.common.errors import DataError, InputError, PlanError
from fedpact.data.load import from_arrays
from fedpact.plan import Plan
from fedpact.report.page import write_report
from fedpact.simulation.simulate import simulate
from fedpact.studies.compare import has_ended
from fedpact.studies.pool import Job

SETTINGS = {"rounds": 2, "sites": 2, "partition": {"held_out": 0.2}, "settings": {"local_steps": 1}}


def table(path, lines=()):
    rng = np.random.default_rng(0)
    rows = [
        f"{a:.3f},{b:.3f},{c}" for a, b, c in zip(*rng.normal(size=(2, 60)), "ab" * 30, strict=True)
    ]
    path.write_text("\n".join(["p,q,out", *rows, *lines]) + "\n")
    return str(path)


@pytest.mark.parametrize("mode", ["per_sample", "none"])
def test_bad_record_is_dropped_and_the_run_uses_the_others(tmp_path, mode, caplog):
    """Model and scores, bit for bit; before, each of these lines stopped the run."""
    bad = ("abc,1,a", "1,1", ",1,b", "1e39,1,a", "500,0,a", "1,1,", "1,1,c")
    results = []
    for name, lines in (("clean", ()), ("with", bad)):
        plan = Plan.parse(
            {
                **SETTINGS,
                "data": table(tmp_path / f"{name}.csv", lines),
                "label": "out",
                "privacy": {"mode": mode},
                "records": {"classes": ["a", "b"], "high": 100.0},
            }
        )
        results.append(simulate(plan, tmp_path / name))
    for a, b in zip(*(result.model.parameters() for result in results), strict=True):
        assert torch.equal(a, b)
    assert [r.accuracy for r in results[0].records] == [r.accuracy for r in results[1].records]
    unread, told = [r.message for r in caplog.records if "left out" in r.message]
    assert "1 of 67 records cannot be read" in unread
    assert "row 62: the line has 2 values" in unread
    assert f"{tmp_path / 'with.csv'}: 6 of 67 records" in told
    for line in ("row 61 = 'abc': column p is not a finite number",
                 "row 63 = '': column p is missing",
                 "rows 64 = '1e39', 65 = '500': column p is beyond its declared range",
                 "row 67 = 'c': column out is not one of the 2 classes"):  # fmt: skip
        assert line in told


def test_the_owner_reads_it_on_the_console(tmp_path, monkeypatch, typed):
    data = table(tmp_path / "t.csv", ["abc,1,a"])
    # A plan looks at the records as a run does, and is made in half of its time.
    words = ["plan", "--set", f"data={data}", "--set", "label=out", "--set", "rounds=1"]
    words += ["--set", "sites=2", "--set", "privacy.mode=none"]
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's, which a console has not
    monkeypatch.setattr(logging.getLogger("fedpact"), "handlers", [])  # of an earlier command here
    found = typed(*words)
    assert found.code == 0
    assert "row 61 = 'abc': column p is not a finite number" in found.err


def test_words_that_the_model_does_not_have_are_left_out(tmp_path, monkeypatch, caplog):
    """Of training and test records; found by trying, where no vocabulary is declared."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(2, (40, 6), generator=generator)
    y, test = torch.randint(2, (40,), generator=generator), torch.zeros(3, 6, dtype=torch.int64)
    x[7, 2], test[1, 0] = 9, -5
    data = from_arrays(x, y, test=(test, torch.tensor([0, 1, 0])), classes=("a", "b"))
    plan = Plan.parse({**SETTINGS, "model": "models_of_users:Bag"})
    simulate(plan, tmp_path / "run", data=data)
    assert "fails on 1 of 40 records, which are left out of everything: row 7" in caplog.text
    assert "fails on 1 of 3 records, which are left out of everything: row 1" in caplog.text


def test_a_public_data_set_is_held_against_a_declaration_too(tmp_path, caplog):
    plan = Plan.parse({**SETTINGS, "records": {"high": 0.5}})
    with pytest.raises(
        DataError, match=r"no record is left of digits: .* beyond its declared range"
    ):
        simulate(plan, tmp_path / "run")


def test_records_instead_of_a_folder_get_a_remedy(tmp_path):
    """Beside a plan the folder stands second, beside a model the records."""
    x, y = np.zeros((4, 2)), [0, 1, 0, 1]
    for given in ((x, y), x, 3):
        with pytest.raises(PlanError, match="give records as data="):
            fedpact.run(fedpact.Plan(sites=2), given)
        with pytest.raises(InputError, match="expected the path of a run's folder"):
            fedpact.load(given)


def half_bad(tmp_path, share, **records):
    """A plan of 60 records and as many others as make up this share."""
    more = round(60 * share / (1 - share))
    data = table(tmp_path / "table.csv", ["1,?,b", *["1;2,0,a"] * (more - 1)])
    return Plan.parse({**SETTINGS, "data": data, "label": "out", "records": records})


def test_a_table_that_is_mostly_left_out_is_refused(tmp_path, caplog):
    with pytest.raises(DataError) as refused:
        simulate(half_bad(tmp_path, 0.75), tmp_path / "run")
    told = str(refused.value)
    assert "180 of 240 records" in told
    assert "75.0 %, but records.most_left_out allows 50.0 %" in told
    assert "column p: is not a finite number" in told
    # Before it, a line for each column and reason.
    (lines,) = [r.message.splitlines() for r in caplog.records if "left out" in r.message]
    assert [line.partition(": column ")[2] for line in lines[1:-1]] == [
        "p is not a finite number",
        "q is missing",
    ]
    assert not (tmp_path / "run").exists()


def test_the_share_that_may_be_left_out_is_a_setting(tmp_path):
    run = simulate(half_bad(tmp_path, 0.75, most_left_out=0.75), tmp_path / "run")
    out = run.summary["left_out"]
    assert (out["records"], out["of"]) == (180, 240)
    page = write_report(run.folder).read_text()
    assert "180 of 240" in page
    assert all(f"{column} {why}: {count}" in page for column, why, count in out["why"])
    with pytest.raises(DataError, match=r"records.most_left_out allows 20.0 %"):
        simulate(half_bad(tmp_path, 0.25, most_left_out=0.2), tmp_path / "other")


def test_the_share_counts_for_each_named_site(tmp_path):
    """A clinic that measures in another unit does not vanish without a word."""
    of_west = np.arange(240) % 4 == 0
    table = pd.DataFrame({"p": np.where(of_west, 150.0, 5.0), "out": np.arange(240) % 2})
    table["clinic"] = np.where(of_west, "West", "Ost")
    records = {"columns": {"p": {"range": [0, 10]}}}
    how = {"label": "out", "site": "clinic", "out": tmp_path / "run", **SETTINGS}
    del how["sites"]
    with pytest.raises(DataError, match="60 of 60 records of site West are left out, 100"):
        fedpact.run("logistic", table, records=records, **how)


def test_names_of_sites_are_shown_as_they_are(tmp_path):
    names = ["Zürich", "St. Anna/Ost"]
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    data = from_arrays(x, [0, 1] * 20, site=[names[i // 2 % 2] for i in range(40)])
    kept = {"data": data, "partition": {"kind": "natural"}, "rounds": 1}
    result = fedpact.run("logistic", **kept, out=tmp_path / "run")
    assert sorted(result.summary["epsilon"]) == sorted(names)
    assert "St. Anna/Ost" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    files = {path.parent.name for path in (tmp_path / "run").glob("sites/*/ledger.jsonl")}
    assert files == {"Zurich", "St.-Anna-Ost"}
    # In the same ledgers, whatever their sites are called.
    more = fedpact.extend(tmp_path / "run", 1, data=data)
    assert more.summary["ledgers"]["runs"] == 2
    # Seeded noise goes by the file's name, so it is the one of a site called so.
    plain = from_arrays(x, [0, 1] * 20, site=[sorted(files)[1 - i // 2 % 2] for i in range(40)])
    again = fedpact.run("logistic", **{**kept, "data": plain}, out=tmp_path / "again")
    for name, w in result.model.state_dict().items():
        assert torch.equal(w, again.model.state_dict()[name])


def test_a_run_whose_sites_the_records_count_is_found_again(tmp_path):
    """By `run` and by `compare` alike; another number that is given is another run."""
    rows = pd.DataFrame(
        {"p": np.linspace(0, 1, 90), "out": list("ab") * 45, "clinic": list("xyz") * 30}
    )
    rows.to_csv(tmp_path / "t.csv", index=False)
    raw = {"data": str(tmp_path / "t.csv"), "label": "out", "site": "clinic", "rounds": 1}
    plan, run = Plan.parse(raw), tmp_path / "run"
    first = fedpact.run(plan, out=run)
    assert len(first.summary["epsilon"]) == 3
    assert fedpact.run(plan, out=run).summary == first.summary
    assert has_ended(Job("a", plan.seed, plan, run))
    with pytest.raises(PlanError, match="sites is 3 there and 2 now"):
        fedpact.run(Plan.parse({**raw, "sites": 2}), out=run)


def test_a_folder_without_a_run_error_suggests_one(tmp_path):
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "federation.toml").write_text("")
    with pytest.raises(DataError, match=r"not a run: .* deployment is in .*server.run"):
        fedpact.load(tmp_path)
    with pytest.raises(DataError, match="not a run: give the folder"):
        fedpact.load(tmp_path / "nowhere")
