"""PEDPFL's idea: train for weights whose loss is robust to noise. Shen, Liu, Zhang.
Performance-enhanced federated learning with differential privacy for Internet of Things. IEEE IoT
Journal 2022.

Symbols   paper  code           meaning, unit or range                        who chooses it
          η      learning_rate  step size, > 0                                plan
          τ      local_steps    local iterations of a round, >= 1             plan
                 perturbation   ρ, the length of the perturbation, >= 0       plan
Client    w_i ← w, u ← 0;  τ times, each on a Poisson batch of its own:
          g ← g(w_i + ρ u), u ← g/‖g‖, w_i ← w_i - η g
Server    w ← Σ p_i w_i
Releases  τ gradient sums: τ events
Neutral   ρ = 0, and τ = 1 whatever ρ is, give fedavg, bit for bit
Differs   the paper adds a regulariser of the classifier under a perturbation. Here a step descends
          the loss at weights moved by ρ along the last released gradient, as in sharpness-aware
          minimisation (arXiv 2010.01412); a second gradient at a step would be a second release.
          All weights are moved, as an algorithm does not know which are the classifier's. The noise
          is in the gradients, so the ledger's ε holds; the paper's theorem was not available.
"""

import torch
from pydantic import Field

from fedpact.algorithms import MethodFacts, Neutral, fedavg
from fedpact.algorithms.common.steps import round_steps
from fedpact.common.messages import Local, State, Task
from fedpact.privacy.oracle import Oracle

NEUTRAL: Neutral | None = Neutral(parent="fedavg", settings={"perturbation": 0.0})


class Settings(fedavg.Settings):
    """Symbols at the top."""

    local_steps: int = Field(default=5, ge=1)
    perturbation: float = Field(default=0.05, ge=0)
    """ρ, the distance of the gradient's weights from the model's; 0 gives fedavg."""


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(
        needs_all_sites="",
        sums_releases=True,
        excludes={"local": "its gradients are at perturbed weights, by the last one's direction"},
    )


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    w, beside = task.vectors["w"], task.vectors["w"]
    for batch in oracle.batches(round_steps(task, settings.local_steps), "gradient"):
        g = batch.gradient(beside)
        w = torch.add(w, g, alpha=-settings.learning_rate)
        length = g.double().square().sum().sqrt()
        # Read by no host, which would wait for a GPU at every step.
        scale = torch.where(length > 0, settings.perturbation / length, 0)
        beside = w + scale.to(g.dtype) * g
    return Local({"w": w})
