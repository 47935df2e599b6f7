"""FedNova. Wang, Liu, Liang, Joshi, Poor. Tackling the objective inconsistency problem in
heterogeneous federated optimization. arXiv 2007.07481.

Symbols   paper  code           meaning, unit or range                          who chooses it
          η      learning_rate  step size, > 0                                  plan
          E_i    passes         passes of a round over a site's records, > 0    plan
                 local_steps    the most steps of a site in a round             plan
          τ_i    "steps"        min(local_steps, E/q_i), at least 1             the sites, public
          d_i                   (w̄ - w_i) / (η τ_i), the mean of its gradients
Client    w_i ← w̄;  τ_i times: w_i ← w_i - η g(w_i), g on a Poisson batch of its own
          upload u_i = w̄ + (w_i - w̄)/τ_i, and τ_i
Server    w ← w̄ + τ_eff Σ p_i (u_i - w̄) = w̄ - τ_eff η Σ p_i d_i,  τ_eff = Σ p_i τ_i           (10)
Releases  τ_i gradient sums: τ_i events of the local_steps that are reserved
Neutral   equal τ_i give fedavg, up to rounding: with enough passes all τ_i are local_steps
Differs   SGD only, with a_i all ones and ‖a_i‖_1 = τ_i; the paper also has momentum and a proximal
          term. Weights p_i.

With one batch size B and N_i records, q_i = B/N_i and τ_i = E N_i/B: the mean of w_i would count
larger sites twice, by their weights and by their steps. A site with fewer steps than local_steps
does not spend its whole reservation.
"""

from collections.abc import Iterable

import torch
from pydantic import Field

from fedpact.algorithms import MethodFacts, Neutral, Summed, fedavg
from fedpact.algorithms.common.steps import round_steps, sgd, weighted_mean
from fedpact.common.messages import Local, Reply, State, Task
from fedpact.privacy.oracle import Oracle, Range, Terms

NEUTRAL: Neutral | None = Neutral(parent="fedavg", settings={"passes": 1e9}, tolerance=1e-12)


class Settings(fedavg.Settings):
    """Symbols at the top."""

    local_steps: int = Field(default=10, ge=1)
    passes: float = Field(default=1.0, gt=0)


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(
        needs_all_sites="",
        summed=Summed(public=("steps",)),
        sums_releases=True,
        excludes={
            "local": "its movement over τ is a mean gradient only for plain steps",
            "local.head": "its reply has the movement over τ, and a head takes the whole of it",
        },
    )


def public_numbers(task: Task, terms: Terms, settings: Settings) -> dict[str, Range]:
    steps = float(_steps(task, terms.rate, settings))
    return {"steps": Range(steps, steps)}


def _steps(task: Task, rate: float, settings: Settings) -> int:
    """Return τ_i of a site with this sampling rate."""
    most = round_steps(task, settings.local_steps)
    return max(1, round(min(most, settings.passes / rate)))


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    told, steps = task.vectors["w"], _steps(task, oracle.sampling_rate, settings)
    w = sgd(oracle, told, steps, settings.learning_rate)
    return Local({"w": torch.lerp(told, w, 1 / steps)}, {"steps": float(steps)})


def update(state: State, replies: Iterable[Reply], settings: Settings) -> State:
    mean = weighted_mean(replies, numbers=("steps",))
    return State({"w": torch.lerp(state.vectors["w"], mean.vectors["w"], mean.numbers["steps"])})
