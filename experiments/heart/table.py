"""Heart disease on FLamby's own split, per hospital (ε, δ) = (1, 1e-4) and (0.1, 1e-4).

    FEDPACT_DATA=DIR python experiments/heart/table.py [--again]

Each hospital's own noise, and noise that the four share out (trust = "sum", 3 honest of 4). Rounds
and η are chosen on a quarter of the training records that is set aside: four cuts or, at ε = 0.1, a
hundred, there with the noise over the records that all of them have. A hospital's accuracy counts
alike, as in FLamby's table. The test parts are looked at by five runs of what was chosen, or
twenty. Results are stored as they come (results.json), and what is stored is not run again;
--again carries out the runs on the test parts anew, with the settings as stored, and stores none.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import fedpact
from fedpact.engines.simulation import simulate

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
NOISES = {
    "own": [],
    "sum": ["privacy.trust=sum", "privacy.honest=3", "secure_aggregation.threshold=4"],
}


@dataclass(frozen=True)
class Choice:
    """What is chosen from, and by how much. kept: the share of its records that a cut trains on."""

    rounds: Sequence[int]
    rates: Sequence[float]
    cuts: int
    seeds: int
    kept: float = 1.0


CHOICES = {
    1.0: Choice((1, 3, 10, 30), (0.2, 0.5, 1.0), 4, 5),
    # Noise hides more of what tells settings apart. Here σ is as 1/ε, so ε over what is kept has
    # the noise over the records of all; without that a cut favours what stands more noise.
    0.1: Choice((3, 10), (0.2, 0.5), 100, 20, 0.75),
}


def outcome(settings: list[str]) -> dict[str, Any]:
    """Carry a run out and return what is stored of it."""
    with tempfile.TemporaryDirectory() as folder:
        plan = fedpact.Plan.read(HERE / "heart.toml", settings)
        last = simulate(plan, Path(folder) / "run").records[-1]
    each = {name: score.accuracy for name, score in last.scores.items()}
    alone = max(last.epsilon_alone.values(), default=None)
    return {
        "accuracy": statistics.fmean(each.values()),
        "sites": each,
        "epsilon": max(last.epsilon.values()),
        "epsilon_alone": alone,
    }


def main(again: bool) -> None:
    """Choose rounds and η for each noise and ε, carry out the table's runs, and print it."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    def of(name: str, settings: list[str]) -> float:
        if again and name.startswith("test"):
            return outcome(settings)["accuracy"]
        if name not in found:
            told = outcome(settings)
            found[name] = told if name.startswith("test") else {"accuracy": told["accuracy"]}
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        return found[name]["accuracy"]

    for (epsilon, choice), (noise, own) in product(CHOICES.items(), NOISES.items()):
        tried = dict[str, tuple[float, list[str]]]()
        for rounds, rate in product(choice.rounds, choice.rates):
            title = f"{noise} {epsilon} {rounds} {rate}"
            chosen = [*own, f"rounds={rounds}", f"settings.learning_rate={rate}"]
            aside = [*chosen, f"privacy.epsilon={epsilon / choice.kept}", "partition.held_out=0.25"]
            kind = "choice" if choice.kept == 1 else "choice at the noise of all"
            cuts = [
                of(f"{kind} {title} {cut}", [*aside, f"seed={cut}"])
                for cut in range(100, 100 + choice.cuts)
            ]
            tried[title] = (statistics.fmean(cuts), [*chosen, f"privacy.epsilon={epsilon}"])
        title, (_, chosen) = max(tried.items(), key=lambda one: one[1][0])
        test = [of(f"test {title} {n}", [*chosen, f"seed={n}"]) for n in range(choice.seeds)]
        mean, spread = 100 * statistics.fmean(test), 100 * statistics.stdev(test)
        print(f"| {title} | {mean:.1f} ± {spread:.1f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--again", action="store_true")
    main(parser.parse_args().again)
