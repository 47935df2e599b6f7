import json

import pytest

from fedpact.common.errors import DataError
from fedpact.common.run_folder import Folder
from fedpact.report.page import write_report
from fedpact.report.run_summary import read_run

from .conftest import change

SITES = ["north", "south"]


def test_totals_are_sums_over_rounds(build):
    run = read_run(build(SITES, rounds=4))
    # Five records, round 0 included, of 1000 and 2000 bytes a site and half a second each.
    assert (run.bytes_down, run.bytes_up) == (5 * 2 * 1000, 5 * 2 * 2000)
    assert run.seconds == 2.5


def test_unevaluated_rounds_are_left_out(build):
    run = read_run(build(SITES, rounds=3))
    assert [record.round for record in run.evaluated] == [0, 2]
    assert set(run.scores) == set(SITES)


@pytest.mark.parametrize("name", ["plan.json", "privacy.json", "rounds.jsonl"])
def test_a_missing_file_is_named(build, name):
    folder = build(SITES)
    (folder / name).unlink()
    with pytest.raises(
        DataError, match=rf"FileNotFoundError.*{name}|{name} cannot be read .*fedpact run"
    ):
        write_report(folder)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("name", ["plan", "privacy", "summary", "environment", "partition"])
@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_a_damaged_file_is_named(build, name, content):
    folder = build(SITES)
    (folder / f"{name}.json").write_text(content)
    with pytest.raises(DataError, match=f"{name}.json"):
        read_run(folder)


@pytest.mark.parametrize("counts", ["x", [["a"]], [[1], [1, 2]], [[1]]])
def test_a_partition_with_other_counts_is_refused_undrawn(build, counts):
    folder = change(build(SITES), "partition", label_counts=counts)
    with pytest.raises(DataError, match="are not what `fedpact run` writes"):
        read_run(folder)


@pytest.mark.parametrize("read", [read_run, lambda path: Folder(path).read_json("plan.json")])
def test_a_comparisons_folder_is_told_from_a_runs(tmp_path, read):
    (tmp_path / "comparison.json").write_text("{}")
    with pytest.raises(DataError, match=r"this is a comparison, .*its runs are in NAME/seed-S"):
        read(tmp_path)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match="give the folder that `fedpact run` wrote"):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "entries",
    [{"private": "yes"}, {"private": None}, {"private": False}, {"sites": {}}],
    ids=["a word", "null", "plain with terms", "private without terms"],
)
def test_a_statement_that_contradicts_itself_is_refused(build, entries):
    folder = change(build(SITES), "privacy", **entries)
    with pytest.raises(DataError, match="private = "):
        read_run(folder)


def test_half_a_statement_is_refused(build):
    folder = build(SITES)
    privacy = json.loads((folder / "privacy.json").read_text())
    del privacy["adjacency"], privacy["covers"]
    (folder / "privacy.json").write_text(json.dumps(privacy))
    with pytest.raises(DataError, match="lacks adjacency, covers"):
        read_run(folder)


@pytest.mark.parametrize("key", ["epsilon", "delta", "epsilon_reserved", "sigma_joint"])
def test_terms_without_a_number_are_refused(build, key):
    folder = build(SITES)
    sites = json.loads((folder / "privacy.json").read_text())["sites"]
    del sites["south"][key]
    change(folder, "privacy", sites=sites)
    with pytest.raises(DataError, match=key):
        read_run(folder)


def test_a_line_cut_short_at_the_end_is_a_round_that_never_was(build):
    folder = build(SITES, rounds=4)
    path = folder / "rounds.jsonl"
    path.write_text(path.read_text()[:-20])
    assert read_run(folder).last.round == 3


def test_a_damaged_line_in_the_middle_is_refused(build):
    folder = build(SITES, rounds=4)
    path = folder / "rounds.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:-20]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"line 3 of .*rounds.jsonl"):
        read_run(folder)


@pytest.mark.parametrize("content", ["", '{"round": 0'])
def test_no_round_is_refused(build, content):
    folder = build(SITES)
    (folder / "rounds.jsonl").write_text(content)
    with pytest.raises(DataError, match="has no round"):
        read_run(folder)
