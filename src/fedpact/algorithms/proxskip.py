"""ProxSkip with the consensus constraint, which is Scaffnew. Mishchenko, Malinovsky, Stich,
Richtárik. ProxSkip: yes! Local gradient steps provably lead to communication acceleration!
arXiv 2202.09357, Algorithm 2, with the mean of its Algorithm 1.

Symbols   paper  code           meaning, unit or range                        who chooses it
          γ      learning_rate  step size, > 0                                plan
          p      communication  probability that a step is a round's last     plan
                 most_steps     the most steps of a round                     plan
          τ      "local_steps"  local iterations of this round                public draws
          h_i    memory "h"     the site's control variate [d], at first 0    released
          x̂_i    memory "w"     where the site's steps ended [d]              released
Client    h_i ← h_i + (p/γ)(w̄ - x̂_i), if w̄ is the mean that included x̂_i
          x_i ← w̄;  τ times: x_i ← x_i - γ (g(x_i) - h_i), g on a Poisson batch of its own
          x̂_i = x_i;  upload u_i = x̂_i - (γ/p) h_i
Server    w ← Σ p_i u_i, which is Σ p_i x̂_i while Σ p_i h_i = 0
Releases  τ gradient sums: τ events. h_i follows from released numbers
Neutral   p = 1 gives fedavg with one step, up to rounding: Σ p_i h_i = 0, so the control variates
          do not change the mean
Differs   the coins of a round are drawn before it, from the round's number. A round ends after
          most_steps steps at the latest, so that a run's events are bounded; h_i's step still uses
          the plan's p.
          Weights p_i, with which Σ p_i h_i = 0 as well; the paper's are even.
          Algorithm 2 sends x̂_i, as its Σ p_i h_i is 0 in every round. Here replies may be lost or
          rounded: a round makes Σ p_i h_i, over the sites that took part in it, 0 again. So the
          model goes to the optimum of the sites that reply. One that returns has its old h_i.

p near sqrt(μ/L), one over the square root of the condition number, needs the fewest rounds.
"""

import random
from collections.abc import Iterable
from math import ceil, log, log1p

import torch
from pydantic import Field
from torch import Tensor

from fedpact.algorithms import BaseSettings, MethodFacts, Neutral
from fedpact.algorithms.common.steps import round_steps, weighted_mean
from fedpact.common.messages import Local, Reply, State, Task
from fedpact.privacy.oracle import Oracle, Range

NEUTRAL: Neutral | None = Neutral(
    parent="fedavg",
    settings={"communication": 1.0},
    parent_settings={"local_steps": 1},
    tolerance=1e-12,
)

_ROUND = "round"


class Settings(BaseSettings):
    """Symbols at the top."""

    learning_rate: float = Field(default=0.2, gt=0)
    communication: float = Field(default=0.3, gt=0, le=1)
    """p, the probability that a step is a round's last; a round has 1/p steps on average."""
    most_steps: int = Field(default=10, ge=1)
    """The most steps of a round."""


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(
        task_numbers={"local_steps": Range(1.0, float(settings.most_steps))},
        needs_all_sites="the sites' control variates add up to 0 over all of them only",
        excludes={
            "local": "its control variates are of plain steps",
            "local.head": "its control variates are the sites' gradients at one model",
            "server": "its control variates depend on the sites' mean, which is not an optimiser's "
            "model",
            "privacy.clip_schedule": "its control variates are gradients of earlier rounds, "
            "with another clip than those that they correct",
            "fairness": "its control variates would no longer add up to 0 under weights by loss",
            "robust": "its control variates add up to 0 only under the sites' mean, and the model "
            "would depend on where it started",
        },
    )


def steps(settings: Settings, state: State | None = None) -> int:
    """Return τ of the next round: coin throws until one has p, the same in every run."""
    if state is None or settings.communication == 1:
        return settings.most_steps if state is None and settings.communication < 1 else 1
    coin = random.Random(int(state.numbers.get(_ROUND, 0)))
    thrown = ceil(log(1 - coin.random()) / log1p(-settings.communication))
    return min(max(1, thrown), settings.most_steps)


def init(w: Tensor, settings: Settings) -> State:
    return State({"w": w}, {_ROUND: 0.0})


def task(state: State, settings: Settings) -> State:
    return State({"w": state.vectors["w"]}, {"local_steps": float(steps(settings, state))})


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    told, rate = task.vectors["w"], settings.learning_rate
    h, share = memory.vectors.get("h", torch.zeros_like(told)), settings.communication / rate
    if memory.numbers.get(_ROUND) == task.round - 1:
        h = torch.add(h, told - memory.vectors["w"], alpha=share)
    w = told.clone()
    for batch in oracle.batches(round_steps(task, settings.most_steps), "gradient"):
        w.add_(batch.gradient(w).sub_(h), alpha=-rate)
    return Local({"w": w - h / share}, memory=State({"w": w, "h": h}, {_ROUND: task.round}))


def update(state: State, replies: Iterable[Reply], settings: Settings) -> State:
    mean = weighted_mean(replies)
    return State(mean.vectors, {_ROUND: state.numbers[_ROUND] + 1})
