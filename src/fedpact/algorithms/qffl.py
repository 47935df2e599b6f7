"""q-FedAvg, for q-FFL. Li, Sanjabi, Beirami, Smith. Fair resource allocation in federated learning.
arXiv 1905.10497.

Symbols   paper  code               meaning, unit or range                      who chooses it
          η      learning_rate      step size, > 0; the paper's L is 1/η        plan
          τ      local_steps        local iterations of a round, >= 1           plan
          q      fairness_exponent  in [0, 20]; 0 gives fedavg                  plan
          F_i    "loss"             the site's loss at w̄, at least least_loss   released
          D_i    "moved"            ‖w̄ - w_i‖² less its noise's energy, >= 0    released
                 least_loss         floor of F_i, > 0                           plan
          v_i    noise_variance     of a gradient's noise, a coordinate         the sites
          p_i    aggregation        N_i / Σ N ("size"), or even ("uniform")     plan
          C_l    loss_bound         the first bound on a record's loss, > 0       plan
Client    w_i ← w̄;  τ times: w_i ← w_i - η g(w_i), g on a Poisson batch of its own; on the first one
          also F_i, the mean of clamp(ℓ_j(w̄), 0, C_l), + noise; then C_l moves as in fedfdp
          upload w_i, F_i and D_i = max(0, ‖w̄ - w_i‖² - τ η² d v_i)
Server    with Δ_i = (w̄ - w_i)/η:  w ← w̄ - Σ p_i F_i^q Δ_i / Σ p_i (q F_i^(q-1) ‖Δ_i‖² + F_i^q/η)
          ‖Δ_i‖² = D_i/η².  With a_i = p_i F_i^q / Σ p_j F_j^q this is part of the way to a mean:
          w ← w̄ + (Σ a_i w_i - w̄) / (1 + (q/η) Σ a_i D_i/F_i)
Releases  gradient sum, clipped loss sum, and the count under "quantile": one joint event a step,
          charged at every step, although loss and count are used at the first step only
Neutral   q = 0 gives fedavg, bit for bit
Differs   the energy of the gradients' noise, τ η² d v_i up to its effect on later steps, is
          subtracted from D_i; it would shorten the steps of large models. In a plain run v_i = 0.
          Losses are released, clipped and floored: a noisy one may be negative.
          Sites take part uniformly (all, or sites_per_round) with weights p_i, where the paper
          samples them by p_i.

A step is never longer than the way to the mean, so noise in F_i cannot enlarge it; with q < 1 a
loss near the floor shortens it. Elsewhere, q is the sampling rate.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from pydantic import Field

from fedpact.algorithms import MethodFacts, Neutral, Summed
from fedpact.algorithms.common.fairness import EXCLUDED_BY_LOSSES, LossSettings
from fedpact.algorithms.common.steps import Aggregation, round_steps, weigh_replies, weighted_mean
from fedpact.common.messages import Local, Reply, State, Task
from fedpact.privacy.oracle import Oracle

NEUTRAL: Neutral | None = Neutral(parent="fedavg", settings={"fairness_exponent": 0.0})

# A diverging plain run may have any loss; powers of this are finite.
_MOST_LOSS = 1e9


class Settings(LossSettings):
    """Symbols at the top, and algorithms.common.fairness.LossRelease."""

    fairness_exponent: float = Field(default=1.0, ge=0, le=20)
    """q, the power of its loss by which a site is weighted; 0 gives fedavg."""
    least_loss: float = Field(default=0.01, gt=0)
    """The floor of F_i."""
    aggregation: Aggregation = "size"
    """Further weights of sites: "size", N_i / Σ N, or "uniform"."""


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(
        {"gradient": 1.0, **settings.loss_channels},
        needs_all_sites="",
        summed=Summed(
            why_not="its weights depend on the sites' losses, and the weights of a masked sum have "
            "to be public"
        ),
        excludes={
            **EXCLUDED_BY_LOSSES,
            "local": "it subtracts the noise of plain steps from a site's movement",
        },
    )


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    steps, rate = round_steps(task, settings.local_steps), settings.learning_rate
    found = settings.descend(task, oracle, memory)
    w = found.vectors["w"]
    energy = steps * rate**2 * len(w) * oracle.noise_variance
    moved = max(0.0, float((w - task.vectors["w"]).double().square().sum()) - energy)
    return replace(found, numbers={**found.numbers, "moved": moved})


def update(state: State, replies: Iterable[Reply], settings: Settings) -> State:
    fair = _fair(weigh_replies(replies, settings.aggregation), settings)
    mean = weighted_mean(fair, numbers=("stretch",))
    stretch = settings.fairness_exponent / settings.learning_rate * mean.numbers["stretch"]
    return State({"w": torch.lerp(state.vectors["w"], mean.vectors["w"], 1 / (1 + stretch))})


def _fair(replies: Iterable[Reply], settings: Settings) -> Iterator[Reply]:
    """Yield the replies with weights p_i F_i^q, and D_i/F_i as "stretch"."""
    for reply in replies:
        loss = min(max(settings.least_loss, reply.numbers["loss"]), _MOST_LOSS)  # NaN: the least
        moved = max(0.0, reply.numbers["moved"])  # a lie must not lengthen the step
        weight = reply.weight * loss**settings.fairness_exponent
        yield replace(reply, weight=weight, numbers={"stretch": moved / loss})
