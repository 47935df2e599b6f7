"""Fewer bytes: what [compression] "grid" costs in accuracy, and how many bytes it takes to 80 %.

    python -m experiments.fewer_bytes.run digits [SEEDS]
    FEDPACT_DATA=DIR python -m experiments.fewer_bytes.run fashion_mnist [SEEDS]
    FEDPACT_DATA=DIR python -m experiments.fewer_bytes.run to80 [SEEDS] [MODEL]

The first two train each algorithm with and without; the third counts bytes until the model is at
80 % on Fashion-MNIST's test set, also where replies are masked. Results are stored as they come
(results.json), and what is stored is not run again.
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
STORED = HERE / "results.json"
KINDS = ("none", "grid")
SEVERAL = ["settings.local_steps=5"]
ALGORITHMS = {
    "fedavg": [],
    "fedavg, τ = 5": ["algorithm=fedavg", *SEVERAL],
    "fedprox": SEVERAL,
    "scaffold": SEVERAL,
    "feddyn": [*SEVERAL, "settings.learning_rate=0.2", "server={}"],
    "ldp_fedsgd": ["settings.step_schedule=constant"],
    "fedfdp": ["settings.local_steps=2"],
    "qffl": ["settings.local_steps=1"],
    "fedproxvr": ["settings.local_steps=5"],
    "ali_dpfl": ["settings.iterations=60"],
}
SIZES = {
    "digits": ["data=digits", "sites=5", "rounds=40", "server={}"],
    "fashion_mnist": ["rounds=30"],
}
SUM = [
    *("secure_aggregation.threshold=8", "privacy.trust=sum", "privacy.honest=7"),
    "privacy.accountant=rdp",
]
MASKED = {"own noise": [], "noise for the sum": SUM}


def plan(kind: str, seed: int, more: list[str]) -> fedpact.Plan:
    """Return one run's plan."""
    base = [f"compression.kind={kind}", f"seed={seed}"]
    return fedpact.Plan.read(HERE / "fashion_mnist.toml", [*base, *more])


def outcome(chosen: fedpact.Plan) -> dict[str, Any]:
    """Carry a run out and return what is stored of it."""
    with tempfile.TemporaryDirectory() as folder:
        result = fedpact.run(chosen, Path(folder) / "run")
    sent, to80 = [0, 0], None
    for record in result.records:
        sent = [sent[0] + record.bytes_down, sent[1] + record.bytes_up]
        if to80 is None and (record.accuracy or 0) >= 0.8:
            to80 = {"round": record.round, "down": sent[0], "up": sent[1]}
    d, answers = result.summary["model_parameters"], result.summary["rounds"] * chosen.sites
    return {
        "accuracy": result.summary["accuracy"],
        "epsilon": max(result.summary["epsilon"].values()),
        "bits_down": 8 * sent[0] / d / answers,
        "bits_up": 8 * sent[1] / d / answers,
        "to80": to80,
    }


def stored(name: str, chosen: fedpact.Plan) -> dict[str, Any]:
    """Return a run's outcome: the stored one, or that of carrying it out."""
    found = json.loads(STORED.read_text()) if STORED.exists() else {}
    if name not in found:
        figures = outcome(chosen) | {"made": made()}
        # Read again: another process may have stored some meanwhile.
        found = json.loads(STORED.read_text()) if STORED.exists() else {}
        found[name] = figures
        STORED.write_text(json.dumps(found, indent=1) + "\n")
    return found[name]


def _mean(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.2f} ± {spread:.2f}"


def compare(data: str, seeds: int) -> None:
    """Print each algorithm's accuracy with and without, and the difference seed by seed."""
    for name, own in ALGORITHMS.items():
        algorithm = [] if name.startswith("fedavg,") else [f"algorithm={name}"]
        of_kind = {
            kind: [
                stored(
                    f"{data}/{name}/{kind}/{seed}",
                    plan(kind, seed, [*SIZES[data], *_plain(name), *algorithm, *own]),
                )
                for seed in range(seeds)
            ]
            for kind in KINDS
        }
        test = {kind: [100 * run["accuracy"] for run in runs] for kind, runs in of_kind.items()}
        apart = [grid - none for none, grid in zip(test["none"], test["grid"], strict=True)]
        bits = of_kind["grid"][0]
        print(
            f"| {name} | {_mean(test['none'])} | {_mean(test['grid'])} | {_mean(apart)} | "
            f"{bits['bits_up']:.2f} | {bits['bits_down']:.2f} |",
            flush=True,
        )


def _plain(name: str) -> list[str]:
    """Settings of the table's file that not every algorithm has, taken back."""
    return ["settings={learning_rate = 0.5}"] if name != "ali_dpfl" else ["settings={}"]


def to80(seeds: int, model: str) -> None:
    """Print the bytes to 80 % by whose noise, and by kind."""
    for whose, own in MASKED.items():
        for kind in KINDS:
            runs = [
                stored(f"to80/{model}/{whose}/{kind}/{s}", plan(kind, s, [*own, f"model={model}"]))
                for s in range(seeds)
            ]
            reached = [run["to80"] for run in runs if run["to80"]]
            sent = [(run["down"] + run["up"]) / 1e6 for run in reached]
            rounds = [float(run["round"]) for run in reached]
            print(
                f"| {whose} | {kind} | {len(reached)} of {seeds} | {_mean(rounds)} | "
                f"{_mean(sent)} | {runs[0]['bits_up']:.2f} | {runs[0]['bits_down']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=(*SIZES, "to80"))
    parser.add_argument("seeds", nargs="?", type=int, default=3)
    parser.add_argument("model", nargs="?", default="logistic", help="of to80")
    asked = parser.parse_args()
    if asked.what == "to80":
        to80(asked.seeds, asked.model)
    else:
        compare(asked.what, asked.seeds)
