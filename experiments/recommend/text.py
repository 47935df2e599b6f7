"""Whether the rule of `fedpact recommend`, fitted on images, carries over to texts.

    python -m experiments.recommend.text [SEEDS]

Next characters of Python's own manual (the topics that `help()` prints: no data set that other
experiments are judged by, and on every machine), in pieces of 41 as Shakespeare's. Rounds and the
noise of an answer a are varied around what is recommended. Each result is stored as it comes
(text.json) and not computed again; another Python has another manual.
"""

import json
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
from experiments.made import made

import fedpact
from fedpact.data.schema import PlanRecords
from fedpact.privacy.accounting import planner
from fedpact.privacy.accounting.accountant import Budget
from fedpact.studies.circumstances import Circumstances
from fedpact.studies.recommend import Recommendation

STORED = Path(__file__).with_name("text.json")
CHARACTERS = 64
LENGTH = 40
NOISES = (0.3, 1.0, 3.0)
ROUNDS = (3, 10, 30, 100)
CASES = ((4, 0.5), (4, 2.0), (4, 8.0), (40, 1.0))  # sites, ε


def write(path: Path) -> None:
    """Write records of the most frequent characters, and the next one of each."""
    text = "\n".join(topics.topics.values())
    common = sorted(character for character, _ in Counter(text).most_common(CHARACTERS))
    place = {character: k for k, character in enumerate(common)}
    codes = np.array([place[c] for c in text if c in place])
    pieces = codes[: len(codes) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    np.savez(path, x=pieces[:, :-1], y=pieces[:, -1])


def figures(
    data: Path, case: tuple[int, float], rounds: int, noise: float, seed: int
) -> dict[str, Any]:
    """Return the share of the characters set aside that is found, and by what it was measured."""
    sites, epsilon = case
    records = PlanRecords(vocabulary=CHARACTERS, classes=[str(k) for k in range(CHARACTERS)])
    asked = Circumstances(
        str(data), (Budget(epsilon, 1e-5),), rounds, sites, "own", 0, records=records
    )
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
    with tempfile.TemporaryDirectory() as folder:
        write(data := Path(folder) / "manual.npz")
        for case in CASES:
            for rounds in ROUNDS:
                means = list[str]()
                for noise in NOISES:
                    values = list[float]()
                    for seed in range(seeds):
                        name = f"{case[0]} {case[1]:g} {rounds} {noise:g} {seed}"
                        if name not in found:
                            found[name] = figures(data, case, rounds, noise, seed)
                            STORED.write_text(json.dumps(found, indent=1) + "\n")
                        values.append(100 * found[name]["accuracy"])
                    means.append(f"{statistics.fmean(values):.1f}")
                print(f"| {case[0]} | {case[1]:g} | {rounds} | {' | '.join(means)} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
