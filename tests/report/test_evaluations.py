"""What sites released stands in the report and in a comparison, with intervals and by group."""

import json

import numpy as np
import pytest
from tests.evaluation.people import people

from fedpact.common.format import percent
from fedpact.plan import Plan
from fedpact.report.compared_runs import Comparison, read_compared, run_folder
from fedpact.report.comparison import document, lines_by_entry, render_comparison
from fedpact.report.evaluations import summarise_evaluations
from fedpact.report.page import write_report
from fedpact.report.run_summary import read_run
from fedpact.simulation.simulate import simulate

SEEDS = [0, 1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    table = people(folder / "people.csv", rows=600)
    table["evaluation"]["every"] = 1
    for seed in SEEDS:
        plan = Plan.parse({**table, "rounds": 2, "sites": 2, "seed": seed})
        simulate(plan, run_folder(folder, "fedavg", seed))
    return folder


def figures(folder, seed):
    found = json.loads((run_folder(folder, "fedavg", seed) / "summary.json").read_text())
    return {(f["name"], f["about"]): f for f in found["evaluation"]["figures"]}


def cells(**texts):
    """Return a table's cells, heading -> text."""
    return "".join(f'<td class="n" data-of="{of}">{text}</td>' for of, text in texts.items())


def test_a_comparison_shows_the_means_of_released_values(runs):
    plan = json.loads((run_folder(runs, "fedavg", 0) / "plan.json").read_text())
    comparison = Comparison(runs, read_compared(runs, {"fedavg": plan}, SEEDS))
    one, other = (figures(runs, seed) for seed in SEEDS)
    gap = "equalised-odds gap", "groups"
    mean = {key: (one[gap][key] + other[gap][key]) / 2 for key in ("value", "low", "high", "exact")}
    entry = document(comparison)["entries"]["fedavg"]["evaluation"]
    (found,) = [f for f in entry if (f["name"], f["about"]) == gap]
    assert {key: found[key] for key in mean} == pytest.approx(mean)
    interval = f"{percent(mean['low'])} to {percent(mean['high'])}"
    (line,) = lines_by_entry(comparison, summarise_evaluations)
    assert line.startswith("fedavg: as sites released it: records ")
    assert f"equalised-odds gap {percent(mean['value'])} ({interval})" in line
    page = render_comparison(comparison)
    assert "As sites released it" in page
    assert cells(interval=interval, exactly=percent(mean["exact"])) in page
    for about in ("group Female", "group Male"):
        rates = [f"{kind} positive rate of class high" for kind in ("true", "false")]
        for name in ("accuracy", *rates):
            assert f'<td data-of="figure">{name}</td><td data-of="of">{about}</td>' in page


def test_report_shows_groups_gap_and_evaluated_rounds(runs):
    folder = run_folder(runs, "fedavg", 1)
    page = write_report(folder).read_text()
    found = figures(runs, 1)
    for key in (("equalised-odds gap", "groups"), ("accuracy", "group Male")):
        figure = found[key]
        cell = f"{percent(figure['low'])} to {percent(figure['high'])}"
        assert f'<td data-of="figure">{key[0]}</td><td data-of="of">{key[1]}</td>' in page
        assert cell in page
    assert "Round by round" in page
    rounds = read_run(folder).released["by_round"]
    assert [each["round"] for each in rounds] == [1, 2]
    assert rounds[-1]["figures"] == [f for f in found.values() if not f["of_part"]]
    assert "training costs a held-out" in page


@pytest.mark.parametrize("nothing", ["no privacy", "no releases"])
def test_simulation_shows_exact_rates_where_none_are_released(tmp_path, nothing):
    table = people(tmp_path / "people.csv", rows=300)
    tables = {"rounds": 2, "sites": 2}
    tables["evaluation"] = {**table["evaluation"], "every": 1}
    if nothing == "no privacy":
        tables["privacy"] = {"mode": "none"}
    else:
        own = tables["evaluation"]
        tables["evaluation"] = {k: v for k, v in own.items() if k not in ("epsilon", "delta")}
        tables["evaluation"] |= {"releases": []}
    folder = run_folder(tmp_path, "plain", 0)
    plan = Plan.parse({**table, **tables})
    result = simulate(plan, folder)
    last = result.records[-1]
    assert not last.evaluation
    hits = sum(np.array(of["hits"]) for of in last.held_out.values()).reshape(2, 2, 2)
    found = {(f["name"], f["about"]): f for f in result.summary["held_out"]["figures"]}
    for g, group in enumerate(("Female", "Male")):
        rate = hits[g, 1, 0] / hits[g, 1].sum()
        figure = found["true positive rate of class high", f"group {group}"]
        assert figure["value"] == pytest.approx(rate) == figure["low"] == figure["high"]
    assert result.summary["evaluation"] is None
    page = write_report(folder).read_text()
    section = page.split("On held-out records, after round 2")[1]
    assert "simulator only" in section.split("</h3>")[0]
    assert "true positive rate of class high" in section
    assert "As sites released it" not in page
    assert "Round by round" in section
    comparison = Comparison(tmp_path, read_compared(tmp_path, {"plain": plan.document()}, [0]))
    entry = document(comparison)["entries"]["plain"]
    assert entry["evaluation"] is None
    assert entry["held_out"] == result.summary["held_out"]["figures"]
    text = percent(found["equalised-odds gap", "groups"]["value"])
    assert cells(interval="–", exactly=text) in render_comparison(comparison)
