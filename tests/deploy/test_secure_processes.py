"""Secure aggregation between real processes on loopback, with TLS and keys on."""

import json

import torch
from safetensors.torch import load_file
from tests.waiting import wait_for

from fedpact.deploy import local
from fedpact.engines.simulation import simulate
from fedpact.plan import Plan

# float32's own rounding, as in test_secure.py.
CLOSE = 1e-5


def test_three_processes_train_the_model_of_the_run_without_it(make, tmp_path):
    """Digits, two rounds, the same draws in both: the sums are exact to 4e-13."""
    directory = make(
        tmp_path / "d",
        {"seeds": "test", "patience": {"join_seconds": 3600}},
        rounds=2,
        secure_aggregation={"threshold": 2},
    )
    local.start(directory)
    try:
        wait_for(lambda: local.look(directory)["status"] != "not ended", directory)
    finally:
        local.stop(directory)
        for path in directory.rglob("log.txt"):
            print(path, path.read_text()[-2000:], sep="\n")
    run = directory / "server" / "run"
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert [line["refused"] for line in lines] == [{}] * 3

    raw = json.loads((directory / "server" / "plan.json").read_bytes())
    plain = Plan.parse({**raw, "secure_aggregation": {"threshold": 0}})
    reference = simulate(plain, tmp_path / "plain")
    found, expected = load_file(run / "model.safetensors"), reference.model.state_dict()
    assert found.keys() == expected.keys()
    for name, w in expected.items():
        assert float((found[name] - w).abs().max()) <= CLOSE
    # A model that never moved would agree, too; and one that agreed bit for bit was not summed.
    assert reference.records[-1].loss < reference.records[0].loss - 0.1
    assert any(not torch.equal(found[name], w) for name, w in expected.items())
    assert [line["epsilon"] for line in lines] == [r.epsilon for r in reference.records]
