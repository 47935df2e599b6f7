"""A part of the sites each round, in a deployment: real sites behind a network in memory.

References: the plan's public draw, the sites' own ledgers, and the simulation of the same plan.
"""

import pytest
import torch
from safetensors.torch import load_file
from tests.deployment.grid import FLOATS, NAMES

from fedpact.client import read_memory
from fedpact.common.errors import PlanError
from fedpact.common.messages import EVALUATION, Refusal, Reply, Task, from_bytes
from fedpact.deployment.final_model import bring
from fedpact.deployment.site import Site
from fedpact.deployment.store import StoreSlot
from fedpact.privacy.accounting.accountant import SampledGaussian, epsilon
from fedpact.privacy.ledger.hash_chain import read_entries
from fedpact.simulation.simulate import simulate

pytestmark = pytest.mark.usefixtures("clock")

PLAN = {"rounds": 5, "sites_per_round": 2}


def own(plan, name):
    part = plan.participants(NAMES)
    return [number for number in range(1, plan.rounds + 1) if name in part.of(number)]


def charged(node):
    found = read_entries(node.directory / "ledger.jsonl")
    return [e["round"] for e in found if e["kind"] == "charge"]


def test_only_drawn_sites_are_asked_as_in_simulation(federate, tmp_path):
    run = federate({"seeds": "test"}, **PLAN)
    records, plan = run(), run.nodes[0].site.plan
    assert run.summary["status"] == "finished"
    simulated = simulate(plan, tmp_path / "s")
    assert [r.asked for r in records] == [r.asked for r in simulated.records]
    assert not any(record.refused for record in records)
    for node in run.nodes:
        name = node.directory.name
        # Before it is told in full, a site may be told changes to a model that it does not have.
        heard = [from_bytes(block) for block in node.heard]
        assert sorted({task.round for task in heard}) == own(plan, name) == charged(node)
        (promised,) = (
            e for e in read_entries(node.directory / "ledger.jsonl") if e["kind"] == "reserve"
        )
        assert sum(n for _, _, n in promised["events"]) == 2 * len(own(plan, name))
        # The server's ε of a site is the one of its ledger.
        cost = {SampledGaussian(q, s): n for q, s, n in promised["events"]}
        told = pytest.approx(epsilon(cost, 1e-5, "rdp"))
        assert records[-1].epsilon[name] == told
        for record, before in zip(records[1:], records, strict=False):
            rose = record.epsilon[name] > before.epsilon[name]
            assert rose == (record.round in own(plan, name))
    model = load_file(run.directory / "server" / "run" / "model.safetensors")
    for key, value in simulated.model.state_dict().items():
        assert torch.equal(model[key], value)


def test_site_refuses_a_round_it_was_not_drawn_for(make, tmp_path):
    directory = make(tmp_path / "d", None, **PLAN, **FLOATS) / "sites" / "site-00"
    with Site(directory) as site:
        plan, length = site.plan, site.ledger.length
        others = sorted({*range(1, 6)} - {*own(plan, "site-00")})
        assert others
        for number in others:
            task = Task(site.run, number, "fedavg", {"w": torch.zeros(650)}, {})
            answer = from_bytes(site.handle(task))
            assert isinstance(answer, Refusal)
            assert answer.code == "task"
        assert site.ledger.length == length
        first = own(plan, "site-00")[0]
        task = Task(site.run, first, "fedavg", {"w": torch.zeros(650)}, {})
        assert isinstance(from_bytes(site.handle(task)), Reply)


def test_an_evaluation_asks_all_sites(federate):
    held = {"share": 0.3, "every": 2, "epsilon": 4.0}
    run = federate(None, **PLAN | {"rounds": 3}, evaluation=held)
    records, plan = run(), run.nodes[0].site.plan
    for record in records[1:]:
        due = record.round % 2 == 0 or record.round == plan.rounds
        assert sorted(record.evaluation) == (list(NAMES) if due else [])
    for node in run.nodes:
        kinds = [(from_bytes(b).algorithm, from_bytes(b).round) for b in node.heard]
        assert {t for a, t in kinds if a == EVALUATION} == {2, 3}
        assert {t for a, t in kinds if a != EVALUATION} == {*own(plan, node.directory.name)}


def test_a_sites_final_model_has_the_head_of_its_last_round(federate):
    run = federate(None, **PLAN, **FLOATS, local={"head": 10})
    run()
    for node in run.nodes:
        last = own(node.site.plan, node.directory.name)[-1]
        kept = read_memory(StoreSlot.of_memory(node.site._store, node.site.run), last).vectors[
            "heads/own"
        ]
        path = node.directory / "run" / "model.safetensors"
        assert torch.equal(load_file(path)["1.bias"], kept)
        # Of a site that was away at the end, and whose owner brings the model, it is the same.
        path.unlink()
        node.site.close()
        bring(node.directory, None)
        assert torch.equal(load_file(path)["1.bias"], kept)


def test_fewer_sites_than_replies_that_a_round_needs_are_refused(make, tmp_path):
    directory = make(tmp_path / "d", None, **PLAN)
    path = directory / "sites" / "site-00" / "federation.toml"
    text = path.read_text()
    assert "least_replies" in text
    lines = [
        "least_replies = 3" if line.lstrip("# ").startswith("least_replies") else line
        for line in text.splitlines()
    ]
    path.write_text("\n".join(lines))
    with pytest.raises(PlanError, match=r"sites_per_round = 2.*least_replies = 3"):
        Site(path.parent)
