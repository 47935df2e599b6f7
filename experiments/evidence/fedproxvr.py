"""FedProxVR, Tables 1 and 2, Figures 2 and 3: variance-reduced proximal solvers and FedAvg.

Without privacy.

η is what the authors' released scripts set: 0.005 at τ = 10, 0.003 at τ = 20, 5e-4 for the CNN.
"""

from dataclasses import dataclass
from typing import Final

from experiments.evidence.runs import Run, overrides

_BASE: Final = "evidence/fedproxvr.toml"
_MNIST: Final = (
    *(("data", "mnist"), ("model", "cnn_padded"), ("sites", 10)),
    *(("partition.smallest", 454), ("partition.largest", 3939)),
)


@dataclass(frozen=True)
class Row:
    """A row as it is printed. beta: β, of which the released scripts make no use.

    printed: 0 for a curve of a figure.
    """

    method: str
    local_steps: int
    beta: int
    proximal: float
    batch: int
    rounds: int
    printed: float = 0.0


CONVEX: Final = (
    Row("fedavg", 10, 10, 0.0, 16, 983, 84.02),
    Row("svrg", 20, 10, 0.1, 32, 895, 84.12),
    Row("sarah", 20, 5, 0.1, 32, 965, 84.21),
)
CNN: Final = (
    Row("fedavg", 20, 10, 0.0, 16, 995, 93.52),
    Row("svrg", 20, 10, 0.01, 16, 970, 94.06),
    Row("sarah", 20, 9, 0.01, 32, 958, 93.75),
)
# What Figures 2 (β = 5 and 7) and 3 have beside the tables' runs. Figure 3's β and τ are not in the
# paper's text: here they are Table 2's.
CURVES: Final = (
    Row("fedavg", 10, 5, 0.0, 32, 900),
    Row("svrg", 10, 5, 0.1, 32, 900),
    Row("sarah", 10, 5, 0.1, 32, 900),
    Row("fedavg", 20, 7, 0.0, 32, 900),
)
CURVES_CNN: Final = (
    Row("fedavg", 20, 10, 0.0, 64, 900),
    Row("svrg", 20, 10, 0.01, 64, 900),
    Row("sarah", 20, 9, 0.01, 64, 900),
)


def run(row: Row) -> Run:
    """Return a row's run, on F-MNIST and 100 devices, or on MNIST and 10 with the CNN."""
    convex = row in CONVEX + CURVES
    rate = (0.005 if row.local_steps == 10 else 0.003) if convex else 5e-4
    reduced = row.method != "fedavg"
    own = (("settings.solver", row.method), ("settings.proximal", row.proximal))
    settings = (
        *(() if convex else _MNIST),
        *(("algorithm", "fedproxvr" if reduced else "fedavg"), ("batch_size", float(row.batch))),
        *(("rounds", row.rounds), ("settings.local_steps", row.local_steps)),
        ("settings.learning_rate", rate),
        *(own if reduced else ()),
    )
    sites, records = (100, 15_000) if convex else (10, 13_000)
    batches = sites * row.local_steps * row.batch * (2 if reduced else 1)
    cost = row.rounds * (batches + (records if reduced else 0.0))
    kind = "logistic" if convex else "cnn"
    name = f"{row.method} {kind}"
    name += "" if row.printed else f" tau={row.local_steps} B={row.batch}"
    cost *= 1 if convex else 1.6  # the padded network's gradient, without a clip
    return Run("fedproxvr", name, _BASE, overrides(settings), (row.rounds,), cost, kind)
