"""Secure aggregation over a Grid in memory: real sites, real messages, and sites that drop out."""

import itertools
import json
from contextlib import closing, suppress
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tests.deployment.grid import (
    FLOATS,
    NAMES,
    PATIENCE,
    SECURE,
    bound_on_spent,
    charged,
    content,
    forget,
    killed_before,
    stored,
)

from fedpact.common.errors import DataError, PolicyRefused
from fedpact.common.messages import Refusal, Reply, Step, Task, from_bytes, to_bytes
from fedpact.common.run_folder import Folder
from fedpact.deployment.site import Site, answer
from fedpact.deployment.store import Store, StoreSlot
from fedpact.privacy.ledger.receipt import receipt
from fedpact.privacy.ledger.reservations import spend_of
from fedpact.privacy.oracle import PrivateOracle
from fedpact.simulation.secure_aggregation import client as site_module
from fedpact.simulation.secure_aggregation import messages
from fedpact.simulation.secure_aggregation.encoding import SharedSum, bits
from fedpact.simulation.secure_aggregation.session import BelowThreshold
from fedpact.simulation.secure_aggregation.transport import Attempts
from fedpact.simulation.secure_aggregation.words import centre_words
from fedpact.simulation.simulate import simulate

pytestmark = pytest.mark.usefixtures("clock")

FIVE = {"sites": 5, "secure_aggregation": {"threshold": 3}}

SHARED = {
    "secure_aggregation": {"threshold": 3},
    "privacy": {"trust": "sum", "honest": 2, "epsilon": 2.0},
}
SHARED_BY_FIVE = {**SHARED, "secure_aggregation": {"threshold": 4}}


@pytest.fixture
def federation(federate):
    """federation(**plan) -> (run, nodes): `run()` carries it out and returns its records."""

    def new(name="d", patience=None, seeds="secure", **plan):
        choices = {"patience": {**PATIENCE, **(patience or {})}, "seeds": seeds}
        run = federate(choices, name, **{"rounds": 2, **SECURE, **FLOATS, **plan})
        return run, run.nodes

    return new


def heard(node):
    return [from_bytes(block) for block in node.heard]


def steps_of(node):
    return [(message.round, message.step) for message in heard(node)]


def model(run):
    w = load_file(run.directory / "server" / "run" / "model.safetensors")
    return torch.cat([w[name].reshape(-1) for name in sorted(w)])


def loses(node, step, number, times=None):
    """The answers to one step of one round do not arrive; of the first `times` questions only."""
    lost = []

    def behave(message, answer):
        asked, given = node.asked, answer()
        at = step if isinstance(step, tuple) else (step,)
        if asked.round == number and asked.step in at and (times is None or len(lost) < times):
            lost.append(given)
            return None
        return given

    node.behave = behave
    return lost


AHEAD = list(messages.SETUP_STEPS)
SUM = ["masked", "open"]
SLOW = ["consistency", "unmask"]
# Before a sum was agreed to, and after: the suite has these, and the rest is slow.
KINDS = [
    *("masked", "open"),
    *(pytest.param(step, marks=pytest.mark.slow) for step in (*AHEAD, *SLOW)),
]


def slow(node, number):
    """A site that is never in the sum of this round, so that the others agree on a list."""
    return loses(node, "masked", number)


@pytest.fixture
def undisturbed(ended):
    """{name: a run}: one, and the same without secure aggregation, by the same draws."""
    choices = {"patience": PATIENCE, "seeds": "test"}
    return {
        name: ended(choices, rounds=2, secure_aggregation={"threshold": threshold}, **FLOATS)
        for name, threshold in (("secure", 2), ("plain", 0))
    }


def test_it_charges_the_same_as_the_run_without_it(undisturbed):
    run, plain = undisturbed["secure"], undisturbed["plain"]
    assert [record.refused for record in run.records] == [{}] * 3
    assert run.summary["status"] == "finished"
    assert [r.epsilon for r in run.records] == [r.epsilon for r in plain.records]
    for node in run.nodes:
        assert charged(node) == 4
        assert steps_of(node) == [(1, s) for s in [*AHEAD, *SUM]] + [(2, s) for s in SUM]


def _stored(site):
    return from_bytes(stored(site.files.directory).partition(b"\n")[2])


# float32's own rounding of a model, 2^-24 of each number, in a fold over three sites, twice; the
# encoding's is a hundred thousand times less.
CLOSE = 1e-5


def test_neutral_settings_give_the_run_without_it(undisturbed):
    """The same draws, so the models differ by the encoding and float32 alone."""
    secure, plain = undisturbed["secure"], undisturbed["plain"]
    assert float((model(secure) - model(plain)).abs().max()) <= CLOSE
    # Models that never moved would agree, too.
    assert secure.records[-1].loss < secure.records[0].loss - 0.1


def test_no_message_to_the_server_shows_a_sites_vector(undisturbed):
    """Each site's own reply, as it lies on its disk, is in none of its answers; masked words are
    spread over all of 64 bits, while 99 % of the plain ones are below 2^50."""
    sent = [(node, block) for node in undisturbed["secure"].nodes for block in node.said]
    assert len(sent) == 3 * (len(AHEAD) + 2 * len(SUM))
    for node, block in sent:
        given = from_bytes(block)
        assert isinstance(given, Step)
        w = _stored(node.site).vectors["w"]
        assert w.numpy().tobytes()[:64] not in block
        if given.step == "masked":
            masked = from_bytes(given.vectors["reply"].numpy().tobytes())
            assert set(masked.vectors) == {"masked"}
            assert masked.numbers == {}
            words = masked.vectors["masked"].view(torch.int64)
            share = float((words.abs().double() > 2.0**60).double().mean())
            assert share > 0.8


def test_a_plain_task_is_refused(federation):
    """A server might ask a site for its reply without any mask."""
    _, nodes = federation()
    site = nodes[0].site
    task = Task(site.run, 1, "fedavg", {"w": torch.zeros(650)}, {})
    block, _ = answer(site, to_bytes(task))
    assert from_bytes(block) == Refusal(site.run, 1, "site-00", "policy")
    assert charged(nodes[0]) == 0
    assert stored(nodes[0].directory) is None


def test_a_question_of_another_run_is_refused(federation):
    """Before anything else of it is looked at."""
    _, nodes = federation()
    task = Task("another", 1, "fedavg", {}, {})
    for question in (task, Step("another", 1, "site-00", "x", "keys", {})):
        block, _ = answer(nodes[0].site, to_bytes(question))
        assert from_bytes(block) == Refusal("another", 1, "site-00", "run")
    assert charged(nodes[0]) == 0


def test_a_step_is_refused_where_the_plan_has_none(federation):
    _, nodes = federation(secure_aggregation={"threshold": 0})
    site = nodes[0].site
    block, _ = answer(site, to_bytes(Step(site.run, 1, "site-00", "x", "keys", {})))
    assert from_bytes(block).code == "policy"


@pytest.mark.parametrize(
    "step",
    [AHEAD[-1], "unmask", *(pytest.param(s, marks=pytest.mark.slow) for s in (SLOW[0], "open"))],
)
def test_a_site_that_drops_out_at_any_step_costs_itself_only(federation, step):
    """Who has dealt shares is in the session, who has masked is in the sum, and stays in it."""
    number = 1 if step in AHEAD else 2
    run, nodes = federation(seeds="test", rounds=number, **FIVE)
    lost = loses(nodes[1], step, number)
    if step in ("consistency", "unmask"):
        slow(nodes[3], number)
    records = run()
    assert lost
    assert all(record.refused == {} for record in records[1:number])
    gone = {"consistency": "site-03", "unmask": "site-03", "open": None}.get(step, "site-01")
    assert records[number].refused == ({gone: "absent"} if gone else {})
    check_mean(run, [node.site.name for node in nodes if node.site.name != gone], number)
    spent = [2 * number] * 5
    spent[1] -= 2 if step in AHEAD else 0
    assert [charged(node) for node in nodes] == spent


def check_mean(run, sites, number=2):
    """The server's last w is the weighted mean of what these sites have on their disks."""
    replies = []
    for site in sites:
        block = stored(run.directory / "sites" / site).partition(b"\n")[2]
        replies.append(from_bytes(block))
    assert all(reply.round == number for reply in replies)
    total = sum(reply.weight for reply in replies)
    w = sum(reply.weight / total * reply.vectors["w"].double() for reply in replies)
    own = Folder(run.directory / "server" / "run").restore()[0].state.vectors["w"]
    # float32's rounding of numbers below 2.
    assert float((own.double() - w).abs().max()) <= 2.0**-24
    assert float(own.abs().max()) < 2


@pytest.mark.parametrize("step", KINDS)
def test_round_below_threshold_is_refused_and_opens_no_sum(federation, step):
    """Two of five are left. Before `open` and `consistency` nobody has agreed to any sum, and the
    run goes on later without new charges; of a sum that was agreed to, one site's shares open
    nothing, and the round is a new attempt, charged anew."""
    number = 1 if step in AHEAD else 2
    run, nodes = federation(budget={"spare_rounds": 3}, **FIVE)
    for node in nodes[1:4]:
        loses(node, step, number)
    if step in ("consistency", "unmask"):
        nodes[3].behave = lambda _, answer: answer()
        nodes[4].behave = lambda _, answer: answer() if heard(nodes[4])[-1].round == 1 else None
        for node in nodes[1:3]:
            # In the second try all of the session are in the sum, and nobody signs a list.
            loses(node, (step, "open"), number)
    with pytest.raises(BelowThreshold, match=r"2 sites .*threshold of secure aggregation is 3"):
        run()
    assert [record.round for record in run.records] == [0, 1][:number]
    late = step in ("consistency", "unmask", "open")
    tries = 2  # patience.retries + 1
    agreed = [m.step in ("consistency", "open") for m in heard(nodes[0]) if m.round == number]
    assert sum(agreed) == (tries if late else 0)
    before = [charged(node) for node in nodes]
    for node in nodes:
        node.behave = lambda _, answer: answer()
    assert [record.round for record in run()] == [0, 1, 2]
    after = [charged(node) for node in nodes]
    if late:
        away = step != "open"
        assert before == [6, 6, 6, 6, 2 if away else 6]
        assert after == [8, 8, 8, 8, 4 if away else 8]
    else:
        assert after == [4] * 5


def test_server_crash_after_asking_for_a_sum_starts_an_attempt(federation, monkeypatch):
    """The sites have opened the sum of round 2; the next is over fresh noise, and is charged."""
    run, nodes = federation(budget={"spare_rounds": 1})
    killed_before(run, 2, monkeypatch)
    assert Attempts(run.directory / "server" / "run" / "attempts.json").next(2) == 1
    first = [stored(node.directory) for node in nodes]
    assert [record.round for record in run()] == [0, 1, 2]
    assert all(stored(node.directory) != old for node, old in zip(nodes, first, strict=True))
    assert [charged(node) for node in nodes] == [6, 6, 6]
    # What the server says is what the ledgers say.
    told = run.records[-1].epsilon
    assert told == {node.site.name: bound_on_spent(node.site) for node in nodes}


def test_who_comes_late_or_again_is_in_the_next_sum(federation):
    """site-02 comes in round 1, is started again within round 3, and after round 4."""
    run, nodes = federation(patience={"start_sites": 2}, rounds=5)
    nodes[2].here = False

    def then_come(message, answer):
        nodes[2].here = nodes[2].here or nodes[0].asked.step == "open"
        return answer()

    def again(message, answer):
        at = nodes[2].asked.round, nodes[2].asked.step
        if at == (3, "masked"):
            nodes[2].restart()
        given = answer()
        if at == (4, "open"):
            nodes[2].restart()
            # Its node says so, and a session is begun with its new keys.
            nodes[2].since = "later"
        return given

    nodes[0].behave, nodes[2].behave = then_come, again
    refused = [record.refused for record in run()[1:]]
    assert refused == [{"site-02": "absent"}, {}, {"site-02": "session"}, {}, {}]
    assert [n for n, step in steps_of(nodes[1]) if step == "keys"] == [1, 2, 4, 5]
    assert [charged(node) for node in nodes] == [10, 10, 6]


def test_space_for_an_opened_sum_is_reserved_before_the_charge(federation, monkeypatch):
    """A sum that cannot be written down is not opened: what was charged for it would be lost."""
    run, nodes = federation()
    held, left, real = [], [], StoreSlot.make_room
    home = nodes[0].directory

    def behave(message, answer):
        asked = nodes[0].asked
        if (asked.round, asked.step) == (2, "open"):
            held.append(len(stored(home, "room for opened")))
        return answer()

    def full(slot, length):
        if not left and slot.path.parent == home:
            left.append(charged(nodes[0]))
            raise OSError(28, "No space left on device")
        real(slot, length)

    nodes[0].behave = behave
    monkeypatch.setattr(StoreSlot, "make_room", full)
    records = run()
    assert [sorted(record.refused) for record in records[1:]] == [["site-00"], []]
    assert left == [0]
    assert [charged(node) for node in nodes] == [2, 4, 4]
    assert held[0] >= len(stored(home, "opened"))
    assert stored(home, "room for opened") is None


def test_a_site_without_its_list_of_opened_sums_does_not_open(federation):
    """A server could have a second sum of a round opened, over other sites."""
    run, nodes = federation()
    home = nodes[0].directory
    # From the first task on, so that its lack tells before anything was opened, too.
    nodes[0].site.take_part()
    assert json.loads(stored(home, "opened")) == [nodes[0].site.run, -1, 0, []]
    lost = loses(nodes[0], "open", 1)
    run()
    assert lost
    nodes[0].site.close()
    with closing(Store(home)) as store:
        store.write("opened", json.dumps(["another", 3, 0, []]).encode())
    told = r"site\.db (is|has no list) .*take part in a new run only"
    with pytest.raises(DataError, match=told):
        Site(home)
    forget(home, "opened")
    with pytest.raises(DataError, match=told):
        Site(home)


def test_site_with_invalid_shares_is_excluded_from_next_attempt(federation, monkeypatch):
    """It tells everybody the hash of another seed. The one attempt that it spoils is charged."""
    run, nodes = federation(budget={"spare_rounds": 1})
    lying = []

    class Lying(site_module.Secrets):
        def advert(self):
            found = super().advert()
            return replace(found, commitment=b"x" * len(found.commitment)) if lying else found

    def behave(message, answer):
        lying.append(True)
        try:
            return answer()
        finally:
            lying.clear()

    monkeypatch.setattr(site_module, "Secrets", Lying)
    nodes[0].behave = behave
    records = run()
    assert [record.refused for record in records[1:]] == [{"site-00": "rejected: shares"}] * 2
    assert [charged(node) for node in nodes] == [2, 6, 6]
    assert run.summary["status"] == "finished"


@pytest.mark.parametrize(("least", "left"), [(1, 1), (3, 2)])
def test_the_run_ends_when_too_few_sites_have_budget_left(federation, least, left):
    """Two of three have spent theirs: the third's vector would stand alone. Or one, of which
    patience.least_replies is more than the threshold."""
    run, nodes = federation(patience={"least_replies": least})
    for node in nodes[left:]:
        node.spend(101, 102)
    records = run()
    assert run.summary["status"] == "budget"
    assert [record.round for record in records] == [0]
    assert {step for _, step in steps_of(nodes[0])} == {*AHEAD, "masked"}
    for node in nodes:
        spent = next(iter(receipt(node.directory / "ledger.jsonl")["runs"].values()))
        assert spent["epsilon_spent"] <= spent["epsilon_reserved"]


def lies(node):
    """What a site may send for a masked reply that is none."""

    def of(**changes):
        def behave(message, answer):
            given = content(answer())
            if not isinstance(given, Step) or given.step != "masked":
                return node.forge(message, to_bytes(given))
            reply = from_bytes(given.vectors["reply"].numpy().tobytes())
            block = to_bytes(Reply(**{**vars(reply), **changes}))
            vectors = {"reply": torch.frombuffer(bytearray(block), dtype=torch.uint8)}
            return node.forge(message, to_bytes(Step(**{**vars(given), "vectors": vectors})))

        return behave

    return {
        "form": of(vectors={"masked": torch.zeros(7, dtype=torch.int64)}),
        "weight": of(weight=1e9),
        "ledger": of(ledger_length=0),
        "stale": of(round=7),
        "another's": of(site="site-01"),
    }


def test_a_bad_masked_reply_is_a_drop_out(federation):
    run, nodes = federation(rounds=5)
    wrong = lies(nodes[0])

    def behave(message, answer):
        number = nodes[0].asked.round
        return wrong[list(wrong)[number - 1]](message, answer)

    nodes[0].behave = behave
    records = run()
    assert [r.refused for r in records[1:]] == [{"site-00": f"rejected: {w}"} for w in wrong]
    assert run.summary["loss"] < 10


def test_a_site_whose_owner_did_not_write_honest_takes_no_part(make, tmp_path):
    directory = make(tmp_path / "d", {}, rounds=2, settings={"local_steps": 1}, **SHARED)
    with pytest.raises(PolicyRefused, match="honest = 2, epsilon_alone_per_run"):
        Site(directory / "sites" / "site-00")


def shared_words(monkeypatch):
    """Each share that a site's oracle makes, and (round, attempt, sites, total) of sums opened."""
    made, share = {}, PrivateOracle._share
    opened, mean = [], SharedSum.mean

    def kept(oracle, *args, **more):
        given = share(oracle, *args, **more)
        charge = oracle._charge
        made[oracle._terms.site, charge.round, charge.attempt] = oracle.shares["gradient"].clone()
        return given

    def summed(coding, task, replies, total, layout):
        opened.append((task.round, task.attempt, tuple(sorted(replies)), total.copy()))
        return mean(coding, task, replies, total, layout)

    monkeypatch.setattr(PrivateOracle, "_share", kept)
    monkeypatch.setattr(SharedSum, "mean", summed)
    return made, opened


def test_shared_noise_matches_simulation_and_gives_both_epsilons(federation, tmp_path):
    """The same draws, whole numbers that are summed exactly, and one step at the server: bit for
    bit."""
    tables = {"algorithm": "fedfdp", "settings": {"loss_of": "common"}}
    tables |= {"server": {"average": "tail"}, **SHARED}
    tables["privacy"] = {**SHARED["privacy"], "clip_schedule": [1.0, 0.75, 0.5]}
    run, nodes = federation("sum", seeds="test", **tables)
    records = run()
    assert [record.refused for record in records] == [{}] * 3
    plan = run.coordinator.plan
    result = simulate(plan, tmp_path / "simulated")
    own = torch.cat([p.detach().reshape(-1) for _, p in sorted(result.model.named_parameters())])
    assert torch.equal(model(run), own)
    last, simulated = records[-1], result.records[-1]
    assert last.numbers == simulated.numbers
    ends = [run.directory / "server" / "run", result.folder]
    files = [load_file(end / "average.safetensors") for end in ends]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[1])
    assert last.average["accuracy"] == simulated.average["accuracy"]
    assert last.epsilon == simulated.epsilon
    assert last.epsilon_alone == simulated.epsilon_alone
    assert min(last.epsilon_alone.values()) > max(last.epsilon.values())
    for node in nodes:
        ledger = receipt(node.site.ledger.path)["runs"]
        spent = spend_of(node.site.run, ledger)
        assert spent["epsilon_spent"] == last.epsilon[node.site.name]
        assert spent["epsilon_alone_spent"] == last.epsilon_alone[node.site.name]


def test_site_that_lost_its_reply_makes_no_second_share(federation, monkeypatch):
    """Its reply was removed and the server forgets what was opened: two sums of one
    attempt would differ by that site's own shares."""
    made, opened = shared_words(monkeypatch)
    run, nodes = federation(
        settings={"local_steps": 1}, rounds=1, budget={"spare_rounds": 3}, **SHARED
    )
    killed_before(run, 1, monkeypatch)
    forget(nodes[0].directory, "reply")
    (run.directory / "server" / "run" / "attempts.json").unlink()
    nodes[0].restart()
    run()
    assert [entry[:2] for entry in opened] == [(1, 0), (1, 1)]
    assert sorted(made) == [(site, 1, attempt) for site in NAMES for attempt in (0, 1)]


@pytest.mark.parametrize(
    ("step", "who"),
    [
        ("masked", "server"),
        ("open", "site"),
        *(
            pytest.param(*both, marks=pytest.mark.slow)
            for both in itertools.product((*AHEAD[:-1], *SUM, *SLOW), ("site", "server"))
            if both not in (("masked", "server"), ("open", "site"))
        ),
    ],
)
def test_no_vector_is_in_two_sums_and_no_budget_is_overspent(federation, monkeypatch, step, who):
    """One of five sites, or the server, dies at each step of a session, and its answer with it:
    what is opened of an attempt is one sum, of its own noise, and both ε stay in their bounds."""
    made, opened = shared_words(monkeypatch)
    number, killed = 1 if step in AHEAD else 2, []
    run, nodes = federation(
        settings={"local_steps": 1}, budget={"spare_rounds": 4}, sites=5, **SHARED_BY_FIVE
    )

    def die(message, answer):
        asked = nodes[1].asked
        if (asked.round, asked.step) != (number, step) or killed:
            return answer()
        killed.append(answer())
        if who == "server":
            raise KeyboardInterrupt
        nodes[1].restart()
        return None

    nodes[1].behave = die
    if step in ("consistency", "unmask"):
        slow(nodes[4], number)
    with suppress(BelowThreshold, KeyboardInterrupt):
        run()
    run()
    assert killed
    assert [record.round for record in run.records] == [0, 1, 2]
    assert len({entry[:2] for entry in opened}) == len(opened)
    for number, attempt, sites, total in opened:
        shares = [made[site, number, attempt] for site in sites]
        width = bits(run.coordinator.terms)
        assert centre_words(total, width).tolist() == sum(shares).tolist()
    assert len({share.numpy().tobytes() for share in made.values()}) == len(made)
    for node in nodes:
        spent = next(iter(receipt(node.directory / "ledger.jsonl")["runs"].values()))
        assert spent["epsilon_spent"] <= spent["epsilon_reserved"]
        assert spent["epsilon_alone_spent"] <= spent["epsilon_alone_reserved"]
