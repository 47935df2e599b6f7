"""Is it worth joining? Each site alone, federated, tuned inside the site, and MR-MTL.

    FEDPACT_DATA=... python experiments/joining/run.py fashion_mnist
    FEDPACT_DATA=... python experiments/joining/run.py fashion_mnist_features
    FEDPACT_DATA=... python experiments/joining/run.py heart_disease

Resumable: every result is stored in results-NAME.json as it comes, and not computed again. Rounds,
η and λ are chosen as the best mean over sites, λ = 0 (each site alone, under the same privacy)
apart from the others. Heart disease: on a quarter of the training records, set aside in four cuts;
figures are of FLamby's test parts, ten runs which differ by their noise. Fashion-MNIST: at seed 0;
figures are of other seeds, each with another partition and other noise. Federated, local and MR-MTL
have the same events and noise at each ε.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from fedpact.engines.joining import SiteModels, of_run
from fedpact.engines.simulation import simulate
from fedpact.plan import Plan

HERE = Path(__file__).parent
EPSILONS = (0.5, 1.0, 2.0)
ENTRANTS = ("fedavg", "local", "mr_mtl")


@dataclass(frozen=True)
class Study:
    """What is compared.

    ways, weights: (rounds, η) and λ that are tried, at these cuts, with `aside`. with_sites: the
    seeds of which joining is told at each site, tuned models among it.
    """

    tables: dict[str, Any]
    delta: float
    ways: Sequence[tuple[int, float]]
    weights: Sequence[float]
    cuts: Sequence[int]
    seeds: Sequence[int]
    with_sites: Sequence[int]
    aside: dict[str, Any] = field(default_factory=dict[str, Any])


_FASHION: dict[str, Any] = {
    "data": "fashion_mnist",
    "sites": 10,
    "sampling_rate": 0.1,
    "partition": {"kind": "dirichlet", "beta": 0.3, "held_out": 0.2},
}
STUDIES = {
    "fashion_mnist": Study(
        _FASHION, 1e-5, ((100, 1.0),), (0.001, 0.003, 0.01, 0.03), (0,), (1, 2, 3), (1,)
    ),
    "fashion_mnist_features": Study(
        {**_FASHION, "features": {"kind": "scattering"}, "logistic": {"bias": 0.3}},
        1e-5,
        ((100, 4.0),),
        (0.003, 0.01),
        (0,),
        (1, 2, 3),
        (),
    ),
    "heart_disease": Study(
        {
            "data": "heart_disease_flamby",
            "sites": 4,
            "sampling_rate": 1.0,
            "partition": {"kind": "natural", "held_out": "own"},
        },
        1e-4,
        ((10, 0.2), (10, 0.5), (10, 1.0), (30, 0.2)),
        (0.1, 0.3, 1.0),
        range(100, 104),
        range(1, 11),
        range(1, 4),
        {"partition": {"kind": "natural", "held_out": 0.25}},
    ),
}


@dataclass(frozen=True)
class Setting:
    """An entrant at an ε, with its rounds, its η, and its λ, 0 where it has none."""

    entrant: str
    epsilon: float
    rounds: int
    rate: float
    weight: float = 0.0

    def plan(self, tables: dict[str, Any], delta: float, seed: int) -> Plan:
        """Return one run's plan."""
        settings = {"learning_rate": self.rate}
        if self.entrant != "fedavg":
            settings["proximal"] = self.weight
        return Plan.parse(
            {
                **tables,
                "rounds": self.rounds,
                "run": {"evaluate_every": 1000, "workers": 1},
                "seed": seed,
                "algorithm": "fedavg" if self.entrant == "fedavg" else "mr_mtl",
                "settings": settings,
                "privacy": {"epsilon": self.epsilon, "delta": delta, "clip": 1.0},
            }
        )

    def __str__(self) -> str:
        return (
            f"{self.entrant} λ={self.weight:g} η={self.rate:g} T={self.rounds} ε={self.epsilon:g}"
        )


class Results:
    """A study with a JSON file of what was found, by key."""

    def __init__(self, name: str) -> None:
        self._path, self._study = HERE / f"results-{name}.json", STUDIES[name]
        text = self._path.read_text() if self._path.exists() else "{}"
        self._found: dict[str, Any] = json.loads(text)
        self._alones = SiteModels()

    def of(self, setting: Setting, seed: int, *, chosen: bool) -> dict[str, Any]:
        """Return one run's figures. chosen: of what was chosen; else on records set aside."""
        study = self._study
        tables = study.tables if chosen else {**study.tables, **study.aside}
        key = f"{setting} seed={seed}{'' if chosen else ' choice'}"
        if key not in self._found:
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder) / "run"
                found = simulate(setting.plan(tables, study.delta, seed), run).summary["fairness"]
                figures: dict[str, Any] = {k: found[k] for k in ("mean", "worst_accuracy")}
                if chosen and seed in study.with_sites:
                    figures["sites"] = of_run(run, known=self._alones)["sites"]
            self._found[key] = figures
            self._path.write_text(json.dumps(self._found, indent=1, sort_keys=True) + "\n")
        return self._found[key]

    def choice(self, entrant: str, epsilon: float) -> Setting:
        """Return the setting of the best mean over sites, on records that are set aside."""
        study = self._study
        weights = study.weights if entrant == "mr_mtl" else (0.0,)
        tried = dict[Setting, float]()
        for way, weight in product(study.ways, weights):
            one = Setting(entrant, epsilon, *way, weight)
            if len(study.ways) * len(weights) == 1:
                return one
            each = [self.of(one, seed, chosen=False)["mean"] for seed in study.cuts]
            tried[one] = statistics.fmean(each)
        return max(tried, key=lambda one: tried[one])


def told(values: Sequence[float]) -> str:
    """Return values' mean ± standard deviation, in percent."""
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{spread}"


def used(figures: dict[str, Any]) -> list[float]:
    """Return what each site has in the end: tuned where its own validation says so."""
    return [s["tuned"] if s["tune"] else s["federated"] for s in figures["sites"].values()]


def main(name: str) -> None:
    """Compute what is missing and print the table."""
    results, seeds = Results(name), STUDIES[name].seeds
    for epsilon in EPSILONS:
        means = dict[str, list[float]]()
        for entrant in ENTRANTS:
            setting = results.choice(entrant, epsilon)
            found = [results.of(setting, seed, chosen=True) for seed in seeds]
            means[entrant] = [each["mean"] for each in found]
            cells = [told(means[entrant]), told([each["worst_accuracy"] for each in found])]
            ends = [used(each) for each in found if "sites" in each]
            if ends:
                cells += [told([statistics.fmean(e) for e in ends]), told([min(e) for e in ends])]
            print(f"| {setting} | {' | '.join(cells)} |", flush=True)
        more = [a - b for a, b in zip(means["mr_mtl"], means["local"], strict=True)]
        above = sum(each > 0 for each in more)
        print(
            f"  mr_mtl less local, mean over sites: {told(more)}; above in {above} of {len(more)}"
        )


if __name__ == "__main__":
    main(sys.argv[1])
