"""A run's statement for others: its facts, and an entry of the registry of deployments.

No site is named. Of a number of sites its class is told, "fewer than MIN_CELL_SITES" or "5 to 9",
and a cell of fewer is left out: who knows the sites could tell which it is.

Nanayakkara, Ghazi, Vadhan. Practitioners' perspectives on a differential privacy deployment
registry. arXiv 2509.13509; the keys are those of the registry's schema, which asks for a YAML file
(github.com/opendp/deployments-registry-data, as of 2026). What a run does not know stands in
[about], or is left out; an entry whose required fields nobody has filled in is not written.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from pydantic import ValidationError

from fedpact.common.about import About
from fedpact.common.configuration import override, plan_error
from fedpact.common.errors import PlanError
from fedpact.common.format import format_epsilon, headline_metric, upper
from fedpact.report.run_files import RunFolder

MIN_CELL_SITES: Final = 5
"""Sites that a cell has at least."""

SIMULATED: Final = (
    "A SIMULATION, which protects nobody: its noise came from a seed. Every ε says what a "
    "deployment on these terms would guarantee."
)
_SECURE: Final = (
    "Secure aggregation: a server that follows the protocol sees weighted means over several sites "
    "and no single site's vector. Only an ε that is said to need honest sites relies on it."
)
PLAIN: Final = "NOT PRIVATE: no (ε, δ) guarantee of any kind."


def about_of(plan: Mapping[str, Any], changes: Sequence[str]) -> About:
    """Return a plan's [about] with `about.key=value` over it. Raises PlanError: another key."""
    raw = {"about": dict(plan.get("about", {}))}
    for change in changes:
        override(raw, change)
    if set(raw) != {"about"}:
        others = ", ".join(sorted(set(raw) - {"about"}))
        raise PlanError(
            f"--set {others}: a run that has been made is only described here; expected "
            "about.key=value, as in about.purpose=..."
        )
    try:
        return About.model_validate(raw["about"])
    except ValidationError as error:
        raise plan_error(error, ("about",), About) from None


@dataclass(frozen=True)
class Facts:
    """A run and what people say of it."""

    run: RunFolder
    about: About

    @property
    def name(self) -> str:
        """What the model is called."""
        return self.about.name or f"{self.run.plan['algorithm']} on {self.data}"

    @property
    def data(self) -> str:
        """The data set's name; of a file without the folders."""
        return str(self.run.plan["data"]).rpartition("/")[2]

    @property
    def many(self) -> str:
        """How many sites there are, as far as that is told."""
        return describe_count(len(self.run.sites))

    @property
    def covers(self) -> list[str]:
        """What the guarantee covers, without the numbers of sites in it."""
        lines = list(map(str, self.run.privacy["covers"]))
        kept = [line for line in lines if not re.search(r"threshold [\d,]+ of [\d,]+ sites", line)]
        return kept if len(kept) == len(lines) else [*kept, _SECURE]

    @property
    def training(self) -> str:
        """How the model came about, in a sentence."""
        plan, last = self.run.plan, self.run.last.round
        return (
            f"A {plan['model']} model, trained by federated learning ({plan['algorithm']}) with "
            f"{self.many}, {last:,} rounds. Records stayed at their sites, and each site enforced "
            "its own budget."
            if self.run.private
            else f"A {plan['model']} model, trained by federated learning ({plan['algorithm']}) "
            f"with {self.many}, {last:,} rounds, without privacy."
        )

    @cached_property
    def delta(self) -> float:
        """The largest δ that ε is stated at."""
        held = self.run.privacy.get("evaluation") or {}
        return max(*self._of_sites("delta"), float(held.get("delta", 0.0)))

    @cached_property
    def epsilon(self) -> float:
        """The largest ε that a site reserved, for whoever is trained on or held out."""
        held = self.run.privacy.get("evaluation") or {}
        return max(*self._of_sites("epsilon_reserved"), float(held.get("epsilon_reserved", 0.0)))

    @cached_property
    def epsilon_alone(self) -> float:
        """The same without any other site's noise: what holds whoever is honest."""
        return max(self.epsilon, *self._of_sites("epsilon_alone")) if self.honest else self.epsilon

    @property
    def honest(self) -> int:
        """Of how many sites of each sum `epsilon` needs the noise."""
        return int(self.run.privacy.get("honest", 0))

    @property
    def guarantee(self) -> str:
        """(ε, δ) in words, with unit, adjacency and accountant, rounded up."""
        privacy = self.run.privacy
        if not self.run.private:
            return PLAIN
        bound = format_epsilon(self.epsilon, self.epsilon_alone, self.honest)
        return (
            f"(ε, δ)-differential privacy per {privacy['unit']} of a site, at every site, with ε "
            f"at most {bound}, and δ = {upper(self.delta)}; adjacency: {privacy['adjacency']}; "
            f"accountant: {privacy['accountant']}. A person at two sites pays the sum of both."
        )

    @property
    def warnings(self) -> list[str]:
        """What has to be said first."""
        if not self.run.private:
            return [PLAIN]
        return [SIMULATED] if self.run.seeded else []

    def _of_sites(self, key: str) -> list[float]:
        """Return a figure of every site; what nobody knows may be anything."""
        found = [site.get(key) for site in self.run.privacy["sites"].values()]
        return [math.inf if value is None else float(value) for value in found] or [math.inf]


def describe_count(sites: int) -> str:
    """Return the class of a number of sites in words: the exact one would count what is left out.

    >>> describe_count(3), describe_count(5), describe_count(12), describe_count(1999)
    ('fewer than 5 sites', '5 to 9 sites', '10 to 19 sites', '1,000 to 1,999 sites')
    """
    if sites < MIN_CELL_SITES:
        return f"fewer than {MIN_CELL_SITES} sites"
    end = int(class_end(sites + 1))
    # Of 1, 2, 5, 10, ... two neighbours are a factor of 2 apart, or of 2.5.
    start = end * 2 // 5 if str(end)[0] == "5" else end // 2
    return f"{start:,} to {end - 1:,} sites"


def class_end(value: float) -> float:
    """Return the end of the class that a figure is in: the least of 1, 2, 5 times 10^k above it.

    >>> class_end(1.0), class_end(1.001), class_end(3e-5), class_end(0.0)
    (1.0, 2.0, 5e-05, 0.0)
    """
    if not 0 < value < math.inf:
        return value
    power = math.floor(math.log10(value))
    ends = (float(f"{digit}e{power + more}") for more in (-1, 0, 1, 2) for digit in (1, 2, 5))
    return next(end for end in ends if end >= value)


def one_line(parts: Iterable[str]) -> str:
    """Return sentences one after the other."""
    return " ".join(part.strip() for part in parts if part.strip())


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
