"""Files that are changed together: only a note of one's own is obeyed, and of fixed files alone."""

import contextlib
import json
import os

import pytest

from fedpact.common.errors import DataError, InputError
from fedpact.common.run_folder import BACKUP_FILE, commit, exclusive, keep_before, recover, rollback

PLANTED = {
    "alice/site-1/policy.toml": "epsilon_ever = 1000\n",
    "alice/site-1/ledger.jsonl": None,
    "../victim.txt": None,
}


@pytest.fixture
def site(tmp_path):
    """A site's directory below one that others may write."""
    home = tmp_path / "shared" / "alice" / "site-1"
    home.mkdir(parents=True)
    for name in ("policy.toml", "ledger.jsonl", "site.toml", "federation.toml", "plan.json"):
        (home / name).write_text(f"{name} of the owner")
    (tmp_path / "victim.txt").write_text("somebody else's")
    return home


def content(place):
    files = (path for path in place.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(place)): path.read_bytes() for path in files}


def note_of(**files):
    """A note as `keep_before` writes it, of other files."""
    return {"fedpact": "what these files held before they are changed together", "folders": 1} | {
        "files": files
    }


@pytest.mark.parametrize("name", ["before.json", BACKUP_FILE])
@pytest.mark.parametrize("planted", [PLANTED, note_of(**PLANTED), {"accuracy": 0.9}, [1, 2]])
def test_what_lies_above_a_party_is_nothing_to_it(site, tmp_path, name, planted):
    for place in (site.parent, site.parent.parent):
        (place / name).write_text(json.dumps(planted))
        (place / name).chmod(0o600)
    before = content(tmp_path)
    with exclusive(site, wait=True):
        pass
    recover(site)
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    "name",
    [
        *("policy.toml", "ledger.jsonl", "site.toml", "site.key", "../victim.txt", "lock"),
        *("../../../victim.txt", "run/plan.json", "./plan.json", "/etc/nothing", "", BACKUP_FILE),
    ],
)
@pytest.mark.parametrize("text", [None, "mine"])
def test_a_note_of_other_files_is_refused_before_any_is_touched(site, tmp_path, name, text):
    planted(site, json.dumps(note_of(**{"plan.json": "mine", name: text})))
    before = content(tmp_path)
    with pytest.raises(DataError, match="is no text file that is changed so"):
        recover(site)
    assert content(tmp_path) == before


def planted(site, text):
    (site / BACKUP_FILE).write_text(text)
    (site / BACKUP_FILE).chmod(0o600)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[1, 2]", '{"accuracy": 0.9}', json.dumps({"plan.json": None}), "\xff"),
        json.dumps(note_of(**{"plan.json": 3})),
        json.dumps({**note_of(), "folders": "many"}),
        json.dumps({**note_of(), "files": ["plan.json"]}),
    ],
)
def test_what_is_no_note_is_told_with_what_to_do(site, text):
    planted(site, text)
    with pytest.raises(DataError, match=f"{BACKUP_FILE} cannot be understood.*then remove it"):
        recover(site)


def linked(note):
    note.rename(note.with_name("elsewhere"))
    note.symlink_to("elsewhere")


def piped(note):
    note.unlink()
    os.mkfifo(note, 0o600)


@pytest.mark.parametrize("made", [linked, piped, lambda note: note.chmod(0o620)])
def test_a_note_that_another_could_write_is_not_obeyed(site, made):
    planted(site, json.dumps(note_of(**{"plan.json": "mine"})))
    made(site / BACKUP_FILE)
    with pytest.raises(DataError, match="cannot be understood"):
        recover(site)
    assert (site / "plan.json").read_text() == "plan.json of the owner"


def test_a_note_of_another_account_is_not_obeyed(site, monkeypatch):
    keep_before(site)
    (site / "plan.json").write_text("new")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(DataError, match="no private file of the account"):
            recover(site)
    recover(site)
    assert (site / "plan.json").read_text() == "plan.json of the owner"


def test_change_of_several_folders_is_undone_in_all_or_none(tmp_path):
    """Whichever of the notes are left, as a process that is killed leaves them."""
    places = [tmp_path / name for name in "abc"]
    for left in range(len(places) + 1):
        for place in places:
            place.mkdir(exist_ok=True)
            (place / "plan.json").write_text("old")
        keep_before(*places)
        for place in places:
            (place / "plan.json").write_text("new")
        with pytest.raises(DataError, match="together with other folders"):
            rollback(places[-1])
        commit(*places[:left])
        rollback(*places)
        found = {(place / "plan.json").read_text() for place in places}
        assert found == ({"new"} if left else {"old"})
        assert not [path for place in places for path in place.glob(".*")]


def test_a_party_that_was_changed_by_itself_is_undone_by_itself(site, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    keep_before(site)
    (site / "plan.json").write_text("new")
    rollback(other, site)
    assert (site / "plan.json").read_text() == "plan.json of the owner"


def test_a_folder_is_one_process_at_a_time(site):
    with exclusive(site):
        keep_before(site)
        # As another shell would: nothing is put back below the first one's hands.
        with pytest.raises(InputError, match="in use already"):
            recover(site)
        with pytest.raises(InputError, match="in use already"), exclusive(site):
            pass


def test_a_folder_that_is_made_for_its_lock_goes_with_it(tmp_path):
    with contextlib.suppress(KeyError), exclusive(tmp_path / "runs" / "new"):
        assert (tmp_path / "runs" / "new" / "lock").exists()
        raise KeyError
    assert not list(tmp_path.iterdir())
    with exclusive(tmp_path / "runs" / "new"):
        (tmp_path / "runs" / "new" / "plan.json").write_text("{}")
    assert (tmp_path / "runs" / "new" / "plan.json").exists()
