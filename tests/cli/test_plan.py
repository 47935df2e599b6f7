"""`fedpact plan --optimise`: its choice keeps the budget with everything else that is released."""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.spread import spread
from typer.testing import CliRunner

from fedpact.cli.commands.plan import forecast
from fedpact.cli.commands.plan import plan as show_plan
from fedpact.cli.main import app
from fedpact.common.errors import FedpactError
from fedpact.plan import Plan
from fedpact.privacy.accounting import planner
from fedpact.privacy.accounting.accountant import SampledGaussian, epsilon
from fedpact.report.page import render_run
from fedpact.report.run_summary import read_run
from fedpact.simulation.setup import SimulationSetup
from fedpact.simulation.simulate import simulate
from fedpact.studies.circumstances import optimise_budgets

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch):
    """Each takes a search; whether the best of all is found is for test_planner.py."""
    monkeypatch.setattr(planner, "_HALVINGS", 2)
    monkeypatch.setattr(planner, "_LOCAL_STEPS", (1, 4))


def scene(*overrides):
    asked = "rounds=20", "sites=2", "privacy.accountant=rdp", *overrides
    return SimulationSetup.of(Plan.read(None, [*asked]))


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("privacy.sizes=noisy",), marks=pytest.mark.slow),
        ("algorithm=fedproxvr", "settings.local_steps=2"),
    ],
    ids=["a noisy size", "openings of rounds"],
)
def test_choice_keeps_the_budget_with_non_batch_releases(overrides):
    whole = scene(*overrides)
    (case,) = optimise_budgets(whole, passes=4.0)["cases"]
    chosen, terms = case["chosen"], whole.terms["site-00"]
    history = terms.history(0, terms.openings)
    if terms.openings:
        # As noisy as the mean of a round's batches, which are others now.
        (opening,) = history
        way = chosen["sampling_rate"] * math.sqrt(chosen["local_steps"])
        history = Counter({replace(opening, sigma=chosen["sigma"] / way): terms.openings})
    history[SampledGaussian(chosen["sampling_rate"], chosen["sigma"])] += int(chosen["steps"])
    assert 0.99 * case["epsilon"] < epsilon(history, case["delta"], "rdp") <= case["epsilon"]
    assert chosen["passes"] <= 4.0
    assert case["gain"] == pytest.approx(chosen["snr"] / case["configured"]["snr"])


def test_a_small_batch_is_beaten_and_the_gain_is_shown():
    (case,) = optimise_budgets(scene("sampling_rate=0.02", "privacy.sigma=1.0"), passes=2.0)[
        "cases"
    ]
    assert case["gain"] > 1.2
    assert case["chosen"]["snr"] > case["configured"]["snr"]


@pytest.mark.parametrize(("sigma", "tau"), [(2.0, 1), (8.0, 3)])
def test_configured_noise_determines_the_steps(sigma, tau):
    """A σ that was given ends a run where its budget does, be it within the first round."""
    own = f"settings.local_steps={tau}", "sampling_rate=0.5", f"privacy.sigma={sigma}"
    (case,) = optimise_budgets(scene("algorithm=fedprox", *own), None)["cases"]
    for told in (case["configured"], case["chosen"]):
        event = SampledGaussian(told["sampling_rate"], told["sigma"])
        assert epsilon(Counter({event: told["steps"]}), case["delta"], "rdp") <= case["epsilon"]
        assert told["rounds"] <= 20
    assert case["gain"] >= 1


@pytest.mark.parametrize(
    ("sites", "threshold", "neighbours", "told"),
    [(3, 3, 2, "all 2 others"), (20, 14, 16, "16 of the 19 others")],
)
def test_a_plan_says_with_how_many_others_a_site_shares_masks(
    sites, threshold, neighbours, told, capsys
):
    """As many may work for the server as leave no room for two lists: c = 2t - K - 1."""
    changes = [f"sites={sites}", "rounds=1", f"secure_aggregation.threshold={threshold}"]
    found = forecast(SimulationSetup.of(Plan.read(None, changes)))["secure_aggregation"]
    bits = found.pop("bits")
    assert 16 <= bits <= 24
    assert found == {
        "threshold": threshold,
        "sites": sites,
        "neighbours": neighbours,
        "against": 2 * threshold - sites - 1,
    }
    show_plan(None, changes)
    out = capsys.readouterr().out
    assert told in out
    assert f"takes {bits} bits" in out


def test_plan_and_report_name_columns_as_documented(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "explanation" / "epsilon.md").read_text(encoding="utf-8")
    _, table = page.split("## Reading a plan and a report")
    rows = re.findall(r"^\| ([^|]+) \|", table.split("\n\n")[2], re.MULTILINE)
    # Two share a row; "ε, person of k" is one.
    named = {name for row in rows for name in row.replace("ε after 1, ", "ε after 1|").split("|")}
    monkeypatch.setenv("COLUMNS", "300")
    show_plan(None, ["rounds=1", "sites=2"])
    lines = capsys.readouterr().out.splitlines()
    shown = [c.strip() for line in lines if "site  " in line for c in line.strip("┃ ").split("┃")]
    assert shown[0] == "site"
    assert len(shown) > 7
    assert {name.replace("person of 5", "person of k") for name in shown[1:]} <= named
    run = simulate(Plan.read(None, ["rounds=1", "sites=2"]), tmp_path / "run")
    page = render_run(read_run(run.folder))
    head = page[page.index("<th>site</th>") :]
    heads = re.findall(r'<th class="n">([^<]+)</th>', head[: head.index("</thead>")])
    assert len(heads) > 10
    assert set(heads) <= named | {"accuracy", "loss", "held out"}


@pytest.mark.parametrize(
    "changes",
    [
        ["sites=12", "sites_per_round=5", "rounds=60", "privacy.accountant=rdp"],
        ["sites=12", "rounds=60", "secure_aggregation.threshold=10", "privacy.trust=sum",
         "privacy.honest=5"],
    ],
)  # fmt: skip
def test_eighty_columns_name_every_site_and_cut_no_number(changes, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    show_plan(None, changes)
    shown = capsys.readouterr().out
    table = [line for line in shown.splitlines() if line.startswith("│")]
    assert max(map(len, table)) <= 80
    for i in range(12):
        assert any(f"│ site-{i:02} " in line for line in table)
    assert "…" not in shown
    if "sites_per_round=5" in changes:
        assert len(re.findall(r"│ \d+ of 60 +│", shown)) == 12


def test_channels_are_listed_in_increasing_order(capsys):
    changes = ["sites=2", "rounds=5", "privacy.sigma=[20.0,12.5]"]
    show_plan(None, changes)
    assert "Channels and their σ: gradient 12.5000 to 20.0000" in capsys.readouterr().out
    show_plan(None, [*changes, "privacy.sigma=12.5"])
    assert capsys.readouterr().out.rstrip().endswith("gradient 12.5000")


@pytest.mark.parametrize("budget", [0.05, 8.0])
def test_rounds_are_weighted_by_their_signal(budget):
    """The ratio of all records' way to the noise's, by hand: at q = 1 it is one release's."""
    whole = scene(f"privacy.epsilon={budget}", "sampling_rate=1.0", "rounds=50")
    (case,) = optimise_budgets(whole, passes=None)["cases"]
    chosen, weights = case["chosen"], whole.workshop.bench().private.model.size
    records, steps = sum(whole.sizes.values()), chosen["steps"]
    rate = chosen["sampling_rate"]
    ratio = math.sqrt(steps) * rate * records / (chosen["sigma"] * math.sqrt(2 * weights))
    assert case["useful_rounds"] == min(max(round(4 * ratio), 3), 100)
    assert chosen["rounds"] == min(case["useful_rounds"], 50)
    # Noise that drowns ten records is no place for fifty rounds.
    assert (chosen["rounds"] < 10) == (budget < 1)
    spent = epsilon({SampledGaussian(rate, chosen["sigma"]): steps}, case["delta"], "rdp")
    assert 0.99 * budget < spent <= budget


PROPOSED = [
    {},
    {"sites": 1},
    {"sampling_rate": 1.0},
    {"sampling_rate": 0.001},
    {"privacy": {"accountant": "pld"}},
    {"privacy": {"mode": "batch_clipped"}},
    {"budget": {"spare_rounds": 10}},
    {"algorithm": "fedproxvr"},
    {"privacy": {"trust": "sum", "honest": 2}, "secure_aggregation": {"threshold": 3}},
]


@pytest.mark.parametrize(("tables", "passes"), spread(PROPOSED, (None, 40.0), one_in=2), ids=str)
def test_the_proposed_plan_has_the_stated_properties(tables, passes):
    privacy = {"accountant": "rdp", **tables.get("privacy", {})}
    tables = {"sites": 3, "rounds": 10, **tables, "privacy": privacy}
    plan = Plan.parse(tables)
    (case,) = optimise_budgets(SimulationSetup.of(plan), passes)["cases"]
    told = case["chosen"]
    if told["local_steps"] != plan.method.steps():
        tables = {**tables, "settings": {"local_steps": told["local_steps"]}}
    proposed = {key: told[key] for key in ("rounds", "sampling_rate")}
    for terms in SimulationSetup.of(Plan.parse({**tables, **proposed})).terms.values():
        assert terms.event.sigma == pytest.approx(told["sigma"], rel=1e-9)
        snr = math.sqrt(told["rounds"] * told["local_steps"]) * terms.rate / terms.event.sigma
        assert snr == pytest.approx(told["snr"], rel=1e-9)
    assert case["gain"] == pytest.approx(told["snr"] / case["configured"]["snr"])
    reached = case["configured"]["passes"] <= (passes or math.inf)
    # Fewer rounds cost no signal to noise at q = 1, but for what each finds of σ.
    assert case["gain"] >= 1 - 1e-3 or not reached
    assert told["passes"] <= (passes or case["configured"]["passes"]) * (1 + 1e-9)


def test_with_shared_noise_all_sites_use_the_largest():
    """However much ε it has itself: all add what the most careful site needs."""
    shared = {"trust": "sum", "honest": 2, "epsilon": [1.0, 2.0, 8.0]}
    tables = {"sites": 3, "rounds": 10, "sampling_rate": 1.0, "settings": {"local_steps": 1}}
    tables |= {"privacy": shared, "secure_aggregation": {"threshold": 3}}
    cases = optimise_budgets(SimulationSetup.of(Plan.parse(tables)), None)["cases"]
    assert [case["epsilon"] for case in cases] == [1.0, 2.0, 8.0]
    for case in cases:
        told = case["chosen"]
        proposed = {key: told[key] for key in ("rounds", "sampling_rate")}
        for terms in SimulationSetup.of(Plan.parse({**tables, **proposed})).terms.values():
            assert terms.event.sigma == pytest.approx(told["sigma"], rel=1e-9)
        # All records are in every step already.
        assert case["gain"] == pytest.approx(1.0, abs=1e-3)


def test_rounds_are_forecast_for_clipped_linear_models():
    """Of a clipped mean over the batch noise is not what the rule takes it for."""
    tables = {"sites": 3, "rounds": 10, "sampling_rate": 1.0}
    for changed, known in (
        ({}, True),
        ({"privacy": {"mode": "batch_clipped"}}, False),
        ({"model": "mlp"}, False),
    ):
        (case,) = optimise_budgets(SimulationSetup.of(Plan.parse({**tables, **changed})), None)[
            "cases"
        ]
        assert (case["useful_rounds"] is not None) == known


@pytest.mark.parametrize(
    ("tables", "passes", "why"),
    [
        ({"control": {"kind": "ali"}}, None, "τ is chosen on the way"),
        ({"privacy": {"mode": "none"}}, None, "how to spend ε, and there is none"),
        ({}, 0.0, "passes is 0"),
        ({}, math.nan, "passes is nan"),
        ({"privacy": {"epsilon": 1e-6}}, None, "no noise is large enough"),
    ],
)
def test_a_missing_proposal_is_explained(tables, passes, why):
    with pytest.raises(FedpactError, match=why):
        optimise_budgets(SimulationSetup.of(Plan.parse(tables)), passes)


def test_noise_that_moves_a_released_mean_far_has_a_remedy(tmp_path, caplog):
    file = tmp_path / "t.csv"
    file.write_text("\n".join(["age,ill", *(f"{i % 90},{i % 2}" for i in range(1500))]))
    columns = {"age": {"range": [0, 90], "scale": "released"}}
    for sites, granted, remedy in ((4, 2.0, False), (60, 0.1, True)):
        plan = {"data": str(file), "label": "ill", "sites": sites, "rounds": 2}
        plan |= {"records": {"columns": columns}, "partition": {"kind": "iid"}}
        plan |= {"privacy": {"epsilon": granted}}
        assert SimulationSetup.of(Plan.parse(plan)).terms
        assert ("declare mean and deviation" in caplog.text) == remedy
        caplog.clear()


@pytest.mark.slow
@pytest.mark.parametrize("trust", [(), ("--trust", "sum")], ids=["own", "sum"])
def test_of_unlike_budgets_as_many_rounds_pay_as_was_recommended(tmp_path, trust):
    out = tmp_path / "study.toml"
    asked = ("recommend", "digits", "--epsilon", "0.5,1,2", *trust, "--out", str(out), "--json")
    done = CliRunner().invoke(app, asked)
    rounds = json.loads(done.stdout)["configuration"]["rounds"]
    found = optimise_budgets(SimulationSetup.of(Plan.read(out)), None)["cases"]
    assert {abs(case["useful_rounds"] - rounds) <= 1 for case in found} == {True}
    assert len({case["useful_rounds"] for case in found}) == 1
