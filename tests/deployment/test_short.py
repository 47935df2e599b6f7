"""What a deployment's server sends: changes to whoever has the last model, else the model itself.

Over the network in memory. The seeds are those of a test, so every run has one right model.
"""

import pytest
import torch
from tests.deployment.grid import PATIENCE, SECURE, charged

from fedpact.algorithms.wrappers import integers
from fedpact.common.messages import Refusal, Reply, Step, Task, from_bytes, to_bytes
from fedpact.common.run_folder import Folder

pytestmark = pytest.mark.usefixtures("clock")

CHOICES = {"seeds": "test", "patience": PATIENCE}
PLAN = {"compression": {"kind": "grid"}, "rounds": 4, "settings": {"local_steps": 2}}


@pytest.fixture
def federation(federate):
    return lambda name="d", **plan: federate(CHOICES, name, **{**PLAN, **plan})


@pytest.fixture
def undisturbed(ended):
    """undisturbed(**plan) -> a run of it that is over; of each plan there is one."""
    return lambda **plan: ended(CHOICES, **{**PLAN, **plan})


def model_of(run):
    return Folder(run.directory / "server" / "run").restore()[0].state.vectors["w"]


def tasks_of(node):
    """What a site was asked, as it came: (round, the names of its vectors)."""
    found = [from_bytes(block) for block in node.heard]
    found = [
        from_bytes(m.vectors["task"].numpy().tobytes()) if isinstance(m, Step) else m
        for m in found
        if not isinstance(m, Step) or m.step == "masked"
    ]
    return [(task.round, sorted(task.vectors)) for task in found]


def restart(node):
    node.restart()
    node.since = "again"


WHOLE, SHORT, START = ["w"], ["grid/w"], ["grid/start"]


def test_a_site_present_last_round_gets_differences(undisturbed):
    run = undisturbed()
    for node in run.nodes:
        assert tasks_of(node) == [(1, START), (2, SHORT), (3, SHORT), (4, SHORT)]
    assert len(run.nodes[0].heard[0]) < len(run.nodes[0].heard[1])
    lengths = [sum(len(node.heard[i]) for node in run.nodes) for i in range(4)]
    assert [record.bytes_down for record in run.records[1:]] == lengths


@pytest.mark.parametrize(
    ("plan", "others"), [({}, 1), pytest.param(SECURE, 3, marks=pytest.mark.slow)]
)
def test_a_site_with_another_start_gets_the_servers(federation, undisturbed, plan, others):
    """As where another version of a library draws other weights from the plan's seed."""
    run = federation(**plan)
    for node in run.nodes[:others]:
        node.site._checks._received[0] = {"w": torch.ones(650)}
    assert [record.refused for record in run()[1:]] == [{}] * 4
    for node in run.nodes[:others]:
        assert tasks_of(node)[:3] == [(1, START), (1, WHOLE), (2, SHORT)]
    assert [charged(node) for node in run.nodes] == [8, 8, 8]
    assert torch.equal(model_of(run), model_of(undisturbed(**plan)))


def test_a_restarted_site_gets_the_whole_model(federation, undisturbed):
    """With or without a reply that was lost before: it is charged once a round, as the others."""
    run = federation()
    _, losing, keeping = run.nodes

    def restarts(node, lost):
        done = []

        def behave(message, answer):
            if node.asked.round == 3 and not done:
                done.append(1)
                if lost:
                    answer()
                restart(node)
                if lost:
                    return None
            return answer()

        node.behave = behave

    restarts(losing, True)
    restarts(keeping, False)
    records = run()
    assert [record.refused for record in records[1:]] == [{}] * 4
    for node, times in ((losing, 2), (keeping, 1)):
        asked = [(1, START), (2, SHORT), *[(3, SHORT)] * times, (3, WHOLE), (4, SHORT)]
        assert tasks_of(node) == asked
    assert [charged(each) for each in run.nodes] == [8, 8, 8]
    assert torch.equal(model_of(run), model_of(undisturbed()))


def test_changes_that_are_none_cost_nothing(federation):
    """A server's mistake, or lie, about changes ends before anything is charged."""
    run = federation()
    site = run.nodes[0].site
    good = integers.pack_codes(torch.ones(650, dtype=torch.int64), 1e-3)

    def asked(number, **vectors):
        block = site.handle(Task(site.run, number, "fedavg", vectors, {}))
        answer = from_bytes(block)
        return answer.code if isinstance(answer, Refusal) else answer

    assert asked(2, **{"grid/w": good}) == "model"
    assert charged(run.nodes[0]) == 0
    assert isinstance(asked(1, w=torch.zeros(650)), Reply)
    before = charged(run.nodes[0])
    bombs = {
        "long": integers.pack_codes(torch.zeros(651, dtype=torch.int64), 1e-3),
        "nan": integers.pack_codes(torch.ones(650, dtype=torch.int64), float("nan")),
        "torn": good[:-3],
        "type": good.float(),
    }
    for name, block in bombs.items():
        assert asked(2, **{"grid/w": block}) == "task", name
    assert asked(2, **{"grid/v": good}) == "task"
    digest = torch.zeros(32, dtype=torch.uint8)
    for wrong in ({"w": torch.zeros(650)}, {"grid/start": digest.float()}, {"grid/w": good}):
        assert asked(2, **{"grid/start": digest, **wrong}) == "task"
    assert asked(2, **{"grid/start": digest}) == "model"
    assert charged(run.nodes[0]) == before
    assert isinstance(asked(2, **{"grid/w": good}), Reply)
    assert isinstance(asked(2, **{"grid/w": good}), Reply)
    assert charged(run.nodes[0]) == 2 * before


def test_the_reply_that_is_kept_answers_both_forms(federation):
    """A question in full and the same one in changes have one digest, and one charge."""
    run = federation()
    site = run.nodes[0].site
    start = torch.linspace(-1, 1, 650)
    site.handle(Task(site.run, 1, "fedavg", {"w": start}, {}))
    codes = torch.arange(-325, 325)
    short = Task(site.run, 2, "fedavg", {"grid/w": integers.pack_codes(codes, 1e-3)}, {})
    full = Task(site.run, 2, "fedavg", {"w": integers.apply_codes(start, codes, 1e-3)}, {})
    first = site.handle(from_bytes(to_bytes(short)))
    before = charged(run.nodes[0])
    assert site.handle(from_bytes(to_bytes(full))) == first
    restart(run.nodes[0])
    assert run.nodes[0].site.handle(full) == first
    assert charged(run.nodes[0]) == before
