"""README.md: who wins where, and by how much more than chance, of what is stored alone."""

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
TRIED = len(TAUS) * len(FACTORS)
Means = dict[str, list[float]]
"""Entrant -> its means, one a seed, in per cent."""
Where = tuple[str, float, str]
"""Data set, ε, entrant."""


class Lead(NamedTuple):
    """Points ahead of FedAvg, and the probability of as many by chance, not corrected."""

    points: float
    p: float


def cost(of: float, delta: float, runs: int) -> float:
    """Return ε of so many runs on the same records, each of (of, δ), for who sees them all.

    Every record is in every batch here, so a run is one Gaussian, and so are several.
    """
    one = SampledGaussian(1.0, smallest_scale(Budget(of, delta), {SampledGaussian(1.0, 1.0): 1}))
    return epsilon({one: runs}, delta)


def ahead(means: Mapping[str, Sequence[float]]) -> dict[str, Lead]:
    """Return how far each entrant is ahead of FedAvg, and how likely chance gives as much.

    A seed's partition is the same for all, so a mean is an entrant's part, a seed's part, and a
    rest, whose variance is pooled: s² = Σ rest² / ((K - 1)(S - 1)). A difference of two entrants
    has the deviation s sqrt(2 / S); one whose own differences scatter more has theirs. Raises
    KeyError: FedAvg is missing.
    """
    names, values = [*means], np.array([*means.values()])
    mean = dict(zip(names, values.mean(1), strict=True))
    found = {name: float(mean[name] - mean[BEFORE]) for name in names if name != BEFORE}
    rest = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    freedom = len(found) * (values.shape[1] - 1)
    pooled = math.sqrt(float((rest**2).sum()) / max(1, freedom) * 2 / values.shape[1])
    own = (values - values[names.index(BEFORE)]).std(1, ddof=1) / math.sqrt(values.shape[1])
    of = dict(zip(names, np.maximum(pooled, own), strict=True))
    return {
        name: Lead(points, float(2 * student.sf(abs(points) / of[name], freedom)))
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
    """What is stored of all data sets: leads over FedAvg, and what is left of them by Holm."""

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
        """Return what has run at an ε of a data set."""
        return {
            name: [100 * run["mean"] for run in runs]
            for (of, at, name), runs in self.stored.items()
            if (of, at) == (data, e)
        }

    def summary(self) -> Iterator[str]:
        """Yield who wins where, and by how much more than chance."""
        head = "data | ε | most | lead | p | ahead beyond chance | behind beyond chance | have run"
        yield f"| {head} |"
        yield "|" + " --- |" * 8
        for data, e in product(self.results, EPSILONS):
            means = self.means(data, e)
            if BEFORE in means:
                best = max(means, key=lambda name: statistics.fmean(means[name]))
                told = [
                    DATA[data].title.split(",")[0],
                    f"{e:g}",
                    best,
                    *self._lead((data, e, best)),
                ]
                told += [self._beyond(data, e, 1), self._beyond(data, e, -1)]
                yield f"| {' | '.join(told)} | {len(means)} of {len(entrants())} |"

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
        """Whether a lead is beyond chance."""
        return self.corrected.get(where, 1.0) < ERROR

    def section(self, data: str) -> Iterator[str]:
        """Yield a data set's part of the page."""
        results, names = self.results[data], list(entrants())
        yield f"## {DATA[data].title}"
        yield ""
        if not any(of == data for of, _, _ in self.stored):
            yield f"Not run: `python -m experiments.league {data}`."
            yield ""
            return
        yield "| | " + " | ".join(f"ε = {e:g} | to FedAvg" for e in EPSILONS) + " | rounds |"
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


def _head() -> str:
    price = ", ".join(f"{cost(e, 1e-5, TRIED):.1f} for {TRIED} runs at {e:g}" for e in EPSILONS)
    return f"""# A league of private algorithms

    FEDPACT_DATA=DIR python -m experiments.league [DATA ...]
    python -m experiments.league --left
    python -m experiments.league --page

Who is ahead on which data at the same (ε, δ) per record and site, over as many rounds, and with no more bytes than FedAvg, and is it more than chance? DATA: {", ".join(DATA)}. The first command goes on where it stopped; what is "not run" below is made by it.

* **Entrants**: every algorithm that has a private form, some settings of theirs that go by names of their own, and each site alone. All else in their tables is left at its default.
* **Budgets**: ε = 1, 2, 4, 8, each spent in full; receipts say what each site spent (`spent` in the results). FedAvg has 20 rounds, what sends more than {1.15:g} times its bytes in a round has fewer.
* **The rule**: for each cell τ of {", ".join(map(str, TAUS))} and η of {", ".join(f"{f:g}" for f in FACTORS)} times the data's own step over τ, {TRIED} runs on three quarters of the training records; the best mean over the sites on the fourth is taken. Figures are of {len(SEEDS)} other seeds.
* **What the rule costs**: trying spends ε too, which no figure below includes. For who sees all runs of one cell, at δ = 1e-5: {price}. The records that a choice is judged by are exact there.
* **Figures**: mean over the sites of the accuracy on what they hold out, of the model that a site uses, in per cent; mean ± standard deviation over the seeds. "To FedAvg" is the difference in points, bold where it is beyond chance.
* **Chance**: what is left of a figure without its entrant's and its seed's mean is noise, whose variance is pooled at each ε of a data set (an entrant whose own differences scatter more has theirs); a lead has a p-value by Student's t. All leads of this page are corrected together by Holm's rule: of equals none would be beyond chance in 19 of 20 such pages, over all entrants, ε and data sets. What is added later counts, too.

The league has one step and one pair of τ for all; an algorithm with settings of its own, such as λ of `fedfdp`, would gain by choosing them, and pay for it.

## Who wins where

"Lead" is of who has most over FedAvg, in points, p after the correction; beyond chance is p < {ERROR:g}. No name beyond chance: nobody is shown to beat FedAvg there.
"""  # noqa: E501


def write() -> None:
    """Write the page."""
    league = League({name: Results(name) for name in DATA})
    parts = [_head(), "\n".join(league.summary()) + "\n"]
    parts += ["\n".join(league.section(name)) for name in DATA]
    (HERE / "README.md").write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
