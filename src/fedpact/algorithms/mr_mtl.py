"""MR-MTL, mean-regularised multi-task learning. Liu, Hu, Wu, Smith. On privacy and personalization
in cross-silo federated learning. arXiv 2206.07902.

Symbols   paper  code           meaning, unit or range                              who chooses it
          η      learning_rate  step size, > 0                                      plan
          τ      local_steps    local iterations of a round, >= 1                   plan
          λ      proximal       weight of the proximal term, >= 0                   plan
          κ      proximal_noise its increase with a site's noise, >= 0              plan
          β      average_decay  of the average of a site's own models, in [0, 1)    plan
          λ_i                   λ + κ v_i, v_i the variance of its gradient's noise
          w_k    memory "w"     w_i, the site's own model after its steps [d]       released
          w̄      "w"            Σ p_i w_i, the sites' mean [d]                      released
          b_i                   1 / (1 + ητλ_i), by which a round shrinks w_i - w̄
Client    w_i ← w̄ + b_i (w_i - w̄), from w_i = w̄ in its first round
          τ times: w_i ← w_i - η g(w_i), g on a Poisson batch of its own
          upload u_i = w̄ - η Σ g: w̄ plus the round's movement of w_i
          Its own model is w̄ + b_i (w_i - w̄), with its newest w̄; for β > 0, the exponential
          average of these over its rounds, which does not affect the steps
Server    w̄ ← Σ p_i u_i, which at κ = 0 is Σ p_i w_i, as Σ p_i (w_i - w̄) was 0 before
Bounds    u_i - w̄ = -η Σ g, whatever w_i is: fedavg's
Releases  τ gradient sums: τ events. w_i follows from them and costs nothing further
Neutral   λ = ∞ (from 1e300, where b_i = 0) gives fedavg, bit for bit; with privacy also κ = ∞
          λ = κ = 0 is local training, bit for bit: the baseline "local with privacy"
          Both without compression, which would round the two differently
Differs   the paper's step includes -ηλ (w_i - w̄), with the w̄ of the round before. Here each round
          ends with a proximal step of length ητ on (λ/2) Σ p_i ‖w_i - w̄‖², over all w_i jointly: it
          keeps their mean and shrinks every w_i - w̄ by b. It is stable for every λ, with the same
          fixed point at τ = 1: the optimum of Σ p_i (F_i(w_i) + λ/2 ‖w_i - w̄‖²) over all w_i.
          κ is ours: the paper's sites have one λ. With different λ_i, the fixed point is the
          optimum of Σ p_i (F_i(w_i) + λ_i/2 ‖w_i - w̄‖²) over all w_i and w̄, as Σ p_i ∇F_i(w_i) is 0
          there; w̄ is then Σ p_i λ_i w_i / Σ p_i λ_i.
          Every site takes part, with weights p_i; the paper's are even.
          If a site stops, or returns with an old w_i, Σ p_i (w_i - w̄) is not 0; it then shrinks by
          b a round.

w_i has its own noise of some 1/(ητλ_i) rounds, and little of the others', as w̄ has the mean's. So a
small ε needs a larger λ, and different sites a smaller one. In directions with a flat loss, the
noise in w_i - w̄ has a variance of about η v_i / (2 λ_i) a coordinate. With one λ, a site with a
tenth of the records has a hundred times as much; with λ_i = κ v_i all sites have η / (2 κ), for any
size, ε and number of rounds. v_i is public (Terms.noise_variance). A site's own model is computed
from released numbers and is as private as w̄; it is evaluated at its site, w̄ on the public test set.
"""

from typing import Final

from pydantic import Field
from torch import Tensor

from fedpact.algorithms import MethodFacts, Neutral, fedavg
from fedpact.algorithms.common.steps import round_steps
from fedpact.common.messages import Local, State, Task
from fedpact.privacy.oracle import Oracle

_NOISE: Final = "noise"
"""Name of v_i, of w_i's round, in a site's memory; stored if κ is not 0."""

_AVERAGE: Final = "average"
_COUNT: Final = "averaged"
"""Names of the average of earlier own models, and of their number; stored if β > 0."""

NEUTRAL: Neutral | None = Neutral(parent="fedavg", settings={"proximal": 1e300})


class Settings(fedavg.Settings):
    """Symbols at the top."""

    proximal: float = Field(default=0.01, ge=0)
    proximal_noise: float = Field(default=0.0, ge=0)
    average_decay: float = Field(default=0.0, ge=0, lt=1)

    def own_model(self, w: Tensor, memory: State) -> Tensor | None:
        held = _hold(w, memory, self, self.local_steps)
        return _average(held, memory, self)[0] if _averages(memory, self) else held


def facts(settings: Settings) -> MethodFacts:
    # A site remembers its w_i, so noise cannot be shared even if τ = 1.
    return MethodFacts(
        needs_all_sites="its proximal term uses the mean of all sites' models",
        sums_releases=True,
        excludes={
            "fairness": "a site's loss would be that of an unused model, as its own is not sent",
            "control": "its estimates compare the sites' gradients at one model, and here each "
            "site has its own",
            "local": "its proximal step assumes the length of plain steps",
            "server": "its proximal term uses the sites' mean, which an optimiser's model is not",
            "local.head": "each site already has its own model",
        },
    )


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    steps, rate = round_steps(task, settings.local_steps), settings.learning_rate
    held = _hold(task.vectors["w"], memory, settings, steps)
    # Two sums of the same steps: at b = 0 both are fedavg's, bit for bit.
    sent, own = task.vectors["w"].clone(), held.clone()
    for batch in oracle.batches(steps, "gradient"):
        step = batch.gradient(own)
        own.add_(step, alpha=-rate)
        sent.add_(step, alpha=-rate)
    kept, numbers = {"w": own}, dict[str, float]()
    if settings.proximal_noise:
        numbers[_NOISE] = oracle.noise_variance
    if _averages(memory, settings):
        kept[_AVERAGE], numbers[_COUNT] = _average(held, memory, settings)
    return Local({"w": sent}, memory=State(kept, numbers))


def _averages(memory: State, settings: Settings) -> bool:
    """Whether to average own models: not before a site's first round."""
    return settings.average_decay > 0 and "w" in memory.vectors


def _average(held: Tensor, memory: State, settings: Settings) -> tuple[Tensor, int]:
    """Return the average of the own models up to `held`, and their number.

    As wrappers.optimizers averages the server's models.
    """
    count, beta = int(memory.numbers.get(_COUNT, 0)) + 1, settings.average_decay
    before = memory.vectors.get(_AVERAGE, held)
    return before.lerp(held, (1 - beta) / (1 - beta**count)), count


def _hold(mean: Tensor, memory: State, settings: Settings, steps: int) -> Tensor:
    """Return w̄ + b_i (w_i - w̄), after `steps` steps; w̄ before a site's first round."""
    own = memory.vectors.get("w")
    if own is None:
        return mean
    weight = settings.proximal + settings.proximal_noise * memory.numbers.get(_NOISE, 0.0)
    held = mean.lerp(own, 1 / (1 + settings.learning_rate * steps * weight))
    # Do not keep a model that is no longer finite.
    return held if bool(held.isfinite().all()) else mean
