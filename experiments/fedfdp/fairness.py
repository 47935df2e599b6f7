"""Fairness across sites, plain and private: FedFair beside FedAvg, FedFDP beside DP-FedAvg.

    FEDPACT_DATA=DIR python -m experiments.fedfdp.fairness ROW MODEL [SEEDS] [OUT]

ROW: "plain" (one epoch of 20 batches a round, η = 0.1) or "private" (the paper's: one step a round,
η = 1, q = 0.05, C = 0.1, ε = 3.52 at δ = 1e-5, σ calibrated to it). MODEL: logistic, mlp or cnn. A
folder that has been begun is resumed, run by run.
"""

import argparse
import sys
from pathlib import Path

import fedpact
from fedpact.studies.pool import RunProgress

BASE = Path(__file__).parent / "fashion_mnist.toml"
# With C = 0.1 a record counts C/‖g‖, a few hundredths, unless 1 + λΔ is below it: only a λ of
# about 1/F or more has an effect, on the records of low loss.
WEIGHTS = {"plain": (0.1, 0.3), "private": (0.3, 1.0, 3.0)}
PRIVATE = [
    "rounds=200",
    "run.evaluate_every=50",
    "settings={learning_rate = 1.0, local_steps = 1}",
    'privacy={mode = "per_sample", epsilon = 3.52, delta = 1e-5, clip = 0.1}',
]


def plans(row: str, model: str) -> dict[str, fedpact.Plan]:
    """Return the parent's plan and those of its fair form, at several weights λ."""
    common = [f"model={model}", *(PRIVATE if row == "private" else [])]
    fair = "fedfdp" if row == "private" else "fedfair"
    found = {"fedavg": fedpact.Plan.read(BASE, common)}
    for weight in WEIGHTS[row]:
        found[f"{fair}-{weight}"] = fedpact.Plan.read(
            BASE, [*common, f"algorithm={fair}", f"settings.fairness_weight={weight}"]
        )
    return found


def told(news: RunProgress) -> None:
    """Say which run has ended, or how accurate it is after a round."""
    if news.ended or news.accuracy is not None:
        how = news.failed or ("ended" if news.ended else f"round {news.round}: {news.accuracy:.1%}")
        print(f"{news.job.name} seed {news.job.seed}: {how}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row", choices=WEIGHTS)
    parser.add_argument("model")
    parser.add_argument("seeds", nargs="?", type=int, default=3)
    parser.add_argument("out", nargs="?", type=Path)
    asked = parser.parse_args()
    out = asked.out or Path("runs") / f"fair-{asked.row}-{asked.model}"
    fedpact.compare(plans(asked.row, asked.model), asked.seeds, out, on_news=told)
    print(out / "comparison.html")
