"""Is it worth joining? Each site alone, federated, tuned inside the site, and MR-MTL.

    FEDPACT_DATA=... python -m experiments.joining.run fashion_mnist
    FEDPACT_DATA=... python -m experiments.joining.run fashion_mnist_features
    FEDPACT_DATA=... python -m experiments.joining.run heart_disease

Resumable: every result is stored in results-NAME.json as it comes, and not computed again. Rounds,
η, λ and κ are chosen for each entrant by itself on records that are set aside from training, by
choose.py (heart disease) and choose_images.py (Fashion-MNIST, on partitions that no figure has);
choice-NAME.json has them. Heart disease: figures are of FLamby's test parts, ten runs which differ
by their noise. Fashion-MNIST: of records held out of training, each seed with another partition and
other noise. Federated, local and MR-MTL have the same (ε, δ).
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.made import made

from fedpact.plan import Plan
from fedpact.simulation.simulate import SiteModels, of_run, simulate

HERE = Path(__file__).parent
EPSILONS = (0.5, 1.0, 2.0)
ENTRANTS = ("fedavg", "local", "mr_mtl")


@dataclass(frozen=True)
class Study:
    """What is compared.

    seeds: of the figures. with_sites: those of which joining is told at each site, tuned models
    among it.
    """

    tables: dict[str, Any]
    delta: float
    seeds: Sequence[int]
    with_sites: Sequence[int] = ()


_FASHION: dict[str, Any] = {
    "data": "fashion_mnist",
    "sites": 10,
    "sampling_rate": 0.1,
    "partition": {"kind": "dirichlet", "beta": 0.3, "held_out": 0.2},
    "logistic": {"start": "zero"},
}
_HEART: dict[str, Any] = {
    "data": "heart_disease_flamby",
    "sites": 4,
    "sampling_rate": 1.0,
    "partition": {"kind": "natural", "held_out": "own"},
    "logistic": {"start": "zero"},
}
_FEATURES: dict[str, Any] = {
    **_FASHION,
    "features": {"kind": "scattering"},
    "logistic": {"bias": 0.3, "start": "zero"},
}
STUDIES = {
    "fashion_mnist": Study(_FASHION, 1e-5, range(1, 6)),
    "fashion_mnist_features": Study(_FEATURES, 1e-5, range(1, 4)),
    "heart_disease": Study(_HEART, 1e-4, range(1, 11), range(1, 4)),
}


@dataclass(frozen=True)
class Setting:
    """An entrant at an ε, with its rounds, its η, and its λ, κ and β, 0 where it has none."""

    entrant: str
    epsilon: float
    rounds: int
    rate: float
    weight: float = 0.0
    noise: float = 0.0
    decay: float = 0.0

    def plan(self, tables: dict[str, Any], delta: float, seed: int) -> Plan:
        """Return one run's plan."""
        settings = {"learning_rate": self.rate}
        if self.entrant != "fedavg":
            settings |= {"proximal": self.weight, "proximal_noise": self.noise}
            settings["average_decay"] = self.decay
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
        held += f" β={self.decay:g}" if self.decay else ""
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
        told = seed in study.with_sites
        if key not in self._found or (told and "sites" not in self._found[key]):
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder) / "run"
                plan = setting.plan(study.tables, study.delta, seed)
                found = simulate(plan, run).summary["fairness"]
                figures: dict[str, Any] = {k: found[k] for k in ("mean", "worst_accuracy")}
                if told:
                    figures["sites"] = of_run(run, known=self._alones)["sites"]
            self._found[key] = figures | {"made": made()}
            self._path.write_text(json.dumps(self._found, indent=1, sort_keys=True) + "\n")
        return self._found[key]

    def choice(self, entrant: str, epsilon: float) -> Setting:
        """Return what was chosen for an entrant at an ε."""
        one = self._chosen[f"{entrant} ε={epsilon:g}"]
        found = (one[key] for key in ("rounds", "rate", "weight"))
        more = (one.get(key, 0.0) for key in ("noise", "decay"))
        return Setting(entrant, epsilon, *found, *more)


def read(path: Path) -> dict[str, Any]:
    """Return what a file holds, nothing where there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def spread(values: Sequence[float]) -> str:
    """Return values' mean ± standard deviation, in percent."""
    more = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{more}"


def used(figures: dict[str, Any]) -> list[float]:
    """Return what each site has in the end: tuned where its own validation says so."""
    return [s["tuned"] if s["tune"] else s["federated"] for s in figures["sites"].values()]


def main(name: str) -> None:
    """Compute what is missing and print the table."""
    results, seeds = Results(name), STUDIES[name].seeds
    for epsilon in EPSILONS:
        found = dict[str, list[dict[str, Any]]]()
        for entrant in ENTRANTS:
            setting = results.choice(entrant, epsilon)
            found[entrant] = own = [results.of(setting, seed) for seed in seeds]
            cells = [spread([each[key] for each in own]) for key in ("mean", "worst_accuracy")]
            ends = [used(each) for each in own if "sites" in each]
            if ends:
                cells += [spread([statistics.fmean(e) for e in ends])]
                cells += [spread([min(e) for e in ends])]
            print(f"| {setting} | {' | '.join(cells)} |", flush=True)
        for other, key in (("local", "mean"), ("fedavg", "worst_accuracy")):
            more = [a[key] - b[key] for a, b in zip(found["mr_mtl"], found[other], strict=True)]
            above = sum(each > 0 for each in more)
            print(f"  mr_mtl less {other}, {key}: {spread(more)}; above in {above} of {len(more)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=STUDIES)
    main(parser.parse_args().name)
