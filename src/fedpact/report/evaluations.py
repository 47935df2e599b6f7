"""Evaluations of a run, and the value of joining it, for its page."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedpact.common.format import against_majority_class, number, percent, upper
from fedpact.common.notebook import TextTable
from fedpact.evaluation.held_out import DECLARE, OWNERS_ONLY
from fedpact.evaluation.personal import METHOD, Gain, describe_joining
from fedpact.report.run_summary import RunSummary

_NUMBERS = ("records", "persons", "loss")


def find_last_evaluation(run: RunSummary) -> dict[str, Any] | None:
    """Return the last evaluation for the page, or None.

    In a plain run it is exact and not released; level, cost and intervals are then "".
    """
    found = run.released or run.summary.get("held_out")
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


def read_figures(run: RunSummary) -> list[dict[str, str]]:
    """Return the released figures of all sites together."""
    return [_row(figure) for figure in (run.released or {"figures": []})["figures"]]


def find_released_accuracy(run: RunSummary) -> tuple[str, str] | None:
    """Return the released accuracy and a note on it; None if there is none."""
    found = run.released
    figure = _by_name(found).get(("accuracy", "all")) if found else None
    if found is None or figure is None:
        return None
    row = _row(figure)
    note = (
        f"{row['interval']} at level {found['level']:g}; noisy counts of {len(found['sites']):,} "
    )
    note += f"sites' held-out records after round {found['round']}"
    note += f"; exactly {row['exact']}" if row["exact"] else ""
    return row["value"], "; ".join([note, *compare_with_classes(found)])


def compare_with_classes(found: Mapping[str, Any]) -> list[str]:
    """Return the accuracy of always predicting the most frequent class, and the worst class's.

    found: summary.json's `evaluation`.
    """
    named = _by_name(found)
    whole = named.get(("accuracy", "all"), {}).get("value")
    against = against_majority_class(whole, found.get("commonest"))
    # A class about which the noise reveals nothing is not called the worst.
    known = [
        figure
        for (name, about), figure in named.items()
        if name == "accuracy" and about.startswith("class ") and figure["high"] - figure["low"] < 1
    ]
    told = [against] if against else []
    if known:
        row = _row(min(known, key=lambda figure: figure["value"]))
        told.append(f"worst for {row['about']}: {row['value']} ({row['interval']})")
    return told


def why_none(run: RunSummary, named: bool = True) -> str:
    """Return why a run shows no accuracy. named: whether to name the sites that gave a reason."""
    if any(record.evaluation for record in run.records):
        return "sites have released evaluations, which are shown here when the run is over"
    if run.privacy.get("evaluation"):
        last = run.last.unevaluated if named else {}
        codes = ", ".join(f"{site}: {code}" for site, code in sorted(last.items()))
        return f"no site has released an evaluation yet{f' ({codes})' if codes else ''}"
    if run.plan.get("evaluation", {}).get("share"):
        return f"{OWNERS_ONLY[:1].lower()}{OWNERS_ONLY[1:]}"
    if run.head:
        return (
            "each site has a head of its own, so the shared part cannot be "
            "evaluated; `fedpact personalise` shows a site's owner its own figures. "
            f"{DECLARE}"
        )
    if run.partition and not run.private:
        return (
            "there is no public test set, and no site holds out a record: give more records, "
            "fewer sites or a larger partition.held_out"
        )
    return f"neither a public test set nor [evaluation] was declared. {DECLARE}"


def compare_evaluations(
    entries: Mapping[str, Sequence[RunSummary]],
) -> list[tuple[str, dict[str, str]]]:
    """Return (entry, row) of each figure of all sites that every run of an entry has.

    Figures and the ends of their intervals are means over runs, which makes the intervals too wide
    rather than too narrow. A plain entry has only exact figures.
    """
    found = [
        (name, _row(mean))
        for name, runs in entries.items()
        for mean in average_figures(run.released for run in runs)
    ]
    for name, runs in entries.items():
        for mean in average_figures(run.summary.get("held_out") for run in runs):
            row = _row(mean)
            found.append((name, {**row, "value": "–", "interval": "–", "exact": row["value"]}))
    return found


def average_figures(evaluations: Iterable[Mapping[str, Any] | None]) -> list[dict[str, Any]]:
    """Return the means of the figures that all evaluations have; none if a run has no evaluation.

    A mean is None if the figure is unknown in one.
    """
    documents = [*evaluations]
    each = [_by_name(of) for of in documents if of]
    if not each or len(each) < len(documents):
        return []

    def mean(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
        known = [key for key in ("value", "low", "high", "exact") if key in figures[0]]
        values = {key: [figure[key] for figure in figures] for key in known}
        over = {
            k: None if None in found else statistics.fmean(found) for k, found in values.items()
        }
        return {**figures[0], **over}

    return [mean([of[key] for of in each]) for key in each[0] if all(key in of for of in each)]


def _by_name(found: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return an evaluation's figures by (name, about)."""
    return {(figure["name"], figure["about"]): figure for figure in found["figures"]}


def summarise_evaluations(runs: Sequence[RunSummary]) -> str | None:
    """Return an entry's released figures in one sentence; None without any."""
    told = describe_figures(average_figures(run.released for run in runs))
    return f"as sites released it: {told}" if told else None


def describe_figures(figures: Sequence[dict[str, Any]]) -> str:
    """Return the overall figures, without single classes and groups, with their intervals."""
    rows = [_row(figure) for figure in figures if not figure["of_part"]]
    return ", ".join(f"{row['name']} {row['value']} ({row['interval']})" for row in rows)


def cost(found: dict[str, Any]) -> str:
    """Return the cost of evaluations in words. found: summary.json's `evaluation`."""
    spent = max(found["epsilon_spent"].values())
    return (
        f"({upper(spent)}, {upper(found['delta'])}) of the ({upper(found['epsilon'])}, "
        f"{upper(found['delta'])}) that evaluations may cost a held-out {found['unit']}; "
        f"training costs a held-out {found['unit']} nothing, and evaluation costs the others "
        "nothing"
    )


def _row(figure: dict[str, Any]) -> dict[str, str]:
    """Return a figure as text; in a simulation also its exact value."""

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


JOINING_NOTE = (
    "Accuracy on each site's own held-out records. Alone: a model trained on the site's own "
    "records, without noise and never released. Tuned: the federated model fine-tuned on the "
    "site's own records, without noise and never released. As used: the tuned model if that is the "
    "advice, else the federated one. "
    f"If a column names the person of each record, each person counts once; {METHOD}"
)


@dataclass(frozen=True)
class JoiningRow:
    """One site's mean accuracies. tuned_in: the number of runs in which the advice is to tune."""

    site: str
    local: float
    federated: float
    tuned: float
    tuned_in: int
    runs: int
    gain: Gain

    @property
    def cells(self) -> tuple[str, ...]:
        """As printed: alone, federated, tuned, advice, as used minus alone, verdict."""
        advice = "tune" if self.tuned_in == self.runs else "do not"
        if 0 < self.tuned_in < self.runs:
            advice = f"tune in {self.tuned_in} of {self.runs}"
        mean, *ends = (f"{100 * x:+.1f}" for x in (self.gain.mean, self.gain.low, self.gain.high))
        told = f"{mean} ({' to '.join(ends)})" if math.isfinite(self.gain.mean) else "–"
        return (
            *(percent(each) for each in (self.local, self.federated, self.tuned)),
            advice,
            told,
            self.gain.verdict,
        )


def joining_table(rows: Sequence[JoiningRow]) -> TextTable:
    """Return the value of joining, with a row for each site."""
    headings = ("alone", "federated", "tuned", "advice", "as used minus alone", "joining")
    return TextTable(headings, [(row.site, *row.cells) for row in rows], first="site")


def joining_rows(runs: Sequence[RunSummary]) -> list[JoiningRow]:
    """Return a row for each site, by name, over the runs with a value of joining.

    The interval's ends are means, too: it is as wide as for one run, which is valid whether or not
    runs have common records.
    """
    by_site: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        for site, figures in run.joining.get("sites", {}).items():
            by_site.setdefault(site, []).append(figures)
    return [joining_row(site, figures) for site, figures in sorted(by_site.items())]


def joining_row(site: str, figures: Sequence[Mapping[str, Any]]) -> JoiningRow:
    """Return the row of a site's figures (personal.SiteFigures as plain data), one of each run."""

    def mean(key: str) -> float:
        return statistics.fmean(float(one[key]) for one in figures)

    ends = [one["gain"] for one in figures]
    gain = Gain(*(statistics.fmean(float(e[k]) for e in ends) for k in ("mean", "low", "high")))
    tuned_in = sum(bool(one["tune"]) for one in figures)
    means = mean("local"), mean("federated"), mean("tuned")
    return JoiningRow(site, *means, tuned_in, len(figures), gain)


def summarise_joining(runs: Sequence[RunSummary]) -> str | None:
    """Return in one sentence for which sites joining pays; None if it was not computed."""
    gains = {row.site: row.gain for row in joining_rows(runs)}
    return describe_joining(gains, protection(runs)) if gains else None


def protection(runs: Sequence[RunSummary]) -> str:
    """Return the runs' allowed ε in words, or "without privacy"."""
    allowed = [site.epsilon_allowed for run in runs for site in run.site_privacy.values()]
    if not allowed:
        return "without privacy"
    least, most = upper(min(allowed)), upper(max(allowed))
    return f"at ε = {most}" if least == most else f"at ε from {least} to {most}"
