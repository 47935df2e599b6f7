"""Heart disease on FLamby's own split, per hospital (ε, δ) = (1, 1e-4) and (0.1, 1e-4).

    FEDPACT_DATA=DIR python -m experiments.heart.table [--again]

Each hospital's own noise, and noise that the four share out (trust = "sum", 3 honest of 4).
Columns, rounds and η are chosen on a quarter of the training records that is set aside: a hundred
cuts, with the noise over the records that all of them have. A hospital's accuracy counts alike, as
in FLamby's table. The test parts are looked at by twenty runs of what was chosen. Results are
stored as they come (results.json: of cuts the accuracy, of runs on the test parts all that is said
of them), and what is stored is not run again; --again carries out the runs on the test parts anew,
with the settings as stored, and stores none.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from experiments.made import made

import fedpact
from fedpact.data.advice import KNOWN
from fedpact.simulation.simulate import simulate

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
NOISES = {
    "own": [],
    "sum": ["privacy.trust=sum", "privacy.honest=3", "secure_aggregation.threshold=4"],
}


# ε: rounds and η to choose from.
CHOICES: dict[float, tuple[Sequence[int], Sequence[float]]] = {
    1.0: ((3, 10, 30), (0.2, 0.5, 1.0)),
    0.1: ((3, 10), (0.2, 0.5)),
}
# Which columns, and where they begin: as heart.toml declares, all 13 or those that say more; or as
# data/public.py has them.
COLUMNS = {
    "all": list[str](),
    "fewer": [f"records.drop={json.dumps(KNOWN['heart_disease_flamby'])}"],
    "loaded": ["records={}"],
}
CUTS, RUNS = 100, 20
# σ is as 1/ε, nearly, so ε over what is kept of the records has the noise over the records of all;
# without that a cut favours what stands more noise.
KEPT = 0.75


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
    """Choose for each noise and ε, carry out the table's runs, and print it."""
    empty: dict[str, dict[str, Any]] = {"cuts": {}, "test": {}}
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else empty

    def of_cuts(title: str, settings: list[str], epsilon: float) -> float:
        kept = found["cuts"].setdefault(title, {"accuracy": [], "made": made()})
        known = kept["accuracy"]
        aside = [*settings, f"privacy.epsilon={epsilon / KEPT}", "partition.held_out=0.25"]
        for cut in range(100 + len(known), 100 + CUTS):
            known.append(round(outcome([*aside, f"seed={cut}"])["accuracy"], 6))
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        return statistics.fmean(known)

    def of_tests(title: str, settings: list[str]) -> list[float]:
        known = [] if again else found["test"].setdefault(title, [])
        for n in range(len(known), RUNS):
            known.append(outcome([*settings, f"seed={n}"]) | {"made": made()})
            if not again:
                RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        return [one["accuracy"] for one in known]

    for (epsilon, (lengths, rates)), (noise, own) in product(CHOICES.items(), NOISES.items()):
        tried = dict[str, tuple[float, list[str]]]()
        for columns, rounds, rate in product(COLUMNS, lengths, rates):
            title = f"{noise} {epsilon} {columns} {rounds} {rate}"
            chosen = [*own, *COLUMNS[columns], f"rounds={rounds}"]
            chosen += [f"settings.learning_rate={rate}"]
            tried[title] = (of_cuts(title, chosen, epsilon), chosen)
        title, (_, chosen) = max(tried.items(), key=lambda one: one[1][0])
        test = of_tests(title, [*chosen, f"privacy.epsilon={epsilon}"])
        mean, spread = 100 * statistics.fmean(test), 100 * statistics.stdev(test)
        print(f"| {title} | {mean:.1f} ± {spread:.1f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--again", action="store_true")
    main(parser.parse_args().again)
