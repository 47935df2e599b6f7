"""Draw a table's row: python experiments/ali_dpfl/figure.py FOLDER FIGURE.svg

FOLDER is what table2.py wrote. Left: final accuracy of each entry, mean and standard deviation over
its seeds. Right: the τ that ALI chose, round by round, a line a seed.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def rounds(run: Path) -> list[dict[str, Any]]:
    """Return a run's records, round 0 first."""
    lines = (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    folder, target = map(Path, sys.argv[1:3])
    entries = {
        path.name: [rounds(run) for run in sorted(path.glob("seed-*"))]
        for path in sorted(folder.iterdir())
        if path.is_dir()
    }
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, runs in enumerate(entries.values()):
        final = [100 * run[-1]["accuracy"] for run in runs]
        spread = statistics.stdev(final) if len(final) > 1 else 0.0
        left.errorbar(place, statistics.mean(final), spread, fmt="o", capsize=4)
    names = [name.replace("tau", "τ = ").replace("ali", "ALI") for name in entries]
    left.set_xticks(range(len(entries)), names)
    left.set_ylabel("accuracy (%)")
    for seed, run in enumerate(entries["ali"]):
        right.step(
            [record["round"] for record in run[1:]],
            [record["steps"] for record in run[1:]],
            where="post",
            label=f"seed {seed}",
        )
    right.set_xlabel("round")
    right.set_ylabel("τ that ALI chose")
    right.legend(fontsize="small")
    figure.savefig(target)
