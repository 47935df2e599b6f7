"""A loss and metrics that were handed in go through compare, resume, extend and load."""

import numpy as np
import pytest
import torch

import fedpact
from fedpact.common.errors import DataError, ModelError, PlanError
from fedpact.common.user_code import get_handed_in
from fedpact.report.page import repeat
from fedpact.report.run_summary import read_run

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)
LOSS = torch.nn.CrossEntropyLoss(reduction="none")
SETTINGS = {
    "sites": 2,
    "rounds": 2,
    "partition": {"held_out": 0.2},
    "privacy": {"mode": "none"},
    "settings": {"learning_rate": 0.5},
}

pytestmark = pytest.mark.usefixtures("no_page")


def right(outputs, y):
    return float((outputs.argmax(1) == y).double().mean())


def local():
    """A metric that no other process can import."""
    return lambda outputs, y: right(outputs, y)


@pytest.fixture
def elsewhere(monkeypatch):
    """Forget what was handed in, as another process would."""

    def forget():
        monkeypatch.setattr("fedpact.common.user_code._kept", {})

    return forget


def test_passed_objects_are_passed_again(tmp_path, elsewhere):
    share = local()
    share.__name__ = "share"
    task = {"loss": LOSS, "metrics": [share, "auc"]}
    stopped = fedpact.run("logistic", (X, Y), task=task, **SETTINGS, out=tmp_path / "r",
                          stop=lambda: True)  # fmt: skip
    plan = fedpact.Plan.read(stopped.folder / "plan.json")
    assert set(get_handed_in(plan.document())) == {"data", "task.loss", "task.metrics"}
    command, _ = repeat(read_run(stopped.folder))
    assert command.endswith("data=..., loss=..., metrics=[...])")
    elsewhere()
    with pytest.raises(ModelError, match=r"pass the same again, as loss=\.\.\. of fedpact.run"):
        fedpact.run(plan, stopped.folder, data=(X, Y))
    given = {"data": (X, Y), "loss": LOSS, "metrics": [share, "auc"]}
    result = fedpact.run(plan, stopped.folder, **given)
    assert result.summary["share"] == pytest.approx(result.summary["accuracy"])
    score = result.evaluate(X, Y)
    elsewhere()
    more = {"rounds": 1, "data": (X, Y), "loss": LOSS}
    with pytest.raises(PlanError, match="give the same, or start"):
        fedpact.extend(result.folder, **{**more, "loss": right})
    assert fedpact.load(result.folder).predict(X).labels.tolist()
    with pytest.raises(ModelError, match=r"loss=\.\.\. of fedpact.run or fedpact.load"):
        fedpact.load(result.folder).evaluate(X, Y)
    with pytest.raises(ModelError, match=r"loss is .*, but the run's is"):
        fedpact.load(result.folder, loss=right)
    loaded = fedpact.load(result.folder, loss=LOSS, metrics=[share, "auc"])
    assert loaded.evaluate(X, Y) == score
    assert score.metrics["share"] == pytest.approx(score.accuracy)
    elsewhere()
    kept = (result.folder / "plan.json").read_bytes()
    with pytest.raises(DataError, match=r"passed in from Python .* pass the same records"):
        fedpact.extend(result.folder, 1)
    with pytest.raises(ModelError, match=r"pass the same again, as loss=\.\.\."):
        fedpact.extend(result.folder, 1, data=(X, Y))
    assert not (tmp_path / "r-more").exists()
    assert (result.folder / "plan.json").read_bytes() == kept
    longer = fedpact.extend(result.folder, **more, metrics=[share, "auc"])
    assert longer.records[-1].round == 1


def test_a_loss_goes_through_a_comparison(tmp_path):
    plans = {"own": fedpact.Plan(model="logistic", task={"loss": LOSS}, **SETTINGS),
             "ours": fedpact.Plan(model="logistic", **SETTINGS)}  # fmt: skip
    found = fedpact.compare(plans, seeds=1, data=(X, Y), out=tmp_path / "c")
    assert not any(entry.missing for entry in found.entries)
    own, ours = (entry.runs[0] for entry in found.entries)
    assert own.loss == pytest.approx(ours.loss, rel=1e-4)


@pytest.mark.parametrize("words", [["resume", "r"], ["run", "r/plan.json"], ["plan", "r/plan.json"],
                                   ["audit", "r"]])  # fmt: skip
def test_a_command_says_what_to_do_with_records_of_python(
    tmp_path, monkeypatch, capsys, typed, words
):
    import pandas as pd

    monkeypatch.chdir(tmp_path)
    frame = pd.DataFrame(X, columns=list("abcd")).assign(out=Y)
    private = {**SETTINGS, "privacy": {"epsilon": 2.0, "delta": 1e-5}}
    fedpact.run("logistic", frame, label="out", **private, out="r", stop=lambda: True)
    capsys.readouterr()
    found = typed(*words)
    assert found.code == 2
    assert "was passed in from Python" in found.err
    assert "data=...)" in found.err
    assert "Traceback" not in found.err


def test_one_word_is_a_kind_or_a_metric():
    assert fedpact.Plan(task="multi_label").task.kind == "multi_label"
    with pytest.raises(PlanError, match="low < high"):
        fedpact.Plan(task="regression")
    with pytest.raises(PlanError, match="'ranking'"):
        fedpact.Plan(task="ranking")
    assert fedpact.Plan(task={"metrics": "auc"}).task.metrics == ["auc"]
    assert fedpact.Plan(task={"metrics": right}).task.metrics == [f"{__name__}:right"]
