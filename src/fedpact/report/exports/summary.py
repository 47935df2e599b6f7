"""A run's budgets for those who may not know whose they are: by class of ε, small cells left out.

    classes of ε    ..., (0.5, 1], (1, 2], (2, 5], (5, 10], ...

A cell tells the largest figure of its sites. That a class is left out, or how many sites are, is
not told: it would count them.
"""

import math
from bisect import bisect_left
from typing import Any, Final

from fedpact.report.exports.facts import LEAST, Facts
from fedpact.text import upper

_ENDS: Final = tuple(a * 10.0**b for b in range(-3, 4) for a in (1, 2, 5))


def summary(facts: Facts) -> dict[str, Any]:
    """Return the cells as plain data: what sites of a class may spend, and have spent, at most."""
    run, privacy = facts.run, facts.run.privacy
    held = privacy.get("evaluation") or {}
    classes: dict[int, list[str]] = {}
    for name, site in run.site_privacy.items():
        classes.setdefault(bisect_left(_ENDS, site.epsilon_allowed), []).append(name)
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
        "least_sites_of_a_cell": LEAST,
        "cells": [cell for cell in cells if cell["sites"] >= LEAST],
    }


def _cell(facts: Facts, place: int, names: list[str]) -> dict[str, Any]:
    sites = [facts.run.site_privacy[name] for name in names]
    person = [facts.run.privacy["sites"][name].get("epsilon_per_person") or {} for name in names]
    of_five = [float(found["5"]) for found in person if "5" in found]
    held = facts.run.privacy.get("evaluation")
    if held:
        # Where each record decides by itself, a person pays for both, at the sum of both δ.
        whole = held.get("split_by") == "person" and "5" in held["epsilon_per_person"]
        of_five = [max(e, float(held["epsilon_per_person"]["5"])) for e in of_five if whole]
    return {
        "epsilon_above": _ENDS[place - 1] if place else 0.0,
        "epsilon_at_most": _ENDS[place] if place < len(_ENDS) else math.inf,
        "sites": len(names),
        "epsilon_spent": _largest([site.epsilon_spent for site in sites]),
        "epsilon_spent_alone": _largest([site.epsilon_alone for site in sites]),
        "delta": max(site.delta for site in sites),
        "epsilon_of_person_of_five": max(of_five) if len(of_five) == len(names) else None,
    }


def _largest(values: list[float]) -> float:
    """NaN where one is not known."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def as_text(facts: Facts) -> str:
    """Return the summary as Markdown."""
    found = summary(facts)
    lines = [*(f"**{warning}**\n" for warning in facts.warnings), "# Budgets by class of ε", ""]
    if not found["cells"]:
        lines.append(f"No class of ε has {LEAST} sites or more, so none is shown.")
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
        "upper bounds, the largest of a class. Alone: without other sites' noise. Classes of fewer "
        f"than {LEAST} sites are left out.",
    ]
    if (cost := found["epsilon_of_held_out"]) is not None:
        lines[-1] += (
            f" All that is of training; a record that is held out of it bears the evaluations' "
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
