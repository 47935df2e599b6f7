"""Labels that are numbers have no accuracy: wherever a model is judged, it is by loss and R²."""

import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

import fedpact
from fedpact.cli.commands.compare import _News, _print
from fedpact.deployment.snapshot import take_snapshot
from fedpact.deployment.snapshot import text as for_prometheus
from fedpact.report.comparison import document

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 3))
FRAME = pd.DataFrame(X, columns=list("abc")).assign(bp=100 + 20 * X[:, 0])
PLAN = {
    "model": "logistic",
    "label": "bp",
    "task": {"kind": "regression", "range": [0, 200]},
    "sites": 2,
    "rounds": 3,
    "partition": {"held_out": 0.25},
    "privacy": {"mode": "none"},
    "settings": {"learning_rate": 0.5},
}
_NONE = re.compile(r"not a number|\bnan\b|accuracy", re.IGNORECASE)


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    """A folder with the records as a file."""
    place = tmp_path_factory.mktemp("numbers")
    FRAME.to_csv(place / "own.csv", index=False)
    return place


@pytest.fixture(scope="module")
def result(where):
    return fedpact.run(fedpact.Plan(data=str(where / "own.csv"), **PLAN), where / "run")


def test_a_comparison_shows_loss_and_measures(where, capsys):
    news, live = [], _News(Console(stderr=True, quiet=False), 2)
    found = fedpact.compare(
        {"one": fedpact.Plan(**PLAN)}, seeds=1, out=where / "c", on_news=news.append, data=FRAME,
        sweep={"settings.learning_rate": [0.1, 0.5]},
    )  # fmt: skip
    page = (where / "c" / "comparison.html").read_text(encoding="utf-8")
    assert not re.search(r"not a number|Accuracy", page)
    for told in (">mean loss<", ">R²<", "Mean loss over settings.learning_rate"):
        assert told in page
    text = (where / "c" / "comparison.json").read_text(encoding="utf-8")
    raw = json.loads(text, parse_constant=pytest.fail)
    assert raw == json.loads(json.dumps(document(found), default=str))
    one = found.entries[0].runs[0]
    entry = next(iter(raw["entries"].values()))
    assert entry["accuracy"] is None
    assert entry["loss"]["mean"] == one.loss
    assert "mean loss" in found._repr_html_()
    assert {"loss", "r2"} <= set(found.frame().columns)
    assert not _NONE.search(repr(found))
    for each in news:
        # As it comes through a pipe of strict JSON.
        live(each if each.ended else replace(each, accuracy=None))
    _print(found)
    told = capsys.readouterr()
    assert not _NONE.search(told.out + told.err)
    assert re.search(r"seed 0: round 0/3  mean loss 0\.", told.err)


def test_the_command_line_shows_loss_and_measures(where, result, monkeypatch, typed):
    monkeypatch.chdir(where)
    plan = str(result.folder / "plan.json")
    ran = typed("run", plan, "--out", "typed")
    ran = ran.out + ran.err
    assert not _NONE.search(ran)
    assert re.search(r"round 3/3  mean loss 0\.", ran)
    assert re.search(r"worst site +[0-9.]+ +mean loss at ", ran)
    tried = typed("evaluate", result.folder, "own.csv").out
    assert not _NONE.search(tried)
    assert tried.startswith("mean loss ")
    assert "R² 0." in tried
    said = typed("evaluate", result.folder, "own.csv", "--json").out
    raw = json.loads(said, parse_constant=pytest.fail)
    assert raw["accuracy"] is None
    assert 0 < raw["metrics"]["r2"] < 1


def test_python_shows_loss_and_measures(where, result):
    assert "mean loss 0." in repr(result)
    assert not _NONE.search(repr(result) + result._repr_html_())
    score = result.evaluate(FRAME)
    missed = ((result.predict(FRAME).labels - FRAME.bp) ** 2).mean()
    assert score.metrics == {"r2": pytest.approx(1 - missed / FRAME.bp.var(ddof=0), abs=1e-4)}
    assert "loss" in result.figures()
    assert "accuracy" not in result.figures()
    told = for_prometheus(take_snapshot(result.folder))
    assert "fedpact_accuracy" not in told
    assert "fedpact_loss{" in told


def test_the_average_of_the_models_is_shown_by_its_loss(where, tmp_path):
    plan = fedpact.Plan(data=str(where / "own.csv"), **PLAN, server={"average": "exponential"})
    result = fedpact.run(plan, tmp_path / "r")
    page = (result.folder / "report.html").read_text(encoding="utf-8")
    assert "not a number" not in page
    assert "averaged model" in page
