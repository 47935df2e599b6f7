"""Which rounds, η and λ suit Fashion-MNIST, found on records that are set aside from training.

    FEDPACT_DATA=... python -m experiments.joining.choose_images fashion_mnist       (20 minutes)
    FEDPACT_DATA=... python -m experiments.joining.choose_images fashion_mnist_features

Partitions are of seeds that no figure has, and of each site's training records a quarter is set
aside. Logistic regression from zero on Poisson batches with C = 1; all weights at equal rounds and
η have the same batches and noise, side by side. Weights are (λ, κ) of `mr_mtl`: (0, 0) is each site
alone under the same privacy, an infinite λ the federated model. Own models are the last ones, or
averages of theirs with a decay β. What is chosen is written to choice-NAME.json, and the best mean
of each weight and β to tried-NAME.json.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
import torch
from experiments.joining.run import EPSILONS, STUDIES, Setting
from experiments.made import made
from torch import Tensor

from fedpact.data.partition import make_partition
from fedpact.privacy.accounting.accountant import Budget, SampledGaussian
from fedpact.privacy.accounting.calibration import smallest_scale
from fedpact.simulation.setup import SimulationSetup

HERE = Path(__file__).parent
SEEDS: Final = {"fashion_mnist": (11, 12), "fashion_mnist_features": (11,)}
"""Study -> the partitions."""
WAYS: Final = {
    "fashion_mnist": ((100, 0.3), (100, 1.0), (300, 0.3), (300, 1.0), (300, 3.0)),
    "fashion_mnist_features": ((100, 1.0), (100, 4.0), (100, 16.0)),
}
"""Study -> rounds and η that are tried."""
WEIGHTS: Final[dict[str, tuple[tuple[float, float], ...]]] = {
    "fedavg": ((np.inf, 0.0),),
    "local": ((0.0, 0.0),),
    "mr_mtl": (
        *((weight, 0.0) for weight in (0.01, 0.03)),
        *((0.0, noise) for noise in (30.0, 60.0, 100.0, 200.0)),
    ),
}
SIDE_BY_SIDE: Final = [(who, *weight) for who, weights in WEIGHTS.items() for weight in weights]
DECAYS: Final = (0.0, 0.99)
Parts = list[tuple[Tensor, Tensor]]


class Records:
    """A study's records, each with its bias at the end, and any seed's cut of them."""

    def __init__(self, name: str) -> None:
        study = STUDIES[name]
        self._plan = Setting("fedavg", 1.0, 1, 1.0).plan(study.tables, study.delta, 0)
        self._data = SimulationSetup.of(self._plan).dataset
        x = self._data.x.flatten(1)
        bias = torch.full((len(x), 1), study.tables.get("logistic", {}).get("bias", 1.0))
        self._x = torch.cat([x, bias], 1)

    def cut(self, seed: int) -> tuple[Parts, Parts]:
        """Return each site's records: to train on, and set aside."""
        plan, rng = self._plan, np.random.default_rng(seed)
        partition = make_partition(self._data, plan.partition, plan.sites, seed)
        trained, aside = Parts(), Parts()
        for places in partition.train.values():
            own = torch.from_numpy(rng.permutation(places))
            some = len(own) // 4
            aside.append((self._x[own[:some]], self._data.y[own[:some]]))
            trained.append((self._x[own[some:]], self._data.y[own[some:]]))
        return trained, aside


def gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the sums [v, 10, d] of the gradients at each w of the softmax, each clipped to 1."""
    v, k, d = w.shape
    shares = (x @ w.reshape(v * k, d).T).reshape(len(y), v, k).softmax(-1)
    shares[torch.arange(len(y)), :, y] -= 1
    norms = shares.norm(dim=-1) * x.norm(dim=1)[:, None]
    shares *= (1 / norms.clamp_min(1e-12)).clamp_max(1)[..., None]
    return (shares.reshape(len(y), v * k).T @ x).reshape(v, k, d)


def accuracies(
    parts: tuple[Parts, Parts], rate: float, sigma: float, rounds: int, step: float, seed: int
) -> list[list[float]]:
    """Return the mean over sites of the own models' accuracy on what is set aside.

    For each decay, and each weight.
    """
    (trained, aside), draws = parts, torch.Generator().manual_seed(seed)
    sizes = [len(y) for _, y in trained]
    mean = torch.zeros(len(SIDE_BY_SIDE), 10, trained[0][0].shape[1])
    own, averages = [mean] * len(sizes), [[mean] * len(DECAYS)] * len(sizes)
    left = [
        torch.tensor(
            [1 / (1 + step * (w + k * (sigma / rate / n) ** 2)) for _, w, k in SIDE_BY_SIDE]
        )
        for n in sizes
    ]

    def held(i: int) -> Tensor:
        return mean.lerp(own[i], left[i][:, None, None])

    def averaged(i: int, number: int) -> list[Tensor]:
        shares = [(1 - beta) / (1 - beta**number) for beta in DECAYS]
        return [a.lerp(held(i), share) for a, share in zip(averages[i], shares, strict=True)]

    for number in range(rounds):
        moved = torch.zeros_like(mean)
        for i, (x, y) in enumerate(trained):
            taken, before = torch.rand(len(y), generator=draws) < rate, held(i)
            noise = sigma * torch.randn(mean.shape[1:], generator=draws)
            update = (gradient(before, x[taken], y[taken]) + noise) * (step / rate / sizes[i])
            if number:
                averages[i] = averaged(i, number)
            own[i] = before - update
            moved += update * (sizes[i] / sum(sizes))
        mean = mean - moved
    hits = [
        [
            (torch.einsum("vkd,nd->nvk", w, x).argmax(-1) == y[:, None]).double().mean(0)
            for w in averaged(i, rounds)
        ]
        for i, (x, y) in enumerate(aside)
    ]
    return torch.stack([torch.stack(each) for each in hits]).mean(0).tolist()


def main(name: str) -> None:
    """Choose, print and write."""
    study, records = STUDIES[name], Records(name)
    rate = study.tables["sampling_rate"]
    found = defaultdict[Setting, list[float]](list)
    for seed in SEEDS[name]:
        parts = records.cut(seed)
        for epsilon, (rounds, step) in product(EPSILONS, WAYS[name]):
            budget = Budget(epsilon, study.delta)
            sigma = smallest_scale(budget, {SampledGaussian(rate, 1.0): rounds})
            means = accuracies(parts, rate, sigma, rounds, step, seed)
            for decay, of_decay in zip(DECAYS, means, strict=True):
                for (entrant, *own), mean in zip(SIDE_BY_SIDE, of_decay, strict=True):
                    if entrant != "fedavg":
                        found[Setting(entrant, epsilon, rounds, step, *own, decay)].append(mean)
                    elif not decay:
                        found[Setting(entrant, epsilon, rounds, step)].append(mean)
            print(seed, epsilon, rounds, step, flush=True)
        write(name, {setting: float(np.mean(each)) for setting, each in found.items()})


def write(name: str, found: dict[Setting, float]) -> None:
    """Write the best setting of each entrant, and the best rounds and η of each weight and β."""
    chosen, best_of = dict[str, object](), dict[Setting, tuple[float, str]]()
    for entrant, epsilon in product(WEIGHTS, EPSILONS):
        some = {s: a for s, a in found.items() if (s.entrant, s.epsilon) == (entrant, epsilon)}
        best = max(some, key=lambda setting: some[setting])
        chosen[f"{entrant} ε={epsilon:g}"] = {
            **{key: getattr(best, key) for key in ("rounds", "rate", "weight", "noise", "decay")},
            "aside": round(some[best], 4),
            "made": made(),
        }
        print(best, f"{100 * some[best]:.2f}")
    for setting, accuracy in found.items():
        alike = replace(setting, rounds=0, rate=0.0)
        best_of[alike] = max(best_of.get(alike, (0.0, "")), (round(accuracy, 4), str(setting)))
    tried = {told: {"aside": aside, "made": made()} for aside, told in best_of.values()}
    for kind, what in (("choice", chosen), ("tried", tried)):
        path = HERE / f"{kind}-{name}.json"
        path.write_text(json.dumps(what, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SEEDS)
    main(parser.parse_args().name)
