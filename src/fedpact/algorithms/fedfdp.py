"""FedFDP. Ling, Fu, Wang, Li, Cheng, Chen. Fairness-aware federated learning with differential
privacy. arXiv 2402.16028. Its plain form is FedFair with one step a round.

Symbols   paper  code              meaning, unit or range                      who chooses it
          η      learning_rate     step size, > 0                              plan
          τ      local_steps       local iterations of a round, >= 1           plan
          λ      fairness_weight   >= 0; 0 gives DP-FedAvg                     plan
          -      weight_rule       λ or λ F; see common.fairness.WeightRule    plan
          F      "loss"            Σ p_i F_i of the last round                 released
          C_l⁰   loss_bound        first bound on a record's loss, > 0         plan
          σ_l/σ  loss_noise        the loss' noise over the gradient's, > 0    plan
          γ      loss_quantile     share of losses below the bound, in (0, 1)  plan
          η_q    quantile_rate     step of the bound's logarithm, > 0          plan
          σ_c/σ  count_noise       the count's noise over the gradient's, > 0  plan
          -      loss_of           "own" or "common" C_l and model, see below  plan
Client    w_i = w;  τ times, each on a Poisson batch B; every answer divided by B's expected size
          g   = Σ_B clamp(1 + λ (ℓ_j(w_i) - F), 0, C/‖∇ℓ_j(w_i)‖) ∇ℓ_j(w_i) + noise   (15)
          w_i ← w_i - η g
          and on the last batch
          F_i = Σ_B clamp(ℓ_j(w_i), 0, C_l) + noise
          b   = share of B with ℓ_j(w_i) <= C_l, + noise                           rule "quantile"
          C_l ← C_l exp(-η_q (b - γ)),  or  C_l ← F_i                              rule "mean": (16)
          and C_l is kept in [least_loss_bound, most_loss_bound]
          With loss_of = "common" F_i and b_i are computed at w, with the server's C_l, and sent
Server    w ← Σ p_i w_i,  F ← Σ p_i F_i;  while F is not finite, λ counts as 0
          With loss_of = "common" the server makes the step of C_l, by Σ p_i b_i or F
Releases  gradient sum, clipped loss sum, and the count under "quantile": one joint event a step,
          charged at every step, although loss and count are used at the last step only
Neutral   λ = 0 gives fedavg, bit for bit
Differs   The weight is clamped at 0: as printed, a contribution can be longer than C.
          The divisor is the batch's expected size, as its true one is private.
          The bound follows a quantile (Andrew, Thakkar, McMahan, Ramaswamy, arXiv 1905.03871): by
          (16) it only falls, except by noise, since E[min(C_l, ℓ)] <= C_l, and F falls with it.
          The bound has a maximum: at a site with fewer records than declared, b stays below γ, and
          C_l and the noise in F would grow without end.
          A common bound is ours: the paper's sites each have their own.
          The paper has τ = 1, and one λ, which its theorem sets to 0 if a loss is below the mean.
"""

import math
from collections.abc import Iterable

from pydantic import Field
from torch import Tensor

from fedpact.algorithms import BaseSettings, MethodFacts, Neutral
from fedpact.algorithms.common.fairness import FairOracle, FairRelease, WeightRule, weighting
from fedpact.algorithms.common.steps import round_steps, sgd, weighted_mean
from fedpact.algorithms.fedavg import why_own_noise
from fedpact.common.messages import Local, Reply, State, Task
from fedpact.privacy.oracle import Oracle

NEUTRAL: Neutral | None = Neutral(parent="fedavg", settings={"fairness_weight": 0.0})


class Settings(FairRelease, BaseSettings):
    """Symbols at the top, and algorithms.common.fairness.FairRelease."""

    learning_rate: float = Field(default=1.0, gt=0)
    local_steps: int = Field(default=1, ge=1)
    fairness_weight: float = Field(default=0.1, ge=0)
    """λ; 0 gives DP-FedAvg."""
    weight_rule: WeightRule = "fixed"
    """"fixed" weights by 1 + λ (ℓ - F); "relative" by 1 + λ (ℓ/F - 1)."""


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(
        {"gradient": 1.0, **settings.loss_channels},
        task_numbers=settings.told,
        weighs_records=settings.fairness_weight > 0,
        needs_all_sites="",
        needs_own_noise=why_own_noise(settings.local_steps) or settings.why_own_noise,
        sums_releases=True,
        excludes={
            "fairness": "it has its own fairness: set settings.fairness_weight",
            "local.head": "it compares the sites' losses at one model, and here each site has its "
            "own head",
        },
    )


def init(w: Tensor, settings: Settings) -> State:
    return State({"w": w}, settings.first)


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    reference = task.numbers.get("loss", math.nan)
    weights = weighting(settings.weight_rule, settings.fairness_weight, reference)
    fair = FairOracle(oracle, weights, tuple(settings.loss_channels))
    steps = round_steps(task, settings.local_steps)
    w = sgd(fair, task.vectors["w"], steps, settings.learning_rate)
    told = State(task.vectors, task.numbers)
    return Local({"w": w}, *settings.local(fair.last_batch, told, w, memory.numbers))


def update(state: State, replies: Iterable[Reply], settings: Settings) -> State:
    means = weighted_mean(replies, numbers=settings.sent)
    return State(means.vectors, settings.update(state.numbers, means.numbers))
