"""The ledger keeps what it was told, whatever happens to the process, the disk or the file."""

import errno
import hashlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedpact.common.errors import BudgetExhausted, InputError, LedgerError, PolicyRefused
from fedpact.privacy.accounting.accountant import Budget, SampledGaussian, epsilon
from fedpact.privacy.ledger import hash_chain
from fedpact.privacy.ledger.hash_chain import read_all, read_entries
from fedpact.privacy.ledger.ledger import Ledger

CHEAP, DEAR = SampledGaussian(0.01, 4.0), SampledGaussian(0.02, 2.0)
EVENTS = {CHEAP: 1000, DEAR: 20}
BUDGET = Budget(2.0, 1e-5)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "site" / "ledger.jsonl"


def opened(path, *, hypothetical=True, site="a"):
    return Ledger(path, site, hypothetical=hypothetical)


def charge(ledger, request, count=1, **other):
    asked = {"run": "run", "event": CHEAP, "purpose": ("gradient",)}
    asked |= {"round_number": 1} | other
    ledger.charge(request=request, count=count, **asked)


def total(ledger, run="run"):
    return sum(ledger.spent(run).values())


@pytest.fixture
def ledger(path):
    with opened(path) as found:
        found.reserve("run", BUDGET, EVENTS)
        yield found


def written(path, *counts):
    """A closed ledger with a charge of each count, the last one of the dear event; its bytes."""
    with opened(path) as ledger:
        ledger.reserve("run", BUDGET, EVENTS)
        for number, count in enumerate(counts):
            event = DEAR if number == len(counts) - 1 else CHEAP
            charge(ledger, str(number), count, event=event)
    return path.read_bytes()


# What it says


def test_written_values_are_read_back(path, ledger):
    charge(ledger, "1/0/x", 3, purpose=("loss", "gradient"), round_number=4, attempt=2)
    entries = read_entries(path)
    assert [entry["kind"] for entry in entries] == ["open", "reserve", "charge"]
    said = {k: v for k, v in entries[-1].items() if k not in ("time", "hash", "previous")}
    assert said == {
        "number": 2,
        "kind": "charge",
        "mechanism": "sampled_gaussian",
        "run": "run",
        "round": 4,
        "attempt": 2,
        "request": "1/0/x",
        "purpose": ["gradient", "loss"],
        "q": CHEAP.q,
        "sigma": CHEAP.sigma,
        "count": 3,
    }
    assert (ledger.head, ledger.length) == (entries[-1]["hash"], 3)


def hash_of(entry):
    """The hash of an entry, by the description of its format."""
    body = {k: v for k, v in entry.items() if k != "hash"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_line_is_json_and_its_hash_that_of_the_rest_of_it(path):
    """The format on disk, from its description: any later version has to open it."""
    head, entry = "", {}
    for number, line in enumerate(written(path, 2, 1, 3).splitlines()):
        entry = json.loads(line)
        assert line == json.dumps(entry).encode()
        assert (entry["number"], entry["previous"]) == (number, head)
        head = entry["hash"]
        assert head == hash_of(entry)
    order = ["number", "kind", "mechanism", "run", "round", "attempt", "request", "purpose"]
    assert list(entry) == [*order, "q", "sigma", "count", "time", "previous", "hash"]


def test_reopening_restores_the_exact_state(path):
    with opened(path) as ledger:
        ledger.reserve("run", BUDGET, EVENTS)
        ledger.reserve("später", Budget(1.0, 1e-6), {DEAR: 3})
        for number in range(5):
            charge(ledger, str(number), number + 1)
        charge(ledger, "0", 2, run="später", event=DEAR)
        before = ledger.spent("run"), ledger.spent("später"), ledger.total(), ledger.head
    with opened(path) as ledger:
        after = ledger.spent("run"), ledger.spent("später"), ledger.total(), ledger.head
        assert after == before == ({CHEAP: 15}, {DEAR: 2}, (3.0, 1.1e-05), ledger.head)
        assert ledger.length == len(read_entries(path)) == 9
        charge(ledger, "4", 5)
        assert ledger.spent("run") == {CHEAP: 15}


def test_the_key_holds_its_own_value_only(path):
    """By its file, entry for entry; a ledger that parted from it later holds what was before."""
    written(path, 2, 1, 3)
    early = path.read_bytes()
    heads = ["", *(entry["hash"] for entry in read_entries(path))]
    for grown in range(2):
        with opened(path) as ledger:
            charge(ledger, f"more {grown}")
            found = {(n, h) for n in range(-9, 9) for h in heads if ledger.holds(n, h)}
            assert found == set(enumerate(heads))
            assert ledger.holds(ledger.length, ledger.head)
            last = ledger.length, ledger.head
        path.write_bytes(early)
    with opened(path) as ledger:
        charge(ledger, "another")
        assert (ledger.length, ledger.holds(*last)) == (last[0], False)


def test_a_stranger_has_spent_nothing(ledger):
    assert ledger.spent("nobody") == {}


@pytest.mark.parametrize("other", [{"site": "b"}, {"hypothetical": False}])
def test_the_ledger_of_another_site_or_kind_is_refused(path, other):
    content = written(path, 1)
    with pytest.raises(LedgerError, match="was opened as"):
        opened(path, **other)
    assert path.read_bytes() == content
    opened(path).close()


# What it allows


def test_reservation_above_its_budget_is_refused(ledger):
    cost = epsilon({DEAR: 50}, 1e-5)
    length = ledger.length
    with pytest.raises(PolicyRefused, match=r"δ = 1e-05 \(add/remove one record\)"):
        ledger.reserve("big", Budget(0.999 * cost, 1e-5), {DEAR: 50})
    with pytest.raises(InputError):
        ledger.reserve("big", Budget(cost, 1e-5), {DEAR: -1})
    assert ledger.length == length
    ledger.reserve("big", Budget(cost, 1e-5), {DEAR: 50})
    assert ledger.total() == (BUDGET.epsilon + cost, BUDGET.delta + 1e-5)


def test_the_same_promise_twice_is_one_and_another_is_refused(path, ledger):
    ledger.reserve("run", BUDGET, EVENTS | {SampledGaussian(0.5, 1.0): 0})
    assert (ledger.length, ledger.total()) == (2, (2.0, 1e-5))
    one = [[CHEAP.q, CHEAP.sigma, 1000]]
    others = [
        (Budget(2.5, 1e-5), EVENTS, r"\(epsilon 2\.0 there and 2\.5 now\)"),
        (Budget(2.0, 1e-4), EVENTS, r"\(delta 1e-05 there and 0\.0001 now\)"),
        (BUDGET, {CHEAP: 1000}, rf"\(events \[.+\] there and {re.escape(str(one))} now\)"),
    ]
    for budget, events, told in others:
        with pytest.raises(PolicyRefused, match=f"other terms in .*{told}.*new run name"):
            ledger.reserve("run", budget, events)
    assert ledger.length == len(read_entries(path)) == 2


def test_events_are_charged_up_to_the_reserved_number_each(ledger):
    charge(ledger, "a", 19, event=DEAR)
    with pytest.raises(BudgetExhausted, match="19 of 20 reserved events are spent"):
        charge(ledger, "b", 2, event=DEAR)
    charge(ledger, "c", 1, event=DEAR)
    with pytest.raises(BudgetExhausted):
        charge(ledger, "d", 1, event=DEAR)
    charge(ledger, "e", 1000)
    assert ledger.spent("run") == EVENTS


def test_unreserved_events_are_refused(ledger):
    length = ledger.length
    for other in ({"run": "other"}, {"event": SampledGaussian(0.01, 4.0000001)}):
        with pytest.raises(PolicyRefused, match="has not reserved"):
            charge(ledger, "a", **other)
    for count in (0, -1, True, 1.0):
        with pytest.raises(InputError, match="count is"):
            charge(ledger, "a", count)  # type: ignore[arg-type]
    assert ledger.length == length


def test_a_repeated_simulated_request_is_charged_once(ledger):
    steps = [
        ({"count": 3}, 3),
        ({"count": 3}, 3),
        ({"count": 2}, 3),
        ({"count": 3, "attempt": 1}, 3),
        ({"count": 5}, 5),
        ({"count": 5}, 5),
        ({"count": 5, "request": "1/3/x"}, 10),
        ({"count": 5, "purpose": ("gradient", "loss")}, 15),
        ({"count": 5, "purpose": ("loss", "gradient")}, 15),
        ({"count": 5, "event": DEAR}, 20),
    ]
    for asked, spent in steps:
        charge(ledger, **{"request": "1/0/x", **asked})
        assert total(ledger) == spent


def test_in_a_deployment_every_charge_is_a_new_one(path):
    with opened(path, hypothetical=False) as ledger:
        ledger.reserve("run", BUDGET, EVENTS)
        for _ in range(3):
            charge(ledger, "1/0/x", 2)
        assert total(ledger) == 6
    with opened(path, hypothetical=False) as ledger:
        charge(ledger, "1/0/x", 2)
        assert total(ledger) == 8


def test_threads_may_share_a_ledger(path, ledger):
    def work(name):
        for step in range(15):
            charge(ledger, f"{name}/{step}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total(ledger) == 60
    assert len(read_entries(path)) == 62


# Durability


def test_a_charge_is_on_the_disk_before_it_returns(path, monkeypatch):
    synced = []
    real = os.fsync

    def fsync(descriptor):
        found = os.fstat(descriptor)
        synced.append((found.st_ino, found.st_size))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    deep = path.parent / "new" / "newer" / "ledger.jsonl"
    with opened(deep, hypothetical=False) as ledger:
        # The names of the file and of every directory made for it.
        for directory in (deep.parent, deep.parent.parent, path.parent, path.parent.parent):
            assert directory.stat().st_ino in {inode for inode, _ in synced}
        ledger.reserve("run", BUDGET, EVENTS)
        for number in range(3):
            synced.clear()
            charge(ledger, str(number))
            found = deep.stat()
            assert synced == [(found.st_ino, found.st_size)]


def test_simulated_charges_reach_disk_on_close(path, monkeypatch):
    """Promises before they return; charges at the end, and at once where another process looks."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    ledger = opened(path, hypothetical=True)
    ledger.reserve("run", BUDGET, EVENTS)
    assert synced[-1] == path.stat().st_size
    synced.clear()
    for number in range(3):
        charge(ledger, str(number))
    assert synced == []
    assert len(read_entries(path)) == 5
    ledger.close()
    ledger.close()
    assert synced == [path.stat().st_size]


def test_the_last_charged_round_is_known_also_after_reopening(path):
    with opened(path) as ledger:
        assert ledger.last_round("run") == -1
        for run in ("run", "other"):
            ledger.reserve(run, BUDGET, EVENTS)
        for number in (3, 7, 5):
            charge(ledger, str(number), round_number=number)
        charge(ledger, "1", run="other")
        assert (ledger.last_round("run"), ledger.last_round("other")) == (7, 1)
    with opened(path) as ledger:
        assert (ledger.last_round("run"), ledger.last_round("other")) == (7, 1)
        assert ledger.last_round("third") == -1


def test_killed_processs_charges_are_synced_before_use(path, monkeypatch):
    written(path, 1)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    opened(path).close()
    assert synced == [path.stat().st_ino, path.parent.stat().st_ino]


@pytest.mark.filterwarnings("ignore:.*fork")  # what a process with threads is told
def test_killed_process_never_released_more_than_written(path):
    event, delay, released = SampledGaussian(0.1, 1000.0), random.Random(0), 0
    with opened(path, hypothetical=False) as ledger:
        ledger.reserve("run", Budget(50.0, 1e-5), {event: 100_000})
    for kill in range(6):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with opened(path, hypothetical=False) as ledger:
                    while True:
                        charge(ledger, "x", event=event, round_number=kill)
                        os.write(writing, b".")
            finally:
                os._exit(1)
        os.close(writing)
        for _ in range(1 + kill):
            released += len(os.read(reading, 1))
        time.sleep(0.003 * delay.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while seen := os.read(reading, 65536):
            released += len(seen)
        os.close(reading)
        with opened(path, hypothetical=False) as ledger:
            spent = ledger.spent("run").get(event, 0)
        # A kill between writing and releasing costs one event.
        assert released <= spent <= released + kill + 1
    assert released >= sum(range(1, 7))


def python(script, *arguments):
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


def test_two_processes_cannot_have_it_open(path, ledger):
    script = """
import sys
from pathlib import Path
from fedpact.common.errors import LedgerError
from fedpact.privacy.ledger.hash_chain import read_all
from fedpact.privacy.ledger.hash_chain import read_entries
from fedpact.privacy.ledger.ledger import Ledger
path = Path(sys.argv[1])
try:
    Ledger(path, "a", hypothetical=True)
except LedgerError as error:
    print(error, len(read_entries(path)))
"""
    said = python(script, str(path)).stdout
    assert f"ledger {path} is open elsewhere" in said
    assert "wait until the other one ends" in said
    assert said.split()[-1] == "2"
    with pytest.raises(LedgerError, match="open elsewhere"):
        opened(path)
    charge(ledger, "still mine")
    ledger.close()
    opened(path).close()
    with pytest.raises(LedgerError, match="is closed"):
        charge(ledger, "no longer")


@contextmanager
def largest_file(size):
    """No file of this process grows beyond `size` bytes: writes stop there, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 1, 100])
def test_a_full_disk_stops_the_charge_and_loses_nothing(path, ledger, room):
    charge(ledger, "a", 2)
    content, head = path.read_bytes(), ledger.head
    for _ in range(2):
        with largest_file(len(content) + room), pytest.raises(LedgerError, match="make room"):
            charge(ledger, "b", 3)
        assert path.read_bytes() == content
        assert (total(ledger), ledger.head, ledger.length) == (2, head, 3)
    charge(ledger, "b", 3)
    assert total(ledger) == 5
    ledger.close()
    with opened(path) as again:
        assert total(again) == 5


def test_a_full_disk_stops_opening_and_reserving(path, ledger):
    content = path.read_bytes()
    with largest_file(len(content) + 7), pytest.raises(LedgerError, match="make room"):
        ledger.reserve("other", BUDGET, EVENTS)
    assert ledger.total() == (2.0, 1e-5)
    new = path.with_name("new.jsonl")
    with largest_file(20), pytest.raises(LedgerError, match="make room"):
        opened(new)
    with opened(new) as other:
        assert other.length == 1
    for unusable in (Path("/dev/full"), path.parent, path / "below a file"):
        with pytest.raises(LedgerError, match="cannot be used"):
            opened(unusable)
    with pytest.raises(LedgerError, match="cannot be read"):
        read_entries(path.with_name("none.jsonl"))


def test_a_disk_that_fails_altogether_closes_the_ledger(path, monkeypatch):
    ledger = opened(path, hypothetical=False)
    ledger.reserve("run", BUDGET, EVENTS)
    charge(ledger, "a", 2)

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(LedgerError, match="nothing was released"):
            charge(ledger, "b", 3)
    assert total(ledger) == 2
    with pytest.raises(LedgerError, match="open it again"):
        charge(ledger, "c")
    ledger.close()
    with opened(path, hypothetical=False) as again:
        assert total(again) >= 2
        charge(again, "c")


def replaced(path):
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


def without_its_folder(path):
    path.parent.rename(path.parent.with_name("elsewhere"))
    path.parent.touch()


CHANGES = {
    "removed": Path.unlink,
    "moved": lambda path: path.rename(path.with_name("elsewhere")),
    "replaced": replaced,
    "folder moved": lambda path: path.parent.rename(path.parent.with_name("elsewhere")),
    "folder lost": without_its_folder,
    "shortened": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "extended": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_file_that_others_changed_is_written_to_no_more(path, ledger, how):
    CHANGES[how](path)
    with pytest.raises(LedgerError, match="changed, moved or replaced"):
        charge(ledger, "a")
    assert total(ledger) == 0


# Damage


def test_any_changed_byte_is_noticed(path):
    content = written(path, 2, 1, 3)
    last = content[:-1].rindex(b"\n") + 1
    flips = random.Random(0)
    # The break before the last line is left to the next test.
    for place in range(0, last - 1, 3):
        damaged = bytearray(content)
        damaged[place] ^= flips.randint(1, 255)
        path.write_bytes(damaged)
        with pytest.raises(LedgerError, match=r"line \d is unreadable or was altered"):
            read_entries(path)
    # A sample through the constructor, which leaves the file as it found it.
    for place in range(0, last, 97):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(LedgerError, match="restore the file from a backup"):
            opened(path)
        assert path.read_bytes() == damaged


def test_a_changed_byte_in_the_last_line_is_noticed_or_counted(path):
    content = written(path, 2, 1, 3)
    last = content[:-1].rindex(b"\n") + 1
    flips, refused = random.Random(0), 0
    for place in range(last - 1, len(content)):
        damaged = bytearray(content)
        damaged[place] ^= flips.randint(1, 255)
        path.write_bytes(damaged)
        try:
            with opened(path) as ledger:
                spent = ledger.spent("run")
        except LedgerError:
            refused += 1
            continue
        # Without the last break, two lines are one that cannot be read: 1 and 3 dear events.
        # Where the count itself is hit, the largest charge so far counts.
        cheap, dear = (2, 4) if place < last else (3, 3 if b'"count": 3,' in damaged else 2)
        assert spent[CHEAP] == cheap
        assert spent[DEAR] >= dear
    assert 0 < refused < len(content) - last


def test_lines_taken_out_moved_or_repeated_are_noticed(path):
    lines = written(path, 2, 1, 3).splitlines(keepends=True)
    damaged = [lines[:k] + lines[k + 1 :] for k in range(len(lines) - 1)]
    damaged += [[*lines[:k], lines[k], *lines[k:]] for k in range(len(lines))]
    damaged += [[*lines[:2], lines[3], lines[2], *lines[4:]], lines[::-1]]
    for found in damaged:
        path.write_bytes(b"".join(found))
        with pytest.raises(LedgerError, match="altered"):
            opened(path)


def test_a_line_of_another_ledger_or_in_other_words_is_noticed(path, monkeypatch):
    content = written(path, 2, 1, 3)
    # A minute later, so that no line of the other is one of this ledger's.
    later = time.time() + 60
    monkeypatch.setattr(hash_chain.time, "time", lambda: later)
    other = written(path.with_name("other.jsonl"), 2, 1, 3)
    lines, others = content.splitlines(keepends=True), other.splitlines(keepends=True)
    # The same JSON with another blank, and a line that is sound in itself.
    damaged = [content.replace(b'"kind": "charge"', b'"kind":  "charge"')]
    damaged += [b"".join([*lines[:k], *others[k:]]) for k in range(1, len(lines))]
    for found in damaged:
        path.write_bytes(found)
        with pytest.raises(LedgerError, match="altered"):
            opened(path)


def test_a_shortened_ledger_shows_another_head_and_length(path):
    lines = written(path, 2, 1, 3).splitlines(keepends=True)
    with opened(path) as ledger:
        head, length = ledger.head, ledger.length
    path.write_bytes(b"".join(lines[:-1]))
    with opened(path) as ledger:
        assert (ledger.head, ledger.length) == (json.loads(lines[-2])["hash"], length - 1)
        charge(ledger, "fork", 3, event=DEAR)
        assert ledger.length == length
        assert ledger.head != head


def test_a_line_cut_anywhere_is_counted_as_spent(path):
    content = written(path, 2, 1, 3)
    last = content[:-1].rindex(b"\n") + 1
    for cut in range(last + 1, len(content)):
        path.write_bytes(content[:cut])
        with opened(path) as ledger:
            # The dear event, as often as the largest charge so far, or as the remains say.
            least = 3 if b'"count": 3,' in content[last:cut] else 2
            assert ledger.spent("run")[CHEAP] == 3
            assert least <= ledger.spent("run")[DEAR] <= 3
            spent = ledger.spent("run")
        assert path.read_bytes().startswith(content[:cut])
        if cut % 40 == 0:
            with opened(path) as ledger:
                assert ledger.spent("run") == spent
                charge(ledger, "next", 1)
            assert read_entries(path)[-1]["request"] == "next"


def test_a_whole_line_without_its_end_counts_as_itself(path):
    content = written(path, 2, 3)
    path.write_bytes(content[:-1])
    with opened(path) as ledger:
        assert ledger.spent("run") == {CHEAP: 2, DEAR: 3}
        charge(ledger, "next", 1)
    assert path.read_bytes().startswith(content)
    with opened(path) as ledger:
        assert ledger.spent("run") == {CHEAP: 3, DEAR: 3}


@pytest.mark.parametrize("tail", [b"\0" * 300, b"{", b"\xff\xfe\n", b"[" * 99999, b"\n", b"\r"])
def test_whatever_a_crash_left_at_the_end_is_counted(path, tail):
    content = written(path, 4, 1)
    path.write_bytes(content + tail)
    assert len(read_entries(path)) == 4
    with opened(path) as ledger:
        assert ledger.spent("run") == {CHEAP: 4, DEAR: 5}
        entry = read_entries(path)[-1]
        assert entry["kind"] == "torn"
        assert entry["charges"] == [["run", DEAR.q, DEAR.sigma, 4]]
    with opened(path) as ledger:
        assert ledger.spent("run") == {CHEAP: 4, DEAR: 5}
    assert path.read_bytes().startswith(content + tail)


def test_torn_line_counts_in_every_run_within_reservation(path):
    with opened(path) as ledger:
        ledger.reserve("run", BUDGET, EVENTS)
        ledger.reserve("full", BUDGET, {DEAR: 6})
        ledger.reserve("idle", BUDGET, {CHEAP: 1, DEAR: 1})
        charge(ledger, "a", 18, event=DEAR)
        charge(ledger, "a", 6, event=DEAR, run="full")
    with path.open("ab") as file:
        file.write(b'{"number": 6, "count": 7, ')
    with opened(path) as ledger:
        # 18 dear ones once more: the 2 that are left, and 16 of the next.
        assert ledger.spent("run") == {DEAR: 20, CHEAP: 16}
        assert ledger.spent("full") == {DEAR: 6}
        assert ledger.spent("idle") == {DEAR: 1, CHEAP: 1}
        assert ledger.total() == (6.0, pytest.approx(3e-5, rel=1e-15))
        with pytest.raises(BudgetExhausted):
            charge(ledger, "b", 1, event=DEAR)


def test_a_torn_line_that_is_damaged_later_is_noticed(path):
    content = written(path, 4, 1)
    path.write_bytes(content + b'{"number"')
    opened(path).close()
    healed = path.read_bytes()
    for damaged in (
        healed.replace(b'{"number"\n', b'{"numbes"\n'),
        healed.replace(b'{"number"\n', b""),
        healed.replace(b'{"number"\n', b'{"number"\n\n'),
    ):
        assert damaged != healed
        path.write_bytes(damaged)
        with pytest.raises(LedgerError, match="altered"):
            opened(path)


def test_crash_while_counting_a_torn_line_is_a_torn_line(path, monkeypatch):
    content = written(path, 4, 1) + b'{"number"'
    path.write_bytes(content)
    with largest_file(len(content) + 50), pytest.raises(LedgerError, match="make room"):
        opened(path)
    assert path.read_bytes() == content
    path.write_bytes(content + b"\n")
    with opened(path) as ledger:
        assert ledger.spent("run") == {CHEAP: 4, DEAR: 5}


@pytest.mark.parametrize("times", [2, 3])
def test_repeated_crashes_each_leave_a_counted_line(path, times):
    content = written(path, 4, 1) + b'{"number": 4, "kind": "cha'
    for _ in range(times - 1):
        path.write_bytes(content)
        opened(path).close()
        # The power fails in the midst of the line that counts the lines before it.
        content = path.read_bytes()[:-40]
    path.write_bytes(content)
    assert (len(read_entries(path)), read_all(path)[1]) == (4, True)
    with opened(path) as ledger:
        # Each as the largest charge: nobody can tell any more that one charged nothing.
        assert ledger.spent("run") == {CHEAP: 4, DEAR: 1 + 4 * times}
        charge(ledger, "next", 1)
    healed = path.read_bytes()
    assert healed.startswith(content)
    with opened(path) as ledger:
        assert ledger.spent("run") == {CHEAP: 5, DEAR: 1 + 4 * times}
    for line in content.split(b"\n")[-times:]:
        path.write_bytes(healed.replace(line + b"\n", b""))
        with pytest.raises(LedgerError, match="altered"):
            opened(path)


@pytest.mark.parametrize("content", [b"notes\n", b"{}\n", b"\n", b'{"number": 0, ', b"\0" * 10])
def test_a_file_that_is_not_a_ledger_is_left_unchanged(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(LedgerError, match="line 1 is unreadable"):
        opened(path)
    assert path.read_bytes() == content


def test_an_empty_file_is_a_new_ledger(path):
    path.parent.mkdir()
    path.touch()
    with opened(path) as ledger:
        assert (ledger.length, ledger.total()) == (1, (0.0, 0.0))


def altered(path, change):
    """Change the last entry and mend its hash, as a version of fedpact to come might write it."""
    lines = path.read_bytes().splitlines()
    entry = json.loads(lines[-1])
    change(entry)
    entry["hash"] = hash_of(entry)
    path.write_bytes(b"\n".join([*lines[:-1], json.dumps(entry).encode(), b""]))


def test_entries_of_another_form_are_refused(path):
    changes = [
        lambda entry: entry.pop("sigma"),
        lambda entry: entry.update(sigma=-1.0),
        lambda entry: entry.update(run="never reserved"),
        lambda entry: entry.update(count="3"),
    ]
    for change in changes:
        path.unlink(missing_ok=True)
        written(path, 1)
        altered(path, change)
        with pytest.raises(LedgerError, match="unknown form"):
            opened(path)
