"""What a deployed site and its server show of a run: the site its own, its owner's ledger first."""

import re
import sqlite3
from contextlib import closing

import pytest
from tests.deployment.test_live import parsed

from fedpact.common.errors import DataError
from fedpact.deployment import snapshot, store
from fedpact.deployment.snapshot import take_snapshot
from fedpact.privacy.ledger.receipt import receipt

pytestmark = pytest.mark.usefixtures("clock")


def test_a_site_shows_its_own_ledger_and_no_other_site(federate):
    run = federate(None, rounds=2)
    run()
    node = run.nodes[0]
    told = take_snapshot(node.directory)
    (of,) = told["ledger"].values()
    (expected,) = receipt(node.directory / "ledger.jsonl")["runs"].values()
    assert of["epsilon_spent"] == expected["epsilon_spent"]
    assert of["epsilon_reserved"] == expected["epsilon_reserved"]
    assert told["round"] == 2
    # That it is ready, two rounds, and the model at the end.
    assert (told["answers"], told["refusals"]) == (4, {})
    text = snapshot.encode_json(told) + snapshot.text(told)
    assert "site-00" in text
    assert not {"site-01", "site-02"} & set(re.findall(r"site-\d\d", text))
    # The server sees who was slow.
    of_server = take_snapshot(run.directory / "server")
    assert all(each["seconds"] is not None for each in of_server["sites"].values())
    assert take_snapshot(run.directory) == of_server
    parsed(snapshot.text(of_server))


def test_refusals_are_counted_by_code_for_the_owner(federate):
    run = federate({"patience": {"start_sites": 2}}, rounds=1)
    path = run.nodes[0].directory / "policy.toml"
    path.write_text(re.sub("epsilon_per_run = .*", "epsilon_per_run = 1e-9", path.read_text()))
    run()
    told = take_snapshot(run.nodes[0].directory)
    # Whether it is ready, the round, and the model at the end.
    assert told["refusals"] == {"policy": 3}
    assert told["ledger"] == {}


def test_a_store_that_somebody_locks_is_no_fault_of_ours(federate, monkeypatch):
    run = federate(None, rounds=1)
    run()
    site = run.nodes[0].directory
    monkeypatch.setattr(store, "_WAIT_SECONDS", 0.01)
    with closing(sqlite3.connect(site / "site.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(DataError, match=r"site\.db cannot be read \(database is locked\): use"):
            take_snapshot(site)
    assert take_snapshot(site)["ended"]
