"""Draw a comparison's curves: python -m experiments.figure FOLDER FIGURE.svg [loss|accuracy|psi]

FOLDER is what fedpact.compare wrote. One line an entry: the mean over its seeds, round by round.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure


def curve(entry: Path, quantity: str) -> tuple[list[int], list[float]]:
    """Return the evaluated rounds and the mean of a quantity over the entry's seeds."""
    found = defaultdict[int, list[float]](list)
    for run in sorted(entry.glob("seed-*")):
        for line in (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record[quantity] is not None:
                found[record["round"]].append(record[quantity])
    rounds = sorted(found)
    return rounds, [sum(found[r]) / len(found[r]) for r in rounds]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path, metavar="FIGURE.svg")
    parser.add_argument(
        "quantity", nargs="?", choices=("loss", "accuracy", "psi"), default="accuracy"
    )
    folder, target, quantity = vars(parser.parse_args()).values()
    if not (folder / "comparison.json").exists():
        parser.error(f"{folder} holds no comparison.json: name what fedpact.compare wrote")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for place, entry in enumerate(sorted(path for path in folder.iterdir() if path.is_dir())):
        # Ten colours, then the same ones dashed.
        style = "-" if place < 10 else "--"
        axes.plot(*curve(entry, quantity), style, marker=".", label=entry.name)
    axes.set_xlabel("round")
    axes.set_ylabel(quantity)
    if quantity != "accuracy":
        axes.set_yscale("log")
    axes.legend(fontsize="small")
    figure.savefig(target)
