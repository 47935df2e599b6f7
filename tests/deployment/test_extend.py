"""More rounds on a deployment that has ended: each owner has to allow a second reservation."""

import contextlib
import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.deployment.grid import Run
from tests.killed import killed_after

from fedpact.api import load
from fedpact.cli.deploy import _spend
from fedpact.common.errors import DataError, InputError, PlanError, PolicyRefused
from fedpact.common.format import upper
from fedpact.common.run_folder import exclusive, recover
from fedpact.deployment import local
from fedpact.deployment.extend import extend_deployment
from fedpact.deployment.final_model import FinalModel
from fedpact.deployment.live import take_snapshot
from fedpact.deployment.receipts import build_receipt
from fedpact.deployment.site import Site
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import SampledGaussian, epsilon
from fedpact.privacy.ledger.receipt import receipt
from fedpact.simulation.simulate import simulate

pytestmark = pytest.mark.usefixtures("clock")


@pytest.mark.parametrize("plan", [{}, {"secure_aggregation": {"threshold": 2}}])
def test_extension_needs_the_owners_consent_and_counts_both(federate, plan):
    run = federate(None, rounds=2, about={"purpose": "trying it"}, **plan)
    run()
    for node in run.nodes:
        node.site.ledger.close()
    extended, name, least = extend_deployment(run.directory, 2, None)
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
    again, records = carried_on(run)
    assert [record.round for record in records] == [0, 1, 2, 3, 4]
    assert records[-1].refused == {}
    for node in again.nodes:
        told = receipt(node.directory / "ledger.jsonl")
        assert [*told["runs"]][1] == name
        first, second = told["runs"].values()
        # What a policy is told to allow is what the site adds.
        assert least <= min(e["sigma"] for e in second["events"]) <= least * 1.00002
        # The plan's accountant is RDP, a receipt's the best.
        costs = [
            epsilon({SampledGaussian(e["q"], e["sigma"]): e["spent"]}, part["delta"], "rdp")
            for part in (first, second)
            for e in part["events"]
        ]
        assert again.summary["epsilon"][node.site.name] == pytest.approx(sum(costs))
        assert [event["spent"] for event in second["events"]] == [4]
        delta = first["delta"] + second["delta"]
        by_site = load(node.directory).summary
        assert by_site["epsilon"] == {node.site.name: pytest.approx(sum(costs))}
        assert by_site["delta"] == {node.site.name: delta}
        assert (
            f"{by_site['epsilon'][node.site.name]!r} at δ = {delta!r}" in node.site.cost.describe()
        )
        # To `deploy status`, and where the owner brings the model, as the receipt says it.
        spent = sum(part["epsilon_spent"] for part in (first, second))
        reserved = sum(part["epsilon_reserved"] for part in (first, second))
        row = _spend(local.inspect_deployment(node.directory)["ledgers"][node.site.name], name)
        assert row[:2] == (upper(spent), upper(reserved))
        assert row[4] == upper(delta)
        FinalModel.of(node.directory).bring(None)
        by_owner = load(node.directory).summary
        assert by_owner["epsilon"] == {node.site.name: pytest.approx(spent)}
        assert (by_owner["delta"], by_owner["rounds"]) == ({node.site.name: delta}, 4)
        told = build_receipt(node.directory / "ledger.jsonl")["runs"].values()
        assert [run["purpose"] for run in told] == ["trying it"] * 2


def allow_all(run):
    for node in run.nodes:
        path = node.directory / "policy.toml"
        text = re.sub(r"epsilon_(\w+) = .*", r"epsilon_\1 = 1e3", path.read_text())
        text = re.sub(r"delta_(\w+) = .*", r"delta_\1 = 0.5", text)
        path.write_text(re.sub(r"smallest_sigma = .*", "smallest_sigma = 1e-4", text))


def carried_on(run):
    """The deployment once more, carried out, and its records; no ledger is held any more."""
    again = Run(run.directory)
    try:
        return again, again()
    finally:
        for node in again.nodes:
            node.site.ledger.close()


def test_what_louder_rounds_have_left_at_a_site_is_no_lie(federate):
    """FedDyn's h_i holds noise of all rounds, here a hundred times what the last ones add."""
    run = federate(
        None,
        rounds=3,
        algorithm="feddyn",
        settings={"proximal": 5.0, "learning_rate": 0.1},
        privacy={"accountant": "rdp", "epsilon": 0.05},
    )
    run()
    for node in run.nodes:
        node.site.ledger.close()
    loud = run.nodes[0].site.cost.terms.event.sigma
    extend_deployment(run.directory, 1, 200.0)
    allow_all(run)
    again, records = carried_on(run)
    assert loud > 100 * again.nodes[0].site.cost.terms.event.sigma
    assert records[-1].refused == {}


def test_extended_runs_average_covers_its_last_models(federate):
    server = {"average": "tail", "average_share": 0.6}
    run = federate(None, rounds=2, server=server)
    run()
    for node in run.nodes:
        node.site.ledger.close()
    extend_deployment(run.directory, 1, None)
    allow_all(run)
    _, records = carried_on(run)
    kept = run.directory / "server" / "run"
    w2, w3, average = (
        torch.cat([v.flatten() for _, v in sorted(load_file(kept / f"{name}.safetensors").items())])
        for name in ("model-2", "model", "average")
    )
    torch.testing.assert_close(average, (w2 + w3) / 2)
    assert records[-1].describe_average("tail") == "tail average of rounds 2 to 3"


def files_of(directory):
    found = (path for path in directory.rglob("*") if path.suffix in (".toml", ".json"))
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


@pytest.fixture
def ended(federate):
    run = federate(None, rounds=1)
    run()
    for node in run.nodes:
        node.site.ledger.close()
    return run.directory


def test_parties_that_are_cut_off_while_they_are_extended_agree(ended, tmp_path, monkeypatch):
    """Killed between any two changes of the disk: once all are started, all are of one plan.

    A party that is started by itself before that waits for the others, or is of the plan they get.
    """
    before = files_of(ended)
    whole = Path(shutil.copytree(ended, tmp_path / "whole"))
    extend_deployment(whole, 1, None)
    after = files_of(whole)
    assert {name for name in after if before.get(name) != after[name]} == {
        *("server/run/earlier.json", "server/run/environment.json"),
        *("server/run/plan.json", "server/run/privacy.json", "server/run/first-plan.json"),
        *(f"{place}/{name}" for place in parties_of(ended) for name in SHARED),
    }
    alone = 0
    for changes in itertools.count():
        place = Path(shutil.copytree(ended, tmp_path / f"cut-{changes}"))
        with killed_after(monkeypatch, changes) as died:
            extend_deployment(place, 1, None)
        if not died:
            break
        party = place / ("server", "sites/site-01")[changes % 2]
        found = None
        with contextlib.suppress(DataError):
            recover(party)
            found = files_of(party)
        recover(*local.parties(place).values())
        assert files_of(place) in (before, after)
        assert found in (None, files_of(party))
        alone += found is not None
    assert 0 < alone < changes
    assert changes > 20


SHARED = ("plan.json", "federation.toml")


def parties_of(directory):
    return ["server", *(f"sites/{site.name}" for site in (directory / "sites").iterdir())]


def test_site_alone_is_extended_once_per_ended_run(ended):
    site = ended / "sites" / "site-00"
    assert take_snapshot(site)["status"].startswith("ended")
    extend_deployment(site, 2, None)
    # What watches it knows that this reservation's rounds are still to come.
    found = take_snapshot(site)
    assert (found["status"], found["round"], found["rounds"]) == ("nothing answered yet", 1, 3)
    after = files_of(site)
    with pytest.raises(PlanError, match="not begun since it was extended"):
        extend_deployment(site, 2, None)
    assert files_of(site) == after
    # One that was away at the end, and charged for it all the same.
    other = ended / "sites" / "site-01"
    (other / "run" / "summary.json").unlink()
    extend_deployment(other, 2, None)
    assert (other / "plan.json").read_bytes() == (site / "plan.json").read_bytes()


def test_the_last_round_of_a_site_is_the_last_that_is_its_own(federate):
    """Of a part of the sites in each round, a site that was away at the end may have had its."""
    run = federate(None, rounds=1, sites_per_round=2)
    run()
    (node,) = (n for n in run.nodes if not n.site.cost.epsilon)
    others = [n.directory for n in run.nodes if n is not node]
    for each in run.nodes:
        each.site.ledger.close()
        (each.directory / "run" / "summary.json").unlink()
    for directory in others:
        extend_deployment(directory, 1, None)
    # What it was never asked cannot tell it that the run has ended.
    with pytest.raises(PlanError, match="up to round 0 of 0"):
        extend_deployment(node.directory, 1, None)


def test_a_partys_directory_is_no_simulations(ended):
    """`fedpact resume` of a server that had not begun simulated the run into its directory."""
    plan = Plan.parse(json.loads((ended / "server" / "plan.json").read_text()))
    before = files_of(ended)
    for place in (ended / "server", ended / "sites" / "site-00"):
        with pytest.raises(DataError, match="a deployment's party, whose run goes on"):
            simulate(plan, place)
    assert files_of(ended) == before
    extend_deployment(ended, 1, None)
    with pytest.raises(DataError, match="a deployment's party, whose run goes on"):
        simulate(plan, ended / "server")
    with pytest.raises(PlanError, match="of a deployment `fedpact deploy up`"):
        extend_deployment(ended, 1, None)


def test_what_is_extended_is_nobody_elses_meanwhile(ended, monkeypatch):
    """A server that runs, a party that is started, and a second extension, each at its moment."""
    before = files_of(ended)
    with exclusive(ended / "server"), pytest.raises(InputError, match="has a server already"):
        extend_deployment(ended, 1, None)
    with exclusive(ended / "sites" / "site-00"), pytest.raises(InputError, match="in use already"):
        extend_deployment(ended, 1, None)
    assert files_of(ended) == before

    tried = []

    def another(place):
        for places in (local.parties(ended).values(), [place]):
            with pytest.raises(InputError, match="has a server already, or is being extended"):
                recover(*places)
            tried.append(places)

    monkeypatch.setattr("fedpact.deployment.extend._restate", another)
    assert extend_deployment(ended, 1, None)[0].rounds == 2
    assert len(tried) == 2


def test_a_deployment_that_cannot_be_extended_is_as_it_was(ended, monkeypatch):
    before = files_of(ended)
    (ended / "server" / "run" / "privacy.json").write_text("{}")
    changed = files_of(ended)
    with pytest.raises(KeyError):
        extend_deployment(ended, 1, None)
    assert files_of(ended) == changed
    (ended / "server" / "run" / "privacy.json").write_bytes(before["server/run/privacy.json"])
    monkeypatch.setattr("fedpact.deployment.extend._restate", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        extend_deployment(ended, 1, None)
    assert files_of(ended) == before
