"""FedAvg; its private form is DP-FedAvg. McMahan, Moore, Ramage, Hampson, Agüera y Arcas.
Communication-efficient learning of deep networks from decentralized data. arXiv 1602.05629.
The private form is Algorithm 1 of ALI-DPFL (Ling, Fu, Wang, Liu, Chen. arXiv 2308.10457).

Symbols   paper  code           meaning, unit or range                        who chooses it
          η      learning_rate  step size, > 0                                plan
          τ      local_steps    local iterations of a round, >= 1             plan
          p_i    weight         N_i / Σ N, N_i the site's declared size       the sites
Client    w_i ← w;  τ times: w_i ← w_i - η g(w_i), g on a Poisson batch of its own
Server    w ← Σ p_i w_i
Releases  τ gradient sums: τ events
Neutral   none: other algorithms reduce to FedAvg
Differs   Poisson batches, divided by their expected size, instead of epochs over shuffled batches;
          a fixed number of sites (sites_per_round, by default all) instead of a fraction C.
          The weights p_i are over the sites that take part.
"""

from collections.abc import Iterable

from pydantic import Field
from torch import Tensor

from fedpact.algorithms import BaseSettings, MethodFacts, Neutral
from fedpact.algorithms.common.steps import round_steps, sgd, weighted_mean
from fedpact.common.messages import Local, Reply, State, Task
from fedpact.privacy.oracle import Oracle, Range, Terms

NEUTRAL: Neutral | None = None


class Settings(BaseSettings):
    """Symbols at the top."""

    learning_rate: float = Field(default=0.5, gt=0)
    local_steps: int = Field(default=1, ge=1)


def facts(settings: Settings) -> MethodFacts:
    why = why_own_noise(settings.local_steps)
    return MethodFacts(needs_all_sites="", needs_own_noise=why, sums_releases=True)


def why_own_noise(steps: int) -> str:
    """Return why shared noise would not protect this number of SGD steps, or ""."""
    if steps == 1:
        return ""
    return (
        f"with settings.local_steps = {steps} a site's later steps start from its own noisy ones, "
        "which only its own noise hides; use 1"
    )


def steps(settings: Settings, state: State | None = None) -> int:
    return settings.local_steps


def init(w: Tensor, settings: Settings) -> State:
    return State({"w": w})


def task(state: State, settings: Settings) -> State:
    return state


def public_numbers(task: Task, terms: Terms, settings: Settings) -> dict[str, Range]:
    return {}


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    steps = round_steps(task, settings.local_steps)
    w = sgd(oracle, task.vectors["w"], steps, settings.learning_rate)
    return Local({"w": w})


def update(state: State, replies: Iterable[Reply], settings: Settings) -> State:
    return weighted_mean(replies)
