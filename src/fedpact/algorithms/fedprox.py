"""FedProx. Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated optimization in heterogeneous
networks. arXiv 1812.06127.

Symbols   paper  code           meaning, unit or range                        who chooses it
          η      learning_rate  step size, > 0                                plan
          τ      local_steps    local iterations of a round, >= 1             plan
          μ      proximal       weight of the proximal term, >= 0             plan
          w̄      "w"            the broadcast model                           server
Client    w_i ← w̄;  τ times: w_i ← w_i - η (g(w_i) + μ (w_i - w̄)), g on a Poisson batch of its own:
          steps on F_i(w) + (μ/2)‖w - w̄‖²                                     (2)
Server    w ← Σ p_i w_i
Releases  τ gradient sums: τ events
Neutral   μ = 0 gives fedavg, bit for bit
Differs   τ steps for every site, instead of a solution to a local inexactness γ_i; all sites take
          part with weights p_i, instead of sampling them by p_i and averaging evenly.

The proximal term depends on no record: it needs no clip and no noise, and damps the gradients'
noise. A step along w - w̄ overshoots at η μ > 1; η μ >= 2 diverges and is refused. At τ = 1 it is
fedavg for every μ.
"""

from typing import Self

from pydantic import Field, model_validator

from fedpact.algorithms import MethodFacts, Neutral, fedavg
from fedpact.algorithms.common.steps import proximal_sgd, round_steps
from fedpact.common.errors import PlanError
from fedpact.common.messages import Local, State, Task
from fedpact.privacy.oracle import Oracle

NEUTRAL: Neutral | None = Neutral(parent="fedavg", settings={"proximal": 0.0})


class Settings(fedavg.Settings):
    """Symbols at the top."""

    local_steps: int = Field(default=5, ge=1)
    proximal: float = Field(default=0.1, ge=0)

    @model_validator(mode="after")
    def _contracts(self) -> Self:
        if not self.learning_rate * self.proximal < 2:
            raise PlanError(
                f"learning_rate = {self.learning_rate:g} and proximal = {self.proximal:g}: "
                "expected a product below 2, as beyond it the local steps diverge from the "
                "broadcast model; lower either"
            )
        return self


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(needs_all_sites="", sums_releases=True)


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    steps = round_steps(task, settings.local_steps)
    rate, centre = settings.learning_rate, task.vectors["w"]
    return Local({"w": proximal_sgd(oracle, centre, steps, rate, settings.proximal)})
