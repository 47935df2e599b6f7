"""FedRep. Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for
personalized federated learning. arXiv 2102.07303, Algorithm 1.

Symbols   paper  code           meaning, unit or range                            who chooses it
          α      learning_rate  η, step size, > 0                                 plan
          τ_h    head_steps     steps of the head in a round, >= 1                plan
          τ_φ    body_steps     steps of the body after them, >= 1                plan
                 head           numbers of the head, the last of w, >= 1          plan
          φ                     the body: w without its head                      released
          h_i    memory "head"  the site's head, at first the initial model's     released
Client    τ_h times: h_i ← h_i - η g(φ, h_i), the head's part;  then, with that h_i,
          τ_φ times: φ_i ← φ_i - η g(φ_i, h_i), the body's part
          each g on a Poisson batch of its own; upload (φ_i, h), h the head of the task
Server    w ← Σ p_i w_i: its head stays initial
Releases  τ_h + τ_φ gradient sums: as many events. h_i follows from them and costs nothing further
Neutral   none: with an empty head it would be fedavg with τ_φ steps
Differs   SGD steps for the head, where the paper's theory solves for it. A gradient is clipped as a
          whole, and its other part is discarded. Weights p_i.

FedPer, which trains both parts at once, is fedavg with [local] head. A site's model is (φ, h_i); w
itself is not used. Set the head to the size of the model's last layer: no default fits all models.
"""

import torch
from pydantic import Field
from torch import Tensor

from fedpact.algorithms import BaseSettings, MethodFacts, Neutral
from fedpact.common.errors import PlanError
from fedpact.common.messages import Local, State, Task
from fedpact.privacy.oracle import Oracle

NEUTRAL: Neutral | None = None


class Settings(BaseSettings):
    """Symbols at the top."""

    learning_rate: float = Field(default=0.5, gt=0)
    head_steps: int = Field(default=1, ge=1)
    body_steps: int = Field(default=1, ge=1)
    head: int = Field(default=1, ge=1)

    def own_model(self, w: Tensor, memory: State) -> Tensor | None:
        """Return a site's own model [d]: (φ, h_i); w before its first round."""
        head = memory.vectors.get("head")
        return w if head is None else torch.cat([w[: -self.head], head])


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(
        needs_all_sites="",
        excludes={
            "fairness": "a site's loss would be that of an unused head",
            "local": "its steps alternate between two parts, and momentum is for one",
            "local.head": "it has its own setting for the head, settings.head",
            "server.average": "an average would include a head that is never trained",
        },
    )


def steps(settings: Settings, state: State | None = None) -> int:
    return settings.head_steps + settings.body_steps


def init(w: Tensor, settings: Settings) -> State:
    """Return the first state. Raises PlanError: the head is not smaller than the model."""
    if settings.head >= len(w):
        raise PlanError(
            f"settings.head is {settings.head}: expected less than {len(w)}, the size of the "
            "model, or nothing would be shared"
        )
    return State({"w": w})


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    told, rate, head = task.vectors["w"], settings.learning_rate, settings.head
    w = told.clone()
    w[-head:] = memory.vectors.get("head", told[-head:])
    for batch in oracle.batches(settings.head_steps, "gradient"):
        w[-head:].add_(batch.gradient(w)[-head:], alpha=-rate)
    # Do not keep a head that is no longer finite.
    kept = w[-head:].clone() if bool(w.isfinite().all()) else told[-head:].clone()
    for batch in oracle.batches(settings.body_steps, "gradient"):
        w[:-head].add_(batch.gradient(w)[:-head], alpha=-rate)
    w[-head:] = told[-head:]
    return Local({"w": w}, memory=State({"head": kept}))
