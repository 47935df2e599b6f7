"""FedExP. Jhunjhunwala, Wang, Joshi. FedExP: speeding up federated averaging via extrapolation.
arXiv 2301.09604.

Symbols   paper  code           meaning, unit or range                        who chooses it
          η_l    learning_rate  η, step size of a site, > 0                   plan
          τ      local_steps    local iterations of a round, >= 1             plan
          ε      damping        > 0; the larger, the nearer to fedavg         plan
          Δ_i                   w_i - w̄, a site's movement
          D_i    "moved"        ‖Δ_i‖² less its noise's energy, >= 0          released
Client    w_i ← w̄;  τ times: w_i ← w_i - η g(w_i), g on a Poisson batch of its own
          upload w_i, D_i = max(0, ‖Δ_i‖² - τ η² d v_i), v_i the variance of a gradient's noise
Server    w ← w̄ + η_g Σ p_i Δ_i,  η_g = max(1, Σ p_i D_i / (2 (‖Σ p_i Δ_i‖² + ε)))            (6)
Releases  τ gradient sums: τ events. D_i follows from w_i and costs nothing further
Neutral   ε = ∞ gives fedavg: from 1e300 on, bit for bit
Differs   the energy of the gradients' noise is subtracted from D_i: otherwise, noise alone would
          make η_g half the number of sites. It stays in ‖Σ p_i Δ_i‖², as a step is along the noise
          as well: without it, a step of noise alone would have no limit. In a plain run v_i = 0.
          Weights p_i instead of even ones. The last w is the model, instead of the average of the
          last two. η_g <= most_extrapolation, which the paper does not need without noise.

If sites agree, Σ p_i D_i is ‖Σ p_i Δ_i‖² and η_g = 1; if their movements are orthogonal, η_g is
half the number of sites.
"""

from collections.abc import Iterable

import torch
from pydantic import Field

from fedpact.algorithms import MethodFacts, Neutral, fedavg
from fedpact.algorithms.common.steps import round_steps, sgd, weighted_mean
from fedpact.common.messages import Local, Reply, State, Task
from fedpact.privacy.oracle import Oracle

NEUTRAL: Neutral | None = Neutral(parent="fedavg", settings={"damping": 1e300})


class Settings(fedavg.Settings):
    """Symbols at the top."""

    local_steps: int = Field(default=5, ge=1)
    damping: float = Field(default=1e-3, gt=0)
    most_extrapolation: float = Field(default=20.0, ge=1)
    """The largest η_g."""


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(
        needs_all_sites="",
        needs_own_noise="a site subtracts its own noise's energy from the length that it sends",
        sums_releases=True,
        excludes={
            "server": "its extrapolation is already a step size of the server",
            "local": "it subtracts the noise of plain steps from a site's movement",
            "local.head": "its step follows from lengths, which would include the heads",
            "robust": "its step depends on lengths that sites report, so a lie could choose it",
        },
    )


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    start, steps = task.vectors["w"], round_steps(task, settings.local_steps)
    w = sgd(oracle, start, steps, settings.learning_rate)
    energy = steps * settings.learning_rate**2 * len(w) * oracle.noise_variance
    return Local({"w": w}, {"moved": max(0.0, _square(w - start) - energy)})


def update(state: State, replies: Iterable[Reply], settings: Settings) -> State:
    start, mean = state.vectors["w"], weighted_mean(replies, numbers=("moved",))
    together = _square(mean.vectors["w"] - start)
    longer = mean.numbers["moved"] / (2 * (together + settings.damping))
    # In this order NaN becomes 1.
    scale = min(max(1.0, longer), settings.most_extrapolation)
    return State({"w": torch.lerp(start, mean.vectors["w"], scale)})


def _square(vector: torch.Tensor) -> float:
    return float(vector.double().square().sum())
