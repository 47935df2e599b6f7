"""After the run every site holds the model: handed over, later, under secure aggregation, its own.

A site's answers are held against the server's: equal files, equal predictions.
"""

import errno
import json
import os
from contextlib import closing

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.deployment.grid import charged
from tests.deployment.test_site import change
from typer.testing import CliRunner

from fedpact.api import load
from fedpact.cli.main import app
from fedpact.common.errors import DataError, FedpactError, PlanError
from fedpact.common.messages import FINAL, Refusal, Reply, Task, from_bytes
from fedpact.deployment import final_model
from fedpact.deployment.final_model import bring, describe_ending, keep, read_ending
from fedpact.deployment.site import Site
from fedpact.deployment.site_evaluation import personalise_site
from fedpact.deployment.site_records import SiteFiles
from fedpact.deployment.snapshot import inspect_deployment, take_snapshot
from fedpact.deployment.store import Store
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.ledger.receipt import receipt
from fedpact.report.run_summary import read_run

pytestmark = pytest.mark.usefixtures("clock")


def model_of(place):
    return load_file(place / "run" / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


SECURE = {
    "secure_aggregation": {"threshold": 2},
    "compression": {"kind": "none"},
}


@pytest.mark.parametrize(
    "plan", [pytest.param({}, marks=pytest.mark.slow), SECURE], ids=["plain", "secure"]
)
def test_final_model_reaches_every_site_without_charge(federate, plan, caplog):
    run = federate(None, rounds=2, **plan)
    caplog.set_level("INFO", "fedpact")
    run()
    # The plan counts by RDP, ledgers by the best; all parties end with the same number.
    *of_sites, of_all = [told for told in caplog.messages if "has ended after" in told]
    assert len(of_sites) == 3
    for told in of_sites:
        assert told.split("spent: ")[1].split(" at ")[0] in of_all
    of_server = model_of(run.directory / "server")
    digits = load(run.directory / "server").predict(np.zeros((2, 1, 8, 8), np.float32))
    for node in run.nodes:
        assert same(model_of(node.directory), of_server)
        assert charged(node) == 2 * 2
        found = load(node.directory).predict(np.zeros((2, 1, 8, 8), np.float32))
        np.testing.assert_array_equal(found.probabilities, digits.probabilities)


def test_absent_site_gets_the_final_model_after_restart(federate):
    run = federate(None, rounds=1)
    away, *rest = run.nodes

    def leave(message, answer):
        told = answer()
        away.here = False
        return told

    away.behave = leave
    run()
    assert not (away.directory / "run").exists()
    away.here, away.behave = True, lambda _, answer: answer()
    run()
    assert same(model_of(away.directory), model_of(run.directory / "server"))
    # Who has it is not asked again.
    assert [node.handed for node in rest] == [1, 1]


def test_an_owner_brings_the_file_and_predicts(federate, tmp_path):
    run = federate({"patience": {"start_sites": 2}}, rounds=1)
    run.nodes[0].here = False
    run()
    site = run.nodes[0].directory
    records = tmp_path / "x.npz"
    np.savez(records, x=np.random.default_rng(0).random((3, 1, 8, 8), np.float32))
    told = CliRunner().invoke(app, ["deploy", "model", str(site)])
    assert told.exit_code == 0, told.output
    told = CliRunner().invoke(app, ["predict", str(site), str(records), "--json"])
    expected = load(run.directory / "server").predict(records)
    assert json.loads(told.stdout)["labels"] == expected.labels.tolist()
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(3)}, other)
    with pytest.raises(DataError, match="the plan's model has"):
        bring(site, other)


def test_model_and_figures_of_an_earlier_run_are_not_this_ones(federate):
    run = federate(None, rounds=1, evaluation={"share": 0.25})
    run()
    site = run.nodes[0].directory
    found = inspect_deployment(site)
    assert [*found["own_figures"]["rounds"]] == ["0", "1"]
    assert found["state"] == "ended: the final model is here"
    change(site / "federation.toml", f'run = "{found["run"]}"', 'run = "another"')
    found = inspect_deployment(site)
    assert (found["own_figures"], found["ended"]) == (None, False)
    with pytest.raises(PlanError, match=r"of run 'fedavg-.*is for run 'another'"):
        personalise_site(site)
    for source in (None, site / "run" / "model.safetensors"):
        with pytest.raises(PlanError, match="is for run 'another'"):
            bring(site, source)


def test_model_of_wrong_shape_is_refused(site_dir):
    with Site(site_dir) as site:
        w = site.plan.method.init(torch.zeros(650)).vectors["w"]
        before = site.ledger.length
        for vectors, code in (
            ({"w": w[:-1]}, "task"),
            ({"w": w * torch.nan}, "task"),
            ({"w": w, "more": w}, "task"),
        ):
            answer = from_bytes(site.handle(Task(site.run, 5, FINAL, vectors, {}, 5)))
            assert isinstance(answer, Refusal)
            assert answer.code == code
        answer = from_bytes(site.handle(Task(site.run, 5, FINAL, {"w": w}, {}, 5)))
        assert isinstance(answer, Reply)
        assert not answer.vectors
        assert site.ledger.length == before


def test_a_site_killed_before_its_model_is_written_has_none(site_dir, monkeypatch):
    """Not that of the run before, which its directory has."""

    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    with Site(site_dir) as site:
        w = site.plan.method.init(torch.zeros(650)).vectors["w"]
        again = Task(site.run, 5, FINAL, {"w": w}, {}, 5)
        site.handle(again)
        with monkeypatch.context() as patched:
            patched.setattr(final_model, "write_whole", die)
            with pytest.raises(Killed):
                site.handle(again)
        assert site.ending
    change(site_dir / "federation.toml", f'run = "{site.run}"', 'run = "next"')
    monkeypatch.setattr(final_model, "write_whole", die)
    with Site(site_dir) as site:
        with pytest.raises(Killed):
            site.handle(Task("next", 5, FINAL, {"w": w}, {}, 5))
        assert site.ending is None
    assert not take_snapshot(site_dir)["ended"]


def test_a_full_disk_says_how_the_site_gets_its_model(site_dir, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(final_model, "write_whole", refuse)
    with Site(site_dir) as site:
        w = site.plan.method.init(torch.zeros(650)).vectors["w"]
        told = f"{site_dir / 'run'} .No space left on device.: .*fedpact deploy model"
        with pytest.raises(FedpactError, match=told):
            site.handle(Task(site.run, 5, FINAL, {"w": w}, {}, 5))
    assert not take_snapshot(site_dir)["ended"]


def test_a_broken_ledger_does_not_cost_a_site_its_model(site_dir, caplog):
    with Site(site_dir) as site:
        site.take_part()
        w = site.plan.method.init(torch.zeros(650)).vectors["w"]
        site.files.ledger.write_bytes(b"no ledger\n")
        final = Task(site.run, 5, FINAL, {"w": w}, {}, 5)
        # Nor does one that lacks what the server has seen.
        assert isinstance(from_bytes(site.handle(final, (9, "f" * 64))), Reply)
    assert "does not say what the run cost" in caplog.text
    assert (site_dir / "run" / "model.safetensors").exists()


def test_the_end_of_shared_noise_is_told_with_both_epsilons(make, tmp_path):
    """What rests on other sites' noise is never stated without what does not."""
    secure = {"secure_aggregation": {"threshold": 3}, "privacy": {"trust": "sum", "honest": 2}}
    at = make(tmp_path / "d", {}, settings={"local_steps": 1}, **secure) / "sites" / "site-00"
    files = SiteFiles.read(at)
    run, terms = files.federation.run, files.terms
    with Ledger(files.ledger, files.settings.data_set, hypothetical=True) as ledger:
        ledger.reserve(run, terms.guarantee, terms.history(terms.steps))
    with closing(Store(at)) as store:
        final = Task(run, 1, FINAL, files.plan.method.init(torch.zeros(650)).vectors, {}, 1)
        keep(files, store, final)
    told = describe_ending(run, files.plan, read_ending(at, run), at)
    assert f"ε <= {terms.guarantee.epsilon!r}, given the noise of 2 honest sites" in told
    assert f"ε <= {terms.guarantee.alone!r}, if no other site is honest" in told
    unbounded = {**read_ending(at, run), "epsilon_alone": {"site-00": None}}
    told = describe_ending(run, files.plan, unbounded, at)
    assert "ε <= inf, if no other site is honest" in told


def test_a_round_that_diverged_counts_at_every_party(federate):
    """It ends the run without a record: all sites were charged for it, and it follows releases."""
    faster = {"optimiser": "momentum", "momentum": 0.0, "learning_rate": 1e4, "schedule": [1, 1e6]}
    run = federate(None, rounds=4, settings={"learning_rate": 1e30}, server=faster)
    run()
    assert (run.summary["status"], run.summary["rounds"]) == ("diverged", 1)
    last = read_run(run.directory / "server" / "run").last
    for node in run.nodes:
        name = node.site.name
        spent = next(iter(receipt(node.directory / "ledger.jsonl")["runs"].values()))
        assert sum(event["spent"] for event in spent["events"]) == 2
        assert last.epsilon[name] >= spent["epsilon_spent"]
        found = json.loads((node.directory / "run" / "summary.json").read_text())
        for summary in (run.summary, found):
            assert summary["epsilon"][name] == spent["epsilon_reserved"]
