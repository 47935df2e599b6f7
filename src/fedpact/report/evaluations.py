"""What sites released of their held-out records, as rows for people."""

from typing import Any

from fedpact.evaluation.settings import DECLARE
from fedpact.report.reading import RunFolder
from fedpact.text import number, percent, upper

_NUMBERS = ("records", "loss")


def about(run: RunFolder) -> dict[str, Any] | None:
    """Return the last released evaluation for the page, None where there is none."""
    found = run.released
    if not found:
        return None
    spent = max(found["epsilon_spent"].values())
    rows = [_row(figure) for figure in found["figures"]]
    return {
        "rows": [("all", row) for row in rows],
        "sites": [
            (site, _row(figure)) for site, figures in found["sites"].items() for figure in figures
        ],
        "exact": any(row["exact"] for row in rows),
        "level": f"{found['level']:g}",
        "round": found["round"],
        "cost": f"({upper(spent)}, {upper(found['delta'])}) of the ({upper(found['epsilon'])}, "
        f"{upper(found['delta'])}) that evaluations may cost a record that is held out; such a "
        "record bears nothing of the training's ε, and the others nothing of this one",
        "missing": ", ".join(f"{s} ({code})" for s, code in found["unevaluated"].items()),
    }


def headline(run: RunFolder) -> tuple[str, str] | None:
    """Return the released accuracy and what it is, None where none was released."""
    found = run.released
    named = {(f["name"], f["about"]): f for f in found["figures"]} if found else {}
    figure = named.get(("accuracy", "all"))
    if found is None or figure is None:
        return None
    row = _row(figure)
    note = (
        f"{row['interval']} at level {found['level']:g}; noisy counts of {len(found['sites']):,} "
    )
    note += f"sites' held-out records after round {found['round']}"
    return row["value"], note + (f"; exactly {row['exact']}" if row["exact"] else "")


def why_none(run: RunFolder) -> str:
    """Return why a run has no accuracy of any kind."""
    if run.privacy.get("evaluation"):
        last = run.last.unevaluated
        codes = ", ".join(f"{site}: {code}" for site, code in sorted(last.items()))
        return f"no site has answered an evaluation yet{f' ({codes})' if codes else ''}"
    return f"neither a public test set nor [evaluation] was declared. {DECLARE}"


def _row(figure: dict[str, Any]) -> dict[str, str]:
    """A figure in words; of a simulation with what it is without noise."""

    def told(value: float | None) -> str:
        if value is None:
            return "not known"
        return number(value) if figure["name"] in _NUMBERS else percent(value)

    return {
        "name": figure["name"],
        "about": figure["about"],
        "value": told(figure["value"]),
        "interval": f"{told(figure['low'])} to {told(figure['high'])}",
        "exact": told(figure["exact"]) if "exact" in figure else "",
    }
