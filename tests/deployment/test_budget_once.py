"""No budget is spent twice: ledgers that are put back, sites that run twice, full disks, policies.

The server is honest in all of these: what a server and a site's owner can do together is said in
docs/how-to/operate-a-deployment.md.
"""

import errno
import json
import os
import random
import shutil
import sqlite3
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity
from tests.deployment.grid import FLOATS, SECURE, Node, content, forget, stored
from tests.deployment.test_site import change, charged, task_of
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.common.errors import DataError, FedpactError, LedgerError
from fedpact.common.messages import Refusal, Reply, Task, from_bytes, to_bytes
from fedpact.deployment import store
from fedpact.deployment.check import check_site
from fedpact.deployment.flower import flower_records
from fedpact.deployment.flower.site_process import respond
from fedpact.deployment.site import Site, answer
from fedpact.deployment.store import LastReply, Store, read_store
from fedpact.privacy.ledger.hash_chain import read_entries
from fedpact.simulation.secure_aggregation import keys

STEPS = 2  # local iterations of a round: what each round is charged


def told(site, *numbers, seen=(0, "")):
    """The answers to rounds' tasks, each after the one before has been seen by the server."""
    answers = []
    for number in numbers:
        answers.append(from_bytes(site.handle(task_of(site, number), seen)))
        if isinstance(answers[-1], Reply):
            seen = answers[-1].ledger_length, answers[-1].ledger_head
    return answers


def place(reply):
    return reply.ledger_length, reply.ledger_head


def codes(answers):
    return ["" if isinstance(each, Reply) else each.code for each in answers]


# A ledger that is put back


@pytest.mark.parametrize("without", [None, "ledger.jsonl.seen", "site.db"])
def test_an_older_ledger_with_later_files_does_not_open(site_dir, tmp_path, without):
    """Either of the two that name a later entry is enough."""
    with Site(site_dir) as site:
        told(site, 1)
        shutil.copy(site_dir / "ledger.jsonl", tmp_path / "backup")
        told(site, 2, 3)
    shutil.copy(site_dir / "ledger.jsonl", tmp_path / "newest")
    shutil.copy(tmp_path / "backup", site_dir / "ledger.jsonl")
    if without:
        (site_dir / without).unlink()
    with pytest.raises(LedgerError, match=r"put back to an older state.*Put back the ledger as it"):
        Site(site_dir)
    # It is as it was put there: nothing is promised or charged in it.
    assert (site_dir / "ledger.jsonl").read_bytes() == (tmp_path / "backup").read_bytes()
    shutil.copy(tmp_path / "newest", site_dir / "ledger.jsonl")
    with Site(site_dir) as site:
        assert codes(told(site, 4)) == [""]


@pytest.mark.parametrize("command", ["verify", "show", "export"])
def test_no_receipt_is_made_of_an_older_ledger(site_dir, tmp_path, command):
    """It is intact, and lacks what the file beside it names: so it said of less than was spent."""
    out = ["--out", str(tmp_path / "receipt.json")] if command == "export" else []
    with Site(site_dir) as site:
        told(site, 1)
        backup = (site_dir / "ledger.jsonl").read_bytes()
        # A site that runs has both files read, too.
        assert CliRunner().invoke(app, ["ledger", command, str(site_dir), *out]).exit_code == 0
        told(site, 2)
    (site_dir / "ledger.jsonl").write_bytes(backup)
    (tmp_path / "receipt.json").unlink(missing_ok=True)
    done = CliRunner().invoke(app, ["ledger", command, str(site_dir), *out])
    assert isinstance(done.exception, LedgerError)
    assert "put back to an older state" in str(done.exception)
    assert not (tmp_path / "receipt.json").exists()


@pytest.mark.parametrize(
    ("left", "how"), [("reply", "fresh"), ("reply", "missing"), ("opened", "emptied")]
)
def test_site_that_released_does_not_open_without_its_ledger(site_dir, tmp_path, how, left):
    """One entry of its store is enough to tell."""
    unused = Path(shutil.copytree(site_dir, tmp_path / "unused"))
    block = _a_reply(tmp_path, unused) if left == "reply" else b'["run", 1, 0, []]'
    with closing(Store(site_dir)) as store:
        store.write(left, block)
    if how == "emptied":
        (site_dir / "ledger.jsonl").write_bytes(b"")
    if how == "fresh":
        # Opened, and nothing promised in it.
        change(unused / "policy.toml", "epsilon_ever = 2.0", "epsilon_ever = 1.0")
        with pytest.raises(FedpactError):
            Site(unused)
        shutil.copy(unused / "ledger.jsonl", site_dir / "ledger.jsonl")
    with pytest.raises(LedgerError, match=r"released before|paid for a stored reply"):
        Site(site_dir)
    assert (site_dir / "ledger.jsonl").exists() == (how != "missing")


def _a_reply(tmp_path, site_dir):
    other = Path(shutil.copytree(site_dir, tmp_path / "other"))
    with Site(other) as site:
        told(site, 1)
    return stored(other)


def test_a_snapshot_of_the_whole_site_refuses_before_it_charges(site_dir, tmp_path):
    """Nothing on its own disk can tell; the server has seen a later ledger."""
    with Site(site_dir) as site:
        told(site, 1)
    snapshot = Path(shutil.copytree(site_dir, tmp_path / "snapshot"))
    with Site(site_dir) as site:
        seen = place(told(site, 2, 3)[-1])
    with Site(snapshot) as site:
        refusal = from_bytes(site.handle(task_of(site, 4), seen))
        assert refusal == Refusal(site.run, 4, "site-00", "ledger")
        # Nor may the server take it back, or somebody play an old question of its to the site.
        assert codes(told(site, 2)) == ["ledger"]
    assert charged(snapshot) == STEPS
    # A restart does not forget it, and neither does another run on the same records.
    with pytest.raises(LedgerError, match="by the word of the server of run"):
        Site(snapshot)
    run = site.run
    change(snapshot / "federation.toml", f'run = "{run}"', 'run = "another"')
    change(snapshot / "policy.toml", "epsilon_ever = 2.0", "epsilon_ever = 4.0")
    change(snapshot / "policy.toml", "delta_ever = 1e-05", "delta_ever = 2e-05")
    with pytest.raises(LedgerError, match="by the word of the server of run"):
        Site(snapshot)
    # The right ledger is all that it takes.
    change(snapshot / "federation.toml", 'run = "another"', f'run = "{run}"')
    shutil.copy(site_dir / "ledger.jsonl", snapshot / "ledger.jsonl")
    with Site(snapshot) as site:
        assert codes(told(site, 4, seen=seen)) == [""]


def test_an_older_word_takes_nothing_back_of_a_later_one(site_dir, tmp_path):
    """Whoever relays messages can keep a question, and play it after a later one."""
    ledgers = {}
    with Site(site_dir) as site:
        for number in (1, 2, 3):
            ledgers[number] = place(told(site, number)[0]), (site_dir / "ledger.jsonl").read_bytes()
            if number == 1:
                snapshot = Path(shutil.copytree(site_dir, tmp_path / "snapshot"))
    with Site(snapshot) as site:
        for seen, _ in (ledgers[3], ledgers[2]):
            assert codes(told(site, 4, seen=seen)) == ["ledger"]
    (snapshot / "ledger.jsonl").write_bytes(ledgers[2][1])
    with pytest.raises(LedgerError, match=f"lacks number {ledgers[3][0][0]}"):
        Site(snapshot)
    (snapshot / "ledger.jsonl").write_bytes(ledgers[3][1])
    Site(snapshot).close()


def test_false_server_entries_do_not_replace_the_sites_own(site_dir):
    """Its owner removes that word, and an older ledger still does not open."""
    with Site(site_dir) as site:
        told(site, 1)
        older = (site_dir / "ledger.jsonl").read_bytes()
        told(site, 2)
        assert codes(told(site, 3, seen=(3, "f" * 64))) == ["ledger"]
    path = site_dir / "ledger.jsonl.seen"
    assert "server" in path.read_text()
    path.unlink()
    forget(site_dir, "reply")
    Site(site_dir).close()
    (site_dir / "ledger.jsonl").write_bytes(older)
    with pytest.raises(LedgerError, match="by the word of this site"):
        Site(site_dir)


def test_no_restore_or_copy_releases_more_than_reserved(make, tmp_path):
    """Random restores and copies between rounds; counted are releases, in all copies together."""
    home = make(tmp_path / "d", rounds=6) / "sites" / "site-00"
    for seed in range(2):
        choose = random.Random(seed)
        copies = [Path(shutil.copytree(home, tmp_path / f"{seed}-0"))]
        released, seen = set(), (0, "")
        for number in range(1, 9):
            if choose.random() < 0.5:
                new = tmp_path / f"{seed}-{number}"
                copies.append(Path(shutil.copytree(choose.choice(copies), new)))
            where = choose.choice(copies)
            try:
                with Site(where) as site:
                    (given,) = told(site, number, seen=seen)
            except LedgerError:
                continue
            if isinstance(given, Reply):
                seen = place(given)
                released.add(given.vectors["w"].numpy().tobytes())
        # Every copy by itself would have released up to six rounds of eight.
        assert 1 <= len(released) <= 6
        # Each release is in the ledger that goes on, and in copies of it that were made since.
        ledgers = [copy / "ledger.jsonl" for copy in copies if (copy / "ledger.jsonl").exists()]
        going_on = [p for p in ledgers if _holds(p, *seen)]
        assert {charged(p.parent) for p in going_on} == {STEPS * len(released)}


def _holds(path, length, head):
    entries = read_entries(path)
    return len(entries) >= length and entries[length - 1]["hash"] == head


def test_a_question_says_what_its_signature_covers(deployment):
    """Whoever relays it can neither take out nor alter what the server has seen."""
    node = Node(10, deployment / "sites" / "site-00")
    server = keys.read_private_key(deployment / "server" / "server.key")
    block = to_bytes(task_of(node.site))
    seen, agreed = (node.site.ledger.length + 1, "a" * 64), node.site.agreed
    signature = keys.sign(server, keys.signing_context("site-00", seen, agreed), block)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 10

    def given(record):
        message = Message(record, 10, "train")
        message.metadata.__dict__["_message_id"] = "x"
        return content(respond(node.site, node.key, message)).code

    try:
        for other in ((0, ""), (1, "a" * 64), (seen[0], "b" * 64), (seen[0], ""), ("1", 2), (1, 1)):
            assert given(flower_records.to_record(block, signature, other, agreed)) == "unsigned"
        assert given(flower_records.to_record(block, signature, seen)) == "unsigned"
        assert given(flower_records.to_record(block, signature, seen, agreed)) == "ledger"
    finally:
        node.site.close()
    assert charged(node.directory) == 0


@pytest.mark.parametrize("seen", [(-1, "a" * 64), (1, ""), (0, "a"), (1, "A" * 64), (1, "a" * 65)])
def test_a_ledger_that_cannot_be_is_nobodys_word(site_dir, seen):
    with Site(site_dir) as site:
        block, said = answer(site, to_bytes(task_of(site)), seen)
        assert from_bytes(block).code == "error"
        assert "says that this site's ledger had" in said
        assert codes(told(site, 1)) == [""]


@pytest.mark.parametrize("damage", [b"no database\n" * 500, b"SQLite format 3\0" + b"\xff" * 4080])
def test_a_damaged_store_is_reported_and_reserves_nothing(site_dir, damage):
    (site_dir / "site.db").write_bytes(damage)
    with pytest.raises(DataError, match=r"site\.db cannot be understood.*or move it away"):
        Site(site_dir)
    assert not (site_dir / "ledger.jsonl").exists()
    (site_dir / "site.db").unlink()
    (site_dir / "site.db").mkdir()
    with pytest.raises(DataError, match=r"site\.db cannot be understood .it is a folder"):
        Site(site_dir)
    (site_dir / "site.db").rmdir()
    Site(site_dir).close()


@pytest.mark.parametrize(
    "reply",
    [b"\xff\xfe", b"", b"[]\n", b'["run", 1, 0]\n', b"[1, 2, 3, 4]\nx", b'["r", 1, 0, "d"]\nnone'],
)
def test_an_invalid_stored_reply_is_reported(site_dir, reply):
    with closing(Store(site_dir)) as store:
        store.write("reply", reply)
    with pytest.raises(DataError, match=r"site\.db cannot be understood"):
        Site(site_dir)


@pytest.mark.parametrize(
    "note",
    [
        *(b"\xff", b"", b"[]", b"7", b'{"who": "me"}', b'{"who": "me", "entry": 1}'),
        *(
            b'{"who": "me", "entry": %s}' % e
            for e in (b'[1, "short"]', b'["1", ""]', b'[true, ""]')
        ),
    ],
)
def test_an_unreadable_ledger_note_is_reported(site_dir, note):
    (site_dir / "ledger.jsonl.seen").write_bytes(note)
    with pytest.raises(LedgerError, match=r"ledger\.jsonl\.seen is unreadable"):
        Site(site_dir)


def test_no_ledger_is_begun_on_a_disk_that_is_not_mounted(site_dir, tmp_path):
    """What other runs on the records have spent is in the ledger that is not there now."""
    ledger = tmp_path / "mount" / "ledgers" / "north.jsonl"
    change(site_dir / "site.toml", '"ledger.jsonl"', json.dumps(str(ledger)))
    with pytest.raises(LedgerError, match="in a folder that does not exist: mount its disk"):
        Site(site_dir)
    assert any("mount its disk" in problem for problem in check_site(site_dir).problems)
    assert not (tmp_path / "mount").exists()
    ledger.parent.mkdir(parents=True)
    with Site(site_dir):
        assert ledger.exists()


# What the server makes of it


@pytest.fixture
def federation(federate):
    """federation(**plan) -> (run, nodes, directory); run.refused() carries it out."""
    patience = {"round_seconds": 30, "resend_seconds": 10, "join_seconds": 0.2, "retries": 0}

    def new(**plan):
        run = federate({"patience": patience}, **{"rounds": 5, **FLOATS, **plan})
        return run, run.nodes, run.directory

    return new


@pytest.mark.parametrize(
    "plan", [pytest.param({}, marks=pytest.mark.slow), SECURE], ids=["plain", "secure"]
)
def test_of_two_alternating_copies_only_one_continues(federation, tmp_path, plan):
    """They part in round 2, which the copy answers: from then on the server has seen its ledger."""
    run, nodes, _ = federation(rounds=4, **plan)
    node = nodes[1]
    original, copy = node.directory, tmp_path / "copy"

    def behave(message, answer):
        given, question = answer(), node.asked
        refused = isinstance(content(given), Refusal)
        ends = refused or isinstance(question, Task) or question.step == "open"
        if ends and question.round < 4:
            if not copy.exists():
                node.site.close()
                shutil.copytree(original, copy)
                node.restart(original)
            # It is there anew, for the next round.
            node.since = f"after {question.round}"
            node.restart(copy if question.round in (1, 3) else original)
        return given

    node.behave = behave
    assert run.refused() == [{}, {}, {"site-01": "ledger"}, {}]
    # The copy's ledger has round 1 of the original, 2 and 4.
    assert (charged(original), charged(copy)) == (STEPS, 3 * STEPS)
    with pytest.raises(LedgerError, match="a copy of a site that runs elsewhere"):
        Site(original)


def test_a_reply_with_a_shorter_ledger_is_rejected(federation):
    """Of a site that does not look; it takes part again with the ledger that was seen."""
    run, nodes, _ = federation(rounds=4)
    node = nodes[0]
    node.behave = lambda message, answer: (
        node.change(message, answer, ledger_length=1) if node.asked.round in (2, 3) else answer()
    )
    rejected = {"site-00": "rejected: ledger"}
    assert run.refused() == [{}, rejected, rejected, {}]


# The owner's policy


TIGHTER = [
    ("epsilon_per_run = 2.0", "epsilon_per_run = 1.9"),
    ("delta_per_run = 1e-05", "delta_per_run = 9e-06"),
    ("epsilon_ever = 2.0", "epsilon_ever = 1.9"),
    ("delta_ever = 1e-05", "delta_ever = 9e-06"),
    ('releases = ["gradient"]', 'releases = ["loss"]'),
    ('algorithms = ["fedavg"]', "algorithms = []"),
    ("smallest_sigma = ", "smallest_sigma = 1"),
    ("epsilon_ever = 2.0", "epsilon_ever = nan"),
    ("epsilon_ever = 2.0", "epsilon_evr = 2.0"),
]


@pytest.mark.parametrize(("old", "new"), TIGHTER)
def test_a_policy_that_is_tightened_counts_in_a_run_under_way(site_dir, old, new):
    """From the next question, repeated ones too, and from the next opening; and no sooner."""
    with Site(site_dir) as site:
        first = task_of(site, 1)
        assert codes(told(site, 1, 2)) == ["", ""]
        second = task_of(site, 2)
        change(site_dir / "policy.toml", old, new)
        assert codes(told(site, 3)) == ["policy"]
        for repeated in (first, second):
            assert from_bytes(site.handle(repeated)).code == "policy"
        change(site_dir / "policy.toml", new, old)
        assert codes(told(site, 3)) == [""]
    change(site_dir / "policy.toml", old, new)
    with pytest.raises(FedpactError, match="site's policy"):
        Site(site_dir)
    assert charged(site_dir) == 3 * STEPS


def test_a_policy_that_is_taken_away_counts_too(site_dir):
    with Site(site_dir) as site:
        told(site, 1)
        (site_dir / "policy.toml").unlink()
        assert codes(told(site, 2)) == ["policy"]
    assert charged(site_dir) == STEPS


def test_tightened_policy_opens_no_sum_in_its_round(federation):
    run, nodes, _ = federation(**SECURE, rounds=2)
    heard = []

    def behave(message, answer):
        if (nodes[0].asked.round, nodes[0].asked.step) == (2, "open"):
            change(nodes[0].directory / "policy.toml", 'algorithms = ["fedavg"]', "algorithms = []")
        given = answer()
        heard.append(content(given))
        return given

    nodes[0].behave = behave
    run.refused()
    assert isinstance(heard[-1], Refusal)
    assert heard[-1].code == "policy"


# A full disk


def test_without_space_for_a_reply_nothing_is_charged(make, tmp_path, monkeypatch):
    directory = make(tmp_path / "d", model="mlp", rounds=4) / "sites" / "site-00"
    with Site(directory) as site:
        w = {"w": torch.zeros(9610)}
        assert isinstance(from_bytes(site.handle(task_of(site, 1, vectors=w))), Reply)
        real = os.posix_fallocate

        def full(descriptor, offset, length):
            # The ledger has room for its lines, and a reply, of 38,440 bytes, has none.
            if length > 2**17:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor, offset, length)

        for number in (2, 3):
            block = to_bytes(task_of(site, number, vectors=w))
            with monkeypatch.context() as patched:
                patched.setattr(os, "posix_fallocate", full)
                given, said = answer(site, block)
            assert from_bytes(given).code == "error"
            assert "nothing is charged; free this space" in said
        assert charged(directory) == STEPS
        # With room again it goes on, and nothing is left over of what was taken.
        assert isinstance(from_bytes(site.handle(task_of(site, 4, vectors=w))), Reply)
    assert not [*directory.rglob("*.partial"), *directory.rglob("*.room")]


def test_a_commit_waits_for_the_disk_and_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite3, "connect", sqlite3.connect.func)
    with closing(Store(tmp_path)) as store:
        extra = 3
        assert store._db.execute("PRAGMA synchronous").fetchone() == (extra,)


class Disk:
    """Fails from the k-th operation of those that may find no room, until it is mended."""

    def __init__(self, monkeypatch):
        self.left = None
        for owner, name in ((os, "posix_fallocate"), (os, "fsync"), (Path, "replace")):
            monkeypatch.setattr(owner, name, self.failing(getattr(owner, name)))
        execute = self.failing(sqlite3.Connection.execute, sqlite3.OperationalError("disk is full"))
        made = type("Failing", (sqlite3.Connection,), {"execute": lambda *args: execute(*args)})
        connect = partial(sqlite3.connect, factory=made)
        monkeypatch.setattr(sqlite3, "connect", connect)

    def failing(self, real, error=None):
        def operation(*arguments):
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments)

        return operation


# It remembers something; test_kills.py is of one that charges twice in a round, too.
def test_disk_failure_wastes_at_most_one_rounds_charge(make, tmp_path, monkeypatch):
    """It fails at each of a round's operations in turn and stays so; the site is asked again and
    again, and started again by what looks after it; then the disk is mended."""
    home = make(tmp_path / "d", algorithm="scaffold", rounds=9, settings={}) / "sites" / "site-00"
    with Site(home) as site:
        rounds(site, 1, [])
    each, disk = charged(home), Disk(monkeypatch)
    for k in range(40):
        directory = Path(shutil.copytree(home, tmp_path / str(k)))
        delivered = [1]
        with Site(directory) as site:
            disk.left = k
            rounds(site, 2, delivered)
            if disk.left >= 0:
                break
            rounds(site, 3, delivered)
        with suppress(FedpactError, OSError), Site(directory) as site:
            rounds(site, 4, delivered)
        disk.left = None
        with Site(directory) as site:
            rounds(site, 5, delivered)
        assert delivered[-1] == 5
        assert charged(directory) <= each * (len(delivered) + 1)
        shutil.rmtree(directory)
    # Room, each charge, the note, and what SQLite is asked for.
    assert 10 <= k < 39
    disk.left = None


def test_room_and_a_readable_store_last_while_a_site_computes(make, tmp_path, monkeypatch):
    home = make(tmp_path / "d", algorithm="scaffold", rounds=5, settings={}) / "sites" / "site-00"
    found, write = [], store.StoreSlot.write

    def look(oracle, *about):
        found.append((home / "site.db.room").exists())
        assert read_store(home, "reply") is not None
        return oracle(*about)

    def write_long(memory, *content):
        """As of a long model: more than SQLite keeps in memory until a commit."""
        write(memory, *content, bytes(2**22))

    monkeypatch.setattr(store.StoreSlot, "write", write_long)
    monkeypatch.setattr(store, "_WAIT_SECONDS", 0.01)
    with Site(home) as site:
        rounds(site, 1, [])
        site._client._oracle = partial(look, site._client._oracle)
        rounds(site, 2, [], included=1)
    assert found == [True]


def rounds(site, number, delivered, included=-1):
    """Ask for a round, twice; `delivered` grows where there is a reply."""
    said = site.plan.method.task(site.plan.method.init(torch.zeros(650)))
    for _ in range(2):
        changes = {"vectors": said.vectors, "numbers": said.numbers}
        block, _ = answer(site, to_bytes(task_of(site, number, included, **changes)))
        if isinstance(from_bytes(block), Reply) and number not in delivered:
            delivered.append(number)


def test_after_a_commit_that_failed_the_site_stops_and_says_so(site_dir, monkeypatch):
    with Site(site_dir) as site:
        told(site, 1)
        monkeypatch.setattr(
            LastReply, "keep", lambda *_: (_ for _ in ()).throw(OSError(28, "No space"))
        )
        for number in (2, 3, 4):
            assert from_bytes(answer(site, to_bytes(task_of(site, number)))[0]).code == "error"
        assert "restart the site" in site.stopped
    assert charged(site_dir) == 2 * STEPS
