"""FedExP. Jhunjhunwala, Wang, Joshi. FedExP: speeding up federated averaging via extrapolation.
arXiv 2301.09604.

Symbols   paper  code           meaning, unit or range                        who chooses it
          η_l    learning_rate  η, step size of a site, > 0                   plan
          τ      local_steps    local iterations of a round, >= 1             plan
          ε      damping        > 0; the larger, the nearer to fedavg         plan
          Δ_i                   w_i - w̄, a site's movement
          D_i    "moved"        ‖Δ_i‖² less its noise's energy, >= 0          released
          n_i    "noise"        τ η² d v_i, the energy of a movement's noise  the sites, public
Client    w_i ← w̄;  τ times: w_i ← w_i - η g(w_i), g on a Poisson batch of its own
          upload w_i, D_i = max(0, ‖Δ_i‖² - n_i), n_i
Server    w ← w̄ + η_g Σ p_i Δ_i,  η_g = max(1, Σ p_i D_i / (2 (D + ε))),                     (6)
          D = max(0, ‖Σ p_i Δ_i‖² - Σ p_i² n_i)
Releases  τ gradient sums: τ events. D_i follows from w_i and costs nothing further
Neutral   ε = ∞ gives fedavg: from 1e300 on, bit for bit
Differs   the energy of the gradients' noise is subtracted from both lengths: otherwise, noise alone
          would make η_g half the number of sites. In a plain run n_i = 0.
          Weights p_i instead of even ones. The last w is the model, instead of the average of the
          last two. η_g <= most_extrapolation, which the paper does not need without noise.

If sites agree, Σ p_i D_i = D and η_g = 1; if their movements are orthogonal, η_g is half the number
of sites.
"""

from collections.abc import Iterable, Iterator

import torch
from pydantic import Field

from fedpact.algorithms import MethodFacts, Neutral, Summed, fedavg
from fedpact.algorithms.common.steps import round_steps, sgd, weighted_mean
from fedpact.common.messages import Local, Reply, State, Task
from fedpact.privacy.oracle import Oracle, Range, Terms, nearly

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
        summed=Summed(public=("noise",)),
        needs_own_noise="a site subtracts its own noise's energy from the length that it sends",
        sums_releases=True,
        excludes={
            "server": "its extrapolation is already a step size of the server",
            "local": "it subtracts the noise of plain steps from a site's movement",
            "local.head": "its step follows from lengths, which would include the heads",
            "robust": "its step depends on lengths that sites report, so a lie could choose it",
        },
    )


def public_numbers(task: Task, terms: Terms, settings: Settings) -> dict[str, Range]:
    energy = _energy(task, terms.noise_variance, settings)
    return {"noise": nearly(energy)}


def _energy(task: Task, variance: float, settings: Settings) -> float:
    """Return n_i for noise of this variance in each coordinate of a gradient."""
    steps, rate = round_steps(task, settings.local_steps), settings.learning_rate
    return steps * rate**2 * len(task.vectors["w"]) * variance


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    start, steps = task.vectors["w"], round_steps(task, settings.local_steps)
    w = sgd(oracle, start, steps, settings.learning_rate)
    energy = _energy(task, oracle.noise_variance, settings)
    moved = max(0.0, _square(w - start) - energy)
    return Local({"w": w}, {"moved": moved, "noise": energy})


def update(state: State, replies: Iterable[Reply], settings: Settings) -> State:
    start, energies = state.vectors["w"], list[tuple[float, float]]()

    def noted() -> Iterator[Reply]:
        for reply in replies:
            energies.append((reply.weight, reply.numbers["noise"]))
            yield reply

    mean = weighted_mean(noted(), numbers=("moved",))
    total = sum(weight for weight, _ in energies)
    noise = sum((weight / total) ** 2 * energy for weight, energy in energies)
    together = max(0.0, _square(mean.vectors["w"] - start) - noise)
    longer = mean.numbers["moved"] / (2 * (together + settings.damping))
    # In this order NaN becomes 1.
    scale = min(max(1.0, longer), settings.most_extrapolation)
    return State({"w": torch.lerp(start, mean.vectors["w"], scale)})


def _square(vector: torch.Tensor) -> float:
    return float(vector.double().square().sum())
