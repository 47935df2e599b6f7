"""A run's statement in the forms of others: what is in them, what the registry asks, who is not."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.common.errors import PlanError
from fedpact.common.format import upper
from fedpact.plan import Plan
from fedpact.report import export, model_card
from fedpact.report.export import SIMULATED, Facts, about_of
from fedpact.report.run_files import read_run
from fedpact.simulation.secure_aggregation.graph import secure_lines

from .conftest import Build

yaml = pytest.importorskip("yaml")

ABOUT = {
    "name": "Sick hearts: 1e-5",
    "purpose": 'to say "yes", or # no',
    "curators": ["The consortium", "It's friend"],
    "curator_type": "Nonprofit",
    "region": "Switzerland",
    "published": "2026-03-01",
    "authors": ["A. Person"],
    "data_version": "2026-01",
}
NAMES = [f"Hospital {letter}|*" for letter in "ABCDEFGHIJKL"]
# What the registry's schema names, of https://github.com/opendp/deployments-registry-data.
REQUIRED = {
    "basic": "name data_curators description intended_use data_product_type data_product_region "
    "publication_date",
    "administrative": "status registry_authors tier",
}
OPTIONAL = {
    "basic": "data_product_sector",
    "dp_variant": "variant_name data_domain unprotected_quantities",
    "privacy_loss": "privacy_unit privacy_unit_details number_of_privacy_units privacy_parameters "
    "privacy_parameters_details",
    "deployment_model": "model_name model_name_details trust_assumptions actors release_type "
    "release_type_details data_source_type data_source_type_details access_type "
    "access_type_details",
    "implementation": "preprocessing_and_hyperparameter_tuning mechanisms composition "
    "post_processing justification utility additional_information",
    "administrative": "evidence_sources",
}
CHOICES = {
    ("basic", "data_product_type"): {"Summary statistics", "Machine learning model", "Dataset"},
    ("dp_variant", "variant_name"): {"Pure DP", "Approximate DP", "Zero-concentrated DP"},
    ("deployment_model", "model_name"): {"Local", "Central", "Shuffle", "Federated"},
    ("deployment_model", "release_type"): {"One release", "Many releases"},
    ("deployment_model", "data_source_type"): {"Static", "Dynamic"},
    ("deployment_model", "access_type"): {"Interactive", "Non-interactive"},
    ("administrative", "status"): {"Draft"},
    ("administrative", "tier"): {1, 2, 3},
}


def facts(folder: Path, privacy: dict[str, Any] | None = None, **about: Any) -> Facts:
    """The facts of a folder whose privacy.json and [about] have these entries more."""
    path = folder / "privacy.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (privacy or {})))
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "about": about}))
    run = read_run(folder)
    return Facts(run, about_of(run.plan, ()))


def texts(of: Facts) -> dict[str, str]:
    return {
        "registry": export.as_yaml(export.entry(of)),
        "model-card": model_card.render_model_card(of),
        "summary": model_card.render_summary(of) + json.dumps(model_card.summarise_facts(of)),
    }


def test_the_entry_is_what_the_registry_asks_for(build: Build) -> None:
    of = facts(build(NAMES), {"randomness": "secure, at each site"}, **ABOUT)
    text = export.as_yaml(export.entry(of))
    # Another reader of YAML, and its own check that nothing is a date or a number by mistake.
    found = yaml.safe_load(text)
    assert found == export.entry(of)
    assert set(found) == {"url_slug", "deployment"}
    deployment = found["deployment"]
    for part in {*REQUIRED, *OPTIONAL}:
        required = set(REQUIRED.get(part, "").split())
        assert required <= set(deployment[part]) <= required | set(OPTIONAL.get(part, "").split())
    for (part, key), allowed in CHOICES.items():
        assert deployment[part][key] in allowed
    for curator, name in zip(deployment["basic"]["data_curators"], ABOUT["curators"], strict=True):
        assert curator == {"data_curator_name": name, "data_curator_type": "Nonprofit"}
    assert deployment["basic"]["intended_use"] == ABOUT["purpose"]
    assert deployment["basic"]["publication_date"] == "2026-03-01"
    assert deployment["privacy_loss"]["number_of_privacy_units"] == 1400  # of 12 times 120
    assert all(value for part in deployment.values() for value in part.values())


@pytest.mark.parametrize("key", export._REQUIRED)
def test_nothing_that_the_registry_requires_is_made_up(build: Build, key: str) -> None:
    of = facts(build(["a", "b"]), **{k: v for k, v in ABOUT.items() if k != key})
    with pytest.raises(PlanError, match=rf"requires about\.{key} "):
        export.entry(of)


def test_epsilon_is_the_largest_over_sites_and_held_out(build: Build) -> None:
    folder = build(NAMES, budgets=[*[1.0] * 11, 3.5])
    of = facts(folder, **ABOUT)
    # What the sites' terms reserved, in the hand-written files; rounded up, never down.
    assert of.epsilon == 3.5 - 0.0003
    parameters = export.entry(of)["deployment"]["privacy_loss"]["privacy_parameters"]
    assert parameters == {"epsilon": 3.5, "delta": 1e-5}
    held = {"evaluation": {"epsilon_reserved": 4.25, "delta": 2e-5, "share": 0.1}}
    of = facts(folder, held, **ABOUT)
    parameters = export.entry(of)["deployment"]["privacy_loss"]["privacy_parameters"]
    assert parameters == {"epsilon": 4.25, "delta": 2e-5}
    assert "ε at most 4.25, and δ = 2e-05" in model_card.render_model_card(of)


def test_the_number_of_shared_noise_needs_nobody_else(build: Build) -> None:
    folder = build(NAMES)
    path = folder / "privacy.json"
    privacy = json.loads(path.read_text())
    for site in privacy["sites"].values():
        site |= {"honest": 7, "epsilon_alone": 6.5}
    path.write_text(json.dumps(privacy | {"honest": 7}))
    of = facts(folder, **ABOUT)
    loss = export.entry(of)["deployment"]["privacy_loss"]
    assert loss["privacy_parameters"]["epsilon"] == 6.5
    told = f"{upper(of.epsilon)} if at least 7 sites of each sum are honest, 6.5 if no other is"
    assert told in loss["privacy_parameters_details"]
    assert told in model_card.render_model_card(of)


@pytest.mark.parametrize("budgets", [[1.0] * 12, [0.1 * (k + 1) for k in range(12)]])
def test_no_site_is_named_in_any_form(build: Build, budgets: list[float]) -> None:
    worst = {"refused": {NAMES[0]: "budget"}}
    of = facts(build(NAMES, budgets=budgets, **worst), **ABOUT)
    of.run.plan["privacy"] = {"per_site": {NAMES[3]: {"epsilon": 0.4}}, "clip": 1.0}
    for form, text in texts(of).items():
        for name in NAMES:
            assert name not in text, form
            assert name.split("|")[0] not in text, form


def test_small_cells_are_omitted_and_others_are_upper_bounds(build: Build) -> None:
    # Five sites in (1, 2], six in (2, 5], one alone in (5, 10].
    of = facts(build(NAMES, budgets=[*[1.5] * 5, *[2.5, 3.0, 4.0, 4.0, 4.5, 5.0], 8.0]))
    found = model_card.summarise_facts(of)
    assert [(c["epsilon_above"], c["epsilon_at_most"], c["sites"]) for c in found["cells"]] == [
        (1, 2, 5),
        (2, 5, 6),
    ]
    spent = {site.epsilon_spent for site in of.run.site_privacy.values()}
    # Of 1.2016 the end of the class, and no site's own.
    assert all(1 < max(spent) < cell["epsilon_spent"] == 2 for cell in found["cells"])
    text = model_card.render_summary(of)
    # Neither the class of the one, nor how many sites there are.
    for hidden in ("8", "12", "at most 10"):
        assert hidden not in text
        assert hidden not in json.dumps(found)
    assert "| above 2, at most 5 | 6 |" in text
    few = facts(build(NAMES[:4]))
    assert model_card.summarise_facts(few)["cells"] == []
    assert "so none is shown" in model_card.render_summary(few)
    for form in (model_card.render_summary(few), model_card.render_model_card(few)):
        assert "4 sites" not in form


@pytest.mark.parametrize("epsilon", [1e-9, 1.0, 2.0, 5000.0, 9999.0])
def test_every_budget_is_in_its_class(build: Build, epsilon: float) -> None:
    (cell,) = model_card.summarise_facts(facts(build(NAMES, budgets=[epsilon] * 12)))["cells"]
    assert cell["epsilon_above"] < epsilon <= cell["epsilon_at_most"]
    assert cell["sites"] == 12


@pytest.mark.parametrize(("split_by", "five"), [("record", None), ("person", 10.0)])
def test_a_cell_covers_whoever_is_held_out(build: Build, split_by: str, five: float | None) -> None:
    folder = build(NAMES, budgets=[1.0] * 12)
    path = folder / "privacy.json"
    privacy = json.loads(path.read_text())
    for site in privacy["sites"].values():
        site["epsilon_per_person"] = {"5": 6.5}
    path.write_text(json.dumps(privacy))
    held = {"share": 0.2, "epsilon": 4.0, "epsilon_reserved": 3.75, "delta": 1e-3}
    held |= {"split_by": split_by, "epsilon_per_person": {"5": 9.0}}
    of = facts(folder, {"evaluation": held}, **ABOUT)
    (cell,) = model_card.summarise_facts(of)["cells"]
    assert (cell["epsilon_above"], cell["epsilon_at_most"]) == (2, 5)
    assert (cell["epsilon_spent"], cell["epsilon_spent_alone"]) == (5, 5)
    assert (cell["epsilon_of_person_of_five"], cell["delta"]) == (five, 1e-3)
    # What was released cost 1.5 so far; training, 1.2.
    of.run.summary["evaluation"] = {"figures": [], "epsilon_spent": dict.fromkeys(NAMES, 2.5)}
    (cell,) = model_card.summarise_facts(of)["cells"]
    assert cell["epsilon_spent"] == 5
    of.run.summary["evaluation"]["epsilon_spent"] = dict.fromkeys(NAMES, 1.5)
    (cell,) = model_card.summarise_facts(of)["cells"]
    assert cell["epsilon_spent"] == 2
    # The entry says whom it counts.
    loss = export.entry(of)["deployment"]["privacy_loss"]
    assert "is of those trained on; about 20%" in loss["privacy_parameters_details"]


def test_no_form_gives_the_number_of_sites(build: Build) -> None:
    table = {"threshold": 9}
    changes = {"sites": 12, "secure_aggregation": table, "robust": {"rule": "trimmed", "liars": 2}}
    for privacy in ({}, {"trust": "sum", "honest": 7}):
        plan = Plan.model_validate({"privacy": privacy, "secure_aggregation": table, "sites": 12})
        of = facts(build(NAMES), {"covers": ["A line.", *secure_lines(plan, 12)]}, **ABOUT)
        of.run.plan.update(changes, privacy={**privacy, "epsilon": [2.0] * 12})
        del of.run.plan["settings"]
        found = texts(of) | {"summary": ""}
        for text in found.values():
            assert not re.search(r"\b12\b|\b9 sites|threshold|honest: |liars|2\.0, 2\.0", text)
            assert not text or "Secure aggregation: a server" in text
        assert "10 to 19 sites" in found["registry"]
        assert "- A line." in found["model-card"]
        # Bytes over those of one site would count them.
        assert not re.search(r"\d [kM]?B\b", found["model-card"])


def test_the_card_does_not_say_who_gave_no_evaluation(build: Build) -> None:
    held = {"share": 0.2, "epsilon_reserved": 1.0, "delta": 1e-5}
    folder = build(NAMES, unevaluated={NAMES[0]: "budget"}, accuracy=None)
    of = facts(folder, {"evaluation": held, "accuracy_pooled": True}, **ABOUT)
    card = model_card.render_model_card(of)
    assert "no site has answered an evaluation yet" in card
    assert "Hospital" not in card
    assert "budget)" not in card


def test_the_card_has_their_headings_and_its_top_is_yaml(build: Build) -> None:
    of = facts(build(NAMES), {"randomness": "secure, at each site"}, **ABOUT, licence="mit")
    _, top, card = model_card.render_model_card(of).split("---\n", 2)
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
    assert of.guarantee in card
    assert "digits, version 2026-01, at 10 to 19 sites" in card
    assert "| accuracy, public test set | 70.0 % |" in card
    assert "Hospital" not in card


def test_held_out_figures_are_on_no_card_and_released_ones_are(build: Build) -> None:
    of = facts(build(["a", "b"]), {"accuracy_pooled": True})
    assert "70.0 %" not in model_card.render_model_card(of)
    figure = {"name": "accuracy", "about": "all", "value": 0.625, "low": 0.5, "high": 0.75}
    of.run.summary["evaluation"] = {
        "level": 0.95,
        "figures": [{**figure, "exact": 0.6789}],
        "sites": {"a": [figure | {"value": 0.125}]},
    }
    card = model_card.render_model_card(of)
    assert "| accuracy, released: all | 62.5 % | 50.0 % to 75.0 % |" in card
    assert "67.9" not in card
    assert "12.5" not in card


def test_a_simulation_says_so_first_and_a_plain_run_has_no_entry(build: Build) -> None:
    of = facts(build(NAMES), **ABOUT)
    entry = export.entry(of)["deployment"]
    assert entry["basic"]["name"].startswith("SIMULATION, not a deployment")
    assert entry["basic"]["description"].startswith(SIMULATED)
    assert SIMULATED in entry["privacy_loss"]["privacy_parameters_details"]
    assert SIMULATED in model_card.render_model_card(of).split("## ")[0]
    assert SIMULATED in model_card.render_summary(of)
    plain = facts(build(NAMES, private=False), **ABOUT)
    with pytest.raises(PlanError, match="NOT PRIVATE"):
        export.entry(plain)
    card = model_card.render_model_card(plain)
    assert "**NOT PRIVATE" in card
    assert "not-private" in card
    assert "differential-privacy" not in card
    assert math.isinf(plain.epsilon)


def test_the_command_writes_each_form(build: Build, tmp_path: Path) -> None:
    folder = facts(build(NAMES), **ABOUT).run.path
    for form in ("registry", "model-card", "summary"):
        done = CliRunner().invoke(app, ["export", str(folder), "--as", form])
        out = tmp_path / f"{form}.txt"
        CliRunner().invoke(app, ["export", str(folder), "--as", form, "--out", str(out)])
        assert done.exit_code == 0
        assert out.read_text() in done.output
        told = CliRunner().invoke(app, ["export", str(folder), "--as", form, "--json"])
        assert json.loads(told.stdout)
    given = ["--set", "about.purpose=another", "--set", 'about.curators=["One"]', "--json"]
    # As people write a day, which TOML reads as one.
    given += ["--set", "about.published=2027-01-02"]
    done = CliRunner().invoke(app, ["export", str(folder), "--as", "registry", *given])
    basic = json.loads(done.stdout)["deployment"]["basic"]
    assert basic["publication_date"] == "2027-01-02"
    assert basic["intended_use"] == "another"
    assert [each["data_curator_name"] for each in basic["data_curators"]] == ["One"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rounds=3", "only described"),
        ("about.motive=none", "about.motive is no known key"),
        ("about.published=tomorrow", "published is 'tomorrow'"),
        ("about.curators=One", "about.curators"),
    ],
)
def test_only_what_is_said_of_a_run_can_be_given_later(change: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        about_of({}, [change])


def test_card_lists_non_default_settings_and_no_places(build: Build) -> None:
    of = facts(build(NAMES))
    changes: dict[str, Any] = {
        "sampling_rate": 0.25,
        "policy": "/home/someone/policy.toml",
        "data": "/home/someone/hearts.csv",
        "partition": {"kind": "iid", "held_out": 0.125},
    }
    of.run.plan.update(changes)
    card = model_card.render_model_card(of)
    assert "- sampling_rate: 0.25" in card
    assert "- partition.held_out: 0.125" in card
    assert "- settings.learning_rate: 0.125" in card
    assert "partition.kind" not in card
    assert "hearts.csv" in card
    assert "someone" not in card


@pytest.mark.parametrize(("split", "expected"), [("person", 10.0), ("record", None)])
def test_person_with_many_records_may_also_pay_evaluations(
    build: Build, split: str, expected: float | None
) -> None:
    folder = build(NAMES)
    path = folder / "privacy.json"
    privacy = json.loads(path.read_text())
    for site in privacy["sites"].values():
        site["epsilon_per_person"] = {"5": 8.0}
    held = {"epsilon_reserved": 1.0, "delta": 1e-5, "split_by": split}
    held["epsilon_per_person"] = {"5": 9.0}
    (alone,) = model_card.summarise_facts(facts(folder, privacy))["cells"]
    assert alone["epsilon_of_person_of_five"] == 10  # 8, to the class's end
    (cell,) = model_card.summarise_facts(facts(folder, privacy | {"evaluation": held}))["cells"]
    assert cell["epsilon_of_person_of_five"] == expected
    told = model_card.render_summary(facts(folder, privacy | {"evaluation": held}))
    assert "bears the evaluations' instead, (ε, δ) at most (1, 1e-05)" in told
