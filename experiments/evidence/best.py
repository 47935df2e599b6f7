"""The best setting that is known here at the papers' (ε, δ) and rounds: features, a linear model.

experiments/features has the configurations, and how their settings were chosen.
"""

import json
from pathlib import Path
from typing import Final

from experiments.evidence.cells import Book, mean_text
from experiments.evidence.runs import Run, overrides

ROUNDS: Final = {
    "own": {"fashion_mnist": 50, "cifar10": 60, "mnist": 70},
    "sum": {"fashion_mnist": 100, "cifar10": 158, "mnist": 100},
}
_SUM: Final = (
    *(("privacy.trust", "sum"), ("privacy.honest", 9)),
    ("secure_aggregation.threshold", 10),
)
# See experiments/features: a shorter clip; and with less noise more rounds pay.
_OF_OWN: Final[dict[str, tuple[tuple[str, object], ...]]] = {
    "fashion_mnist": (("privacy.clip", 0.05), ("settings.learning_rate", 2000)),
    "mnist": (("privacy.clip", 0.05), ("settings.learning_rate", 2000)),
}
_OF_SUM: Final[dict[str, tuple[tuple[str, object], ...]]] = {
    "fashion_mnist": (("settings.learning_rate", 400),),
    "cifar10": (("settings.learning_rate", 200), ("server.momentum", 0.9)),
    "mnist": (("settings.learning_rate", 500),),
}
_FEATURES: Final = Path(__file__).parents[1] / "features" / "results"
_INSIDE: Final = '{kind = "dirichlet", beta = 0.1, held_out = 0.25}'


def on_test(data: str, epsilon: float, trust: str) -> Run:
    """Return the run for an ε of ALI-DPFL's tables. trust: whose noise, "own" or "sum"."""
    return _run("features", data, epsilon, trust, ())


def inside(data: str, epsilon: float, trust: str) -> Run:
    """Return the run on FedFDP's data: both parts together, Dirichlet(0.1), 25 % held out."""
    where = (("data", f"{data}+test"), ("partition", _INSIDE))
    return _run("features-inside", data, epsilon, trust, where)


def cell(book: Book, data: str, epsilon: float, trust: str) -> str:
    """Return the cell of an ε of ALI-DPFL's tables; ε = 2 is measured in experiments/features."""
    if epsilon != 2.0:
        run = on_test(data, epsilon, trust)
        return book.accuracy(run, run.looks[-1])
    name = data if trust == "own" else f"{data}-sum"
    found = of_features(name)
    command = f"`python -m experiments.features.run {name}`"
    return mean_text(found, 2) if found else book.not_run(f"features {name}", command)


def accuracies(book: Book, data: str, epsilon: float, trust: str) -> list[float]:
    """Return what that cell is of: accuracies in per cent, one a seed."""
    if epsilon == 2.0:
        return of_features(data if trust == "own" else f"{data}-sum")
    run = on_test(data, epsilon, trust)
    return [100 * value for value in book.values(run, run.looks[-1], "accuracy")]


def of_features(name: str) -> list[float]:
    """Return the accuracies in per cent that experiments/features has stored, one a seed."""
    path = _FEATURES / f"{name}.json"
    if not path.exists():
        return []
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return [100 * run["accuracy"] for run in runs.values()]


def _run(
    group: str, data: str, epsilon: float, trust: str, where: tuple[tuple[str, object], ...]
) -> Run:
    rounds = ROUNDS[trust][data]
    shared = _OF_OWN.get(data, ())
    if trust == "sum":
        shared = (*_SUM, *_OF_SUM[data], ("rounds", rounds))
    given = (("privacy.epsilon", epsilon), *where, *shared)
    name = f"{data} eps={epsilon:g} {trust}"
    base = f"features/{data}.toml"
    return Run(group, name, base, overrides(given), (rounds,), rounds * 60_000.0, "features")
