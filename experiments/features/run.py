"""Features and a linear model at a given (ε, δ): each site with all its own noise.

    FEDPACT_DATA=DIR python experiments/features/run.py NAME [SEEDS] [OUT]      results/NAME.json
    FEDPACT_DATA=DIR python experiments/features/run.py NAME --choose KEY=VALUE ... [KEY=VALUE ...]

NAME: fashion_mnist, cifar10 or mnist. The first form trains on all training records, and looks at
the test set once a seed; a seed that has a result is not run again. The second is how settings are
chosen: a sixth of the training records is set aside, in place of the test set, which is left out.
"""

import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

import fedpact
from fedpact.data import datasets
from fedpact.data.dataset import Dataset
from fedpact.engines.scene import kept
from fedpact.features.settings import FeatureSettings

HERE = Path(__file__).parent


def set_aside(plan: fedpact.Plan) -> Dataset:
    """Return the training records' features, with a sixth of them in the test set's place."""
    data = datasets.load(plan.data)
    x = plan.stage()(data.x, data.x[0], data.name, kept(plan, data)).x
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(17))
    test, train = order[: len(order) // 6], order[len(order) // 6 :]
    y = data.y
    return replace(data, x=x[train], y=y[train], x_test=x[test], y_test=y[test])


def one(plan: fedpact.Plan, out: Path, data: Dataset | None = None) -> dict[str, object]:
    """Carry a plan out and return what is stored of it."""
    began = time.perf_counter()
    done = fedpact.run(plan, out, data=data)
    return {
        "accuracy": done.summary["accuracy"],
        "rounds": done.summary["rounds"],
        "epsilon": max(done.summary["epsilon"].values()),
        "seconds": round(time.perf_counter() - began, 1),
    }


def commit() -> str:
    """Return the commit that is measured."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, cwd=HERE, capture_output=True, text=True).stdout.strip()


def measure(name: str, seeds: int, out: Path) -> None:
    """Run what is missing of the seeds and store each result as it comes."""
    stored = HERE / "results" / f"{name}.json"
    stored.parent.mkdir(exist_ok=True)
    found = json.loads(stored.read_text()) if stored.exists() else {"runs": {}}
    for seed in map(str, range(seeds)):
        if seed in found["runs"]:
            continue
        plan = fedpact.Plan.read(HERE / f"{name}.toml", [f"seed={seed}"])
        found["runs"][seed] = one(plan, out / f"{name}-{seed}") | {"commit": commit()}
        found |= {"torch": torch.__version__, "python": platform.python_version()}
        stored.write_text(json.dumps(found, indent=2) + "\n")
        print(seed, found["runs"][seed], flush=True)
    accuracies = torch.tensor([run["accuracy"] for run in found["runs"].values()])
    print(f"{100 * accuracies.mean():.2f} ± {100 * accuracies.std():.2f}")


def choose(name: str, overrides: list[str]) -> None:
    """Print what a setting reaches on the records that are set aside."""
    plan = fedpact.Plan.read(HERE / f"{name}.toml", overrides)
    data = set_aside(plan)
    # Features are of each record alone, so those of a part are a part of them.
    plan = plan.model_copy(update={"features": FeatureSettings()})
    with tempfile.TemporaryDirectory() as folder:
        print(overrides, one(plan, Path(folder) / "run", data), flush=True)


if __name__ == "__main__":
    chosen, *rest = sys.argv[1:]
    if rest[:1] == ["--choose"]:
        choose(chosen, rest[1:])
    else:
        measure(chosen, int(rest[0]) if rest else 3, Path(rest[1] if rest[1:] else "runs/features"))
