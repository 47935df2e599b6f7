import os

import pytest
import torch

from fedpact.api import run
from fedpact.common.errors import DataError, InputError, PlanError
from fedpact.common.files import check_out, free_room, make_room, write_whole
from fedpact.common.messages import RoundRecord, State
from fedpact.common.run_folder import Checkpoint, Costs, Folder
from fedpact.plan import Plan
from fedpact.studies.compare import compare


def checkpoint(number):
    state = State({"w": torch.randn(5)}, {"F": 0.1 + number})
    costs = Costs(number, 100 * number, 0.1 * number, 3 * number, 9 * number, 0.3 * number)
    return Checkpoint(state, number, {"a": number, "b": -1}, costs)


def test_a_checkpoint_reads_back_bit_for_bit():
    before = checkpoint(7)
    after = Checkpoint.from_bytes(b"".join(before.to_parts()))
    assert torch.equal(after.state.vectors["w"], before.state.vectors["w"])
    assert (after.state.numbers, after.round, after.included, after.costs) == (
        before.state.numbers,
        before.round,
        before.included,
        before.costs,
    )


def test_a_checkpoint_of_ten_thousand_sites_is_read_again():
    included = {f"site-{k:05d}": k for k in range(10_000)}
    before = Checkpoint(State({"w": torch.zeros(2)}, {}), 3, included)
    assert Checkpoint.from_bytes(b"".join(before.to_parts())).included == included


def test_a_record_whose_state_was_not_committed_is_dropped(tmp_path):
    folder = Folder(tmp_path)
    for number in range(3):
        folder.commit(checkpoint(number), RoundRecord(round=number))
    # Killed between the record of round 3 and its state, in the middle of the line.
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "acc')
    at, records = folder.restore()
    assert at.round == 2
    assert [record.round for record in records] == [0, 1, 2]
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 3


def test_a_write_that_fails_leaves_the_old_content(tmp_path):
    path = tmp_path / "file"
    write_whole(path, b"old")
    with pytest.raises(TypeError):
        write_whole(path, "not bytes")
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("taken", [1, 5, 1000])
def test_files_are_complete_with_any_reserved_space(tmp_path, taken):
    path = tmp_path / "file"
    make_room(taken, path)
    assert not path.exists()
    for content in (b"first", b"", b"a longer one"):
        write_whole(path, content)
        assert path.read_bytes() == content
    make_room(7, path)
    free_room(path)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_room_is_taken_for_all_or_for_none(tmp_path, monkeypatch):
    real, calls = os.posix_fallocate, []

    def full(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        make_room(1000, tmp_path / "one", tmp_path / "two")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_a_run_is_reported(tmp_path):
    with pytest.raises(DataError, match="expected a file of a run's folder"):
        Folder(tmp_path).read_json("plan.json")
    with pytest.raises(DataError, match="cannot be resumed"):
        Folder(tmp_path).restore()


@pytest.mark.parametrize("content", ["", "null", "[]", '"ended"', "5"])
def test_a_json_file_that_is_no_table_is_reported(tmp_path, content):
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(DataError, match=r"summary\.json cannot be read"):
        Folder(tmp_path).read_json("summary.json")
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(PlanError, match=r"expected|not valid json"):
        Plan.read(tmp_path / "plan.json")


def test_a_folder_that_cannot_be_is_refused_and_none_is_made(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("/no/disk")
    for out in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / "link"):
        with pytest.raises(InputError, match="is not a folder: name a folder"):
            check_out(out)
    new = tmp_path / "new" / "run"
    assert check_out(new) == new
    assert not new.parent.exists()
    with pytest.raises(InputError, match="which is not valid UTF-8"):
        check_out(tmp_path / "bad\udcff")
    # Both that write one ask first.
    for carry_out in (lambda out: run(Plan(), out), lambda out: compare([Plan()], 1, out)):
        with pytest.raises(InputError, match="is not a folder: name a folder"):
            carry_out(tmp_path / "file")
