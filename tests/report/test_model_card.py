"""A run's model card: what stands in it, and who does not."""

import json
import re

import pytest
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.common.errors import PlanError
from fedpact.common.format import upper
from fedpact.plan import Plan
from fedpact.report.exports import SIMULATED, about_of, render_model_card
from fedpact.report.run_summary import read_run
from fedpact.simulation.statement import describe_masks

from .conftest import change

yaml = pytest.importorskip("yaml")

ABOUT = {
    "name": "Sick hearts: 1e-5",
    "purpose": 'to say "yes", or # no',
    "curators": ["The consortium", "It's friend"],
    "published": "2026-03-01",
    "authors": ["A. Person"],
    "data_version": "2026-01",
}
NAMES = [f"Hospital {letter}|*" for letter in "ABCDEFGHIJKL"]


def run_of(folder, privacy=None, **about):
    """The run of a folder whose privacy.json and [about] have these entries more."""
    change(folder, "privacy", **(privacy or {}))
    return read_run(change(folder, "plan", about=about))


def card_of(run):
    return render_model_card(run, about_of(run.plan, ()))


def test_epsilon_is_the_largest_over_sites_and_held_out(build):
    folder = build(NAMES, budgets=[*[1.0] * 11, 3.5])
    of = run_of(folder, **ABOUT)
    # What the sites' terms reserved, in the hand-written files; rounded up, never down.
    assert of.reserved.epsilon == 3.5 - 0.0003
    assert "ε at most 3.5, and δ = 1e-05" in card_of(of)
    held = {"evaluation": {"epsilon_reserved": 4.25, "delta": 2e-5, "share": 0.1}}
    assert "ε at most 4.25, and δ = 2e-05" in card_of(run_of(folder, held, **ABOUT))


def test_shared_noise_is_shown_with_epsilon_alone(build):
    folder = build(NAMES)
    path = folder / "privacy.json"
    privacy = json.loads(path.read_text())
    for site in privacy["sites"].values():
        site |= {"honest": 7, "epsilon_alone": 6.5}
    path.write_text(json.dumps(privacy | {"honest": 7}))
    of = run_of(folder, **ABOUT)
    epsilon = upper(of.reserved.epsilon)
    told = f"{epsilon} if at least 7 sites of each sum are honest, 6.5 if no other is"
    assert told in card_of(of)


@pytest.mark.parametrize("budgets", [[1.0] * 12, [0.1 * (k + 1) for k in range(12)]])
def test_no_site_is_named(build, budgets):
    worst = {"refused": {NAMES[0]: "budget"}}
    of = run_of(build(NAMES, budgets=budgets, **worst), **ABOUT)
    of.plan["privacy"] = {"per_site": {NAMES[3]: {"epsilon": 0.4}}, "clip": 1.0}
    card = card_of(of)
    for name in NAMES:
        assert name.split("|")[0] not in card


def test_the_card_does_not_give_the_number_of_sites(build):
    table = {"threshold": 9}
    changes = {"sites": 12, "secure_aggregation": table, "robust": {"rule": "trimmed", "liars": 2}}
    for privacy in ({}, {"trust": "sum", "honest": 7}):
        plan = Plan.model_validate({"privacy": privacy, "secure_aggregation": table, "sites": 12})
        of = run_of(build(NAMES), {"covers": ["A line.", describe_masks(plan, 12)]}, **ABOUT)
        of.plan.update(changes, privacy={**privacy, "epsilon": [2.0] * 12})
        del of.plan["settings"]
        card = card_of(of)
        assert not re.search(r"\b12\b|\b9 sites|threshold|honest: |liars|2\.0, 2\.0", card)
        for part in ("Secure aggregation: a server", "10 to 19 sites", "- A line."):
            assert part in card
        # Bytes over those of one site would count them.
        assert not re.search(r"\d [kM]?B\b", card)
    assert "4 sites" not in card_of(run_of(build(NAMES[:4])))


def test_the_card_does_not_say_who_gave_no_evaluation(build):
    held = {"share": 0.2, "epsilon_reserved": 1.0, "delta": 1e-5}
    folder = build(NAMES, unevaluated={NAMES[0]: "budget"}, accuracy=None)
    of = run_of(folder, {"evaluation": held, "accuracy_pooled": True}, **ABOUT)
    card = card_of(of)
    assert "no site has released an evaluation yet" in card
    assert "Hospital" not in card
    assert "budget)" not in card


def test_the_card_has_their_headings_and_its_top_is_yaml(build):
    of = run_of(build(NAMES), {"randomness": "secure, at each site"}, **ABOUT, licence="mit")
    _, top, card = card_of(of).split("---\n", 2)
    assert yaml.safe_load(top) == {
        "library_name": "fedpact",
        "model_name": ABOUT["name"],
        "license": "mit",
        "tags": ["federated-learning", "differential-privacy"],
        "metrics": ["accuracy"],
    }
    headings = [line for line in card.splitlines() if line.startswith("#")]
    assert headings[0] == f"# Model Card for {ABOUT['name']}"
    for heading in (
        *("Model Details", "Uses", "Bias, Risks, and Limitations", "Training Details"),
        *("How to Get Started with the Model", "Evaluation", "Environmental Impact"),
        *("Technical Specifications", "Model Card Authors", "Model Card Contact"),
    ):
        assert f"## {heading}" in headings
    assert "(ε, δ)-differential privacy per record of a site, at every site, with ε at most" in card
    assert "digits, version 2026-01, at 10 to 19 sites" in card
    assert "| accuracy, public test set | 70.0 % |" in card
    assert "Hospital" not in card


def test_held_out_figures_are_on_no_card_and_released_ones_are(build):
    of = run_of(build(["a", "b"]), {"accuracy_pooled": True})
    assert "70.0 %" not in card_of(of)
    figure = {"name": "accuracy", "about": "all", "value": 0.625, "low": 0.5, "high": 0.75}
    of.summary["evaluation"] = {
        "level": 0.95,
        "figures": [{**figure, "exact": 0.6789}, figure | {"about": "class a|b"}],
        "sites": {"a": [figure | {"value": 0.125}]},
    }
    card = card_of(of)
    assert "| accuracy, released: all | 62.5 % | 50.0 % to 75.0 % |" in card
    # A sign in a name does not end its cell.
    row = next(line for line in card.splitlines() if "class a" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 4
    assert "67.9" not in card
    assert "12.5" not in card


def test_a_simulation_and_a_plain_run_say_so_first(build):
    assert SIMULATED in card_of(run_of(build(NAMES), **ABOUT)).split("## ")[0]
    card = card_of(run_of(build(NAMES, private=False), **ABOUT))
    assert "**NOT PRIVATE" in card
    assert "not-private" in card
    assert "differential-privacy" not in card


def test_the_command_writes_the_card(build, tmp_path):
    folder, out = run_of(build(NAMES), **ABOUT).path, tmp_path / "card.md"
    # As people write a day, which TOML reads as one.
    given = ["--set", "about.purpose=another", "--set", "about.published=2027-01-02"]
    done = CliRunner().invoke(app, ["export", str(folder), *given])
    assert done.exit_code == 0
    CliRunner().invoke(app, ["export", str(folder), *given, "--out", str(out)])
    assert out.read_text() in done.output
    for part in ("another", "published 2027-01-02"):
        assert part in out.read_text()
    told = CliRunner().invoke(app, ["export", str(folder), *given, "--json"])
    assert json.loads(told.stdout)["markdown"] == out.read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rounds=3", "only its description can change"),
        ("about.motive=none", "about.motive is not a known key"),
        ("about.published=tomorrow", "published is 'tomorrow'"),
        ("about.curators=One", "about.curators"),
    ],
)
def test_only_statements_about_a_run_can_be_added_later(change, message):
    with pytest.raises(PlanError, match=message):
        about_of({}, [change])


def test_card_lists_non_default_settings_and_no_places(build):
    of = run_of(build(NAMES))
    changes = {
        "sampling_rate": 0.25,
        "policy": "/home/someone/policy.toml",
        "data": "/home/someone/hearts.csv",
        "partition": {"kind": "iid", "held_out": 0.125},
    }
    of.plan.update(changes)
    card = card_of(of)
    assert "- sampling_rate: 0.25" in card
    assert "- partition.held_out: 0.125" in card
    assert "- settings.learning_rate: 0.125" in card
    assert "partition.kind" not in card
    assert "hearts.csv" in card
    assert "someone" not in card
