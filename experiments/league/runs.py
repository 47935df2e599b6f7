"""The league's cells, what is tried for each, and the runs that are stored."""

import json
import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

from experiments.made import made

import fedpact
from fedpact import algorithms
from fedpact.algorithms.wrappers.base import Method
from fedpact.common.errors import FedpactError
from fedpact.common.files import write_whole
from fedpact.privacy.ledger.receipt import receipt
from fedpact.simulation.simulate import simulate

HERE = Path(__file__).parent
EPSILONS: Final = (1.0, 2.0, 4.0, 8.0)
SEEDS: Final = (1, 2, 3)
CHOICE_SEED: Final = 100
TAUS: Final = (1, 4)
ROOM: Final = 1.15
"""How much more a round may send before it costs rounds: a small model's names and numbers."""
FACTORS: Final = (0.25, 1.0, 4.0)
"""What is tried for every cell: each τ with each of these steps, over τ, in units of the data's."""


@dataclass(frozen=True)
class Data:
    """A data set of the league. rate: the step that the factors are of. rounds: FedAvg's.

    head: the size of the model's bias, FedRep's head; 1 where the model has none.
    """

    title: str
    plan: str
    overrides: tuple[str, ...]
    rounds: int
    rate: float
    choice: tuple[str, ...] = ("partition.held_out=0.25",)
    head: int = 10


DATA: Final = {
    "heart": Data(
        "Heart disease, FLamby's four hospitals and test parts, logistic regression, δ = 10⁻⁴",
        "heart/heart.toml",
        (),
        20,
        0.5,
        head=1,
    ),
    "adult": Data(
        "Adult, ten sites by Dirichlet(1) over the labels, logistic regression, δ = 10⁻⁵",
        "adult/adult.toml",
        ("partition.beta=1.0", "partition.held_out=0.25"),
        20,
        2.0,
        head=2,
    ),
    "fashion_mnist": Data(
        "Fashion-MNIST, scattering features, ten sites of two labels each, δ = 10⁻⁵",
        "features/fashion_mnist.toml",
        ("server={}", "partition.held_out=0.25"),
        20,
        500.0,
    ),
    "cifar10": Data(
        "CIFAR-10, patch features, ten sites of two labels each, δ = 10⁻⁵",
        "features/cifar10.toml",
        ("server={}", "partition.held_out=0.25"),
        20,
        200.0,
    ),
}

_NAMED: Final = {
    "fedavg, automatic clipping": ("fedavg", ("privacy.mode=automatic",)),
    "FedAvgM": ("fedavg", ("server.optimiser=momentum",)),
    "FedAdam": ("fedavg", ("server.optimiser=adam",)),
    "FedYogi": ("fedavg", ("server.optimiser=yogi",)),
    "each site alone": ("mr_mtl", ("settings.proximal=0",)),
}


@cache
def entrants() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return entrant -> its algorithm and overrides: all with a private form, FedAvg first."""
    own = {
        name: (name, tuple[str, ...]())
        for name in ("fedavg", *algorithms.names())
        if not Method(name).facts.plain_only
    }
    return own | _NAMED


@dataclass(frozen=True)
class Cell:
    """An entrant on a data set at an ε."""

    data: str
    entrant: str
    epsilon: float

    def plan(self, seed: int, rounds: int, tau: int, factor: float) -> fedpact.Plan:
        """Return one run's plan. The step is shared out over the local steps."""
        of, (algorithm, own) = DATA[self.data], entrants()[self.entrant]
        known = algorithms.load(algorithm).Settings.model_fields
        set_ = {"learning_rate": of.rate * factor / tau, "local_steps": tau, "head": of.head}
        given = [f"settings.{key}={value}" for key, value in set_.items() if key in known]
        return fedpact.Plan.read(
            HERE.parent / of.plan,
            [
                *of.overrides,
                *(of.choice if seed == CHOICE_SEED else ()),
                f"algorithm={algorithm}",
                "settings={}",
                *given,
                *own,
                f"privacy.epsilon={self.epsilon}",
                f"rounds={rounds}",
                f"seed={seed}",
                "run.evaluate_every=1000",
                "run.workers=1",
            ],
        )

    def ways(self) -> list[tuple[int, float]]:
        """Return what is tried: τ and factor; one τ where the algorithm has none to set."""
        known = algorithms.load(entrants()[self.entrant][0]).Settings.model_fields
        return list(product(TAUS if "local_steps" in known else (1,), FACTORS))


def cells(chosen: list[str]) -> Iterator[Cell]:
    """Yield the cells, data set by data set, each ε with all entrants before the next."""
    for data, epsilon, entrant in product(chosen or DATA, EPSILONS, entrants()):
        yield Cell(data, entrant, epsilon)


class Results:
    """One data set's results on the disk, by key."""

    def __init__(self, data: str, folder: Path = HERE) -> None:
        self.data, self._path = data, folder / f"results-{data}.json"
        self.found: dict[str, Any] = (
            json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        )

    def keep(self, key: str, value: dict[str, Any]) -> dict[str, Any]:
        """Store a result, and by what it was made."""
        self.found[key] = value = value | {"made": made()}
        text = json.dumps(self.found, indent=0, sort_keys=True, ensure_ascii=False) + "\n"
        write_whole(self._path, text.encode(), private=False)
        return value

    def bytes_of(self, entrant: str) -> float:
        """Return the bytes of one round: a number that follows from public ones."""
        key = f"{entrant} bytes"
        if key not in self.found:
            cell = Cell(self.data, entrant, EPSILONS[-1])
            # With the smallest step: larger ones may be refused. Bytes hardly depend on it.
            _, done = _carried_out(cell.plan(CHOICE_SEED, 2, max(TAUS), min(FACTORS)))
            sent = done["bytes_up"] + done["bytes_down"]
            self.keep(key, {"bytes": sent / max(1, done["rounds"])})
        return self.found[key]["bytes"]

    def rounds(self, entrant: str) -> int:
        """Return as many rounds as send no more than FedAvg's."""
        share = ROOM * self.bytes_of("fedavg") / self.bytes_of(entrant)
        return max(1, math.floor(DATA[self.data].rounds * min(1.0, share)))

    def of(self, cell: Cell, seed: int, way: tuple[int, float]) -> dict[str, Any]:
        """Return a run's figures; carry it out where they are missing."""
        key = key_of(cell, seed, way)
        if key not in self.found:
            plan = cell.plan(seed, self.rounds(cell.entrant), *way)
            figures, _ = _carried_out(plan)
            self.keep(key, {"mean": figures["mean"]} if seed == CHOICE_SEED else figures)
        return self.found[key]

    def chosen(self, cell: Cell) -> tuple[int, float]:
        """Return the τ and factor of the best mean on what is set aside; those refused are last.

        Raises FedpactError: all are refused.
        """
        errors = list[FedpactError]()
        for way in cell.ways():
            try:
                self.of(cell, CHOICE_SEED, way)
            except FedpactError as error:
                errors.append(error)
                self.keep(key_of(cell, CHOICE_SEED, way), {"mean": -1.0, "refused": str(error)})
        if len(errors) == len(cell.ways()):
            raise errors[0]
        return max(cell.ways(), key=lambda way: self.of(cell, CHOICE_SEED, way)["mean"])

    def refused(self, cell: Cell, error: FedpactError) -> None:
        """Store why a cell has no run."""
        self.keep(f"{cell.entrant} ε={cell.epsilon:g} refused", {"why": str(error)})

    def runs(self, cell: Cell) -> list[dict[str, Any]]:
        """Return what is stored of a cell's figures, one a seed, without carrying anything out.

        Raises LookupError: something is missing.
        """
        way = max(cell.ways(), key=lambda w: self.found[key_of(cell, CHOICE_SEED, w)]["mean"])
        return [self.found[key_of(cell, seed, way)] | {"way": way} for seed in SEEDS]

    def whole(self, cell: Cell) -> bool:
        """Whether nothing of a cell is missing."""
        try:
            return bool(self.why_refused(cell) or self.runs(cell))
        except LookupError:
            return False

    def why_refused(self, cell: Cell) -> str:
        """Return why a cell has no run; empty where none was refused."""
        return self.found.get(f"{cell.entrant} ε={cell.epsilon:g} refused", {}).get("why", "")


def key_of(cell: Cell, seed: int, way: tuple[int, float]) -> str:
    """Return what a run's result is stored under."""
    return f"{cell.entrant} ε={cell.epsilon:g} τ={way[0]} η={way[1]:g} seed={seed}"


def _carried_out(plan: fedpact.Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Carry a run out; return what is kept of it, and its summary."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        done = simulate(plan, run)
        last = done.records[-1]
        accuracies = [score.accuracy for score in last.scores.values()]
        spent = [
            round(next(iter(receipt(path)["runs"].values()))["epsilon_spent"], 6)
            for path in sorted((run / "sites").glob("*/ledger*"))
            if path.suffix in (".jsonl", ".db", ".sqlite")
        ]
        kept = {
            "mean": round(statistics.fmean(accuracies), 5),
            "worst": round(min(accuracies), 5),
            "rounds": done.summary["rounds"],
            "spent": spent,
            **({"diverged": last.round} if done.summary["status"] == "diverged" else {}),
        }
        return kept, dict(done.summary)
