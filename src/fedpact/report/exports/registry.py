"""A run's statement as an entry of the registry of differential privacy deployments.

Nanayakkara, Ghazi, Vadhan. Practitioners' perspectives on a differential privacy deployment
registry. arXiv 2509.13509; the keys are those of the registry's schema, which asks for a YAML file
(github.com/opendp/deployments-registry-data, as of 2026). What a run does not know stands in
[about], or is left out; an entry whose required fields nobody has filled in is not written.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from fedpact.errors import PlanError
from fedpact.report.exports.facts import MIN_CELL_SITES, PLAIN, Facts, one_line
from fedpact.text import format_epsilon, headline_metric, upper

_REQUIRED: Final = {
    "purpose": "intended_use",
    "curators": "data_curators",
    "curator_type": "data_curator_type",
    "region": "data_product_region",
    "published": "publication_date",
    "authors": "registry_authors",
}
"""Key of [about] -> what the registry requires."""


def entry(facts: Facts) -> dict[str, Any]:
    """Return the entry. Raises PlanError: no ε to register, or a field that the registry needs."""
    run, about = facts.run, facts.about
    if not run.private or not math.isfinite(facts.epsilon_alone):
        raise PlanError(
            f"{run.path} is no entry of the registry: {PLAIN} Export it as a model-card"
        )
    missing = [
        f"about.{key} ({field})" for key, field in _REQUIRED.items() if not _said(about, key)
    ]
    if missing:
        raise PlanError(
            f"the registry requires {', '.join(missing)}: give each in the plan's [about], or here "
            "with --set, as in --set 'about.purpose=...'"
        )
    simulated = "SIMULATION, not a deployment: " if run.seeded else ""
    return {
        "url_slug": re.sub(r"[^a-z0-9]+", "-", facts.name.lower()).strip("-") or "model",
        "deployment": {
            "basic": {
                "name": simulated + facts.name,
                "data_curators": [
                    {"data_curator_name": name, "data_curator_type": about.curator_type}
                    for name in about.curators
                ],
                "description": one_line([*facts.warnings, facts.training]),
                "intended_use": about.purpose,
                "data_product_type": "Machine learning model",
                "data_product_region": about.region,
                **({"data_product_sector": about.sector} if about.sector else {}),
                "publication_date": about.published,
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": _domain(facts),
                "unprotected_quantities": one_line(run.privacy["does_not_cover"]),
            },
            "privacy_loss": _loss(facts),
            "deployment_model": _model(facts),
            "implementation": _implementation(facts),
            "administrative": {
                "status": "Draft",
                "registry_authors": list(about.authors),
                "tier": 3,
            },
        },
    }


def _said(about: object, key: str) -> bool:
    value = getattr(about, key)
    return any(value) if isinstance(value, list) else bool(value)


def _domain(facts: Facts) -> str:
    version = f", version {facts.about.data_version}" if facts.about.data_version else ""
    return (
        f"Data sets of labelled records at each of {facts.many}, of the form that the sites "
        f"declared beforehand ({facts.data}{version}); sizes as stated below."
    )


def _loss(facts: Facts) -> dict[str, Any]:
    privacy = facts.run.privacy
    size = sum(site.size for site in facts.run.site_privacy.values())
    many = len(facts.run.sites) >= MIN_CELL_SITES and math.isfinite(size) and size >= 1
    bound = format_epsilon(facts.epsilon, facts.epsilon_alone, facts.honest)
    said = [*facts.warnings, f"ε is at most {bound}: the largest that a site reserved."]
    if facts.honest:
        said.append("The number above is the one that needs no other site.")
    held = privacy.get("evaluation")
    if many and held:
        said.append(
            f"The number of units is of those trained on; about {held['share']:.0%} of a site's "
            "are held out beside them, for whom ε holds as well."
        )
    return {
        "privacy_unit": _UNITS[privacy["unit"]],
        "privacy_unit_details": (
            f"Adjacent data sets: {privacy['adjacency']} at one site; the symmetric distance, "
            f"counted in {privacy['unit']}s, is at most 1. " + str(privacy.get("per_person", ""))
        ).strip(),
        # Two digits: an approximate number is what the registry asks for.
        **({"number_of_privacy_units": int(float(f"{size:.1e}"))} if many else {}),
        "privacy_parameters": {
            "epsilon": float(upper(facts.epsilon_alone)),
            "delta": float(upper(facts.delta)),
        },
        "privacy_parameters_details": one_line(said),
    }


_UNITS: Final = {"record": "record of one site", "person": "person, with all records at one site"}


def _model(facts: Facts) -> dict[str, Any]:
    return {
        "model_name": "Federated",
        "model_name_details": one_line(facts.covers),
        "trust_assumptions": (
            f"Each site trusts its own process and nobody else: ε = {upper(facts.epsilon_alone)} "
            "holds against the server, the other sites and whoever sees the model, together. "
            + (
                f"ε = {upper(facts.epsilon)} needs {facts.honest} honest sites in each sum."
                if facts.honest
                else ""
            )
        ).strip(),
        "actors": "Sites hold records, clip, add noise and keep a ledger. A server sees what they "
        "release and sends models. Readers of the model see the model.",
        "release_type": "One release",
        "release_type_details": "The model is published once; the server sees a noisy release of "
        "each site in each round. Runs on the same records add up, in each site's ledger.",
        "data_source_type": "Static",
        "access_type": "Non-interactive",
    }


def _implementation(facts: Facts) -> dict[str, Any]:
    run, privacy = facts.run, facts.run.privacy
    version = run.environment.get("fedpact", "of an unknown version")
    features = str(privacy.get("features") or "")
    return {
        "preprocessing_and_hyperparameter_tuning": one_line(
            [
                features,
                "Preprocessing follows from declarations, or was released with noise and is part "
                "of ε. Whether other settings were tried before on the same records, this run "
                "cannot tell; ε above is of this run alone.",
            ]
        ),
        "mechanisms": one_line(
            [
                f"Poisson-sampled Gaussian mechanism. {privacy.get('mechanism_meaning', '')}",
                str(privacy.get("separation", "")),
                f"Randomness: {privacy['randomness']}. Implementation: fedpact {version}.",
            ]
        ),
        "composition": one_line(
            [
                f"All releases of a site as one {privacy.get('accounting', 'sequence')}, by the "
                f"accountant {privacy['accountant']!r} (privacy loss distributions, Rényi).",
                str(privacy.get("accounting_reason", "")),
            ]
        ),
        "post_processing": "The server folds the sites' releases into models.",
        **_utility(facts),
    }


def _utility(facts: Facts) -> dict[str, Any]:
    run = facts.run
    if not run.evaluated or run.pooled:
        return {}
    last = run.evaluated[-1]
    label, value = headline_metric(last.accuracy, last.loss, lambda found: f"{found:.4f}")
    return {"utility": f"{label.capitalize()} {value} on a public test set."}


def as_yaml(value: Any, depth: int = 0) -> str:
    """Return plain data as YAML: texts in quotes, as JSON writes them, of which YAML has the same.

    >>> print(as_yaml({"a": "b: c", "d": [{"e": 1e-05}], "f": ["g"]}), end="")
    a: "b: c"
    d:
      - e: 1.0e-05
    f:
      - "g"
    """
    return "".join(f"{'  ' * depth}{line}\n" for line in _lines(value))


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(inner, Mapping | list):
                yield f"{key}:"
                yield from (f"  {line}" for line in _lines(inner))
            else:
                yield f"{key}: {_scalar(inner)}"
    else:
        for inner in value:
            if isinstance(inner, Mapping | list):
                first, *rest = _lines(inner)
                yield f"- {first}"
                yield from (f"  {line}" for line in rest)
            else:
                yield f"- {_scalar(inner)}"


def _scalar(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    # YAML 1.1 takes 1e-05 for a text.
    return re.sub(r"^(-?\d+)e", r"\1.0e", text) if isinstance(value, float) else text
