"""FedAvg whose clip follows a quantile of each site's gradients. Andrew, Thakkar, McMahan,
Ramaswamy. Differentially private learning with adaptive clipping. arXiv 1905.03871.

Symbols   paper  code           meaning, unit or range                        who chooses it
          η      learning_rate  step size, > 0                                plan
          τ      local_steps    local iterations of a round, >= 1             plan
          γ      quantile       target share of unclipped gradients           plan
          η_C    quantile_rate  step of log C_t, >= 0                         plan
          σ_b    count_noise    the count's noise over the gradient's         plan
          C_t    "clip"         f C, f between least_clip and most_clip       released
          b_t                   share of gradients at most C_t long           released
Client    w_i ← w;  τ times, each on a Poisson batch of its own, of g and b at once:
          w_i ← w_i - η g(w_i), clipped to C_t, noise σ C_t;  C_t ← C_t exp(-η_C (b_t - γ))
          a site remembers its C_t
Server    w ← Σ p_i w_i
Releases  gradient sum and count of short gradients: one joint event a step
Neutral   η_C = 0 gives fedavg at privacy.clip, bit for bit
Differs   the paper clips each user's update, with one C_t at the server; here records are clipped,
          and each site has its own C_t. It changes at every step, as the count is charged at every
          step. σ_b is relative to σ, where the paper has z_b = B/20.

A gradient clipped to f C is f times one of weight 1/f clipped to C, so noise, bound and ledger are
those of C. The ledger includes the count: σ of the joint event is σ / sqrt(1 + σ_b^-2); with the
default 10, calibration raises the gradient's noise by half a percent. A plain run clips nothing:
C_t falls to its least and only affects rounding.
"""

import torch
from pydantic import Field

from fedpact.algorithms import MethodFacts, Neutral, Summed, fedavg
from fedpact.algorithms.common.steps import EXCLUDED_BY_OWN_CLIP, follow_quantile, round_steps
from fedpact.common.messages import Local, State, Task
from fedpact.privacy.oracle import Oracle, Uniform

NEUTRAL: Neutral | None = Neutral(parent="fedavg", settings={"quantile_rate": 0.0})


class Settings(fedavg.Settings):
    """Symbols at the top."""

    quantile: float = Field(default=0.5, gt=0, lt=1)
    """γ, the target share of gradients that are at most C_t long."""
    quantile_rate: float = Field(default=0.2, ge=0)
    """η_C, the step of log C_t."""
    count_noise: float = Field(default=10.0, gt=0)
    """The noise of the count of short gradients over the gradient's."""
    least_clip: float = Field(default=0.01, ge=1e-3, le=1)
    """The least C_t over privacy.clip."""
    most_clip: float = Field(default=10.0, ge=1, le=1e3)
    """The largest C_t over privacy.clip. Beyond 1e6 times the least, weights lose digits."""


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(
        {"gradient": 1.0, "below": settings.count_noise},
        weighs_records=True,
        scales_steps=("clip",),
        needs_all_sites="",
        summed=Summed(),
        needs_own_noise="a site's clip depends on its counts, which only its own noise hides",
        excludes=EXCLUDED_BY_OWN_CLIP,
    )


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    clip, w = memory.numbers.get("clip", 1.0), task.vectors["w"]
    steps = round_steps(task, settings.local_steps)
    rule = settings.quantile, settings.quantile_rate, settings.least_clip, settings.most_clip
    for batch in oracle.batches(steps, "gradient", "below"):
        step = batch.gradient(w, Uniform(1 / clip))
        share = batch.below(w, clip, "norm")
        w = torch.add(w, step, alpha=-settings.learning_rate * clip, out=step)
        clip = follow_quantile(clip, share, *rule)
    return Local({"w": w}, memory=State(numbers={"clip": clip}))
