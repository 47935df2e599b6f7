"""SCAFFOLD. Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. SCAFFOLD: stochastic controlled
averaging for federated learning. arXiv 1910.06378. Its option II, with η_g = 1.

Symbols   paper  code           meaning, unit or range                        who chooses it
          η_l    learning_rate  step size, > 0                                plan
          K, τ   local_steps    local iterations of a round, >= 1             plan
          c_i    memory "c"     the site's control variate [d]                released
          c      "c"            Σ p_i c_i [d]                                 released
          p_i    aggregation    N_i / Σ N ("size"), or even ("uniform")       plan
Client    w_i ← w̄;  τ times: w_i ← w_i - η (g(w_i) - c_i + c), g on a Poisson batch of its own  (3)
          c_i ← c_i - c + (w̄ - w_i)/(τη)                                      (4), option II
          which is the mean of the round's τ gradients, and is computed as that
          upload u_i = w̄ - τη c_i: w_i without its corrections
          A site in its first round uses c as its c_i, which gives fedavg's steps
Server    w ← Σ p_i u_i,  c ← (w̄ - w)/(τη), which is Σ p_i c_i
Releases  τ gradient sums: τ events. c_i is their mean and costs nothing further
Neutral   τ = 1 gives fedavg, bit for bit
Differs   u_i is sent, where the paper sends the changes of w_i and c_i: 2d numbers down, d up.
          Σ p_i w_i = Σ p_i u_i - τη (c - Σ p_i c_i), c_i from before the round. As c = Σ p_i c_i,
          the server's w is the paper's mean of the w_i.
          c is the mean over the sites that reply. A site that returns, or whose reply was lost, has
          an old c_i, which affects only its own path. The paper's c includes sites that were not
          asked; here all are asked, and sites_per_round is refused.
          Weights p_i, and so the optimum of Σ p_i F_i; the paper's are even.

Noise: c_i has that of a mean of τ gradients, v_i/τ a coordinate, new in every round, so it does not
accumulate. It moves a site's path about as far as the gradients' own noise, and w only as far as
gradients change along the path; if they do not, w has exactly fedavg's noise.
Use τ > 1 if sites differ. At τ = 1 fedavg is the same and receives d numbers less.
"""

from collections.abc import Iterable

import torch
from pydantic import Field
from torch import Tensor

from fedpact.algorithms import EVEN_IS_NOT_SUMMED, MethodFacts, Neutral, Summed, fedavg
from fedpact.algorithms.common.steps import Aggregation, round_steps, weigh_replies, weighted_mean
from fedpact.common.messages import Local, Reply, State, Task
from fedpact.privacy.oracle import Oracle, Range, Terms, nearly

NEUTRAL: Neutral | None = Neutral(parent="fedavg", settings={"local_steps": 1})


class Settings(fedavg.Settings):
    """Symbols at the top."""

    local_steps: int = Field(default=5, ge=1)
    aggregation: Aggregation = "size"
    """Weights of sites: "size", N_i / Σ N, or "uniform"."""


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(
        summed=Summed() if settings.aggregation == "size" else EVEN_IS_NOT_SUMMED,
        needs_all_sites="its c is the mean of the replying sites' c_i, so a round of some sites "
        "would omit the others' c_i",
        sums_releases=True,
        excludes={
            "local": "its control variate is the mean gradient of plain steps",
            "local.head": "its control variates are the sites' gradients at one model",
            "privacy.clip_schedule": "its control variates are gradients of earlier rounds, "
            "with another clip than those that they correct",
        },
    )


def init(w: Tensor, settings: Settings) -> State:
    return State({"w": w, "c": torch.zeros_like(w)})


def public_numbers(task: Task, terms: Terms, settings: Settings) -> dict[str, Range]:
    return {"local_steps": nearly(round_steps(task, settings.local_steps))}


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    steps, rate = round_steps(task, settings.local_steps), settings.learning_rate
    w, c = task.vectors["w"].clone(), task.vectors["c"]
    correction = c - memory.vectors.get("c", c)
    total = torch.zeros_like(w)
    for batch in oracle.batches(steps, "gradient"):
        gradient = batch.gradient(w)
        total.add_(gradient)
        w.add_(gradient + correction, alpha=-rate)
    uncorrected = task.vectors["w"].add(total, alpha=-rate)
    memory = State({"c": total.div_(steps)})
    return Local({"w": uncorrected}, {"local_steps": steps}, memory)


def update(state: State, replies: Iterable[Reply], settings: Settings) -> State:
    replies = weigh_replies(replies, settings.aggregation)
    mean = weighted_mean(replies, numbers=("local_steps",))
    w, steps = mean.vectors["w"], mean.numbers["local_steps"]
    c = torch.sub(state.vectors["w"], w).div_(settings.learning_rate * steps)
    return State({"w": w, "c": c})
