"""What TensorBoard and MLflow are told of a run is what its records say, each number once."""

import json
import sys
from types import SimpleNamespace

import pytest

import fedpact
from fedpact.common.errors import DataError, InputError
from fedpact.common.messages import RoundRecord
from fedpact.plan import Plan
from fedpact.simulation import trackers
from fedpact.simulation.trackers import Log, numbers

SMALL = {"rounds": 2, "sites": 2, "privacy": {"accountant": "rdp"}}


def scalars(folder):
    """TensorBoard's own reader on its files: name -> [(step, value)]."""
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reading.EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def test_tensorboard_matches_records_once_after_resume(tmp_path):
    pytest.importorskip("tensorboard", reason="fedpact[tensorboard] is not installed")
    plan = Plan.parse({**SMALL, "run": {"log": ["tensorboard"], "evaluate_every": 1}})
    result = fedpact.run(plan, tmp_path / "run")
    for _ in range(2):
        found = scalars(tmp_path / "run" / "tensorboard")
        for site, spent in result.summary["epsilon"].items():
            assert found[f"epsilon/{site}"][-1] == (2, pytest.approx(spent))
        told = [(r.round, pytest.approx(r.accuracy)) for r in result.records]
        assert found["accuracy"] == told
        assert [value for _, value in found["bytes_up"]] == [
            record.bytes_up for record in result.records[1:]
        ]
        fedpact.run(plan, tmp_path / "run")


@pytest.mark.slow  # to load MLflow takes seconds
@pytest.mark.filterwarnings("ignore")
def test_mlflow_matches_records_once_after_resume(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="fedpact[mlflow] is not installed")
    pytest.importorskip("sqlalchemy", reason="a database of MLflow's needs it")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    records = [RoundRecord(round=k, epsilon={"a b": 0.5 * k}, accuracy=0.1 * k) for k in range(3)]
    Log(["mlflow"], tmp_path)(records[0])  # and killed
    for part in (records[:2], records):
        with Log(["mlflow"], tmp_path) as log:
            for record in part:
                log(record)
    known = json.loads((tmp_path / "mlflow.json").read_text())
    client = mlflow.MlflowClient(tracking_uri=known["tracking_uri"])
    found = client.get_metric_history(known["run_id"], "epsilon/a b")
    assert [(m.step, m.value) for m in found] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    number = client.get_experiment_by_name("fedpact").experiment_id
    assert [run.info.run_id for run in client.search_runs([number])] == [known["run_id"]]


def test_an_outage_of_a_tracker_stops_no_run(tmp_path, monkeypatch, caplog):
    sent, down = [], [True]

    class Client:
        def __init__(self, tracking_uri):
            self.get_experiment_by_name = lambda name: SimpleNamespace(experiment_id="0")
            run = SimpleNamespace(info=SimpleNamespace(run_id="a"))
            self.create_run = lambda number, run_name: run

        def log_batch(self, run, metrics=()):
            if down:
                raise ConnectionError("gone")
            sent.extend(metrics)

        def log_metric(self, *given, step):
            self.log_batch(given)

        set_terminated = log_batch

    entities = SimpleNamespace(Metric=lambda name, value, at, step: (name, value, step))
    fake = SimpleNamespace(MlflowClient=Client, entities=entities)
    monkeypatch.setattr(trackers, "_module", lambda kind: fake)
    for _ in range(2):  # the second time it works again
        with Log(["mlflow"], tmp_path) as log:
            for number in range(3):
                log(RoundRecord(round=number, loss=0.5))
        down.clear()
    assert [found for found in sent if found[0] == "loss"] == [("loss", 0.5, k) for k in range(3)]
    assert caplog.text.count("mlflow of run.log fails (ConnectionError: gone)") == 1
    assert json.loads((tmp_path / "mlflow.json").read_text())["round"] == 2


def test_of_a_deployment_only_what_was_released_is_written():
    """A server's record has no scores or metrics: those are the simulator's, and called so."""
    record = RoundRecord(round=1, accuracy=0.5, epsilon={"a": 1.0}, metrics={"psi": 0.2})
    names = [name for name, _ in numbers(record)]
    assert [name for name in names if "psi" in name.split("/")] == ["simulator_only/psi"]
    assert {"accuracy", "epsilon/a", "epsilon/largest"} <= set(names)


@pytest.mark.parametrize("damaged", ["{", "{}", "[]"])
def test_a_damaged_note_of_mlflows_run_is_named(tmp_path, monkeypatch, damaged):
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    (tmp_path / "mlflow.json").write_text(damaged)
    with pytest.raises(DataError, match=r"mlflow\.json .*remove it"):
        Log(["mlflow"], tmp_path)


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow"])
def test_missing_extra_starts_nothing_and_names_the_install(kind, tmp_path, monkeypatch):
    for name in ("torch.utils.tensorboard", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf"pip install 'fedpact\[{kind}\]'"):
        fedpact.run(Plan.parse({**SMALL, "run": {"log": [kind]}}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
