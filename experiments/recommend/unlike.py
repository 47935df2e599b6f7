"""What is recommended for sites of unlike budgets, beside all records counting alike.

    FEDPACT_DATA=DIR python -m experiments.recommend.unlike      results in unlike.json

A run that has a result there is not made again. Digits: four sites with all their own noise, dealt
at random, or of three labels each, of which the rule does not know; accuracy on the public test
images. Heart disease: the four hospitals, the mean of their accuracies on FLamby's test records.
"""

import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

from experiments.made import made

import fedpact
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.accounting.planner import NOISE, TABLE_NOISE, full_batch
from fedpact.simulation.setup import SimulationSetup
from fedpact.studies.circumstances import Circumstances, SiteNoise, describe_columns
from fedpact.studies.recommend import Recommendation

STORED: Final = Path(__file__).parent / "unlike.json"
LABELS: Final = {"kind": "labels", "labels_per_site": 3}
FLAMBY: Final = "heart_disease_flamby"
# Name -> data, ε of each site, δ, partition in place of the rule's, seeds.
ROWS: Final[dict[str, tuple[str, tuple[float, ...], float, dict[str, Any], int]]] = {
    "digits, dealt, 0.5 0.5 8 8": ("digits", (0.5, 0.5, 8, 8), 1e-5, {}, 3),
    "digits, dealt, 1 1 4 4": ("digits", (1, 1, 4, 4), 1e-5, {}, 3),
    "digits, dealt, 2 2 2 4": ("digits", (2, 2, 2, 4), 1e-5, {}, 3),
    "digits, 3 labels, 0.5 0.5 8 8": ("digits", (0.5, 0.5, 8, 8), 1e-5, LABELS, 3),
    "digits, 3 labels, 1 1 4 4": ("digits", (1, 1, 4, 4), 1e-5, LABELS, 3),
    "heart disease, 0.1 0.1 1 1": (FLAMBY, (0.1, 0.1, 1, 1), 1e-4, {}, 8),
    "heart disease, 1 1 0.1 0.1": (FLAMBY, (1, 1, 0.1, 0.1), 1e-4, {}, 8),
    "heart disease, 0.3 1 1 4": (FLAMBY, (0.3, 1, 1, 4), 1e-4, {}, 8),
}


def both(row: str) -> dict[str, dict[str, Any]]:
    """Return the configuration that is recommended, and the one in which all records are alike."""
    data, epsilons, delta, partition, _ = ROWS[row]
    budgets = tuple(Budget(epsilon, delta) for epsilon in epsilons)
    # Of sites that are not dealt their number is declared.
    size = 1154 if partition else None
    asked = Circumstances(
        *(data, budgets, 100, 0 if data == FLAMBY else len(budgets), "own", 0),
        size=size,
        **describe_columns(None, data, size),
    )
    found = Recommendation.of(asked).raw
    scene, clip = SimulationSetup.of(fedpact.Plan.parse(found)), found["privacy"]["clip"]
    sizes = list(scene.sizes.values())
    noise = SiteNoise(budgets, sizes, [None] * len(budgets), clip, shared=False, dealt=True)
    length = 1.0 if "features" in found else clip / 0.2
    alike = full_batch(
        lambda rounds: math.hypot(*noise.site_sigmas(1.0, rounds)) / math.sqrt(len(sizes)),
        *(sum(sizes), len(sizes), 100),
        weights=scene.workshop.size,
        clip=clip,
        length=length,
        noise=NOISE if "features" in found else TABLE_NOISE,
    )
    plain = {key: value for key, value in found.items() if key != "server"}
    plain |= {"algorithm": "fedavg", "rounds": alike.rounds}
    plain |= {"settings": {"learning_rate": alike.learning_rate, "local_steps": 1}}
    if alike.momentum:
        plain["server"] = {"optimiser": "momentum", "momentum": alike.momentum}
    more = {"partition": partition} if partition else {}
    return {"recommended": found | more, "alike": plain | more}


def accuracy(raw: dict[str, Any], seed: int) -> float:
    """Return the accuracy of a run's last model in per cent."""
    raw = {**raw, "seed": seed, "run": {"evaluate_every": 1000}}
    with tempfile.TemporaryDirectory() as folder:
        last = fedpact.run(fedpact.Plan.parse(raw), Path(folder) / "run").records[-1]
    if raw["data"] == FLAMBY:
        return 100 * statistics.fmean(score.accuracy for score in last.scores.values())
    return 100 * last.accuracy


def main() -> None:
    """Run what is missing, and print the table."""
    found: dict[str, Any] = json.loads(STORED.read_text()) if STORED.exists() else {}
    for row, (*_, seeds) in ROWS.items():
        cells = list[str]()
        for name, raw in both(row).items():
            kept = found.get(f"{row}: {name}", {})
            if kept.get("plan") != json.loads(json.dumps(raw)):
                each = [accuracy(raw, seed) for seed in range(seeds)]
                kept = found[f"{row}: {name}"] = {"plan": raw, "accuracy": each, **made()}
                STORED.write_text(json.dumps(found, indent=1) + "\n")
            each = kept["accuracy"]
            cells.append(f"{statistics.fmean(each):.1f} ± {statistics.stdev(each):.1f}")
        print(f"| {row} | {' | '.join(reversed(cells))} |", flush=True)


if __name__ == "__main__":
    main()
