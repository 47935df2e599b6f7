"""What commands say of evaluations: before a run, after it, and from its ledgers."""

import json

import pytest
from tests.privacy.test_persons import table

from fedpact.cli.commands import ledger as ledgers
from fedpact.cli.commands import plan as plans
from fedpact.cli.commands import run as runs
from fedpact.common.errors import DataError, PlanError
from fedpact.common.format import upper
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import SampledGaussian
from fedpact.privacy.accounting.group_privacy import epsilon_per_person
from fedpact.privacy.ledger.receipt import receipt

HELD = ["evaluation.share=0.3", "evaluation.epsilon=2"]
SMALL = ["rounds=2", "sites=2", "privacy.accountant=rdp", *HELD]


def five(run):
    """What all that a receipt's run reserved costs a person with five records."""
    events = {SampledGaussian(e["q"], e["sigma"]): e["reserved"] for e in run["events"]}
    return epsilon_per_person(events, run["delta"], 5)


def test_a_run_says_what_evaluations_cost_and_showed(tmp_path, capsys):
    runs.run(None, SMALL, tmp_path / "run", "local", as_json=False)
    told = " ".join(capsys.readouterr().out.split())

    found = json.loads((tmp_path / "run" / "summary.json").read_text())["evaluation"]
    spent = upper(max(found["epsilon_spent"].values()))
    assert f"({spent}, 1e-05) of the (2, 1e-05) that evaluations may cost a held-out record" in told
    assert "accuracy, released " in told
    # The ledger's receipt: a run and its evaluations are one run, whose larger ε is a record's.
    path = next((tmp_path / "run").rglob("ledger.jsonl"))
    proof = receipt(path)
    training, evaluation = sorted(proof["runs"].values(), key=lambda run: run["beside"] or "")
    assert proof["epsilon_reserved"] == max(
        training["epsilon_reserved"], evaluation["epsilon_reserved"]
    )
    assert "all that the run named here may release" in proof["sentence"]
    # Nobody knows whose the digits are: of a patient's visits some may be on either side.
    ledgers.show(tmp_path / "run", as_json=False)
    told = " ".join(capsys.readouterr().out.split())
    assert (
        f"a patient with five visits has at most ε = {upper(five(training) + five(evaluation))}"
        in told
    )
    assert "with evaluations the sum of both, at the sum of both δ" in told


@pytest.mark.parametrize("person", ["", "patient_id"])
def test_a_plan_says_beforehand_what_evaluations_cost(tmp_path, capsys, person):
    path = table(tmp_path / "t.csv")
    if not person:
        lines = [line.split(",", 1)[1] for line in path.read_text().splitlines()]
        path.write_text("\n".join(lines) + "\n")
    asked = [f"data={path}", "label=sick", *SMALL, *([f"person={person}"] if person else [])]
    plans.plan(None, asked, as_json=True)
    found = json.loads(capsys.readouterr().out)
    plans.plan(None, asked)
    told = " ".join(capsys.readouterr().out.split())
    once = Plan.read(None, asked).evaluation_terms
    of_five = epsilon_per_person(once.history, 1e-5, 5)
    assert found["evaluation"]["epsilon_per_person"]["5"] == pytest.approx(of_five)
    assert f"5 records {upper(of_five)}" in told
    assert "1 evaluations with noise of deviation" in told
    assert "by training" in found["per_person"]
    both = "as all records of a person are on one side" if person else "at most the sum of both ε"
    assert both in told


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (['partition.kind="natural"', 'partition.held_out="own"'], "own choice would both say"),
        (['evaluation.releases=["roc"]'], "10 classes"),
        (['evaluation.releases=["loss"]'], "needs the table of hits"),
        (["evaluation.share=0"], "no record is held out"),
    ],
)
def test_incompatible_settings_are_refused(more, told):
    with pytest.raises((PlanError, DataError), match=told):
        plans.plan(None, [*SMALL, *more])
