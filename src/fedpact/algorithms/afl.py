"""Agnostic federated learning. Mohri, Sivek, Suresh. Agnostic federated learning.
arXiv 1902.00146.

Symbols   paper  code           meaning, unit or range                        who chooses it
          γ_w    learning_rate  η, step size of w, > 0                        plan
          τ      local_steps    local iterations of a round, >= 1             plan
          γ_λ    mixture_rate   step size of λ, >= 0                          plan
          λ_i    "score/NAME"   a site's weight is N_i exp(its score)         server
          F_i    "loss"         the site's loss at w̄, clipped to C_l          released
          C_l    loss_bound     see algorithms.common.fairness.LossRelease    plan
Client    w_i ← w̄;  τ times: w_i ← w_i - η g(w_i), g on a Poisson batch of its own; on the first one
          also F_i, the mean of clamp(ℓ_j(w̄), 0, C_l), + noise
Server    w ← Σ λ_i w_i;  λ_i ← λ_i exp(γ_λ F_i), scaled to their sum before, from λ_i = p_i:
          the saddle point min over w, max over λ of Σ λ_i F_i(w)             (5) over all mixtures
          Both over the sites that reply; the others keep their λ_i
Releases  gradient sum, clipped loss sum, and the count under "quantile": one joint event a step,
          charged at every step, although loss and count are used at the first step only
Neutral   γ_λ = 0 gives fedavg, bit for bit
Differs   λ takes a mirror step with entropy, where the paper projects λ + γ_λ F onto the simplex:
          no weight becomes 0, so a site whose loss rises counts again.
          The last w is the model; the paper's bound is for the average over rounds.
          τ may exceed 1, and each site's gradient is used, where the paper draws a site by λ.

At the saddle point all sites with weight have the same, largest loss: the model is the best for the
worst mixture of sites. Noise in F_i accumulates in a score like a random walk.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import exp, log

from pydantic import Field

from fedpact.algorithms import MethodFacts, Neutral, Summed
from fedpact.algorithms.common.fairness import EXCLUDED_BY_LOSSES, LossSettings
from fedpact.algorithms.common.steps import weighted_mean
from fedpact.common.messages import Local, Reply, State, Task
from fedpact.privacy.oracle import Oracle

NEUTRAL: Neutral | None = Neutral(parent="fedavg", settings={"mixture_rate": 0.0})

_SCORE = "score/"
# The least score, so that no weight becomes 0.
_LOWEST_SCORE = -300.0
_MOST_LOSS = 1e9


class Settings(LossSettings):
    """Symbols at the top, and algorithms.common.fairness.LossRelease."""

    mixture_rate: float = Field(default=0.1, ge=0)
    """γ_λ, the step of the sites' weights along their losses; 0 gives fedavg."""


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(
        {"gradient": 1.0, **settings.loss_channels},
        needs_all_sites="the weights of all sites change together, by losses at one model",
        summed=Summed(why_not="each site is weighted by its own losses"),
        excludes=EXCLUDED_BY_LOSSES,
    )


def task(state: State, settings: Settings) -> State:
    return State({"w": state.vectors["w"]})


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    return settings.descend(task, oracle, memory)


def update(state: State, replies: Iterable[Reply], settings: Settings) -> State:
    grown, sizes = dict[str, float](), dict[str, float]()

    def weighed() -> Iterator[Reply]:
        for reply in replies:
            key = _SCORE + reply.site
            score = state.numbers.get(key, 0.0)
            yield replace(reply, weight=reply.weight * exp(score))
            # In this order NaN becomes the least.
            loss = min(max(-_MOST_LOSS, reply.numbers["loss"]), _MOST_LOSS)
            grown[key], sizes[key] = score + settings.mixture_rate * loss, reply.weight

    mean = weighted_mean(weighed())
    # Only differences matter; these sites' weights add up to what they did before.
    total = sum(sizes[k] * exp(state.numbers.get(k, 0.0)) for k in grown)
    largest = max(grown.values())
    excess = largest + log(sum(sizes[k] * exp(grown[k] - largest) for k in grown) / total)
    kept = {key: max(score - excess, _LOWEST_SCORE) for key, score in grown.items()}
    return State(mean.vectors, {**state.numbers, **kept})
