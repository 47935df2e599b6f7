"""Which default κ: ALI-DPFL at κ = c ρ² beside fixed τ, at the same rounds, iterations and noise.

    python -m experiments.ali_kappa.run digits-labels 30 150 3      data, R_s, R_c, seeds

Prints, for every choice, the accuracy on the public test set (mean and standard deviation over the
seeds), the iterations of each run, and its first τ.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from fedpact.algorithms.common import tau_control
from fedpact.plan import Plan
from fedpact.simulation.simulate import simulate

PLAIN = {"mode": "none"}
NOISY = {"sigma": 1.1, "clip": 0.1, "epsilon": 1000.0}  # σ decides; ε is only a ceiling
SETS: dict[str, tuple[dict[str, Any], float]] = {
    "digits-dirichlet": (
        {
            "data": "digits",
            "sites": 5,
            "sampling_rate": 0.2,
            "partition": {"kind": "dirichlet", "beta": 0.3, "held_out": 0.1},
            "privacy": PLAIN,
        },
        1.0,
    ),
    "digits-labels": (
        {
            "data": "digits",
            "sites": 10,
            "sampling_rate": 0.2,
            "partition": {"kind": "labels", "labels_per_site": 2, "held_out": 0.1},
            "privacy": PLAIN,
        },
        1.0,
    ),
    "synthetic": (
        {
            "data": "synthetic(1,1)",
            "sites": 100,
            "sampling_rate": 0.2,
            "partition": {"kind": "natural", "held_out": 0.25},
            "privacy": PLAIN,
        },
        0.1,
    ),
    "fashion-mnist": (
        {
            "data": "fashion_mnist",
            "sites": 10,
            "sampling_rate": 0.05,
            "partition": {"kind": "shards", "held_out": 0.1},
            "privacy": NOISY,
        },
        2.0,
    ),
}


def show(label: str, raw: dict[str, Any], seeds: int) -> None:
    """Carry out the plan with every seed and print one line."""
    accuracies, lists = [], []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            result = simulate(Plan.parse({**raw, "seed": seed}), Path(folder) / "run")
        accuracies.append(100 * result.summary["accuracy"])
        lists.append([record.steps for record in result.records[1:]])
    spread = statistics.stdev(accuracies) if seeds > 1 else 0.0
    totals = " ".join(str(sum(steps)) for steps in lists)
    print(
        f"{label:8} {statistics.mean(accuracies):6.2f} ± {spread:4.2f}  {totals}  {lists[0][:10]}"
    )


def main(name: str, rounds: int, iterations: int, seeds: int) -> None:
    """Run the fixed τ, then ALI with each c."""
    common, rate = SETS[name]
    common = {**common, "run": {"evaluate_every": 10**6}}
    for tau in (1, 2, 3, 5, 8):
        settings = {"learning_rate": rate, "local_steps": tau}
        fewer = {"rounds": min(rounds, iterations // tau), "settings": settings}
        show(f"τ = {tau}", {**common, "algorithm": "fedavg", **fewer}, seeds)
    settings = {"learning_rate": rate, "iterations": iterations}
    for c in (1.0, 3.0, 10.0, 30.0, 100.0):
        tau_control.KAPPA = c  # pyright: ignore[reportConstantRedefinition]
        adaptive = {"algorithm": "ali_dpfl", "rounds": rounds, "settings": settings}
        show(f"c = {c:g}", {**common, **adaptive}, seeds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=SETS)
    for name in ("rounds", "iterations", "seeds"):
        parser.add_argument(name, type=int)
    main(*vars(parser.parse_args()).values())
