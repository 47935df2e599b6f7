"""Whose noise protects: each site's own, shares of a sum's, one curator's with all records.

    FEDPACT_DATA=DIR python -m experiments.noise_for_the_sum.table MODEL [SEEDS]

MODEL: logistic or cnn. Fashion-MNIST, ten sites, ε = 1 and 2 at δ = 1e-5, two labels a site and
Dirichlet(0.3). η is chosen for each noise and ε on the sites' held-out records, with a seed of its
own (one step from a common w does not depend on which site holds a record, so for both partitions
at once), and doubled as long as the largest is the best; the test set is looked at for the runs
that are reported, after their last round. Results are stored as they come (results-MODEL.json), and
what is stored is not run again.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from experiments.made import made

import fedpact

HERE = Path(__file__).parent
SUM = {f"sum, h = {h}": (h, h + 1) for h in (7, 9)}  # honest sites, threshold
NOISES = ("own", *SUM, "curator")
PARTITIONS = {
    "two labels": ["partition.kind=shards", "partition.shards_per_site=2"],
    "dirichlet(0.3)": ["partition.kind=dirichlet", "partition.beta=0.3"],
}
MODELS = {
    # All records in every batch, from zero: what a linear model takes best.
    "logistic": [
        *("model=logistic", "rounds=100", "sampling_rate=1.0"),
        *("logistic.start=zero", "logistic.bias=false"),
    ],
    "cnn": ["model=cnn", "rounds=30", "sampling_rate=0.03"],
}
RATES = {"logistic": [0.5, 1.0, 2.0, 4.0], "cnn": [1.0, 2.0]}
MOST_RATE = 32.0
CHOICE_SEED = 100


def plan(
    model: str, noise: str, epsilon: float, partition: str, rate: float, seed: int
) -> fedpact.Plan:
    """Return one run's plan."""
    own = [f"privacy.epsilon={epsilon}", f"settings.learning_rate={rate}", f"seed={seed}"]
    if noise in SUM:
        honest, threshold = SUM[noise]
        own += ["privacy.trust=sum", f"privacy.honest={honest}"]
        own += [f"secure_aggregation.threshold={threshold}"]
    if noise == "curator":
        place = ["sites=1", 'partition={kind = "iid", held_out = 0.1}']
    else:
        place = PARTITIONS[partition]
    return fedpact.Plan.read(HERE / "fashion_mnist.toml", [*MODELS[model], *place, *own])


def outcome(chosen: fedpact.Plan) -> dict[str, Any]:
    """Carry a run out and return what is stored of it."""
    with tempfile.TemporaryDirectory() as folder:
        result = fedpact.run(chosen, Path(folder) / "run")
        last = result.records[-1]
        scores = last.scores.values()
        held = sum(s.accuracy * s.records for s in scores) / sum(s.records for s in scores)
        return {
            "test": last.accuracy,
            "held_out": held,
            "psi": last.metrics.get("psi"),
            "worst": min(s.accuracy for s in scores),
            "epsilon": max(last.epsilon.values()),
            "epsilon_alone": max(last.epsilon_alone.values(), default=None),
            "bytes_up": result.summary["bytes_up"],
            "seconds": result.summary["seconds"],
        }


class Results:
    """Outcomes by name, on the disk as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found = json.loads(path.read_text()) if path.exists() else {}

    def of(self, name: str, chosen: fedpact.Plan) -> dict[str, Any]:
        """Return a run's outcome: the stored one, or that of carrying it out."""
        if name not in self.found:
            self.found[name] = outcome(chosen) | {"made": made()}
            self._path.write_text(json.dumps(self.found, indent=1) + "\n")
            print(name, {k: self.found[name][k] for k in ("held_out", "epsilon")}, flush=True)
        return self.found[name]


def chosen_rate(results: Results, model: str, noise: str, epsilon: float) -> float:
    """Return the η that is best on held-out records."""
    tried = dict[float, float]()
    rates = list(RATES[model])
    for rate in rates:
        name = f"choice {noise} {epsilon} {rate}"
        asked = plan(model, noise, epsilon, "two labels", rate, CHOICE_SEED)
        tried[rate] = results.of(name, asked)["held_out"]
        best = max(tried, key=lambda one: tried[one])
        if rate == rates[-1] == best and 2 * rate <= MOST_RATE:
            rates.append(2 * rate)
    return max(tried, key=lambda one: tried[one])


def row(results: Results, model: str, noise: str, epsilon: float, place: str, seeds: int) -> str:
    """Carry out the runs of one row of the table, and return it."""
    rate = chosen_rate(results, model, noise, epsilon)
    runs = [
        results.of(
            f"{noise} {epsilon} {place} {seed}", plan(model, noise, epsilon, place, rate, seed)
        )
        for seed in range(seeds)
    ]
    test = [100 * run["test"] for run in runs]
    spread = statistics.stdev(test) if seeds > 1 else 0.0
    alone = runs[0]["epsilon_alone"]
    beside = "" if alone is None else f" (alone {alone:.3g})"
    told = f"{statistics.fmean(test):.2f} ± {spread:.2f}"
    return f"| {place} | {epsilon:g}{beside} | {noise} | {rate:g} | {told} |"


def main(model: str, seeds: int) -> None:
    """Choose η, carry out the table's runs, and print it."""
    results = Results(HERE / f"results-{model}.json")
    for epsilon in (1.0, 2.0):
        for noise in NOISES:
            # One curator has all records, whoever brought them.
            for place in PARTITIONS if noise != "curator" else ("all records",):
                print(row(results, model, noise, epsilon, place, seeds), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=("logistic", "cnn"))
    parser.add_argument("seeds", nargs="?", type=int, default=3)
    main(*vars(parser.parse_args()).values())
