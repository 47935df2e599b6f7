"""TERM, tilted empirical risk minimisation, across sites. Li, Beirami, Sanjabi, Smith. Tilted
empirical risk minimization. arXiv 2007.01162; across groups it is their hierarchical objective (4)
without a tilt inside a group.

Symbols   paper  code           meaning, unit or range                        who chooses it
          η      learning_rate  step size, > 0                                plan
          τ      local_steps    local iterations of a round, >= 1             plan
          t      tilt           > 0 leans to sites of high loss, < 0 away     plan
          F_i    "loss"         the site's loss at w̄, clipped to C_l          released
          C_l    loss_bound     see algorithms.common.fairness.LossRelease    plan
Client    w_i ← w̄;  τ times: w_i ← w_i - η g(w_i), g on a Poisson batch of its own; on the first one
          also F_i, the mean of clamp(ℓ_j(w̄), 0, C_l), + noise
Server    w ← Σ a_i w_i, a_i = p_i exp(t F_i) / Σ p_j exp(t F_j): at τ = 1 a step of length η on
          (1/t) log Σ p_i exp(t F_i), whose gradient is Σ a_i ∇F_i
Releases  gradient sum, clipped loss sum, and the count under "quantile": one joint event a step,
          charged at every step, although loss and count are used at the first step only
Neutral   t = 0 gives fedavg, bit for bit
Differs   the paper also tilts single records, which would need unbounded weights; the sensitivity
          to one record has to be bounded.

t → ∞ minimises the largest loss (afl); t < 0 reduces the weight of sites with wrong labels. Noise
of F_i changes a weight by the factor exp(t · noise): keep |t| times the noise of F_i below 1.
"""

from collections.abc import Iterable
from math import exp, inf

import torch
from pydantic import Field

from fedpact.algorithms import MethodFacts, Neutral, Summed
from fedpact.algorithms.common.fairness import EXCLUDED_BY_LOSSES, LossSettings
from fedpact.common.check import positive
from fedpact.common.messages import Local, Reply, State, Task
from fedpact.privacy.oracle import Oracle

NEUTRAL: Neutral | None = Neutral(parent="fedavg", settings={"tilt": 0.0})

_MOST_POWER = 1e12


class Settings(LossSettings):
    """Symbols at the top, and algorithms.common.fairness.LossRelease."""

    tilt: float = Field(default=1.0, ge=-100, le=100)
    """t, the tilt: a site's weight is proportional to exp(t F_i); 0 gives fedavg."""


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(
        {"gradient": 1.0, **settings.loss_channels},
        needs_all_sites="",
        summed=Summed(why_not="each site is weighted by its own loss"),
        excludes=EXCLUDED_BY_LOSSES,
    )


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    return settings.descend(task, oracle, memory)


def update(state: State, replies: Iterable[Reply], settings: Settings) -> State:
    mean, total, largest = state.vectors["w"], 0.0, -inf
    for reply in replies:
        # In this order NaN becomes the least.
        power = min(max(-_MOST_POWER, settings.tilt * reply.numbers["loss"]), _MOST_POWER)
        # Weights are relative to the largest exp(t F_i) so far, so none overflows.
        total *= exp(min(largest - power, 0.0))
        largest = max(largest, power)
        weight = positive(weight=reply.weight) * exp(power - largest)
        total += weight
        mean = torch.lerp(mean, reply.vectors["w"], weight / total)
    return State({"w": mean})
