"""Adap DP-FL: clip and noise follow the length of each site's gradients. Fu, Chen, Han. Adap DP-FL:
differentially private federated learning with adaptive noise. TrustCom 2022, arXiv 2211.15893.

Symbols   paper  code           meaning, unit or range                        who chooses it
          η      learning_rate  step size, > 0                                plan
          τ      local_steps    local iterations of a round, >= 1             plan
          α      clip_power     how closely C_t follows the gradients, >= 0   plan
          C_t    "clip"         C (L_t / L_1)^α within bounds                 released
          L_t    "length"       of the round's mean gradient, less its noise  released
Client    w_i ← w;  τ times: w_i ← w_i - η g(w_i), clipped to C_t, noise σ C_t;
          L_t² = max(0, ‖mean of the τ g‖² - its noise's energy); a site remembers L_1 and C_t;
          a round with L_t = 0, whose noise was longer, keeps C_t and is not the first
Server    w ← Σ p_i w_i
Releases  τ gradient sums: τ events. L_t follows from them and costs nothing further
Neutral   α = 0 gives fedavg, bit for bit
Differs   the paper's threshold is α times the mean length of single records' noisy gradients. Here
          no record's gradient is released, so the length is that of the released mean, relative to
          the first. The paper also lowers σ when the loss falls on validation records; here
          σ is fixed before the run, so that ε can be reserved, and the noise decreases with C_t
          only (docs/notes/errata.md, N3).
"""

from math import exp, log

import torch
from pydantic import Field

from fedpact.algorithms import MethodFacts, Neutral, fedavg
from fedpact.algorithms.common.steps import EXCLUDED_BY_OWN_CLIP, round_steps
from fedpact.common.messages import Local, State, Task
from fedpact.privacy.oracle import Oracle, Uniform

NEUTRAL: Neutral | None = Neutral(parent="fedavg", settings={"clip_power": 0.0})


class Settings(fedavg.Settings):
    """Symbols at the top."""

    clip_power: float = Field(default=1.0, ge=0)
    """α, the power of the gradients' length in a site's clip; 0 keeps C."""
    least_clip: float = Field(default=0.1, gt=0, le=1)
    """The least C_t over privacy.clip."""
    most_clip: float = Field(default=2.0, ge=1, le=1e3)
    """The largest C_t over privacy.clip."""


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(
        weighs_records=True,
        scales_steps=("clip",),
        needs_all_sites="",
        needs_own_noise="a site's clip depends on its gradients, which only its own noise hides",
        excludes=EXCLUDED_BY_OWN_CLIP,
    )


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    clip, start = memory.numbers.get("clip", 1.0), task.vectors["w"]
    steps, rate, w = round_steps(task, settings.local_steps), settings.learning_rate * clip, start
    for batch in oracle.batches(steps, "gradient"):
        step = batch.gradient(w, Uniform(1 / clip))
        w = torch.add(w, step, alpha=-rate, out=step)
    square = float((w - start).double().square().sum()) / (rate * steps) ** 2
    noise = len(w) * oracle.noise_variance / steps
    length = clip * max(0.0, square - noise) ** 0.5
    first = memory.numbers.get("first") or length
    if length > 0:
        power = settings.clip_power * (log(length) - log(first))
        # most_clip is below e^7, and beyond it exp might overflow. NaN becomes the least.
        clip = min(max(settings.least_clip, exp(min(power, 7.0))), settings.most_clip)
    return Local({"w": w}, memory=State(numbers={"clip": clip, "first": first}))
