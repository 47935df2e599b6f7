"""Features and a linear model at a given (ε, δ), own noise and noise for the sum.

    FEDPACT_DATA=DIR python -m experiments.features.run NAME [SEEDS] [OUT]      results/NAME.json
    FEDPACT_DATA=DIR python -m experiments.features.run NAME --again
    FEDPACT_DATA=DIR python -m experiments.features.run NAME --choose [KEY=VALUE ...]

NAME: fashion_mnist, cifar10 or mnist, where each site has all its own noise; with "-sum" behind it,
the ten share it out, and a sum is protected if nine of them are honest. The first form trains on
all training records, and looks at the test set once a seed; a seed that has a result is not run
again. The second carries a row out anew, from raw images to reports, and prints it beside what is
stored. The third is how settings are chosen: a sixth of the training records is set aside, in place
of the test set, which is left out.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from experiments.made import made

import fedpact
from fedpact.data import load
from fedpact.data.dataset import Dataset
from fedpact.data.features.kinds import FeatureSettings
from fedpact.simulation.setup import find_feature_cache

HERE = Path(__file__).parent
# What all three have in common: trust = "sum" with h = K - 1, which needs all ten in every sum.
SUM = ["privacy.trust=sum", "privacy.honest=9", "secure_aggregation.threshold=10"]
# Of images in grey a shorter clip, with the step as long in units of it; chosen as README.md says.
OF_OWN = {
    "fashion_mnist": ["privacy.clip=0.05", "settings.learning_rate=2000"],
    "mnist": ["privacy.clip=0.05", "settings.learning_rate=2000"],
}
# With less noise more rounds pay.
OF_SUM = {
    "fashion_mnist": ["rounds=100", "settings.learning_rate=400"],
    "cifar10": ["rounds=120", "settings.learning_rate=200"],
    "mnist": ["rounds=100", "settings.learning_rate=500"],
}


def planned(name: str, overrides: list[str]) -> fedpact.Plan:
    """Return the plan of a row of the table."""
    of, noise, _ = name.partition("-sum")
    settings = [*SUM, *OF_SUM[of]] if noise else OF_OWN.get(of, [])
    return fedpact.Plan.read(HERE / f"{of}.toml", [*settings, *overrides])


def set_aside(plan: fedpact.Plan) -> Dataset:
    """Return the training records' features, with a sixth of them in the test set's place."""
    data = load.load_dataset(plan.data)
    x = plan.stage()(data.x, data.x[0], data.name, find_feature_cache(plan, data)).x
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(17))
    test, train = order[: len(order) // 6], order[len(order) // 6 :]
    y = data.y
    return replace(data, x=x[train], y=y[train], x_test=x[test], y_test=y[test])


def one(plan: fedpact.Plan, out: Path, data: Dataset | None = None) -> dict[str, Any]:
    """Carry a plan out and return what is stored of it."""
    began, worked = time.perf_counter(), time.process_time()
    done = fedpact.run(plan, out, data=data)
    return {
        "accuracy": done.summary["accuracy"],
        "rounds": done.summary["rounds"],
        "epsilon": max(done.summary["epsilon"].values()),
        "seconds": round(time.perf_counter() - began, 1),
        # Of all threads: other work on the machine does not count.
        "processor_seconds": round(time.process_time() - worked, 1),
    }


def measure(name: str, seeds: int, out: Path) -> None:
    """Run what is missing of the seeds and store each result as it comes."""
    stored = HERE / "results" / f"{name}.json"
    stored.parent.mkdir(exist_ok=True)
    found = json.loads(stored.read_text()) if stored.exists() else {"runs": {}}
    for seed in map(str, range(seeds)):
        if seed in found["runs"]:
            continue
        plan = planned(name, [f"seed={seed}"])
        found["runs"][seed] = one(plan, out / f"{name}-{seed}") | made()
        stored.write_text(json.dumps(found, indent=2) + "\n")
        print(seed, found["runs"][seed], flush=True)
    print(row(found["runs"]))


def row(runs: dict[str, dict[str, Any]]) -> str:
    """Return mean and standard deviation over seeds, in percent."""
    accuracies = torch.tensor([run["accuracy"] for run in runs.values()])
    return f"{100 * accuracies.mean():.2f} ± {100 * accuracies.std():.2f}"


def again(name: str, out: Path) -> None:
    """Carry out every seed that is stored, store nothing, and print the row beside the stored."""
    stored = json.loads((HERE / "results" / f"{name}.json").read_text())["runs"]
    began, found = time.perf_counter(), dict[str, dict[str, Any]]()
    out.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=out, prefix=f"{name}-again-"))
    for seed in stored:
        found[seed] = one(planned(name, [f"seed={seed}"]), place / seed)
        print(seed, found[seed], place / seed / "report.html", flush=True)
    minutes = (time.perf_counter() - began) / 60
    print(f"{row(found)} in {minutes:.1f} minutes; stored: {row(stored)}")


def choose(name: str, overrides: list[str]) -> None:
    """Print what a setting reaches on the records that are set aside."""
    plan = planned(name, overrides)
    data = set_aside(plan)
    # Features are of each record alone, so those of a part are a part of them.
    plan = plan.model_copy(update={"features": FeatureSettings()})
    with tempfile.TemporaryDirectory() as folder:
        print(overrides, one(plan, Path(folder) / "run", data), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[of + how for of in OF_SUM for how in ("", "-sum")])
    parser.add_argument("seeds", nargs="?", type=int, default=3)
    parser.add_argument("out", nargs="?", type=Path, default=Path("runs/features"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--choose", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_args()
    if asked.choose is not None:
        choose(asked.name, asked.choose)
    elif asked.again:
        again(asked.name, asked.out)
    else:
        measure(asked.name, asked.seeds, asked.out)
