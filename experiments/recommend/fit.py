"""The two numbers of `fedpact recommend`: how much noise an answer takes, how many rounds pay.

    python -m experiments.recommend.fit [SEEDS]

The digits (none of the data sets that other experiments are judged by), four sites, features and a
linear model as recommended. a is the noise of an answer (privacy/accounting/planner.py); every
other value of it and of T is tried. Each result is stored as it comes (results.json) and not
computed again.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from experiments.made import made

import fedpact
from fedpact.privacy.accounting import planner
from fedpact.privacy.accounting.accountant import Budget
from fedpact.studies.circumstances import Circumstances
from fedpact.studies.recommend import Recommendation

STORED = Path(__file__).parent / "results.json"
NOISES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
ROUNDS = (3, 10, 30, 100)
EPSILONS = (0.5, 2.0, 8.0, 32.0)


def figures(epsilon: float, rounds: int, noise: float, seed: int) -> dict[str, Any]:
    """Return the share of the test images that is found, and by what it was measured."""
    asked = Circumstances("digits", (Budget(epsilon, 1e-5),), rounds, 4, "own", 0)
    # The rule would have fewer rounds where it finds no more useful.
    with mock.patch.object(planner, "useful_rounds", return_value=rounds):
        raw = Recommendation.of(asked).raw
    rate = raw["settings"]["learning_rate"] * noise / planner.NOISE
    raw = {**raw, "settings": {**raw["settings"], "learning_rate": rate}}
    raw |= {"seed": seed, "run": {"evaluate_every": 1000}}
    with tempfile.TemporaryDirectory() as folder:
        done = fedpact.run(fedpact.Plan.parse(raw), Path(folder) / "run")
    return {"accuracy": done.summary["accuracy"], **made()}


def main(seeds: int) -> None:
    """Compute what is missing, and print the table."""
    found = json.loads(STORED.read_text()) if STORED.exists() else {}
    for epsilon in EPSILONS:
        for rounds in ROUNDS:
            means = list[str]()
            for noise in NOISES:
                values = list[float]()
                for seed in range(seeds):
                    name = f"{epsilon:g} {rounds} {noise:g} {seed}"
                    if name not in found:
                        found[name] = figures(epsilon, rounds, noise, seed)
                        STORED.write_text(json.dumps(found, indent=1) + "\n")
                    values.append(100 * found[name]["accuracy"])
                means.append(f"{statistics.fmean(values):.1f}")
            print(f"| {epsilon:g} | {rounds} | {' | '.join(means)} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
