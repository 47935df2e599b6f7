"""Files that are written whole, who may read them, and locks that go with their process."""

import os
import signal
import stat
import subprocess
import sys
import threading

import pytest

from fedpact.common.errors import DataError, InputError
from fedpact.common.files import PARTIAL, only_one, parse_errors, replacing, write_whole


@pytest.fixture
def umask():
    """Others of the group may read, as on a machine that people share."""
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_its_owners_unless_others_may_read_it(tmp_path, umask):
    write_whole(tmp_path / "new" / "reply", b"a", b"b")
    write_whole(tmp_path / "cache", b"c", private=False)
    assert (tmp_path / "new" / "reply").read_bytes() == b"ab"
    assert (mode(tmp_path / "new" / "reply"), mode(tmp_path / "cache")) == (0o600, 0o640)


def test_a_replaced_file_becomes_private(tmp_path, umask):
    (tmp_path / "reply").write_bytes(b"old")
    (tmp_path / "reply").chmod(0o666)
    write_whole(tmp_path / "reply", b"new")
    assert mode(tmp_path / "reply") == 0o600


def test_failed_write_leaves_the_old_content_only(tmp_path):
    write_whole(tmp_path / "file", b"old")

    def write():
        with replacing(tmp_path / "file", private=True) as new:
            new.write_bytes(b"half")
            assert new.name.endswith(PARTIAL)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_content_and_name_are_on_the_disk_when_it_returns(tmp_path, monkeypatch):
    """The content before it has its name, the directory afterwards."""
    done, sync = [], os.fsync
    path = tmp_path / "file"

    def synced(descriptor):
        kind = "directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "content"
        done.append((kind, path.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    write_whole(path, b"new")
    assert done == [("content", False), ("directory", True)]


def test_two_that_write_one_file_at_once_leave_one_of_the_two(tmp_path):
    path, both = tmp_path / "cache", threading.Barrier(2)

    def write(content):
        with replacing(path, private=False) as new:
            new.write_bytes(content[:2])
            both.wait()
            new.write_bytes(content)

    threads = [threading.Thread(target=write, args=(c * 9,)) for c in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in (b"a" * 9, b"b" * 9)
    assert len(list(tmp_path.iterdir())) == 1


HOLDER = """
import sys, time
from pathlib import Path
from fedpact.common.files import only_one
with only_one(Path(sys.argv[1]), "held"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_lock_has_one_holder_and_vanishes_with_its_process(tmp_path):
    path = tmp_path / "run" / "lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        refused = pytest.raises(InputError, match=r"this has one already \(it holds .*lock\)")
        with refused, only_one(path, "this has one already"):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with only_one(path, "this has one already"):
        pass
    assert mode(path) == 0o600


@pytest.mark.parametrize(
    "error", [b"\xff".decode, lambda: [][0], lambda: {}["a"], lambda: int("x"), lambda: None.a]
)
def test_damaged_file_errors_are_one_sentence_with_a_remedy(tmp_path, error):
    path = tmp_path / "reply.bin"
    refused = pytest.raises(DataError, match=r"reply\.bin cannot be understood .*; move it away")
    with refused, parse_errors(path, "move it away"):
        error()
    with pytest.raises(FileNotFoundError), parse_errors(path, "move it away"):
        path.read_bytes()


def test_a_lock_of_another_account_is_reported(tmp_path, monkeypatch):
    """As `open` says it to everybody but root."""

    def refused(path, flags):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("fedpact.common.files.private_opener", refused)
    told = "lock cannot be opened by this account"
    with pytest.raises(InputError, match=told), only_one(tmp_path / "lock", "another"):
        pass
