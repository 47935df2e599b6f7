"""Is it worth joining? Each site alone, federated, tuned inside the site, and MR-MTL.

    FEDPACT_DATA=... python experiments/joining/run.py fashion_mnist
    FEDPACT_DATA=... python experiments/joining/run.py fashion_mnist_features
    FEDPACT_DATA=... python experiments/joining/run.py heart_disease

Resumable: every result is stored in results-NAME.json as it comes, and not computed again. Rounds,
η and λ are those of the best mean over sites, λ = 0 (each site alone, under the same privacy) apart
from the others. Heart disease: chosen by choose.py on records that are set aside from training;
figures are of FLamby's test parts, ten runs which differ by their noise. Fashion-MNIST: chosen at
seed 0; figures are of other seeds, each with another partition and other noise. Federated, local
and MR-MTL have the same (ε, δ), and at equal rounds the same events and noise.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
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

    seeds: of the figures. ways, weights: (rounds, η) and λ that are tried at seed 0, where no file
    says what was chosen. with_sites: the seeds of which joining is told at each site, tuned models
    among it.
    """

    tables: dict[str, Any]
    delta: float
    seeds: Sequence[int]
    with_sites: Sequence[int] = ()
    ways: Sequence[tuple[int, float]] = ()
    weights: Sequence[float] = ()


_FASHION: dict[str, Any] = {
    "data": "fashion_mnist",
    "sites": 10,
    "sampling_rate": 0.1,
    "partition": {"kind": "dirichlet", "beta": 0.3, "held_out": 0.2},
}
_HEART: dict[str, Any] = {
    "data": "heart_disease_flamby",
    "sites": 4,
    "sampling_rate": 1.0,
    "partition": {"kind": "natural", "held_out": "own"},
    "logistic": {"start": "zero"},
}
_FEATURES: dict[str, Any] = {"features": {"kind": "scattering"}, "logistic": {"bias": 0.3}}
STUDIES = {
    "fashion_mnist": Study(
        _FASHION, 1e-5, (1, 2, 3), (), ((100, 1.0),), (0.001, 0.003, 0.01, 0.03)
    ),
    "fashion_mnist_features": Study(
        {**_FASHION, **_FEATURES}, 1e-5, (1, 2, 3), (), ((100, 4.0),), (0.003, 0.01)
    ),
    "heart_disease": Study(_HEART, 1e-4, range(1, 11), range(1, 4)),
}


@dataclass(frozen=True)
class Setting:
    """An entrant at an ε, with its rounds, its η, and its λ and κ, 0 where it has none."""

    entrant: str
    epsilon: float
    rounds: int
    rate: float
    weight: float = 0.0
    noise: float = 0.0

    def plan(self, tables: dict[str, Any], delta: float, seed: int) -> Plan:
        """Return one run's plan."""
        settings = {"learning_rate": self.rate}
        if self.entrant != "fedavg":
            settings |= {"proximal": self.weight, "proximal_noise": self.noise}
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
        held = f"κ={self.noise:g}" if self.noise else f"λ={self.weight:g}"
        return f"{self.entrant} {held} η={self.rate:g} T={self.rounds} ε={self.epsilon:g}"


class Results:
    """A study with a JSON file of what was found, by key."""

    def __init__(self, name: str) -> None:
        self._path, self._study = HERE / f"results-{name}.json", STUDIES[name]
        self._found, self._chosen = read(self._path), read(HERE / f"choice-{name}.json")
        self._alones = SiteModels()

    def of(self, setting: Setting, seed: int) -> dict[str, Any]:
        """Return one run's figures."""
        study, key = self._study, f"{setting} seed={seed}"
        if key not in self._found:
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder) / "run"
                plan = setting.plan(study.tables, study.delta, seed)
                found = simulate(plan, run).summary["fairness"]
                figures: dict[str, Any] = {k: found[k] for k in ("mean", "worst_accuracy")}
                if seed in study.with_sites:
                    figures["sites"] = of_run(run, known=self._alones)["sites"]
            self._found[key] = figures
            self._path.write_text(json.dumps(self._found, indent=1, sort_keys=True) + "\n")
        return self._found[key]

    def choice(self, entrant: str, epsilon: float) -> Setting:
        """Return the setting of the best mean over sites: as the file says, or at seed 0."""
        if self._chosen:
            one = self._chosen[f"{entrant} ε={epsilon:g}"]
            return Setting(entrant, epsilon, one["rounds"], one["rate"], one["weight"])
        weights = self._study.weights if entrant == "mr_mtl" else (0.0,)
        tried = [Setting(entrant, epsilon, *w, v) for w, v in product(self._study.ways, weights)]
        if len(tried) == 1:
            return tried[0]
        return max(tried, key=lambda one: self.of(one, 0)["mean"])


def read(path: Path) -> dict[str, Any]:
    """Return what a file holds, nothing where there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


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
            found = [results.of(setting, seed) for seed in seeds]
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
