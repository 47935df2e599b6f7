"""A run as a model card, and as a summary in JSON.

What a run does not know is marked as theirs are. Figures of single sites are left out, and exact
ones of held-out records, which no deployment has.

classes of ε    ..., (0.5, 1], (1, 2], (2, 5], (5, 10], ...

A site is in the class of what a record of it may bear, trained on or held out, whichever is more.
Of every figure a cell tells the end of its class, rounded up, not one site's own. That a class is
left out, or how many sites are, is not told: it would count them.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, StrictUndefined

from fedpact.common.configuration import DEFAULTS_KEY, flatten
from fedpact.common.format import duration, number, percent, upper
from fedpact.plan import Plan
from fedpact.report import evaluations
from fedpact.report.export import MIN_CELL_SITES, Facts, as_yaml, class_end
from fedpact.report.run_files import BUDGETS

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
    template = files("fedpact.report").joinpath("model_card.md.j2").read_text("utf-8")
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
        (key, str(value))
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


_ENDS: Final = tuple(float(f"{a}e{b}") for b in range(-3, 4) for a in (1, 2, 5))


def summarise_facts(facts: Facts) -> dict[str, Any]:
    """Return the cells as plain data: what sites of a class may spend, and have spent, at most."""
    run, privacy = facts.run, facts.run.privacy
    held = privacy.get("evaluation") or {}
    beside = float(held.get("epsilon", 0.0))
    classes: dict[int, list[str]] = {}
    for name, site in run.site_privacy.items():
        allowed = max(site.epsilon_allowed, beside)
        classes.setdefault(bisect_left(_ENDS, allowed), []).append(name)
    cells = [_cell(facts, place, classes[place]) for place in sorted(classes)]
    return {
        "private": run.private,
        "simulation": run.seeded,
        "unit": privacy["unit"],
        "adjacency": privacy["adjacency"],
        "accountant": privacy["accountant"],
        "rounds": run.last.round,
        "status": run.status,
        "epsilon_of_held_out": held.get("epsilon_reserved"),
        "delta_of_held_out": held.get("delta"),
        "least_sites_of_a_cell": MIN_CELL_SITES,
        "cells": [cell for cell in cells if cell["sites"] >= MIN_CELL_SITES],
    }


def _cell(facts: Facts, place: int, names: list[str]) -> dict[str, Any]:
    run = facts.run
    sites = [run.site_privacy[name] for name in names]
    held = [evaluations.bound_evaluation_cost(run, name) for name in names]
    five = [_of_five(facts, run.privacy["sites"][name]) for name in names]
    known = [each for each in five if each is not None]
    return {
        "epsilon_above": _ENDS[place - 1] if place else 0.0,
        "epsilon_at_most": _ENDS[place] if place < len(_ENDS) else math.inf,
        "sites": len(names),
        "epsilon_spent": _largest([*held, *(site.epsilon_spent for site in sites)]),
        "epsilon_spent_alone": _largest([*held, *(site.epsilon_alone for site in sites)]),
        "delta": _largest([evaluations.delta(run), *(site.delta for site in sites)]),
        "epsilon_of_person_of_five": _largest(known) if len(known) == len(names) else None,
    }


def _of_five(facts: Facts, site: Mapping[str, Any]) -> float | None:
    """Return ε for a person of five records, None where it is not known."""
    held = facts.run.privacy.get("evaluation")
    if held and held.get("split_by") != "person":
        # Where each record decides by itself, a person pays for both, at the sum of both δ.
        return None
    told = [each.get("epsilon_per_person") or {} for each in (site, held) if each]
    return max(float(one["5"]) for one in told) if all("5" in one for one in told) else None


def _largest(values: list[float]) -> float:
    """Return the end of the largest one's class, NaN where one is not known."""
    return math.nan if any(map(math.isnan, values)) else class_end(max(values))


def render_summary(facts: Facts) -> str:
    """Return the summary as Markdown."""
    found = summarise_facts(facts)
    lines = [*(f"**{warning}**\n" for warning in facts.warnings), "# Budgets by class of ε", ""]
    if not found["cells"]:
        lines.append(f"No class of ε has {MIN_CELL_SITES} sites or more, so none is shown.")
    else:
        lines += [
            "| ε allowed | sites | ε spent, at most | alone | δ, at most | ε, person of 5 |",
            "| --- | --- | --- | --- | --- | --- |",
            *map(_row, found["cells"]),
        ]
    lines += [
        "",
        f"Per {found['unit']}; adjacency: {found['adjacency']}; accountant: "
        f"{found['accountant']}; after {found['rounds']:,} rounds ({found['status']}). Figures are "
        "upper bounds, rounded up to 1, 2 or 5 times a power of ten, for whoever is trained on or "
        "held out for evaluations. Alone: without other sites' noise. Classes of fewer than "
        f"{MIN_CELL_SITES} sites are left out.",
    ]
    if (cost := found["epsilon_of_held_out"]) is not None:
        lines[-1] += (
            " A record that is held out bears nothing of the training's: it bears the evaluations' "
            f"instead, (ε, δ) at most ({upper(cost)}, {upper(found['delta_of_held_out'])})."
        )
    return "\n".join(lines) + "\n"


def _row(cell: dict[str, Any]) -> str:
    low, high = cell["epsilon_above"], cell["epsilon_at_most"]
    five = cell["epsilon_of_person_of_five"]
    cells = (
        f"above {low:g}, at most {high:g}" if math.isfinite(high) else f"above {low:g}",
        f"{cell['sites']:,}",
        upper(cell["epsilon_spent"]),
        upper(cell["epsilon_spent_alone"]),
        upper(cell["delta"]),
        "–" if five is None else upper(five),
    )
    return f"| {' | '.join(cells)} |"
