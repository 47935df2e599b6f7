import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedpact.cli.console import show
from fedpact.cli.main import app
from fedpact.common.messages import RoundRecord
from fedpact.plan import Plan
from fedpact.simulation.simulate import simulate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A real run, so that the report is held to what runs write."""
    plan = Plan.parse(
        {
            "rounds": 2,
            "sites": 3,
            "privacy": {"epsilon": 1.5},
            "run": {"workers": 1, "evaluate_every": 1},
        }
    )
    return simulate(plan, tmp_path_factory.mktemp("runs") / "run").folder


def command(*arguments):
    return CliRunner().invoke(app, ["report", *arguments], env={"COLUMNS": "200"})


def no_constant(name):
    raise ValueError(f"{name} is no JSON")


def test_json_is_one_document_with_each_sites_epsilon(folder):
    result = command(str(folder), "--json")
    document = json.loads(result.stdout, parse_constant=no_constant)
    assert document["summary"] == json.loads((folder / "summary.json").read_text())
    assert document["privacy"]["adjacency"] == "add/remove one record"
    assert document["privacy"]["accountant"] == "best"
    assert document["privacy"]["mechanism"] == "per_sample"
    assert document["audit"] is None
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    spent = RoundRecord.from_json(lines[-1]).epsilon
    assert len(spent) == 3
    assert {n: s["epsilon_spent"] for n, s in document["sites"].items()} == spent
    assert {s["epsilon_allowed"] for s in document["sites"].values()} == {1.5}
    assert {s["delta"] for s in document["sites"].values()} == {1e-5}
    assert Path(document["report"]) == folder / "report.html"


def test_json_has_null_for_what_json_cannot_say(capsys):
    def text():
        raise AssertionError("text was asked for")

    values = {"bad": [math.nan, (math.inf, -math.inf)], "good": {1: 2.5, "é": Path("a")}}
    show(values, True, text)
    printed = json.loads(capsys.readouterr().out, parse_constant=no_constant)
    assert printed == {"bad": [None, [None, None]], "good": {"1": 2.5, "é": "a"}}
