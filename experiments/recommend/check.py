"""How near `fedpact recommend` alone comes to rows that were tuned.

    FEDPACT_DATA=DIR python -m experiments.recommend.check [ROW ...]      check.json

A row: its data, budget, sites and whose noise protects, as `recommend` is asked; nothing is tuned.
The partition is the row's, and plays no part in the rule. Each result is stored as it comes, with
the configuration, and not computed again.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.made import made

import fedpact
from fedpact.privacy.accounting.accountant import Budget
from fedpact.studies.circumstances import Circumstances, describe_columns
from fedpact.studies.recommend import Recommendation

HERE = Path(__file__).parent
STORED = HERE / "check.json"
LABELS = {"kind": "labels", "labels_per_site": 2, "held_out": 0.0}
DIRICHLET = {"kind": "dirichlet", "beta": 0.1, "held_out": 0.0}
HOSPITALS = {"kind": "natural", "held_out": "own"}
ROLES = {"kind": "natural", "held_out": 0.2}
# Data, ε, δ, sites, whether images mean the same mirrored, partition, seeds.
ROWS: dict[str, tuple[str, float, float, int, bool | None, dict[str, Any], int]] = {
    "heart ε = 1": ("heart_disease_flamby", 1.0, 1e-4, 4, None, HOSPITALS, 20),
    "heart ε = 0.1": ("heart_disease_flamby", 0.1, 1e-4, 4, None, HOSPITALS, 20),
    "fashion_mnist": ("fashion_mnist", 2.0, 1e-5, 10, True, LABELS, 3),
    "cifar10": ("cifar10", 2.0, 1e-5, 10, True, LABELS, 3),
    "mnist": ("mnist", 3.52, 1e-5, 10, False, DIRICHLET, 3),
    "shakespeare ε = 1": ("shakespeare", 1.0, 1e-5, 71, None, ROLES, 3),
    "shakespeare ε = 8": ("shakespeare", 8.0, 1e-5, 71, None, ROLES, 3),
}


def configuration(row: str, trust: str) -> dict[str, Any]:
    """Return what is recommended for a row, with the row's partition."""
    data, epsilon, delta, sites, mirror, partition, _ = ROWS[row]
    known = describe_columns(None, data, None)
    where = {} if partition["kind"] == "natural" else {"partition": partition}
    asked = Circumstances(
        data, (Budget(epsilon, delta),), 100, sites, trust, 0, mirror, **known, **where
    )
    own = {"partition": partition, "run": {"evaluate_every": 1000}}
    return Recommendation.of(asked).raw | own


def accuracy(raw: dict[str, Any]) -> float:
    """Return the accuracy of a run's last model; of natural sites the mean, each counting alike."""
    with tempfile.TemporaryDirectory() as folder:
        last = fedpact.run(fedpact.Plan.parse(raw), Path(folder) / "run").records[-1]
    if raw["partition"]["kind"] == "natural":
        return statistics.fmean(score.accuracy for score in last.scores.values())
    return last.accuracy


def main(rows: list[str]) -> None:
    """Run what is missing, and print each row."""
    found: dict[str, Any] = json.loads(STORED.read_text()) if STORED.exists() else {}
    for row in rows:
        for trust in ("own", "sum"):
            title, raw = f"{row} {trust}", configuration(row, trust)
            if title not in found:
                each = [accuracy(raw | {"seed": seed}) for seed in range(ROWS[row][-1])]
                found[title] = {"plan": raw, "accuracy": each, **made()}
                STORED.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
            if found[title]["plan"] != raw:
                sys.exit(f"{title}: check.json is of another configuration; take it out")
            values = [100 * value for value in found[title]["accuracy"]]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            print(f"| {row} | {trust} | {statistics.fmean(values):.2f}{spread} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    rows = parser.parse_args().rows or list(ROWS)
    if unknown := set(rows) - set(ROWS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; expected of {', '.join(ROWS)}")
    main(rows)
