"""What sites released of their held-out records, as rows for people."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedpact.evaluation.settings import DECLARE
from fedpact.report.reading import RunFolder
from fedpact.text import number, percent, upper

_NUMBERS = ("records", "persons", "loss")


def find_last_evaluation(run: RunFolder) -> dict[str, Any] | None:
    """Return the last evaluation for the page, None where there is none.

    Of a plain run it is exact, and nobody released it: level, cost and intervals are "" there.
    """
    found = run.released or run.held_out
    if not found:
        return None
    rows = [_row(figure) for figure in found["figures"]]
    return {
        "noisy": bool(run.released),
        "rows": [("all", row) for row in rows],
        "sites": [
            (site, _row(figure)) for site, figures in found["sites"].items() for figure in figures
        ],
        "exact": any(row["exact"] for row in rows),
        "level": f"{found['level']:g}" if run.released else "",
        "round": found["round"],
        "cost": cost(found) if run.released else "",
        "by_round": [
            (each["round"], _row(figure))
            for each in found["by_round"]
            for figure in each["figures"]
        ],
        "missing": ", ".join(f"{s} ({code})" for s, code in found.get("unevaluated", {}).items()),
    }


def read_figures(run: RunFolder) -> list[dict[str, str]]:
    """Return what sites released together, of all of them; nothing of one site."""
    return [_row(figure) for figure in (run.released or {"figures": []})["figures"]]


def find_released_accuracy(run: RunFolder) -> tuple[str, str] | None:
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


def bound_evaluation_cost(run: RunFolder, site: str) -> float:
    """Return ε of what a site's evaluations have released, an upper bound; 0 without any.

    All that is reserved counts where the run has not ended, or an answer of the site went missing.
    """
    held = run.privacy.get("evaluation")
    if not held:
        return 0.0
    missed = any(site in record.unevaluated for record in run.records)
    if missed or not run.released:
        return float(held["epsilon_reserved"])
    return float(run.released["epsilon_spent"].get(site, 0.0))


def delta(run: RunFolder) -> float:
    """Return the δ of evaluations, 0 without any."""
    return float((run.privacy.get("evaluation") or {}).get("delta", 0.0))


def why_none(run: RunFolder, named: bool = True) -> str:
    """Return why a run shows no accuracy of any kind. named: with the sites that gave a reason."""
    if any(record.evaluation for record in run.records):
        return "sites have released evaluations, which stand here when the run is over"
    if run.privacy.get("evaluation"):
        last = run.last.unevaluated if named else {}
        codes = ", ".join(f"{site}: {code}" for site, code in sorted(last.items()))
        return f"no site has answered an evaluation yet{f' ({codes})' if codes else ''}"
    if run.plan.get("evaluation", {}).get("share"):
        return (
            "sites hold records out and release nothing of them (evaluation.releases = []): "
            "`fedpact deploy status SITE_DIRECTORY` shows a site's owner its own figures"
        )
    if run.head:
        return (
            "with local.head each site has a head of its own, and what is shared is no model that "
            "answers anything; `fedpact personalise` shows a site's owner its own figures. "
            f"{DECLARE}"
        )
    return f"neither a public test set nor [evaluation] was declared. {DECLARE}"


def compare_evaluations(
    entries: Mapping[str, Sequence[RunFolder]],
) -> list[tuple[str, dict[str, str]]]:
    """Return (entry, row) of each figure that every run of an entry has of all sites together.

    Over several runs all are means, the interval's ends too: no narrower than it has to be. A plain
    entry has exact figures alone.
    """
    found = [(name, _row(mean)) for name, runs in entries.items() for mean in means(runs)]
    for name, runs in entries.items():
        for mean in exact_means(runs):
            row = _row(mean)
            found.append((name, {**row, "value": "–", "interval": "–", "exact": row["value"]}))
    return found


def means(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Return the figures of an entry's runs, means over them; none where a run released none."""
    return _means([run.released for run in runs])


def exact_means(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Return the same of plain runs, exactly; simulator only."""
    return _means([run.held_out for run in runs])


def _means(documents: Sequence[Mapping[str, Any] | None]) -> list[dict[str, Any]]:
    """The figures of documents that all runs have, means over them."""
    each = [{(f["name"], f["about"]): f for f in of["figures"]} for of in documents if of]
    if not each or len(each) < len(documents):
        return []
    return [_mean([of[key] for of in each]) for key in each[0] if all(key in of for of in each)]


def summarise_evaluations(runs: Sequence[RunFolder]) -> str | None:
    """Return in one sentence what an entry's runs released; None where nothing."""
    told = describe_figures(means(runs))
    return f"as sites released it: {told}" if told else None


def describe_figures(figures: Sequence[dict[str, Any]]) -> str:
    """Return the figures that are not of single classes and groups, with their intervals."""
    rows = [_row(figure) for figure in figures if not figure["of_part"]]
    return ", ".join(f"{row['name']} {row['value']} ({row['interval']})" for row in rows)


def cost(found: dict[str, Any]) -> str:
    """Return what evaluations have cost, and whom. found: summary.json's `evaluation`."""
    spent = max(found["epsilon_spent"].values())
    return (
        f"({upper(spent)}, {upper(found['delta'])}) of the ({upper(found['epsilon'])}, "
        f"{upper(found['delta'])}) that evaluations may cost a {found['unit']} that is held out; "
        f"such a {found['unit']} bears nothing of the training's ε, and the others nothing of this"
    )


def _mean(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of a figure over runs; not known where it is not known in one."""

    def over(key: str) -> float | None:
        values = [figure[key] for figure in figures]
        return None if None in values else statistics.fmean(values)

    known = [key for key in ("value", "low", "high", "exact") if key in figures[0]]
    return {**figures[0], **{key: over(key) for key in known}}


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
