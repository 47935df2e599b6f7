"""How much noise an answer may take on tables: a of `fedpact recommend` (planner.TABLE_NOISE).

    FEDPACT_DATA=DIR python -m experiments.recommend.tables      results in tables.json

The recommended plan, its step scaled to each value of a, for the four hospitals of heart disease
and for Adult at ten sites, at three ε. A quarter of the training records is set aside at each site,
and ε is larger by a third, so that the noise is that over all records. Only what is set aside is
looked at, never a test record.

The rule, which was written down before the first run: of the values whose accuracy is within two
standard errors of the best one's (differences paired by setting and seed), the one with the
smallest loss: the mean over the settings of its loss over the smallest there. Each result is stored
as it comes and not computed again.
"""

import json
import math
import statistics
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, Final

from experiments.made import made

import fedpact
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.accounting.planner import TABLE_NOISE
from fedpact.simulation.simulate import simulate
from fedpact.studies.circumstances import Circumstances, describe_columns
from fedpact.studies.recommend import Recommendation

STORED: Final = Path(__file__).parent / "tables.json"
NOISES: Final = (2.0, 1.0, 0.5, 0.25, 0.125)
EPSILONS: Final = (0.3, 1.0, 4.0)
KEPT: Final = 0.75
# Data, δ, sites (0: the data's own), seeds.
DATA: Final = {"heart_disease_flamby": (1e-4, 0, 10), "adult": (1e-5, 10, 3)}


def figures(data: str, epsilon: float, noise: float, seed: int) -> dict[str, Any]:
    """Return accuracy and loss on what is set aside: means over the sites, each counting alike."""
    delta, sites, _ = DATA[data]
    known = describe_columns(None, data, None)
    budgets = (Budget(epsilon / KEPT, delta),)
    found = Recommendation.of(Circumstances(data, budgets, 100, sites, "own", 0, **known)).raw
    rate = found["settings"]["learning_rate"] * noise / TABLE_NOISE
    found |= {"settings": {**found["settings"], "learning_rate": rate}}
    found |= {"partition": {**found.get("partition", {}), "held_out": 1 - KEPT}}
    found |= {"seed": 1000 + seed, "run": {"evaluate_every": 1000}}
    with tempfile.TemporaryDirectory() as folder:
        last = simulate(fedpact.Plan.parse(found), Path(folder) / "run").records[-1]
    scores = last.scores.values()
    return {
        "accuracy": statistics.fmean(score.accuracy for score in scores),
        "loss": statistics.fmean(score.loss for score in scores),
        **made(),
    }


def chosen(found: dict[str, dict[str, Any]]) -> float:
    """Return the value that the rule gives; see above."""
    runs = [f"{data} {epsilon:g}" for data, epsilon in product(DATA, EPSILONS)]

    def each(noise: float, name: str) -> dict[str, list[float]]:
        seeds = {run: range(DATA[run.split()[0]][2]) for run in runs}
        return {run: [found[f"{run} {noise:g} {s}"][name] for s in seeds[run]] for run in runs}

    right = {a: [v for of in each(a, "accuracy").values() for v in of] for a in NOISES}
    best = max(NOISES, key=lambda a: statistics.fmean(right[a]))

    def near(a: float) -> bool:
        less = [b - v for b, v in zip(right[best], right[a], strict=True)]
        error = statistics.stdev(less) / math.sqrt(len(less))
        return statistics.fmean(less) <= 2 * error

    losses = {
        a: {run: statistics.fmean(values) for run, values in each(a, "loss").items()}
        for a in NOISES
    }
    least = {run: min(losses[a][run] for a in NOISES) for run in runs}
    return min(
        filter(near, NOISES),
        key=lambda a: statistics.fmean(losses[a][run] / least[run] for run in runs),
    )


def main() -> None:
    """Compute what is missing, print the table, and say what the rule chooses."""
    found: dict[str, Any] = json.loads(STORED.read_text()) if STORED.exists() else {}
    for data, epsilon in product(DATA, EPSILONS):
        cells = list[str]()
        for noise in NOISES:
            names = [f"{data} {epsilon:g} {noise:g} {seed}" for seed in range(DATA[data][2])]
            for seed, name in enumerate(names):
                if name not in found:
                    found[name] = figures(data, epsilon, noise, seed)
                    STORED.write_text(json.dumps(found, indent=1) + "\n")
            right, loss = (
                statistics.fmean(found[name][key] for name in names) for key in ("accuracy", "loss")
            )
            cells.append(f"{100 * right:.1f}, {loss:.4f}")
        print(f"| {data} | {epsilon:g} | {' | '.join(cells)} |", flush=True)
    print(f"chosen: a = {chosen(found):g}")


if __name__ == "__main__":
    main()
