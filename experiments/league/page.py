"""README.md: who wins where, and by how much more than chance, of what is stored alone."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
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
from scipy.stats import t as student

from fedpact.privacy.accounting.accountant import Budget, SampledGaussian, epsilon
from fedpact.privacy.accounting.calibration import smallest_scale

BEFORE, ERROR = "fedavg", 0.05
TRIED = len(TAUS) * len(FACTORS)
Means = dict[str, list[float]]
"""Entrant -> its means, one a seed, in per cent."""


def cost(of: float, delta: float, runs: int) -> float:
    """Return ε of so many runs on the same records, each of (of, δ), for who sees them all.

    Every record is in every batch here, so a run is one Gaussian, and so are several.
    """
    one = SampledGaussian(1.0, smallest_scale(Budget(of, delta), {SampledGaussian(1.0, 1.0): 1}))
    return epsilon({one: runs}, delta)


def ahead(means: Mapping[str, Sequence[float]]) -> tuple[dict[str, float], float]:
    """Return how far each entrant is ahead of FedAvg, and what chance gives to the best of them.

    A seed's partition is the same for all, so a mean is an entrant's part, a seed's part, and a
    rest, whose variance is pooled: s² = Σ rest² / ((K - 1)(S - 1)). A difference of two entrants
    has the deviation s sqrt(2 / S). None of K - 1 differences is beyond ± the second number by
    chance in 19 of 20 leagues (Bonferroni, Student's t). Raises KeyError: FedAvg is missing.
    """
    names, values = [*means], np.array([*means.values()])
    of = dict(zip(names, values.mean(1), strict=True))
    found = {name: float(of[name] - of[BEFORE]) for name in names if name != BEFORE}
    if not found:
        return {}, math.inf
    rest = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    freedom = len(found) * (values.shape[1] - 1)
    deviation = math.sqrt(float((rest**2).sum()) / freedom * 2 / values.shape[1])
    return found, float(student.ppf(1 - ERROR / (2 * len(found)), freedom)) * deviation


def section(results: Results) -> Iterator[str]:
    """Yield a data set's part of the page."""
    data, names = results.data, list(entrants())
    stored = {(name, e): _runs(results, Cell(data, name, e)) for name in names for e in EPSILONS}
    yield f"## {DATA[data].title}"
    yield ""
    if not any(stored.values()):
        yield f"Not run: `python -m experiments.league {data}`."
        yield ""
        return
    told, far = list[str](), dict[float, tuple[dict[str, float], float]]()
    for e in EPSILONS:
        means = {n: [100 * r["mean"] for r in stored[n, e]] for n in names if stored[n, e]}
        if BEFORE in means:
            far[e] = ahead(means)
            told.append(f"* **ε = {e:g}**: {_verdict(means, *far[e], len(names))}")
    yield from told
    yield ""
    yield "| | " + " | ".join(f"ε = {e:g} | to FedAvg" for e in EPSILONS) + " | rounds |"
    yield "|" + " --- |" * (2 + 2 * len(EPSILONS))
    for name in names:
        row = list[str]()
        for e in EPSILONS:
            row += _cells(results, Cell(data, name, e), stored[name, e], far.get(e))
        rounds = sorted({run["rounds"] for e in EPSILONS for run in stored[name, e]})
        row.append(" to ".join(map(str, dict.fromkeys([*rounds[:1], *rounds[-1:]]))))
        yield f"| {name} | {' | '.join(row)} |"
    yield ""
    refused = {name: results.why_refused(Cell(data, name, EPSILONS[0])) for name in names}
    yield from (f"* `{name}` is refused: {why}" for name, why in refused.items() if why)
    yield f"Made by: {'; '.join(sorted({r['made'] for runs in stored.values() for r in runs}))}."
    yield ""


def _verdict(means: Means, far: Mapping[str, float], chance: float, wanted: int) -> str:
    best = max(means, key=lambda name: statistics.fmean(means[name]))
    beyond = sorted((n for n in far if far[n] > chance), key=lambda n: -far[n])
    behind = sorted((n for n in far if far[n] < -chance), key=lambda n: far[n])
    parts = [f"{best} has most, {statistics.fmean(means[best]):.1f}"]
    parts.append(f"chance is worth {chance:.1f} points either way")
    parts.append(f"ahead of FedAvg by more: {', '.join(beyond) or 'none'}")
    parts.append(f"behind by more: {', '.join(behind) or 'none'}")
    if len(means) < wanted:
        parts.append(f"{len(means)} of {wanted} have run")
    return "; ".join(parts) + "."


def _runs(results: Results, cell: Cell) -> list[dict[str, Any]]:
    try:
        return results.runs(cell)
    except LookupError:
        return []


def _cells(
    results: Results,
    cell: Cell,
    runs: list[dict[str, Any]],
    far: tuple[dict[str, float], float] | None,
) -> list[str]:
    if not runs:
        return ["refused" if results.why_refused(cell) else "not run", ""]
    values = [100 * run["mean"] for run in runs]
    text = f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"
    ended = [str(run["diverged"]) for run in runs if "diverged" in run]
    if ended:
        text += f", diverged after round {', '.join(ended)}"
    if far is None or cell.entrant == BEFORE:
        return [text, ""]
    each, chance = far
    difference = f"{each[cell.entrant]:+.1f}"
    return [text, f"**{difference}**" if abs(each[cell.entrant]) > chance else difference]


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
* **Figures**: mean over the sites of the accuracy on what they hold out, of the model that a site uses, in per cent; mean ± standard deviation over the seeds. "To FedAvg" is the mean difference seed by seed, bold where it is beyond chance.
* **Chance**: what is left of a figure without its entrant's and its seed's mean is noise, whose variance is pooled; "chance" is the width within which *all* of them would stay in 19 of 20 leagues of equals (Bonferroni, Student's t). So the best of many is no winner for being many.

The league has one step and one pair of τ for all; an algorithm with settings of its own, such as λ of `fedfdp`, would gain by choosing them, and pay for it.
"""  # noqa: E501


def write() -> None:
    """Write the page."""
    parts = [_head()]
    parts += ["\n".join(section(Results(name))) for name in DATA]
    (HERE / "README.md").write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
