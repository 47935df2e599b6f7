"""More rounds on a deployment that has ended: each owner has to allow a second reservation."""

import re

import pytest
from tests.deploy.grid import Run

from fedpact.deploy.extend import extend
from fedpact.engines.parties.site import Site
from fedpact.errors import PolicyRefused
from fedpact.ledger.receipt import receipt
from fedpact.theory.accounting import SampledGaussian, epsilon

pytestmark = pytest.mark.usefixtures("clock")


@pytest.mark.parametrize("plan", [{}, {"secure_aggregation": {"threshold": 2}}])
def test_a_site_refuses_until_its_owner_allows_it_and_then_both_count(federate, plan):
    run = federate(None, rounds=2, **plan)
    run()
    for node in run.nodes:
        node.site.ledger.close()
    extended, name = extend(run.directory, 2, None)
    assert (extended.rounds, extended.after) == (4, 2)
    site = run.nodes[0].directory
    before = (site / "ledger.jsonl").read_bytes()
    with pytest.raises(PolicyRefused, match="ever"):
        Site(site)
    # Nothing was promised.
    assert (site / "ledger.jsonl").read_bytes() == before
    for node in run.nodes:
        path = node.directory / "policy.toml"
        path.write_text(re.sub(r"_ever = (\S+)", r"_ever = 9e-1", path.read_text()))
        text = re.sub("epsilon_ever = .*", "epsilon_ever = 100.0", path.read_text())
        path.write_text(text)
    again = Run(run.directory)
    try:
        records = again()
    finally:
        for node in again.nodes:
            node.site.ledger.close()
    assert [record.round for record in records] == [0, 1, 2, 3, 4]
    assert records[-1].refused == {}
    for node in again.nodes:
        told = receipt(node.directory / "ledger.jsonl")
        assert [*told["runs"]][1] == name
        first, second = told["runs"].values()
        # The plan's accountant is RDP, a receipt's the best.
        costs = [
            epsilon({SampledGaussian(e["q"], e["sigma"]): e["spent"]}, part["delta"], "rdp")
            for part in (first, second)
            for e in part["events"]
        ]
        assert again.summary["epsilon"][node.site.name] == pytest.approx(sum(costs))
        assert [event["spent"] for event in second["events"]] == [4]
