"""Comparisons of runs whose folders are written by hand, so that every figure is known."""

import json
import math
import re
import statistics
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fedpact.common.messages import RoundRecord, SiteScore
from fedpact.plan import Plan
from fedpact.report.compared_runs import (
    Comparison,
    Spread,
    SweepPoint,
    differences,
    read_compared,
    run_folder,
)
from fedpact.report.comparison import (
    comparison_table,
    document,
    effort,
    find_bytes_to_targets,
    guarantees,
    inequality,
    paired_table,
    render_comparison,
    tabulate_sweep,
    write_comparison,
)
from fedpact.report.comparison_charts import curve, series, sweeps
from fedpact.studies.compare import read_plans

from .conftest import change, statement
from .test_page import Page

SITES = ["a", "b"]
AVERAGED = "accuracy, averaged model"
PLAN = {
    "data": "digits",
    "algorithm": "fedavg",
    "rounds": 4,
    "seed": 0,
    "settings": {"learning_rate": 0.5},
    "partition": {"kind": "iid"},
    "privacy": {"mode": "per_sample", "epsilon": 2.0, "delta": 1e-5, "clip": 1.0},
    "budget": {"bytes": None},
    "run": {"workers": 0},
}


def put(
    folder,
    name,
    seed,
    accuracies,
    *,
    epsilon=1.0,
    status="finished",
    train=(0, 1),
    averaged=None,
    **plan,
):
    """Write a run's folder: accuracy by round; every site spends `epsilon`, round by round."""
    path = run_folder(folder, name, seed)
    path.mkdir(parents=True)
    last, private = max(accuracies), epsilon is not None
    records = [
        RoundRecord(
            round=number,
            accuracy=accuracies.get(number),
            loss=None if number not in accuracies else 1 - accuracies[number],
            metrics={} if number not in accuracies else {"psi": 0.01 * (seed + 1)},
            scores={
                s: SiteScore(accuracies[number] - 0.1 * i, 1.0, 10) for i, s in enumerate(SITES)
            }
            if number in accuracies
            else {},
            epsilon=dict.fromkeys(SITES, (epsilon or 0) * number / last) if private else {},
            bytes_down=100 if number else 0,
            bytes_up=200 if number else 0,
            seconds=0.5,
            average={"accuracy": averaged, "loss": 1 - averaged}
            if averaged and number in accuracies
            else {},
        )
        for number in range(last + 1)
    ]
    mode = {} if private else {"privacy": {"mode": "none"}}
    documents = {
        "plan": {**PLAN, "seed": seed, **mode, **plan},
        "privacy": statement(dict.fromkeys(SITES, 2.0), private),
        "partition": {
            "train": {"a": list(train), "b": [7]},
            "held_out": {"a": [8], "b": [9]},
            "classes": ["c"],
            "label_counts": [[2], [1]],
        },
    }
    if status:
        documents["summary"] = {"status": status, "epsilon": dict(records[-1].epsilon)}
    for file, content in documents.items():
        (path / f"{file}.json").write_text(json.dumps(content))
    (path / "rounds.jsonl").write_text("".join(r.to_json() + "\n" for r in records))


def read(folder, names, seeds, failed=None):
    """Read with the plan of each entry's first run, where it has one."""
    found = {name: sorted(folder.glob(f"{name}/*/plan.json")) for name in names}
    plans = {n: json.loads(paths[0].read_text()) if paths else PLAN for n, paths in found.items()}
    return Comparison(folder, read_compared(folder, plans, seeds, failed or {}))


def swept(found, points):
    """The comparison with its entries' places in a sweep."""
    entries = [replace(e, point=points.get(e.name, SweepPoint("", {}))) for e in found.entries]
    return replace(found, entries=entries)


def cells(comparison, row=0):
    """A row of the comparison's table, by heading."""
    found = comparison_table(comparison)
    return dict(zip(found.headings, found.rows[row][1:], strict=True))


def put_all(folder, finals):
    """Runs of two rounds of each entry, one of each seed, by the accuracies that they end with."""
    for name, each in finals.items():
        for seed, final in enumerate(each):
            put(folder, name, seed, {0: 0.1, 2: final})


def two(folder, **second):
    """Two entries of two seeds each; the second's runs are changed."""
    for seed, final in ((3, 0.6), (4, 0.8)):
        put(folder, "one", seed, {0: 0.2, 4: final}, epsilon=1.0 + seed / 10)
        put(folder, "two", seed, {0: 0.2, 4: final}, **second)
    return read(folder, ["one", "two"], [3, 4])


def test_figures_are_means_and_sample_deviations_over_seeds(tmp_path):
    finals = [0.61, 0.64, 0.71]
    for seed, final in enumerate(finals):
        put(tmp_path, "x", seed, {0: 0.1, 3: final})
    (entry,) = read(tmp_path, ["x"], range(3)).entries
    found = entry.spread("accuracy")
    assert found.mean == pytest.approx(np.mean(finals), rel=1e-12)
    assert found.deviation == pytest.approx(np.std(finals, ddof=1), rel=1e-12)
    # Site b lies a tenth below site a everywhere.
    worst = entry.spread("worst_accuracy")
    assert worst.mean == pytest.approx(np.mean(finals) - 0.1, rel=1e-12)
    psi = entry.spread("psi")
    assert (psi.mean, psi.deviation) == pytest.approx((0.02, 0.01))
    assert (entry.runs[0].bytes, entry.runs[0].last.round) == (900, 3)


def test_deviation_needs_two_runs_and_mean_needs_a_value(tmp_path):
    put(tmp_path, "x", 0, {0: 0.1, 3: 0.5})
    (entry,) = read(tmp_path, ["x"], [0]).entries
    found = entry.spread("accuracy")
    assert (found.mean, found.deviation) == (0.5, None)
    assert entry.spread("records_read") is None
    entry.runs[0].figures["loss"] = math.nan
    assert math.isnan(entry.spread("loss").mean)
    assert cells(Comparison(tmp_path, [entry]))["accuracy"] == "50.00 %"


def test_server_averages_are_shown_with_the_last_models(tmp_path):
    for seed, averaged in ((0, 0.7), (1, 0.8)):
        put(tmp_path, "tail", seed, {0: 0.1, 3: 0.5}, averaged=averaged)
        put(tmp_path, "none", seed, {0: 0.1, 3: 0.5})
    alone = read(tmp_path, ["none"], range(2))
    assert cells(alone)["accuracy"] == "50.00 ± 0.00 %"
    assert AVERAGED not in cells(alone)
    comparison = read(tmp_path, ["tail", "none"], range(2))
    expected = f"75.00 ± {100 * statistics.stdev((0.7, 0.8)):.2f} %"
    assert [cells(comparison, row)[AVERAGED] for row in (0, 1)] == [expected, "–"]
    found = document(comparison)["entries"]
    assert found["tail"]["average_accuracy"]["mean"] == pytest.approx(0.75)
    assert found["tail"]["runs"]["1"]["average_loss"] == pytest.approx(0.2)
    assert found["none"]["average_accuracy"] is None
    shown = render_comparison(comparison)
    # Once in each of the two tables, every row of which has the column.
    assert shown.count("accuracy, averaged model</th>") == 2
    assert "80.00 %" in shown
    assert "server.average" not in render_comparison(alone)


def test_epsilon_is_the_largest_of_all_runs_and_rounded_up(tmp_path):
    for seed, epsilon in enumerate((1.00001, 1.23401, 1.1)):
        put(tmp_path, "x", seed, {0: 0.1, 2: 0.5}, epsilon=epsilon)
    comparison = read(tmp_path, ["x"], range(3))
    assert cells(comparison)["ε"] == "1.235 at δ = 1e-05"
    (told,) = guarantees(comparison)
    assert told.startswith("x: (ε, δ) = (1.235, 1e-05)")
    assert "adjacency: add/remove one record; accountant: pld" in told


def test_epsilon_covers_held_out_records(tmp_path):
    put(tmp_path, "x", 0, {0: 0.1, 2: 0.5}, epsilon=1.0)
    path = run_folder(tmp_path, "x", 0)
    change(path, "privacy", evaluation={"epsilon_reserved": 4.0, "delta": 1e-3})
    spent = {"epsilon_spent": {"a": 3.5, "b": 2.5}, "figures": []}
    change(path, "summary", evaluation=spent)
    (told,) = guarantees(read(tmp_path, ["x"], [0]))
    assert told.startswith("x: (ε, δ) = (3.5, 0.001)")
    assert "trained on or held out" in told


def test_an_unknown_epsilon_is_not_small(tmp_path):
    put(tmp_path, "x", 0, {0: 0.1, 2: 0.5}, epsilon=math.nan)
    assert cells(read(tmp_path, ["x"], [0]))["ε"].startswith("∞")


def test_equals_are_not_marked(tmp_path):
    comparison = two(tmp_path, algorithm="fedfdp", settings={"learning_rate": 3.0}, run={})
    assert comparison.inequalities == []
    assert inequality(comparison) is None
    assert document(comparison)["differences"] == {
        "algorithm": {"one": "'fedavg'", "two": "'fedfdp'"},
        "settings.learning_rate": {"one": "0.5", "two": "3.0"},
    }
    assert "NOT AN EQUAL" not in write_comparison(comparison).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rounds": 5}, "one: rounds = 4\ntwo: rounds = 5"),
        ({"partition": {"kind": "shards"}}, "partition.kind"),
        ({"budget": {"bytes": 10}}, "budget.bytes"),
        ({"sites": 3}, "sites"),
        ({"privacy": {**PLAN["privacy"], "epsilon": 3.0}}, "privacy.epsilon"),
        ({"privacy": {**PLAN["privacy"], "delta": 1e-6}}, "privacy.delta"),
        ({"epsilon": None}, "privacy.mode"),
        ({"train": (0, 2)}, "the records of the sites"),
        ({"heard_of_never": 1}, "heard_of_never"),
    ],
    ids=str,
)
def test_differences_are_stated(tmp_path, change, told):
    comparison = two(tmp_path, **change)
    sentence = inequality(comparison)
    assert sentence.startswith("NOT AN EQUAL COMPARISON")
    assert told in sentence
    assert document(comparison)["equal"] is False
    page = write_comparison(comparison)
    assert "NOT AN EQUAL COMPARISON" in page.read_text(encoding="utf-8")
    assert told.splitlines()[-1] in Page(page).text


@pytest.mark.parametrize(
    "change", [{"clip": 9.0}, {"clip": 1.0, "sigma": 2.0}], ids=["clip", "sigma"]
)
def test_settings_that_define_a_method_may_differ(change):
    other = {**PLAN, "privacy": {**PLAN["privacy"], **change}, "model": "cnn", "batch_size": 3}
    other |= {"compression": {"kind": "int8"}, "robust": {"rule": "median"}}
    assert not any(d.unequal for d in differences({"one": {**PLAN, "seed": 8}, "two": other}))


def test_a_plain_runs_privacy_settings_apply_to_nothing():
    plain = [{**PLAN, "privacy": {"mode": "none", "epsilon": e}} for e in (1.0, 2.0)]
    assert differences({"one": plain[0], "two": plain[1]}) == []
    (mode,) = differences({"one": plain[0], "two": PLAN})
    assert (mode.key, mode.unequal) == ("privacy.mode", True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"sites_per_round": 2}, {}),
        ({"privacy": {"epsilon": [2.0, 2.0]}}, {}),
        ({"privacy": {"delta": [1e-5, 1e-5]}}, {}),
        ({"privacy": {"sigma": [15.0, 15.0]}}, {"privacy": {"sigma": 15.0}}),
        ({"privacy": {"clip_schedule": [1.0, 1.0]}}, {}),
        ({"privacy": {"size_noise": 3.0}}, {}),
        ({"task": {"class_weights": [1.0] * 10}}, {}),
        ({"local": {"schedule": [1.0]}}, {}),
    ],
)
def test_equivalent_plans_are_equal_however_typed(one, other):
    # As a sweep has it: typed now, a noise of no count is refused.
    plans = {
        name: Plan.parse({"rounds": 4, "sites": 2, **of}, typed=())
        for name, of in {"one": one, "two": other}.items()
    }
    # Said by what the sites are asked, which is not what is tested.
    sizes = {"site-00": 100.0, "site-01": 60.0}
    ones, twos = (plan.terms(sizes) for plan in plans.values())
    # Clips of each round that are all the clip are no list of another meaning.
    assert {s: replace(t, clips=()) for s, t in ones.items()} == twos
    assert differences({name: plan.document() for name, plan in plans.items()}) == []


@pytest.mark.parametrize(
    ("one", "key"),
    [
        ({"sites_per_round": 1}, "sites_per_round"),
        ({"privacy": {"epsilon": [2.0, 1.0]}}, "privacy.epsilon"),
        ({"privacy": {"per_site": {"site-01": {"delta": 1e-6}}}}, "privacy.per_site"),
        ({"task": {"class_weights": [2.0, 2.0]}}, "task.class_weights"),
        ({"privacy": {"sizes": "noisy", "size_noise": 3.0}}, "privacy.sizes"),
    ],
)
def test_different_meanings_stay_unequal(one, key):
    plans = {"one": Plan(rounds=4, sites=2, **one), "two": Plan(rounds=4, sites=2)}
    found = differences({name: plan.document() for name, plan in plans.items()})
    assert key in [difference.key for difference in found if difference.unequal]


def test_weights_are_identified_by_their_digest():
    same = [{**PLAN, "initial": {"weights": at, "sha256": "0" * 64}} for at in ("a", "b")]
    assert differences({"one": same[0], "two": same[1]}) == []
    other = {**PLAN, "initial": {"weights": "a", "sha256": "1" * 64}}
    assert [d.key for d in differences({"one": same[0], "two": other})] == ["initial.sha256"]


def test_a_run_worse_than_before_training_is_marked(tmp_path):
    """Of losses 1 - accuracy: a model that diverges may stay finite; who said so says it once."""
    put(tmp_path, "one", 0, {0: 0.1, 2: 0.5})
    put(tmp_path, "one", 1, {0: 0.5, 2: 0.1})
    put(tmp_path, "two", 0, {0: 0.5, 2: 0.1}, status="diverged")
    put(tmp_path, "two", 1, {1: 0.5, 2: 0.1})
    one, two = read(tmp_path, ["one", "two"], [0, 1]).entries
    assert one.statuses == "1 × worse than before training"
    assert two.statuses == "1 × diverged"


@pytest.mark.drawn
def test_a_missing_seed_is_named_and_unequal(tmp_path):
    put(tmp_path, "one", 0, {0: 0.1, 2: 0.5})
    put(tmp_path, "one", 1, {0: 0.1, 2: 0.5})
    put(tmp_path, "two", 0, {0: 0.1, 2: 0.5})
    put(tmp_path, "two", 1, {0: 0.1, 2: 0.9}, status="stopped")
    put(tmp_path, "three", 0, {0: 0.1, 2: 0.9}, status=None)
    names = ["one", "two", "three", "four"]
    failed = {("four", 0): "no such model"}
    comparison = read(tmp_path, names, [0, 1], failed)
    one, second, third, fourth = comparison.entries
    assert one.missing == {}
    assert second.missing == {1: "stopped after round 2"}
    assert third.missing == {0: "not ended after round 2", 1: "not begun"}
    assert fourth.missing == {0: "no such model", 1: "not begun"}
    # What has not ended is in no mean.
    assert [cells(comparison, row)["accuracy"] for row in (1, 3)] == ["50.00 %", "–"]
    assert comparison.inequalities[1:3] == ["two: seeds 0", "three: seeds none"]
    text = Page(write_comparison(comparison)).text
    assert "no such model" in text


def test_a_damaged_run_is_missing_and_the_others_stand(tmp_path):
    put(tmp_path, "one", 0, {0: 0.1, 2: 0.5})
    put(tmp_path, "one", 1, {0: 0.1, 2: 0.5})
    (run_folder(tmp_path, "one", 1) / "privacy.json").write_text("{")
    (entry,) = read(tmp_path, ["one"], [0, 1]).entries
    assert [run.seed for run in entry.runs] == [0]
    assert "privacy.json" in entry.missing[1]


def test_a_curve_is_the_mean_of_its_runs_where_all_of_them_are(tmp_path):
    # Straight lines, evaluated at unlike rounds: between the points the mean is straight, too.
    put(tmp_path, "x", 0, {0: 0.0, 3: 0.3, 10: 1.0}, epsilon=2.0)
    put(tmp_path, "x", 1, {0: 0.0, 5: 0.25, 8: 0.4}, epsilon=1.6)
    (entry,) = read(tmp_path, ["x"], [0, 1]).entries
    found = curve(entry, "accuracy", "rounds")
    assert found.x.tolist() == [0, 3, 5, 8]
    assert found.mean == pytest.approx(found.x * (0.1 + 0.05) / 2)
    assert found.low == pytest.approx(found.x * 0.05)
    assert found.high == pytest.approx(found.x * 0.1)
    # 300 bytes a round, and ε = 0.2 a round in both runs.
    for against, each in (("bytes", 300), ("ε", 0.2)):
        other = curve(entry, "accuracy", against)
        assert other.x == pytest.approx(found.x * each)
        assert other.mean == pytest.approx(found.mean)
    assert curve(entry, "loss", "rounds") is not None


def test_a_round_that_diverged_is_not_drawn(tmp_path):
    put(tmp_path, "x", 0, {0: 0.0, 2: 0.3, 4: math.inf})
    put(tmp_path, "lost", 0, {0: math.nan, 2: math.nan})
    x, lost = read(tmp_path, ["x", "lost"], [0]).entries
    found = curve(x, "accuracy", "rounds")
    assert found.x.tolist() == [0, 2]
    assert curve(lost, "accuracy", "rounds") is None


@pytest.mark.drawn
def test_the_page_fetches_nothing_and_is_well_formed(tmp_path):
    comparison = two(tmp_path, epsilon=None, data="<b>x</b>", settings={"note": "<i>y</i>"})
    found = Page(write_comparison(comparison))
    assert found.crossed == []
    assert not {"script", "iframe", "object", "embed", "base", "b", "i"} & set(found.tags)
    assert "@import" not in found.source
    assert not re.search(r"https?:|//\w", re.sub(r'xmlns(:\w+)?="[^"]*"', "", found.source))
    links = [value for tag, key, value in found.attributes if (tag, key) == ("a", "href")]
    assert links == [
        f"{name}/seed-{seed}/report.html" for name in ("one", "two") for seed in (3, 4)
    ]
    for tag, key, value in found.attributes:
        if key in {"src", "href", "xlink:href", "srcset"} and tag != "a":
            assert value.startswith(("#", "data:"))
    assert "NOT PRIVATE" in found.text
    assert "SIMULATION" in found.text
    titles = [f"Accuracy against {against}" for against in ("rounds", "bytes", "ε")]
    assert sorted(found.titles()) == sorted(titles)


@pytest.mark.parametrize("pooled", [True, False])
def test_held_out_records_in_a_test_sets_place_are_marked(tmp_path, pooled):
    put(tmp_path, "x", 0, {0: 0.1, 3: 0.5})
    change(run_folder(tmp_path, "x", 0), "privacy", accuracy_pooled=pooled)
    text = Page(write_comparison(read(tmp_path, ["x"], [0]))).text
    assert ("Accuracy against rounds simulator only" in text) == pooled
    assert ("on the public test set" in text) == (not pooled)


@pytest.mark.drawn
def test_a_page_without_any_run_is_written(tmp_path):
    comparison = read(tmp_path, ["one", "two"], [0])
    found = Page(write_comparison(comparison))
    assert found.crossed == []
    assert "not begun" in found.text
    assert json.loads(json.dumps(document(comparison)))["entries"]["one"]["runs"] == {}


def test_settings_left_at_different_defaults_are_not_choices(tmp_path):
    """τ of 1 and 5 is a choice where somebody made it, and else makes runs unequal."""
    steps = {"one": 1, "two": 5}
    plans = {
        name: {
            **PLAN,
            "algorithm": algorithm,
            "settings": {"learning_rate": 0.5, "local_steps": steps[name]},
            "defaults": ["settings.local_steps"],
        }
        for name, algorithm in (("one", "fedavg"), ("two", "fedprox"))
    }
    (found,) = [d for d in differences(plans) if d.unequal]
    assert found.key == "settings.local_steps"
    assert dict(found.values) == {"one": "1 by default", "two": "5 by default"}
    told = inequality(Comparison(tmp_path, read_compared(tmp_path, plans, [0])))
    line = "{}: settings.local_steps = {} by default"
    assert told.splitlines()[1:3] == [line.format("one", 1), line.format("two", 5)]
    assert "--set settings.KEY=VALUE" in told
    # Chosen for both, or two settings of one algorithm, or what was swept over: compared.
    chosen = {name: {**plan, "defaults": []} for name, plan in plans.items()}
    same = {name: {**plan, "algorithm": "fedavg"} for name, plan in plans.items()}
    for equal in (chosen, same):
        assert not any(d.unequal for d in differences(equal))
    assert not any(d.unequal for d in differences(plans, ["settings.local_steps"]))
    # Left by one of them only.
    plans["one"]["defaults"] = []
    assert [d.key for d in differences(plans) if d.unequal] == ["settings.local_steps"]


def test_swept_accuracy_is_mean_and_deviation_over_seeds(tmp_path):
    """Two algorithms at three ε each, as if a list had been typed in any order."""
    finals = {("a", 4.0): [0.7, 0.9], ("a", 0.5): [0.1, 0.3], ("b", 0.5): [0.2, 0.2]}
    points, plans = {}, {}
    for (base, epsilon), accuracies in finals.items():
        name = f"{base}-{epsilon:g}"
        plans[name] = {**PLAN, "privacy": {**PLAN["privacy"], "epsilon": epsilon}}
        points[name] = SweepPoint(base, {"privacy.epsilon": epsilon})
        for seed, accuracy in enumerate(accuracies):
            put(tmp_path, name, seed, {0: 0.0, 4: accuracy}, privacy=plans[name]["privacy"])
    found = Comparison(tmp_path, read_compared(tmp_path, plans, [0, 1], points=points))
    assert found.inequalities == []
    first, second = series(found, "privacy.epsilon", "accuracy")
    assert (first.label, list(first.points)) == ("a", ["4.0", "0.5"])
    assert (second.label, list(second.points)) == ("b", ["0.5"])
    spreads = [spread for _, spread in first.points.values()]
    assert [spread.mean for spread in spreads] == pytest.approx([0.8, 0.2])
    assert [spread.deviation for spread in spreads] == pytest.approx([0.02**0.5] * 2)
    # Site b has a tenth less.
    worst = series(found, "privacy.epsilon", "worst site")[0].points.values()
    assert [spread.mean for _, spread in worst] == pytest.approx([0.7, 0.1])
    page = Page(write_comparison(found))
    assert page.crossed == []
    points = [f"Accuracy against {cost}, ε = {e}" for e in (4, 0.5) for cost in ("rounds", "bytes")]
    for title in ("Accuracy over privacy.epsilon", "Worst site over privacy.epsilon", *points):
        assert title in page.titles()
    told = document(found)
    assert told["swept"] == ["privacy.epsilon"]
    assert told["entries"]["a-4"]["swept"] == {"privacy.epsilon": 4.0}
    # Unswept, the same runs are unequal.
    assert any("privacy.epsilon" in why for why in swept(found, {}).inequalities)


def test_a_table_has_a_row_a_method_and_a_column_a_value(tmp_path):
    points, finals = {}, {}
    for base, epsilon, each in (("a", 4.0, [0.7, 0.9]), ("a", 0.5, [0.2]), ("b", 0.5, [0.3])):
        points[f"{base}{epsilon}"] = SweepPoint(base, {"privacy.epsilon": epsilon})
        finals[f"{base}{epsilon}"] = each
    put_all(tmp_path, finals)
    found = swept(read(tmp_path, list(points), [0, 1]), points)
    accuracy, worst = tabulate_sweep(found, "privacy.epsilon")
    assert (accuracy.first, accuracy.headings) == ("accuracy", ("ε = 4", "ε = 0.5"))
    assert accuracy.rows == [("a", "80.00 ±\u00a014.14", "20.00"), ("b", "–", "30.00")]
    assert worst.rows == [("a", "70.00 ±\u00a014.14", "10.00"), ("b", "–", "20.00")]
    # What may be chosen by it is said to be no result.
    rates = {
        name: SweepPoint(at.base, {"settings.learning_rate": at.values["privacy.epsilon"]})
        for name, at in points.items()
    }
    noted = "chooses by validation records"
    assert noted not in render_comparison(found)
    assert noted in render_comparison(swept(found, rates))


def test_differences_are_paired_by_seed_and_corrected(tmp_path):
    """Against scipy's own paired test, and Holm's rule written out."""
    finals = {
        "reference": [0.50, 0.60, 0.80],
        "better": [0.531, 0.629, 0.832],
        "same": [0.51, 0.58, 0.81],
    }
    put_all(tmp_path, finals)
    put(tmp_path, "reference", 3, {0: 0.1, 2: 0.9})  # a seed that no other has
    comparison = read(tmp_path, list(finals), range(4))
    found = comparison.pair("accuracy")
    own = [stats.ttest_rel(finals[n], finals["reference"]) for n in ("better", "same")]
    for one, theirs in zip(found, own, strict=True):
        interval = theirs.confidence_interval(0.95)
        assert (one.reference.name, one.seeds) == ("reference", 3)
        assert (one.low, one.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
        assert one.mean == pytest.approx((one.low + one.high) / 2)
    assert [one.p for one in found] == pytest.approx([2 * own[0].pvalue, own[1].pvalue])
    table = paired_table(comparison)
    assert [row[0] for row in table.rows] == ["better minus reference", "same minus reference"]
    assert table.rows[0][1] == "+3.07"
    assert document(comparison)["paired"]["accuracy"][0]["entry"] == "better"


def test_a_method_is_compared_with_itself_between_points(tmp_path):
    """Apart from the differences between methods, so that neither costs the other its p."""
    finals = {"a1": [0.5, 0.6, 0.8], "a4": [0.53, 0.64, 0.81]}
    finals |= {"b1": [0.4, 0.7, 0.7], "b4": [0.6] * 3}
    points = {n: SweepPoint(n[0], {"privacy.epsilon": float(n[1])}) for n in finals}
    put_all(tmp_path, finals)
    comparison = swept(read(tmp_path, list(finals), range(3)), points)
    found = [one for one in comparison.pair("accuracy") if one.entry.base == one.reference.base]
    own = [stats.ttest_rel(finals[f"{n}4"], finals[f"{n}1"]).pvalue for n in "ab"]
    assert [(one.entry.name, one.reference.name) for one in found] == [("a4", "a1"), ("b4", "b1")]
    assert found[0].p == pytest.approx(min(1, 2 * own[0] if own[0] < own[1] else own[0]))
    table = paired_table(comparison)
    assert [row[0] for row in table.rows] == [
        "b minus a at ε = 1",
        "b minus a at ε = 4",
        "a: ε = 4 minus ε = 1",
        "b: ε = 4 minus ε = 1",
    ]
    alone = swept(read(tmp_path, ["a1", "a4"], range(3)), points)
    assert len(alone.pair("accuracy")) == 1


def test_equal_differences_are_no_evidence(tmp_path):
    put_all(tmp_path, {"one": (0.1, 0.7), "two": (0.1 + 5 / 355, 0.7 + 5 / 355)})
    comparison = read(tmp_path, ["one", "two"], [0, 1])
    (only,) = comparison.pair("accuracy")
    assert (only.p, only.known) == (1.0, False)
    assert paired_table(comparison).rows[0][1:4] == ("+1.41", "–", "–")  # type: ignore[union-attr]


def test_of_one_seed_or_no_figure_nothing_is_said(tmp_path):
    put_all(tmp_path, {"one": [0.5], "two": [0.6], "lost": [math.nan]})
    comparison = read(tmp_path, ["one", "two", "lost"], [0])
    (only,) = comparison.pair("accuracy")
    assert (only.entry.name, only.p) == ("two", 1.0)
    assert math.isnan(only.low)
    assert paired_table(comparison).rows[0][:4] == ("two minus one", "+10.00", "–", "–")  # type: ignore[union-attr]


@pytest.mark.drawn
@pytest.mark.parametrize(
    "values", [["iid", "dirichlet"], [1, 2], [[1.0, 2.0], [3.0]], [True, False]]
)
def test_any_key_is_drawn(tmp_path, values):
    points = {}
    for i, value in enumerate(values):
        put(tmp_path, f"e{i}", 0, {0: 0.1, 2: 0.5})
        points[f"e{i}"] = SweepPoint("e", {"key": value})
    found = swept(read(tmp_path, list(points), [0]), points)
    (drawings,) = sweeps(found).values()
    assert len(drawings) == 2


def test_the_table_says_what_each_did(tmp_path):
    comparison = two(tmp_path)
    expected = [(name, "0", "0.5", "0", "–", "2.5") for name in ("one", "two")]
    assert effort(comparison).rows == expected
    for path in tmp_path.glob("two/*/"):
        change(path, "summary", records_read=600.0)
        lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
        text = "".join(json.dumps({**line, "steps": line["round"]}) + "\n" for line in lines)
        (path / "rounds.jsonl").write_text(text)
    again = read(tmp_path, ["one", "two"], [3, 4])
    assert effort(again).rows[1] == ("two", "1 to 4", "0.5", "10", "600", "2.5")
    entry = document(again)["entries"]["two"]
    assert entry["local_steps"] == (1, 4)
    assert (entry["iterations"]["mean"], entry["records_read"]["mean"]) == (10, 600)
    for cell in ("1 to 4", "records read", "600"):
        assert cell in render_comparison(again)


def test_bytes_to_accuracy_stop_at_the_first_evaluation(tmp_path):
    """300 bytes a round; both runs of an entry, or how many of them."""
    for seed, course in ((3, {0: 0.2, 2: 0.71, 4: 0.62}), (4, {0: 0.2, 2: 0.5, 4: 0.8})):
        put(tmp_path, "one", seed, course)
        put(tmp_path, "two", seed, {0: 0.2, 4: 0.66})
    found = find_bytes_to_targets(read(tmp_path, ["one", "two"], [3, 4]))
    assert found.headings == ("65.0 %", "70.0 %", "75.0 %", "80.0 %")
    # Seed 3 after two rounds, seed 4 after four: 600 and 1,200 bytes.
    assert found.rows[0] == (
        "one",
        *["900 B ± 424 B"] * 2,
        *["1.2 kB (1 of 2 runs)"] * 2,
    )
    assert found.rows[1] == ("two", "1.2 kB ± 0 B", "–", "–", "–")
    assert find_bytes_to_targets(Comparison(tmp_path, [])) is None
    assert "1.2 kB (1 of 2 runs)" in render_comparison(read(tmp_path, ["one", "two"], [3, 4]))


def test_alone_beside_others_is_an_equal_comparison():
    """The how-to's own command: what "local" sets is what mr_mtl has by default."""
    plans = read_plans([], ["fedavg", "mr_mtl", "local"], ["settings.proximal=0.01"])
    found = differences({name: plan.document() for name, plan in plans.items()})
    unequal = {difference.key for difference in found if difference.unequal}
    assert unequal <= {"settings.learning_rate"}, unequal  # whose defaults do differ


def test_numbers_that_differ_by_rounding_have_no_spread():
    assert Spread(0.3, 0.1 + 0.2 - 0.3).describe(str) == "0.3"
    assert Spread(0.3, 0.1).describe(str) == "0.3 ± 0.1"
