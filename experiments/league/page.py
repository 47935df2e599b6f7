"""Write README.md from the stored results: who wins where, and by how much more than chance."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from experiments.evidence.cells import table
from experiments.league.runs import (
    DATA,
    EPSILONS,
    FACTORS,
    HERE,
    SEEDS,
    TAUS,
    Cell,
    Results,
    entrants,
)
from experiments.made import tally
from scipy.stats import t as student

from fedpact.privacy.accounting.accountant import Budget, SampledGaussian, epsilon
from fedpact.privacy.accounting.calibration import smallest_scale

BEFORE, ERROR = "fedavg", 0.05
ALL_OF_IT = 0.98
UNLIKE = 1.5
TRIED = len(TAUS) * len(FACTORS)
Means = dict[str, list[float]]
"""Entrant -> its means, one per seed, in per cent."""
Where = tuple[str, float, str]
"""Data set, ε, entrant."""


class Lead(NamedTuple):
    """Points ahead of FedAvg, and the uncorrected p-value of the difference.

    unlike: the deviation of the entrant's own differences over the pooled one.
    """

    points: float
    p: float
    unlike: float


def cost(of: float, delta: float, runs: int) -> float:
    """Return ε of several runs on the same records, each (of, δ), for an observer of all of them.

    Every record is in every batch here, so one run is one Gaussian, and so are several.
    """
    one = SampledGaussian(1.0, smallest_scale(Budget(of, delta), {SampledGaussian(1.0, 1.0): 1}))
    return epsilon({one: runs}, delta)


def ahead(means: Mapping[str, Sequence[float]]) -> dict[str, Lead]:
    """Return how far each entrant is ahead of FedAvg, with the p-value of the difference.

    All entrants have the same partition for a seed, so a mean is an entrant's effect plus a
    seed's effect plus a residual, whose variance is pooled: s² = Σ residual² / ((K - 1)(S - 1)).
    A difference of two entrants has standard error s sqrt(2 / S), or that of its own differences
    if it is larger. Raises KeyError: FedAvg is missing.
    """
    names, values = [*means], np.array([*means.values()])
    mean = dict(zip(names, values.mean(1), strict=True))
    found = {name: float(mean[name] - mean[BEFORE]) for name in names if name != BEFORE}
    rest = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    freedom = len(found) * (values.shape[1] - 1)
    pooled = math.sqrt(float((rest**2).sum()) / max(1, freedom) * 2 / values.shape[1])
    own = (values - values[names.index(BEFORE)]).std(1, ddof=1) / math.sqrt(values.shape[1])
    of = dict(zip(names, np.maximum(pooled, own), strict=True))
    unlike = dict(zip(names, own / (pooled or math.inf), strict=True))
    return {
        name: Lead(
            points, float(2 * student.sf(abs(points) / of[name], freedom)), float(unlike[name])
        )
        for name, points in found.items()
    }


def holm(p: Mapping[Where, float]) -> dict[Where, float]:
    """Return each p-value, corrected for all of them by Holm's step-down rule."""
    found, largest = dict[Where, float](), 0.0
    for place, (key, value) in enumerate(sorted(p.items(), key=lambda one: one[1])):
        found[key] = largest = max(largest, min(1.0, (len(p) - place) * value))
    return found


@dataclass
class League:
    """The stored results of all data sets, with leads over FedAvg corrected by Holm's rule."""

    results: dict[str, Results]

    def __post_init__(self) -> None:
        self.stored = {
            (data, e, name): runs
            for data, e, name in product(self.results, EPSILONS, entrants())
            if (runs := _runs(self.results[data], Cell(data, name, e)))
        }
        self.leads = dict[Where, Lead]()
        for data, e in product(self.results, EPSILONS):
            means = self.means(data, e)
            if BEFORE in means:
                self.leads |= {(data, e, name): lead for name, lead in ahead(means).items()}
        self.corrected = holm({where: lead.p for where, lead in self.leads.items()})

    def means(self, data: str, e: float) -> Means:
        """Return the means of the entrants that have run at an ε on a data set."""
        return {
            name: [100 * run["mean"] for run in runs]
            for (of, at, name), runs in self.stored.items()
            if (of, at) == (data, e)
        }

    def summary(self) -> Iterator[str]:
        """Yield who wins where, and by how much more than chance."""
        head = "data | ε | best | lead | p | significantly ahead | significantly behind | complete"
        yield f"| {head} |"
        yield "|" + " --- |" * 8
        for data, e in product(self.results, EPSILONS):
            means = self.means(data, e)
            if BEFORE in means:
                best = max(means, key=lambda name: statistics.fmean(means[name]))
                cells = [
                    DATA[data].title.split(",")[0],
                    f"{e:g}",
                    best,
                    *self._lead((data, e, best)),
                ]
                cells += [self._beyond(data, e, 1), self._beyond(data, e, -1)]
                yield f"| {' | '.join(cells)} | {len(means)} of {len(entrants())} |"

    def unlike(self) -> list[str]:
        """Return the significant leads whose own deviation is above UNLIKE times the pooled one."""
        found = dict[str, list[str]]()
        for (data, e, name), lead in self.leads.items():
            if self.beyond((data, e, name)) and lead.unlike > UNLIKE:
                title = DATA[data].title.split(",")[0]
                found.setdefault(f"{name} on {title}", []).append(f"{e:g}")
        return [f"{what} (ε = {', '.join(at)})" for what, at in found.items()]

    def _lead(self, where: Where) -> tuple[str, str]:
        if where not in self.leads:
            return "", ""
        return f"{self.leads[where].points:+.1f}", f"{self.corrected[where]:.2g}"

    def _beyond(self, data: str, e: float, sign: int) -> str:
        found = [
            (lead.points, name)
            for (of, at, name), lead in self.leads.items()
            if (of, at) == (data, e) and sign * lead.points > 0 and self.beyond((of, at, name))
        ]
        return ", ".join(f"{name} {points:+.1f}" for points, name in sorted(found)[::-sign])

    def beyond(self, where: Where) -> bool:
        """Whether a lead is significant after correction."""
        return self.corrected.get(where, 1.0) < ERROR

    def section(self, data: str) -> Iterator[str]:
        """Yield a data set's section of the page."""
        results, names = self.results[data], list(entrants())
        yield f"## {DATA[data].title}"
        yield ""
        if not any(of == data for of, _, _ in self.stored):
            yield f"Not run: `python -m experiments.league {data}`."
            yield ""
            return
        yield "| | " + " | ".join(f"ε = {e:g} | vs FedAvg" for e in EPSILONS) + " | rounds |"
        yield "|" + " --- |" * (2 + 2 * len(EPSILONS))
        for name in names:
            row = [cell for e in EPSILONS for cell in self._cells((data, e, name))]
            runs = [run for e in EPSILONS for run in self.stored.get((data, e, name), [])]
            rounds = sorted({run["rounds"] for run in runs})
            row.append(" to ".join(map(str, dict.fromkeys([*rounds[:1], *rounds[-1:]]))))
            yield f"| {name} | {' | '.join(row)} |"
        yield ""
        refused = {name: results.why_refused(Cell(data, name, EPSILONS[0])) for name in names}
        yield from (f"* `{name}` is refused: {why}" for name, why in refused.items() if why)
        runs = [run for (of, _, _), each in self.stored.items() if of == data for run in each]
        head = ["runs", "commits", "torch", "Python", "processor", "device"]
        yield ""
        yield table(head, tally(runs))
        yield ""

    def _cells(self, where: Where) -> list[str]:
        data, e, name = where
        runs = self.stored.get(where)
        if not runs:
            refused = self.results[data].why_refused(Cell(data, name, e))
            return ["refused" if refused else "not run", ""]
        values = [100 * run["mean"] for run in runs]
        text = f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"
        ended = [str(run["diverged"]) for run in runs if "diverged" in run]
        if ended:
            text += f", diverged after round {', '.join(ended)}"
        if where not in self.leads:
            return [text, ""]
        difference = f"{self.leads[where].points:+.1f}"
        return [text, f"**{difference}**" if self.beyond(where) else difference]


def _runs(results: Results, cell: Cell) -> list[dict[str, Any]]:
    try:
        return results.runs(cell)
    except LookupError:
        return []


def _spenders(league: League) -> str:
    """Say which entrants spend less than they may, with the least share of ε at a site."""
    shares = dict[str, float]()
    for (_, e, name), runs in league.stored.items():
        least = min(spent / e for run in runs for spent in run["spent"])
        shares[name] = min(shares.get(name, 1.0), least)
    found = [f"{name} (down to {s:.2f} ε)" for name, s in shares.items() if s < ALL_OF_IT]
    said = f": {', '.join(found)}" if found else ""
    return f"Entrants that take fewer steps than they reserve spend less{said}."


def _head(league: League) -> str:
    price = ", ".join(f"{cost(e, 1e-5, TRIED):.1f} for runs at {e:g}" for e in EPSILONS)
    return f"""# A league of private algorithms

    FEDPACT_DATA=DIR python -m experiments.league [DATA ...]
    python -m experiments.league --left
    python -m experiments.league --page

Which algorithm is best on which data, at the same (ε, δ) per record and site, with the same number of rounds and no more bytes than FedAvg? And is the difference significant? DATA: {", ".join(DATA)}. The first command resumes where it stopped and runs the cells marked "not run".

* **Entrants**: every algorithm with a private form, some well-known settings under their usual names, and each site alone. All other settings have their defaults; FedRep's head, which has no sensible one, is the bias.
* **Budgets**: ε = 1, 2, 4, 8, which all entrants reserve in full; receipts state what each site spent (`spent` in the results). {_spenders(league)} FedAvg has 20 rounds. An algorithm that sends more than {1.15:g} times as many bytes per round has fewer rounds.
* **Selection rule**: each cell tries τ = {", ".join(map(str, TAUS))} with learning rates {", ".join(f"{f:g}" for f in FACTORS)} times the data set's reference rate divided by τ: {TRIED} runs on three quarters of the training records. The setting with the best mean over the sites on the last quarter is chosen. The figures come from {len(SEEDS)} other seeds.
* **Cost of the selection**: it spends ε too, which no figure below includes. For an observer of all {TRIED} runs of one cell, at δ = 1e-5, ε is {price}. The selection uses exact accuracies on the records set aside.
* **Figures**: accuracy in per cent on the records that each site holds out, of the model that the site uses, averaged over the sites; mean ± standard deviation over the seeds. "vs FedAvg" is the difference in points, bold if significant.
* **Significance**: the residual of a figure after removing the means of its entrant and its seed is noise. Its variance is pooled for each ε of a data set (an entrant whose differences vary more has its own variance). A lead has a p-value by Student's t. Holm's rule corrects all leads on this page together: if all entrants were equal and varied alike, 19 of 20 such pages would show no significant lead. Results added later count too. Three seeds do not tell how much one entrant varies: where one varies four times as much as the others, 4 of 10 pages would show a significant lead by chance. So these leads, whose own deviation is above {UNLIKE:g} times the pooled one, are less certain: {", ".join(league.unlike()) or "none"}.

All entrants share one grid of τ and learning rates. An algorithm with more settings, such as λ of `fedfdp`, could gain by tuning them, at a cost in ε.

## Who wins where

"Lead" is the difference of the best entrant from FedAvg in points, p its corrected p-value; significant means p < {ERROR:g}. A row without a significant name: no entrant is shown to beat FedAvg.
"""  # noqa: E501


def write() -> None:
    """Write the page."""
    league = League({name: Results(name) for name in DATA})
    parts = [_head(league), "\n".join(league.summary()) + "\n"]
    parts += ["\n".join(league.section(name)) for name in DATA]
    (HERE / "README.md").write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
