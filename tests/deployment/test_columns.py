"""Columns that are filled, encoded and scaled: a deployment trains on what its simulation does."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from tests.deployment.grid import NAMES, bound_on_spent, charged, content, read_from
from tests.tables import write_csv

from fedpact.api import load
from fedpact.common.errors import DataError, PlanError
from fedpact.common.messages import Refusal, Reply, Task, from_bytes, to_bytes
from fedpact.common.params import FlatModel
from fedpact.deployment import federation
from fedpact.deployment.flower.transport import TooFewReplies
from fedpact.deployment.site import Site, answer
from fedpact.simulation.setup import SimulationSetup
from fedpact.simulation.simulate import simulate

pytestmark = pytest.mark.usefixtures("clock")

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
    return str(write_csv(path, ["age", "bmi", "ward", "out"], *rows))


def test_site_drops_records_with_undefined_scaled_values(make, tmp_path, caplog):
    data = table(tmp_path / "t.csv")
    declared = {**DECLARED, "bmi": {**DECLARED["bmi"], "deviation": 0.5}}
    directory = make(
        tmp_path / "d", {"records": False}, data=data, label="out", records={"columns": declared}
    )
    home = directory / "sites" / NAMES[0]
    read_from(data, home)
    with Site(home) as site:
        before = site._records._records.x
    with Path(data).open("a") as file:
        file.write("50,3e38,A,no\n")
    with Site(home) as site:
        assert torch.equal(site._records._records.x, before)
    assert "1 of 91 records have no finite numbers as they are scaled" in caplog.text


MEANS = "columns/means"
RELEASED = {
    "age": {"range": [15, 90], "clamp": True, "fill": 50, "scale": "released"},
    "bmi": {"range": [10, 40], "clamp": True, "fill": 25, "scale": "released"},
    "ward": {"categories": ["A", "B", "C"], "other": "C", "fill": "A", "scale": "one-hot"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return table(tmp_path_factory.mktemp("data") / "t.csv")


@pytest.fixture
def begin(federate, data):
    """begin(choices, **plan) -> a federation whose columns are scaled by released numbers."""
    asked = {"data": data, "label": "out", "rounds": 2}

    def new(choices=None, **changes):
        whole = {**asked, "records": {"columns": RELEASED}, **changes}
        return federate(choices, **whole), whole

    return new


def releases(node):
    lines = (node.directory / "ledger.jsonl").read_text().splitlines()
    entries = [e for e in map(json.loads, lines) if e.get("purpose") == ["columns moments"]]
    return [(e["round"], e["attempt"], e["count"]) for e in entries]


def tensors(path):
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("threshold", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_column_scales_are_released_once_as_in_simulation(begin, tmp_path, threshold):
    """Under secure aggregation, too, where no single site's means are seen."""
    run, asked = begin({"seeds": "test"}, secure_aggregation={"threshold": threshold})
    records = run()
    assert [record.refused for record in records] == [{}] * 3
    simulate(run.plan(**asked), tmp_path / "s")
    there = run.directory / "server" / "run"
    deployed, simulated = tensors(there), tensors(tmp_path / "s")
    assert all(torch.equal(deployed[name], simulated[name]) for name in simulated)
    found = json.loads((there / "columns.json").read_text())
    assert list(found) == ["age", "bmi"]
    assert found == json.loads((tmp_path / "s" / "columns.json").read_text())
    assert [releases(node) for node in run.nodes] == [[(0, 0, 1)]] * 3
    told = json.loads((there / "privacy.json").read_text())
    assert any("released once with noise" in line for line in told["covers"])
    assert records[-1].epsilon == pytest.approx(
        {node.site.name: bound_on_spent(node.site) for node in run.nodes}
    )
    # The server is started again: nothing is asked for a second time.
    run()
    assert [releases(node) for node in run.nodes] == [[(0, 0, 1)]] * 3


def of_tables(federate, data, declared):
    """A federation whose sites have the same table."""
    plan = {"data": data, "label": "out", "rounds": 2, "records": {"columns": declared}}
    return federate({"records": False}, table=data, **plan)


def test_a_site_predicts_in_its_own_units_and_names(begin, tmp_path):
    """As its records were read: site.toml says what its columns are."""
    run, asked = begin()
    run()
    lines = Path(asked["data"]).read_text().splitlines()
    names, *rows = [line.split(",") for line in lines]
    age = names.index("age")
    own = [[*names[:age], "months", *names[age + 1 :]]]
    own += [[*row[:age], row[age] and repr(12 * float(row[age])), *row[age + 1 :]] for row in rows]
    table = tmp_path / "own.csv"
    table.write_text("\n".join(",".join(row) for row in own))
    party = run.nodes[0].directory
    expected = load(party).predict(asked["data"]).probabilities
    with (party / "site.toml").open("a") as settings:
        settings.write('\n[columns]\nage = { column = "months", factor = 0.08333333333333333 }\n')
    result = load(party)
    found = [result.predict(table), result.predict(pd.read_csv(table))]
    for one in found:
        np.testing.assert_allclose(one.probabilities, expected, rtol=1e-5)
    with pytest.raises(DataError, match="no column 'months'"):
        result.predict(asked["data"])


def test_a_public_test_set_is_scaled_as_the_sites_tables_are(federate, data):
    """An array has no names: its columns are those of federation.toml, in that order."""
    run = of_tables(federate, data, RELEASED)
    raw = SimulationSetup.of(run.plan(data=data)).raw
    np.savez(run.directory / "server" / "test.npz", x=raw.x.numpy(), y=raw.y.numpy())
    last = run()[-1]
    expected = load(run.directory / "server").evaluate(data)
    assert (last.accuracy, last.loss) == pytest.approx((expected.accuracy, expected.loss))
    for party in (run.directory / "server", run.nodes[0].directory):
        assert json.loads((party / "run" / "records.json").read_text())["features"] == [*RELEASED]


@pytest.mark.parametrize(("spare", "again"), [(0, [(0, 0, 1)]), (1, [(0, 0, 1), (0, 0, 1)])])
def test_crashed_site_pays_again_within_its_reservation(begin, spare, again):
    run, _ = begin(budget={"spare_rounds": spare})
    node = run.nodes[0]

    def dies(message, answer):
        if len(node.heard) == 1:
            answer()
            # Charged, and gone before the reply was written down.
            node.site._store.remove("reply")
            return None
        return answer()

    node.behave = dies
    records = run()
    assert releases(node) == again
    assert records[0].refused == ({} if spare else {node.site.name: "budget"})
    # It is told the others' constants, and trains.
    assert [record.refused for record in records[1:]] == [{}, {}]
    assert bound_on_spent(node.site) <= 2.0


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lambda r: {"vectors": {MEANS: r.vectors[MEANS] + 1e30}}, "far off"),
        (lambda r: {"vectors": {MEANS: r.vectors[MEANS] * math.nan}}, "not finite"),
        (lambda r: {"numbers": {**r.numbers, "columns/noise": 0.0}}, "far off"),
        (lambda r: {"numbers": {**r.numbers, "columns/part": 0.5}}, "far off"),
        (lambda r: {"vectors": {MEANS: r.vectors[MEANS][:2]}}, "form"),
    ],
)
def test_false_column_release_is_rejected_and_run_starts(begin, lie, why):
    run, _ = begin(rounds=1)
    node = run.nodes[1]

    def lies(message, answer):
        honest = answer()
        reply = content(honest)
        if isinstance(reply, Reply) and reply.round == 0:
            return node.change(message, lambda: honest, **lie(reply))
        return honest

    node.behave = lies
    records = run()
    assert records[0].refused == {node.site.name: f"rejected: {why}"}
    found = json.loads((run.directory / "server" / "run" / "columns.json").read_text())
    assert all(-1 <= one["mean"] <= 1 and one["deviation"] <= 1 for one in found.values())


def test_a_site_refuses_round_0_of_a_run_that_has_none(federate):
    run = federate(None, rounds=2)
    node = run.nodes[0]
    w = FlatModel(run.coordinator.module()).vector
    task = Task(node.site.run, 0, "fedavg", {"w": w}, {})
    refusal = from_bytes(answer(node.site, to_bytes(task))[0])
    assert isinstance(refusal, Refusal)
    assert refusal.code == "task"
    assert node.site.ledger.spent(node.site.run) == {}


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("federation.toml", ", 90.0]", ", 99.0]"),
        ("plan.json", '"learning_rate": 0.5', '"learning_rate": 0.25'),
    ],
)
def test_a_site_with_other_terms_ends_the_start_uncharged(begin, file, before, after):
    run, _ = begin()
    node = run.nodes[1]
    path = node.directory / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    node.restart()
    with pytest.raises(
        TooFewReplies, match=r"2 of 3 sites are ready.* site-01 has a plan\.json or"
    ):
        run()
    assert [charged(node) for node in run.nodes] == [0, 0, 0]


def test_addresses_keys_and_patience_are_of_each_party(begin):
    run, _ = begin()
    site = run.nodes[1].site
    member = site.federation.sites["site-00"]
    other = site.federation.model_copy(
        update={
            "address": "other.example.org:1",
            "patience": site.federation.patience.model_copy(update={"retries": 9}),
            "sites": {**site.federation.sites, "site-00": member.model_copy(update={"key": "x"})},
        }
    )
    assert other.agreed(site.plan) == site.agreed
    larger = {**site.federation.sites, "site-00": member.model_copy(update={"size": 1e6})}
    assert other.model_copy(update={"sites": larger}).agreed(site.plan) != site.agreed


@pytest.mark.parametrize(("version", "alike"), [("0.1.9", True), ("0.2.0", False)])
def test_parties_have_the_same_minor_version(version, alike, begin, monkeypatch):
    run, _ = begin()
    site = run.nodes[1].site
    monkeypatch.setattr(federation, "version", lambda name: {"fedpact": version}[name])
    assert (site.federation.agreed(site.plan) == site.agreed) is alike


def test_parties_that_declare_otherwise_do_not_open(begin):
    run, _ = begin()
    node = run.nodes[0]
    path = node.directory / "federation.toml"
    path.write_text(path.read_text().replace('"released"', '"range"', 1))
    with pytest.raises(PlanError, match=r'1 columns with scale = "released", plan\.json 2'):
        node.restart()
