"""Draw whose noise protects: python -m experiments.noise_for_the_sum.chart

Reads the stored results and writes noise.svg: one panel for each model and ε, a dot for each run's
test accuracy, by whose noise and partition.
"""

import json
import statistics
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).parent
NOISES = ("own", "sum, h = 7", "sum, h = 9", "curator")
PLACES = {"two labels": "o", "dirichlet(0.3)": "s", "all records": "D"}
MODELS = ("logistic", "cnn")
EPSILONS = (1.0, 2.0)


def main() -> None:
    """Draw the stored results."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(len(MODELS), len(EPSILONS), sharex=True, sharey="row")
    for row, model in zip(panels, MODELS, strict=True):
        found = json.loads((HERE / f"results-{model}.json").read_text())
        for axes, epsilon in zip(row, EPSILONS, strict=True):
            for side, (place, marker) in zip((-0.12, 0.12, 0.0), PLACES.items(), strict=True):
                seen = False
                for x, noise in enumerate(NOISES):
                    begins = f"{noise} {epsilon} {place} "
                    runs = [100 * run["test"] for key, run in found.items() if begins in key]
                    if not runs:
                        continue
                    label = None if seen else place
                    seen = True
                    axes.plot([x + side] * len(runs), runs, marker, color="0.6", markersize=4)
                    axes.plot(x + side, statistics.fmean(runs), marker, color="C0", label=label)
            axes.set_title(f"{model}, ε = {epsilon:g}", fontsize="medium")
            axes.set_xticks(range(len(NOISES)), NOISES)
        row[0].set_ylabel("test accuracy, %")
    panels[0][0].legend(fontsize="small")
    figure.savefig(HERE / "noise.svg")


if __name__ == "__main__":
    main()
