"""FedProxVR on synthetic(0,0): what μ does, and how many rounds each solver needs.

    python -m experiments.fedproxvr.proximal [SEEDS] [OUT]

100 devices, B = 1, τ = 20, η = 0.3, 100 rounds for every entry: FedAvg, SVRG and SARAH at several
μ. A folder that has been begun is resumed, run by run.
"""

import sys
from pathlib import Path

import fedpact

BASE = Path(__file__).parent / "synthetic.toml"
PROXIMAL = (0, 1, 5, 20, 100)


def plans() -> dict[str, fedpact.Plan]:
    """Return the plans by name."""
    found = {
        "fedavg": fedpact.Plan.read(
            BASE, ["algorithm=fedavg", "settings={learning_rate = 0.3, local_steps = 20}"]
        )
    }
    for solver in ("svrg", "sarah"):
        for mu in PROXIMAL:
            found[f"{solver}-{mu}"] = fedpact.Plan.read(
                BASE, [f"settings.solver={solver}", f"settings.proximal={mu}"]
            )
    return found


if __name__ == "__main__":
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else Path("runs") / "fedproxvr-synthetic"
    fedpact.compare(plans(), seeds, out)
    print(out / "comparison.html")
