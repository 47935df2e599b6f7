"""ALI-DPFL. Ling, Fu, Wang, Liu, Chen. ALI-DPFL: differentially private federated learning with
adaptive local iterations. arXiv 2308.10457. Its plain form chooses τ alike, without noise.

Symbols   paper  code              meaning, unit or range                        who chooses it
          η      learning_rate     step size, > 0                                plan
          κ      kappa             φλ² > 0: the larger, the more local work      plan, or 10 ρ²
          R_c    iterations        local iterations of all rounds, or None       plan, or the sites
          R_s    rounds left       by plan.rounds and budgets of bytes, seconds  plan
          τ_m    most_local_steps  the most of a round, in 1..100                plan
          ρ β ξ                    estimates, means over sites and rounds        released
Client    as FedAvg, with the round's τ; also sends the numbers of common.tau_site
Server    w ← Σ p_i w_i
          T(τ) = min(iterations left, τ · rounds left)
          τ ← argmax T(τ) (η - ρ h(τ)/(τκ)) over 1..min(2τ, τ_m), h from common.tau_control
Releases  τ gradient sums: τ events. The numbers follow from them and cost nothing.
Bounds    w_i as fedavg, with the round's τ; the numbers as common.tau_control.Controller
Neutral   most_local_steps = 1 gives fedavg with τ = 1, bit for bit; so does R_s >= R_c
Differs   The bracket of h, and T as a function of τ: docs/notes/errata.md, A1 and A5.
          φ and λ are unknown, and only κ changes the minimum.
          ρ, β and ξ are estimated from noisy gradients instead of the records (estimator "raw" is
          the paper's; it leaves the sites unprotected, as the report says). They are root mean
          squares over the sites. Without a clear estimate τ is the budgets' even split.
          The last round is shortened, so that no site's budget is exceeded.
"""

from collections.abc import Iterable

from pydantic import Field
from torch import Tensor

from fedpact.algorithms import BaseSettings, MethodFacts, Neutral, Summed, fedavg
from fedpact.algorithms.common.steps import weighted_mean
from fedpact.algorithms.common.tau_control import Ali, Controller
from fedpact.common.messages import Local, Reply, State, Task
from fedpact.privacy.oracle import Oracle, Range, Terms

NEUTRAL: Neutral | None = Neutral(
    parent="fedavg", settings={"most_local_steps": 1}, parent_settings={"local_steps": 1}
)


class Settings(BaseSettings, Ali):
    """Symbols at the top, and algorithms.common.tau_control.Ali."""

    learning_rate: float = Field(default=0.5, gt=0)

    @property
    def controller(self) -> Controller:
        """The controller that chooses τ."""
        return Controller(self, self.learning_rate)


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(
        task_numbers=settings.controller.task_numbers,
        controlled=True,
        iterations=settings.iterations,
        unprotected=settings.estimator == "raw",
        summed=Summed(
            why_not="its controller needs the minimum of the sites' remaining steps and squares "
            "of each site's vector"
        ),
        needs_all_sites="its τ depends on the remaining budget of every site, and its estimates "
        "need all of them",
        excludes={
            "control": "it chooses τ itself, as fedavg with [control] does",
            "robust": "its controller reads single replies, so one lie moves its estimates",
            "local": "its controller's estimates assume plain steps",
            "local.head": "its controller's estimates compare the sites' gradients at one model",
            "privacy.clip_schedule": "its controller's estimates assume a constant clip",
        },
    )


def steps(settings: Settings, state: State | None = None) -> int:
    """Return τ of the next round; 0 if the iterations are used up."""
    return settings.controller.steps(state)


def init(w: Tensor, settings: Settings) -> State:
    return settings.controller.init(State({"w": w}))


def task(state: State, settings: Settings) -> State:
    return settings.controller.task(state, lambda rest: rest)


def public_numbers(task: Task, terms: Terms, settings: Settings) -> dict[str, Range]:
    return settings.controller.public_numbers(task, terms)


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    solver = fedavg.Settings(learning_rate=settings.learning_rate)

    def inner(task: Task, oracle: Oracle, memory: State) -> Local:
        return fedavg.local(task, oracle, memory, solver)

    return settings.controller.local(task, oracle, memory, inner)


def update(state: State, replies: Iterable[Reply], settings: Settings) -> State:
    return settings.controller.update(state, replies, lambda _, replies: weighted_mean(replies))
