"""`fedpact audit` as a user meets it."""

import json
import shutil
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedpact.api import run as carry_out
from fedpact.cli.main import app
from fedpact.common.errors import DataError, InputError, PlanError, PrivacyError
from fedpact.common.format import lower, upper
from fedpact.plan import Plan
from fedpact.privacy import batches
from fedpact.report.audited import AuditRow
from fedpact.simulation.setup import SimulationSetup
from fedpact.studies.audit import noise
from fedpact.studies.audit.target import Target

QUICK = ["--set", "rounds=2", "--set", "sampling_rate=1.0", "--canaries", "60"]


def invoke(*arguments):
    return CliRunner().invoke(app, ["audit", *QUICK, *arguments])


def check_document(document):
    """One JSON document has everything that an ε needs."""
    assert document["adjacency"] == "add/remove one record"
    assert document["confidence"] == 0.95
    assert document["accountant"] == "best"
    methods = [check["method"] for check in document["checks"]]
    assert methods == ["sensitivity", "one-run", "one-run", "noise", "noise"]
    assert document["passed"]
    # How far a record moves a sum, one-run and its curve, a channel's noise and the nearest test.
    assert [c["quantity"] for c in document["checks"]] == [*"Δεpσp"]
    moved, one, *_ = document["checks"]
    assert 0.98 < moved["bound"] <= 1
    assert one["found"].endswith(f" guesses right, 60 canaries, {document['events']} events")
    assert 0 <= one["bound"] <= one["claimed"]
    # What each attack could show at best stands beside what it showed; a test bounds nothing.
    for check in document["checks"]:
        match check["quantity"]:
            case "ε":
                assert 0 <= check["power"] <= check["claimed"]
            case "σ":
                assert check["power"] > check["claimed"]
            case _:
                assert check["power"] is None
    confidences = [document["checks"][i]["confidence"] for i in (0, 1, 3)]
    assert confidences == [1, 0.95, 0.999]


def test_text_of_a_model_too_large_for_testing_its_noise(monkeypatch):
    monkeypatch.setattr(noise, "_SMALL_MODEL", 649)
    result = invoke("--canaries", "5")
    assert result.exit_code == 0, result.output
    assert "noise       skipped: the model has 650 parameters" in result.stdout
    assert "claimed ε = 2 at δ = 1e-05, add/remove one record, accountant best" in result.stdout
    assert "95% confidence" in result.stdout
    assert "sensitivity gradient: longest single-record sum 0.9" in result.stdout
    assert "no attack contradicts the claim" in result.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    carry_out(Plan.read(None, ["rounds=2", "sites=3"]), folder)
    return folder


def audit(*arguments):
    return CliRunner().invoke(app, ["audit", "--canaries", "60", *arguments])


def test_a_runs_folder_keeps_the_outcome_and_its_report_shows_it(run):
    result = audit(str(run), "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    check_document(document)
    assert document == json.loads((run / "audit.json").read_text())
    # Of the run's own site, with the claim that its statement makes.
    stated = json.loads((run / "privacy.json").read_text())
    site = stated["sites"][document["site"]]
    assert (document["epsilon"], document["delta"]) == (site["epsilon"], site["delta"])
    assert (document["mechanism"], document["events"]) == (stated["mechanism"], site["steps"])
    page = (run / "report.html").read_text()
    moved, check, curve, *_ = document["checks"]
    assert curve["quantity"] == "p"
    assert moved["found"] in page
    assert f"Δ ≤ {upper(moved['claimed'], 6)}</td>" in page
    assert f"ε ≥ {lower(check['bound'])}</td>" in page
    assert check["found"] in page
    assert "No attack contradicts the claim" in page


def test_a_wrong_claim_is_an_error_and_marked_in_the_report(run, monkeypatch):
    """Twice the clip, which no attack has the power to find, so none is made.

    The document still stands on standard output, whole.
    """
    right = batches.clip_for
    monkeypatch.setattr(batches, "clip_for", lambda clip, expected: 2 * right(clip, expected))
    for place in ("one_run.one_run", "noise.check_mechanism"):
        monkeypatch.setattr(f"fedpact.studies.audit.{place}", lambda *_: [])
    result = audit(str(run), "--json")
    assert isinstance(result.exception, PrivacyError)
    told = ("(method sensitivity)", "sum 1.98", "label", "clip each record's whole")
    for part in ("site 'site-00'", *told):
        assert part in str(result.exception)
    document = json.loads(result.stdout)
    assert not document["passed"]
    failed = [check["method"] for check in document["checks"] if not check["passed"]]
    assert failed == ["sensitivity"]
    assert "CONTRADICTS THE CLAIM" in (run / "report.html").read_text()


@pytest.mark.parametrize("wrong", ["sensitivity", "one-run", "noise"])
def test_each_method_may_contradict_the_claim(wrong, monkeypatch):
    """Whether each finds what it should is for the tests beside this one."""
    for place in ("sensitivity.measure_sensitivity", "one_run.one_run", "noise.check_mechanism"):
        method = place.partition(".")[0].replace("_", "-")
        p = 0.01 if method == wrong else 0.5
        row = AuditRow(method, "p", p, 0.05, None, 0.95, "of a stand-in")
        found = [SimpleNamespace(row=row) if method == "sensitivity" else row]
        monkeypatch.setattr(f"fedpact.studies.audit.{place}", lambda *_, found=found: found)
    result = invoke("--json")
    assert isinstance(result.exception, PrivacyError)
    assert f"(method {wrong})" in str(result.exception)
    assert not json.loads(result.stdout)["passed"]


def test_folder_audit_uses_its_configuration_and_records(run, tmp_path):
    result = audit(str(run), "--set", "privacy.epsilon=8.0")
    assert isinstance(result.exception, PlanError)
    assert "the folder of a run" in str(result.exception)
    result = audit(str(tmp_path))
    assert isinstance(result.exception, DataError)
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    (moved / "partition.json").unlink()
    result = audit(str(moved))
    assert isinstance(result.exception, DataError)
    assert "not on this machine" in str(result.exception)


def test_bad_options():
    assert invoke("--canaries", "0").exit_code != 0


def test_attacked_site_releases_something():
    """Where the first site is drawn in no round, or in fewer than another one."""
    for seed in range(50):
        scene = SimulationSetup.of(Plan(sites=6, sites_per_round=1, rounds=3, seed=seed))
        steps = {name: terms.steps for name, terms in scene.terms.items()}
        if not steps["site-00"]:
            break
    target = Target.of(scene)
    assert target.terms.steps == max(steps.values()) > 0
    with pytest.raises(InputError, match="'site-00' releases nothing in this run"):
        Target.of(scene, "site-00")
