"""More rounds on a run that has ended: a reservation of its own, and both ε together.

References: a run of as many rounds in one go (plain: the same bits), and the ledger's own sums.
"""

import itertools
import json
import re
import shlex
import shutil

import pytest
import torch
from tests.killed import killed_after
from typer.testing import CliRunner

import fedpact
from fedpact.api import extend
from fedpact.cli.main import app
from fedpact.cli.run import execute_resume
from fedpact.common.about import About
from fedpact.common.errors import DataError, InputError, PlanError, PolicyRefused
from fedpact.common.run_folder import rollback
from fedpact.deployment.live import take_snapshot
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import Budget, SampledGaussian, epsilon
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.ledger.receipt import receipt
from fedpact.privacy.ledger.reservations import family, next_name
from fedpact.report.compared_runs import Outcome
from fedpact.report.export import Facts
from fedpact.report.model_card import render_model_card
from fedpact.report.page import repeat
from fedpact.report.run_files import read_run
from fedpact.simulation.extend import with_rounds
from fedpact.simulation.setup import SimulationSetup

PLAIN = {"sites": 3, "algorithm": "scaffold", "privacy": {"mode": "none"}}
PRIVATE = {"rounds": 2, "sites": 2, "privacy": {"accountant": "rdp", "epsilon": 1.0}}


def test_rounds_that_are_added_are_those_of_a_longer_run(tmp_path):
    """A plain run with state at both sides: what goes on is all of it, not the model alone."""
    fedpact.run(Plan.parse({**PLAIN, "rounds": 2}), tmp_path / "a")
    longer = extend(tmp_path / "a", 2)
    whole = fedpact.run(Plan.parse({**PLAIN, "rounds": 4}), tmp_path / "b")
    assert [r.round for r in longer.records] == [0, 1, 2, 3, 4]
    for one, other in zip(longer.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    folder = tmp_path_factory.mktemp("private") / "run"
    first = fedpact.run(Plan.parse(PRIVATE), folder)
    second = extend(folder, 3, epsilon=0.5)
    return folder, first, second


def test_both_reservations_stand_in_the_ledger_and_add_up(private):
    folder, first, second = private
    for site in first.summary["epsilon"]:
        told = receipt(folder / "sites" / site / "ledger.jsonl")
        before, after = told["runs"].values()
        assert (before["epsilon_reserved"], after["epsilon_reserved"]) == (1.0, 0.5)
        # What is shown as spent is the sum of what each has spent, of δ likewise.
        spent = before["epsilon_spent"] + after["epsilon_spent"]
        assert second.summary["epsilon"][site] >= spent * (1 - 1e-12)
        assert second.summary["delta"][site] == before["delta"] + after["delta"]
        assert told["epsilon_reserved"] == 1.5
        said = json.loads((folder / "privacy.json").read_text())["sites"][site]
        assert said["epsilon"] == 1.5
        assert said["delta"] == before["delta"] + after["delta"]
        assert second.summary["epsilon"][site] <= said["epsilon_reserved"] <= 1.5
        assert first.records[-1].epsilon[site] == second.records[2].epsilon[site]
        assert second.records[3].epsilon[site] > first.records[-1].epsilon[site]


def test_reservation_for_both_runs_holds_with_early_stopping(tmp_path):
    """How long each went depended on what it released: neither has spent what it was charged."""
    first = fedpact.run(Plan.parse({**PRIVATE, "budget": {"accuracy": 1e-6}}), tmp_path / "run")
    second = extend(tmp_path / "run", 3, epsilon=0.5)
    assert [(r.summary["status"], r.summary["rounds"]) for r in (first, second)] == [
        ("accuracy", 1),
        ("accuracy", 2),
    ]
    assert set(first.summary["epsilon"].values()) == {1.0}
    assert set(second.summary["epsilon"].values()) == {1.5}


def test_what_was_spent_before_is_not_forgotten(private, tmp_path):
    shutil.copytree(private[0], tmp_path / "run")
    (tmp_path / "run" / "earlier.json").unlink()
    with pytest.raises(DataError, match=r"earlier\.json is not there, and the run was extended"):
        extend(tmp_path / "run", rounds=1)


def test_it_is_said_in_words(private):
    folder, _, _ = private
    said = json.loads((folder / "privacy.json").read_text())
    (line,) = [line for line in said["covers"] if "extended" in line]
    assert "rounds 1 to 2" in line
    assert "rounds 3 to 5" in line
    assert "reservation of its own" in line
    assert len(said["reservations"]) == 2


def test_what_is_said_of_a_reservation_is_of_that_one_alone(private):
    """σ and T of each give its own ε; no sentence says that all was fixed before the run."""
    folder, _, _ = private
    said = json.loads((folder / "privacy.json").read_text())
    assert "before the run" not in said["accounting_reason"]
    assert "before its own first round" in said["accounting_reason"]
    for site in said["sites"].values():
        parts = site["reservations"]
        assert [part["epsilon"] for part in parts] == [1.0, 0.5]
        for part in parts:
            event = SampledGaussian(part["rate"], part["sigma_joint"])
            cost = epsilon({event: part["steps"]}, part["delta"], "rdp")
            assert cost == part["epsilon_reserved"] <= part["epsilon"]
        assert sum(part["epsilon_reserved"] for part in parts) == site["epsilon_reserved"]
    run = read_run(folder)
    sigmas = sorted({r.sigma for s in run.site_privacy.values() for r in s.reservations})
    assert Outcome(0, run, None).sigma == (sigmas[0], sigmas[-1])
    page, card = (folder / "report.html").read_text(), render_model_card(Facts(run, About()))
    for shown in (page, card):
        assert "privacy.epsilon (last reservation)" in shown
        assert "events were fixed before the run" not in shown
    assert '<td class="n">2; 3</td>' in page.replace("\n", "")


def test_its_plan_forecasts_the_last_reservation_and_says_so(private):
    folder, _, _ = private
    path = str(folder / "plan.json")
    told = json.loads(CliRunner().invoke(app, ["plan", path, "--json"]).stdout)
    assert (told["after"], told["rounds"], told["iterations_per_round"]) == (2, 3, 1)
    for site in told["sites"].values():
        by_round = site["epsilon_by_round"]
        assert len(by_round) == 3
        assert by_round == sorted(set(by_round))
        assert by_round[-1] == site["epsilon_reserved"] <= 0.5
    shown = CliRunner().invoke(app, ["plan", path]).output
    assert "rounds 3 to 5 of a run that was extended" in shown
    assert "3 to 5" in repr(Plan.read(folder / "plan.json"))


def test_progress_is_of_the_budgets_of_all_reservations(tmp_path):
    fedpact.run(Plan.parse(PRIVATE), tmp_path / "run")
    done = CliRunner().invoke(app, ["extend", str(tmp_path / "run"), "--rounds", "1"])
    last = [line for line in done.stderr.splitlines() if line.startswith("round 3/3")]
    assert "ε 2 of 2 " in last[0]


def test_it_can_be_extended_again_by_the_command(private):
    folder, _, second = private
    done = CliRunner().invoke(app, ["extend", str(folder), "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["rounds"] == 6
    for site, spent in told["epsilon"].items():
        assert spent > second.summary["epsilon"][site]
        assert len(receipt(folder / "sites" / site / "ledger.jsonl")["runs"]) == 3


def policy_of(folder, ever):
    path = folder / "policy.toml"
    path.write_text(
        'algorithms = ["fedavg"]\nreleases = ["gradient"]\n'
        "epsilon_per_run = 1.0\ndelta_per_run = 1e-5\n"
        f"epsilon_ever = {ever}\ndelta_ever = 1e-4\nsmallest_sigma = 0.0001\n"
    )
    return str(path)


def bytes_of(folder):
    found = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        str(name): path.read_bytes() for name, path in found.items() if path.suffix != ".partial"
    }


def test_refusing_site_leaves_the_run_unchanged(tmp_path):
    plan = {**PRIVATE, "policy": policy_of(tmp_path, 1.5)}
    fedpact.run(Plan.parse(plan), tmp_path / "run")
    files = ("plan.json", "environment.json", "privacy.json", "summary.json", "rounds.jsonl")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in files}
    with pytest.raises(PolicyRefused, match="ever"):
        extend(tmp_path / "run", 1)
    assert {name: (tmp_path / "run" / name).read_bytes() for name in files} == before
    assert not (tmp_path / "run" / "earlier.json").exists()
    assert extend(tmp_path / "run", 1, epsilon=0.5).summary["rounds"] == 3


def test_where_one_site_refuses_none_has_promised_anything(tmp_path):
    """The ledgers are kept, so each site's own policy has other room; so with another unit."""
    kept = tmp_path / "kept"
    plan = {**PRIVATE, "policy": policy_of(tmp_path, 3.0), "run": {"ledgers": str(kept)}}
    fedpact.run(Plan.parse(plan), tmp_path / "run")
    with Ledger(kept / "site-01.ledger.jsonl", "site-01", hypothetical=True) as ledger:
        ledger.reserve("another", Budget(1.5, 1e-5), {SampledGaussian(0.5, 9.0): 1})
    before = bytes_of(kept), bytes_of(tmp_path / "run")
    with pytest.raises(PolicyRefused, match="ever"):
        extend(tmp_path / "run", 1)
    assert (bytes_of(kept), bytes_of(tmp_path / "run")) == before
    # With less it is the same reservation's name, and no site has other terms under it.
    assert extend(tmp_path / "run", 1, epsilon=0.25).summary["rounds"] == 3
    new = {**PRIVATE, "run": {"ledgers": str(tmp_path / "new")}}
    with Ledger(tmp_path / "new" / "site-01.ledger.jsonl", "site-01", hypothetical=True) as ledger:
        ledger.reserve("p", Budget(1.5, 1e-5), {SampledGaussian(0.5, 9.0): 1}, unit="person")
    with pytest.raises(PolicyRefused, match="per person"):
        fedpact.run(Plan.parse(new), tmp_path / "other")
    assert not receipt(tmp_path / "new" / "site-00.ledger.jsonl")["runs"]


def test_kill_during_extension_leaves_old_or_extended_run(tmp_path, monkeypatch):
    """Between any two changes of the disk; then what was begun has the bits of one never cut."""
    monkeypatch.setattr("fedpact.api.write_report", lambda _: None)
    plan = {**PRIVATE, "rounds": 1, "policy": policy_of(tmp_path, 1.5)}
    fedpact.run(Plan.parse(plan), tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "whole")
    whole = extend(tmp_path / "whole", 1, epsilon=0.5)
    undone, resumed = 0, 0
    for changes in itertools.count():
        run = tmp_path / f"cut-{changes}"
        shutil.copytree(tmp_path / "base", run)
        with killed_after(monkeypatch, changes) as died:
            extend(run, 1, epsilon=0.5)
        if not died:
            break
        rollback(run)
        if json.loads((run / "plan.json").read_text())["rounds"] == 1:
            undone += 1
            assert bytes_of(run) == bytes_of(tmp_path / "base")
            found = extend(run, 1, epsilon=0.5)
        else:
            resumed += 1
            found = fedpact.run(Plan.read(run / "plan.json"), run)
        assert found.summary["epsilon"] == whole.summary["epsilon"]
        for one, other in zip(found.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(one, other)
        for site in found.summary["epsilon"]:
            told = receipt(run / "sites" / site / "ledger.jsonl")
            assert [[e["spent"] for e in r["events"]] for r in told["runs"].values()] == [[1], [1]]
            assert told["epsilon_reserved"] == 1.5
    assert undone > 5
    assert resumed > 5


@pytest.fixture
def cut_off(tmp_path, monkeypatch):
    """A run, and what its summary was, whose extension was killed when some files were changed."""
    fedpact.run(Plan.parse({**PRIVATE, "rounds": 1}), tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    with killed_after(monkeypatch, 11) as died:
        extend(tmp_path / "run", 1)
    assert died
    assert not (tmp_path / "run" / "summary.json").exists()
    return tmp_path / "run", summary


def test_reading_after_a_killed_extension_sees_the_old_run(cut_off):
    folder, summary = cut_off
    again = shutil.copytree(folder, folder.with_name("again"))
    assert take_snapshot(folder)["status"].startswith("being extended, or cut off at that")
    assert fedpact.load(folder).summary == summary
    assert take_snapshot(folder)["status"] == summary["status"]
    told = json.loads(CliRunner().invoke(app, ["report", str(again), "--json"]).stdout)
    assert told["summary"] == summary
    assert Plan.read(again / "plan.json").rounds == 1


def test_nobody_puts_back_what_another_one_is_extending(tmp_path, monkeypatch):
    fedpact.run(Plan.parse({**PRIVATE, "rounds": 1}), tmp_path / "run")
    real, tried = SimulationSetup.of, []

    def meanwhile(*given):
        plan = Plan.parse({**PRIVATE, "rounds": 1})
        for other in (
            lambda: fedpact.run(plan, tmp_path / "run"),
            lambda: extend(tmp_path / "run", 1),
            lambda: fedpact.load(tmp_path / "run"),
            lambda: execute_resume(tmp_path / "run", "local", as_json=True),
        ):
            with pytest.raises(InputError, match="run is in use already"):
                other()
            tried.append(other)
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(SimulationSetup, "of", staticmethod(meanwhile))
        assert extend(tmp_path / "run", 2).summary["rounds"] == 3
    assert len(tried) == 4
    assert Plan.read(tmp_path / "run" / "plan.json").after == 1
    assert fedpact.load(tmp_path / "run").summary["rounds"] == 3


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    """Audited, begun with by another plan, then extended twice, in that order."""
    folder = tmp_path_factory.mktemp("twice") / "run"
    first = fedpact.run(Plan.parse({**PRIVATE, "rounds": 1}), folder)
    done = audited(folder)
    assert done.exit_code == 0, done.output
    other = Plan.parse({**PRIVATE, "initial": str(folder)}).document()
    extend(folder, 1, epsilon=0.5)
    return folder, first, other, extend(folder, 2)


def audited(folder):
    words = ["audit", str(folder), "--method", "one-run", "--canaries", "40"]
    return CliRunner().invoke(app, words, env={"COLUMNS": "200"})


def test_what_its_report_prints_repeats_it_bit_for_bit(twice):
    folder, _, _, last = twice
    for step in repeat(read_run(folder)).command.split(" && "):
        program, *words = shlex.split(step)
        assert program == "fedpact"
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    again = fedpact.load(folder.with_name("run-again"))
    assert again.summary["rounds"] == 4
    assert again.summary["epsilon"] == last.summary["epsilon"]
    for one, other in zip(again.model.parameters(), last.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_audit_is_of_one_reservation_and_says_so(twice):
    folder, *_ = twice
    before = read_run(folder).audit
    assert (before.epsilon, read_run(folder).site_privacy["site-00"].epsilon_allowed) == (1.0, 2.0)
    done = audited(folder)
    assert done.exit_code == 0, done.output
    assert "attacked is its last reservation, of the rounds after 2" in done.stdout
    assert read_run(folder).audit.epsilon == 0.5
    page = re.sub(r"\s+", " ", (folder / "report.html").read_text())
    assert "one of the reservations that the run has" in page


def test_another_plan_begins_with_the_model_that_it_has_named(twice):
    folder, first, other, last = twice
    begins = dict(Plan.parse(other).initial.tensors())
    assert_equal(begins, first.model.state_dict())
    assert_equal(dict(Plan(initial=str(folder)).initial.tensors()), last.model.state_dict())
    # Named by its file it is known as the run's, whose ε is at least what it has cost.
    kept = Plan(initial=str(folder / "model-1.safetensors")).initial
    assert kept.sha256 == other["initial"]["sha256"]
    assert f"ε <= {max(last.summary['epsilon'].values())!r}" in kept.trained_on


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_was_handed_in_is_handed_in_again(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(80, 4, generator=generator).numpy()
    y = (x[:, 0] > 0.5).astype(int)
    settings = {"rounds": 1, "sites": 2, "privacy": PRIVATE["privacy"]}
    fedpact.run("logistic", (x, y), out=tmp_path / "run", **settings)
    with pytest.raises(PlanError, match="hand in the records"):
        fedpact.extend(tmp_path / "run", 1, data=(x + 1, y))
    with pytest.raises(PlanError, match="hand in the same"):
        fedpact.extend(tmp_path / "run", 1, data=(x, y), model="mlp")
    assert fedpact.extend(tmp_path / "run", 1, data=(x, y)).summary["rounds"] == 2


@pytest.mark.parametrize("budget", [{"bytes": 20_000}, {"seconds": 1e-9}])
def test_what_is_used_up_is_refused_before_anything_is_reserved(budget, tmp_path):
    (name,) = budget
    done = fedpact.run(Plan.parse({**PRIVATE, "rounds": 30, "budget": budget}), tmp_path / "run")
    assert done.summary["status"] == name
    before = bytes_of(tmp_path / "run")
    with pytest.raises(PlanError, match=f"a larger budget.{name}"):
        extend(tmp_path / "run", 1)
    assert bytes_of(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"evaluation": {"share": 0.2}}, r"\[evaluation\]"),
        ({"algorithm": "ali_dpfl", "settings": {"iterations": 4}}, "follows what is left"),
        ({"privacy": {"sizes": "noisy"}}, "released and charged once"),
    ],
)
def test_what_is_reserved_once_is_refused_with_the_reason(change, told):
    with pytest.raises(PlanError, match=told):
        Plan.parse({**PRIVATE, **change}).check_extended()


def test_a_new_run_and_one_that_has_not_ended_are_refused(tmp_path):
    with pytest.raises(PlanError, match="fedpact extend"):
        fedpact.run(Plan.parse({**PLAIN, "rounds": 4, "after": 2}), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(PlanError, match="none would be left"):
        Plan.parse({**PLAIN, "rounds": 2, "after": 2})
    fedpact.run(Plan.parse({**PLAIN, "rounds": 4}), tmp_path / "cut", stop=lambda: True)
    with pytest.raises(PlanError, match="expected one that has ended"):
        extend(tmp_path / "cut", 1)


def test_names_of_reservations_are_those_a_federation_takes():
    assert next_name("fedavg-1") == "fedavg-1_more1"
    assert next_name(next_name("fedavg-1")) == "fedavg-1_more2"
    assert family("a_more2", ["b", "a_more2", "a_more10", "a", "a_more1"]) == (
        "a",
        "a_more1",
        "a_more2",
    )
    assert family("a", ["a_more1", "a", "a_b_more1"]) == ("a",)


def test_no_two_names_are_one_reservation():
    """What another wrote by hand is a run of its own: none of them drops out of a sum."""
    names = ["a", "a_more0", "a_more1", "a_more01", "a_more١", "a_more-1", f"a_more{'9' * 5000}"]
    for run in names:
        assert (run in family(run, names)) is True
        assert family(run, names) == (("a", "a_more1") if run == "a_more1" else (run,))


@pytest.mark.parametrize("rounds", [True, 0, -1, 1.0, float("nan"), "1", None])
def test_rounds_are_a_count(rounds):
    with pytest.raises(InputError, match=r"rounds is .*: expected an integer"):
        with_rounds(Plan.parse(PRIVATE), 2, rounds, None)


@pytest.mark.parametrize("budget", [True, 0, -1.0, float("nan"), float("inf"), "1"])
def test_a_budget_is_a_positive_number(budget):
    with pytest.raises(InputError, match="epsilon"):
        with_rounds(Plan.parse(PRIVATE), 2, 1, budget)
