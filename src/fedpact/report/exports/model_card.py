"""A run as a model card: Markdown with the headings and the metadata that Hugging Face's have.

What a run does not know is marked as theirs are. Figures of single sites are left out, and exact
ones of held-out records, which no deployment has.
"""

from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, StrictUndefined

from fedpact.configuration import DEFAULTS_KEY, flatten
from fedpact.plan import Plan
from fedpact.report import evaluations
from fedpact.report.exports.facts import Facts
from fedpact.report.exports.registry import as_yaml
from fedpact.report.reading import BUDGETS, setting_called
from fedpact.text import duration, number, percent

NEEDED: Final = "[More Information Needed]"
_ALWAYS: Final = (
    *("algorithm", "rounds", "sampling_rate", "privacy.mode", "privacy.epsilon"),
    *("privacy.delta", "privacy.clip"),
)
# Of people and places, or of the machine; budgets by site would name sites, and of others it
# follows how many there are.
_NEVER: Final = (
    *("about", "data", "run", "policy", "privacy.per_site", "seed", DEFAULTS_KEY),
    *("sites", "sites_per_round", "secure_aggregation", "privacy.honest", "robust.liars"),
)
_SOFTWARE: Final = ("fedpact", "torch", "numpy", "python")


def render_model_card(facts: Facts) -> str:
    """Return the card."""
    run = facts.run
    template = files("fedpact.report.exports").joinpath("model_card.md.j2").read_text("utf-8")
    environment = Environment(
        autoescape=False, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    count = run.summary.get("model_parameters")
    return environment.from_string(template).render(
        f=facts,
        needed=NEEDED,
        metadata=as_yaml(_metadata(facts)),
        parameters=f"{count:,} parameters" if count else "size not recorded",
        uncovered=run.privacy["does_not_cover"] if run.private else facts.warnings,
        settings=_settings(facts),
        seconds=duration(run.seconds),
        tested=_tested(facts),
        results=_results(facts),
        unevaluated=evaluations.why_none(run, named=False),
        software=[(k, run.environment[k]) for k in _SOFTWARE if k in run.environment],
    )


def _metadata(facts: Facts) -> dict[str, Any]:
    """Return what stands at the card's top for machines."""
    kind = "differential-privacy" if facts.run.private else "not-private"
    tags = ["federated-learning", kind, *(["simulation"] if facts.run.seeded else [])]
    return {
        "library_name": "fedpact",
        "model_name": facts.name,
        **({"license": facts.about.licence} if facts.about.licence else {}),
        "tags": tags,
        "metrics": ["accuracy"] if facts.run.counted else [],
    }


def _settings(facts: Facts) -> list[tuple[str, str]]:
    """Return how it was trained: the algorithm's settings, and what of the plan is no default."""
    usual = flatten(Plan().model_dump(mode="json"))
    return [
        (setting_called(facts.run.plan, key), str(value))
        for key, value in flatten(facts.run.plan).items()
        if not (key in BUDGETS and isinstance(value, list))
        and (
            (key in _ALWAYS and value is not None)
            or (
                usual.get(key, {}) != value
                and not any(f"{key}.".startswith(f"{n}.") for n in _NEVER)
            )
        )
    ]


def _tested(facts: Facts) -> str:
    run, found = facts.run, list[str]()
    if run.evaluated and not run.pooled:
        found.append(f"A public test set; {'accuracy and ' * run.counted}mean loss.")
    if run.released:
        found.append(
            "Records that the sites held out of training, chosen by each record alone: noisy "
            f"counts, charged in the sites' ledgers, with intervals at level "
            f"{run.released['level']:g}."
        )
    return " ".join(found) or NEEDED


def _results(facts: Facts) -> list[tuple[str, str, str]]:
    run, rows = facts.run, list[tuple[str, str, str]]()
    if run.evaluated and not run.pooled:
        last = run.evaluated[-1]
        if run.counted:
            rows.append(("accuracy, public test set", percent(last.accuracy), "–"))
        rows.append(("mean loss, public test set", number(last.loss), "–"))
    for row in evaluations.read_figures(run):
        rows.append((f"{row['name']}, released: {row['about']}", row["value"], row["interval"]))
    return rows
