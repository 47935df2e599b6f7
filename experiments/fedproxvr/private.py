"""Private FedProxVR beside DP-FedAvg at equal ε on a convex problem: when differences pay.

    python -m experiments.fedproxvr.private [SEEDS] [OUT] [ETA]

Logistic regression on the embedded digits, 5 alike sites, 20 rounds of 10 iterations at q = 0.05,
η = ETA (1), C = 1, μ = 0, the opening's noise three times a batch's. K is the bound of a difference
over the movement: small, it clips; large, it adds noise. A folder that has been begun is resumed,
run by run.
"""

import sys
from pathlib import Path
from typing import Any

import fedpact

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "svrg-K0.03": ("fedproxvr", {"solver": "svrg", "difference_bound": 0.03}),
    "svrg-K0.3": ("fedproxvr", {"solver": "svrg", "difference_bound": 0.3}),
    "sarah-K0.03": ("fedproxvr", {"solver": "sarah", "difference_bound": 0.03}),
}


def plans(rate: float = 1.0) -> dict[str, fedpact.Plan]:
    """Return the plans by name, three budgets of each method, all with the step size η = rate."""
    found = dict[str, fedpact.Plan]()
    for epsilon in (1.0, 2.0, 10.0):
        for name, (algorithm, settings) in METHODS.items():
            own = {"proximal": 0.0, "opening_noise": 3.0} if algorithm == "fedproxvr" else {}
            found[f"{name}-eps{epsilon:g}"] = fedpact.Plan.parse(
                {
                    "algorithm": algorithm,
                    "rounds": 20,
                    "sampling_rate": 0.05,
                    "settings": {"learning_rate": rate, "local_steps": 10, **own, **settings},
                    "partition": {"kind": "iid", "held_out": 0.1},
                    "privacy": {"epsilon": epsilon, "delta": 1e-5},
                    "run": {"evaluate_every": 5},
                }
            )
    return found


if __name__ == "__main__":
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else Path("runs") / "fedproxvr-private"
    rate = float(sys.argv[3]) if len(sys.argv) > 3 else 1.0
    fedpact.compare(plans(rate), seeds, out)
    print(out / "comparison.html")
