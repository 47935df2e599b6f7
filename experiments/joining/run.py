"""Is it worth joining? Each site alone, federated, tuned inside the site, and MR-MTL.

    FEDPACT_DATA=... python experiments/joining/run.py fashion_mnist
    FEDPACT_DATA=... python experiments/joining/run.py heart_disease

Resumable: every result is stored in results-NAME.json as it comes, and not computed again. λ of
MR-MTL is chosen at seed 0, as the best mean over sites, and the figures are of seed 1: another
partition and other noise. Federated, local and MR-MTL have the same events and noise at each ε.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fedpact.data.dataset import Dataset
from fedpact.data.datasets import from_arrays
from fedpact.data.files import SOURCES, read
from fedpact.data.heart import _COLUMNS
from fedpact.engines.joining import SiteModels, of_run
from fedpact.engines.simulation import simulate
from fedpact.plan import Plan

HERE = Path(__file__).parent
EPSILONS = (1.0, 0.5, 2.0)
CHOOSING, SHOWN = 0, 1
COMMON: dict[str, dict[str, Any]] = {
    "fashion_mnist": {
        "data": "fashion_mnist",
        "sites": 10,
        "rounds": 100,
        "sampling_rate": 0.1,
        "partition": {"kind": "dirichlet", "beta": 0.3, "held_out": 0.2},
        "run": {"evaluate_every": 1000, "workers": 1},
    },
    "heart_disease": {
        "data": "heart_disease",
        "sites": 4,
        "rounds": 100,
        "sampling_rate": 0.5,
        "partition": {"kind": "natural", "held_out": 0.34},
        "run": {"evaluate_every": 1000, "workers": 1},
    },
}
RATE = {"fashion_mnist": 1.0, "heart_disease": 0.5}
DELTA = {"fashion_mnist": 1e-5, "heart_disease": 1e-4}
WEIGHTS = {"fashion_mnist": (0.003, 0.01, 0.03), "heart_disease": (0.03, 0.1, 0.3, 1.0)}


def plan_of(name: str, entrant: str, weight: float, epsilon: float, seed: int) -> Plan:
    """Return one run's plan. weight: λ of mr_mtl."""
    settings: dict[str, Any] = {"learning_rate": RATE[name]}
    if entrant != "fedavg":
        settings["proximal"] = weight
    return Plan.parse(
        {
            **COMMON[name],
            "seed": seed,
            "algorithm": "fedavg" if entrant == "fedavg" else "mr_mtl",
            "settings": settings,
            "privacy": {"epsilon": epsilon, "delta": DELTA[name], "clip": 1.0},
        }
    )


def data_of(name: str) -> Dataset | None:
    """Return heart disease as FLamby splits it by hospital; None for a set of the package's own.

    Columns 11 to 13 are left out and rows with gaps dropped: 740 records, 46 in Switzerland, of
    which 30 train. Values are scaled by declared ranges; a cholesterol of 0 is not measured.
    """
    if name != "heart_disease":
        return None
    source, x, y, site = SOURCES[name], list[Any](), list[Any](), list[str]()
    ranges = {"age": (20, 80), "trestbps": (80, 200), "chol": (100, 400)}
    ranges |= {"thalach": (60, 210), "oldpeak": (0, 6)}
    for file in source.files:
        rows = [line.split(",") for line in read(source, file).decode("ascii").split()]
        raw = np.array([["nan" if v == "?" else v for v in row] for row in rows], np.float64)
        kept = raw[:, [*range(10), 13]]
        kept = kept[~np.isnan(kept).any(1)]
        columns = dict(zip((*_COLUMNS[:10], "num"), kept.T, strict=True))
        scaled = [
            np.clip((2 * columns[key] - low - high) / (high - low), -1, 1)
            for key, (low, high) in ranges.items()
        ]
        scaled[2] = np.where(columns["chol"] == 0, 0.0, scaled[2])
        binary = [columns[key] for key in ("sex", "fbs", "exang")]
        codes = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2)}
        hot = [columns[key] == code for key, known in codes.items() for code in known]
        x.append(np.stack([*scaled, *binary, *hot], 1).astype(np.float32))
        y.append((columns["num"] > 0).astype(np.int64))
        site += [file.split(".")[1]] * len(kept)
    return from_arrays(np.concatenate(x), np.concatenate(y), site=site, name="heart_disease (740)")


class Results:
    """A JSON file of what was found, by key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def keep(self, key: str, value: Any) -> None:
        """Store one more result."""
        self.found[key] = value
        self._path.write_text(json.dumps(self.found, indent=1, sort_keys=True) + "\n")


def one(
    results: Results, name: str, entrant: str, weight: float, epsilon: float, seed: int,
    alones: SiteModels | None = None,
) -> Any:  # fmt: skip
    """Return one run's figures; with `alones`, also what joining was worth at each site."""
    key = f"{entrant} λ={weight:g} ε={epsilon:g} seed={seed}" + (
        " sites" if alones is not None else ""
    )
    if key not in results.found:
        plan, data = plan_of(name, entrant, weight, epsilon, seed), data_of(name)
        with tempfile.TemporaryDirectory() as folder:
            summary = simulate(plan, Path(folder) / "run", data=data).summary
            figures: dict[str, Any] = {
                "accuracy": summary["accuracy"],
                "mean": summary["fairness"]["mean"],
                "worst": summary["fairness"]["worst_accuracy"],
            }
            if alones is not None:
                figures["sites"] = of_run(Path(folder) / "run", data, alones)["sites"]
        results.keep(key, figures)
    return results.found[key]


def main(name: str) -> None:
    """Compute what is missing and print the table."""
    results, alones = Results(HERE / f"results-{name}.json"), SiteModels()
    for epsilon in EPSILONS:
        tried = {
            w: one(results, name, "mr_mtl", w, epsilon, CHOOSING)["mean"] for w in WEIGHTS[name]
        }
        weight = max(tried, key=lambda w: tried[w])
        for entrant, value in (("fedavg", 0.0), ("mr_mtl", weight), ("local", 0.0)):
            found = one(results, name, entrant, value, epsilon, SHOWN, alones)
            sites = found["sites"].values()
            tuned = [s["tuned"] if s["tune"] else s["federated"] for s in sites]
            local = [s["local"] for s in sites]
            print(
                f"ε = {epsilon:g} {entrant:7} λ = {value:<6g} mean {found['mean']:.4f} worst "
                f"{found['worst']:.4f}; as advised {np.mean(tuned):.4f} {min(tuned):.4f}; alone, "
                f"exact {np.mean(local):.4f} {min(local):.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1])
