"""FedFDP. Ling, Fu, Wang, Li, Cheng, Chen. Fairness-aware federated learning with differential
privacy. arXiv 2402.16028. Its plain form is FedFair with one step a round.

Symbols   paper  code              meaning, unit or range                      who chooses it
          η      learning_rate     step size, > 0                              plan
          λ      fairness_weight   >= 0; 0 gives DP-FedAvg                     plan
          F      "loss"            Σ p_i F_i of the last round                 released
          C_l⁰   loss_bound        first bound on a record's loss, > 0         plan
          σ_l/σ  loss_noise        the loss' noise over the gradient's, > 0    plan
          γ      loss_quantile     share of losses below the bound, in (0, 1)  plan
          η_q    quantile_rate     step of the bound's logarithm, > 0          plan
          σ_c/σ  count_noise       the count's noise over the gradient's, > 0  plan
Client    one Poisson batch B; every answer on B, divided by the expected size of B
          g   = Σ_B clamp(1 + λ (ℓ_j(w) - F), 0, C/‖∇ℓ_j(w)‖) ∇ℓ_j(w) + noise     (15), clamped at 0
          w_i = w - η g
          F_i = Σ_B clamp(ℓ_j(w_i), 0, C_l) + noise
          b   = share of B with ℓ_j(w_i) <= C_l, + noise                           rule "quantile"
          C_l ← C_l exp(-η_q (b - γ)),  or  C_l ← F_i                              rule "mean": (16)
          and C_l is kept in [least_loss_bound, most_loss_bound]
Server    w ← Σ p_i w_i,  F ← Σ p_i F_i;  as long as F is no finite number, λ counts as 0
Releases  gradient sum, clipped loss sum, and the count under "quantile": one joint event a round
Neutral   λ = 0 gives fedavg with τ = 1, bit for bit
Differs   The weight is clamped at 0 from below: as printed, a contribution can be longer than C.
          The divisor is the batch's expected size, as its true one is private.
          The bound follows a quantile (Andrew, Thakkar, McMahan, Ramaswamy, arXiv 1905.03871): by
          (16) it only ever falls, noise aside, since E[min(C_l, ℓ)] <= C_l, and F falls with it.
          The bound has a ceiling: at a site with fewer records than it declared, b stays below γ,
          so C_l would grow for ever, and with it the noise in everybody's F.

Defaults: losses with an exponential tail have E[min(C_l, ℓ)] = γ E[ℓ], so γ = 0.9 underestimates F
by a tenth where the median would halve it. A count at ten times the gradient's noise raises the
noise of the joint event by half a percent. η_q is the one of Andrew et al.
"""

import math
from collections.abc import Iterable
from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from fedpact.algorithms import BaseSettings, Neutral
from fedpact.errors import PlanError
from fedpact.local import weighted_mean
from fedpact.messages import Local, Reply, State, Task
from fedpact.privacy.oracle import Fair, Oracle, Uniform, Weighting

NEUTRAL: Neutral | None = Neutral(
    parent="fedavg", settings={"fairness_weight": 0.0}, parent_settings={"local_steps": 1}
)


class Settings(BaseSettings):
    """See Symbols."""

    learning_rate: float = Field(default=1.0, gt=0)
    fairness_weight: float = Field(default=0.1, ge=0)
    loss_bound_rule: Literal["quantile", "mean"] = "quantile"
    loss_bound: float = Field(default=2.5, gt=0)
    least_loss_bound: float = Field(default=0.01, gt=0)
    most_loss_bound: float = Field(default=10.0, gt=0)
    loss_noise: float = Field(default=2.5, gt=0)
    loss_quantile: float = Field(default=0.9, gt=0, lt=1)
    quantile_rate: float = Field(default=0.2, gt=0)
    count_noise: float = Field(default=10.0, gt=0)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.least_loss_bound <= self.loss_bound <= self.most_loss_bound:
            raise PlanError(
                f"loss_bound is {self.loss_bound:g}: expected a number between least_loss_bound = "
                f"{self.least_loss_bound:g} and most_loss_bound = {self.most_loss_bound:g}"
            )
        return self

    @property
    def weighs_records(self) -> bool:
        """See BaseSettings."""
        return self.fairness_weight > 0


def channels(settings: Settings) -> dict[str, float]:
    """See Algorithm."""
    released = {"gradient": 1.0, "loss": settings.loss_noise}
    if settings.loss_bound_rule == "quantile":
        released["below"] = settings.count_noise
    return released


def steps(settings: Settings, state: State | None = None) -> int:
    """See Algorithm."""
    del settings, state
    return 1


def init(w: Tensor, settings: Settings) -> State:
    """See Algorithm."""
    del settings
    return State({"w": w})


def task(state: State, settings: Settings) -> State:
    """See Algorithm."""
    del settings
    return state


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    """See Algorithm."""
    bound = memory.numbers.get("loss_bound", settings.loss_bound)
    batches = oracle.batches(1, *channels(settings))
    batch = next(batches)
    gradient = batch.gradient(task.vectors["w"], _weighting(task, settings))
    w = task.vectors["w"].add(gradient, alpha=-settings.learning_rate)
    loss = batch.loss(w, bound)
    if settings.loss_bound_rule == "quantile":
        bound = next_bound(bound, batch.below(w, bound), settings)
    else:
        bound = min(max(settings.least_loss_bound, loss), settings.most_loss_bound)  # NaN: least
    return Local({"w": w}, {"loss": loss}, State(numbers={"loss_bound": bound}))


def update(state: State, replies: Iterable[Reply], settings: Settings) -> State:
    """See Algorithm."""
    del state, settings
    return weighted_mean(replies, numbers=("loss",))


def next_bound(bound: float, share: float, settings: Settings) -> float:
    """Return C_l exp(-η_q (b - γ)) within its range; share: b, of losses at most C_l."""
    # On the logarithm, as a share with much noise would overflow the exponential.
    logarithm = math.log(bound) - settings.quantile_rate * (share - settings.loss_quantile)
    least, most = math.log(settings.least_loss_bound), math.log(settings.most_loss_bound)
    return math.exp(min(max(logarithm, least), most))


def _weighting(task: Task, settings: Settings) -> Weighting:
    reference = task.numbers.get("loss", math.nan)
    if settings.fairness_weight == 0 or not math.isfinite(reference):
        return Uniform()
    return Fair(settings.fairness_weight, reference)
