"""Sites that lie within the form of a reply, and a server that asks what no plan says.

Honest sites answer beside them; each false reply is rejected by name, and the round goes on.
"""

import json
import math

import pytest
import torch
from tests.deployment.grid import FLOATS, SECURE, charged, content
from tests.deployment.test_site import charged as charged_at
from tests.deployment.test_site import task_of

from fedpact.common.messages import Refusal, Reply, from_bytes, to_bytes
from fedpact.deployment.flower import transport
from fedpact.deployment.site import Site, answer
from fedpact.simulation.secure_aggregation.transport import FalseSum

PATIENCE = {"round_seconds": 5.0, "resend_seconds": 2.0, "join_seconds": 0.2, "retries": 0}


@pytest.fixture
def federation(federate):
    """federation(count, **plan) -> (run, nodes), of so many sites; run.refused() carries it out."""

    def new(count, **plan):
        run = federate({"patience": PATIENCE}, **{"sites": count, "rounds": 2, **FLOATS, **plan})
        return run, run.nodes

    return new


def telling(node, change):
    """The site answers as an honest one, with change(task, reply) in place of its fields."""

    def behave(message, answer):
        given = answer()
        changes = change(node.asked, content(given))
        return node.change(message, lambda: given, **changes)

    node.behave = behave


def further(task, reply):
    return {"vectors": {name: vector + 1e30 for name, vector in reply.vectors.items()}}


def test_of_two_sites_one_is_far_off(federation):
    """Of two replies no median can tell which is off; the terms can."""
    run, nodes = federation(2)
    telling(nodes[0], further)
    assert run.refused() == [{"site-00": "rejected: far off"}] * 2
    assert run.summary["status"] == "finished"
    assert run.summary["loss"] < 10


NUMBERS = {
    "ldp_fedsgd-batch_size": [0.0, 1e12],
    "ldp_fedsgd-noise_variance": [-1.0, 1e308],
    "qffl-loss": [1e308, -1e308],
    "scaffold-local_steps": [0.0, 1e308],
    "ali_dpfl-control/steps_left": [0.0, 1e308],
    "ali_dpfl-control/distance": [-1e308, 1e308],
}


@pytest.mark.parametrize("about", NUMBERS)
def test_a_number_that_no_honest_site_says(federation, about):
    """A batch of 0 had killed the server at every start, the others had ended the run."""
    algorithm, _, name = about.partition("-")
    settings = {"ali_dpfl": {"iterations": 6}}.get(algorithm, {})
    if name == "noise_variance":
        settings = {"aggregation": "least_noise"}
    run, nodes = federation(2, algorithm=algorithm, settings=settings, rounds=1)
    waiting = list(NUMBERS[about])
    for node, value in zip(nodes, waiting, strict=True):

        def lie(task, reply, value=value):
            return {"numbers": {**reply.numbers, name: value}}

        telling(node, lie)
    with pytest.raises(transport.TooFewReplies, match="site-00 rejected: far off, site-01"):
        run.refused()


def test_site_with_less_budget_does_not_end_the_run(federation):
    """In the first round it is the terms' number; later on arithmetic, whatever a site says."""
    run, nodes = federation(2, algorithm="ali_dpfl", settings={"iterations": 4}, rounds=4)
    telling(
        nodes[0],
        lambda task, reply: {"numbers": {**reply.numbers, "control/steps_left": 0.0}},
    )
    refused = run.refused()
    # τ is 1 in the first round, and at most 2 and 4 after it.
    assert refused[0] == {"site-00": "rejected: far off"}
    assert len(refused) >= 2
    assert charged(nodes[1]) == 4


def test_a_sum_that_honest_sites_cannot_have_is_not_taken(federation):
    """Masked, one reply is not seen; the sum is. It is asked for once, as each try costs budget."""
    run, nodes = federation(3, **SECURE, budget={"spare_rounds": 1})
    honest = nodes[0].site._train

    def lie(task):
        reply = from_bytes(honest(task))
        return to_bytes(Reply(**{**vars(reply), **further(task, reply)}))

    nodes[0].site._train = lie
    with pytest.raises(FalseSum, match="site-00, site-01, site-02 is impossible for honest"):
        run.refused()
    assert [charged(node) for node in nodes] == [2, 2, 2]
    # It goes on once the owners have found out.
    nodes[0].site._train = honest
    assert run.refused() == [{}, {}]
    assert run.summary["status"] == "finished"


# ---------------------------------------------------------------- what a server may ask


@pytest.mark.parametrize(
    "changes",
    [
        {"number": 0},
        {"number": -1},
        {"included": 1},
        {"included": -2},
        {"attempt": 10**12},
        {"attempt": -1},
        {"numbers": {"loss": 1.0}},
        {"numbers": {"local_steps": 10**9}},
        {"vectors": {}},
        {"vectors": {"w": torch.zeros(651)}},
        {"vectors": {"w": torch.zeros(650).double()}},
        {"vectors": {"w": torch.zeros(650), "c": torch.zeros(650)}},
        {"vectors": {"w": torch.full((650,), math.nan)}},
        {"vectors": {"w": torch.full((650,), math.inf)}},
    ],
)
def test_task_outside_the_plan_is_refused_uncharged(site_dir, changes):
    with Site(site_dir) as site:
        task = task_of(site, **changes)
        refusal = from_bytes(site.handle(task))
        assert refusal == Refusal(site.run, task.round, "site-00", "task")
        # It changes nothing for the next one.
        assert isinstance(from_bytes(site.handle(task_of(site))), Reply)
    assert charged_at(site_dir) == 2


@pytest.mark.parametrize("number", [6, 10**12])
def test_a_round_beyond_the_plans_does_not_make_later_ones_stale(site_dir, number):
    with Site(site_dir) as site:
        assert from_bytes(site.handle(task_of(site, number))).code == "budget"
        assert isinstance(from_bytes(site.handle(task_of(site, 1))), Reply)
        assert isinstance(from_bytes(site.handle(task_of(site, 5))), Reply)
    assert charged_at(site_dir) == 4


def test_a_controlled_round_has_at_most_the_plans_steps(make, tmp_path):
    tables = {"algorithm": "fedfdp", "control": {"kind": "ali", "iterations": 9}, "settings": {}}
    directory = make(tmp_path / "d", **tables)
    with Site(directory / "sites" / "site-00") as site:
        for numbers in (
            {"local_steps": 101},
            {"local_steps": 0},
            {"local_steps": 1.5},
            {"local_steps": 1, "loss": math.nan},
            {"local_steps": 1, "loss": 1e300},
            {"local_steps": 1, "rounds": 1.0},
        ):
            assert from_bytes(site.handle(task_of(site, numbers=numbers))).code == "task"
        good = task_of(site, numbers={"local_steps": 2, "loss": 2.3})
        assert isinstance(from_bytes(site.handle(good)), Reply)


def test_a_message_of_many_vectors_is_refused_unread(site_dir):
    """100,000 vectors had taken a site 27 s: its work now ends before their names are read."""
    with Site(site_dir) as site:
        block = to_bytes(task_of(site))
        length = int.from_bytes(block[:8], "little")
        layout = json.loads(block[8 : 8 + length])
        end = layout["w"]["data_offsets"][1]
        for i in range(100_000):
            place = [end + 4 * i, end + 4 * i + 4]
            layout[f"v{i}"] = {"dtype": "F32", "shape": [1], "data_offsets": place}
        head = json.dumps(layout).encode()
        block = len(head).to_bytes(8, "little") + head + block[8 + length :] + bytes(400_000)
        reply, told = answer(site, block)
        assert from_bytes(reply) == Refusal("", 0, "site-00", "error")
    assert "declares a header of" in told
    assert charged_at(site_dir) == 0


def test_a_ledger_with_too_many_entries_is_refused(federation):
    """The server would tell the site so, and Flower carries no such number: it ended for good."""
    run, nodes = federation(2)
    telling(nodes[0], lambda *_: {"ledger_length": 10**30})
    assert [refused["site-00"] for refused in run.refused()] == ["rejected: ledger"] * 2
