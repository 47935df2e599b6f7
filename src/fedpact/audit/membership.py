"""Membership inference on the final model: is a record's loss lower if it was trained on?

The attack of Yeom, Giacomelli, Fredrikson, Jha 2018: a threshold on the loss, over all thresholds
at once. Members are the records that the sites trained on, the others those that the sites held
out, and the public test set where none was. Weak beside an attack on the releases, and the one that
whoever gets the model can make.
"""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn

from fedpact.audit.bounds import Auc, auc, auc_ceiling
from fedpact.engines.scene import SimulationSetup
from fedpact.engines.simulation import simulate
from fedpact.errors import DataError
from fedpact.losses import cross_entropy


@dataclass(frozen=True)
class Membership:
    """AUC with its interval, over so many records. ceiling: the most that (ε, δ) leaves room for.

    advantage: the largest TPR - FPR of any threshold, without an interval.
    """

    auc: Auc
    advantage: float
    members: int
    others: int
    ceiling: float

    @property
    def passed(self) -> bool:
        """Whether the claim stands."""
        return self.auc.low <= self.ceiling


def membership(scene: SimulationSetup, confidence: float = 0.95) -> Membership:
    """Train by the plan, in a folder that is thrown away, and attack the model."""
    others = [(site.x_held, site.y_held) for site in scene.sites if len(site.y_held)]
    data = scene.dataset
    if not others and data.x_test is not None and data.y_test is not None:
        others = [(data.x_test, data.y_test)]
    if not others:
        raise DataError(
            f"data set {data.name} has no record that no site trained on: a membership attack "
            "needs some; set partition.held_out above 0"
        )
    with TemporaryDirectory() as folder:
        model = simulate(scene.plan, Path(folder) / "run", data=scene.raw).model
    inside = _scores(model, [(site.x, site.y) for site in scene.sites])
    outside = _scores(model, others)
    ceiling = max(auc_ceiling(t.budget.epsilon, t.budget.delta) for t in scene.terms.values())
    return Membership(
        auc(inside, outside, confidence),
        _advantage(inside, outside),
        len(inside),
        len(outside),
        ceiling,
    )


def _scores(module: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> np.ndarray:
    """Minus the loss of every record; the model in evaluation mode."""
    module.eval()
    with torch.no_grad():
        losses = [
            cross_entropy(module(xs), ys)
            for x, y in parts
            for xs, ys in zip(x.split(1024), y.split(1024), strict=True)
        ]
    return -torch.nan_to_num(torch.cat(losses).double(), nan=np.inf).numpy()


def _advantage(inside: np.ndarray, outside: np.ndarray) -> float:
    at = np.concatenate([inside, outside])
    true = 1 - np.searchsorted(np.sort(inside), at, "left") / len(inside)
    false = 1 - np.searchsorted(np.sort(outside), at, "left") / len(outside)
    return float(np.max(true - false))
