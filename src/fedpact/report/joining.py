"""Whether joining paid, site by site, as a page and a terminal show it; simulator only."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedpact.personal.joining import METHOD, Gain, describe_joining
from fedpact.report.reading import RunFolder
from fedpact.text import percent, upper

JOINING_NOTE = (
    "Accuracy on each site's own held-out records. Alone: the model of the site's own records, "
    "exact and never released. Tuned: the federated model tuned on the site's own records, exact "
    "and never released. The difference is between what the site would use, tuned where the "
    "advice is to tune and federated elsewhere, and alone. Where a column says whose each record "
    f"is, persons count, each alike; {METHOD}"
)


@dataclass(frozen=True)
class JoiningRow:
    """One site's accuracies, means over the runs; tuned_in: in how many runs the advice is to."""

    site: str
    local: float
    federated: float
    tuned: float
    tuned_in: int
    runs: int
    gain: Gain

    @property
    def cells(self) -> tuple[str, ...]:
        """As printed: alone, federated, tuned, advice, difference, verdict."""
        advice = "tune" if self.tuned_in == self.runs else "do not"
        if 0 < self.tuned_in < self.runs:
            advice = f"tune in {self.tuned_in} of {self.runs}"
        return (
            *(percent(each) for each in (self.local, self.federated, self.tuned)),
            advice,
            format_difference(self.gain),
            self.gain.verdict,
        )


JOINING_HEADINGS = ("alone", "federated", "tuned", "advice", "difference", "joining")


def format_difference(gain: Gain) -> str:
    """Return a difference with its interval, in points."""
    if not math.isfinite(gain.mean):
        return "–"
    return f"{100 * gain.mean:+.1f} ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"


def joining_rows(runs: Sequence[RunFolder]) -> list[JoiningRow]:
    """Return a row a site, by name, over the runs that say what joining was worth.

    Over several runs the interval's ends are means too: it is as wide as that of one run, which
    holds whether or not the runs have records in common.
    """
    by_site: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        for site, figures in (run.joining or {"sites": {}})["sites"].items():
            by_site.setdefault(site, []).append(figures)
    return [_row(site, figures) for site, figures in sorted(by_site.items())]


def _row(site: str, figures: Sequence[Mapping[str, Any]]) -> JoiningRow:
    def mean(key: str) -> float:
        return statistics.fmean(float(one[key]) for one in figures)

    ends = [one["gain"] for one in figures]
    gain = Gain(*(statistics.fmean(float(e[k]) for e in ends) for k in ("mean", "low", "high")))
    tuned_in = sum(bool(one["tune"]) for one in figures)
    means = mean("local"), mean("federated"), mean("tuned")
    return JoiningRow(site, *means, tuned_in, len(figures), gain)


def summarise_joining(runs: Sequence[RunFolder]) -> str | None:
    """Return in one sentence for which sites joining paid; None where nothing says so."""
    rows = joining_rows(runs)
    return (
        describe_joining({row.site: row.gain for row in rows}, protection(runs)) if rows else None
    )


def protection(runs: Sequence[RunFolder]) -> str:
    """Return how the runs were protected: at which ε, or without privacy."""
    allowed = [site.epsilon_allowed for run in runs for site in run.site_privacy.values()]
    if not allowed:
        return "without privacy"
    least, most = upper(min(allowed)), upper(max(allowed))
    return f"at ε = {most}" if least == most else f"at ε from {least} to {most}"
