"""A deployment's evaluations: released with noise, charged, and exact nowhere but at the site."""

import shutil
import struct

import numpy as np
import pytest
import torch
from tests.deployment.grid import NAMES, content, killed_before
from typer.testing import CliRunner

from fedpact.cli.commands import deploy as command
from fedpact.cli.main import app
from fedpact.common.errors import LedgerError, PlanError, PolicyRefused
from fedpact.common.messages import EVALUATION, Refusal, Reply, Task, from_bytes
from fedpact.deployment.admission import LedgerRegistry
from fedpact.deployment.site import Site
from fedpact.deployment.site_records import own_records
from fedpact.deployment.snapshot import inspect_deployment
from fedpact.evaluation.held_out import digest_records
from fedpact.privacy.accounting.accountant import ADJACENCY_BY_UNIT, SampledGaussian, epsilon
from fedpact.privacy.ledger.hash_chain import read_entries
from fedpact.privacy.ledger.receipt import receipt
from fedpact.privacy.ledger.reservations import CompanionReservation

EVALUATION_TABLE = {"share": 0.3, "every": 2, "epsilon": 4.0, "loss_bound": 3.0}
PLAN = {"rounds": 3, "evaluation": EVALUATION_TABLE}
TEST_SEEDS = {"seeds": "test"}


@pytest.fixture
def ran(ended):
    return ended(TEST_SEEDS, **PLAN)


def test_evaluation_runs_when_due_and_last_and_is_charged(ran):
    assert [bool(record.evaluation) for record in ran.records] == [False, False, True, True]
    found = ran.summary["evaluation"]
    assert found["round"] == 3
    assert set(found["epsilon_spent"]) == set(NAMES)
    for site in NAMES:
        runs = receipt(ran.directory / "sites" / site / "ledger.jsonl")["runs"]
        mine = next(run for name, run in runs.items() if name.endswith("/evaluation"))
        assert [(e["q"], e["reserved"], e["spent"]) for e in mine["events"]] == [(1.0, 2, 2)]
        assert mine["epsilon_spent"] <= mine["epsilon_reserved"] == 4.0
        promised = read_entries(ran.directory / "sites" / site / "ledger.jsonl")
        beside = [CompanionReservation(e["beside"], e["split"]) for e in promised if "beside" in e]
        assert [each.beside for each in beside] == [ran.nodes[0].site.run]
        event = SampledGaussian(1.0, mine["events"][0]["sigma"])
        assert found["epsilon_spent"][site] == pytest.approx(epsilon({event: 2}, 1e-5, "rdp"))


@pytest.mark.parametrize("number", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_server_restarted_after_an_evaluation_rejects_no_site(federate, number, monkeypatch):
    """It asks for the round's training again, and sites send replies older than what it saw."""
    run = federate(TEST_SEEDS, **PLAN)
    killed_before(run, number, monkeypatch)
    records = run()
    assert [record.round for record in records] == [0, 1, 2, 3]
    assert all(record.refused == record.unevaluated == {} for record in records)
    assert [bool(record.evaluation) for record in records] == [False, False, True, True]
    for site in NAMES:
        runs = receipt(run.directory / "sites" / site / "ledger.jsonl")["runs"]
        assert all(e["spent"] == e["reserved"] for one in runs.values() for e in one["events"])


def test_only_a_reply_that_was_seen_may_be_older(tmp_path):
    one, two, other = "a" * 64, "b" * 64, "c" * 64
    standing = LedgerRegistry(tmp_path)
    assert standing.look("site", 6, one)
    assert standing.look("site", 7, two)
    standing.save()
    for length, head, good in ((6, one, True), (7, two, True), (6, other, False), (5, one, False)):
        assert LedgerRegistry(tmp_path).look("site", length, head) is good, length
    assert LedgerRegistry(tmp_path).look("site", 6, other, late=True)
    assert not LedgerRegistry(tmp_path).look("site", 7, other, late=True)
    assert LedgerRegistry(tmp_path).last_seen("site") == (7, two)


def test_exact_figures_stay_in_the_owners_files(ran):
    """As text, and as bytes of either precision; numbers of so few digits that any may be met by
    chance are left out, and the table of hits is looked for as a whole.
    """
    server = ran.directory / "server"
    left = [path.read_bytes() for path in sorted(server.rglob("*")) if path.is_file()]
    left += [block for node in ran.nodes for block in (*node.heard, *node.said)]
    everything = b"".join(left)
    for node in ran.nodes:
        looked = 0
        for sums in inspect_deployment(node.directory)["own_figures"]["rounds"].values():
            hits = np.array(sums["hits"]).reshape(10, 2)
            numbers = [sums["loss"][0] / hits.sum(), hits[:, 0].sum() / hits.sum()]
            numbers += [sums["loss"][0], *(row[0] / row.sum() for row in hits if row.sum())]
            exact = [n for n in map(float, numbers) if len(repr(n)) > 10]
            told = [repr(n).encode() for n in exact]
            told += [struct.pack(form, n) for n in exact for form in ("<d", "<f")]
            told += [struct.pack(f"<{len(sums['hits'])}d", *sums["hits"])]
            assert not [n for n in told if n in everything]
            looked += len(exact)
        assert looked > 4
        assert (node.directory / "site.db").stat().st_mode & 0o777 == 0o600


def test_training_does_not_depend_on_held_out_records(make, tmp_path):
    """Other held-out records, same training records: the same bits in every training reply."""
    one = make(tmp_path / "one", TEST_SEEDS, **PLAN)
    other = shutil.copytree(one, tmp_path / "other")
    found = []
    for where, swap in ((one, False), (other, True)):
        directory = where / "sites" / "site-00"
        if swap:
            records = np.load(directory / "records.npz")
            x, y = records["x"], records["y"]
            with Site(directory) as site:
                found_own = own_records(site.files)
                mine = site._examiner.split(found_own).numpy()
            np.savez(directory / "records.npz", x=x[~mine], y=y[~mine])
            (directory / "ledger.jsonl").unlink()
        with Site(directory) as site:
            task = Task(site.run, 1, site.plan.algorithm, {"w": torch.zeros(650)}, {})
            found.append([site.handle(task), from_bytes(site.handle(ask(site)))])
    assert from_bytes(found[0][0]).vectors.keys() == {"w"}
    assert torch.equal(from_bytes(found[0][0]).vectors["w"], from_bytes(found[1][0]).vectors["w"])
    # The same noise: what is left is what the held-out records add, in whole numbers.
    difference = found[0][1].vectors["hits"] - found[1][1].vectors["hits"]
    assert torch.allclose(difference, difference.round(), atol=1e-9)
    assert difference.sum() > 0


@pytest.fixture
def evaluated(make, tmp_path):
    return make(tmp_path / "e", {}, **PLAN) / "sites" / "site-00"


def ask(site, number=1, **changes):
    fields = {"vectors": {"w": torch.zeros(650)}, "numbers": {}, "attempt": 0}
    return Task(site.run, number, EVALUATION, **{**fields, **changes})


def spent(site):
    return sum(site.ledger.spent(f"{site.run}/evaluation").values())


def test_it_answers_once_and_repeats_its_answer(evaluated):
    with Site(evaluated) as site:
        first = site.handle(ask(site))
        assert isinstance(from_bytes(first), Reply)
        assert site.handle(ask(site)) == first
        assert spent(site) == 1
    with Site(evaluated) as site:
        assert site.handle(ask(site)) == first
        again = from_bytes(site.handle(ask(site, vectors={"w": torch.ones(650)})))
        assert again == Refusal(site.run, 1, "site-00", "stale")
        assert isinstance(from_bytes(site.handle(ask(site, 2))), Reply)
        # Two are reserved, and no server gets a third.
        assert from_bytes(site.handle(ask(site, 3))).code == "budget"
        assert spent(site) == 2


def test_a_site_that_holds_nothing_out_answers_no_such_question(site_dir, capsys):
    with Site(site_dir) as site:
        assert from_bytes(site.handle(ask(site))).code == "task"
    command.status(site_dir, as_json=False)
    assert inspect_deployment(site_dir)["own_figures"] is None
    assert "Exact figures" not in capsys.readouterr().out


def test_an_owner_who_has_not_declared_it_releases_none(evaluated):
    policy = evaluated / "policy.toml"
    text = policy.read_text()
    assert "evaluation_epsilon_per_run = 4.0" in text
    lines = "evaluation_epsilon_per_run = 4.0\n", "evaluation_delta_per_run = 1e-05\n"
    for line in lines:
        policy.write_text(text.replace(line, ""))
        with pytest.raises(PlanError, match="both or none"):
            Site(evaluated)
    policy.write_text(text.replace(lines[0], "").replace(lines[1], ""))
    with pytest.raises(PolicyRefused, match="evaluation_epsilon_per_run"):
        Site(evaluated)
    policy.write_text(
        text.replace("evaluation_epsilon_per_run = 4.0", "evaluation_epsilon_per_run = 3.9")
    )
    with pytest.raises(PolicyRefused, match=r"evaluation epsilon would be 4"):
        Site(evaluated)
    policy.write_text(text.replace("epsilon_ever = 4.0", "epsilon_ever = 3.9"))
    with pytest.raises(PolicyRefused, match=r"the larger one of .* would be 4: .*ever = 3\.9"):
        Site(evaluated)
    shown = CliRunner().invoke(app, ["deploy", "check", str(evaluated)]).output
    assert "of which the larger counts" in " ".join(shown.split())
    policy.write_text(text.replace('"evaluation hits", ', ""))
    with pytest.raises(PolicyRefused, match="releases evaluation hits"):
        Site(evaluated)
    policy.write_text(text)
    with Site(evaluated) as site:
        # Taken back, it counts from the next question.
        policy.write_text(text.replace('"evaluation hits", ', ""))
        assert from_bytes(site.handle(ask(site))).code == "policy"
        assert spent(site) == 0


def test_owner_is_told_if_records_change_during_a_run(evaluated, caplog):
    """A changed record may have changed sides; before the run nothing depends on it."""
    records = dict(np.load(evaluated / "records.npz"))
    for begun in (False, True):
        with Site(evaluated) as site:
            if begun:
                site.take_part()
        assert "have changed since" not in caplog.text
        records["x"][int(begun)] = records["x"][5]
        np.savez(evaluated / "records.npz", **records)
    with Site(evaluated):
        assert "have changed since" in caplog.text


@pytest.mark.parametrize("whose", [None, ["a", "a", "b"]])
def test_a_digest_of_records_follows_what_decides_on_sides(whose):
    x, y, back = torch.rand(3, 2), torch.arange(3), [2, 1, 0]
    found = digest_records(x, y, whose)
    assert digest_records(x[back], y[back], whose and [whose[i] for i in back]) == found
    others = digest_records(x, y, ["a", "a ", "b"]) if whose else digest_records(x + 1, y)
    assert others != found


def test_a_lost_secret_is_not_replaced(evaluated):
    with Site(evaluated) as site:
        site.handle(ask(site))
    key = evaluated / "held-out.key"
    assert key.stat().st_mode & 0o777 == 0o600
    kept = key.read_bytes()
    key.unlink()
    with pytest.raises(LedgerError, match=r"held-out\.key is missing"):
        Site(evaluated)
    key.write_bytes(bytes(32))
    with pytest.raises(PolicyRefused, match="other terms"):
        Site(evaluated)
    key.write_bytes(kept)
    with Site(evaluated):
        pass


def test_its_owner_sees_the_exact_figures_and_the_server_none(ran, capsys):
    site, server = ran.directory / "sites" / "site-01", ran.directory / "server"
    figures = inspect_deployment(site)["own_figures"]
    assert [*figures["rounds"]] == ["0", "1", "2", "3"]
    command.status(site, as_json=False)
    told = capsys.readouterr().out
    # Training reserved less than the 4 of evaluations.
    row = next(line for line in told.splitlines() if "site-01" in line)
    assert [cell.strip() for cell in row.split("│")][4] == "4"
    assert f"adjacency: {ADJACENCY_BY_UNIT['record']}" in told
    assert "a held-out record at most (4, 1e-05)" in told
    assert "for its owner only" in told
    for sums in figures["rounds"].values():
        hits = np.array(sums["hits"]).reshape(10, 2)
        assert f"{hits[:, 0].sum() / hits.sum():.4g}" in told
    assert f"{hits[3, 0] / hits[3].sum():.4g}" in told
    assert (
        inspect_deployment(server)["own_figures"]
        is inspect_deployment(ran.directory)["own_figures"]
        is None
    )


def test_a_false_reply_is_rejected_and_others_are_evaluated(federate):
    run = federate({}, **PLAN)

    def lie(message, answered):
        if content(message).algorithm != EVALUATION:
            return answered()
        given = answered()
        huge = {"hits": torch.full((20,), 1e9, dtype=torch.float64)}
        vectors = {**content(given).vectors, **huge}
        return run.nodes[0].change(message, lambda: given, vectors=vectors)

    run.nodes[0].behave = lie
    run()
    found = run.summary["evaluation"]
    assert found["unevaluated"] == {"site-00": "rejected: far off"}
    assert [*found["sites"]] == ["site-01", "site-02"]
