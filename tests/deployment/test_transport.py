"""The transport against a Grid in memory: who answers late, never, twice, wrongly or falsely.

The sites are real ones (deployment.site), so what comes back is what a network would carry.
"""

import math
import shutil

import pytest
import torch
from flwr.app import Message
from flwr.app.error import Error
from tests.deployment.grid import (
    FLOATS,
    PATIENCE,
    Grid,
    bound_on_spent,
    charged,
    content,
    stored,
)

from fedpact import algorithms
from fedpact.common.errors import DataError, PlanError
from fedpact.common.messages import READY, Refusal, Reply, Task, from_bytes, to_bytes
from fedpact.common.run_folder import Folder
from fedpact.deployment.admission import FARTHEST, expect_form
from fedpact.deployment.flower import flower_records
from fedpact.deployment.flower.site_process import respond
from fedpact.deployment.flower.transport import TooFewReplies
from fedpact.deployment.site import Site
from fedpact.simulation.secure_aggregation import keys
from fedpact.simulation.secure_aggregation.encoding import Form

pytestmark = pytest.mark.usefixtures("clock")


@pytest.fixture
def federation(federate, request):
    """(run, nodes): `run()` carries the deployment out and returns its records by round."""
    run = federate({"patience": PATIENCE | getattr(request, "param", {})}, rounds=3, **FLOATS)
    return run, run.nodes


def test_a_lost_reply_is_requested_again_uncharged(federation):
    run, nodes = federation

    def fails(message, answer):
        if len(nodes[2].heard) == 1:
            return Message(Error(code=3, reason="a text that nobody reads"), reply_to=message)
        return answer()

    nodes[1].behave = lambda message, answer: (
        answer() if len(nodes[1].heard) % 2 == 0 else answer() and None
    )
    nodes[2].behave = fails
    records = run()
    assert all(record.refused == {} for record in records)
    assert run.summary["status"] == "finished"
    assert [len(node.heard) for node in nodes] == [3, 6, 4]
    assert [charged(node) for node in nodes] == [6, 6, 6]


def waited(clock, nodes, run):
    """Round -> how long it waited, as the first site's next question or the end tells."""
    began, behave = {}, nodes[1].behave

    def note(message, answer):
        began.setdefault(nodes[1].asked.round, clock.now)
        return behave(message, answer)

    nodes[1].behave = note
    run()
    ends = [*list(began.values())[1:], clock.now]
    return {r: end - start for (r, start), end in zip(began.items(), ends, strict=True)}


def test_hanging_site_delays_one_round_only(federation, clock):
    run, nodes = federation
    nodes[0].hangs = True
    seconds = waited(clock, nodes, run)
    assert seconds[1] == pytest.approx(0.6, abs=0.11)
    assert seconds[2] == seconds[3] == 0
    assert [record.refused for record in run.records[1:]] == [{"site-00": "absent"}] * 3


def seen_with(node):
    """The ledger that the server says it has seen, of each question to a site, by its round."""
    found, behave = {}, node.behave

    def note(message, answer):
        found.setdefault(node.asked.round, flower_records.read_seal(message.content)[0])
        return behave(message, answer)

    node.behave = note
    return found


def test_a_site_that_hung_is_waited_for_again_once_it_answers(federation, clock):
    """What it answers then is of a round that is over; the round under way has it."""
    run, nodes = federation
    nodes[0].hangs, told = True, seen_with(nodes[0])

    def wake(message, answer):
        nodes[0].hangs = nodes[1].asked.round < 3
        return answer()

    nodes[1].behave = wake
    assert [record.refused for record in run()[1:]] == [{"site-00": "absent"}] * 2 + [{}]
    # Asked in round 1, again when that was asked long ago, and not for each round it slept through.
    assert [from_bytes(block).round for block in nodes[0].heard if block][-1] == 3
    assert from_bytes(nodes[0].heard[0]).round == 1
    assert 2 not in {from_bytes(block).round for block in nodes[0].heard}
    # Opened as it said that it was ready; then reserved, placement noted, charged for round 1: put
    # back to before that, the site would spend it anew.
    assert [told[number][0] for number in (1, 3)] == [1, 4]


class AfterTheEnd(Grid):
    """What site-00 is asked in a round is answered in the next one, up to the round `until`."""

    def __init__(self, nodes, until):
        super().__init__(nodes)
        self.until = until

    def pull_messages(self, numbers):
        return super().pull_messages([n for n in numbers if not self.is_early(n)])

    def is_early(self, number):
        message = self.waiting.get(number)
        if message is None or message.metadata.dst_node_id != 10:
            return False
        question = content(message)
        return question.algorithm != READY and question.round == self.at < self.until

    def push_messages(self, messages):
        self.at = content(messages[0]).round
        return super().push_messages(messages)


def test_late_site_is_asked_with_exponential_backoff(federate, clock):
    """Each such answer is charged for, and each such question is waited for in full; once it
    answers in time, it is asked in each round."""
    patience = {"round_seconds": 0.6, "resend_seconds": 9, "join_seconds": 0, "retries": 0}
    run, began = federate({"patience": patience}, rounds=9), clock.now
    run(lambda nodes: AfterTheEnd(nodes, until=5))
    asked = sorted({from_bytes(block).round for block in run.nodes[0].heard})
    assert asked == [1, 2, 4, 8, 9]
    assert charged(run.nodes[0]) == 2 * len(asked)
    assert [bool(record.refused) for record in run.records[1:]] == [True] * 7 + [False] * 2
    assert clock.now - began == pytest.approx(3 * 0.6, abs=1.0)


def test_a_restarted_site_is_asked_at_once(federation, clock):
    """Its predecessor took the question with it; that is not waited for."""
    run, nodes = federation
    nodes[2].behave = lambda message, answer: None
    sleep = clock.sleep

    def restart(seconds):
        sleep(seconds)
        if nodes[2].since == "first":
            nodes[2].since, nodes[2].behave = "second", lambda message, answer: answer()

    clock.sleep = restart
    seconds = waited(clock, nodes, run)
    assert all(record.refused == {} for record in run.records)
    # A look at who is there, far below the 0.15 s until any other site is asked again.
    assert seconds[1] == pytest.approx(0.1)


def lies(node):
    """(what is wrong, how a site that does it behaves)"""
    d = 650
    nan = torch.full((d,), math.nan)

    def changed(**changes):
        return lambda message, answer: node.change(message, answer, **changes)

    def of_round(number):
        def behave(message, answer):
            old = Task(**{**vars(node.asked), "round": number})
            return node.forge(message, to_bytes(Reply(**{**_reply(node, old), "round": number})))

        return behave

    stranger = keys.ec.generate_private_key(keys.ec.SECP384R1())
    return {
        # Other forms are tried below, on the check itself.
        "form": [changed(vectors={"w": torch.zeros(d + 1)})],
        "not finite": [
            changed(vectors={"w": nan}),
            changed(vectors={"w": torch.full((d,), math.inf)}),
        ],
        "far off": [changed(vectors={"w": torch.full((d,), 1e6)})],
        "weight": [changed(weight=1e9), changed(weight=math.nan), changed(weight=-1.0)],
        "another's": [changed(site="site-01")],
        "ledger": [changed(ledger_length=0), changed(ledger_length=-5)],
        "key": [
            lambda message, answer: node.forge(message, _block(answer), key=stranger),
            lambda message, answer: node.forge(message, _block(answer), name="site-01"),
        ],
        "unreadable": [
            lambda message, answer: node.forge(message, b"\x00" * 40),
            lambda message, answer: node.forge(message, node.heard[-1]),  # a task is no reply
            lambda message, answer: Message(type(answer().content)({}), reply_to=message),
        ],
        # What the last says of its ledger is believed, so that it answers no more.
        "stale": [changed(run="another"), changed(round=2**40), of_round(0)],
    }


def _block(answer):
    return flower_records.from_record(answer().content)[0]


def _reply(node, task):
    return {
        "run": task.run,
        "round": task.round,
        "site": node.site.name,
        "weight": float(node.site._terms.size),
        "vectors": {"w": torch.zeros(650)},
        "numbers": {},
        "ledger_head": "f" * 64,
        "ledger_length": 99,
    }


def test_a_bad_reply_is_rejected_and_the_round_continues(federate):
    """Each lie is told by one site in a round of its own; the two others make the round."""
    run = federate({"patience": PATIENCE}, rounds=18, **FLOATS)
    node = run.nodes[0]
    waiting = [(wrong, lie) for wrong, found in lies(node).items() for lie in found]
    node.behave = lambda message, answer: waiting[node.asked.round - 1][1](message, answer)
    assert run.refused() == [{"site-00": f"rejected: {wrong}"} for wrong, _ in waiting]
    assert run.summary["status"] == "finished"
    # What was let in is what honest sites sent: the model is finite and near the others'.
    assert run.summary["loss"] < 10
    # More forms than rounds, against the check itself.
    admission, task = run.coordinator.admission(), from_bytes(node.heard[0])
    form = expect_form(run.coordinator.workshop(), task)
    good = _reply(node, task)
    assert admission.fault("site-00", task, Reply(**good), form) is None
    for vectors in (
        {"w": torch.zeros(651)},
        {"w": torch.zeros(650).double()},
        {"w": torch.zeros(650), "more": torch.zeros(1)},
        {"w": torch.zeros(1, 650)},
        {},
    ):
        bad = Reply(**{**good, "vectors": vectors})
        assert admission.fault("site-00", task, bad, form) == "form"
    lossy = Form(form.vectors, ("loss",))
    for loss, right in ((1.0, None), (math.nan, "not finite"), (-math.inf, "not finite")):
        bad = Reply(**{**good, "numbers": {"loss": loss}})
        assert admission.fault("site-00", task, bad, form) == "form"
        assert admission.fault("site-00", task, bad, lossy) == right

    def moved(*by):
        replies = [{**good, "vectors": {"w": task.vectors["w"] + far}} for far in by]
        return {f"site-0{k}": Reply(**reply) for k, reply in enumerate(replies)}

    assert admission.outliers(task, moved(1, 1.01 * FARTHEST, 1)) == ["site-01"]
    assert admission.outliers(task, moved(1, 0.99 * FARTHEST, 1)) == []
    # Of two nobody can say which one is wrong.
    assert admission.outliers(task, moved(1, 2 * FARTHEST)) == []


# The suite has one of each kind: one that remembers, opens rounds, or has losses, and a plain one.
FORMS = ("fedavg", "feddyn", "fedproxvr", "qffl")


# fedfair has no private form, and a deployment trains no other.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FORMS else pytest.mark.slow)
        for name in sorted(set(algorithms.names()) - {"fedfair"})
    ],
)
def test_the_form_of_a_reply_is_found_for_every_algorithm(federate, name):
    """Two rounds, as the first may not know yet what later ones send.

    And no file of an answer is longer than the room that a site takes for it before it charges:
    compressed, as sites remember most then.
    """
    changes = {"settings": {"iterations": 4} if name == "ali_dpfl" else {}}
    changes |= {"compression": {"kind": "topk"}} if name in ("ali_dpfl", "feddyn") else {}
    run = federate(None, algorithm=name, **{**FLOATS, **changes}, sites=1, rounds=2)
    records, (node,) = run(), run.nodes
    assert len(records) >= 2
    assert all(record.refused == {} for record in records)
    kept = "reply", f"{node.site.run}/memory"
    reply, memory = (stored(node.directory, name) or b"" for name in kept)
    assert len(reply) <= 3 * len(node.heard[-1])
    assert len(memory) <= 6 * len(node.heard[-1])


@pytest.mark.parametrize("kind", ["int8", "topk"])
def test_impossible_compressed_replies_are_rejected(federate, kind):
    """Python's integers have no end, and torch's and the floats' have."""
    rounds = 4 if kind == "int8" else 1
    choices = {"patience": {"join_seconds": 0.0}}
    run = federate(choices, compression={"kind": kind}, sites=2, rounds=rounds)
    node = run.nodes[0]

    def lie(message, answer):
        given = answer()
        reply = content(given)
        if node.asked.round > 1:
            return overflow(message, given, reply)
        vectors = {
            name: vector.clone().fill_(-1 if vector.dtype.is_signed else 7)
            for name, vector in reply.vectors.items()
        }
        numbers = dict.fromkeys(reply.numbers, 1e30)
        return node.change(message, lambda: given, vectors=vectors, numbers=numbers)

    def overflow(message, given, reply):
        digits = (20, 100, 400)[reply.round - 2]
        block = flower_records.from_record(given.content)[0]
        (scale,) = reply.numbers.values()
        length = int.from_bytes(block[:8], "little")
        head = block[8 : 8 + length].replace(repr(scale).encode(), b"1" + b"0" * digits)
        head += b" " * (-len(head) % 8)
        return node.forge(message, len(head).to_bytes(8, "little") + head + block[8 + length :])

    node.behave = lie
    wrong = ["far off", *["unreadable"] * 3] if kind == "int8" else ["form"]
    assert run.refused() == [{"site-00": f"rejected: {why}"} for why in wrong]


def test_a_task_that_the_server_did_not_sign_is_refused(federation):
    run, nodes = federation
    task = Task(nodes[0].site.run, 1, "fedavg", {"w": torch.zeros(650)}, {})
    block = to_bytes(task)
    server = keys.read_private_key(run.directory / "server" / "server.key")
    stranger = keys.ec.generate_private_key(keys.ec.SECP384R1())
    agreed = nodes[0].site.agreed
    own, other = (keys.signing_context(name, (0, ""), agreed) for name in ("site-00", "site-01"))
    for signature in (
        keys.sign(stranger, own, block),
        keys.sign(server, other, block),
        keys.sign(server, "reply of site-00", block),
        keys.sign(server, own, block + b" "),
        b"",
    ):
        message = Message(flower_records.to_record(block, signature, agreed=agreed), 10, "train")
        message.metadata.__dict__["_message_id"] = "x"
        answer = content(respond(nodes[0].site, nodes[0].key, message))
        assert answer == Refusal("", 0, "site-00", "unsigned")
    # An error of Flower's has no record in it; the site's process goes on.
    broken = Message(Error(code=1, reason="none"), reply_to=message)
    answer = content(respond(nodes[0].site, nodes[0].key, broken))
    assert answer == Refusal("", 0, "site-00", "unsigned")
    assert charged(nodes[0]) == 0
    signature = keys.sign(server, own, block)
    good = Message(flower_records.to_record(block, signature, agreed=agreed), 10, "train")
    good.metadata.__dict__["_message_id"] = "y"
    assert isinstance(content(respond(nodes[0].site, nodes[0].key, good)), Reply)


def test_a_refusal_of_something_else_is_rejected(federate):
    """A replayed one would take the site out of this round; words are not for the record."""
    wrong = [
        ({"run": "another"}, "stale"),
        ({"round": 99}, "stale"),
        ({"site": "site-01"}, "stale"),
        ({"code": "record 17 has 0.25"}, "unreadable"),
        # Plain words, and such as the server says itself.
        ({"code": "restart with root"}, "unreadable"),
        ({"code": "absent"}, "unreadable"),
        ({"code": "rejected: ledger"}, "unreadable"),
    ]
    run = federate({"patience": PATIENCE}, rounds=len(wrong), **FLOATS)
    node = run.nodes[0]

    def behave(message, answer):
        task = node.asked
        about = {"run": task.run, "round": task.round, "site": "site-00", "code": "budget"}
        return node.forge(message, to_bytes(Refusal(**{**about, **wrong[task.round - 1][0]})))

    node.behave = behave
    assert run.refused() == [{"site-00": f"rejected: {why}"} for _, why in wrong]


def test_site_advice_is_attributed_and_hides_no_other_advice(federate):
    """A site chooses among the codes that there are: no text, and nothing in the server's name."""
    patience = {"round_seconds": 5, "join_seconds": 0, "retries": 0, "least_replies": 3}
    run = federate({"patience": patience}, rounds=1, **FLOATS)

    def saying(code, node):
        def behave(message, answer):
            refusal = Refusal(node.asked.run, node.asked.round, node.site.name, code)
            return node.forge(message, to_bytes(refusal))

        node.behave = behave

    saying("stale", run.nodes[0])
    saying("buy this", run.nodes[1])
    with pytest.raises(TooFewReplies) as told:
        run()
    text = str(told.value)
    assert "site-00: by their word a later round" in text
    assert "site-01 rejected: unreadable" in text
    assert "What was sent is not lost" in text
    assert "buy this" not in text


class Late(Grid):
    """What site-00 answers arrives once it has been asked twice: both answers at a time."""

    def pull_messages(self, numbers):
        late = [n for n in numbers if self.waiting[n].metadata.dst_node_id == 10]
        return super().pull_messages([n for n in numbers if n not in late or len(late) > 1])


def test_of_two_answers_the_first_counts(federation):
    """The second is another one, which would be rejected."""
    run, nodes = federation

    def behave(message, answer):
        nan = {"w": torch.full((650,), math.nan)}
        first = len(nodes[0].heard) % 2
        return answer() if first else nodes[0].change(message, answer, vectors=nan)

    nodes[0].behave = behave
    assert [record.refused for record in run(Late)] == [{}] * 4
    assert len(nodes[0].heard) == 6


@pytest.mark.parametrize("federation", [{"least_replies": 2}], indirect=True)
def test_run_ends_when_too_few_sites_have_budget(federation):
    """Two of three have spent theirs, and a round needs two: no later round can have enough."""
    run, nodes = federation
    for node in nodes[1:]:
        node.spend(101, 102, 103)
    records = run()
    assert run.summary["status"] == "budget"
    assert [record.round for record in records] == [0]
    assert (run.directory / "server" / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("federation", [{"least_replies": 2}], indirect=True)
def test_too_few_replies_stop_a_run_that_resumes_uncharged(federation):
    run, nodes = federation
    for node in nodes[1:]:
        node.behave = lambda message, answer, node=node: answer() if node.asked.round == 1 else None
    with pytest.raises(TooFewReplies, match=r"1 replies of at least 2.*site-01 absent"):
        run()
    assert [record.round for record in run.records] == [0, 1]
    for node in nodes[1:]:
        node.behave = lambda _, answer: answer()
    assert [record.round for record in run()] == [0, 1, 2, 3]
    # site-00 had replied to round 2 before: it was asked again, and not charged again.
    assert [charged(node) for node in nodes] == [6, 6, 6]


def test_a_server_killed_while_writing_gets_the_same_replies(federation, monkeypatch):
    """A torn last line, and a whole one whose state was not committed: neither counts."""
    run, nodes = federation
    commit = Folder.commit

    def die(folder, checkpoint, record):
        if record.round == 2:
            with (folder.path / "rounds.jsonl").open("a") as file:
                file.write(record.to_json() + "\n" + record.to_json()[:20])
            raise KeyboardInterrupt
        commit(folder, checkpoint, record)

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "commit", die)
        with pytest.raises(KeyboardInterrupt):
            run()
    sent, repeated = [stored(node.directory) for node in nodes], []

    def again(message, answer, node):
        if node.asked.round == 2:
            repeated.append(stored(node.directory))
        return answer()

    # The sites restart, too: what they sent is on their disks.
    for node in nodes:
        node.restart()
        node.behave = lambda message, answer, node=node: again(message, answer, node)
    records = run()
    assert [record.round for record in records] == [0, 1, 2, 3]
    assert repeated == sent
    # Nothing was charged, or is counted, twice.
    assert [charged(node) for node in nodes] == [6, 6, 6]
    (spent,) = set(records[-1].epsilon.values())
    with Site(shutil.copytree(nodes[0].directory, nodes[0].directory.with_name("copy"))) as site:
        assert spent == bound_on_spent(site)


def test_files_of_a_run_that_do_not_fit_are_reported(federation):
    """Damaged or lost, and as left by another run: to go on would make one run of two."""
    run, _ = federation
    run()
    for name, block in (("ledgers.json", b"[1]"), ("run/state.safetensors", b"\xff\x00")):
        path = run.directory / "server" / name
        whole = path.read_bytes()
        path.write_bytes(block)
        with pytest.raises(DataError, match=rf"{path.name} cannot be understood .* from a backup"):
            run()
        path.write_bytes(whole)
    path = run.directory / "server" / "federation.toml"
    name = run.coordinator.federation.run
    path.write_text(path.read_text().replace(f'run = "{name}"', 'run = "another"'))
    with pytest.raises(PlanError, match=f"another plan or run .'{name}'. than this one .'another'"):
        run()


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"ledger_length": 4, "ledger_head": "f" * 64}, {"site-00": "rejected: ledger"}),
        # Whoever relays messages can keep a reply: an older one says nothing of today's ledger.
        ({"ledger_length": 3, "ledger_head": "f" * 64}, {}),
    ],
)
def test_a_late_answer_with_another_ledger_rejects_its_site(federate, change, refused):
    patience = {"round_seconds": 0.6, "resend_seconds": 9, "join_seconds": 0, "retries": 0}
    run = federate({"patience": patience}, rounds=3, **FLOATS)
    node = run.nodes[0]
    told, changed = seen_with(node), node.behave

    def hang(message, answer):
        """site-00 answers the question of round 2 in the next one."""
        node.hangs = run.nodes[1].asked.round in (1, 2)
        return answer()

    run.nodes[1].behave = hang
    node.behave = lambda message, answer: (
        node.change(message, lambda: changed(message, answer), **change)
        if node.asked.round == 2
        else changed(message, answer)
    )
    assert run.refused() == [{}, {"site-00": "absent"}, refused]
    assert told[2][0] == 4
