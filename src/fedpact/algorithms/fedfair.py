"""FedFair. Ling, Fu, Wang, Li, Cheng, Chen. Fairness-aware federated learning with differential
privacy. arXiv 2402.16028: the algorithm without privacy. Its private form is fedfdp.

Symbols   paper  code             meaning, unit or range                       who chooses it
          η      learning_rate    step size, > 0                               plan
          λ      fairness_weight  >= 0; 0 gives FedAvg                         plan, tune fedfdp
          -      weight_rule      λ or λ F; see common.fairness.WeightRule     plan
          E      local_steps      local iterations of a round; 1/q: an epoch   plan
          F      "loss"           Σ p_i F_i(w_i) of the last round             the sites
Client    minimises F_i + (λ/2) Σ p_i (F_i - F)²; w_i ← w, then on each batch b
          Δ = F_i(w_i, b) - F,  w_i ← w_i - η max(0, 1 + λΔ) ∇F_i(w_i, b)
          and at the end F_i(w_i) on all records
Server    w ← Σ p_i w_i,  F ← Σ p_i F_i(w_i);  while F is not finite, λ counts as 0
Releases  exact numbers: refused unless privacy.mode = "none". The loss before each step would be
          another release; fedfdp weights records inside their clip instead
Neutral   λ = 0 gives fedavg, bit for bit
Differs   The weight is clamped at 0, as in fedfdp: a negative one would ascend.
          Batch loss and gradient are sums over a Poisson batch, divided by its expected size.
"""

import math
from collections.abc import Iterable

import torch
from pydantic import Field

from fedpact.algorithms import BaseSettings, MethodFacts, Neutral
from fedpact.algorithms.common.fairness import FAIR_LOSS, WeightRule, weight
from fedpact.algorithms.common.steps import round_steps, weighted_mean
from fedpact.common.messages import Local, Reply, State, Task
from fedpact.privacy.oracle import Opening, Oracle

NEUTRAL: Neutral | None = Neutral(parent="fedavg", settings={"fairness_weight": 0.0})

# A plain oracle ignores it.
_UNUSED_BOUND = 10.0


class Settings(BaseSettings):
    """Symbols at the top."""

    learning_rate: float = Field(default=0.5, gt=0)
    local_steps: int = Field(default=2, ge=1)
    fairness_weight: float = Field(default=0.1, ge=0)
    """λ; 0 gives FedAvg."""
    weight_rule: WeightRule = "fixed"
    """"fixed" weights by 1 + λ (ℓ - F); "relative" by 1 + λ (ℓ/F - 1)."""


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(
        {"gradient": 1.0, "loss": 1.0},
        Opening(1.0, {"loss": 1.0}),
        {"loss": FAIR_LOSS},
        plain_only="it weights each step by the batch's exact loss; algorithm = 'fedfdp' is its "
        "private form",
        needs_all_sites="",
        excludes={
            "fairness": "it has its own fairness: set settings.fairness_weight",
            "local": "it scales each step by its loss, and with momentum a step includes earlier "
            "ones",
            "local.head": "it compares the sites' losses at one model, and each site would have "
            "its own head",
        },
    )


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    w, reference = task.vectors["w"].clone(), task.numbers.get("loss", math.nan)
    longest = torch.finfo(w.dtype).max
    lam = weight(settings.weight_rule, settings.fairness_weight, reference)
    for batch in oracle.batches(round_steps(task, settings.local_steps), "gradient", "loss"):
        scale = 1.0
        if settings.fairness_weight > 0:
            gap = batch.loss(w, _UNUSED_BOUND) - reference
            scale = max(0.0, 1 + lam * gap) if lam > 0 else 1.0
        # A diverging run's step may exceed the weights' range.
        w.add_(batch.gradient(w), alpha=-min(settings.learning_rate * scale, longest))
    return Local({"w": w}, {"loss": oracle.opening("loss").loss(w, _UNUSED_BOUND)})


def update(state: State, replies: Iterable[Reply], settings: Settings) -> State:
    return weighted_mean(replies, numbers=("loss",))
