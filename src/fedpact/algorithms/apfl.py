"""APFL. Deng, Kamani, Mahdavi. Adaptive personalized federated learning. arXiv 2003.13461,
Algorithm 1.

Symbols   paper  code           meaning, unit or range                          who chooses it
          η      learning_rate  step size of both models, > 0                   plan
          τ      paired_steps   steps of each model in a round, >= 1            plan
          α      own_share      weight of v_i in a site's model, in [0, 1]       plan
          v_i    memory "v"     the site's own part [d], at first w̄             released
          v̄_i                   α v_i + (1 - α) w, the site's own model
Client    w_i ← w̄;  τ times, each gradient on a Poisson batch of its own:
          v_i ← v_i - η α g(α v_i + (1 - α) w_i);   w_i ← w_i - η g(w_i)
          upload w_i
Server    w ← Σ p_i w_i
Releases  2 τ gradient sums: 2 τ events. v_i follows from them and costs nothing further
Neutral   none, as w does not depend on v_i. α = 0: the site's model is w; α = 1: local training
Differs   one α for all, from the plan; the paper can learn it for each site, from an inner product
          of a gradient with w_i - v_i. Every site takes part, with weights p_i.
"""

import torch
from pydantic import Field
from torch import Tensor

from fedpact.algorithms import BaseSettings, MethodFacts, Neutral
from fedpact.algorithms.common.steps import EXCLUDED_BY_TWO_MODELS
from fedpact.common.messages import Local, State, Task
from fedpact.privacy.oracle import Oracle

NEUTRAL: Neutral | None = None


class Settings(BaseSettings):
    """Symbols at the top."""

    learning_rate: float = Field(default=0.5, gt=0)
    paired_steps: int = Field(default=1, ge=1)
    own_share: float = Field(default=0.5, ge=0, le=1)

    def own_model(self, w: Tensor, memory: State) -> Tensor | None:
        """Return a site's own model [d]: α v_i + (1 - α) w; w before its first round."""
        return torch.lerp(w, memory.vectors.get("v", w), self.own_share)


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(needs_all_sites="", sums_releases=True, excludes=EXCLUDED_BY_TWO_MODELS)


def steps(settings: Settings, state: State | None = None) -> int:
    return 2 * settings.paired_steps


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    told, rate = task.vectors["w"], settings.learning_rate
    w, v = told.clone(), memory.vectors.get("v", told).clone()
    batches = oracle.batches(2 * settings.paired_steps, "gradient")
    # The next batch closes a batch, so take its gradient before.
    for batch in batches:
        mixed = torch.lerp(w, v, settings.own_share)
        v.add_(batch.gradient(mixed), alpha=-rate * settings.own_share)
        w.add_(next(batches).gradient(w), alpha=-rate)
    # Do not keep a model that is no longer finite.
    return Local({"w": w}, memory=State({"v": v if bool(v.isfinite().all()) else told}))
