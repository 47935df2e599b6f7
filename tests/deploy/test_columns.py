"""Columns that are filled, encoded and scaled: a deployment trains on what its simulation does."""

import csv

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra fedpact[deploy] is not installed")

import torch
from safetensors.torch import load_file
from tests.deploy.grid import NAMES

from fedpact.engines.parties.federation import Federation
from fedpact.engines.parties.site import Site
from fedpact.engines.simulation import simulate
from fedpact.plan import Plan

DECLARED = {
    "age": {"range": [20, 80], "clamp": True, "fill": 50, "scale": "range"},
    "bmi": {"scale": "standard", "mean": 25, "deviation": 5, "fill": 30},
    "ward": {"categories": ["A", "B", "C"], "other": "C", "fill": "A", "scale": "one-hot"},
}


def table(path, n=90):
    rng = np.random.default_rng(3)
    rows = []
    for k in range(n):
        age = "" if k % 9 == 0 else f"{rng.integers(15, 90)}"
        ward = rng.choice(["A", "B", "C", "D", ""])
        rows.append([age, f"{rng.normal(25, 5):.2f}", ward, rng.choice(["no", "yes"])])
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["age", "bmi", "ward", "out"], *rows])
    return str(path)


def test_a_deployment_has_the_simulations_bits(federate, tmp_path):
    asked = {
        "data": table(tmp_path / "t.csv"),
        "label": "out",
        "rounds": 3,
        "records": {"columns": DECLARED},
    }
    run = federate({"seeds": "test"}, **asked)
    run()
    plan = Plan.parse({**run.nodes[0].site.plan.model_dump(mode="json"), **asked})
    simulate(plan, tmp_path / "s")
    deployed = load_file(run.directory / "server" / "run" / "model.safetensors")
    simulated = load_file(tmp_path / "s" / "model.safetensors")
    assert sorted(deployed) == sorted(simulated)
    assert all(torch.equal(deployed[name], simulated[name]) for name in deployed)


def test_a_site_reads_its_own_table_and_says_which_columns_are_wide(make, tmp_path, caplog):
    data = table(tmp_path / "t.csv")
    declared = {**DECLARED, "bmi": {"range": [10, 60], "clamp": True}}
    directory = make(
        tmp_path / "d", {"records": False}, data=data, label="out", records={"columns": declared}
    )
    home = directory / "sites" / NAMES[0]
    federation = Federation.read(home / "federation.toml")
    assert federation.records.columns["ward"].other == "C"
    text = (home / "site.toml").read_text().replace("/path/to/records.csv", data)
    (home / "site.toml").write_text(text)
    caplog.clear()
    with Site(home) as site:
        assert site._records.x.shape == (90, 5)
        assert site._records.x[:, 2:].sum(1).tolist() == [1.0] * 90
    # By the declaration: 60, not the widest value that this site has.
    assert "bmi (60)" in caplog.text
    assert "federation.toml" in caplog.text
