"""Secure aggregation between real processes on loopback, with TLS and keys on."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.deployment.grid import allow

from fedpact.deployment import local
from fedpact.plan import Plan
from fedpact.privacy.ledger.receipt import receipt
from fedpact.simulation.simulate import simulate


# That the bits are the simulation's is tested in memory (test_secure), and that processes carry
# whatever bits there are without secure aggregation (test_federation).
@pytest.mark.slow
def test_shared_noise_processes_train_the_simulated_model(make, tmp_path):
    """Digits, two rounds, the same draws in both: whole numbers are summed exactly, bit for bit."""
    directory = make(
        tmp_path / "d",
        {"seeds": "test", "patience": {"join_seconds": 3600}},
        rounds=2,
        sites=3,
        settings={"local_steps": 1},
        secure_aggregation={"threshold": 3},
        privacy={"trust": "sum", "honest": 2, "accountant": "rdp"},
    )
    allow(directory)
    run = local.run_all_parties(directory)
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert [line["refused"] for line in lines] == [{}] * 3

    plan = Plan.parse(json.loads((directory / "server" / "plan.json").read_bytes()))
    reference = simulate(plan, tmp_path / "simulated")
    found, expected = load_file(run / "model.safetensors"), reference.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], w) for name, w in expected.items())
    # A model that never moved would agree, too.
    assert reference.records[-1].loss < reference.records[0].loss
    for line, record in zip(lines, reference.records, strict=True):
        assert line["epsilon"] == record.epsilon
        assert line["epsilon_alone"] == record.epsilon_alone
    for site in sorted((directory / "sites").iterdir()):
        spent = next(iter(receipt(site / "ledger.jsonl")["runs"].values()))
        # The receipt takes the best accountant, the run the one of its plan.
        assert 0 < spent["epsilon_spent"] <= lines[-1]["epsilon"][site.name]
        assert spent["epsilon_alone_spent"] <= lines[-1]["epsilon_alone"][site.name]
