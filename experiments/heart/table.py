"""Heart disease on FLamby's own split, per hospital (ε, δ) = (1, 1e-4) and (0.1, 1e-4).

    FEDPACT_DATA=DIR python experiments/heart/table.py

Each hospital's own noise, and noise that the four share out (trust = "sum", 3 honest of 4). Rounds,
η and, at the smaller ε, the coding are chosen on a quarter of the training records that is set
aside, four cuts or thirty; a hospital's accuracy counts alike, as in FLamby's table. The test parts
are looked at once, by five runs of what was chosen, or twenty. Results are stored as they come
(results.json), and what is stored is not run again.
"""

import json
import statistics
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import fedpact

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
NOISES = {
    "own": [],
    "sum": ["privacy.trust=sum", "privacy.honest=3", "secure_aggregation.threshold=4"],
}
ROUNDS, RATES = (1, 3, 10, 30), (0.2, 0.5, 1.0)
CENTRED = ["features.kind=centred:columns", "features.trained_on=nothing: public constants"]
# At the smaller ε noise hides more of what tells settings apart.
CUTS = {1.0: range(100, 104), 0.1: range(100, 130)}
CODINGS = {1.0: {"": []}, 0.1: {"": [], " centred": CENTRED}}
SEEDS = {1.0: range(5), 0.1: range(20)}


def outcome(settings: list[str]) -> dict[str, Any]:
    """Carry a run out and return what is stored of it."""
    with tempfile.TemporaryDirectory() as folder:
        last = fedpact.run(
            fedpact.Plan.read(HERE / "heart.toml", settings), Path(folder) / "run"
        ).records[-1]
    each = {name: score.accuracy for name, score in last.scores.items()}
    alone = max(last.epsilon_alone.values(), default=None)
    return {
        "accuracy": statistics.fmean(each.values()),
        "sites": each,
        "epsilon": max(last.epsilon.values()),
        "epsilon_alone": alone,
    }


def main() -> None:
    """Choose rounds and η for each noise and ε, carry out the table's runs, and print it."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    def of(name: str, settings: list[str]) -> float:
        if name not in found:
            told = outcome(settings)
            found[name] = told if name.startswith("test") else {"accuracy": told["accuracy"]}
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        return found[name]["accuracy"]

    for epsilon, (noise, own) in product((1.0, 0.1), NOISES.items()):
        tried = dict[str, tuple[float, list[str]]]()
        ways = [(*one, *way) for one in CODINGS[epsilon].items() for way in product(ROUNDS, RATES)]
        for coding, how, rounds, rate in ways:
            title = f"{noise} {epsilon} {rounds} {rate}{coding}"
            chosen = [*own, f"privacy.epsilon={epsilon}", *how]
            chosen += [f"rounds={rounds}", f"settings.learning_rate={rate}"]
            aside = [*chosen, "partition.held_out=0.25"]
            cuts = [of(f"choice {title} {cut}", [*aside, f"seed={cut}"]) for cut in CUTS[epsilon]]
            tried[title] = (statistics.fmean(cuts), chosen)
        title, (_, chosen) = max(tried.items(), key=lambda one: one[1][0])
        test = [of(f"test {title} {seed}", [*chosen, f"seed={seed}"]) for seed in SEEDS[epsilon]]
        mean, spread = 100 * statistics.fmean(test), 100 * statistics.stdev(test)
        print(f"| {title} | {mean:.1f} ± {spread:.1f} |", flush=True)


if __name__ == "__main__":
    main()
