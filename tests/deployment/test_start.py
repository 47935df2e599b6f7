"""A run begins once its sites are ready; until then nobody is asked for anything that costs."""

import json

import pytest
from tests.deployment.grid import charged
from tests.deployment.test_columns import RELEASED, table

from fedpact.common.messages import READY, Reply, Task, from_bytes, to_bytes
from fedpact.common.run_folder import WAITS
from fedpact.deployment.flower.transport import TooFewReplies
from fedpact.deployment.site import answer

pytestmark = pytest.mark.usefixtures("clock")


def ledgers(run):
    return [(node.directory / "ledger.jsonl").read_bytes() for node in run.nodes]


def forbid(node):
    """Its owner takes back what the policy allowed."""
    path = node.directory / "policy.toml"
    text = path.read_text()
    path.write_text(text.replace('"fedavg"', '"fedprox"'))
    return lambda: path.write_text(text)


@pytest.mark.parametrize(
    ("threshold", "released"), [(0, True), pytest.param(2, False, marks=pytest.mark.slow)]
)
def test_two_refusals_of_three_charge_no_site(federate, tmp_path, threshold, released):
    """Also where a run begins with a release of its own, before the first round."""
    plan = {"data": table(tmp_path / "t.csv"), "label": "out", "rounds": 2}
    plan |= {"records": {"columns": RELEASED}} if released else {}
    plan |= {"secure_aggregation": {"threshold": threshold}}
    columns = {"age": {"fill": 50}, "bmi": {}, "ward": RELEASED["ward"]}
    run = federate(None, **({} if released else {"records": {"columns": columns}}) | plan)
    before = ledgers(run)
    allow_again = forbid(run.nodes[0])
    run.nodes[2].here = False
    with pytest.raises(TooFewReplies) as raised:
        run()
    told = str(raised.value)
    assert "1 of 3 sites are ready" in told
    assert "site-00 does not allow this run" in told
    assert "site-01:" not in told
    assert ledgers(run) == before
    # Opened, and nothing reserved: another federation finds the whole budget.
    assert all(node.site.ledger.runs == () for node in run.nodes)
    # Both are mended: the same run begins, with all three.
    allow_again()
    run.nodes[2].here = True
    assert run.refused() == [{}, {}]
    assert min(map(charged, run.nodes)) > 0


def test_a_site_within_the_deadline_is_waited_for(federate, clock):
    run = federate({"patience": {"round_seconds": 100, "join_seconds": 1}}, rounds=1)
    run.nodes[1].here = False
    began, sleep = clock.now, clock.sleep

    def come(seconds):
        sleep(seconds)
        if clock.now < began + 50:
            # Whoever watches sees meanwhile who is missing.
            told = json.loads((run.directory / "server" / "run" / WAITS).read_bytes())
            assert told["sites"] == {"site-01": {"waiting": True, "code": "absent"}}
        run.nodes[1].here = clock.now > began + 50

    clock.sleep = come
    assert run.refused() == [{}]
    assert 50 < clock.now - began < 60


def test_a_federation_may_begin_with_as_few_as_it_says(federate):
    run = federate({"patience": {"start_sites": 1}}, rounds=1)
    for node in run.nodes[1:]:
        node.here = False
    assert run.refused() == [{"site-01": "absent", "site-02": "absent"}]
    assert [charged(node) for node in run.nodes] == [2, 0, 0]


def test_a_resumed_run_waits_for_no_site(federate):
    run = federate(None, rounds=3)
    node = run.nodes[1]
    node.behave = lambda message, reply: 1 / 0 if len(node.heard) == 2 else reply()
    with pytest.raises(ZeroDivisionError):
        run()
    node.here = False
    assert run.refused() == [{}, {"site-01": "absent"}, {"site-01": "absent"}]


def test_a_site_says_that_it_is_ready_at_no_cost(federate):
    run = federate(None, rounds=1)
    site = run.nodes[0].site
    before = ledgers(run)
    block, told = answer(site, to_bytes(Task(site.run, 0, READY, {}, {})))
    said = from_bytes(block)
    assert isinstance(said, Reply)
    assert (said.vectors, said.numbers, said.ledger_length) == ({}, {}, site.ledger.length)
    assert told.startswith("round 0: is ready")
    assert ledgers(run) == before
