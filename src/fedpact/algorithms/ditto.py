"""Ditto. Li, Hu, Beirami, Smith. Ditto: fair and robust federated learning through
personalization. arXiv 2012.04221, Algorithm 1.

Symbols   paper  code            meaning, unit or range                       who chooses it
          η      learning_rate   step size of both models, > 0                plan
          r      global_steps    steps of the shared model in a round, >= 1   plan
          s      personal_steps  steps of the site's own model, >= 1          plan
          λ      proximal        weight of the proximal term, >= 0            plan
          v_i    memory "v"      the site's own model [d], at first w̄         released
Client    w_i ← w̄;  r times: w_i ← w_i - η g(w_i), g on a Poisson batch of its own;  upload w_i
          s times: v_i ← (v_i - η g(v_i) + ηλ w̄) / (1 + ηλ), g on a batch of its own
Server    w ← Σ p_i w_i
Releases  r + s gradient sums: r + s events. v_i follows from them and costs nothing further
Neutral   none, as w does not depend on v_i. λ = 0: local training; λ = ∞ (from 1e300): v_i = w̄
Differs   the step on (λ/2)‖v_i - w̄‖² is implicit, so every λ is stable; it has the fixed points of
          the paper's step. Weights p_i. One η for both models.

Replies are fedavg's, so a dishonest site affects w, and v_i through λ only. Each round of a private
run pays for both models: s = 0 would be fedavg.
"""

import torch
from pydantic import Field
from torch import Tensor

from fedpact.algorithms import BaseSettings, MethodFacts, Neutral
from fedpact.algorithms.common.steps import EXCLUDED_BY_TWO_MODELS, sgd
from fedpact.common.messages import Local, State, Task
from fedpact.privacy.oracle import Oracle

NEUTRAL: Neutral | None = None


class Settings(BaseSettings):
    """Symbols at the top."""

    learning_rate: float = Field(default=0.5, gt=0)
    global_steps: int = Field(default=1, ge=1)
    personal_steps: int = Field(default=1, ge=1)
    proximal: float = Field(default=0.1, ge=0)

    def own_model(self, w: Tensor, memory: State) -> Tensor | None:
        """Return a site's own model [d]: v_i; w before its first round."""
        if self.proximal >= 1e300:
            return w
        return memory.vectors.get("v", w)


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(needs_all_sites="", sums_releases=True, excludes=EXCLUDED_BY_TWO_MODELS)


def steps(settings: Settings, state: State | None = None) -> int:
    return settings.global_steps + settings.personal_steps


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    told, rate = task.vectors["w"], settings.learning_rate
    w = sgd(oracle, told, settings.global_steps, rate)
    v = memory.vectors.get("v", told).clone()
    # The implicit step: the part of the way to w̄ that is left after it is 1 / (1 + ηλ).
    to_shared = 1 - 1 / (1 + rate * settings.proximal)
    for batch in oracle.batches(settings.personal_steps, "gradient"):
        v = torch.lerp(v.add_(batch.gradient(v), alpha=-rate), told, to_shared)
    # Do not keep a model that is no longer finite.
    return Local({"w": w}, memory=State({"v": v if bool(v.isfinite().all()) else told}))
