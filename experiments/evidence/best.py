"""The best setting that is known here at the papers' (ε, δ) and rounds: features, a linear model.

experiments/features has the configurations, and how their settings were chosen.
"""

from typing import Final

from experiments.evidence.runs import Run, overrides

ROUNDS: Final = {"fashion_mnist": 50, "cifar10": 60, "mnist": 70}
_SUM: Final = (
    *(("privacy.trust", "sum"), ("privacy.honest", 9)),
    ("secure_aggregation.threshold", 10),
)
_INSIDE: Final = '{kind = "dirichlet", beta = 0.1, held_out = 0.25}'


def on_test(data: str, epsilon: float, trust: str) -> Run:
    """Return the run for an ε of ALI-DPFL's tables. trust: whose noise, "own" or "sum"."""
    return _run("features", data, epsilon, trust, ())


def inside(data: str, epsilon: float, trust: str) -> Run:
    """Return the run on FedFDP's data: both parts together, Dirichlet(0.1), 25 % held out."""
    where = (("data", f"{data}+test"), ("partition", _INSIDE))
    return _run("features-inside", data, epsilon, trust, where)


def _run(
    group: str, data: str, epsilon: float, trust: str, where: tuple[tuple[str, object], ...]
) -> Run:
    rounds = ROUNDS[data]
    given = (("privacy.epsilon", epsilon), *where, *(_SUM if trust == "sum" else ()))
    name = f"{data} eps={epsilon:g} {trust}"
    base = f"features/{data}.toml"
    return Run(group, name, base, overrides(given), (rounds,), rounds * 60_000.0, "features")
