"""What joining was worth, of a simulated run: in its folder, on its page, in a comparison."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.evaluation.people import people
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.common.errors import PlanError
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.common.run_folder import Folder
from fedpact.data.load import from_arrays
from fedpact.evaluation import personal
from fedpact.evaluation.metrics import evaluate
from fedpact.plan import Plan
from fedpact.report.evaluations import joining_rows, summarise_joining
from fedpact.report.page import write_report
from fedpact.report.run_summary import read_run
from fedpact.simulation.simulate import of_run, simulate
from fedpact.studies.compare import compare, read_plans
from fedpact.studies.pool import Job


def some_data():
    """Two sites whose labels are opposite: nothing of one helps the other."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(240, 2)).astype(np.float32)
    site = np.arange(240) % 2
    y = ((x[:, 0] > 0) ^ (site == 1)).astype(int)
    return from_arrays(x, y, site=[f"s{i}" for i in site], name="opposite")


def plan_of(**tables):
    partition = {"kind": "natural", "held_out": 0.3}
    asked = {"rounds": 2, "sites": 2, "partition": partition, "privacy": {"accountant": "rdp"}}
    return Plan.parse({**asked, **tables})


@pytest.fixture(scope="module", autouse=True)
def quick():
    """One λ is enough; which is chosen, and of how many, is for tests/evaluation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(personal, "WEIGHTS", (0.1,))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder, data = tmp_path_factory.mktemp("joining") / "run", some_data()
    simulate(plan_of(privacy={"epsilon": 2.0}), folder, data=data)
    return folder, of_run(folder, data)


def test_figures_use_held_out_records_and_local_models(run):
    folder, found = run
    data, (at, records) = some_data(), Folder(folder).restore()
    partition = json.loads((folder / "partition.json").read_text())
    for site, figures in found["sites"].items():
        held = partition["held_out"][site]
        assert figures["federated"] == records[-1].scores[site].accuracy
        assert figures["records"] == len(partition["train"][site])
        assert figures["held_out"] == len(held)
        # Alone a line separates the labels; together opposite labels leave nothing.
        assert figures["local"] > 0.9 > figures["federated"]
        assert figures["tune"]
        assert figures["gain"]["mean"] == pytest.approx(figures["tuned"] - figures["local"])
    assert len(at.state.vectors["w"]) == 6
    assert data.x.shape == (240, 2)


def test_each_site_is_reported_and_nothing_else_is_written(tmp_path):
    """Tuned models are nobody's but the site's: no file of the run has one, and no ledger grows."""
    data, folder = some_data(), tmp_path / "run"
    site = np.array(data.site)
    np.savez(tmp_path / "d.npz", x=data.x.numpy(), y=data.y.numpy(), site=site)
    simulate(plan_of(data=str(tmp_path / "d.npz")), folder)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    found = CliRunner().invoke(app, ["personalise", str(folder), "--json"])
    assert found.stderr.splitlines() == ["s0: site 1 of 2", "s1: site 2 of 2"]
    assert json.loads(found.stdout)["sites"].keys() == {"s0", "s1"}
    after = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert after.keys() - before.keys() == {folder / "joining.json", folder / "report.html"}
    assert all(after[path] == block for path, block in before.items())


def test_the_page_and_the_sentence_say_for_whom_it_paid(run):
    folder, found = run
    read = read_run(folder)
    assert [row.site for row in joining_rows([read])] == ["s0", "s1"]
    told = summarise_joining([read])
    assert told.startswith("At ε = 2 joining ")
    page = write_report(folder).read_text()
    assert told in page
    assert "Was it worth joining?" in page
    section = page.split("Was it worth joining?")[1].split("</h3>")[0]
    assert "simulator only" in section
    assert found["simulator_only"] is True


def test_over_seeds_figures_and_intervals_are_means(run):
    folder, _ = run
    one = joining_rows([read_run(folder)])
    three = joining_rows([read_run(folder)] * 3)
    for a, b in zip(one, three, strict=True):
        assert (b.runs, b.tuned_in) == (3, 3 * a.tuned_in)
        assert (a.local, a.gain.low, a.gain.high) == pytest.approx(
            (b.local, b.gain.low, b.gain.high)
        )


def test_of_own_models_it_is_those_that_are_compared(tmp_path):
    data = some_data()
    plan = plan_of(algorithm="mr_mtl", settings={"proximal": 0.1}, rounds=3)
    result = simulate(plan, tmp_path, data=data)
    found = of_run(tmp_path, data)
    scores = result.records[-1].scores
    assert {n: f["federated"] for n, f in found["sites"].items()} == {
        n: s.accuracy for n, s in scores.items()
    }
    # The mean serves opposite sites no better than one model does.
    model = FlatModel(result.model)
    partition = json.loads((tmp_path / "partition.json").read_text())
    held = torch.tensor([j for places in partition["held_out"].values() for j in places])
    mean = evaluate(model.module, cross_entropy, data.x[held], data.y[held]).accuracy
    assert min(f["federated"] for f in found["sites"].values()) > mean


def test_run_unfinished_or_without_held_out_is_refused(tmp_path):
    data = some_data()
    simulate(plan_of(), tmp_path / "a", data=data, stop=lambda: True)
    with pytest.raises(PlanError, match=r"stopped.*fedpact resume"):
        of_run(tmp_path / "a", data)
    none = {"kind": "natural", "held_out": 0.0}
    simulate(plan_of(partition=none), tmp_path / "b", data=data)
    with pytest.raises(PlanError, match="held_out"):
        of_run(tmp_path / "b", data)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "plan.json").write_text(json.dumps(plan_of().model_dump(mode="json")))
    with pytest.raises(PlanError, match=r"partition\.json.*site\.toml"):
        of_run(tmp_path / "c")


def test_compare_refuses_first_if_nothing_is_held_out(tmp_path):
    with pytest.raises(PlanError, match=r"held_out and evaluation\.share are 0.*--joining"):
        compare([plan_of(partition={"held_out": 0.0})], 1, tmp_path / "c", joining=True)
    assert not (tmp_path / "c").exists()


@pytest.fixture
def here(monkeypatch):
    """Comparisons begin no process: one takes as long as all else here."""
    monkeypatch.setattr(Job, "here", True)


def test_local_in_compare_is_mr_mtl_with_lambda_0():
    settings = ["learning_rate=0.3", "proximal=0.2", "proximal_noise=7.0"]
    settings = [f"settings.{each}" for each in settings]
    plans = read_plans([], ["fedavg", "mr_mtl", "local"], settings)
    assert plans["local"].algorithm == "mr_mtl"
    alone = {"learning_rate": 0.3, "proximal": 0.0, "proximal_noise": 0.0}
    assert plans["local"].settings == alone
    assert plans["mr_mtl"].settings == alone | {"proximal": 0.2, "proximal_noise": 7.0}
    sizes = {"a": 100.0}
    # What mr_mtl sends is no single release, so its sums are rounded more finely.
    local = replace(plans["local"].terms(sizes)["a"], grid=plans["fedavg"].method.facts.units)
    assert local == plans["fedavg"].terms(sizes)["a"]


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_stopped_comparison_pauses_joining_and_resumes(tmp_path):
    table = people(tmp_path / "people.csv", rows=80)
    plan = plan_of(**table, rounds=1, partition={"held_out": 0.0})
    told, folder = [], tmp_path / "c"

    def on_news(news):
        if news.joining is not None:
            told.append(news.joining)

    compare([plan], 2, folder, joining=True, jobs=1, on_news=on_news, stop=lambda: len(told) == 3)
    runs = [folder / "fedavg" / f"seed-{seed}" for seed in range(2)]
    assert [at for _, at, _ in told] == [1, 2, 1]
    assert [(run / "joining.json").exists() for run in runs] == [True, False]
    before = (runs[0] / "joining.json").read_bytes()
    compare([plan], 2, folder, joining=True, jobs=1, on_news=on_news)
    assert [(at, of) for _, at, of in told[3:]] == [(1, 2), (2, 2)]
    assert (runs[0] / "joining.json").read_bytes() == before
    # Of the records that evaluations hold out, where no others are.
    sites = json.loads((runs[1] / "joining.json").read_text())["sites"]
    parts = json.loads((runs[1] / "partition.json").read_text())["held_out"]
    assert {n: f["held_out"] for n, f in sites.items()} == {n: len(p) for n, p in parts.items()}
    assert min(map(len, parts.values())) > 0


@pytest.mark.usefixtures("here")
def test_compare_says_it_from_one_command(tmp_path):
    out, table, data = tmp_path / "c", tmp_path / "opposite.csv", some_data()
    rows = zip(data.x.tolist(), data.y.tolist(), data.site, strict=True)
    lines = [f"{x[0]},{x[1]},{y},{site}" for x, y, site in rows]
    table.write_text("\n".join(["u,v,label,hospital", *lines]) + "\n")
    settings = {
        "privacy.accountant": "rdp",
        "rounds": 2,
        "sites": 2,
        "partition.kind": "natural",
        "data": table,
        "label": "label",
        "site": "hospital",
    }
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    names = ["--algorithms", "fedavg,local", "--seeds", "1", "--jobs", "1", "--joining"]
    done = CliRunner().invoke(app, ["compare", *names, *given, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "joining pays" in done.output
    for name in ("fedavg", "local"):
        assert f"{name} seed 0: site 1/2  s0 alone and tuned" in done.stderr
    document = json.loads((out / "comparison.json").read_text())
    for name in ("fedavg", "local"):
        sites = document["entries"][name]["joining"]["sites"]
        assert set(sites) == {"s0", "s1"}
    # Each alone, exact, is one figure of the data, whatever it is compared with.
    alone = [
        {n: s["local"] for n, s in document["entries"][name]["joining"]["sites"].items()}
        for name in ("fedavg", "local")
    ]
    assert alone[0] == alone[1]
    assert "Was it worth joining?" in (out / "comparison.html").read_text()
