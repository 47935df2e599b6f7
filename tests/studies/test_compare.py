"""Whole comparisons, with real processes. Each takes seconds to begin, so there are few."""

import html
import json
import signal
from collections import Counter
from itertools import count
from threading import Event

import pytest
import torch
from tests.studies import stand_in

import fedpact
from fedpact.algorithms import fedavg
from fedpact.common.errors import PlanError
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import SampledGaussian, epsilon
from fedpact.privacy.ledger.receipt import receipt
from fedpact.studies import pool
from fedpact.studies.pool import Job

TABLES = {"rounds": 2, "sites": 2, "run": {"evaluate_every": 1}, "settings": {"learning_rate": 1.0}}
FEDAVG = Plan.parse(TABLES)
FEDFDP = Plan.parse({**TABLES, "algorithm": "fedfdp"})
# Fails only when its run is set up, as a model that needs another shape would.
BROKEN = Plan.parse({**FEDAVG.model_dump(mode="json"), "model": "cnn"})
PLANS = {"one": FEDAVG, "two": FEDFDP, "broken": BROKEN}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    news = []
    folder = tmp_path_factory.mktemp("compare") / "c"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Job, "here", True)  # what a process of its own makes is in test_pool
        return fedpact.compare(PLANS, [3], folder, on_news=news.append), news


def test_a_run_of_a_comparison_is_the_run_of_its_plan(whole, tmp_path):
    comparison, _ = whole
    for entry, plan in (("one", FEDAVG), ("two", FEDFDP)):
        alone = Plan.parse({**plan.model_dump(mode="json"), "seed": 3})
        fedpact.run(alone, tmp_path / entry)
        for file in ("model.safetensors", "partition.json"):
            made = comparison.folder / entry / "seed-3" / file
            assert made.read_bytes() == (tmp_path / entry / file).read_bytes()


def test_the_page_and_the_document_hold_what_the_runs_say(whole):
    comparison, _ = whole
    document = json.loads((comparison.folder / "comparison.json").read_text())
    for name in ("one", "two"):
        path = comparison.folder / name / "seed-3"
        summary = json.loads((path / "summary.json").read_text())
        entry = document["entries"][name]
        assert entry["accuracy"] == {"mean": summary["accuracy"], "deviation": None}
        assert entry["psi"]["mean"] == summary["psi"]
        assert entry["bytes"]["mean"] == summary["bytes_down"] + summary["bytes_up"]
        assert entry["epsilon"] == max(summary["epsilon"].values())
        assert entry["runs"]["3"]["adjacency"] == "add/remove one record"
        assert (path / "report.html").exists()
    assert (comparison.folder / "comparison.html").stat().st_size > 10_000


def test_a_run_that_fails_takes_no_other_with_it(whole):
    comparison, news = whole
    one, two, broken = comparison.entries
    assert (len(one.runs), len(two.runs), len(broken.runs)) == (1, 1, 0)
    assert "cnn" in broken.missing[3]
    assert [n.job.name for n in news if n.failed] == ["broken"]
    assert not (comparison.folder / "broken" / "seed-3").exists()
    # The same partition and budgets; what is unequal is that one has no run.
    seeds = ["one: seeds 3", "two: seeds 3", "broken: seeds none"]
    assert comparison.inequalities == seeds


def test_only_missing_runs_are_run(whole, monkeypatch):
    comparison, _ = whole
    folder, news = comparison.folder, []
    two = {name: PLANS[name] for name in ("one", "two")}
    times = {path: path.stat().st_mtime_ns for path in folder.glob("*/seed-3/**/*")}
    again = fedpact.compare(two, [3], folder, on_news=news.append)
    assert news == []
    assert times == {path: path.stat().st_mtime_ns for path in folder.glob("*/seed-3/**/*")}
    assert again.inequalities == []
    # As a process that was killed before its summary leaves it: gone on with, to the same model.
    model = (folder / "two" / "seed-3" / "model.safetensors").read_bytes()
    for file in ("summary.json", "report.html", "model.safetensors"):
        (folder / "two" / "seed-3" / file).unlink()
    monkeypatch.setattr(Job, "here", True)
    fedpact.compare(two, [3], folder, on_news=news.append)
    assert {n.job.name for n in news} == {"two"}
    assert (folder / "two" / "seed-3" / "model.safetensors").read_bytes() == model


def test_tuning_cost_is_counted_from_existing_ledgers(whole):
    folder = whole[0].folder
    two = {name: PLANS[name] for name in ("one", "two")}
    (found,) = fedpact.compare(two, [3], folder, counted=True).counted
    costs = []
    for site in ("site-00", "site-01"):
        events = Counter()
        for name in two:
            (run,) = receipt(folder / name / "seed-3" / "sites" / site / "ledger.jsonl")[
                "runs"
            ].values()
            for event in run["events"]:
                events[SampledGaussian(event["q"], event["sigma"])] += event["reserved"]
        costs.append(epsilon(events, 1e-5))
    assert found.found.every == max(costs) > max(e.spent.epsilon for e in whole[0].entries[:2])
    (written,) = json.loads((folder / "comparison.json").read_text())["counted"]
    assert written["epsilon_of_every"] == max(costs)
    page = (folder / "comparison.html").read_text()
    assert "What trying these settings costs" in page
    assert all(line in html.unescape(page) for line in found.lines)


def test_trying_is_counted_only_where_it_adds_up(tmp_path):
    given = FEDAVG.model_dump(mode="json", exclude={"privacy"}, exclude_unset=True)
    plain = Plan.parse({**given, "privacy": {"mode": "none"}})
    own = {"data": str(tmp_path / "visits.csv"), "label": "sick", "person": "patient_id"}
    person = Plan.parse({**own, "sites": 2, "privacy": {"unit": "person"}})
    with pytest.raises(PlanError, match="--counted with 1 private runs of 2 entries"):
        fedpact.compare({"one": FEDAVG, "plain": plain}, [3], counted=True)
    record = Plan.parse({**own, "sites": 2})
    with pytest.raises(PlanError, match="different units"):
        fedpact.compare({"one": record, "person": person}, [3], counted=True)


def test_the_command_prints_the_table_and_fails_where_a_run_did(
    whole, tmp_path, monkeypatch, typed
):
    monkeypatch.setattr(pool, "_work", stand_in.refuse)
    files = []
    for name, plan in PLANS.items():
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(plan.model_dump(mode="json")))
    options = ["--counted", "--set", "seed=3", "--seeds", "1", "--out", whole[0].folder]
    told = typed("compare", *files, *options)
    assert told.code == 2
    # Two of the three runs have ended before, and only the third is tried again.
    assert told.err.count("seed 3") == 1
    assert "broken seed 3: FAILED: a paragraph\n" in told.err
    assert "broken seed 3 is missing: a paragraph" in told.out
    assert "NOT AN EQUAL COMPARISON; the runs differ in:\none: seeds 3\n" in told.out
    assert "adjacency: add/remove one record; accountant: best" in told.out
    for entry in whole[0].entries[:2]:
        started = f"│ {entry.name} "
        line, *_, did = (line for line in told.out.splitlines() if line.startswith(started))
        assert f"{100 * (entry.runs[0].accuracy or 0):.2f} %" in line
        assert "at δ = 1e-05" in line
        # τ, η and the iterations of two rounds.
        assert did.replace("│", " ").split()[1:4] == ["1", "1", "2"]
    assert "2 settings, each once: one, two. Whoever sees every run" in told.out
    assert "Missing runs are not counted" in told.out
    assert told.out.rstrip().endswith("comparison.html")


def test_a_sweep_runs_every_value_and_calls_it_no_inequality(tmp_path, monkeypatch):
    monkeypatch.setattr(Job, "here", True)  # two processes less to begin
    plan = Plan.parse({**TABLES, "rounds": 1})
    values = {"privacy.epsilon": [1, 4.0], "settings.learning_rate": [0.5]}
    found = fedpact.compare({"a": plan}, 1, tmp_path / "s", sweep=values, jobs=1)
    names = ["a-epsilon-1-learning_rate-0.5", "a-epsilon-4.0-learning_rate-0.5"]
    assert [entry.name for entry in found.entries] == names
    assert found.inequalities == []
    spent = [entry.spent.epsilon for entry in found.entries]
    assert 0 < spent[0] <= 1 < spent[1] <= 4
    page = (tmp_path / "s" / "comparison.html").read_text()
    assert "Worst site over privacy.epsilon" in page


@pytest.mark.parametrize(("key", "own"), [("model", "mlp"), ("data", "digits")])
def test_an_object_for_all_plans_with_a_sweep_of_it_is_refused(tmp_path, key, own):
    given, sweep = {key: own}, {key: ["logistic", "ngram"]}
    with pytest.raises(PlanError, match=f"{key}=... with a sweep of {key}"):
        fedpact.compare(FEDAVG, 1, tmp_path / "s", sweep=sweep, jobs=1, **given)
    assert not (tmp_path / "s").exists()


def test_a_folder_of_other_plans_is_refused(whole):
    other = Plan.parse({**FEDAVG.model_dump(mode="json"), "rounds": 3})
    with pytest.raises(PlanError, match="holds a run of another configuration"):
        fedpact.compare({"new": FEDFDP, "one": other}, [3], whole[0].folder)
    assert not (whole[0].folder / "new").exists()


def test_ctrl_c_ends_after_the_round_and_reruns_continue(tmp_path, monkeypatch, typed):
    # In this process; that others are told to stop and by what is in test_pool.
    update, rounds = fedavg.update, count(1)

    def pressed(*given):
        if next(rounds) == 3:
            signal.raise_signal(signal.SIGINT)
        return update(*given)

    monkeypatch.setattr(Job, "here", True)
    options = ["--set", "rounds=9", "--set", "sites=2", "--seeds", "1", "--json"]
    monkeypatch.setattr(fedavg, "update", pressed)
    done = typed("compare", *options, "--out", tmp_path / "c")
    assert done.code == 130
    stopped = json.loads(done.out)
    assert "stopped after round 3" in stopped["entries"]["default"]["missing"]["0"]
    plan = Plan.read(None, ["rounds=9", "sites=2"])
    (entry,) = fedpact.compare({"default": plan}, 1, tmp_path / "c").entries
    assert entry.missing == {}
    assert entry.runs[0].last.round == 9


def test_a_process_that_is_to_stop_ends_after_the_round(tmp_path):
    told, stopping = [], Event()

    class Says:
        def send(self, news):
            told.append(news)
            if len(told) == 2:
                stopping.set()

    plan = Plan.parse({**TABLES, "rounds": 9}).document()
    assert pool._work(Says(), stopping, plan, str(tmp_path / "run")) is None
    assert [number for _, number, *_ in told] == [0, 1]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "stopped"


def test_ctrl_c_before_joining_is_computed_says_so(whole, tmp_path, monkeypatch, typed):
    def interrupt(folder, known, on_site):
        signal.raise_signal(signal.SIGINT)
        on_site("site-00", 2)

    monkeypatch.setattr("fedpact.studies.compare.of_run", interrupt)
    (tmp_path / "one.json").write_text(json.dumps(FEDAVG.model_dump(mode="json")))
    options = ["--joining", "--set", "seed=3", "--seeds", "1", "--out", whole[0].folder]
    done = typed("compare", tmp_path / "one.json", *options)
    assert done.code == 130
    assert "the value of joining is missing for 1 of 1 run: the same command with" in done.err


class Speaker(torch.nn.Module):
    """Names the next of nine tokens."""

    def __init__(self):
        super().__init__()
        self.words, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)

    def forward(self, input_ids, attention_mask):
        return {"logits": self.head(self.words(input_ids) * attention_mask[..., None])}


def test_texts_of_ones_own_are_compared_and_failures_are_logged(tmp_path, caplog):
    given = {"rounds": 1, "sites": 2, "task": "next_token", "label": "labels"}
    given["records"] = {"vocabulary": 9}
    plan, broken = Plan.parse(given), Plan.parse({**given, "local": {"head": 999}})
    ids = [[1 + k % 7, 2, 3, 1 + k % 5] for k in range(24)]
    plans, data = {"a": plan, "b": broken}, {"input_ids": ids, "labels": ids}
    found = fedpact.compare(plans, 1, tmp_path / "c", model=Speaker, data=data)
    assert len(found.runs) == 1
    assert "b with seed 0 failed: " in caplog.text
